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

    def draw(self, original: Any, iterator: Any) -> Any:
        batch = original(iterator)
        self._drawn.append(source_of(iterator))
        return batch

    def batch(self) -> tuple[int, int]:
        """The loader that was drawn from last, and the number of its batch. Others only validate."""
        self._batch = self.now()
        loader, number = self._batch
        self._batches[loader] = number
        self._drawn.clear()
        return self._batch

    def now(self) -> tuple[int, int]:
        """The loader that was drawn from last, and the number of its batch that is at work."""
        if not self._drawn:
            return self._batch
        loader = self._drawn[-1]
        return loader, self._batches[loader] + self._drawn.count(loader)
