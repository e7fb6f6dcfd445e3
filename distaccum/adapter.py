"""Adapter: unwraps what another training library prepared, before an engine is chosen."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from .doors import is_there, opened

RunBackward = Callable[..., Any]
# The adapters by packages: one is opened if any of its packages has been imported.
ADAPTERS = {("accelerate",): "Accelerated", ("lightning_fabric", "lightning"): "FromFabric"}


class Prepared:
    """The caller's objects; adapters replace their library's wrappers with the objects inside."""

    models: list[Any]
    optimizers: list[Any]
    schedulers: list[Any]
    scaler: Any


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


def adapters_for(accelerator: Any) -> list[Adapter]:
    """The adapters of libraries that the caller has imported."""
    return [
        opened(name)(accelerator)
        for packages, name in ADAPTERS.items()
        if (any(map(sys.modules.get, packages)) and is_there(name))
        or (accelerator is not None and "accelerate" in packages)
    ]
