"""Averages gradients over the ranks, where no wrapper does it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..norms import local
from .base import Engine

BUCKET_BYTES = 25 * 2**20  # as DDP's own buckets
UNUSED, DENSE, SPARSE = range(3)


def average(
    engine: Engine,
    parameters: Sequence[nn.Parameter],
    is_zeroed: Callable[[nn.Parameter], bool] = lambda _: False,
    copies_of: Callable[[nn.Parameter], dist.ProcessGroup | None] | None = None,
) -> None:
    """Sums gradients over the ranks and divides by the divisor; call it on all ranks, with the same parameters.

    Costs one reduction per bucket, and one small collective on the host to tell which kinds of gradients ranks have.
    Gradients that no rank has stay None; zeros that stand for none (`is_zeroed`) become it. `copies_of` gives the group
    that replicates this rank's part of a parameter (default: all ranks; None: no other); backward summed over the rest.
    """
    if not parameters:
        return
    everyone: Any = engine.peers.group
    groups = [everyone if copies_of is None else copies_of(one) for one in parameters]
    used = [one.grad if one.grad is not None and not is_zeroed(one) else None for one in parameters]
    kinds = largest([UNUSED if one is None else SPARSE if one.is_sparse else DENSE for one in used], engine)
    buckets: list[tuple[Any, list[Tensor]]] = []  # with their groups: the whole gradient is never copied
    room: dict[tuple[Any, ...], int] = {}  # bytes left in the last bucket of each kind
    filling: dict[tuple[Any, ...], list[Tensor]] = {}
    one: Any
    for one, group, kind in zip(parameters, groups, kinds, strict=True):
        if kind == UNUSED:
            one.grad = None
        elif kind == SPARSE:
            assert group is not None  # no DTensor is sparse
            one.grad = ((_no_rows(one) if one.grad is None else one.grad) / engine.divisor).coalesce()
            dist.all_reduce(one.grad, group=group)
        else:
            if one.grad is None:
                one.grad = torch.zeros_like(one)
            settle_placements(one)
            gradient = local(one.grad)
            if group is None:
                gradient.div_(engine.divisor)
            else:
                like = group, gradient.device, gradient.dtype
                if room.get(like, 0) <= 0:
                    room[like], filling[like] = BUCKET_BYTES, []
                    buckets.append((group, filling[like]))
                room[like] -= gradient.nbytes
                filling[like].append(gradient)
    for group, bucket in buckets:
        flat = torch.cat([gradient.reshape(-1) for gradient in bucket]).div_(engine.divisor)
        dist.all_reduce(flat, group=group)
        pieces = torch.split(flat, [gradient.numel() for gradient in bucket])
        for gradient, piece in zip(bucket, pieces, strict=True):
            gradient.copy_(piece.view(gradient.shape))


def largest(values: Iterable[int], engine: Engine) -> list[int]:
    """The maximum over the ranks of each of these small numbers, through the host."""
    return list(map(int, engine.peers.largest(list(map(float, values)))))


def _no_rows(parameter: Tensor) -> Tensor:
    """The sparse gradient of an embedding in which nothing was looked up."""
    rows = torch.empty((1, 0), dtype=torch.int64, device=parameter.device)
    values = parameter.new_empty((0, *parameter.shape[1:]))
    return torch.sparse_coo_tensor(rows, values, parameter.shape, device=values.device, check_invariants=False)


def settle_placements(parameter: Any) -> None:
    """Sums a DTensor's gradient over tensor-parallel ranks if it is still partial; zeros on another rank are not."""
    gradient = parameter.grad
    if any(placement.is_partial() for placement in getattr(gradient, "placements", ())):
        parameter.grad = gradient.redistribute(placements=parameter.placements)
