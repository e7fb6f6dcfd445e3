"""GradScaler, and fused optimizers that divide gradients as they step.

Their private names are those of torch 2.9 to 2.15; each function says what it needs them for, and what happens where
they are missing.
"""

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
    """Divides each optimizer's gradients by the scale, once; gives the flags of overflow that `update` will read.

    The flags of an optimizer without gradients are left out. Private: the flags, which `GradScaler.step` reads too;
    the public way is a second pass over the gradients. Without the name: AttributeError, before any step.
    """
    found: list[Tensor] = []
    sharded = sys.modules.get("torch.distributed.fsdp.sharded_grad_scaler")
    # It sums its flags over ranks: a rank whose shards have no gradient takes part too.
    waits = sharded is not None and isinstance(scaler, sharded.ShardedGradScaler)
    for optimizer in optimizers:
        if not waits and not any(p.grad is not None for group in optimizer.param_groups for p in group["params"]):
            continue  # else the scaler takes it for unscaled until an update() that has gradients to look at
        try:
            scaler.unscale_(optimizer)
        except RuntimeError as error:
            if "already been called" not in str(error):  # the caller did, to look at the gradients
                raise
        found += scaler._found_inf_per_device(optimizer).values()
    return found


def unscales_in_step(scaler: GradScaler, optimizers: Sequence[Optimizer]) -> bool:
    """Whether unscaling needs no pass: the optimizers divide as they step, and the caller has not unscaled.

    Only for torch's own scalers. Private: which optimizers a scaler has unscaled. Without the name: AttributeError.
    """
    return (
        type(scaler) in (GradScaler, torch.cuda.amp.GradScaler)
        and divide_in_step(optimizers)
        and not any(scaler._found_inf_per_device(one) for one in optimizers)
    )


def note_overflow(scaler: GradScaler, optimizers: Sequence[Optimizer], overflow: Tensor) -> None:
    """Gives the scaler the flag of overflow that its `update()` reads, in the place of a pass of its own.

    Private: where it keeps the flags. Without the name: AttributeError, before any step.
    """
    for one in optimizers:
        if any(p.grad is not None for group in one.param_groups for p in group["params"]):
            scaler._per_optimizer_states[id(one)]["found_inf_per_device"] = {overflow.device: overflow}


def update_without_gradients(scaler: GradScaler, overflows: Tensor) -> None:
    """Does what `scaler.update()` does, which raises if the scaler has unscaled no gradient.

    Private: the fields and the kernel of that method. Without the names: AttributeError.
    """
    scale, growth = scaler._scale, scaler._growth_tracker
    if scale is not None and growth is not None:
        factors = scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()
        torch._amp_update_scale_(scale, growth, overflows.to(scale.device, torch.float32), *factors)


def forget(scaler: GradScaler | None, optimizers: Sequence[Optimizer]) -> None:
    """Lets these optimizers' gradients (all, if none are given) be unscaled again, and leaves the scale alone.

    Also removes what a step that Ctrl-C broke off left on a fused optimizer, whose next step would divide by it.

    Private: where the scaler keeps which it has unscaled. The public `update()` clears that of all optimizers and reads
    the scale from the device; it is used where the name is missing.
    """
    for one in optimizers:
        for name in ("grad_scale", "found_inf"):
            one.__dict__.pop(name, None)
    states: Any = getattr(scaler, "_per_optimizer_states", None)
    if scaler is None or states is None:
        if scaler is not None:
            scaler.update(scaler.get_scale())
    elif optimizers:
        for one in optimizers:
            states.pop(id(one), None)
    else:
        states.clear()


def has_unscaled(scaler: GradScaler, optimizers: Sequence[Optimizer]) -> bool:
    """Whether the scaler has unscaled gradients of one of these optimizers (of any, if none are given).

    Unscaling leaves the gradients' version counters alone. Private: as in `forget`; without the name: False.
    """
    states: Any = getattr(scaler, "_per_optimizer_states", {})
    found = [states.get(id(one)) for one in optimizers] if optimizers else list(states.values())
    return any(one is not None and one["found_inf_per_device"] for one in found)


def stamp_of_scale(scaler: GradScaler) -> object:
    """Compares unequal to a later one if the scale was set in between; reads nothing from the device.

    None while the scaler has made no scale. Private: the scale's tensor, which `update()` writes in place. Without the
    name: None.
    """
    scale: Tensor | None = getattr(scaler, "_scale", None)
    return None if scale is None or scale.is_inference() else (id(scale), version_of(scale))


def is_scaled_by(scaler: GradScaler, loss: Tensor) -> bool:
    """Whether `loss` came from `scaler.scale()`, or is a sum, quotient or mean of such losses.

    The graph shows it: a multiplication has saved the scale. Private: the scale's tensor, and a node's saved tensor
    without unpacking (since torch 2.13; unpacking runs hooks, as of checkpointing). Without the names: False.
    """
    scale: Tensor | None = getattr(scaler, "_scale", None)
    waiting, seen = [loss.grad_fn], 0
    while scale is not None and waiting and seen < 16:
        node, seen = waiting.pop(0), seen + 1
        name = "" if node is None else node.name()
        if name == "MulBackward0":
            kept: Any = getattr(node, "_raw_saved_other", None)
            # Below the root, unpacking may run the forward of a checkpoint.
            other = kept.data if hasattr(kept, "data") else getattr(node, "_saved_other", None) if seen == 1 else None
            if isinstance(other, Tensor) and other.device == scale.device and other.data_ptr() == scale.data_ptr():
                return True
        if name.startswith(("Mul", "Div", "Add", "Sum", "Mean", "Stack", "Unsqueeze", "ToCopy")):
            waiting += [following for following, _ in node.next_functions]  # type: ignore[union-attr]  # see above
    return False


def refuse_mixed(optimizers: Sequence[Optimizer]) -> None:
    """Refuses what a GradScaler cannot unscale: complex parameters, and sharded beside plain ones in one optimizer."""
    for optimizer in optimizers:
        if any(p.is_complex() for group in optimizer.param_groups for p in group["params"]):
            raise ValueError(
                f"scaler with a {type(optimizer).__name__} that holds complex parameters, which a GradScaler cannot "
                "unscale; remove the scaler, or keep real parameters (torch.view_as_complex in the forward)"
            )
        kinds = {hasattr(p, "to_local") for group in optimizer.param_groups for p in group["params"]}
        if len(kinds) > 1:
            raise ValueError(
                f"scaler with a {type(optimizer).__name__} that holds sharded and plain parameters, which a GradScaler "
                "cannot unscale together; make an optimizer for each kind and pass both"
            )


def divide_in_step(optimizers: Sequence[Optimizer]) -> bool:
    """Whether all of these divide gradients in the kernel that steps (`fused=True`), as a GradScaler lets them.

    GradScaler sets their `grad_scale` (in float32) and `found_inf` for one step, and so does `divided`. Only torch's
    own optimizers: a wrapper may show the attributes of another and not pass ours on. Not with hooks, which may look at
    gradients; not with DTensors, whose kernels take no plain tensor beside them. Private: the flag of an optimizer that
    can, and the hooks. Without the flag: False.
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
    own: dict[int, Any] = getattr(optimizer, "_optimizer_step_pre_hooks", {})
    everyone: dict[int, Any] = getattr(sys.modules[Optimizer.__module__], "_global_optimizer_pre_hooks", {})
    return [*own.values(), *everyone.values()]


@contextmanager
def divided(optimizers: Sequence[Optimizer], by: Tensor) -> Iterator[None]:
    """Each step in it first divides the gradients by `by`, a tensor that nobody reads on the host."""
    stepping: list[Any] = list(optimizers)
    for one in stepping:
        one.grad_scale, one.found_inf = by, torch.zeros_like(by)
    try:
        yield
    finally:
        for one in stepping:
            del one.grad_scale, one.found_inf


def refuse_broken_scaler(state: Mapping[str, Any], scaler: GradScaler) -> None:
    """Raises where the state lacks numbers; GradScaler itself would load a part of it first."""
    wanted = scaler.state_dict()
    wrong = [name for name in wanted if isinstance(state.get(name), bool) or not isinstance(state.get(name), Real)]
    if wrong:
        seen = ", ".join(f"{name}={state.get(name)!r}" for name in wrong)
        raise ValueError(
            f"the state's scaler has {seen}, expected numbers; give what state_dict() gave, of this version"
        )
