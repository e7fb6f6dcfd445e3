"""Feeds: what the next window is made of, and when it is drawn and reported to the other ranks."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol, final

from ..ranks import Owed, Peers, Rows
from ..window.status import Status
from .drawing import Batches, Candidate, Take
from .reuse import FirstDrawn


class Counter(Protocol):
    def __call__(self, make: Callable[[], Batches], index: int, *, ahead: bool = False) -> Candidate | None:
        """What `make` gives for update `index`, counted.

        None: it is `ahead` of its time, and would have to wait for a device.
        """

    def is_outdated(self, candidate: Candidate) -> bool:
        """Whether it was reported ahead of its time, and the window before did not end as it was expected to."""


Draw = tuple[Candidate, Callable[[], Rows]]  # this rank's part of a window, and what waits for the reports of all ranks


class Feed(Protocol):
    def draw(self, index: int) -> Draw:
        """This rank's part of update `index`."""

    def accept(self, candidate: Candidate, *, ahead: bool) -> None:
        """A window was made of it, on all ranks; the next one may be drawn ahead."""

    def pace(self, index: int, place: int, num_micro_steps: int) -> None:
        """Micro-step `place` of update `index` begins."""


@final
class Given:
    """Micro-batches that the caller has, or that a batch is cut into."""

    def __init__(
        self,
        make: Callable[[int], Batches],
        report: Callable[[Callable[[], Batches], int], Candidate | None],
        peers: Peers,
    ) -> None:
        self._make, self._report, self._peers = make, report, peers

    def draw(self, index: int) -> Draw:
        candidate = self._report(lambda: self._make(index), index)
        assert candidate is not None
        return candidate, self._peers.post(candidate.report.to_row())

    def accept(self, candidate: Candidate, *, ahead: bool) -> None: ...

    @staticmethod  # a window keeps it, and shall not keep what it was made of
    def pace(index: int, place: int, num_micro_steps: int) -> None: ...


@final
class Ahead:
    """A loader, read at an even pace: each micro-step of a window draws a part of the next one.

    So a DataLoader's workers never stand still, and no window begins by waiting for all of its data. The next window
    is reported as soon as it is drawn, which leaves the report a micro-step to arrive. `Peers.owe` says what becomes of
    it on ranks that leave a window at different places.
    """

    def __init__(self, reader: Reader, take: Take, report: Counter, peers: Peers, *, reads_ahead: bool) -> None:
        self.reader, self._take, self._report, self._peers = reader, take, report, peers
        self._reads_ahead = reads_ahead
        self._is_due = False  # the next window is not reported yet, nor given up
        self._owed: Owed | None = None  # its report
        self._next: Candidate | None = None  # what was reported
        self._num = 0  # items of the loader in it
        self._fault: Exception | None = None  # of asking for that number
        self.is_in_loop = True  # over windows()
        self.status: Status | None = None  # of the last window
        self.at_start: Place | None = None  # the loader's, where it began

    def draw(self, index: int) -> Draw:
        num, fault = self._num_of(index)
        owed, self._owed, self._is_due = self._owed, None, False
        if owed is not None and owed.is_open and owed.update == index:
            self._num, self._next = num, self._drawn(index, num, fault)
            self._peers.pay(owed, self._next.report.to_row())
        candidate, self._next = self._next, None
        rows = None if owed is None else self._peers.settle(owed)
        if rows is None or candidate is None or not self._is_wanted(candidate, index, num):
            candidate = self._drawn(index, num, fault)
            wait = self._peers.post(candidate.report.to_row())
        else:
            known = rows

            def wait() -> Rows:
                return known

        if candidate.error is not None:
            self.reader.drop(num)  # it is raised now
        self._num = num
        return candidate, wait

    def accept(self, candidate: Candidate, *, ahead: bool) -> None:
        self.at_start = self.reader.use(self._num)
        if ahead and self._reads_ahead:
            report = candidate.report
            self._owed, self._is_due = self._peers.owe(report.update + 1, len(report) - 1 + len(report.totals)), True
        else:
            self.reader.settle_reuse()  # the loop may write to what it gets

    def pace(self, index: int, place: int, num_micro_steps: int) -> None:
        if not self._is_due:
            return
        if place == 0:
            self._num, self._fault = self._num_of(index + 1)
        if self._fault is None:  # else it raises where that window is asked for
            self.reader.fill(-(-self._num * (place + 1) // num_micro_steps))
            if place == 0:
                self.reader.settle_reuse()
            if not self.reader.has(self._num):
                return
            self._report_ahead(index + 1)
        self._is_due = False

    def _report_ahead(self, index: int) -> None:
        if self._owed is not None and self._owed.is_open:
            self._next = self._report(self._make(index, self._num, ahead=True), index, ahead=True)
            if self._next is not None:
                self._peers.pay(self._owed, self._next.report.to_row())

    def leave(self) -> None:
        """The loop over windows() is over: nothing more is drawn."""
        self.is_in_loop = self._is_due = False
        self.reader.leave()

    def _num_of(self, index: int) -> tuple[int, Exception | None]:
        try:
            return self._take.num(index), None
        except Exception as error:
            return 0, error

    def _is_wanted(self, candidate: Candidate, index: int, num: int) -> bool:
        """Whether what was drawn ahead is the window that is asked for: none was left, skipped, or changed in length.

        The same on all ranks.
        """
        return candidate.report.update == index and self._num == num and not self._report.is_outdated(candidate)

    def _drawn(self, index: int, num: int, fault: Exception | None) -> Candidate:
        candidate = self._report(self._make(index, num, fault), index)
        assert candidate is not None
        return candidate

    def _make(
        self, index: int, num: int, fault: Exception | None = None, *, ahead: bool = False
    ) -> Callable[[], Batches]:
        def make() -> Batches:
            if fault is not None:
                raise fault
            self.reader.fill(num)
            items = self.reader.peek(num)
            return self._take.batches(items, index, is_last=self.reader.ends_within(num), ahead=ahead)

        return make


class Place(NamedTuple):
    """Where a loader stands."""

    state: Any  # what its state_dict() gave
    num_after: int  # items that it yielded since then


@final
class Reader:
    """Draws from a loader by `next()` alone, and keeps what was drawn and not used."""

    def __init__(self, loader: Any, place: Place | None, *, tells_state: bool) -> None:
        self._loader, self.tells_state = loader, tells_state
        self._iterator: Iterator[Any] | None = None
        self.is_of_iterator = False  # the loader is its own
        self._drawn: list[Any] = []
        self._place = place  # before the first of these
        self._is_fresh = True
        self._first: FirstDrawn | None = None  # of the first window, until the next one is begun
        self._error: Exception | None = None  # after these
        self._has_ended = False

    def fill(self, num: int) -> None:
        """Draws until there are `num`, or as many as can be."""
        iterator = self._open() if self._iterator is None else self._iterator
        while not self.has(num):
            if not self._drawn:
                self._place = self.place()
            try:
                # Not once more after the end: some loaders start anew then, others where they are asked for another
                # iterator.
                self._drawn.append(next(iterator))
            except StopIteration:
                self._has_ended = True
            except Exception as error:  # raised where its window is asked for, on all ranks
                self._error = error
            if self._is_fresh and self._drawn:
                self._first, self._is_fresh = FirstDrawn(self._drawn[0]), False

    @property
    def holds_any(self) -> bool:
        return bool(self._drawn) or self._error is not None

    def has(self, num: int) -> bool:
        return len(self._drawn) >= num or self._has_ended or self._error is not None

    def ends_within(self, num: int) -> bool:
        """Whether the loader has no more after the first `num` items."""
        return self._has_ended and len(self._drawn) <= num

    def peek(self, num: int) -> list[Any]:
        """The first `num` items, or as many as there are; they stay until `use`."""
        if self._error is not None and len(self._drawn) < num:
            raise self._error
        if len(self._drawn) > 1:
            self.refuse_reuse()
        return self._drawn[:num]

    def refuse_reuse(self) -> None:
        """Raises where the loader wrote to the first item that it yielded, since a later one was drawn."""
        if self._first is not None:
            self._first.refuse_change()

    def settle_reuse(self) -> None:
        """Looks for the last time, before the loop gets the first item: one of the next window was drawn since then."""
        self.refuse_reuse()
        self._first = None

    def use(self, num: int) -> Place | None:
        """Lets the first `num` items go; returns where the loader stood before them."""
        before, used = self._place, min(num, len(self._drawn))
        del self._drawn[:used]
        if before is not None:
            self._place = Place(before.state, before.num_after + used)
        return before

    def drop(self, num: int) -> None:
        """Lets the loader's error go, or, if there is none, the first `num` items, which cannot be counted."""
        if self._error is not None and len(self._drawn) < num:
            self._error = None
        else:
            self.use(num)

    def place(self) -> Place | None:
        """Where the loader stands before the first item that was not used."""
        if self._drawn or self._iterator is None or not self.tells_state:
            return self._place
        return Place(self._loader.state_dict(), 0)

    def leave(self) -> None:
        """The caller left the loop: the loader may be used elsewhere."""
        self._place = self.place()
        self._loader = self._iterator = None
        if not self.is_of_iterator:
            self._drawn = []

    def resume(self, iterator: Any) -> None:
        self._loader, self._iterator = iterator, iter(iterator)

    def _open(self) -> Iterator[Any]:
        skipped = 0
        if self._place is not None:
            self._loader.load_state_dict(self._place.state)
            skipped = self._place.num_after
        iterator: Iterator[Any] = iter(self._loader)
        self._iterator = iterator
        self.is_of_iterator = iterator is self._loader
        for _ in range(skipped):
            next(iterator, None)
        return iterator


@final
class Left:
    """An iterator that was left, and what was drawn of it. It is not asked for again when the caller lets it go."""

    def __init__(self, loader: Any, reader: Reader) -> None:
        self.reader, self.is_weak = reader, True
        try:
            self.loader: Callable[[], Any] = weakref.ref(loader)
        except TypeError:  # as of a list's iterator
            self.loader, self.is_weak = lambda: loader, False


def all_of(micro_batches: Any) -> list[Any]:
    """Those of an iterable, drawn at once."""
    if isinstance(micro_batches, list | tuple):
        return list(micro_batches)  # made before
    reader = Reader(micro_batches, None, tells_state=False)
    reader.fill(sys.maxsize)
    return reader.peek(sys.maxsize)
