"""Windows: those of a loader, one after the other."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any, final

from ..window.window import Window
from .drawing import Take
from .feed import Ahead, Left, Reader
from .planner import Planner


@final
class Windows(Iterator[Window]):
    """The windows of a loader, until no rank has any micro-batch left; of a loader with a length, it has one too."""

    def __init__(self, planner: Planner, loader: Any, *, ahead: bool) -> None:
        setup, progress = planner.setup, planner.progress
        self._loader, self._progress = loader, progress
        self._take = Take(planner.config, progress.size, progress.seen, len(setup.engine.peers.parts), setup.once)
        self._windows = _windows_of(planner, loader, self._take, ahead)  # which does not hold this one

    def __iter__(self) -> Windows:
        return self

    def __next__(self) -> Window:
        return next(self._windows)

    def __len__(self) -> int:
        """The number of windows of one pass over the loader, on this rank alone."""
        left, num = len(self._loader), 0
        while left > 0:
            left -= self._take.num(self._progress.index + num)
            num += 1
        return num

    def close(self) -> None:
        """Leaves the loop, as `break` does."""
        self._windows.close()


def _windows_of(planner: Planner, loader: Any, take: Take, ahead: bool) -> Generator[Window]:
    setup = planner.setup
    reader = _reader_of(planner, loader)
    reads_ahead = ahead and not setup.accelerated.dispatches(loader)
    feed = planner.feed = Ahead(reader, take, planner.reporter, setup.engine.peers, reads_ahead=reads_ahead)
    was_left = False
    try:
        with setup.accelerated.reading(loader):
            while True:
                window = planner.plan_from(feed)
                status = feed.status = planner.status
                assert status is not None
                if status.plan.epoch_over:
                    return
                try:
                    yield window
                except GeneratorExit:
                    status.allow_discard = was_left = True
                    raise
                if status.plan.no_more_after:
                    if planner.status is status:  # else the caller has planned another
                        planner.make_way()  # or a step() forgotten on the last window would pass in silence
                    return
    finally:
        feed.leave()
        if reader.is_of_iterator and reader.holds_any:
            left = Left(loader, reader)  # of those that are held here, the last alone
            planner.left[:] = [*(one for one in planner.left if one.is_weak or left.is_weak), left]
        if planner.feed is feed and not (was_left and reader.tells_state):  # else a state that comes now says where
            planner.feed = None


def _reader_of(planner: Planner, loader: Any) -> Reader:
    """The one that an iterator was left with, or a new one, from the place of a loaded state."""
    setup, progress = planner.setup, planner.progress
    planner.left[:] = [one for one in planner.left if one.loader() is not None]
    for one in planner.left:
        if one.loader() is loader:
            planner.left.remove(one)
            one.reader.resume(loader)
            return one.reader
    tells_state = setup.accelerated.tells_state(loader)
    place, progress.place = progress.place, None
    if place is not None and not tells_state:
        setup.once("loader", f"the state holds a loader's state, which a {type(loader).__name__} cannot load")
        place = None
    return Reader(loader, place, tells_state=tells_state)
