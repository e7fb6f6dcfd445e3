"""Private names of DeepSpeed: it keeps gradients in buffers of its own, and no public call empties all of them.

Undocumented names without an underscore, such as `ipg_buckets`, are no more stable. A buffer whose name a version lacks
is skipped: that version keeps nothing there.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

ZERO = "deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer"
# Name, what for, since which version, and what happens without it.
NAMES = (
    ("deepspeed.runtime.engine._is_gradient_accumulation_boundary", "ends a window", "0.18", "each backward ends one"),
    (
        "deepspeed.runtime.base_optimizer._backward_active_depth",
        "forgets a failed backward",
        "0.19",
        "it has none",
    ),
    (f"{ZERO}._coalesce_grad_reduction", "tells whether DeepSpeed can coalesce", "0.19", "it reduces each micro-step"),
    (f"{ZERO}._release_ipg_buffers", "frees what a backward that failed left", "0.18", "freed with the next step"),
    ("torch._C._will_engine_execute_node", "finds ranks that use different modules", "2.9", "they go unseen"),
)


def why_blind(optimizer: Any) -> str | None:
    """The reason why a step would apply a non-finite gradient, with the cure; None if it skips such a gradient.

    Stages 1 and 2 have two switches. In other stages, versions that check have `is_invalid_grad_norm` in the module.
    """
    looks = getattr(optimizer, "check_grad_overflow", None)
    if not looks and not hasattr(sys.modules[type(optimizer).__module__], "is_invalid_grad_norm"):
        return "in this version; use DeepSpeed 0.19"
    if looks is not False or (getattr(optimizer, "compute_grad_norm", True) and optimizer.dtype != torch.bfloat16):
        return None
    return 'by its config ("check_grad_overflow": false, or "compute_grad_norm": false); take that out of it'


def can_coalesce(optimizer: Any) -> bool:
    """True if engine.coalesce_grad_reduction() (0.19.2) works with this optimizer; otherwise it would raise."""
    return hasattr(optimizer, "_coalesce_grad_reduction")


def set_boundary(engine: Any, flag: bool | None) -> None:
    """Sets whether this backward ends a window; None, for which there is no public call, leaves it to the engine.

    An unmanaged engine refuses the public setter.
    """
    engine._is_gradient_accumulation_boundary = flag


def kept_partitions(optimizer: Any) -> Iterator[Tensor]:
    """The gradients that stages 2 and 3 keep from one step to the next.

    A window overwrites only those that its first backward reaches; it adds to the others, or steps them as they are.
    """
    if (flat := getattr(optimizer, "grad_partitions_flat_buffer", None)) is not None:
        yield flat
    # It has these and the next if it offloads.
    yield from getattr(optimizer, "accumulated_grads_in_cpu", {}).values()
    for name in ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat"):
        yield from (group.grad for group in getattr(optimizer, name, ()) if group.grad is not None)


def give_all_a_gradient(optimizer: Any, parameters: Sequence[Any], *, sets_up: bool) -> None:
    """Fills missing gradients with zeros, because a rank reduces those that it has, and all must have the same.

    `sets_up`: also makes the buckets that backward makes, which a rank without a micro-batch lacks.
    """
    marks = getattr(optimizer, "fp32_groups_has_gradients", None)
    if marks is not None:
        # BF16_Optimizer reduces all of its gradients, and leaves unmarked ones out of the norm.
        marks[:] = [[True] * len(group) for group in marks]
        return
    if sets_up and hasattr(optimizer, "setup_buckets"):
        optimizer.setup_buckets()
    # True if gradients add up in another dtype than the model's.
    is_apart = getattr(optimizer, "use_grad_accum_attribute", False)
    for parameter in parameters:
        if parameter.requires_grad and getattr(parameter, "grad_accum" if is_apart else "grad", None) is None:
            parameter.grad = torch.zeros_like(parameter)
    if is_apart:
        optimizer.fill_grad_accum_attribute()


def discard_window(engine: Any, stage: int) -> None:
    """Discards the gradients of a window, and the traces of a backward that failed.

    `zero_grad` does not touch the partitions of stages 2 and 3, nor their buckets.
    """
    optimizer = engine.optimizer
    # Otherwise a running reduction would write afterwards.
    torch.get_device_module(engine.device).synchronize()
    optimizer.zero_grad()
    if hasattr(optimizer, "reset_cpu_buffers"):
        # It forgets norms of offloaded gradients, and whether one overflowed.
        optimizer.reset_cpu_buffers()
    buckets = getattr(optimizer, "ipg_buckets", {}).values()
    if stage in (1, 2):
        for name in ("averaged_gradients", "all_grad_tensors"):
            for key in getattr(optimizer, name, {}):
                getattr(optimizer, name)[key] = None
        for bucket in buckets:
            bucket.clear()
        if hasattr(optimizer, "params_already_reduced"):
            optimizer.params_already_reduced = [False] * len(optimizer.params_already_reduced)
            optimizer.extra_large_param_to_reduce = {}
            optimizer.micro_step_id = -1
            getattr(optimizer, "_release_ipg_buffers", lambda: None)()
    elif stage == 3:
        for bucket in buckets:
            bucket.params.clear()
            bucket.elements, bucket.process_group = 0, None
        if hasattr(optimizer.parameter_offload, "release_backward_leftovers"):
            optimizer.parameter_offload.release_backward_leftovers()
    if hasattr(optimizer, "_backward_active_depth"):
        optimizer._backward_active_depth = 0
        optimizer.clear_backward_seen_flag()


def is_reached(parameter: Tensor) -> bool:
    """True if the running backward reaches `parameter`, as DeepSpeed itself tests it; true if the name is missing."""
    will_execute: Any = getattr(sys.modules["torch._C"], "_will_engine_execute_node", None)
    if will_execute is None:
        return True
    with torch.enable_grad():
        return bool(will_execute(parameter.view_as(parameter).grad_fn.next_functions[0][0]))  # type: ignore[union-attr]
