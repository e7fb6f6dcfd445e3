"""DDP's flags while windows are open on it: its forwards do not arm the reduction, until the last window is over."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from .private.ddp import disarm


class Takers(list[Any]):
    """The engines whose windows are open on a wrapper; several may be. Kept on the wrapper itself.

    A copy of the wrapper has none.
    """

    found = True  # the wrapper's flag before the first of them
    keeps_buckets = False  # DDP has forgotten, on this rank alone, that it rebuilt them, and would ask other ranks

    def __reduce__(self) -> Any:
        return type(None), ()


def takers_of(wrapper: DistributedDataParallel) -> Takers:
    takers: Takers | None = wrapper.__dict__.get("_distaccum_takers")
    if takers is None:
        takers = wrapper.__dict__["_distaccum_takers"] = Takers()
    return takers


def take_flags(wrapper: DistributedDataParallel, engine: Any, *, arms: bool, searches: bool) -> None:
    """From here on forwards arm the reduction only if `arms`; `searches`: DDP looks for unused parameters."""
    takers = takers_of(wrapper)
    if not takers:
        takers.found = wrapper.require_backward_grad_sync
    elif searches:
        disarm(wrapper)  # or parameters that another accumulator's open window used would count as used in this one
    takers.append(engine)
    wrapper.require_backward_grad_sync = arms


def give_back_flags(wrapper: DistributedDataParallel, engine: Any) -> None:
    takers = takers_of(wrapper)
    if engine in takers:
        takers.remove(engine)
        if not takers:
            wrapper.require_backward_grad_sync = takers.found
            wrapper.require_forward_param_sync = True


class NotesStrays:
    """A forward hook, as DDP does not show whether it is armed: notes wrappers that a forward outside a window arms.

    It is removed with the engine.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = weakref.ref(engine)

    def __call__(self, wrapper: DistributedDataParallel, _: Any) -> None:
        engine = self._engine()
        if engine is not None and wrapper.require_backward_grad_sync and torch.is_grad_enabled():
            engine.strays.add(wrapper)

    def __reduce__(self) -> Any:
        """In a copy of the wrapper: a hook that returns its arguments, and loads without this package."""
        engine = self._engine()
        found = [] if engine is None else [takers_of(w).found for w in engine.wrappers if engine in takers_of(w)]
        return (RestoresFlags, (found[0],)) if found else (getattr, ({}, "get"))


class RestoresFlags:
    """A hook of a copy that was made inside a window: at its first forward the copy gets the flags from before it."""

    def __init__(self, found: bool) -> None:
        self._found: bool | None = found

    def __call__(self, wrapper: DistributedDataParallel, _: Any) -> None:
        if self._found is not None:
            wrapper.require_backward_grad_sync, self._found = self._found, None
            wrapper.require_forward_param_sync = True
