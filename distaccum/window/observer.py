"""Observer, which hears what a window does; and Complete, a window after its loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..law.plan import Plan
from .ledger import Ledger
from .status import Status


class Observer:
    """Every method does nothing; a subclass overrides what it wants to hear. One serves all windows of an accumulator.

    Each method may raise: the window is then discarded, on this rank.
    """

    def begin(self, at: Status) -> None:
        """A window begins, before its first micro-batch."""

    def before_backward(self, at: Status, reduces: bool) -> None:
        """A backward begins. `reduces`: other ranks take part in it, so a failure in it cannot be undone."""

    def after_backward(self, at: Status) -> None:
        """A backward ended without an error."""

    def after_micro_batch(self, at: Status) -> None:
        """The last backward of a micro-batch ended."""

    def finishing(self, at: Status) -> None:
        """The loop ended; the engine reduces next what no backward reduced."""

    def complete(self, complete: Complete) -> None:
        """Gradients are final."""

    def end(self, outcome: str) -> None:
        """The window is over: "stepped", "undone", or the reason of a skip. Twice is no harm."""


@dataclass(slots=True)
class Complete:
    """A window after its loop: all that a commit needs, and nothing of how it came to be. Nobody changes it."""

    index: int
    plan: Plan
    counts: dict[str, float]  # the global denominators
    num_micro_batches: int  # of this rank
    ledger: Ledger
    parameters: Sequence[nn.Parameter]
    observers: tuple[Observer, ...]
    started: float  # by time.perf_counter()
    stand_in: Any  # what this rank can stand in with after this window
    undo: Callable[[], None]  # discards the window
    close: Callable[[], None]  # the window was stepped: clears its gradients
