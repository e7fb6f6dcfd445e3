"""The gradient as a whole: loss scaling, its norm, clipping, and whether it is finite."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

HALF = (torch.float16, torch.bfloat16)


def unscale(scaler: GradScaler, optimizers: Sequence[Optimizer]) -> Tensor | None:
    """Divides each optimizer's gradients by the scale, once, and gives the number of overflows found.

    None where there was no gradient to look at.
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
    return torch.stack([flag.to(found[0].device) for flag in found]).sum() if found else None


def total_norm(gradients: Sequence[Tensor], norm_type: float) -> Tensor:
    dense = [gradient.coalesce().values() if gradient.is_sparse else gradient for gradient in gradients]
    return torch.nn.utils.get_total_norm(dense, norm_type)


def clip(parameters: Sequence[nn.Parameter], max_norm: float, norm: Tensor) -> None:
    """Scales gradients of norm `norm` to at most `max_norm`."""
    sparse = [p.grad for p in parameters if p.grad is not None and p.grad.is_sparse]
    dense = [p for p in parameters if p.grad is None or not p.grad.is_sparse]
    torch.nn.utils.clip_grads_with_norm_(dense, max_norm, norm)
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for gradient in sparse:
        gradient.mul_(factor.to(gradient.device))


def look_at(gradients: Sequence[Tensor], norm: Tensor | None) -> tuple[bool, Tensor | None]:
    """Whether every element is finite, and the norm. Where the norm is known one flag is read and no pass made."""
    if not gradients or (norm is not None and math.isfinite(norm.item())):
        return True, norm
    largest = total_norm(gradients, math.inf)  # which cannot overflow, as a sum of squares can
    if not math.isfinite(largest.item()):
        return False, norm
    if norm is not None:
        norm = largest * total_norm([gradient / largest for gradient in gradients], 2.0)
    return True, norm
