"""Gradients averaged by the library, where no wrapper does it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..norms import local

BUCKET_BYTES = 25 * 2**20  # as DDP's own buckets
UNUSED, DENSE, SPARSE = range(3)


def average_by_hand(
    parameters: Sequence[nn.Parameter],
    copies_of: Callable[[nn.Parameter], dist.ProcessGroup | None],
    hosts: dist.ProcessGroup,
    divisor: float,
    is_zeroed: Callable[[nn.Parameter], bool] = lambda _: False,
) -> None:
    """Sums gradients over `copies_of` and divides by `divisor`, a bucket at a time; those that no rank has stay None.

    Costs one reduction per bucket, and one small collective on the host for the kinds of gradients that ranks have.
    Over the ranks that a parameter is cut over, backward has summed its gradient already; None: over all.
    """
    used = [one.grad if one.grad is not None and not is_zeroed(one) else None for one in parameters]
    found = [UNUSED if one is None else SPARSE if one.is_sparse else DENSE for one in used]
    kinds = torch.tensor(found, dtype=torch.uint8, device="cpu")
    dist.all_reduce(kinds, op=dist.ReduceOp.MAX, group=hosts)
    dense: dict[dist.ProcessGroup, list[Any]] = {}
    for one, kind in zip(parameters, kinds.tolist(), strict=True):
        if kind == UNUSED:
            one.grad = None
            continue
        group = copies_of(one)
        if kind == SPARSE:
            assert group is not None  # DTensors have none
            one.grad = ((no_rows(one) if one.grad is None else one.grad) / divisor).coalesce()
            dist.all_reduce(one.grad, group=group)
        else:
            if one.grad is None:
                one.grad = torch.zeros_like(one)
            settle_placements(one)
            if group is None:
                local(one.grad).div_(divisor)
            else:
                dense.setdefault(group, []).append(one)

    for group, parts in dense.items():
        for gradients in _in_buckets([local(one.grad) for one in parts]):  # no copy of the whole gradient
            flat = torch.cat([gradient.reshape(-1) for gradient in gradients]).div_(divisor)
            dist.all_reduce(flat, group=group)
            pieces = torch.split(flat, [gradient.numel() for gradient in gradients])
            for gradient, piece in zip(gradients, pieces, strict=True):
                gradient.copy_(piece.view(gradient.shape))


def unlike(parameters: Sequence[nn.Parameter], hosts: dist.ProcessGroup) -> list[nn.Parameter]:
    """The trained ones of `parameters` whose values differ over ranks by more than rounding.

    Sums of other parameters differ by about their norm; copies may be off by the order of a sum (of sparse rows).
    Costs one read of the device, and one small collective on the host.
    """
    values: list[Any] = [local(one.detach()) for one in parameters]
    values = [torch.view_as_real(one) if one.is_complex() else one for one in values]
    sums = [torch.sum(one, dtype=torch.float64).to(values[0].device) for one in values]
    norms = [torch.linalg.vector_norm(one, dtype=torch.float64).to(values[0].device) for one in values]
    above, size = torch.stack([torch.stack(sums), torch.stack(norms)]).cpu()
    below = -above
    frozen = torch.tensor([not one.requires_grad for one in parameters])  # on this rank
    found = torch.stack([above.masked_fill(frozen, -torch.inf), below.masked_fill(frozen, -torch.inf), size])
    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=hosts)
    above, below, size = found
    differ = (above + below > 1e-3 * size).tolist()
    return [one for one, differs in zip(parameters, differ, strict=True) if differs]


def sparse_embeddings(models: Iterable[nn.Module]) -> dict[str, Tensor]:
    """The tables whose gradients hold only the rows that were looked up, by the names of their modules."""
    named = [(name, one) for model in models for name, one in model.named_modules()]
    return {name: one.weight for name, one in named if isinstance(one, nn.Embedding | nn.EmbeddingBag) and one.sparse}


def settle_placements(parameter: Any) -> None:
    """Sums a DTensor's gradient over tensor-parallel ranks if it is still partial, as zeros on another rank are not."""
    gradient = parameter.grad
    if any(placement.is_partial() for placement in getattr(gradient, "placements", ())):
        parameter.grad = gradient.redistribute(placements=parameter.placements)


def _in_buckets(gradients: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    sizes: dict[tuple[torch.device, torch.dtype], int] = {}
    for gradient in gradients:
        kind = gradient.device, gradient.dtype
        by_kind.setdefault(kind, []).append(gradient)
        sizes[kind] = sizes.get(kind, 0) + gradient.numel() * gradient.element_size()
        if sizes[kind] >= BUCKET_BYTES:
            yield by_kind.pop(kind)
            del sizes[kind]
    yield from by_kind.values()


def no_rows(parameter: Tensor) -> Tensor:
    """An embedding's gradient where nothing was looked up."""
    rows = torch.empty((1, 0), dtype=torch.int64, device=parameter.device)
    values = parameter.new_empty((0, *parameter.shape[1:]))
    return torch.sparse_coo_tensor(rows, values, parameter.shape, device=values.device, check_invariants=False)
