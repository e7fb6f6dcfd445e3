"""GradScaler, and fused optimizers that divide gradients as they step."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from .private import version_of


def unscale(scaler: GradScaler, optimizers: Sequence[Optimizer]) -> list[Tensor]:
    """Divides each optimizer's gradients by the scale, once, and gives the flags of overflow that `update` will read.

    None of them where there was no gradient to look at.
    """
    found: list[Tensor] = []
    sharded = sys.modules.get("torch.distributed.fsdp.sharded_grad_scaler")
    # It sums its flags over ranks, also of one whose shards have no gradient: all take part for each optimizer.
    waits = sharded is not None and isinstance(scaler, sharded.ShardedGradScaler)
    for optimizer in optimizers:
        if not waits and not any(p.grad is not None for group in optimizer.param_groups for p in group["params"]):
            continue  # the scaler would take it for unscaled until the next update() that had something to look at
        try:
            scaler.unscale_(optimizer)
        except RuntimeError as error:
            if "already been called" not in str(error):  # the caller did, to look at the gradients
                raise
        # Private, and the only way to the flag without a second pass: GradScaler.step reads it too.
        found += scaler._found_inf_per_device(optimizer).values()
    return found


def unscales_in_step(scaler: GradScaler, optimizers: Sequence[Optimizer]) -> bool:
    """Whether no pass need be made to unscale: the optimizers divide as they step, and the caller did not unscale.

    Private: which optimizers' gradients the scaler has looked at. A scaler of another kind has its own ways.
    """
    return (
        type(scaler) in (GradScaler, torch.cuda.amp.GradScaler)
        and divide_in_step(optimizers)
        and not any(scaler._found_inf_per_device(one) for one in optimizers)
    )


def tell(scaler: GradScaler, optimizers: Sequence[Optimizer], overflow: Tensor) -> None:
    """As if the scaler had looked at the gradients of these itself, so that its `update()` reads what was found.

    Private: where it keeps that.
    """
    for one in optimizers:
        if any(p.grad is not None for group in one.param_groups for p in group["params"]):
            scaler._per_optimizer_states[id(one)]["found_inf_per_device"] = {overflow.device: overflow}


def update_without_gradients(scaler: GradScaler, overflows: Tensor) -> None:
    """What `scaler.update()` does, which refuses where it was shown no gradient. Private: the fields that it reads."""
    scale, growth = scaler._scale, scaler._growth_tracker
    if scale is not None and growth is not None:
        factors = scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()
        torch._amp_update_scale_(scale, growth, overflows.to(scale.device, torch.float32), *factors)


def forget(scaler: GradScaler, optimizers: Sequence[Optimizer]) -> None:
    """Lets these optimizers' gradients be unscaled again, and leaves the scale alone.

    Private: where the scaler keeps what it unscaled. Only `update()` clears that publicly, for all optimizers at once;
    it does so where the name is missing, at the price of reading the scale.
    """
    states: Any = getattr(scaler, "_per_optimizer_states", None)
    if states is None:
        scaler.update(scaler.get_scale())
        return
    for one in optimizers:
        states.pop(id(one), None)


def stamp_of_scale(scaler: GradScaler) -> object:
    """Compares unequal to a later one if the scale was set in between; reads nothing from the device.

    None where that cannot be seen: no scale has been made yet, or a scaler of another kind keeps it elsewhere.
    Private: the scale's tensor, which `update()` writes in place, and its version counter.
    """
    scale: Tensor | None = getattr(scaler, "_scale", None)
    return None if scale is None or scale.is_inference() else (id(scale), version_of(scale))


def is_scaled_by(scaler: GradScaler, loss: Tensor) -> bool:
    """Whether `loss` came out of `scaler.scale()`, or a sum, a quotient or a mean of what did.

    By what its graph has saved. Private: the scale's tensor, which a scaler of another kind may not have, and what a
    node keeps without unpacking it (torch 2.13; hooks on saved tensors, as of checkpointing, would run else).
    """
    scale: Tensor | None = getattr(scaler, "_scale", None)
    waiting, seen = [loss.grad_fn], 0
    while scale is not None and waiting and seen < 16:
        node, seen = waiting.pop(0), seen + 1
        name = "" if node is None else node.name()
        if name == "MulBackward0":
            kept: Any = getattr(node, "_raw_saved_other", None)
            # Elsewhere than at the root, unpacking may be a checkpoint's, which would run a forward here.
            other = kept.data if hasattr(kept, "data") else getattr(node, "_saved_other", None) if seen == 1 else None
            if isinstance(other, Tensor) and other.device == scale.device and other.data_ptr() == scale.data_ptr():
                return True
        if name.startswith(("Mul", "Div", "Add", "Sum", "Mean", "Stack", "Unsqueeze", "ToCopy")):
            waiting += [following for following, _ in node.next_functions]  # type: ignore[union-attr]  # see above
    return False


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


def divide_in_step(optimizers: Sequence[Optimizer]) -> bool:
    """Whether all of these divide gradients in the kernel that steps (`fused=True`), as a GradScaler lets them.

    By the attributes that it sets, and takes away again: `grad_scale`, in float32, and `found_inf`. torch's own alone:
    a wrapper may show another's attributes, and keep to itself those that it is given. Not with hooks, which may look
    at gradients, nor of DTensors, whose kernels take no plain tensor beside them.
    """
    return bool(optimizers) and all(
        type(one).__module__.startswith("torch.optim.")
        and getattr(one, "_step_supports_amp_scaling", False)
        and all(group.get("fused") for group in one.param_groups)
        and all(getattr(hook, "__module__", "").startswith("distaccum.") for hook in _pre_hooks(one))
        and not any(hasattr(p, "to_local") or p.dtype == torch.float64 for g in one.param_groups for p in g["params"])
        for one in optimizers
    )


def _pre_hooks(optimizer: Optimizer) -> list[Any]:
    own: dict[int, Any] = getattr(optimizer, "_optimizer_step_pre_hooks", {})  # private, as is the other
    everyone: dict[int, Any] = getattr(sys.modules[Optimizer.__module__], "_global_optimizer_pre_hooks", {})
    return [*own.values(), *everyone.values()]


@contextmanager
def divided(optimizers: Sequence[Optimizer], by: Tensor | None) -> Iterator[None]:
    """In it each step divides the gradients first. `by` is a tensor, so that nobody waits for it."""
    if by is None:
        yield
        return
    stepping: list[Any] = list(optimizers)
    for one in stepping:
        one.grad_scale, one.found_inf = by, torch.zeros_like(by)
    try:
        yield
    finally:
        for one in stepping:
            del one.grad_scale, one.found_inf


def refuse_broken_scaler(state: Mapping[str, Any], scaler: GradScaler) -> None:
    """GradScaler itself sets what it finds before it misses anything."""
    wanted = scaler.state_dict()
    wrong = [name for name in wanted if isinstance(state.get(name), bool) or not isinstance(state.get(name), Real)]
    if wrong:
        seen = ", ".join(f"{name}={state.get(name)!r}" for name in wrong)
        raise ValueError(
            f"the state's scaler has {seen}, expected numbers; give what state_dict() gave, of this version"
        )
