"""Averages gradients over the ranks, where no wrapper does it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..norms import local
from ..ranks import Groups
from .base import Engine

# The size of DDP's own buckets.
BUCKET_BYTES = 25 * 2**20
UNUSED, DENSE, SPARSE = range(3)


def average(
    engine: Engine,
    parameters: Sequence[nn.Parameter],
    is_zeroed: Callable[[nn.Parameter], bool] = lambda _: False,
    copies_of: Callable[[nn.Parameter], Groups] | None = None,
) -> None:
    """Sums gradients over the ranks and divides by the divisor; call it on all ranks, with the same parameters.

    Costs one reduction per bucket, and one small collective to tell which kinds of gradients ranks have.
    Gradients that no rank has stay None; zeros that stand for none (`is_zeroed`) become it. `copies_of`: the groups
    that replicate a part of a parameter (default: all ranks; none: no other); backward summed over the rest.
    """
    if not parameters:
        return
    used = [None if p.grad is None or is_zeroed(p) else p.grad for p in parameters]
    kinds = engine.peers.largest([UNUSED if g is None else SPARSE if g.is_sparse else DENSE for g in used])
    alike: dict[tuple[Any, ...], list[Tensor]] = {}
    parameter: Any
    for parameter, kind in zip(parameters, kinds, strict=True):
        groups = engine.peers.groups if copies_of is None else copies_of(parameter)
        if kind == UNUSED:
            parameter.grad = None
        elif kind == SPARSE:
            gradient = _no_rows(parameter) if parameter.grad is None else parameter.grad
            parameter.grad = (gradient / engine.divisor).coalesce()
            for group in groups:
                dist.all_reduce(parameter.grad, group=group)
        else:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            settle_placements(parameter)
            gradient = local(parameter.grad)
            alike.setdefault((groups, gradient.device, gradient.dtype), []).append(gradient)
    for (groups, *_), gradients in alike.items():
        # So many at a time, in order, that the whole gradient is never copied.
        starts = accumulate((gradient.nbytes for gradient in gradients), initial=0)
        for _, pairs in groupby(zip(starts, gradients, strict=False), lambda pair: pair[0] // BUCKET_BYTES):
            bucket = [gradient for _, gradient in pairs]
            flat = torch.cat([gradient.reshape(-1) for gradient in bucket]).div_(engine.divisor)
            for group in groups:
                dist.all_reduce(flat, group=group)
            for gradient, piece in zip(bucket, torch.split(flat, [g.numel() for g in bucket]), strict=True):
                gradient.copy_(piece.view(gradient.shape))


def averaged(engine: Engine, uncovered: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    """The parameters, of those that no wrapper reduces, that some rank may train."""
    # One outside of the models, such as a loss's own, may be frozen here and trained on another rank.
    inside = {id(p) for p in engine.parameters()}
    return [p for p in uncovered if p.requires_grad or id(p) not in inside]


def _no_rows(parameter: Tensor) -> Tensor:
    """The sparse gradient of an embedding in which nothing was looked up."""
    rows = torch.empty((1, 0), dtype=torch.int64, device=parameter.device)
    values = parameter.new_empty((0, *parameter.shape[1:]))
    # Torch 2.11 warns of checks that are left out, unless it is told so like this.
    with torch.sparse.check_sparse_tensor_invariants(enable=False):  # type: ignore[no-untyped-call]
        return torch.sparse_coo_tensor(rows, values, parameter.shape, device=values.device)


def settle_placements(parameter: Any) -> None:
    """Sums a DTensor's gradient over tensor-parallel ranks if it is still partial; zeros on another rank are not."""
    gradient = parameter.grad
    if any(placement.is_partial() for placement in getattr(gradient, "placements", ())):
        parameter.grad = gradient.redistribute(placements=parameter.placements)
