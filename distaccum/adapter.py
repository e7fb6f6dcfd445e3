"""Adapter: unwraps what another training library prepared, before an engine is chosen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from .options import as_list

RunBackward = Callable[..., Any]


class Prepared:
    """The caller's objects, as lists; adapters replace their library's wrappers with the objects inside."""

    def __init__(self, model: Any, optimizer: Any, scheduler: Any, scaler: Any, adapters: Sequence[Adapter]) -> None:
        as_list("scaler", None if scaler is None else [scaler], "is_enabled")
        self.models = as_list("model", model, "forward")
        self.optimizers = as_list("optimizer", optimizer, "param_groups")
        self.schedulers = as_list("scheduler", scheduler, "step")
        self.scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self.adapters = adapters
        for adapter in adapters:
            adapter.unwrap(self)


class Adapter:
    """A library whose wrappers are taken off; by default no method does anything."""

    scales_losses = False  # its backward multiplies the loss by the scaler's scale

    def __init__(self, accelerator: Any) -> None:
        """Takes the Accumulator's `accelerator=`."""

    def unwrap(self, given: Prepared) -> None:
        """Takes the library's wrappers off."""

    def around(self, run_backward: RunBackward) -> RunBackward:
        """Returns a function to run backward in place of `run_backward`."""
        return run_backward

    def begin(self) -> None:
        """Raises if the library accumulates by itself; called before each window."""

    def after_step(self, stepped: bool) -> None:
        """Tells the library about a step, taken or skipped."""

    def communicates(self, loader: Any) -> bool:
        """Returns whether drawing from a loader communicates; ranks at different micro-steps must not do that."""
        return False

    def reading(self, loader: Any, is_last: Callable[[], bool]) -> AbstractContextManager[None]:
        """A context for the loop over a loader; `is_last()`: the micro-batch at work is the last that was drawn."""
        return nullcontext()

    def tells_state(self, loader: Any) -> bool:
        """Returns whether a loader's `state_dict()` works."""
        return True
