"""Where a window stands: its stage, the micro-step at work, and how errors describe both."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto
from typing import final

from torch import nn

from ..law import DistaccumError, Plan
from .ledger import Ledger
from .source import Source


class Stage(Enum):
    PLANNED = auto()
    RUNNING = auto()
    COMPLETE = auto()  # after the loop: gradients are final
    STEPPED = auto()
    LEFT = auto()  # discarded


class Turn(Enum):
    """The backward of the micro-batch at work, or of a part of it."""

    DONE = auto()
    WAITING = auto()
    FAILED = auto()


DONE, WAITING, FAILED = Turn


@final
class Status:
    """What a window, its extensions and its accumulator share."""

    __slots__ = (
        "allow_discard",
        "has_more_parts",
        "index",
        "ledger",
        "parameters",
        "plan",
        "source",
        "stage",
        "turn",
        "was_asked_to_step",
    )

    def __init__(
        self, index: int, plan: Plan, source: Source, ledger: Ledger, parameters: Sequence[nn.Parameter]
    ) -> None:
        self.index, self.plan, self.source, self.ledger, self.parameters = index, plan, source, ledger, parameters
        self.stage = Stage.PLANNED
        self.turn = DONE
        self.has_more_parts = False  # of parts() or heads()
        self.allow_discard = False  # another window may discard this one without an error
        self.was_asked_to_step = False

    @property
    def num_done(self) -> int:
        """Micro-steps that ended."""
        return self.source.place + (self.turn is DONE and not self.has_more_parts)

    @property
    def is_open(self) -> bool:
        return self.stage in (Stage.RUNNING, Stage.COMPLETE)

    @property
    def is_over(self) -> bool:
        return self.stage in (Stage.STEPPED, Stage.LEFT)

    def refuse_copy(self) -> None:
        if not self.is_over:
            raise DistaccumError(
                f"copying or pickling an Accumulator with a window that is {self.describe()}, of which a copy "
                "would share gradients and flags; do it between two windows, or make an Accumulator of the copied "
                "model and optimizer and give it load_state_dict(accumulator.state_dict())"
            )

    def where(self) -> str:
        place = self.source.place
        return f"in micro-batch {place} of {self.source.num}" if place >= 0 else "outside the loop"

    def describe(self) -> str:
        return {
            Stage.PLANNED: "not begun",
            Stage.RUNNING: f"in its loop ({self.where()})",
            Stage.COMPLETE: "complete but not stepped",
            Stage.STEPPED: "stepped already",
            Stage.LEFT: "discarded (its loop was left, or another window was requested)",
        }[self.stage]
