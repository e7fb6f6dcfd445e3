"""Planner: makes the windows of an Accumulator, one after the other, from the reports of all ranks."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Generic, final

from .agreement import compare
from .cutting import Batch
from .feed import END, Ahead, Draw, Make, Pace, Position, Reader, draw, held, num_items
from .guard import OPEN, OVER, Stage, refuse_copy
from .job import LOOP, Job, Manner, Start
from .law import DistaccumError, Plan, Reports, all_or_none, in_short, shorten
from .private import step_hooks_of
from .window import SUM, Window


@dataclass(eq=False)
class Place:
    """A loader that tells its state, in its place among those that are read in turn."""

    loader: Callable[[], Any] | None  # a reference; None: of a loaded state, until a loader takes the place
    position: Position | None = None  # where its next pass begins, or a loaded state's
    loads: bool = False  # the loader has yet to be given that state
    reader: Reader | None = None  # of a pass that has not come to its end
    number: int = 0  # of loaders before it

    @property
    def is_read(self) -> bool:
        """A pass over it has begun, and not come to its end."""
        return self.reader is not None or (self.position is not None and self.position[1] >= 0)


@final
class Planner:
    """Plans the windows of one Accumulator."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._window: weakref.ref[Window] | None = None  # the last one
        self._left: list[tuple[Callable[[], Any], Reader]] = []  # iterators that were left, with what was drawn of them
        self._places: list[Place] = []  # of the loaders that tell their state, by their first windows()
        self._num_loaders = 0  # that had a place so far
        self._begins_anew = False  # a state was taken between two loops, so the next new loader is the first
        self._is_between = True  # no loop over windows() has windows left
        _guard_steps(self)

    @property
    def window(self) -> Window | None:
        """The window that was planned last; None if nobody holds it any more."""
        return None if self._window is None else self._window()

    def __getstate__(self) -> dict[str, Any]:
        """The state of a deep copy with model and optimizer: `copy.deepcopy((model, optimizer, accumulator))`."""
        if self.window is not None:
            refuse_copy(self.window)
        places = [Place(None, position) for position in self.positions()]
        return {**self.__dict__, "_window": None, "_places": places}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        _guard_steps(self)

    def plan(self, make: Make, manner: Manner = LOOP) -> Window:
        """Plans the window of the micro-batches that `make` returns for the next update."""
        self._begin()
        found = draw(self.job, make, self.job.index, manner)
        return self._window_of(found, self.job.engine.peers.plan(found.report), manner)

    def _plan_from(self, feed: Ahead, place: Place | None) -> Window:
        before = self.job.start
        self._begin(place)
        found, reports = feed.draw(self.job.index)
        window = self._window_of(found, reports, LOOP, feed.pace)
        self._is_between = window.plan.no_more_after or window.plan.epoch_over
        feed.accept(found, ahead=not self._is_between)
        if window.plan.epoch_over:
            self.job.start = before
        return window

    def _begin(self, place: Place | None = None) -> None:
        self.make_way()
        self.job.start = Start(place=place)
        for one in self.job.adapters:
            one.begin()
        if self.job.compared is None:  # before the first plan, whose rows have as many counts as ranks have names
            compare(self.job)

    def _window_of(self, found: Draw, reports: Reports, manner: Manner, pace: Pace | None = None) -> Window:
        """Makes the window from the merged reports; raises on all of them if one failed."""
        job, engine = self.job, self.job.engine
        peers, counts = engine.peers, job.config.counts.values()
        if reports.failed:
            failed = peers.gather_objects(found.error and in_short(found.error), everyone=True)
            why = "rank {ranks} could not plan this window ({why}); no gradient was touched"
            all_or_none(failed, found.take_error(), why)
        if reports.changed:
            compare(job)
        names = tuple(SUM if manner.is_sum else job.config.reductions)
        plan = Plan(names, reports, len(found.micros))
        if not plan.ranks_agree or ((peers.shares_samples or peers.has_parts) and peers.doubts(reports, counts)):
            peers.compare(peers.gather_objects(found.report, everyone=True), counts)
        if not plan.is_empty:
            engine.check(plan)
            self._look_at_batchnorm(plan)
        for hook in job.last_hooks:
            hook.come_last()
        window = Window(job, plan, found, manner, pace)
        self._window = weakref.ref(window)
        return window

    def make_way(self) -> None:
        """Raises if the last window still holds gradients; a second request discards it, as the error says."""
        window = self.window
        if window is None:
            self.forget()
        if window is None or window.stage in OVER:
            return
        if window.stage in OPEN and not window.may_be_dropped:
            window.may_be_dropped, self.job.lacks_step = True, False
            raise DistaccumError(
                f"another window was requested while one is {window.describe()}; finish its loop and call its "
                "step(), or discard() it (a second request discards it)"
            )
        window.discard()

    def forget(self, *, warns: bool = True) -> None:
        """Clears what a window left behind if it was dropped while it held gradients."""
        job = self.job
        if not job.holds_gradients or self.window is not None:
            return
        job.engine.clear(job.parameters())  # Ctrl-C may have broken off its discard()
        job.holds_gradients = False
        if job.lacks_step and warns:
            job.once(
                "forgotten",
                f"the window of update {job.index} was dropped between its loop and its step(), so its gradients "
                "were discarded and nothing was learned from them; call window.step() after the loop, or discard() to "
                "give a window up",
            )

    def _look_at_batchnorm(self, plan: Plan) -> None:
        job = self.job
        if job.config.batchnorm != "warn" or plan.num_micro_batches <= 1 or "batchnorm" in job.once.keys:
            return
        names = [name for name, module in job.batchnorms if module.training]
        if names:
            job.once(
                "batchnorm",
                f"{shorten(names)} normalise each micro-batch by its own statistics, so the gradient is not that of "
                "the big batch; freeze them (distaccum.batchnorm.freeze), use GroupNorm (to_groupnorm, there) or "
                "LayerNorm, or accept it with batchnorm='ignore'",
            )

    def windows(self, loader: Any, *, ahead: bool) -> Generator[Window]:
        job = self.job
        reader, place = self._reader_of(loader)
        communicates = any(one.communicates(loader) for one in job.adapters)
        feed = Ahead(job, reader, ahead=ahead, communicates=communicates)
        stack = ExitStack()
        try:
            for one in job.adapters:
                stack.enter_context(one.reading(loader, lambda: self._uses_last_of(reader)))
            while True:
                if place is not None:
                    self._join(place)
                window = self._plan_from(feed, place)
                if window.plan.epoch_over:
                    break
                try:
                    yield window
                except GeneratorExit:
                    window.may_be_dropped = True
                    job.lacks_step = job.lacks_step and self.window is not window
                    raise
                if window.plan.no_more_after:
                    if self.window is window:  # unless the caller has planned another
                        self.make_way()  # otherwise a step() forgotten on the last window would go unnoticed
                    break
            if place is not None:
                place.position, place.reader = reader.end(), None
        finally:
            stack.close()
            if feed.leave():
                left = held(loader)
                if not isinstance(left, weakref.ref):  # of strong references, only the last is kept
                    self._left = [one for one in self._left if isinstance(one[0], weakref.ref)]
                self._left.append((left, reader))

    def _uses_last_of(self, reader: Reader) -> bool:
        """True if the micro-batch at work is the last that was drawn."""
        window = self.window
        return window is not None and not reader.has_unused and window.micro_step == len(window) - 1

    def may_be_empty(self, loader: Any) -> bool:
        """Tells whether this loader has a reason to yield nothing: it was left before, or a state was just loaded."""
        was_loaded = self.job.random is not None and self.job.random.loaded is not None
        return was_loaded or any(of() is loader for of, _ in self._left)

    def _reader_of(self, loader: Any) -> tuple[Reader, Place | None]:
        """The reader of an iterator that was left before, or a new one, at the position of a loaded state if any."""
        readers = [reader for of, reader in self._left if of() is loader]
        self._left = [one for one in self._left if one[0]() is not None and one[0]() is not loader]
        tells_state = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
        tells_state = tells_state and all(one.tells_state(loader) for one in self.job.adapters)
        place = position = None
        if tells_state:
            place = next((place for place in self._places if place.loader and place.loader() is loader), None)
            if place is None:
                place, self._num_loaders = Place(held(loader), number=self._num_loaders), self._num_loaders + 1
            self._join(place)
            position = place.position if place.loads else None
            place.loads = position is not None and position[1] == END
            if place.loads:
                self.job.once(
                    "over",
                    "windows() yields nothing: the state was taken in a pass over a later loader, when the one over "
                    "this loader was over; loaders are told apart by their order, so begin with the first of them",
                )
        elif any(place.loader is None for place in self._places):
            self.job.once("loader", f"the state holds a loader's state, which a {type(loader).__name__} cannot load")
        if readers:
            reader = readers[0]
            reader.resume(loader)
        else:
            opens = {} if self.job.random is None else {"before_opening": self.job.random.open}
            reader = Reader(loader, position, tells_state=tells_state, **opens)
        if place is not None:
            place.reader = reader
        return reader, place

    def _join(self, place: Place) -> None:
        """Puts a loader in its place in the order of windows(): that of a loaded state, or after all others."""
        places = self._places
        waiting = next((other for other in places if other.loader is None), None)
        if place in places:
            pass
        elif waiting is not None:
            places[places.index(waiting)] = place
            if place.reader is None:
                place.position, place.loads = waiting.position, True
        elif place.reader is not None:  # its loop goes on after another had begun the order anew
            places.insert(sum(other.number < place.number for other in places), place)
        else:
            if self._begins_anew or any(other.reader for other in places):
                places.clear()
            places.append(place)
        self._begins_anew = False

    def is_between(self) -> bool:
        """Returns whether a job that resumes begins with a loop over windows()."""
        random = self.job.random
        return random.is_between if random.loaded is not None else self._is_between and self.job.start is None

    def positions(self) -> list[Position | None]:
        """The position of each loader that tells its state, in order, where the next update begins."""
        start, positions, is_later_read = self.job.start, list[Position | None](), False
        if start is None and not any(place.is_read for place in self._places):
            self._begins_anew = True
        for place in reversed(self._places):
            position = place.position
            if start is not None and start.place is place:
                position, is_later_read = start.position, True
            elif place.reader is not None:
                position, is_later_read = place.reader.position(), True
            elif is_later_read and position is not None:
                position = position[0], END
            is_later_read = is_later_read or place.is_read
            positions.insert(0, position)
        return positions

    def load(self, positions: list[Position | None]) -> None:
        self._places = [Place(None, position) for position in positions]


@final
class StepHook:
    """Called before each step of an optimizer: refuses one in mid-window, and lets the window's own move on.

    Each plan brings it behind all other hooks, right before the weights move: a state that a hook takes before them is
    of this update, and of the next one afterwards.
    """

    def __init__(self, planner: Planner, optimizer: Any) -> None:
        self._planner, self._optimizer, self._hooks = weakref.ref(planner), optimizer, step_hooks_of(optimizer)
        self._handle = optimizer.register_step_pre_hook(self)

    def come_last(self) -> None:
        if next(reversed(self._hooks), None) != self._handle.id:
            self.remove()
            self._handle = self._optimizer.register_step_pre_hook(self)

    def remove(self) -> None:
        self._handle.remove()

    def __call__(self, *_: object) -> None:
        planner = self._planner()
        window = planner and planner.window
        if window is None:
            return
        if window.stage is Stage.STEPPING:
            window.move_on()
        elif window.stage in (Stage.RUNNING, Stage.COMPLETE) and not window.may_be_dropped:
            raise DistaccumError(
                "optimizer.step() before the window's own: the gradients in it belong to the window; call "
                "window.step() after its loop and nothing else, or give the Accumulator optimizer=None and step "
                "before it"
            )


def _guard_steps(planner: Planner) -> None:
    """Hooks the steps of the optimizers, for as long as the planner lives."""
    optimizers = [one for one in planner.job.optimizers if hasattr(one, "register_step_pre_hook")]
    planner.job.last_hooks = [StepHook(planner, optimizer) for optimizer in optimizers]
    for hook in planner.job.last_hooks:
        weakref.finalize(planner, hook.remove)


@final
class Windows(Iterator[Window[Batch]], Generic[Batch]):
    """Iterates over the windows of a loader, until no rank has a micro-batch left; has a length if the loader has."""

    def __init__(self, planner: Planner, loader: Any, *, ahead: bool) -> None:
        self._planner, self._loader, self._job, self._begins = planner, loader, planner.job, True
        self._windows = planner.windows(loader, ahead=ahead)  # a generator without a reference to this object

    def __next__(self) -> Window[Batch]:
        begins, self._begins = self._begins and not self._planner.may_be_empty(self._loader), False
        try:
            return next(self._windows)
        except StopIteration:
            if begins:
                self._job.once(
                    "empty",
                    f"windows() got a {type(self._loader).__name__} that yields no micro-batch on any rank, so nothing "
                    "was trained; make a generator anew for each epoch, and look at an empty loader's dataset and "
                    "drop_last",
                )
            raise

    def __len__(self) -> int:
        """The number of windows of one pass over the loader, on this rank alone."""
        left, num = len(self._loader), 0
        while left > 0:
            left -= num_items(self._job, self._job.index + num)
            num += 1
        return num

    def close(self) -> None:
        """Leaves the loop, as `break` does."""
        self._windows.close()
