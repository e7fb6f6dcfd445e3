"""The gradient as a whole: loss scaling, its norm, clipping, and whether it is finite."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

HALF = (torch.float16, torch.bfloat16)


def unscale(scaler: GradScaler, optimizers: Sequence[Optimizer]) -> list[Tensor]:
    """Divides each optimizer's gradients by the scale, once, and gives the flags of overflow that `update` will read.

    None of them where there was no gradient to look at.
    """
    found: list[Tensor] = []
    for optimizer in optimizers:
        if not any(p.grad is not None for group in optimizer.param_groups for p in group["params"]):
            continue  # the scaler would take it for unscaled until the next update() that had something to look at
        try:
            scaler.unscale_(optimizer)
        except RuntimeError as error:
            if "already been called" not in str(error):  # the caller did, to look at the gradients
                raise
        # Private, and the only way to the flag without a second pass: GradScaler.step reads it too.
        found += scaler._found_inf_per_device(optimizer).values()
    return found


def update_without_gradients(scaler: GradScaler, overflows: Tensor) -> None:
    """What `scaler.update()` does, which refuses where it was shown no gradient. Private: the fields that it reads."""
    scale, growth = scaler._scale, scaler._growth_tracker
    if scale is not None and growth is not None:
        factors = scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()
        torch._amp_update_scale_(scale, growth, overflows.to(scale.device, torch.float32), *factors)


def refuse_mixed(optimizers: Sequence[Optimizer]) -> None:
    """What a GradScaler cannot unscale: DTensors and plain tensors in one list."""
    for optimizer in optimizers:
        if any(p.is_complex() for group in optimizer.param_groups for p in group["params"]):
            raise ValueError(
                f"scaler with a {type(optimizer).__name__} that holds complex parameters, which a GradScaler cannot "
                "unscale; leave the scaler out, or keep real parameters (torch.view_as_complex in the forward)"
            )
        kinds = {hasattr(p, "to_local") for group in optimizer.param_groups for p in group["params"]}
        if len(kinds) > 1:
            raise ValueError(
                f"scaler with a {type(optimizer).__name__} that holds sharded and plain parameters, which a GradScaler "
                "cannot unscale together; make an optimizer for each kind and pass both"
            )


def leaves(roots: Sequence[Tensor]) -> dict[int, Tensor]:
    """The tensors, by identity, whose gradient a backward from these roots adds to."""
    found: dict[int, Tensor] = {}
    seen, waiting = set(), [root.grad_fn for root in roots]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            if (variable := getattr(node, "variable", None)) is not None:
                found[id(variable)] = variable
            waiting += [following for following, _ in node.next_functions]
    return found


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, as a view; any other tensor itself."""
    to_local: Callable[[], Tensor] | None = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


def total_norm(gradients: Sequence[Tensor], kind: float, over: Tensor | None = None) -> Tensor:
    dense = [gradient.coalesce().values() if gradient.is_sparse else gradient for gradient in gradients]
    if math.isinf(kind):
        dense = [gradient for gradient in dense if gradient.numel()]  # nothing is the largest of none
    if over is not None:
        dense = [gradient / over.to(gradient.device) for gradient in dense]
    return torch.nn.utils.get_total_norm(dense, kind)


def clip(gradients: Sequence[Tensor], max_norm: float, norm: Tensor) -> None:
    """Scales gradients of norm `norm` to at most `max_norm`."""
    scale(gradients, torch.clamp(max_norm / (norm + 1e-6), max=1.0))  # as torch's


def scale(gradients: Sequence[Tensor], factor: Tensor | float) -> None:
    by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for gradient in gradients:
        if gradient.is_sparse:
            gradient.mul_(factor.to(gradient.device) if isinstance(factor, Tensor) else factor)
        else:
            by_kind.setdefault((gradient.device, gradient.dtype), []).append(local(gradient))
    for (device, _), alike in by_kind.items():
        torch._foreach_mul_(alike, factor.to(device) if isinstance(factor, Tensor) else factor)


class Norm(Protocol):
    """Of the whole gradient over all ranks, divided by `over`; `kind` is 2 or infinity."""

    def __call__(self, kind: float, over: Tensor | None = None) -> Tensor: ...


def look_at(norm_of: Norm, norm: Tensor | None) -> tuple[bool, Tensor | None]:
    """Whether every element is finite, and the norm. Where the norm is known one flag is read and no pass made."""
    if norm is not None and math.isfinite(norm.item()):
        return True, norm
    largest = norm_of(math.inf)  # which cannot overflow, as a sum of squares can
    if not math.isfinite(largest.item()):
        return False, norm
    return True, None if norm is None else largest * norm_of(2.0, largest)
