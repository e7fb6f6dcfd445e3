"""Where a window's micro-batches come from: a list, or a loader that is read while the window runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol, final

from torch import nn

from ..engines import Engine
from ..law.errors import all_or_none
from ..law.plan import Plan

Counts = tuple[float, ...]  # denominators of one micro-batch, by name


@dataclass(frozen=True)
class StandIn:
    """A micro-batch for a rank that has none left and must keep in step with the others."""

    micro_batch: Any
    counts: Counts


class Draws(Protocol):
    """Draws a window while it runs."""

    is_independent: bool  # ranks need not know of each other's micro-batches before the window's edge
    num_drawn: int  # so far, also those that count nothing

    def __call__(self) -> tuple[Any, Counts] | None:
        """The next micro-batch with anything that counts, and its counts."""


class Source(ABC):
    """Abstract: hands out this rank's micro-batches in order, then its stand-ins."""

    draws_on: ClassVar[bool]  # while the window runs

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
        self.num_counted = plan.num_counted  # micro-batches by rank; streaming, those known
        self._micro_batches: deque[Any] = deque(micro_batches)
        self.counts = counts  # of this rank's micro-batches
        self.pieces: Sequence[Sequence[Counts]] = ()  # of each, the counts of what it is run in, where that is cut
        self.numbers = numbers  # their places among all that were drawn
        # Of the micro-step at work:
        self.is_stand_in = False  # it is no micro-batch of this rank's own
        self.reduces = False  # its last backward does
        self.counts_here: Counts = ()  # its denominators
        self._count_micro_steps(engine, plan)

    def _count_micro_steps(self, engine: Engine, plan: Plan) -> None:
        self.num_micro_steps = 0 if plan.is_empty else engine.num_micro_steps(plan)  # with stand-ins
        self.num_early_reductions = engine.num_early_reductions(plan)  # first micro-steps that reduce too

    @property
    def num(self) -> int:
        """This rank's micro-batches; streaming, those known."""
        return len(self.counts)

    def advance(self) -> bool:
        """Goes to the next micro-step, if there is one."""
        place = self.place + 1
        if place >= self.num_micro_steps:
            return False
        self.place = place
        self._arrive()
        return True

    def _arrive(self) -> None:
        """Once in each micro-step, so that nobody computes these again."""
        place = self.place
        self.is_stand_in = place >= len(self.counts)
        self.reduces = place == self.num_micro_steps - 1 or place < self.num_early_reductions
        if not self.is_stand_in:
            self.counts_here = self.counts[place]
        elif self.stand_in is not None:
            self.counts_here = self.stand_in.counts

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

    @abstractmethod
    def look_ahead(self) -> None:
        """Draws what must be known before the backward of the micro-step at work."""

    def skip(self, num: int) -> None:
        """Goes past the first micro-steps, which were done before a state was taken."""
        for _ in range(num):
            self.advance()
            self.take()
            self.look_ahead()

    def clear(self) -> None:
        """Frees what was not handed out."""
        self._micro_batches.clear()
        self.stand_in = None


@final
class Listed(Source):
    """All of the window was drawn at planning."""

    draws_on = False

    def look_ahead(self) -> None:
        return


@final
class Streamed(Source):
    """One micro-batch was drawn at planning; each next one is drawn before the backward of the one before."""

    draws_on = True

    def __init__(
        self,
        engine: Engine,
        plan: Plan,
        stand_in: StandIn | None,
        micro_batches: Sequence[Any],
        counts: list[Counts],
        stream: Draws,
    ) -> None:
        super().__init__(engine, plan, stand_in, micro_batches, counts, [stream.num_drawn - 1] * len(counts))
        self._engine, self._plan = engine, plan
        self._stream: Draws | None = stream
        self._seen = -1  # the micro-step that `look_ahead` was called in last

    def take(self) -> Any:
        if self._stream is not None and not self._stream.is_independent and not self.is_stand_in:
            self.stand_in = StandIn(self._micro_batches[0], (1.0,))
        return super().take()

    def look_ahead(self) -> None:
        # In backward, when the caller has let go of the micro-batch before.
        if self._seen == self.place or self._stream is None:
            return
        self._draw(self._stream)
        self._seen = self.place
        self._arrive()

    def _draw(self, stream: Draws) -> None:
        drawn, error = None, None
        try:
            drawn = stream() if not self.is_stand_in else None
        except Exception as caught:  # others may wait in the gathering below
            error = caught
        if drawn is not None:
            micro_batch, counts = drawn
            self._micro_batches.append(micro_batch)
            self.counts.append(counts)
            self.numbers.append(stream.num_drawn - 1)
        alone = stream.is_independent
        rows = [] if alone else self._engine.peers.gather([float(self.num), float(error is not None)])
        try:
            all_or_none(
                [row[1] for row in rows],
                error,
                "rank {ranks} could not draw a micro-batch (its own error says why)",
            )
        finally:
            del error  # or its traceback would keep this frame
        if alone:
            self.num_micro_steps = max(self.num, self.num_micro_steps)
            ranks = len(self.num_counted)
            self.num_counted = (self.num,) if ranks == 1 else (0,) * ranks  # the others' are not known
            return
        self.num_counted = tuple(int(row[0]) for row in rows)
        plan = replace(self._plan, num_counted=self.num_counted)
        self._engine.check(plan)
        self._count_micro_steps(self._engine, plan)

    def clear(self) -> None:
        super().clear()
        self._stream = None  # which holds the loader

    def total(self) -> float:
        """The window's count over all ranks, after the last micro-batch."""
        mine = float(sum(count for (count,) in self.counts))
        return sum(row[0] for row in self._engine.peers.gather([mine]))


@contextmanager
def untouched_statistics(layers: Sequence[nn.Module]) -> Iterator[None]:
    """Undoes what a stand-in does to running statistics: it was counted when it came first."""
    found = [(b, b.clone()) for layer in layers if layer.training for b in layer.buffers(recurse=False)]
    try:
        yield
    finally:
        for buffer, value in found:
            buffer.copy_(value)
