"""Place: where a job that resumes begins to read its loader, if the loader tells its state."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, final

import torch

from ..job import Job

# A loader's state; the number of items yielded since; and whether it was taken before the first item of a pass.
Position = tuple[Any, int, bool]
NOTHING = object()


@final
class Pass(Iterator[Any]):
    """Iterates over a loader from a position on, and knows the position of its first item that was not used.

    Args:
        position: None if the loader itself knows it.
        before_opening: Called before each `iter(loader)`, which may draw random numbers.
    """

    # It holds no Place, which holds it: the models of a dropped accumulator are freed at once.
    def __init__(self, loader: Any, position: Position | None, before_opening: Callable[[], object]) -> None:
        self._loader, self._position, self._before_opening = loader, position, before_opening
        self._iterator: Any = None
        self._num_unused = 0
        self._is_fresh = True
        self._has_ended = False
        # A state from before the first item may be that of an earlier pass's end, from which nothing comes first.
        self._may_be_over = position is not None and position[2]

    def __next__(self) -> Any:
        if self._iterator is None:
            self._open()
        # Asked before the item is drawn, in case Ctrl-C breaks that off.
        self._position = self.position()
        item = self._draw()
        if item is NOTHING:
            self._has_ended = True
            raise StopIteration
        self._num_unused += 1
        self._is_fresh = False
        return item

    def use(self, num: int) -> None:
        """Notes that the first `num` items are used now."""
        used = min(num, self._num_unused)
        self._num_unused -= used
        if self._position is not None and used:
            state, since, is_fresh = self._position
            self._position = (state, since + used, is_fresh) if self._num_unused or self._has_ended else None

    def position(self) -> Position:
        """The loader's position before the first unused item, or at its end."""
        return self._position or (self._loader.state_dict(), 0, self._is_fresh)

    def end(self) -> None:
        """Notes that the pass has come to its end, so that the next one begins there."""
        self._position = None
        self._is_fresh = True

    def leave(self) -> None:
        """Releases the loader, since the caller left the loop."""
        self._position = self.position()
        self._loader = self._iterator = None

    def resume(self, iterator: Any) -> None:
        """Goes on with an iterator that was left."""
        self._loader = iterator
        self._iterator = iter(iterator)

    def _open(self) -> None:
        if self._position is not None:
            # Loading draws no random numbers: torchdata opens the loaded pass in its next call, and draws some.
            with torch.random.fork_rng(devices=[]):
                self._loader.load_state_dict(self._position[0])
                # A loader may have no state before it is opened.
                with suppress(Exception):
                    self._loader.state_dict()
        self._iterate()
        for _ in range(0 if self._position is None else self._position[1]):
            self._draw()

    def _iterate(self) -> None:
        self._before_opening()
        self._iterator = iter(self._loader)

    def _draw(self) -> Any:
        item = next(self._iterator, NOTHING)
        if item is NOTHING and self._may_be_over:
            self._iterate()
            item = next(self._iterator, NOTHING)
        self._may_be_over = False
        return item


@final
class Place:
    """The position at which a job that resumes begins: that of the `windows()` call at work."""

    def __init__(self, job: Job) -> None:
        self._job = job
        # No loop over windows() has windows left.
        self.is_read = True
        # The pass of the call at work, or of the last one, if its loader tells its state.
        self._pass: Pass | None = None
        # Of a loaded state, until a loader is opened.
        self._loaded: Position | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_pass": None, "_loaded": self.position()}

    def open(self, loader: Any, going_on: Pass | None) -> Pass | None:
        """A pass over a loader, from the position of a loaded state if any; None if the loader tells no state.

        `going_on`: the pass over this loader, an iterator, that a loop has left.
        """
        job = self._job
        position = self._loaded
        # After a step that was the pass's last, whose end was yet unseen, the numbers of a state come before this one.
        job.random.is_between |= self._pass is not None
        self.load(None)
        tells_state = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
        if not tells_state or not all(adapter.tells_state(loader) for adapter in job.adapters):
            if position is not None:
                job.once("loader", f"the state holds a loader's state, which a {type(loader).__name__} cannot load")
        elif going_on is not None:
            going_on.resume(loader)
            self._pass = going_on
        else:
            self._pass = Pass(loader, position, job.random.open)
        return self._pass

    def start(self, reading: Pass) -> None:
        """Notes that the window which is being planned begins at the position of this pass, which is at work again."""
        self._pass = reading
        if self._job.start is not None:
            self._job.start.position = reading.position()

    def is_between(self) -> bool:
        """Returns whether a job that resumes begins with a loop over windows()."""
        random = self._job.random
        return random.is_between if random.loaded is not None else self.is_read and self._job.start is None

    def position(self) -> Position | None:
        """The position where the next update begins; None if no loader tells its state."""
        start = self._job.start
        before: Position | None = None if start is None else start.position
        if before is not None or self._pass is None:
            return before or self._loaded
        return self._pass.position()

    def load(self, position: Position | None) -> None:
        """Begins at the position of a state."""
        self._loaded = position
        self._pass = None
