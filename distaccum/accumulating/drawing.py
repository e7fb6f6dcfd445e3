"""A loader of micro-batches, window by window."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.utils.data import DataLoader

Counts = tuple[float, ...]


class Feed:
    """Draws from `loader`; one that can tell its state (torchdata's) starts from `state`, where that is given."""

    def __init__(self, loader: Iterable[Any], state: Any, *, tells_state: bool) -> None:
        self._loader: Any = loader
        self._state = state
        self._tells_state = tells_state
        self._iterator: Iterator[Any] | None = None
        self.exhausted = False
        self.at_start: Any = None  # the loader's state where the window at hand began

    @property
    def may_be_read_ahead(self) -> bool:
        """Whether it makes no difference when a window is drawn, since workers draw ahead anyway.

        Of any other loader drawing may depend on what the window before did: on weights, or on random numbers.
        """
        kind = type(self._loader).__module__.partition(".")[0]  # a subclass may do more, as Accelerate's does
        return isinstance(self._loader, DataLoader) and self._loader.num_workers > 0 and kind in ("torch", "torchdata")

    def begin(self, before: Stream | None) -> None:
        """A window begins here, after what the one before was to draw: its data are gone with it if it was left."""
        if self._iterator is None:
            if self._state is not None:
                self._loader.load_state_dict(self._state)
            self._iterator = iter(self._loader)
        while before is not None and before.left:
            before.left -= 1
            self.draw(1)
        self.at_start = self.state()

    def state(self) -> Any:
        """The loader's, as of what was drawn; None where it cannot tell, or nothing was drawn."""
        if self._iterator is None or not self._tells_state:
            return self._state
        return self._loader.state_dict()

    def leave(self, *, drawn_ahead: bool) -> None:
        """The epoch is broken off: `state` goes on to tell where, whatever else the loader is used for."""
        self._state, self._iterator = self.at_start if drawn_ahead else self.state(), None

    def draw(self, number: int) -> list[Any]:
        """So many micro-batches, or what is left."""
        assert self._iterator is not None
        drawn: list[Any] = []
        # By next() alone, and not once more after the end: some loaders start anew when asked for an iterator (as
        # islice and zip ask theirs), or after they have ended.
        while len(drawn) < number and not self.exhausted:
            try:
                drawn.append(next(self._iterator))
            except StopIteration:
                self.exhausted = True
        return drawn


class Stream:
    """The micro-batches of one window, drawn while it runs; those without anything that counts are left out."""

    def __init__(self, feed: Feed, steps: int, count: Callable[[list[Any]], list[Counts]], *, alone: bool) -> None:
        self._feed, self.left, self._count = feed, steps, count
        self.steps_alone = alone
        self.drawn = 0

    def __call__(self) -> tuple[Any, Counts] | None:
        while self.left:
            self.left -= 1
            drawn = self._feed.draw(1)
            self.drawn += len(drawn)
            if not drawn:
                self.left = 0
            elif any(counts := self._count(drawn)[0]):
                return drawn[0], counts
        return None
