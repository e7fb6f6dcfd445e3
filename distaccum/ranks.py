"""Peers: the ranks of a data-parallel group, which exchange small values.

Messages about windows travel on host groups of the library's own, so that none can be matched with a collective of the
caller or a wrapper on a rank that is further ahead. All Accumulators on a process group share them. Gradients, norms
and losses on a device are summed on the wrapper's groups, at the same step on all ranks.
"""

from __future__ import annotations

import atexit
import logging
import math
import pickle
import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent import futures
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import Any, TypeVar, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from .law import NUM_LARGEST, DistaccumError, LostRanksError, Reports, Span, refuse_to_differ
from .private import host_backend, new_group, timeout_of
from .text import in_short

# Errors of gloo, NCCL and their store when a rank is gone or late; gloo's have no type of their own.
LOST = re.compile(r"[Cc]onnection (closed|reset|refused)|[Bb]roken pipe|[Tt]imed? ?out|ncclRemoteError|aborted")
logger = logging.getLogger("distaccum")  # by default to stderr
FLAT = 8  # so many ranks send their rows to each other; more ranks form blocks
PATIENCE = timedelta(seconds=10)  # at the end of a process, for a sum that other ranks have not joined
FOREVER = timedelta()  # up to the group's timeout

Value = TypeVar("Value")
Rows = list[list[float]]
Finish = Callable[[timedelta], Tensor]  # waits for the other ranks, up to so long (FOREVER: the group's timeout)
ABANDONED = -1  # in place of an update's index: this rank has nothing to report for it


@dataclass(eq=False)
class Promise:
    """A report that all ranks owe each other for the plan of `update`, which may never be made."""

    update: int
    nothing: Reports  # in its place, if this rank never posts its own: as wide as the others
    wait: Callable[[], Reports] | None = None  # set once the report is posted


class Peers:
    """The ranks of a data-parallel group; without a group, this process alone.

    Attributes:
        rank, num_ranks, global_rank (int): The rank in the group, the group's size, and the rank in the whole job.
        ranks (list[int]): The ranks in the job that take part in updates.
        num_data_ranks (int): Ranks with samples of their own: all of them, except on a mesh (`meshes/ranks.py`).
        is_alone (bool): No other rank takes part in updates.
        shares_samples, has_parts (bool): Ranks outside the group have the same samples; ranks in it, parts of them.
    """

    shares_samples = has_parts = False
    stages: tuple[dist.ProcessGroup, ...] = ()  # over which other ranks have other parameters, for the same samples
    fingerprint: Callable[..., int] | None = None  # of micro-batches, if ranks compare theirs

    def __init__(self, group: dist.ProcessGroup | None = None, everyone: Sequence[int] | None = None) -> None:
        """`everyone`: the ranks in the job that take part in updates; by default those of the group."""
        self.group = group
        self.rank, self.num_ranks, self.global_rank = 0, 1, 0
        if group is not None:
            self.rank, self.num_ranks = dist.get_rank(group), dist.get_world_size(group)
            self.global_rank = dist.get_rank()
        self.num_data_ranks, self.is_alone = self.num_ranks, self.num_ranks == 1
        self._own = tree_of(group)
        self.plan_with(everyone)
        self.record_over(group)

    def plan_with(self, ranks: Sequence[int] | None) -> None:
        """Lets these ranks of the job take part in updates; None: those of the group."""
        self.ranks = [] if self.group is None else list(ranks or dist.get_process_group_ranks(self.group))
        self._everyone, self._plans = tree_of(self.group, ranks), tree_of(self.group, ranks, "plans")

    def record_over(self, group: dist.ProcessGroup | None) -> None:
        """Makes the losses of these ranks add up."""
        self._record_group, self._record_host = group, tree_of(group)

    @property
    def host_group(self) -> dist.ProcessGroup | None:
        """A host group of all ranks, for large values; made when it is first asked for, on all ranks."""
        return None if self.group is None else own_group(self.group)

    def plan(self, report: Reports) -> Reports:
        """Merges a window's reports of all ranks that take part in updates."""
        self._collect_promised()
        return self._send(report)()

    def promise(self, last: Reports) -> Promise:
        """Notes that every rank owes its report for the update after the `last`, which it may `post` early.

        Ranks may leave the window before it at different places, and never post it. So it is collected before the next
        plan of any kind, by any Accumulator on these ranks: then all read the same reports in the same order.
        """
        self._collect_promised()
        promise = Promise(last.update.least + 1, last._replace(update=Span(ABANDONED, ABANDONED)))
        if self._plans is not None:
            self._plans.promise = promise
        return promise

    def _collect_promised(self) -> None:
        if self._plans is not None and self._plans.promise is not None:
            self.collect(self._plans.promise)

    def post(self, promise: Promise, report: Reports) -> None:
        promise.wait = self._send(report)

    def collect(self, promise: Promise) -> Reports | None:
        """The reports of all ranks, or None if some rank did not post its own: then all ranks plan anew."""
        if promise.wait is None:
            self.post(promise, promise.nothing)
        if self._plans is not None and self._plans.promise is promise:
            self._plans.promise = None
        assert promise.wait is not None
        reports = promise.wait()
        return None if reports.update.least == ABANDONED else reports

    def _send(self, report: Reports) -> Callable[[], Reports]:
        own = self.report_of(report)
        if self._plans is None:
            return lambda: own
        sent = self._plans.post(own.to_row(), NUM_LARGEST)
        return lambda: Reports.from_row(sent.wait()[0].tolist())

    def report_of(self, report: Reports) -> Reports:
        """This rank's report as it is merged with others."""
        return report

    def doubts(self, reports: Reports, counts: Iterable[Any]) -> bool:
        """Returns whether ranks with the same samples have to `compare` their reports; `counts`: of the job."""
        return False

    def compare(self, reports: Sequence[Reports], counts: Iterable[Any]) -> None:
        """Raises if the reports of all that take part in updates contradict each other."""
        refuse_to_differ(reports)

    def by_samples(self, values: Sequence[Value]) -> list[list[Value]]:
        """Groups the values of all that take part in updates: for each rank of the group, those of its samples."""
        return [[value] for value in values]

    def gather(self, row: Sequence[float], *, everyone: bool = False) -> Rows:
        """The rows of the group's ranks in order (`everyone`: of all that take part in updates), through the host."""
        tree = self._everyone if everyone else self._own
        return [list(row)] if tree is None else tree.post(row).wait().tolist()

    def largest(self, row: Sequence[float], *, everyone: bool = False) -> list[float]:
        """The largest value of each column of the rows that `gather` returns."""
        tree = self._everyone if everyone else self._own
        return list(row) if tree is None else tree.post(row, len(row)).wait()[0].tolist()

    def gather_objects(self, value: Any, *, everyone: bool = False) -> list[Any]:
        """Like `gather`, for values of any kind."""
        tree = self._everyone if everyone else self._own
        if tree is None:
            return [value]
        own = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        length = int(self.largest([len(own)], everyone=everyone)[0])
        rows = tree.post(pad(own, (0, length - len(own)))).wait()
        return [pickle.loads(row.numpy().data) for row in rows]

    def sum(self, values: Tensor) -> Sent | None:
        """Starts to sum `values` over the ranks, in place once they are waited for; None if there is nothing to add."""
        group = self._record_group
        if group is None or self._record_host is None:
            return None
        if values.device.type == "cpu":
            merged = self._record_host.post(values, 0)
            return Sent(lambda patience: values.copy_(merged.wait(patience)[0]))
        work: Any = dist.all_reduce(values, group=group, async_op=True)
        sent = _LAST[group] = Sent(lambda patience: (work.wait(patience), values)[1])
        return sent

    def tell(self, error: Exception) -> None:
        """Logs an error of a loader, a count or `update()`, which this rank keeps until it can tell the others."""
        if not self.is_alone:
            logger.error(
                "rank %d failed, and the other ranks hear of it when they plan or vote: %s", self.rank, in_short(error)
            )


@contextmanager
def in_contact() -> Iterator[None]:
    """Raises LostRanksError in place of a collective's error about a lost rank."""
    try:
        yield
    except RuntimeError as error:
        raise_if_lost(error)
        raise


def raise_if_lost(error: BaseException) -> None:
    """Raises LostRanksError if `error` is a collective's about a lost rank, not a DistaccumError that quotes one."""
    is_ours = isinstance(error, DistaccumError) or not isinstance(error, RuntimeError)
    if is_ours or not (dist.is_available() and dist.is_initialized()):
        return
    if isinstance(error, dist.DistBackendError) or LOST.search(str(error)):
        raise LostRanksError(
            f"rank {dist.get_rank()} lost contact with the other ranks: one has died, failed, or exceeded the process "
            f"group's timeout ({in_short(error)}). The group cannot be used any more; start all ranks again, from a "
            "checkpoint"
        ) from error


@final
class Sent:
    """A message in flight. It does not refer to Peers, because an Update that the caller keeps refers to it."""

    def __init__(self, finish: Finish) -> None:
        self._finish: Finish | None = finish

    def wait(self, patience: timedelta = FOREVER) -> Tensor:
        """Waits for the other ranks, and returns what became of the rows."""
        if self._finish is not None:
            try:
                self._result = self._finish(patience)
            except RuntimeError as error:
                raise_if_lost(error)
                raise
            self._finish = None
        return self._result


@final
class Tree:
    """Ranks that exchange rows through the host, in blocks of about the square root of their number.

    The first rank of each block merges the block's rows, the first ranks gather theirs, and one row comes down. Few
    ranks are blocks of one. All ranks post their exchanges in the same order.
    """

    def __init__(self, group: dist.ProcessGroup, ranks: Sequence[int], use: str) -> None:
        place, self.num = ranks.index(dist.get_rank()), len(ranks)
        self.size = 1 if self.num <= FLAT else math.isqrt(self.num - 1) + 1  # of a block
        first = place - place % self.size
        block = ranks[first : first + self.size]
        self.block: Any = host_backend(own_group(group, block, use=use)) if len(block) > 1 else None
        self.firsts: Any = host_backend(own_group(group, ranks[:: self.size], use=use)) if place == first else None
        self.promise: Promise | None = None
        self.pending: list[Sent] = []
        _PENDING.append(self.pending)
        self._carrier: Carrier | None = None

    def post(self, row: Any, num_largest: int | None = None) -> Sent:
        """Sends a row, and gives the rows of all ranks; with `num_largest` one row, in which so many columns hold the
        largest value, and the others the sum.
        """
        own = torch.as_tensor(row, dtype=None if isinstance(row, Tensor) else torch.float64, device="cpu")[None]
        if len(self.pending) > 1:  # all ranks have posted the one before the last, or this one would not be here
            self.pending.pop(0).wait()
        try:
            if self.num <= FLAT:
                finish = self._swap(own, num_largest)
            elif self.firsts is None:
                finish = self._ask(self.block, own, num_largest)
            else:
                if self._carrier is None:
                    self._carrier = Carrier()
                    weakref.finalize(self, self._carrier.end)
                finish = self._carrier.carry(partial(self._carry, own, num_largest))
        except RuntimeError as error:
            raise_if_lost(error)
            raise
        self.pending.append(Sent(finish))
        return self.pending[-1]

    def _swap(self, own: Tensor, num_largest: int | None) -> Finish:
        """Gives rows to each rank, which does the same; half of what gloo's own gather in a ring costs."""
        group, here = self.firsts, self.firsts.rank()
        rows = own.new_empty(self.num, *own.shape)
        rows[here] = own
        others = [rank for rank in range(self.num) if rank != here]
        works = [group.recv([rows[rank]], rank, 0) for rank in others] + [group.send([own], rank, 0) for rank in others]
        return lambda patience: ([work.wait(patience) for work in works], _merged(rows, num_largest))[1]

    def _carry(self, own: Tensor, num_largest: int | None) -> Tensor:
        """Merges the rows of the block, lets the first rank of all merge those of the blocks, and hands on its row."""
        row = self._collect(self.block, own, num_largest)
        if self.firsts.rank() == 0:
            row = self._collect(self.firsts, row, num_largest)[: self.num]
            self._answer(self.firsts, row)
        else:
            missing = 0 if num_largest is not None else self.size - len(row)  # in the last block
            row = self._ask(self.firsts, pad(row, (0, 0, 0, missing)), num_largest)(FOREVER)
        self._answer(self.block, row)
        return row

    def _collect(self, group: Any, own: Tensor, num_largest: int | None) -> Tensor:
        """Merges the rows of a group, as its first rank."""
        if group is None:
            return own
        rows = own.new_empty(group.size(), *own.shape)
        rows[0] = own
        for work in [group.recv([rows[rank]], rank, 0) for rank in range(1, group.size())]:
            work.wait()
        return _merged(rows, num_largest)

    def _answer(self, group: Any, row: Tensor) -> None:
        for work in [] if group is None else [group.send([row], rank, 0) for rank in range(1, group.size())]:
            work.wait()

    def _ask(self, group: Any, own: Tensor, num_largest: int | None) -> Finish:
        """Gives rows to the first rank of a group, which answers."""
        answer = own.new_empty(self.num if num_largest is None else 1, own.shape[1])
        works = [group.send([own], 0, 0), group.recv([answer], 0, 0)]
        return lambda patience: ([work.wait(patience) for work in works], answer)[1]


def _merged(rows: Tensor, num_largest: int | None) -> Tensor:
    rows = rows.flatten(0, 1)
    if num_largest is None:
        return rows
    row = rows.sum(0, keepdim=True)
    if num_largest:
        row[:, :num_largest] = rows[:, :num_largest].amax(0)
    return row


@final
class Carrier:
    """A thread that carries rows between the levels of a tree: training may be long in a backward as they arrive."""

    def __init__(self) -> None:
        self._todo: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self.thread = Thread(target=_carry_all, args=(self._todo,), daemon=True)
        _CARRIERS[:] = [*(carrier for carrier in _CARRIERS if carrier.thread.is_alive()), self]
        self.thread.start()

    def carry(self, move: Callable[[], Tensor]) -> Finish:
        """Moves rows after all earlier ones."""
        result: futures.Future[Tensor] = futures.Future()
        self._todo.put(partial(_fulfil, result, move))

        def wait(patience: timedelta) -> Tensor:
            try:
                return result.result(patience.total_seconds() or None)
            except futures.TimeoutError:
                raise RuntimeError("timed out") from None

        return wait

    def end(self) -> None:
        """Ends the thread once it has carried all."""
        self._todo.put(None)


def _carry_all(todo: SimpleQueue[Callable[[], None] | None]) -> None:
    while (move := todo.get()) is not None:
        move()
        del move  # which may be the last to hold the tree


def _fulfil(result: futures.Future[Tensor], move: Callable[[], Tensor]) -> None:
    try:
        result.set_result(move())
    except Exception as error:
        result.set_exception(error)


@atexit.register
def _end() -> None:
    """Completes what this rank did not wait for: other ranks may, and need this rank's numbers."""
    for sent in [*_LAST.values(), *(sent for pending in _PENDING for sent in pending)]:
        with suppress(RuntimeError):  # a rank is gone
            sent.wait(PATIENCE)
    for carrier in _CARRIERS:  # one that outlived the interpreter would abort the process
        carrier.end()
        carrier.thread.join(PATIENCE.total_seconds())


# The last message of each group. Dropping the last reference to one frees its tensors, which needs the interpreter:
# if a gloo thread did that after the interpreter ended, the process would hang or abort. This reference prevents it.
_LAST: weakref.WeakKeyDictionary[dist.ProcessGroup, Sent] = weakref.WeakKeyDictionary()  # sums on devices
_PENDING: list[list[Sent]] = []  # of each tree: also if its group was destroyed since, others wait for this rank
_CARRIERS: list[Carrier] = []  # at work, also for groups that were destroyed since
# By process group, so that Accumulators share them: each group holds sockets and threads.
_TREES: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[Any, Tree]] = weakref.WeakKeyDictionary()
_OWN: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[Any, dist.ProcessGroup]] = weakref.WeakKeyDictionary()


def tree_of(group: dist.ProcessGroup | None, ranks: Sequence[int] | None = None, use: str = "") -> Tree | None:
    """The tree of the ranks of `group`, or of `ranks` of the job, made once; None if this rank is alone.

    `use` tells trees of the same ranks apart.
    """
    ranks = [] if group is None else list(ranks or dist.get_process_group_ranks(group))
    if group is None or len(ranks) == 1:
        return None
    known, key = _TREES.setdefault(group, {}), (*ranks, use)
    if key not in known:
        known[key] = Tree(group, ranks, use)
    return known[key]


def own_group(
    group: dist.ProcessGroup, ranks: Sequence[int] | None = None, *, backend: str | None = "gloo", use: str = ""
) -> dist.ProcessGroup:
    """A group over the ranks of `group`, or over `ranks` of the job, that only this library uses.

    It is made once, without other ranks. `backend=None` is the job's own; `use` tells groups of the same ranks apart.
    """
    ranks = list(ranks or dist.get_process_group_ranks(group))
    known, key = _OWN.setdefault(group, {}), (*ranks, backend, use)
    if key not in known:
        known[key] = new_group(ranks, backend, timeout_of(group) if backend else None)
    return known[key]
