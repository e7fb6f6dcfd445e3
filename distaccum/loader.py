"""Loader: the windows of a loader, each of which is drawn while the one before it runs."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import ExitStack, suppress
from typing import Any, Generic, final

import torch
from torch import Tensor

from .batch import Batch, Columns, entries_of
from .batches import Batches, cut_up
from .job import Job
from .law import DistaccumError, all_or_none, steps_for, whole_number
from .planning import Planner
from .private import own_version_of
from .window import Window

# About so many elements are compared in each tensor or array of a loop's first item.
NUM_ELEMENTS = 64
# A loader's state; the number of items yielded since; and whether it was taken before the first item of a pass.
Position = tuple[Any, int, bool]
NOTHING = object()
# References to what one variable holds, as sys.getrefcount counts: its own is one.
ALONE = 2


@final
class Windows(Iterator[Window[Batch]], Generic[Batch]):
    """Iterates over the windows of a loader, until no rank has a micro-batch left; has a length if the loader has."""

    def __init__(self, planner: Planner, loader: Any, *, ahead: bool) -> None:
        self._loader = loader
        self._job = planner.job
        # A generator without a reference to this object, so that it ends when the caller drops this.
        self._windows = _windows(planner, loader, ahead)

    def __next__(self) -> Window[Batch]:
        return next(self._windows)

    def __len__(self) -> int:
        """The number of windows of one pass over the loader, on this rank alone."""
        left = len(self._loader)
        num = 0
        while left > 0:
            left -= num_items(self._job, self._job.index + num)
            num += 1
        return num

    def close(self) -> None:
        """Leaves the loop, as `break` does."""
        self._windows.close()


def _windows(
    planner: Planner, loader: Any, ahead: bool, is_ending: Callable[[], bool] = sys.is_finalizing
) -> Generator[Window]:
    job = planner.job
    reading = Loader(planner, loader, ahead=ahead)
    left = ExitStack()
    left.callback(reading.leave)
    try:
        for adapter in job.adapters:
            left.enter_context(adapter.reading(loader, reading.is_in_last))
        # A batch without rows, cut by cost, is a window too.
        while (window := reading.next_window()).plan.num_drawn or window.plan.has_more:
            try:
                yield window
            except GeneratorExit:
                window.may_be_dropped = True
                raise
            if not window.plan.has_more:
                # Otherwise a step() that was forgotten on the last window would go unnoticed.
                if job.open is window:
                    planner.close_previous()
                break
        reading.end(loader)
    finally:
        # As the interpreter ends, modules have lost their names.
        if not is_ending():
            left.close()


@final
class Loader:
    """Reads a loader at an even pace: each micro-step of a window draws part of the next one.

    So a DataLoader's workers never idle, and no window begins by waiting for all of its data.
    """

    def __init__(self, planner: Planner, loader: Any, *, ahead: bool) -> None:
        job = planner.job
        self._planner, self._job = planner, job
        # Ranks wait for each other inside the loader.
        self._communicates = any(adapter.communicates(loader) for adapter in job.adapters)
        self._reads_ahead = ahead and not self._communicates
        # The number of loader items in the window that is planned, and in the one after it.
        self._num = self._num_ahead = 0
        # What was drawn of an iterator comes first, even if a loop that was left is still held.
        kept = next((reader for reader in planner.readers if reader.of() is loader and reader.has_items), None)
        # An empty loader has a reason if it was left before, or a state was just loaded.
        self._may_be_empty = kept is not None or job.random.due is not None
        self._reader: Reader = planner.place.open(loader, kept)
        self._reader.num_loops += 1
        others = [one for one in planner.readers if one is not kept and one.is_kept]
        planner.readers = [*others, self._reader]

    def next_window(self) -> Window:
        """Plans the next window, which is empty if no rank has a micro-batch left."""
        planner, job = self._planner, self._job
        before = job.start
        batches = planner.counted(self._batches)
        if self._reader.tells_state:
            planner.place.start(self._reader)
        if batches.error is not None:
            self._reader.use(0 if self._reader.drop_error(self._num) else self._num)
            if self._communicates and not batches.micro_batches:
                # The others wait for this rank inside the loader, where no report of an error reaches them.
                all_or_none((), batches.take_error(), "")
        window = planner.window_of(batches, pace=self.pace)
        is_last = not window.plan.has_more
        is_over = is_last and not window.plan.num_drawn
        planner.place.is_read = is_last
        self._reader.use(self._num)
        self._num_ahead = self._expected(job.index + 1) if self._reads_ahead and not is_last else 0
        if not self._num_ahead:
            # From here on the loop may write to the items.
            self._reader.fill(0)
        self._may_be_empty |= not is_over
        if is_over:
            job.start = before
        return window

    def pace(self, micro_step: int, num_micro_steps: int) -> None:
        """Draws part of the next window, as `micro_step` of the current one begins."""
        if self._num_ahead:
            self._reader.fill(-(-self._num_ahead * (micro_step + 1) // num_micro_steps))

    def is_in_last(self) -> bool:
        """True if the micro-batch at work is the last that was drawn."""
        window = self._job.open
        return window is not None and not self._reader.drawn and window.micro_step == len(window) - 1

    def end(self, loader: Any) -> None:
        """Notes that the pass over the loader has come to its end; warns if it had no window without a reason."""
        self._reader.end()
        if not self._may_be_empty:
            self._job.once(
                "empty",
                f"windows() got a {type(loader).__name__} that yields no micro-batch on any rank, so nothing was "
                "trained; make a generator anew for each epoch, and look at an empty loader's dataset and drop_last",
            )

    def leave(self) -> None:
        """Stops drawing, because the loop over windows() is over; keeps what was drawn of an iterator."""
        self._num_ahead = 0
        self._reader.leave()

    def _expected(self, index: int) -> int:
        """The number of items in a window to come; 0 if that fails, as requesting the window then does."""
        with suppress(Exception):
            return num_items(self._job, index)
        return 0

    def _batches(self, index: int) -> Batches:
        # In case the next line raises.
        self._num = 0
        self._num = num_items(self._job, index)
        items, is_last = self._reader.peek(self._num)
        if self._job.config.by_cost is None:
            return Batches(items, steps=self._num, no_more_after=is_last)
        batches = cut_up(items[0], self._job, Columns())(index) if items else Batches([])
        batches.no_more_after = is_last
        return batches


def num_items(job: Job, index: int) -> int:
    """The number of loader items in update `index`; warns if they do not make the batch that was requested."""
    config = job.config
    ranks = job.engine.peers.num_data_ranks
    if isinstance(config.steps, int):
        return config.steps
    if config.by_cost is not None:
        return 1
    if (given := config.steps_at(index)) is not None:
        return given
    wanted = config.batch_size
    micro = config.micro_batch_size
    assert wanted is not None and isinstance(micro, int)
    wanted = whole_number(f"batch_size({index})", wanted(index)) if callable(wanted) else wanted
    steps = steps_for(wanted, micro, ranks)
    if steps * micro * ranks != wanted:
        job.once(
            "batch_size",
            f"batch_size={wanted} is not a multiple of {ranks} ranks x {micro} samples: each full update holds "
            f"{steps * micro * ranks} ({steps} micro-batches per rank); split() cuts a batch unevenly instead",
        )
    return steps


@final
class Reader:
    """Draws from a loader with `next()` alone, and keeps what was drawn and not yet used.

    Of a loader that tells its state, it knows the position of the first item that was not used.

    Attributes:
        drawn: The items that are not used yet.
        tells_state: The loader has a state.
        of: A reference to the iterator of which items are kept if its loop is left; of any other loader, to None.
        num_loops: The loops over windows() that read it, or may go on to.
    """

    # It holds no Place, which holds it: the models of a dropped accumulator are freed at once.
    def __init__(
        self,
        loader: Iterable[Any],
        before_opening: Callable[[], object] = bool,
        *,
        tells_state: bool = False,
        position: Position | None = None,
    ) -> None:
        """`before_opening`: called before each `iter(loader)`; `position`: where to begin, or None."""
        self._loader: Any = loader
        self._before_opening = before_opening
        self._iterator: Iterator[Any] | None = None
        self.drawn: list[Any] = []
        self.tells_state = tells_state
        self._position = position
        # A state from before the first item may be that of an earlier pass's end, from which nothing comes first.
        self._may_be_over = position is not None and position[2]
        self._is_fresh = True
        # Those that the loop gets next, while others are drawn; and how many waited at most, at any time.
        self._used: list[Any] = []
        self._most = 0
        # The first that waits while there are more than ever, how it looked, and its tensors then.
        self._first: tuple[Any, list[Any], list[Tensor]] | None = None
        # The loader's, raised after these items.
        self._error: Exception | None = None
        self._has_ended = False
        self.of: Callable[[], Any] = reference(loader) if isinstance(loader, Iterator) else type(None)
        self.num_loops = 0

    def fill(self, num: int) -> bool:
        """Draws until there are `num` items, or the loader ends or fails; returns whether there are `num`.

        Raises if the first item was written to, as by a loader that rotates buffers and came back to its first.
        """
        drawn = self.drawn
        while len(drawn) < num and not self._has_ended and self._error is None:
            if len(self._used) + len(drawn) >= self._most:
                self._most += 1
                if self._first is None and (waiting := [*self._used[:1], *drawn[:1]]):
                    alive: list[Tensor] = []
                    self._first = (waiting[0], _look_at(waiting[0], alive), alive)
            try:
                if self._iterator is None:
                    self._open()
                # Asked before the item is drawn, in case Ctrl-C breaks that off.
                self._position = self.position()
                # Never called again after the end: some loaders then start over, others do on their next iter().
                item = self._next()
            except Exception as error:
                self._error = error
                break
            if item is NOTHING:
                self._has_ended = True
            else:
                drawn.append(item)
                self._is_fresh = False
        if self._first is not None and _look_at(self._first[0], []) != self._first[1]:
            raise DistaccumError(
                "the loader, or count, wrote to a micro-batch that was yielded before (to its buffer, dict or list), "
                "but a window draws all its micro-batches before it runs; expected separate memory for each: yield "
                "copies, by tensor.clone(), array.copy() or dict(batch)"
            )
        if self._used:
            self._used = []
            self._first = None
        return len(drawn) >= num

    def _open(self) -> None:
        num_skipped = 0
        if self._position is not None:
            state, num_skipped, _ = self._position
            # Loading draws no random numbers: torchdata opens the loaded pass in its next call, and draws some.
            with torch.random.fork_rng(devices=[]):
                self._loader.load_state_dict(state)
                # A loader may have no state before it is opened.
                with suppress(Exception):
                    self._loader.state_dict()
        self._iterate()
        for _ in range(num_skipped):
            self._next()

    def _iterate(self) -> None:
        self._before_opening()
        self._iterator = iter(self._loader)

    def _next(self) -> Any:
        assert self._iterator is not None
        item = next(self._iterator, NOTHING)
        if item is NOTHING and self._may_be_over:
            self._iterate()
            item = next(self._iterator, NOTHING)
        self._may_be_over = False
        return item

    def position(self) -> Position | None:
        """The loader's position before the first unused item, or at its end; None if it tells none."""
        if self._position is None and self.tells_state:
            return self._loader.state_dict(), 0, self._is_fresh
        return self._position

    def use(self, num: int) -> None:
        """Drops the first `num` items, which are used now, or cannot be counted."""
        self._used = self.drawn[:num]
        del self.drawn[:num]
        if self._position is not None and self._used:
            state, since, is_fresh = self._position
            self._position = (state, since + len(self._used), is_fresh) if self.drawn or self._has_ended else None

    def end(self) -> None:
        """Notes that the pass over the loader has come to its end, so that the next one begins there."""
        self._position = None
        self._is_fresh = True

    def peek(self, num: int) -> tuple[list[Any], bool]:
        """Up to `num` items, drawn where they are missing, which stay until `use`; and whether these are the last."""
        if not self.fill(num) and self._error is not None:
            raise self._error
        return self.drawn[:num], self._has_ended and len(self.drawn) <= num

    def drop_error(self, num: int) -> bool:
        """Drops the loader's error, if that is why there are not `num` items; returns whether it is."""
        is_why = self._error is not None and len(self.drawn) < num
        self._error = None if is_why else self._error
        return is_why

    @property
    def has_items(self) -> bool:
        """True if items, or an error, were drawn and are not used yet."""
        return bool(self.drawn or self._error)

    @property
    def is_kept(self) -> bool:
        """True if a loop reads it, or items are left of an iterator that lives."""
        return self.of() is not None and (self.num_loops > 0 or self.has_items)

    def leave(self) -> None:
        """Releases the loader when the last loop is left; keeps items of an iterator."""
        self.num_loops -= 1
        if not self.num_loops:
            self._position = self.position()
            self._loader = self._iterator = None
            self._before_opening = bool
            self._used = []
            if self.of() is None:
                self.drawn = []
                self._first = self._error = None

    def resume(self, iterator: Iterator[Any]) -> None:
        """Goes on with the iterator, whose loop was left."""
        self._loader = iterator
        self._iterator = iter(iterator)


def reference(loader: Any) -> Callable[[], Any]:
    """A weak reference to a loader, or, where its type forbids it, as `map` does, one that ends if no other is left."""
    try:
        return weakref.ref(loader)
    except TypeError:
        return lambda: loader if sys.getrefcount(loader) > ALONE else None


def all_of(micro_batches: Any) -> list[Any]:
    """Draws all micro-batches of an iterable."""
    # What is in a list exists already.
    if isinstance(micro_batches, list | tuple):
        return list(micro_batches)
    return Reader(micro_batches).peek(sys.maxsize)[0]


def _look_at(item: Any, alive: list[Tensor]) -> list[Any]:
    """How an item looks now: tensors, which `alive` keeps, arrays, numbers and texts. Reads nothing from a device."""
    if isinstance(item, Tensor):
        alive.append(item)
        # Numpy and others write without torch's knowledge. Bytes, because NaN does not equal itself.
        elements: list[int] = []
        if item.is_cpu and item.layout is torch.strided and not item.is_nested:
            some = item.detach().reshape(-1)[:: 1 + item.numel() // NUM_ELEMENTS]
            elements = some.clone(memory_format=torch.contiguous_format).view(torch.uint8).tolist()
        return [id(item), own_version_of(item), elements]
    if type(item).__module__ == "numpy" and item.shape:
        return [item.reshape(-1)[:: 1 + item.size // NUM_ELEMENTS].tobytes()]
    # Not the number in a dict, which count may have taken out.
    plain = [one for one in item if isinstance(one, str | bytes | int | float)] if isinstance(item, list) else []
    return plain + [look for child in entries_of(item).values() for look in _look_at(child, alive)]
