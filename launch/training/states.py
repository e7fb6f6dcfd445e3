"""The whole weights and optimizer state by name: gathered from ranks that have parts or stages, and put back."""

from __future__ import annotations

import logging
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from .wrapping import Wrapped

State = dict[str, Any]


def whole_state(wrapped: Wrapped, with_optimizer: bool) -> tuple[State, State | None]:
    """Weights, and the optimizer's state if wanted; whole on the first rank alone. All ranks call it."""
    # It warns that a weight which two dimensions cut is gathered in two steps, as it must be.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    options = StateDictOptions(full_state_dict=True, cpu_offload=wrapped.pipeline is None)  # to rank 0 alone
    optimizer: State | None = None
    if with_optimizer:
        weights, optimizer = get_state_dict(wrapped.model, wrapped.inner, options=options)
    else:
        weights = get_model_state_dict(wrapped.model, options=options)
    return (weights, optimizer) if wrapped.pipeline is None else _of_all_stages(wrapped.mesh, weights, optimizer)


def put_state(wrapped: Wrapped, weights: State, optimizer: State | None) -> None:
    """Puts back what `whole_state` gave the first rank; the others' arguments are not used. All ranks call it.

    Args:
        wrapped: Of as many ranks as before, or of others, and cut as before, or otherwise.
        weights: By name.
        optimizer: None leaves the optimizer's state alone, on each rank.
    """
    several = dist.is_initialized() and dist.get_world_size() > 1
    if wrapped.pipeline is not None:
        box: list[Any] = [weights, optimizer]
        dist.broadcast_object_list(box)
        weights, optimizer = _of_stage(wrapped, *box)
        several = False  # each rank has now all that it takes its shards from
    options = StateDictOptions(full_state_dict=True, cpu_offload=not several, broadcast_from_rank0=several)
    set_model_state_dict(wrapped.model, weights, options=options)
    if optimizer is not None:
        set_optimizer_state_dict(wrapped.model, wrapped.inner, optimizer, options=options)


def _of_all_stages(mesh: Any, weights: State, optimizer: State | None) -> tuple[State, State | None]:
    """Joined on the first stage of each data rank, of which one is the first rank."""
    stages = mesh["stage"]
    group, found = stages.get_group(), [None] * stages.size()
    is_first = stages.get_local_rank() == 0
    first = dist.get_process_group_ranks(group)[0]
    dist.gather_object(_on_host([weights, optimizer]), found if is_first else None, dst=first, group=group)
    parts: list[Any] = found if is_first else [[weights, optimizer]]
    whole = {name: tensor for of_stage, _ in parts for name, tensor in of_stage.items()}
    if optimizer is None:
        return whole, None
    states = {name: state for _, of_stage in parts for name, state in of_stage["state"].items()}
    groups = [group for _, of_stage in parts for group in of_stage["param_groups"]]  # all with the same options
    names = [name for group in groups for name in group["params"]]
    return whole, {"state": states, "param_groups": [{**groups[0], "params": names}]}


def _of_stage(wrapped: Wrapped, weights: State, optimizer: State | None) -> tuple[State, State | None]:
    own = set(wrapped.model.state_dict())
    if optimizer is not None:
        groups = [
            {**group, "params": [name for name in group["params"] if name in own]}
            for group in optimizer["param_groups"]
        ]
        optimizer = {"state": _named(optimizer["state"], own), "param_groups": groups}
    return _named(weights, own), optimizer


def _named(values: State, names: set[str]) -> State:
    return {name: value for name, value in values.items() if name in names}


def _on_host(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.cpu()
    if isinstance(value, dict):
        return {name: _on_host(one) for name, one in value.items()}
    return [_on_host(one) for one in value] if isinstance(value, list) else value
