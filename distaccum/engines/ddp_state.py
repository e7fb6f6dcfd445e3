"""DDP's flags while windows are open on it, and gradients that are cleared in place."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from .private.autograd import GradientStamp, zero_all
from .private.ddp import disarm


class Flags:
    """A wrapper's flags, while its forwards do not arm the reduction: until the last of its open windows is over."""

    def __init__(self) -> None:
        self.takers: list[Any] = []  # engines whose windows are open on it
        self.found = (True, True)  # before the first of them
        self.keeps_buckets = False  # DDP has forgotten, on this rank alone, that it rebuilt them, and would ask others

    def take(self, wrapper: DistributedDataParallel, engine: Any, *, arms: bool, searches: bool) -> None:
        """From here on forwards arm the reduction only if `arms`; `searches`: DDP looks for unused parameters."""
        if not self.takers:
            self.found = (wrapper.require_backward_grad_sync, wrapper.require_forward_param_sync)
        elif searches:
            disarm(wrapper)  # or parameters that another accumulator's open window used would count as used in this one
        self.takers.append(engine)
        wrapper.require_backward_grad_sync = arms

    def give_back(self, wrapper: DistributedDataParallel, engine: Any) -> None:
        if engine in self.takers:
            self.takers.remove(engine)
            if not self.takers:
                wrapper.require_backward_grad_sync, wrapper.require_forward_param_sync = self.found


_FLAGS: weakref.WeakKeyDictionary[DistributedDataParallel, Flags] = weakref.WeakKeyDictionary()


def flags_of(wrapper: DistributedDataParallel) -> Flags:
    """State that all Accumulators of a wrapper share."""
    return _FLAGS.setdefault(wrapper, Flags())


class NotesStrays:
    """A forward hook, as DDP does not show whether it is armed: notes wrappers that a forward outside a window arms."""

    def __init__(self, engine: Any) -> None:
        self._engine = weakref.ref(engine)

    def __call__(self, wrapper: DistributedDataParallel, _: Any) -> None:
        engine = self._engine()
        if engine is not None and wrapper.require_backward_grad_sync and torch.is_grad_enabled():
            engine.strays.add(wrapper)

    def __reduce__(self) -> Any:
        """In a copy of the wrapper: a hook that returns its arguments, and loads without this package."""
        return (getattr, ({}, "get"))


class ZeroedViews:
    """Gradients that are cleared in place: set to None, views of DDP's buckets would lose the memory that they save."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._views = {id(parameter) for parameter in parameters}
        self.stamps: dict[int, GradientStamp] = {}  # of what was zeroed, by the parameter's id

    def clear(self, parameters: Iterable[nn.Parameter]) -> None:
        views: dict[int, nn.Parameter] = {}
        for parameter in parameters:
            if id(parameter) not in self._views:
                parameter.grad = None
            elif parameter.grad is not None:
                views[id(parameter)] = parameter
        if views:
            zero_all([parameter.grad for parameter in views.values() if parameter.grad is not None])
        self.stamps = {of: GradientStamp(parameter) for of, parameter in views.items()}

    def holds(self, parameter: Any) -> bool:
        """Returns whether the gradient is zero because `clear` zeroed it, and stands for none."""
        stamp = self.stamps.get(id(parameter))
        return stamp is not None and stamp.is_current()

    def was_moved(self, parameter: nn.Parameter) -> bool:
        """True if a forward has replaced a zeroed view by one of rebuilt buckets, zero too; the old bucket is freed."""
        stamp = self.stamps.get(id(parameter))
        if stamp is None or stamp.gradient is parameter.grad:
            return False
        stamp.take()
        return True
