"""Source: this rank's micro-batches of a window, and what it stands in with."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

from torch import nn

from ..engines import Engine
from ..law import Plan

Counts = tuple[float, ...]  # denominators of one micro-batch, by name


@dataclass(frozen=True)
class StandIn:
    """A micro-batch for a rank that has none left and must keep in step with the others."""

    micro_batch: Any
    counts: Counts


@final
class Source:
    """Hands out this rank's micro-batches in order, then its stand-ins."""

    def __init__(
        self,
        engine: Engine,
        plan: Plan,
        stand_in: StandIn | None,
        micro_batches: Sequence[Any],
        counts: list[Counts],
        numbers: list[int],
    ) -> None:
        self.place = -1
        self.stand_in = stand_in
        self._micro_batches: deque[Any] = deque(micro_batches)
        self.counts = counts  # of this rank's micro-batches
        self.pieces: Sequence[Sequence[Counts]] = ()  # of each, the counts of what it is run in, where that is cut
        self.numbers = numbers  # their places among all that were drawn
        # Of the micro-step at work:
        self.is_stand_in = False  # it is no micro-batch of this rank's own
        self.reduces = False  # its last backward does
        self.counts_here: Counts = ()  # its denominators
        self.num_micro_steps = 0 if plan.is_empty else engine.num_micro_steps(plan)  # with stand-ins
        self.num_early_reductions = engine.num_early_reductions(plan)  # first micro-steps that reduce too

    @property
    def num(self) -> int:
        """This rank's micro-batches."""
        return len(self.counts)

    def advance(self) -> bool:
        """Goes to the next micro-step, if there is one."""
        place = self.place + 1
        if place >= self.num_micro_steps:
            return False
        self.place = place
        self.is_stand_in = place >= len(self.counts)
        self.reduces = place == self.num_micro_steps - 1 or place < self.num_early_reductions
        if not self.is_stand_in:
            self.counts_here = self.counts[place]
        elif self.stand_in is not None:
            self.counts_here = self.stand_in.counts
        return True

    def micro_batches(self) -> Sequence[Any]:
        """This rank's own that were not handed out yet."""
        return self._micro_batches

    def to_come(self) -> Sequence[Any]:
        """Those, and the stand-ins after them."""
        num = self.num_micro_steps - self.num
        return [*self._micro_batches, *([self.stand_in.micro_batch] * num if self.stand_in is not None else [])]

    def take(self) -> Any:
        """The micro-batch of the micro-step at work; not kept, so that the caller can free it."""
        if self._micro_batches:
            return self._micro_batches.popleft()
        assert self.stand_in is not None
        return self.stand_in.micro_batch

    def clear(self) -> None:
        """Frees what was not handed out."""
        self._micro_batches.clear()
        self.stand_in = None


@contextmanager
def untouched_statistics(layers: Sequence[nn.Module]) -> Iterator[None]:
    """Undoes what a stand-in does to running statistics: it was counted when it came first."""
    found = [(b, b.clone()) for layer in layers if layer.training for b in layer.buffers(recurse=False)]
    try:
        yield
    finally:
        for buffer, value in found:
            buffer.copy_(value)
