"""Private names of DistributedDataParallel, whose reducer does not show its state."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ...law import DistaccumError
from ...private import needed, require

DDP, REDUCER = "torch.nn.parallel.DistributedDataParallel", "torch.distributed.Reducer"
IN_BACKWARD = "torch.distributed.optim.apply_optimizer_in_backward"
STATIC = "a static graph is refused"
# Of a wrapper: whether a backward reduces, a forward sends buffers, and a static graph has begun to reduce.
FLAGS = "require_backward_grad_sync", "require_forward_param_sync", "_static_graph_delay_allreduce_enqueued"
# Name, what for, in which versions it was seen to work, and what happens without it.
NAMES = (
    (f"{DDP}._check_sync_bufs_pre_fwd", "sends buffers before a forward", "2.9", "refused"),
    (f"{DDP}._sync_buffers", "sends buffers before a forward", "2.9", "refused"),
    (f"{DDP}._check_reducer_finalized", "finds an unfinished reduction", "2.9", "refused"),
    (f"{DDP}._has_rebuilt_buckets", "rebuilds buckets in the window's own time", "2.9", "refused"),
    (f"{DDP}._join_config", "refuses a window in join()", "2.9", "refused"),
    (f"{DDP}._delay_all_reduce_params", "refuses this option", "2.9", "the option goes unseen"),
    (f"{DDP}._comm_hooks", "refuses an optimizer in the hook", "2.9", "such a hook goes unseen"),
    (f"{DDP}._get_ddp_logging_data", "counts what DDP reduces", "2.9", "a late freeze is found in the reduction"),
    (f"{REDUCER}._rebuild_buckets", "rebuilds buckets in the window's own time", "2.9", "refused"),
    (f"{REDUCER}._reset_state", "forgets a forward", "2.9", "refused"),
    (f"{DDP}._static_graph_delay_allreduce_enqueued", "keeps a static graph from reducing", "2.9", STATIC),
    (f"{IN_BACKWARD}._in_backward_optimizers", "refuses such optimizers", "2.9", "they go unseen"),
    ("torch.distributed.tensor.parallel.ddp._st_info", "refuses parts of a DTensor", "2.9", "they go unseen"),
    ("torch.nn.parallel.distributed._DDPSinkBackward", "the loss's node before DDP's", "2.9", "that node itself"),
)


def refuse_what_cannot_accumulate(wrapper: DistributedDataParallel) -> None:
    """Refuses a DDP that reduces some parameters, or steps, by itself; without the optional names this is unknown."""
    require("torch", wrapper, *needed(NAMES, DDP, *([STATIC] if wrapper.static_graph else [])))
    require("torch", wrapper.reducer, *needed(NAMES, REDUCER))
    hooks = [getattr(hook, "__qualname__", "") for hook, _ in getattr(wrapper, "_comm_hooks", ())]
    hooks_step = any("hook_then_optimizer" in name or "hook_with_zero" in name for name in hooks)
    steps = hooks_step or any(hasattr(parameter, "_in_backward_optimizers") for parameter in wrapper.parameters())
    if steps or getattr(wrapper, "_delay_all_reduce_params", None):
        raise ValueError(
            "DDP with delay_all_reduce_named_params, or with an optimizer that steps inside backward "
            "(_apply_optimizer_in_backward, _register_fused_optim, hook_with_zero_step with overlap_with_ddp=True), "
            "reduces or steps on each micro-step; wrap the model anew, without them"
        )


def is_part(parameter: nn.Parameter) -> bool:
    """Returns whether it is a DTensor, or DDP shows a part of one in its place, which is unknown without `_st_info`."""
    return hasattr(parameter, "to_local") or hasattr(parameter, "_st_info")


def reduced_by(wrapper: DistributedDataParallel) -> dict[str, nn.Parameter]:
    """The parameters that DDP reduces, in the order of its indices. All that it shows of them is their number.

    Where that name is missing, a parameter that was frozen early is found when a reduction stays unfinished.
    """
    # DDP writes a name at the root with a dot before it.
    named = {
        name.replace("_orig_mod.", ""): parameter
        for name, parameter in wrapper.module.named_parameters()
        if (name if "." in name else f".{name}") not in wrapper.parameters_to_ignore
    }
    if wrapper.find_unused_parameters or wrapper.static_graph:
        # The library averages them, frozen or not.
        return named
    trained = {name: parameter for name, parameter in named.items() if parameter.requires_grad}
    logged: dict[str, int] = getattr(wrapper, "_get_ddp_logging_data", dict)()
    if (wrapped := logged.get("num_parameter_tensors", len(trained))) != len(trained):
        raise ValueError(
            f"DDP wrapped {wrapped} trainable parameters and the model has {len(trained)} now, which leaves ranks "
            "apart; freeze and unfreeze parameters before DDP wraps the model"
        )
    return trained


def hold_back(wrapper: Any, *, sends_at_end: bool) -> None:
    """Keeps backwards from reducing, and sends now what a forward would, as Join does.

    `sends_at_end`: a forward may send buffers at its end, as a hook of the user's may demand.
    """
    # A static graph would all the same reduce in its first backward (pytorch#143580), unless it had done so.
    if not wrapper.static_graph:
        disarm(wrapper)
    if wrapper._join_config.enable:
        raise DistaccumError(
            "a window inside DDP's join(), whose collectives would meet the window's; remove join(): ranks may "
            "have different numbers of micro-batches without it. It stays on after its block: "
            "`with model.join(enable=False): pass` turns it off"
        )
    if is_before := wrapper._check_sync_bufs_pre_fwd():
        wrapper._sync_buffers()
    sends_buffers = sends_at_end and not is_before and bool(wrapper.will_sync_module_buffers())
    # A module's own setting of an attribute takes 6 us.
    vars(wrapper).update(zip(FLAGS, (False, sends_buffers, True), strict=True))


def refuse_unfinished_reduction(wrapper: DistributedDataParallel) -> None:
    """Raises torch's RuntimeError if a reduction lacks gradients, which otherwise only the next forward would do."""
    wrapper._check_reducer_finalized()  # type: ignore[no-untyped-call]


def rebuild_buckets(wrapper: DistributedDataParallel, views: Iterable[nn.Parameter]) -> bool:
    """Does what DDP's next forward would: ranks agree on the buckets, once, after the first reduction.

    Returns whether they have agreed; a forward in mid-window may have done it.
    Gradients of `views` are no longer needed but keep the old buckets alive. So zeros that take the memory of one
    element replace them first; DDP copies these into the new buckets and replaces them in turn.
    """
    moved = () if wrapper._has_rebuilt_buckets else [view for view in views if view.grad is not None]
    zeros = {view: view.new_zeros(()).expand_as(view) for view in moved}
    for view, zero in zeros.items():
        view.grad = zero
    if wrapper.reducer._rebuild_buckets():
        wrapper._has_rebuilt_buckets = True
    for view, zero in zeros.items():
        if view.grad is zero:
            view.grad = None
    return bool(wrapper._has_rebuilt_buckets)


def disarm(wrapper: DistributedDataParallel) -> None:
    """Makes DDP forget a forward that armed it, backwards that it did not reduce, and that it has rebuilt its buckets.

    It rebuilds them again after another reduction, unless this is called then.
    """
    wrapper.reducer._reset_state()
    if wrapper._has_rebuilt_buckets:
        wrapper._has_rebuilt_buckets = False


def before_sink(loss: Tensor) -> tuple[Any, int]:
    """The node in the graph that a loss comes from, and which of its outputs it is.

    DDP with `find_unused_parameters` passes a model's outputs through a node of its own.
    """
    node: Any = loss.grad_fn
    passes = type(node).__name__ == "_DDPSinkBackward"
    return node.next_functions[loss.output_nr] if passes else (node, loss.output_nr)
