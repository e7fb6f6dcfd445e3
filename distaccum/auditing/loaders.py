"""Loaders: which batch of which loader is trained."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any, final

from .lines import where
from .private import source_of


@final
class Loaders:
    """Batches that loaders gave, and samplers that repeat samples."""

    def __init__(self, notes: dict[str, None]) -> None:
        self._notes = notes
        self._drawn: list[int] = []  # loaders, since the last backward
        self._batches: Counter[int] = Counter()  # that were trained or skipped, by loader
        self._batch, self._ends = (0, 0), 0
        self._epochs: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # of samplers

    def draw(self, original: Any, iterator: Any) -> Any:
        try:
            batch = original(iterator)
        except StopIteration:
            self._ends += 1
            raise
        self._drawn.append(source_of(iterator))
        return batch

    def batch(self) -> tuple[int, int, int]:
        """A loader, the number of its batch, and how many passes have ended: of the one that was drawn from last.

        Others only validate.
        """
        if self._drawn:
            loader = self._drawn[-1]
            self._batches[loader] += self._drawn.count(loader)
            self._batch = loader, self._batches[loader]
            self._drawn.clear()
        return (*self._batch, self._ends)

    def now(self) -> tuple[int, int]:
        """The loader that was drawn from last, and the number of its batch that is at work."""
        if not self._drawn:
            return self._batch
        loader = self._drawn[-1]
        return loader, self._batches[loader] + self._drawn.count(loader)

    def sample(self, sampler: Any) -> None:
        """Notes that a DistributedSampler pads an epoch, or shuffles it as the one before."""
        if not sampler.drop_last and sampler.total_size > len(sampler.dataset):
            length, more = len(sampler.dataset), sampler.total_size - len(sampler.dataset)
            self._notes[f"{where()[0]}: DistributedSampler repeats {more} of {length} samples to pad each epoch"] = None
        if sampler.shuffle and self._epochs.get(sampler) == sampler.epoch:
            text = "DistributedSampler shuffles alike in each epoch; call its set_epoch(epoch) before"
            self._notes[f"{where()[0]}: {text}"] = None
        self._epochs[sampler] = sampler.epoch
