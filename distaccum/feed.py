"""Feeds: draw the next window's micro-batches, count what is in them, and report it to the other ranks."""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from numbers import Real
from typing import Any, final

import torch
from torch import Tensor

from .cutting import Columns, Count, WouldWait, count_samples, cut_batch, cut_entries, fresh, refuse_to_wait, tensors_in
from .guard import tell_count
from .job import LOOP, Counts, Job, Manner, Micro, Seen
from .law import DistaccumError, RankReport, Reports, all_or_none, cut_evenly, steps_for, whole_number
from .private import own_version_of
from .ranks import Owed

NUM_ELEMENTS = 64  # compared in each tensor of a loop's first item
# A tensor, torch's count of writes to it, and some elements, since numpy and others write without torch's knowledge.
Look = tuple[Tensor, int | None, bytes]


@dataclass
class Batches:
    """This rank's micro-batches of one window."""

    micro_batches: list[Any]
    lengths: list[int] | None = None  # in samples, if a batch was cut
    costs: list[int] | None = None  # if it was cut by cost
    steps: int = 0  # as requested; 0: any number
    no_more_after: bool = False


Make = Callable[[int], Batches]  # by the update's index
# Of a loader: its state_dict(), and the number of items that it has yielded since, or one of these marks.
Position = tuple[Any, int]
START = -1  # A pass begins here: the state may still be that of an earlier pass's end.
END = -2  # The pass is over, and the state is that of its end.
Pace = Callable[[int, int], None]  # draws part of the next window, given a micro-step and the number of them


def cut_up(batch: Any, job: Job, columns: Columns, parts: int = 1, *, in_order: bool = False) -> Make:
    """Cuts a batch into as few parts as fit, or `steps`, but at least `parts`; `in_order` even if cut by cost."""

    def make(index: int) -> Batches:
        total, most, by = columns.length_of(batch), job.most, job.config.by_cost
        if by is not None:
            found = Batches(*by.cut(batch, total, most, parts, columns.whole, job.once, in_order=in_order))
        else:
            steps = job.config.steps_at(index)
            sizes = cut_evenly(total, parts=max(steps or parts, -(-total // (most or max(total, 1)))))
            found = Batches(list(cut_batch(batch, sizes, total, columns.whole)), lengths=sizes, steps=steps or 0)
        if len(found.micro_batches) > 1:
            _warn_of_changes(job, cut_entries(batch, total, columns.whole), total)
        return found

    return make


def _warn_of_changes(job: Job, entries: Seen, total: int) -> None:
    """Warns about entries that are cut now and went whole before, or the reverse; notes the new ones."""
    for path, is_cut in entries.items():
        if job.seen.setdefault(path, is_cut) != is_cut and path:
            here = ".".join(map(str, path))
            forms = "is cut", "went whole to each micro-batch", "goes whole to each micro-batch", "was cut"
            now, before = forms[:2] if is_cut else forms[2:]
            can_be_named = len(path) == 1 or isinstance(path[-1], str)
            name = f"whole=({path[-1]!r},)" if can_be_named else "whole= (in a dict, under a name of its own)"
            job.once(
                f"cut {here}",
                f"{here!r} {now} in a batch of {total} samples, and {before} in an earlier one: its length equals "
                f"the batch's by chance in one of them. If its rows are not samples, say {name} in split(), update(), "
                "contrast() and check()",
                on_each_rank=True,
            )


@dataclass
class Draw:
    """This rank's part of a window, before it has heard from the others."""

    report: RankReport
    micros: list[Micro]  # the micro-batches in which anything counts
    substitute: Micro | None  # to stand in with: the last one with a count for each name, or else the last
    error: Exception | None  # from drawing or counting, kept until the other ranks have the report

    def take_error(self) -> Exception | None:
        """Returns the error, and drops it together with the micro-batches, which its traceback would keep alive."""
        error, self.error, self.micros = self.error, None, []
        return error


@final
class Ahead:
    """Reads a loader at an even pace: each micro-step of a window draws part of the next one.

    So a DataLoader's workers never idle, and no window begins by waiting for all of its data. The next window is
    reported as soon as it is drawn, so the report has a micro-step in which to arrive. `Peers.owe` says what happens to
    it if ranks leave a window at different places.
    """

    def __init__(self, job: Job, reader: Reader, *, ahead: bool, communicates: bool) -> None:
        self.reader, self._job, self._peers = reader, job, job.engine.peers
        self._communicates = communicates  # drawing does: ranks wait for each other in the loader
        self._reads_ahead = ahead and not communicates
        self._num = 0  # loader items in the next window
        self._is_due = False  # the next window is still to be drawn, and not given up
        self._owed: Owed | None = None  # the next window's report
        self._next: Draw | None = None  # what was reported

    def draw(self, index: int) -> tuple[Draw, Reports]:
        """This rank's part of update `index`, and the merged reports of all ranks."""
        # Either the report was paid ahead and still fits, or it is paid now, or all ranks plan anew: a rank did not
        # pay, the steps have changed, or the last window was left or skipped and so lacks the expected stand-in.
        owed, self._owed, self._is_due = self._owed, None, False
        if owed is not None and owed.update == index and owed.wait is None:
            self._next = draw(self._job, self._make, index)
            self._peers.pay(owed, self._next.report)
        elif owed is not None and owed.update == index:
            drawn_for, self._num = self._num, 0
            with suppress(Exception):  # drawing it anew, below, fails with the same error
                self._num = num_items(self._job, index)
            self._next = self._next if self._num == drawn_for else None
        found, self._next = self._next, None
        reports = None if owed is None else self._peers.settle(owed)
        lacks = self._job.substitute is None and found is not None and found.report.has_stand_in
        if found is None or reports is None or found.report.update != index or lacks:
            found, reports = draw(self._job, self._make, index), None
        if self._job.start is not None:
            self._job.start.position = self.reader.position()
        if found.error is not None:
            self.reader.drop(self._num)  # its error is raised now
            if self._communicates and not found.report.num_drawn:
                # The others wait for this rank inside the loader, where no report of an error reaches them.
                all_or_none((), found.take_error(), "")
        return found, self._peers.plan(found.report) if reports is None else reports

    def accept(self, draw: Draw, *, ahead: bool) -> None:
        """Notes that all ranks made a window of `draw`; with `ahead`, the next one may be drawn now."""
        self.reader.use(self._num)
        if ahead and self._reads_ahead:
            self._owed = self._peers.owe(draw.report)
            with suppress(Exception):  # requesting that window fails with the same error
                self._num, self._is_due = num_items(self._job, self._owed.update), True
        else:
            self.reader.settle_reuse()  # from here on the loop may write to the items

    def pace(self, micro_step: int, num_micro_steps: int) -> None:
        """Draws part of the next window, as `micro_step` of the current one begins."""
        if not self._is_due:
            return
        num = -(-self._num * (micro_step + 1) // num_micro_steps)
        self._is_due = self.reader.fill(num) and num < self._num
        if micro_step == 0:
            self.reader.settle_reuse()
        owed = self._owed
        if not self._is_due and owed is not None and owed.wait is None:
            with suppress(WouldWait):
                self._next = draw(self._job, partial(self._make, ahead=True), owed.update, ahead=True)
                self._peers.pay(owed, self._next.report)

    def leave(self) -> bool:
        """Stops drawing, because the loop over windows() is over; returns whether the reader keeps any items."""
        self._is_due = False
        return self.reader.leave()

    def _make(self, index: int, *, ahead: bool = False) -> Batches:
        self._num = 0  # in case the next line raises
        self._num = num_items(self._job, index)
        self.reader.fill(self._num)
        items, is_last = self.reader.peek(self._num)
        if self._job.config.by_cost is None:
            return Batches(items, steps=self._num, no_more_after=is_last)
        if ahead:
            refuse_to_wait(items)  # cutting reads the costs
        batches = cut_up(items[0], self._job, Columns())(index) if items else Batches([])
        batches.no_more_after = is_last
        return batches


def num_items(job: Job, index: int) -> int:
    """The number of loader items in update `index`; warns if they do not make the batch that was requested."""
    config, ranks = job.config, job.engine.peers.num_data_ranks
    if isinstance(config.steps, int):
        return config.steps
    if config.by_cost is not None:
        return 1  # a batch, which is cut
    if (given := config.steps_at(index)) is not None:
        return given
    wanted, micro = config.batch_size, config.micro_batch_size
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
    """Draws from a loader with `next()` alone, and keeps what was drawn and not yet used."""

    def __init__(
        self, loader: Any, position: Position | None, *, tells_state: bool, before_opening: Callable[[], object] = bool
    ) -> None:
        self._loader, self._tells_state, self._before_opening = loader, tells_state, before_opening
        self._iterator: Iterator[Any] | None = None
        self._drawn: list[Any] = []
        self._position = position  # before the first of these items, unless
        self._asks = tells_state and position is None  # the loader itself knows it
        self._is_fresh = True  # it has drawn nothing
        self._was_at_start = position is not None and position[1] == START
        self._first: tuple[Any, list[Look]] | None = None  # the first item and how it looked, until settle_reuse()
        self._error: Exception | None = None  # which the loader raised after these items
        self._has_ended = position is not None and position[1] == END

    @property
    def has_unused(self) -> bool:
        return bool(self._drawn)

    def fill(self, num: int) -> bool:
        """Draws until there are `num` items, or the loader ends or fails; returns whether there are `num`."""
        while len(self._drawn) < num and not self._has_ended and self._error is None:
            iterator = self._open() if self._iterator is None else self._iterator
            self._position, self._asks = self.position(), False  # also if Ctrl-C breaks the next line off
            try:
                # Never called again after the end: some loaders then start over, others do on their next iter().
                self._drawn.append(next(iterator))
            except StopIteration:
                self._has_ended = not self._was_at_start
                if self._was_at_start:
                    self._was_at_start = False
                    self._iterate()
            except Exception as error:  # raised on all ranks when its window is requested
                self._error = error
            if self._is_fresh and self._drawn:
                self._first = self._drawn[0], _look_at(self._drawn[0])
                self._is_fresh = self._was_at_start = False
        return len(self._drawn) >= num

    def peek(self, num: int) -> tuple[list[Any], bool]:
        """Returns up to `num` items, which stay until `use`, and whether these are the last."""
        if self._error is not None and len(self._drawn) < num:
            raise self._error
        if len(self._drawn) > 1:
            self._refuse_reuse()
        return self._drawn[:num], self._has_ended and len(self._drawn) <= num

    def settle_reuse(self) -> None:
        """Checks for reuse a last time, before the loop gets the first item and may write to it."""
        self._refuse_reuse()
        self._first = None

    def _refuse_reuse(self) -> None:
        """Raises if the first item was written to, as by a loader that rotates buffers and came back to its first."""
        if self._first is None:
            return
        item, before = self._first
        now = _look_at(item)
        pairs = zip(now, before, strict=False)
        if len(now) != len(before) or not all(a[0] is b[0] and a[1:] == b[1:] for a, b in pairs):
            raise DistaccumError(
                "the loader wrote to a micro-batch that it had yielded before (to the same buffer, or the same dict), "
                "but a window draws all its micro-batches before it runs; expected separate memory for each: yield "
                "copies, by tensor.clone(), array.copy() or dict(batch)"
            )

    def use(self, num: int) -> None:
        """Drops the first `num` items, which are used now."""
        used = min(num, len(self._drawn))
        del self._drawn[:used]
        if self._position is not None and used:
            self._position = self._position[0], max(self._position[1], 0) + used
        self._asks = self._tells_state and not self._drawn and not self._has_ended

    def drop(self, num: int) -> None:
        """Drops the loader's error or, if there is none, the first `num` items, which cannot be counted."""
        if self._error is not None and len(self._drawn) < num:
            self._error = None
            self.use(0)
        else:
            self.use(num)

    def position(self) -> Position | None:
        """The loader's position before the first unused item, or at its end; None if it is unknown."""
        if not self._asks:
            return self._position
        return self._loader.state_dict(), START if self._is_fresh else 0

    def end(self) -> Position | None:
        """The position at which the next pass begins, now that this one has come to its end."""
        had_ended = self._position is not None and self._position[1] == END
        state = self._position[0] if self._position is not None and had_ended else self._loader.state_dict()
        return state, START

    def leave(self) -> bool:
        """Releases the loader, since the caller left the loop; returns whether items of an iterator are kept."""
        self._position, self._asks = self.position(), False
        is_iterator = self._iterator is self._loader
        self._loader = self._iterator = None
        if not is_iterator:
            self._drawn = []
        return is_iterator and bool(self._drawn or self._error)

    def resume(self, iterator: Any) -> None:
        self._loader, self._iterator = iterator, iter(iterator)

    def _open(self) -> Iterator[Any]:
        state, skipped = self._position or (None, 0)
        if self._position is not None:
            # Loading draws no random numbers: torchdata opens the loaded pass in its next call, and draws some.
            with torch.random.fork_rng(devices=[]):
                self._loader.load_state_dict(state)
                with suppress(Exception):  # a loader may have none before it is opened
                    self._loader.state_dict()
        iterator = self._iterate()
        for i in range(skipped):
            if next(iterator, self) is self and i == 0:  # the state was that of an earlier pass's end
                iterator = self._iterate()
                next(iterator, None)
        return iterator

    def _iterate(self) -> Iterator[Any]:
        self._before_opening()
        iterator: Iterator[Any] = iter(self._loader)
        self._iterator = iterator
        return iterator


def held(iterator: Any) -> Callable[[], Any]:
    """A reference to an iterator that was left: a weak one, unless its type forbids it."""
    try:
        return weakref.ref(iterator)
    except TypeError:  # such as a list's iterator
        return lambda: iterator


def all_of(micro_batches: Any) -> list[Any]:
    """Draws all micro-batches of an iterable."""
    if isinstance(micro_batches, list | tuple):
        return list(micro_batches)  # all exist already
    reader = Reader(micro_batches, None, tells_state=False)
    reader.fill(sys.maxsize)
    return reader.peek(sys.maxsize)[0]


def _look_at(item: Any) -> list[Look]:
    """The tensors of an item as they look now; reads nothing from a device."""
    found: list[Look] = []
    for _, tensor in tensors_in(item):
        elements = b""
        if tensor.is_cpu and tensor.layout is torch.strided and not tensor.is_nested and tensor.numel():
            some = tensor.detach().reshape(-1)[:: -(-tensor.numel() // NUM_ELEMENTS)]
            packed = some.clone(memory_format=torch.contiguous_format)
            elements = bytes(packed.view(torch.uint8).tolist())  # as bytes NaN equals itself
        found.append((tensor, own_version_of(tensor), elements))
    return found


def draw(job: Job, make: Make, index: int, manner: Manner = LOOP, *, ahead: bool = False) -> Draw:
    """Draws and counts the micro-batches of update `index`; keeps an error until the other ranks have the report.

    Micro-batches that count nothing are left out, unless other ranks have parts of them. `ahead`: raises WouldWait.
    """
    engine, peers = job.engine, job.engine.peers
    counts_of = {"samples": count_samples} if manner.is_sum else job.config.counts
    batches, counts, pieces, error, fingerprint = Batches([]), list[Counts](), list[list[Counts]](), None, 0
    try:
        batches = make(index)
        if engine.pipeline is None:
            counts = _counts_of(counts_of, batches, ahead)
            if "count" not in job.once.keys and batches.lengths is None and count_samples in counts_of.values():
                tell_count(batches.micro_batches, job.once)
        else:
            count = lambda found: _counts_of(counts_of, Batches(found), ahead)  # noqa: E731
            pieces = engine.pipeline.count(batches.micro_batches, count)
            counts = [tuple(map(sum, zip(*of_pieces, strict=True))) for of_pieces in pieces]
        if peers.fingerprint is not None:
            fingerprint = peers.fingerprint(batches.micro_batches, ahead=ahead)
    except WouldWait:
        raise
    except Exception as caught:
        error = caught
        peers.tell(caught)
    keeps = peers.has_parts
    micros = [
        Micro(batch, own, number, pieces[number] if pieces else ())
        for number, (batch, own) in enumerate(zip(batches.micro_batches, counts, strict=False))
        if keeps or any(own)
    ]
    full = [one for one in micros if keeps or all(one.counts)]
    by_hand, largest, width = (False, 0, 0) if manner.measure is None else manner.measure(batches)
    report = RankReport(
        update=index,
        steps=batches.steps,
        num_drawn=len(batches.micro_batches),
        num_counted=len(micros),
        no_more_after=batches.no_more_after,
        all_terms=len(full) == len(micros),
        all_terms_in_last=not micros or (bool(full) and full[-1] is micros[-1]),
        has_stand_in=job.substitute is not None or (ahead and engine.lockstep),  # the current window will leave one
        failed=error is not None,
        agrees=manner.agrees,
        reduce_afterwards=by_hand or engine.pipeline is not None,
        changed=not peers.is_alone and job.compared != job.trainable(),
        largest=largest,
        largest_sample=width,
        fingerprint=fingerprint,
        totals=tuple(map(sum, zip(*counts, strict=True))) or (0.0,) * len(counts_of),
    )
    try:
        last = (full or micros)[-1] if micros and engine.lockstep else None
        names = len(job.config.counts) if manner.is_sum else 1  # it may stand in where there are more
        substitute = last and replace(last, batch=fresh(last.batch), counts=last.counts * names)
        return Draw(report, micros, substitute, error)
    finally:
        del error, batches  # otherwise this frame and the error's traceback would keep each other, and what was drawn


def _counts_of(counts_of: Mapping[str, Count], batches: Batches, ahead: bool) -> list[Counts]:
    """Each micro-batch's denominators by name. Counts on a device are all read at once."""
    values: list[Any] = []
    for count in counts_of.values():
        known = batches.lengths if count is count_samples else None  # a cut batch knows its lengths
        values += known or [count(micro_batch) for micro_batch in batches.micro_batches]
    rows, plain = len(batches.micro_batches), {int, float}
    numbers = values if plain.issuperset(map(type, values)) else _read(values, ahead)
    for i, value in enumerate(numbers):
        if not (type(value) in plain or isinstance(value, Real)) or not 0 <= float(value) < math.inf:
            name, which = divmod(i, rows)
            shape = f" of shape {list(value.shape)}" if isinstance(value, Tensor) else ""
            seen = repr(value) if len(repr(value)) < 60 else f"a {type(value).__name__}{shape}"
            cure = "; add them up with .sum()" if shape else ""
            raise ValueError(
                f"count gave {seen} for {list(counts_of)[name]!r} in micro-batch {which}, expected a finite number "
                f"of at least 0{cure}"
            )
    return [tuple(map(float, numbers[i::rows])) for i in range(rows)]


def _read(values: list[Any], ahead: bool) -> list[Any]:
    """Replaces one-element tensors with their numbers, in one read for all of them."""
    tensors = {i: value for i, value in enumerate(values) if isinstance(value, Tensor) and value.numel() == 1}
    if not tensors:
        return values
    if ahead:
        refuse_to_wait(list(tensors.values()))
    device = next(iter(tensors.values())).device
    wide = None if device.type == "mps" else torch.float64  # exact for whole numbers up to 2**53
    stacked = torch.stack([tensor.detach().reshape(()).to(device, wide) for tensor in tensors.values()])
    numbers = dict(zip(tensors, stacked.tolist(), strict=True))
    return [numbers.get(i, value) for i, value in enumerate(values)]
