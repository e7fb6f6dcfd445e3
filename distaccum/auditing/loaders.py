"""Loaders: which batch of which loader is trained."""

from __future__ import annotations

from collections import Counter
from typing import Any, final

from .private import source_of


@final
class Loaders:
    """Batches that loaders gave."""

    def __init__(self) -> None:
        self._drawn: list[int] = []  # loaders, since the last backward
        self._batches: Counter[int] = Counter()  # that were trained or skipped, by loader
        self._batch = (0, 0)
        self._ends = 0

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
