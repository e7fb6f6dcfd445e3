"""Private names of FSDP2: it has setters but no getters, and does not show the gradients that it keeps.

Undocumented names without an underscore, such as `fsdp_params` and `mesh_info`, are no more stable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...private import needed, require

HOME = "torch.distributed.fsdp._fully_shard"
STATE = f"{HOME}._fsdp_state.FSDPState"
GROUP = f"{HOME}._fsdp_param_group.FSDPParamGroup"
PARAM = f"{HOME}._fsdp_param.FSDPParam"
# Name, what for, in which versions it was seen to work, and what happens without it.
NAMES = (
    ("torch.distributed.fsdp.FSDPModule._get_fsdp_state", "all that FSDP2 knows", "2.13", "refused"),
    (f"{STATE}._auto_reshard_after_forward", "restores the flags", "2.13", "refused"),
    (f"{STATE}._is_root", "restores the flags, resets the root", "2.13", "refused"),
    (f"{STATE}._fsdp_param_groups", "a module's groups", "2.13", "refused"),
    (f"{STATE}._reset_iter_state", "forgets a window", "2.13", "refused"),
    (f"{GROUP}._partial_reduce_output", "a gradient that replicas have yet to add", "2.13", "refused"),
    (f"{GROUP}._to_sharded", "frees gathered parameters", "2.13", "refused"),
    (f"{GROUP}._training_state", "reduces after the last backward", "2.13", "refused"),
    (f"{GROUP}._wait_for_post_backward", "reduces after the last backward", "2.13", "refused"),
    (f"{GROUP}._all_reduce_hook", "refuses such hooks", "2.13", "they go unseen"),
    (f"{GROUP}._fsdp_params_with_wider_grad_dtype", "the dtype of sums", "2.15", "the dtype of torch before 2.15"),
    (f"{GROUP}._validate_unused_param_grad_dtypes", "zeros for unused parameters", "2.15", "the user's choice"),
    (f"{PARAM}._param_fqn", "a name in errors", "2.13", "the name in its module"),
    (f"{PARAM}._module_info", "a name in errors", "2.13", "no name"),
    (f"{PARAM}._sharded_post_forward_param", "no parameter twice", "2.13", "a gathered copy counts as a parameter"),
)

FLAGS = (
    "reduce_grads",
    "all_reduce_grads",
    "reshard_after_backward",
    "reduce_scatter_unused_params",
    "gradient_divide_factor",
    "force_sum_reduction_for_comms",
    "post_forward_mesh_info",
)


def state_of(module: Any) -> Any:
    """FSDP2's state of a module under fully_shard; several modules may share one."""
    require("torch", module, "_get_fsdp_state")
    state = module._get_fsdp_state()
    require("torch", state, *needed(NAMES, STATE))
    for group in groups_of(state):
        require("torch", group, *needed(NAMES, GROUP))
        for parameter in group.fsdp_params:
            require("torch", type(parameter), "unsharded_param")
    return state


def groups_of(state: Any) -> list[Any]:
    return list(state._fsdp_param_groups)


def all_have(groups: Sequence[Any], dimension: str) -> bool:
    """Returns whether the mesh of each group has a dimension, called "shard_mesh_dim" or "replicate_mesh_dim"."""
    return all(getattr(group.mesh_info, dimension, None) is not None for group in groups)


def name_of(parameter: Any) -> str:
    """The parameter's full name, which the root's first forward sets; before that, its name in its module."""
    inside = getattr(getattr(parameter, "_module_info", None), "param_name", "a parameter")
    return str(getattr(parameter, "_param_fqn", None) or inside)


def has_all_reduce_hook(group: Any) -> bool:
    """Returns whether set_all_reduce_hook was called; False if the name is missing."""
    return getattr(group, "_all_reduce_hook", None) is not None


def adds_up_in(group: Any, parameter: Any) -> torch.dtype:
    """The dtype in which gradients add up between reductions."""
    policy = parameter.mp_policy
    shard = parameter.sharded_param
    # From torch 2.15 on gradients are cast up after backward.
    casts = hasattr(group, "_fsdp_params_with_wider_grad_dtype")
    dtype: torch.dtype = policy.reduce_dtype or (casts and shard.grad_dtype) or policy.param_dtype or shard.dtype
    return dtype


def reduce_unused(group: Any) -> None:
    """Makes FSDP2 reduce zeros for unused parameters: ranks that use them would reduce tensors of another size.

    Only if torch checks that all zeros have one dtype (2.15). Before, zeros of another dtype than their neighbours'
    were an error (pytorch#196996), so the choice is the user's; and with `grad_dtype=None` the dtype is unknown.
    """
    if hasattr(group, "_validate_unused_param_grad_dtypes") and all(
        p.mp_policy.reduce_dtype or p.sharded_param.grad_dtype is not None for p in group.fsdp_params
    ):
        group.reduce_scatter_unused_params = True


def flags_of(states: Sequence[Any]) -> Callable[[], None]:
    """Returns a function that restores the flags of all groups to what they are now."""
    flags = [
        (state, group, state._is_root is None, {name: getattr(group, name) for name in FLAGS})
        for state in states
        for group in groups_of(state)
    ]

    def put_back() -> None:
        for state, group, was_unused, values in flags:
            if was_unused and state._is_root and state._auto_reshard_after_forward:
                # The root's first forward, in the window, has set it.
                values.pop("post_forward_mesh_info", None)
            for name, value in values.items():
                setattr(group, name, value)

    return put_back


def gathered_of(parameter: Any) -> Any:
    """The whole parameter that modules compute with; None before its first forward."""
    return getattr(parameter, "unsharded_param", None)


def shown_for(parameter: Any) -> list[Any]:
    """Tensors that modules may show in its place: gathered, or sharded over fewer ranks from forward to backward."""
    return [gathered_of(parameter), getattr(parameter, "_sharded_post_forward_param", None)]


def standing_gradient(parameter: Any) -> Tensor | None:
    """The unsharded sum so far; torch up to 2.13 adds a new gradient to one of another dtype only after backward."""
    kept: Tensor | None = getattr(parameter, "unsharded_accumulated_grad", None)
    new: Tensor | None = getattr(gathered_of(parameter), "grad", None)
    if kept is None or new is None or kept is new:
        return new if kept is None else kept
    return kept + new


def holds_gradients(group: Any) -> bool:
    """Returns whether the group has a gradient that is not fully reduced."""
    gradients = map(standing_gradient, group.fsdp_params)
    return group._partial_reduce_output is not None or any(gradient is not None for gradient in gradients)


def reshard_groups(groups: Iterable[Any]) -> None:
    """Frees gathered parameters, and copies of parameters that are not sharded: the next forward makes them anew.

    Also parameters kept over fewer ranks after forward, or still on their way (`unshard(async_op=True)`, a prefetch).
    """
    for group in groups:
        group.wait_for_unshard()
        group._to_sharded()


def reduce_now(group: Any) -> None:
    """Reduces now, as the group's next backward would at its end."""
    group.reduce_grads = group.all_reduce_grads = True
    group.post_backward()
    group._wait_for_post_backward()
    group._training_state = type(group._training_state).IDLE


def discard_gradients(states: Sequence[Any]) -> None:
    """Discards a window's gradients, and the traces of a forward that failed.

    The root's public `reset_iter_state` discards unreduced gradients in torch 2.15, not in 2.13.
    """
    for state in states:
        if state._is_root:
            state._reset_iter_state()
        for group in groups_of(state):
            group._partial_reduce_output = None
            for parameter in group.fsdp_params:
                if getattr(parameter, "unsharded_accumulated_grad", None) is not None:
                    parameter.unsharded_accumulated_grad = None
                if (gathered := gathered_of(parameter)) is not None:
                    gathered.grad = None
