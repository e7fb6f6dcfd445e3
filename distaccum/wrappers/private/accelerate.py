"""Private names of Accelerate, and of torch's schedules that it wraps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from ...private import require

STATE = "accelerate.state.GradientState"
# Name, what for, since which version, and what happens without it.
NAMES = (
    (f"{STATE}._add_dataloader", "keeps a loader read ahead from telling so", "1.11", "it has nothing to tell"),
    (f"{STATE}._remove_dataloader", "keeps a loader read ahead from telling so", "1.11", "it has nothing to tell"),
    (f"{STATE}._set_sync_gradients", "leaves the Trainer's own step out", "1.11", "refused"),
    ("accelerate.optimizer.AcceleratedOptimizer._is_overflow", "tells of a skip", "1.11", "its own last step counts"),
    ("torch.optim.lr_scheduler._opt_called", "tells a schedule of a step", "2.9", "the schedule does not ask"),
)

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
    require("Accelerate", wrapper.gradient_state, "_set_sync_gradients")
    wrapper.gradient_state._set_sync_gradients(False)
    note_step(wrapper, False)
