"""Private names of Accelerate, and of torch's schedules that it wraps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

# In place of a loader's `gradient_state`: its loop then tells nobody that it began or ended.
NOWHERE = SimpleNamespace(_add_dataloader=lambda _: None, _remove_dataloader=lambda _: None)


def note_step(wrapper: Any, stepped: bool) -> None:
    """Tells an AcceleratedOptimizer about a step that it did not take itself.

    `accelerator.optimizer_step_was_skipped` and Accelerate's schedules read `_is_overflow`; if it is missing, they go
    by the wrapper's own last step. A torch schedule made from the wrapper reads `_opt_called`, and warns without it.
    """
    if hasattr(wrapper, "_is_overflow"):
        wrapper._is_overflow = not stepped
    wrapper._opt_called = getattr(wrapper, "_opt_called", False) or stepped


def leave_out_step(wrapper: Any) -> None:
    """Makes the next `step()` of an AcceleratedOptimizer do nothing, as in a micro-step that only accumulates."""
    wrapper.gradient_state._set_sync_gradients(False)
    note_step(wrapper, False)
