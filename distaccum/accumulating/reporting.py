"""Reporting: what this rank has for a window, counted, as the other ranks hear of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import final

from ..cutting import largest_sample
from ..law import Reduction
from ..window.hooks import Hooks
from ..window.ledger import Ledger, WeightedLedger
from .config import Config
from .drawing import Batches, Candidate, WouldWait, candidate_of
from .progress import Progress
from .setup import Setup

SUM: Mapping[str, Reduction] = {"samples": "sum"}


@dataclass(frozen=True)
class Manner:
    """How a window is run."""

    hooks: Hooks | None = None  # None: those of the accumulator's extensions
    agrees: bool = False  # ranks agree before they reduce
    is_sum: bool = False  # its loss is a sum over samples, whatever the accumulator's reductions say
    ledger: type[Ledger] = WeightedLedger
    reduces_afterwards: bool = False  # no backward reduces


LOOP = Manner()


@final
class Reporter:
    """Counts what one accumulator's windows are made of."""

    def __init__(self, config: Config, setup: Setup, progress: Progress) -> None:
        self._config, self._setup, self._progress = config, setup, progress

    def __call__(
        self, make: Callable[[], Batches], index: int, *, manner: Manner = LOOP, ahead: bool = False
    ) -> Candidate | None:
        """What `make` gives for update `index`, counted.

        None: it is `ahead` of its time, and would have to wait for a device.
        """
        engine, progress = self._setup.engine, self._progress
        may_postpone = manner is not LOOP or engine.pipeline is not None
        try:
            return candidate_of(
                lambda _: make(),
                index,
                None if manner.is_sum else self._config.counts,
                engine=engine,
                # Ahead of its time: the window at work leaves one.
                has_stand_in=progress.stand_in is not None or (ahead and engine.lockstep),
                agrees=manner.agrees,
                reduces_afterwards=partial(self._reduces_afterwards, manner) if may_postpone else None,
                may_wait=not ahead,
            )
        except WouldWait:
            return None

    def is_outdated(self, candidate: Candidate) -> bool:
        """Whether the window before left no stand-in, as one that was skipped, which was expected of it."""
        return candidate.report.has_stand_in and self._progress.stand_in is None

    def _reduces_afterwards(self, manner: Manner, batches: Batches) -> bool:
        setup = self._setup
        return (
            manner.reduces_afterwards
            or setup.engine.pipeline is not None
            or (manner.agrees and self._is_unproven(batches))
        )

    def _is_unproven(self, batches: Batches) -> bool:
        """Whether these micro-batches are not yet proven to fit.

        Where ranks are in step a failure on one cannot be undone either way, and the requested size is believed.
        """
        is_auto = self._config.most == "auto" and "gathered" in self._setup.engine.policies
        if self._setup.forwards_communicate and not is_auto:
            return False
        return not self._progress.size.is_proven(batches.largest, largest_sample(batches.micro_batches))
