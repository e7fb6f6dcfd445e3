"""GradScaler: unscaling once, agreeing on overflow over the ranks, and clearing the marks that a window leaves.

Uses private names of torch 2.9 to 2.15: which optimizers a scaler has unscaled, their overflow flags, and its scale.
The public way reads the device, or all gradients again. If a name is missing: AttributeError, before any step.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from .law import DistaccumError
from .private import version_of

# Nodes at the end of a loss's graph that leave it a multiple of what came before.
ENDS = "MulBackward0", "DivBackward0", "AddBackward0"


def unscale(scaler: GradScaler, optimizers: Sequence[Optimizer], stamp: object) -> list[Tensor]:
    """Divides gradients by the scale, once, if `stamp` still identifies it; returns this rank's overflow flags."""
    if stamp is not None and stamp != stamp_of_scale(scaler):
        raise DistaccumError(
            "the GradScaler's scale was updated while this window was open (by another Accumulator's step(), or "
            "scaler.update()), so the gradient cannot be unscaled and the window is discarded; finish one window "
            "before the next begins, or give each Accumulator a GradScaler of its own"
        )
    flags: list[Tensor] = []
    sharded = sys.modules.get("torch.distributed.fsdp.sharded_grad_scaler")
    # It sums its flags over ranks, so a rank whose shards have no gradient must take part too.
    waits = sharded is not None and isinstance(scaler, sharded.ShardedGradScaler)
    for optimizer in optimizers:
        if not waits and not any(p.grad is not None for group in optimizer.param_groups for p in group["params"]):
            # Otherwise the scaler deems it unscaled until an update() that finds gradients.
            continue
        try:
            scaler.unscale_(optimizer)
        except RuntimeError as error:
            # The caller may have unscaled them, to look at them.
            if "already been called" not in str(error):
                raise
        flags += scaler._found_inf_per_device(optimizer).values()
    return flags


def note_overflow(scaler: GradScaler, optimizers: Sequence[Optimizer], overflow: Tensor) -> None:
    """Gives the scaler the flag of all ranks, for its `update()` to read, even if this rank has no gradient."""
    for optimizer in optimizers:
        scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = {overflow.device: overflow.float()}


def forget(scaler: GradScaler | None, optimizers: Sequence[Optimizer]) -> None:
    """Lets the gradients of these optimizers (all, if none are given) be unscaled again; leaves the scale alone."""
    if scaler is not None:
        for key in list(map(id, optimizers)) or list(scaler._per_optimizer_states):
            scaler._per_optimizer_states.pop(key, None)


def has_unscaled(scaler: GradScaler, optimizers: Sequence[Optimizer]) -> bool:
    """Tells whether the scaler has unscaled gradients of one of these optimizers (of any, if none are given)."""
    states: Any = scaler._per_optimizer_states
    asked = [states.get(id(optimizer), {}) for optimizer in optimizers] if optimizers else states.values()
    return any(state.get("found_inf_per_device") for state in asked)


def stamp_of_scale(scaler: GradScaler, device: torch.device | None = None) -> object:
    """A value that changes whenever the scale is set. Makes a scale on `device` if there is none; never reads it."""
    if scaler._scale is None:
        scaler.scale(torch.zeros((), device=device))
    scale: Any = scaler._scale
    return None if scale.is_inference() else (id(scale), version_of(scale))


def is_scaled(loss: Tensor, scaler: GradScaler | None) -> bool:
    """Tells whether `loss` came from `scale()` of this scaler (None: of any): its product saves the scale for backward.

    Divisions and sums may follow. Any scaler is found among all objects alive, and only if the loss is such a product.
    """
    node: Any = loss.grad_fn
    while type(node).__name__ in ENDS:
        factor = getattr(node, "_saved_other", None)
        if isinstance(factor, Tensor) and not factor.ndim and factor.dtype is torch.float32:
            alive = gc.get_objects() if scaler is None else [scaler]
            scales: list[Any] = [one._scale for one in alive if issubclass(type(one), GradScaler)]
            if any(scale is not None and scale.data_ptr() == factor.data_ptr() for scale in scales):
                return True
        node = node.next_functions[0][0]
    return False
