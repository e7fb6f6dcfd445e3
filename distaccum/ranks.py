"""Peers: the ranks of a data-parallel group, which exchange small values.

What ranks tell each other about windows runs on host groups of the library's own, so that none of it can be matched
with a collective of the caller or of a wrapper, on a rank that is further on. All Accumulators on a process group share
them. Sums of gradients, norms and losses on a device run on the wrapper's groups, at the same step of all ranks.
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

# The errors of gloo, NCCL and their store when a rank is gone or late; gloo's have no type of their own.
LOST = re.compile(r"[Cc]onnection (closed|reset|refused)|[Bb]roken pipe|[Tt]imed? ?out|ncclRemoteError|aborted")
logger = logging.getLogger("distaccum")  # by default to stderr
PATIENCE = timedelta(seconds=10)  # at the end of a process, with a sum that other ranks have not joined

Value = TypeVar("Value")
Rows = list[list[float]]
ABANDONED = -1.0  # in the place of an update's index: this rank has nothing to report of it


@dataclass(eq=False)
class Owed:
    """A row that all ranks owe each other for the plan of `update`, which may come to nothing."""

    update: int
    width: int
    wait: Callable[[], Rows] | None = None  # once it is posted


class Peers:
    """The ranks of a data-parallel group; without a group, this process alone.

    Attributes:
        rank, num_ranks, global_rank (int): In the group, of it, and in the whole job.
        num_data_ranks (int): Ranks with samples of their own: all of them, but on a mesh (`meshes/ranks.py`).
        is_alone (bool): No other rank takes part in updates.
        shares_samples, has_parts (bool): Ranks outside of the group have the same samples; ranks in it parts of them.
    """

    shares_samples = has_parts = False
    fingerprint: Callable[..., int] | None = None  # of micro-batches, where ranks compare theirs

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
        self._plans = None if self.group is None else own_group(self.group, ranks, use="plans")
        self._everyone = None if self.group is None else own_group(self.group, ranks)

    def record_over(self, group: dist.ProcessGroup | None) -> None:
        """Lets losses of these ranks add up."""
        self._record_group, self._record_host = group, None if group is None else own_group(group)

    def plan(self, row: Sequence[float]) -> Rows:
        """Gathers a plan's row from all ranks that take part in updates."""
        self._settle_standing()
        return self._send(row, self._plans)()

    def owe(self, update: int, width: int) -> Owed:
        """Notes that every rank owes its row for the plan of `update`, which it may `pay` ahead of its time.

        Ranks may leave the window before it at different places, and never pay. So the debt is settled before the next
        plan of whatever kind, of any Accumulator on these ranks: then all read the same rows in the same order.
        """
        self._settle_standing()
        owed = _OWED[self._plans or self] = Owed(update, width)
        return owed

    def _settle_standing(self) -> None:
        if (standing := _OWED.get(self._plans or self)) is not None:
            self.settle(standing)

    def pay(self, owed: Owed, row: Sequence[float]) -> None:
        owed.wait = self._send(row, self._plans)

    def settle(self, owed: Owed) -> Rows | None:
        """The rows of all ranks, or None if some rank did not pay: all plan anew then."""
        if owed.wait is None:
            self.pay(owed, [ABANDONED] * owed.width)
        if _OWED.get(self._plans or self) is owed:
            del _OWED[self._plans or self]
        assert owed.wait is not None
        rows = owed.wait()
        return None if any(row[0] == ABANDONED for row in rows) else rows

    def combine(self, reports: Sequence[RankReport], counts: Iterable[Any]) -> Sequence[RankReport]:
        """One report per rank of the group, of all that take part in updates; `counts` are the callables that count."""
        return reports

    def by_samples(self, values: Sequence[Value]) -> list[list[Value]]:
        """For each rank of the group the values of those that share its samples, of all that take part in updates."""
        return [[value] for value in values]

    def _send(self, row: Sequence[float], group: dist.ProcessGroup | None) -> Callable[[], Rows]:
        if group is None:
            return lambda: [list(row)]
        mine = torch.tensor(row, dtype=torch.float64, device="cpu")
        rows = torch.empty(dist.get_world_size(group), len(row), dtype=torch.float64, device="cpu")
        return _Sent(dist.all_gather(list(rows), mine, group=group, async_op=True), group, rows).wait

    def gather(self, row: Sequence[float], *, everyone: bool = False) -> Rows:
        """The rows of all ranks, in their order, or of all that take part in updates; through the host."""
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
        """Starts to sum `values` in place over the ranks; None: they are summed already."""
        group = self._record_host if values.device.type == "cpu" else self._record_group
        if group is None:
            return None
        return _Sent(dist.all_reduce(values, group=group, async_op=True), group)

    def tell(self, error: Exception) -> None:
        """Logs an error of a loader, a count or `update()`, which this rank keeps until the others can hear of it."""
        if not self.is_alone:
            logger.error(
                "rank %d failed, and the other ranks hear of it when they plan or vote: %s", self.rank, in_short(error)
            )


def norm_over(groups: Sequence[dist.ProcessGroup], norm: Tensor, kind: float) -> Tensor:
    """The norm of a whole, from the norm of this rank's part of it; `groups` have the parts."""
    # The larger of a number and NaN is, in a reduction, either of them.
    whole = norm.nan_to_num(nan=math.inf, posinf=math.inf) if math.isinf(kind) else norm.pow(kind)
    for group in groups:
        dist.all_reduce(whole, op=dist.ReduceOp.MAX if math.isinf(kind) else dist.ReduceOp.SUM, group=group)
    return whole if math.isinf(kind) else whole.pow(1 / kind)


@contextmanager
def in_contact() -> Iterator[None]:
    """Raises LostRanksError in the place of a collective's error about a rank that is gone."""
    try:
        yield
    except RuntimeError as error:
        raise_if_lost(error)
        raise


def raise_if_lost(error: RuntimeError) -> None:
    """Raises LostRanksError if this is a collective's error about a rank that is gone, and none that quotes one."""
    if isinstance(error, DistaccumError) or not (dist.is_available() and dist.is_initialized()):
        return
    if isinstance(error, dist.DistBackendError) or LOST.search(str(error)):
        raise LostRanksError(
            f"rank {dist.get_rank()} lost contact with the other ranks: one has died, failed, or exceeded the process "
            f"group's timeout ({in_short(error)}). The group cannot be used any more; start all ranks again, from a "
            "checkpoint"
        ) from error


class _Sent:
    """A collective under way. It holds no Peers, since a kept Update holds it."""

    def __init__(self, work: Any, group: dist.ProcessGroup, rows: Tensor | None = None) -> None:
        self._work, self._rows = work, rows
        _LAST[group] = work

    def wait(self) -> Any:
        """Returns the gathered rows, if it gathers any."""
        with in_contact():
            self._work.wait()
        return None if self._rows is None else self._rows.tolist()


# The last collective of each group. Whoever drops one last frees its tensors, for which it needs the interpreter; a
# thread of gloo's cannot once that ends, and the process would hang or abort. Here it is never the last.
_LAST: weakref.WeakKeyDictionary[dist.ProcessGroup, Any] = weakref.WeakKeyDictionary()


@atexit.register
def _end() -> None:
    """Lets a sum end that nobody read on this rank: the other ranks may read it, and need this rank's numbers."""
    for work in list(_LAST.values()):
        with suppress(RuntimeError):  # of a rank that is gone
            work.wait(PATIENCE)


_OWED: weakref.WeakKeyDictionary[Any, Owed] = weakref.WeakKeyDictionary()  # by group for plans, or Peers without one
# By process group, so that no Accumulator makes one that another has made; each keeps sockets and threads.
_OWN: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[Any, dist.ProcessGroup]] = weakref.WeakKeyDictionary()


def own_group(
    group: dist.ProcessGroup, ranks: Sequence[int] | None = None, *, backend: str | None = "gloo", use: str = ""
) -> dist.ProcessGroup:
    """A group of the ranks of `group`, or of `ranks` in the job, on which only this library sends.

    Made once, without asking others. `backend=None` is the job's own; `use` tells groups of the same ranks apart.
    """
    ranks = list(ranks or dist.get_process_group_ranks(group))
    known, key = _OWN.setdefault(group, {}), (*ranks, backend, use)
    if key not in known:
        known[key] = new_group(ranks, backend, timeout_of(group) if backend else None)
    return known[key]
