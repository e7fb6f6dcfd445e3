"""Private names of wrappers' libraries: they show neither if a backward reduces, nor all that they keep of it.

Undocumented names without an underscore, such as DeepSpeed's `ipg_buckets`, are no more stable. A version of DeepSpeed
that lacks the name of a buffer keeps nothing there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..private import replaced, require

FSDP, RUNTIME = "torch.distributed.fsdp", "torch.distributed.fsdp._runtime_utils"
FLAT = f"{FSDP}._flat_param.FlatParameter"
ZERO = "deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer"
STATE = "accelerate.state.GradientState"
FABRIC, TRAINERS = "lightning_fabric.wrappers", "pytorch_lightning.core.optimizer.LightningOptimizer"
# Name, what for, in which versions it was seen to work, and what happens without it.
NAMES = (
    (f"{FSDP}.FullyShardedDataParallel._sync_gradients", "postpones the reduction", "2.9", "refused"),
    (f"{FSDP}._common_utils._FSDPState._handle", "the flat parameter", "2.9", "refused"),
    (f"{FSDP}._common_utils._FSDPState._is_root", "tells whether there was a forward", "2.9", "refused"),
    (f"{RUNTIME}._reshard", "frees gathered parameters", "2.9", "refused"),
    (f"{RUNTIME}._post_backward_final_callback", "ends what failed in forward or backward", "2.9", "refused"),
    (f"{FLAT}._params", "the parameters that it is made of", "2.9", "only the flat one is known"),
    (f"{FLAT}._param_extensions", "finds tensor-parallel parts", "2.9", "they go unseen"),
    (f"{FLAT}._saved_grad_shard", "forgets a reduced gradient", "2.9", "there is none to forget"),
    (f"{FSDP}._init_utils._inter_node_pg", "the ranks with the same shard", "2.9", "there are none"),
    ("deepspeed.runtime.engine._is_gradient_accumulation_boundary", "ends a window", "0.18", "each backward ends one"),
    ("deepspeed.runtime.base_optimizer._backward_active_depth", "forgets a failed backward", "0.18", "it has none"),
    (f"{ZERO}._coalesce_grad_reduction", "tells whether DeepSpeed can coalesce", "0.19", "it reduces each micro-step"),
    (f"{ZERO}._release_ipg_buffers", "frees what a backward that failed left", "0.18", "freed with the next step"),
    ("torch._C._will_engine_execute_node", "finds ranks that use different modules", "2.9", "they go unseen"),
    (f"{STATE}._add_dataloader", "keeps a loader read ahead from telling so", "1.11", "it has nothing to tell"),
    (f"{STATE}._remove_dataloader", "keeps a loader read ahead from telling so", "1.11", "it has nothing to tell"),
    (f"{STATE}._set_sync_gradients", "leaves the Trainer's own step out", "1.11", "refused"),
    ("accelerate.optimizer.AcceleratedOptimizer._is_overflow", "tells of a skip", "1.11", "its own last step counts"),
    ("torch.optim.lr_scheduler._opt_called", "tells a schedule of a step", "2.9", "the schedule does not ask"),
    (f"{FABRIC}._FabricModule", "finds what Fabric made", "2.6", "no wrapper of Fabric's is taken off"),
    (f"{FABRIC}._FabricOptimizer", "finds what Fabric made", "2.6", "no wrapper of Fabric's is taken off"),
    (f"{FABRIC}._FabricModule._forward_module", "the module as the strategy wrapped it", "2.6", "refused"),
    (f"{FABRIC}._FabricModule._strategy", "the strategy, with its precision and scaler", "2.6", "refused"),
    (f"{FABRIC}._in_fabric_backward", "passes for Fabric's own backward", "2.6", "Fabric refuses the backward"),
    (f"{TRAINERS}._on_before_step", "makes the Trainer count a step", "2.6", "it does not count"),
    (f"{TRAINERS}._on_after_step", "makes the Trainer count a step", "2.6", "it does not count"),
)


# FSDP1


def handles_of(wrappers: Sequence[Any]) -> list[Any]:
    """The handles of flat parameters; a wrapper without parameters has none."""
    for wrapper in wrappers:
        require("torch", wrapper, "_sync_gradients", "_handle", "_is_root")
    require("torch", sys.modules.get(RUNTIME), "_reshard", "_post_backward_final_callback")
    return [wrapper._handle for wrapper in wrappers if wrapper._handle is not None]


@contextmanager
def reducing(wrappers: Sequence[Any], reduce: bool) -> Iterator[None]:
    """Sets the flag of no_sync(), a context that only the root has; the root may lie outside the models."""
    with ExitStack() as stack:
        for wrapper in wrappers:
            stack.enter_context(replaced(wrapper, _sync_gradients=reduce))
        yield


def flattened(handle: Any) -> list[Any]:
    """The parameters that the flat one is made of, with use_orig_params=True; none if the name is missing."""
    return list(getattr(handle.flat_param, "_params", None) or [])


def flattens_parts(handle: Any) -> bool:
    """Tells whether it was flattened from tensor-parallel parameters; False if the name is missing."""
    return any(cut is not None for cut in getattr(handle.flat_param, "_param_extensions", None) or ())


def num_replicas(wrapper: Any) -> int:
    """The number of ranks that hold the same shard, under a hybrid strategy; 1 if the name is missing."""
    replicas = getattr(wrapper, "_inter_node_pg", None)
    return 1 if replicas is None else dist.get_world_size(replicas)


def forget_window(wrapper: Any) -> None:
    """Ends a forward or backward that failed, frees what is gathered, and discards gradients, reduced or not.

    Torch itself does the first only as a backward succeeds, and no forward works without it. An evaluation after the
    last backward leaves gathered parameters, which a step outdates.
    """
    handle = wrapper._handle
    if handle is not None:
        handle.flat_param.grad = None
        # Reduced, and not shown before a window's last backward.
        vars(handle.flat_param).pop("_saved_grad_shard", None)
    if wrapper._is_root and wrapper.training_state.name != "IDLE":
        sys.modules[RUNTIME]._post_backward_final_callback(wrapper, wrapper)
    # There was a forward.
    if handle is not None and wrapper._is_root is not None:
        sys.modules[RUNTIME]._reshard(wrapper, handle, handle.uses_sharded_strategy)


# DeepSpeed


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


def ending_window(engine: Any, flag: bool) -> AbstractContextManager[None]:
    """Sets whether a backward ends a window, for the block; an unmanaged engine refuses the public setter."""
    return replaced(engine, _is_gradient_accumulation_boundary=flag)


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
            gradients = getattr(optimizer, name, {})
            gradients.update(dict.fromkeys(gradients))
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


# Accelerate

# In place of a loader's `gradient_state`: its loop then tells nobody that it began or ended.
NOWHERE = SimpleNamespace(_add_dataloader=lambda _: None, _remove_dataloader=lambda _: None)


def note_step(wrapper: Any, stepped: bool) -> None:
    """Tells an AcceleratedOptimizer, or a _FabricOptimizer, about a step that it did not take itself.

    `accelerator.optimizer_step_was_skipped` and Accelerate's schedules read `_is_overflow`; if it is missing, they go
    by the wrapper's own last step. A torch schedule made from the wrapper reads `_opt_called`, and warns without it.
    """
    if hasattr(wrapper, "_is_overflow"):
        wrapper._is_overflow = not stepped
    wrapper._opt_called = getattr(wrapper, "_opt_called", False) or stepped


def leave_out_step(wrapper: Any) -> None:
    """Makes the next `step()` of an AcceleratedOptimizer do nothing, as in a micro-step that only accumulates."""
    require("Accelerate", wrapper.gradient_state, "_set_sync_gradients")
    wrapper.gradient_state._set_sync_gradients(False)
    note_step(wrapper, False)


# Fabric and Lightning

# The classes of what they return, in a library with three names.
MODULE, OPTIMIZER, TRAINERS_OPTIMIZER = "_FabricModule", "_FabricOptimizer", "LightningOptimizer"
LIGHTNING = "lightning_fabric", "pytorch_lightning", "lightning"


def class_of(value: object, name: str) -> Any:
    """The class of Lightning's with this name that a value is an instance of, or None; imports nothing."""
    named = (kind for kind in type(value).__mro__ if kind.__name__ == name)
    return next((kind for kind in named if kind.__module__.partition(".")[0] in LIGHTNING), None)


def wrapped_module(wrapper: Any) -> Any:
    """The module as the strategy wrapped it, such as a DistributedDataParallel; `wrapper.module` is the one inside."""
    require("Lightning", wrapper, "_forward_module")
    return wrapper._forward_module


def strategy_of(wrapper: Any) -> Any:
    require("Lightning", wrapper, "_strategy")
    return wrapper._strategy


def during_backward(wrapper: Any, call: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `call` to pass for Fabric's own backward, by a flag without which a module's outputs refuse any other."""
    home = sys.modules[class_of(wrapper, MODULE).__module__]

    def run(*args: Any) -> Any:
        with replaced(home, _in_fabric_backward=True):
            return call(*args)

    return run


def note_trainers_step(wrapper: Any) -> None:
    """Makes the Trainer count a step that its LightningOptimizer did not take; if the names are missing it does not."""
    for name in ("_on_before_step", "_on_after_step"):
        getattr(wrapper, name, lambda: None)()
