"""Peers: the ranks of a data-parallel group, which exchange small values.

Messages about windows travel on host groups of the library's own, so that none can be matched with a collective of the
caller or a wrapper on a rank that is further ahead. All Accumulators on a process group share them. Gradients, norms
and losses on a device are summed on the wrapper's groups, at the same step on all ranks.
"""

from __future__ import annotations

import atexit
import logging
import math
import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from .law import DistaccumError, LostRanksError, RankReport, in_short
from .private import new_group, timeout_of

# Errors of gloo, NCCL and their store when a rank is gone or late; gloo's have no type of their own.
LOST = re.compile(r"[Cc]onnection (closed|reset|refused)|[Bb]roken pipe|[Tt]imed? ?out|ncclRemoteError|aborted")
logger = logging.getLogger("distaccum")  # by default to stderr
PATIENCE = timedelta(seconds=10)  # at the end of a process, for a sum that other ranks have not joined

Value = TypeVar("Value")
Rows = list[list[float]]
Reports = list[RankReport]  # of all ranks that take part in updates
ABANDONED = -1  # in place of an update's index: this rank has nothing to report for it


@dataclass(eq=False)
class Owed:
    """A report that all ranks owe each other for the plan of `update`, which may never be made."""

    update: int
    nothing: RankReport  # in its place, if this rank never pays: as wide as the others
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
    fingerprint: Callable[..., int] | None = None  # of micro-batches, if ranks compare theirs

    def __init__(self, group: dist.ProcessGroup | None = None, everyone: Sequence[int] | None = None) -> None:
        """`everyone`: the ranks in the job that take part in updates; by default those of the group."""
        self.group = group
        self.rank, self.num_ranks, self.global_rank = 0, 1, 0
        if group is not None:
            self.rank, self.num_ranks = dist.get_rank(group), dist.get_world_size(group)
            self.global_rank = dist.get_rank()
        self.num_data_ranks, self.is_alone = self.num_ranks, self.num_ranks == 1
        self.host_group = None if group is None else own_group(group)
        self.plan_with(everyone)
        self.record_over(group)

    def plan_with(self, ranks: Sequence[int] | None) -> None:
        """Lets these ranks of the job take part in updates; None: those of the group."""
        self.ranks = [] if self.group is None else list(ranks or dist.get_process_group_ranks(self.group))
        self._plans = None if self.group is None else own_group(self.group, ranks, use="plans")
        self._everyone = None if self.group is None else own_group(self.group, ranks)

    def record_over(self, group: dist.ProcessGroup | None) -> None:
        """Makes the losses of these ranks add up."""
        self._record_group, self._record_host = group, None if group is None else own_group(group)

    def plan(self, report: RankReport) -> Reports:
        """Gathers a window's report from all ranks that take part in updates."""
        self._settle_standing()
        return self._post(report)()

    def owe(self, last: RankReport) -> Owed:
        """Notes that every rank owes its report for the update after the `last`, which it may `pay` early.

        Ranks may leave the window before it at different places, and never pay. So the debt is settled before the next
        plan of any kind, by any Accumulator on these ranks: then all read the same reports in the same order.
        """
        self._settle_standing()
        owed = Owed(last.update + 1, last._replace(update=ABANDONED))
        if self._plans is not None:
            _OWED[self._plans] = owed
        return owed

    def _settle_standing(self) -> None:
        if self._plans is not None and (standing := _OWED.get(self._plans)) is not None:
            self.settle(standing)

    def pay(self, owed: Owed, report: RankReport) -> None:
        owed.wait = self._post(report)

    def settle(self, owed: Owed) -> Reports | None:
        """The reports of all ranks, or None if some rank did not pay: then all ranks plan anew."""
        if owed.wait is None:
            self.pay(owed, owed.nothing)
        if self._plans is not None and _OWED.get(self._plans) is owed:
            del _OWED[self._plans]
        assert owed.wait is not None
        reports = owed.wait()
        return None if any(one.update == ABANDONED for one in reports) else reports

    def _post(self, report: RankReport) -> Callable[[], Reports]:
        if self._plans is None:
            return lambda: [report]
        gathered = self._send(report.to_row(), self._plans)
        return lambda: list(map(RankReport.from_row, gathered()))

    def combine(self, reports: Sequence[RankReport], counts: Iterable[Any]) -> Sequence[RankReport]:
        """Merges the reports of all that take part in updates to one per rank of the group; `counts`: of the job."""
        return reports

    def by_samples(self, values: Sequence[Value]) -> list[list[Value]]:
        """Groups the values of all that take part in updates: for each rank of the group, those of its samples."""
        return [[value] for value in values]

    def _send(self, row: Sequence[float], group: dist.ProcessGroup | None) -> Callable[[], Rows]:
        if group is None:
            return lambda: [list(row)]
        mine = torch.tensor(row, dtype=torch.float64, device="cpu")
        rows = torch.empty(dist.get_world_size(group), len(row), dtype=torch.float64, device="cpu")
        return _Sent(dist.all_gather(list(rows), mine, group=group, async_op=True), group, rows).wait

    def gather(self, row: Sequence[float], *, everyone: bool = False) -> Rows:
        """The rows of the group's ranks in order (`everyone`: of all that take part in updates), through the host."""
        return self._send(row, self._everyone if everyone else self.host_group)()

    def gather_objects(self, value: Any, *, everyone: bool = False) -> list[Any]:
        """Like `gather`, for small values of any kind."""
        group = self._everyone if everyone else self.host_group
        if group is None:
            return [value]
        values: list[Any] = [None] * dist.get_world_size(group)
        with in_contact():
            dist.all_gather_object(values, value, group=group)
        return values

    def sum(self, values: Tensor) -> _Sent | None:
        """Starts to sum `values` in place over the ranks; returns None if there is nothing to add."""
        group = self._record_host if values.device.type == "cpu" else self._record_group
        if group is None:
            return None
        return _Sent(dist.all_reduce(values, group=group, async_op=True), group)

    def tell(self, error: Exception) -> None:
        """Logs an error of a loader, a count or `update()`, which this rank keeps until it can tell the others."""
        if not self.is_alone:
            logger.error(
                "rank %d failed, and the other ranks hear of it when they plan or vote: %s", self.rank, in_short(error)
            )


def norm_over(groups: Sequence[dist.ProcessGroup], norm: Tensor, kind: float) -> Tensor:
    """The norm of a whole, from the norm of this rank's part; the ranks of `groups` have the other parts."""
    whole = norm if math.isinf(kind) else norm.pow(kind)
    for group in groups:
        dist.all_reduce(whole, op=dist.ReduceOp.MAX if math.isinf(kind) else dist.ReduceOp.SUM, group=group)
    return whole if math.isinf(kind) else whole.pow(1 / kind)


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


class _Sent:
    """A collective in flight. It does not refer to Peers, because an Update that the caller keeps refers to it."""

    def __init__(self, work: Any, group: dist.ProcessGroup, rows: Tensor | None = None) -> None:
        self._work, self._rows = work, rows
        _LAST[group] = work

    def wait(self) -> Any:
        """Returns the gathered rows, if it gathers any."""
        with in_contact():
            self._work.wait()
        return None if self._rows is None else self._rows.tolist()


# The last collective of each group. Dropping the last reference to one frees its tensors, which needs the interpreter:
# if a gloo thread did that after the interpreter ended, the process would hang or abort. This reference prevents it.
_LAST: weakref.WeakKeyDictionary[dist.ProcessGroup, Any] = weakref.WeakKeyDictionary()


@atexit.register
def _end() -> None:
    """Completes sums that this rank did not read: other ranks may read them, and need this rank's numbers."""
    for work in list(_LAST.values()):
        with suppress(RuntimeError):  # a rank is gone
            work.wait(PATIENCE)


_OWED: weakref.WeakKeyDictionary[dist.ProcessGroup, Owed] = weakref.WeakKeyDictionary()  # by group for plans
# By process group, so that Accumulators share them: each group holds sockets and threads.
_OWN: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[Any, dist.ProcessGroup]] = weakref.WeakKeyDictionary()


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
