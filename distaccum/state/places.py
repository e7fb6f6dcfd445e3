"""Places of loaders that tell their state: where a job that resumes begins to read each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, final

import torch

from ..job import Job
from ..loader import reference

# `(state, items yielded since)`. `START` marks a state taken before the first item; it may still be that of an earlier
# pass at its end. `END` marks a state taken at the end of a pass.
Position = tuple[Any, int]
START, END = -1, -2
NOTHING = object()


@final
class Pass(Iterator[Any]):
    """Iterates over a loader from a position on, and knows the position of its first item that was not used."""

    def __init__(self, places: Places, place: Place, loader: Any, position: Position | None) -> None:
        self.place = place
        # Where the position is None, the loader itself knows it.
        self._places, self._loader, self._position = places, loader, position
        self._iterator: Any = None
        self._num_unused, self._is_fresh = 0, True
        # A state from before the first item may be that of an earlier pass's end, from which nothing comes first.
        self._may_be_over = position is not None and position[1] != 0
        self._has_ended = position is not None and position[1] == END

    def __next__(self) -> Any:
        if self._has_ended:
            raise StopIteration
        if self._iterator is None:
            self._open()
        # Asked before the item is drawn, in case Ctrl-C breaks that off.
        self._position = self.position()
        item = self._draw()
        if item is NOTHING:
            self._has_ended = True
            raise StopIteration
        self._num_unused, self._is_fresh = self._num_unused + 1, False
        return item

    def use(self, num: int) -> None:
        """Notes that the first `num` items are used now."""
        used = min(num, self._num_unused)
        self._num_unused -= used
        if self._position is not None and used:
            state, since = self._position
            self._position = (state, max(since, 0) + used) if self._num_unused or self._has_ended else None

    def position(self) -> Position:
        """The loader's position before the first unused item, or at its end."""
        return self._position or (self._loader.state_dict(), START if self._is_fresh else 0)

    def join(self) -> None:
        """Called before a window is planned: another loop may have begun the order of loaders anew."""
        self._places.join(self.place)

    def start(self) -> None:
        """Notes that the window which is being planned begins at this position."""
        start = self._places.job.start
        if start is not None:
            start.place, start.position = self.place, self.position()

    def end(self) -> None:
        """Notes that the pass has come to its end, so that the next one begins there."""
        state, since = self.position()
        self.place.position = state if since == END else self._loader.state_dict(), START
        self.place.reading = None

    def leave(self) -> None:
        """Releases the loader, since the caller left the loop."""
        self._position = self.position()
        self._loader = self._iterator = None

    def resume(self, iterator: Any, place: Place) -> None:
        """Goes on with an iterator that was left."""
        self._loader, self._iterator, self.place = iterator, iter(iterator), place

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
        self._places.job.random.open()
        self._iterator = iter(self._loader)

    def _draw(self) -> Any:
        item = next(self._iterator, NOTHING)
        if item is NOTHING and self._may_be_over:
            self._iterate()
            item = next(self._iterator, NOTHING)
        self._may_be_over = False
        return item


@dataclass(eq=False)
class Place:
    """A loader that tells its state, in its place among those that are read in turn."""

    # A reference. None: of a loaded state, until a loader takes the place.
    loader: Callable[[], Any] | None
    # Where its next pass begins, or a loaded state's.
    position: Position | None = None
    # The loader has yet to be given that state.
    loads: bool = False
    # A pass that has not come to its end.
    reading: Pass | None = None
    # The number of loaders before it.
    number: int = 0

    @property
    def is_read(self) -> bool:
        """A pass over it has begun, and not come to its end."""
        return self.reading is not None or (self.position is not None and self.position[1] >= 0)


@final
class Places:
    """The places of an Accumulator's loaders, in the order of their first windows()."""

    def __init__(self, job: Job) -> None:
        self.job = job
        # No loop over windows() has windows left.
        self.are_read = True
        self._places: list[Place] = []
        # The number of loaders that had a place so far.
        self._num_loaders = 0
        # A state was taken between two loops, so the next new loader is the first.
        self._begins_anew = False

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_places": [Place(None, position) for position in self.positions()]}

    def open(self, loader: Any, going_on: Pass | None) -> Pass | None:
        """A pass over a loader, from the position of a loaded state if any; None if the loader tells no state.

        `going_on`: the pass over this loader, an iterator, that a loop has left.
        """
        job = self.job
        tells_state = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
        if not tells_state or not all(adapter.tells_state(loader) for adapter in job.adapters):
            if any(place.loader is None for place in self._places):
                kind = type(loader).__name__
                job.once("loader", f"the state holds a loader's state, which a {kind} cannot load")
            return None
        place = next((place for place in self._places if place.loader and place.loader() is loader), None)
        if place is None:
            place, self._num_loaders = Place(reference(loader), number=self._num_loaders), self._num_loaders + 1
        self.join(place)
        position = place.position if place.loads else None
        place.loads = position is not None and position[1] == END
        if place.loads:
            job.once(
                "over",
                "windows() yields nothing: the state was taken in a pass over a later loader, when the one over "
                "this loader was over; loaders are told apart by their order, so begin with the first of them",
            )
        if going_on is not None:
            going_on.resume(loader, place)
        place.reading = Pass(self, place, loader, position) if going_on is None else going_on
        return place.reading

    def join(self, place: Place) -> None:
        """Puts a loader in its place in the order of windows(): that of a loaded state, or after all others."""
        places = self._places
        waiting = next((other for other in places if other.loader is None), None)
        if place in places:
            pass
        elif waiting is not None:
            places[places.index(waiting)] = place
            if place.reading is None:
                place.position, place.loads = waiting.position, True
        elif place.reading is not None:
            # Its loop goes on after another had begun the order anew.
            places.insert(sum(other.number < place.number for other in places), place)
        else:
            if self._begins_anew or any(other.reading for other in places):
                places.clear()
            places.append(place)
        self._begins_anew = False

    def is_between(self) -> bool:
        """Returns whether a job that resumes begins with a loop over windows()."""
        random = self.job.random
        return random.is_between if random.loaded is not None else self.are_read and self.job.start is None

    def positions(self) -> list[Position | None]:
        """The position of each loader that tells its state, in order, where the next update begins."""
        start, positions, is_later_read = self.job.start, list[Position | None](), False
        self._begins_anew |= start is None and not any(place.is_read for place in self._places)
        for place in reversed(self._places):
            position = place.position
            if start is not None and start.place is place:
                position, is_later_read = start.position, True
            elif place.reading is not None:
                position, is_later_read = place.reading.position(), True
            elif is_later_read and position is not None:
                position = position[0], END
            is_later_read = is_later_read or place.is_read
            positions.insert(0, position)
        return positions

    def load(self, positions: list[Position | None]) -> None:
        self._places = [Place(None, position) for position in positions]
