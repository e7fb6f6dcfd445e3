"""Peers: the ranks of a data-parallel group, which exchange small values."""

from __future__ import annotations

import math
import re
import time
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.constants import default_pg_timeout

from ..law.errors import DistaccumError, LostRanksError
from ..law.update import Waitable
from .board import WIDTH, Boards, Introduction, Rows
from .private.process_group import is_shared, timeout_of
from .rounds import gather_in_rounds

# The errors of gloo, NCCL and their store when a rank is gone or late.
LOST = re.compile(r"[Cc]onnection (closed|reset|refused)|[Bb]roken pipe|[Tt]imed? ?out|ncclRemoteError|aborted")
PATIENCE = timedelta(seconds=10)  # at a job's end, with a sum that other ranks have not joined
# Modules whose functions run collectives: an error from the caller's own code may use the same words.
RUN_COLLECTIVES = (
    "torch.distributed",
    "torch.nn.parallel",
    "torch.nn.modules._functions",  # SyncBatchNorm
    "torch.autograd",  # DDP's reduction is started by backward, in C++
    "torch._ops",
    "deepspeed",
    "distaccum",
)


class Peers:
    """A rank that has no others."""

    rank = 0  # in the data-parallel group
    num_ranks = 1  # of it
    global_rank = 0  # in the whole job, tensor-parallel ranks too
    world_size = 1  # of it
    sharing: Sequence[Sequence[int]] = ((0,),)  # for each rank here, the global ranks that have its samples too
    parts: Sequence[Sequence[int]] = ((0,),)  # the ranks here, those together that have parts of the same samples
    # What follows from these, which each window asks:
    is_alone = True  # no other rank has a part in this one's updates
    shares_samples = False
    has_parts = False

    def _take(self, sharing: Sequence[Sequence[int]], parts: Sequence[Sequence[int]]) -> None:
        self.sharing, self.parts = sharing, parts
        self.is_alone = len(sharing) == len(sharing[0]) == 1
        self.shares_samples, self.has_parts = len(sharing[0]) > 1, len(parts[0]) > 1

    def add_stages(self, group: Any) -> None:
        """Says that the ranks of `group` hold other stages of the model, for the same samples."""

    def over_stages(self, norm: Tensor, kind: float) -> Tensor:
        """The norm over all stages, from that of this rank's; `kind` is 2 or infinity."""
        return norm

    def share_objects(self, value: Any) -> list[Any]:
        """Small values of all ranks that share samples with one here; through the host."""
        return [value]

    @property
    def sharing_parts(self) -> list[int]:
        """The global ranks that have parts of this rank's samples, this one too."""
        return [self.global_rank]

    @property
    def part(self) -> int:
        """This rank's place among those that share its samples."""
        return list(self.sharing[self.rank]).index(self.global_rank)

    def refuse_parts(self, call: str) -> None:
        if self.has_parts:
            raise DistaccumError(
                f"{call}() with a mesh whose ranks have parts of the same samples, which no rank has whole; call it "
                "on a model whose ranks have samples of their own"
            )

    def cut_samples(self, data_ranks: Sequence[int], name: str) -> None:
        """Says that only `data_ranks` have other samples than this rank; the rest have parts of the same."""
        if list(data_ranks) != [self.global_rank]:
            raise ValueError(
                f"mesh has the data ranks {list(data_ranks)}, and {name} reduces over rank {self.global_rank} alone; "
                "wrap the model over these ranks, or leave mesh out"
            )

    def gather(self, row: list[float]) -> list[list[float]]:
        """The rows of all ranks, in their order; through the host, never through the device's queue."""
        return [row]

    def gather_fields(self, row: list[float]) -> list[list[float]]:
        """The same by field: the first of all ranks, the second of all ranks."""
        return [[value] for value in row]

    def gather_shared(self, row: list[float]) -> list[list[list[float]]]:
        """For each rank the rows of those that share its samples, as `sharing` lists them; also over the host."""
        return [[row]]

    def agree(self, row: list[float]) -> list[list[float]]:
        """The rows of all ranks, as `gather`, over a group of its own: other ranks may be in another collective.

        Where ranks share their samples, each number is the largest of theirs.
        """
        return self.gather(row)

    def gather_objects(self, value: Any) -> list[Any]:
        """Small values of all ranks, in their order; through the host."""
        return [value]

    def gather_bytes(self, packed: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        """The bytes of all ranks, whose numbers may differ; one collective."""
        return [packed]

    def sum(self, values: Tensor) -> Waitable | None:
        """Starts to sum `values` in place over the ranks; None: they are summed already."""
        return None

    def share_largest(self, values: Tensor) -> None:
        """In place the largest of each value over the ranks that share their samples; through the host."""

    def refuse_lost(self, error: RuntimeError) -> None:
        """Raises LostRanksError in the place of a library's error about a rank that is gone."""


class GroupPeers(Peers):
    """The ranks of a process group."""

    def __init__(self, group: dist.ProcessGroup, sharing: Sequence[Sequence[int]] | None = None) -> None:
        self.group = group
        self.host_group = host_group(group)
        self.num_ranks, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.world_size, self.global_rank = dist.get_world_size(), dist.get_rank()
        alone = [[rank] for rank in range(self.num_ranks)]
        self._take(sharing or [[rank] for rank in dist.get_process_group_ranks(group)], alone)
        self._shared_group = self.host_group  # of all ranks that have these samples
        if any(len(ranks) > 1 for ranks in self.sharing):
            self._shared_group = new_host_group(group, [rank for ranks in self.sharing for rank in ranks])
        self._stages: dist.ProcessGroup | None = None
        self._record_group, self._record_host = group, self.host_group  # of the ranks whose losses add up
        self._apart: dist.ProcessGroup | None = None
        self._introductions: dict[dist.ProcessGroup, Introduction] = {}
        self._recent: deque[_Sent] = deque(maxlen=8)  # collectives of the host
        weakref.finalize(self, _release, self._recent)  # when this is dropped, or before the interpreter ends

    def cut_samples(self, data_ranks: Sequence[int], name: str) -> None:
        here, by_rank = dist.get_process_group_ranks(self.group), self.gather_objects(list(data_ranks))
        places = [ranks.index(one) if one in ranks else -1 for one, ranks in zip(here, by_rank, strict=True)]
        parts = [[rank for rank, place in enumerate(places) if place == one] for one in range(len(data_ranks))]
        if not set(data_ranks) <= set(here) or len({len(ranks) for ranks in parts}) != 1 or -1 in places:
            raise ValueError(
                f"mesh has the data ranks {list(data_ranks)}, and {name} reduces over ranks {here}, expected some of "
                "these; give the dimensions of one mesh that carry data, as mesh=mesh['data'], and wrap the model over "
                "them and those that cut samples"
            )
        self._take(self.sharing, parts)

    @property
    def sharing_parts(self) -> list[int]:
        here = dist.get_process_group_ranks(self.group)
        return [here[rank] for ranks in self.parts if self.rank in ranks for rank in ranks]

    def add_stages(self, group: dist.ProcessGroup) -> None:
        column = dist.get_process_group_ranks(group)
        of_stages: list[Any] = [None] * len(column)
        dist.all_gather_object(of_stages, list(self.sharing[self.rank]), group=host_group(group))
        rows = self.gather_objects(({rank for ranks in of_stages for rank in ranks}, column))
        self._take([sorted(ranks) for ranks, _ in rows], self.parts)
        self._shared_group = new_host_group(self.group, sorted({one for ranks in self.sharing for one in ranks}))
        columns = sorted({one for _, ranks in rows for one in ranks})
        made: Any = dist.new_group(columns, use_local_synchronization=True)
        self._stages, self._record_group, self._record_host = group, made, host_group(made)

    def over_stages(self, norm: Tensor, kind: float) -> Tensor:
        if self._stages is None:
            return norm
        # The larger of a number and NaN is, in a reduction, either of them.
        whole = norm.nan_to_num(nan=math.inf, posinf=math.inf) if math.isinf(kind) else norm.pow(kind)
        op = dist.ReduceOp.MAX if math.isinf(kind) else dist.ReduceOp.SUM
        dist.all_reduce(whole, op=op, group=self._stages)
        return whole if math.isinf(kind) else whole.pow(1 / kind)

    def gather(self, row: list[float]) -> list[list[float]]:
        return self._gather(row, self.host_group)

    def gather_fields(self, row: list[float]) -> list[list[float]]:
        return list(map(list, zip(*self._gather(row, self.host_group), strict=True)))

    def gather_shared(self, row: list[float]) -> list[list[list[float]]]:
        return self._by_sharing(self._gather(row, self._shared_group))

    def _by_sharing(self, rows: list[list[float]]) -> list[list[list[float]]]:
        if self._shared_group is self.host_group:
            return [[row] for row in rows]
        by_rank = dict(zip(dist.get_process_group_ranks(self._shared_group), rows, strict=True))
        return [[by_rank[rank] for rank in ranks] for ranks in self.sharing]

    def agree(self, row: list[float]) -> list[list[float]]:
        # On the group of the gradients it could be matched with another collective, of a rank that is further on.
        if self._apart is None:
            self._apart = new_host_group(self.group, dist.get_process_group_ranks(self._shared_group))
        shared = self._by_sharing(self._gather(row, self._apart))
        return [list(map(max, zip(*rows, strict=True))) for rows in shared]

    def _gather(self, row: list[float], group: dist.ProcessGroup) -> list[list[float]]:
        try:
            boards = self._boards_of(group)
            if boards is not None and len(row) <= WIDTH:
                return boards.gather(row)
            introduction = self._introductions[group]
            gather = gather_in_rounds if dist.get_world_size(group) > 2 else self._gather_at_once
            return introduction.hears(gather([*row, *introduction.says()], group).tolist())
        except RuntimeError as error:
            raise _lost(self.rank, error) from error

    def _boards_of(self, group: dist.ProcessGroup) -> Boards | None:
        """Where its ranks have found that they can share memory, which they do while they gather."""
        if group not in self._introductions:
            self._introductions[group] = Introduction(group, timeout_of(group) or default_pg_timeout)
        return self._introductions[group].boards

    def _gather_at_once(self, row: list[float], group: dist.ProcessGroup) -> Tensor:
        mine = torch.tensor(row, dtype=torch.float64)
        rows = torch.empty(dist.get_world_size(group), len(row), dtype=torch.float64)
        work = dist.all_gather(list(rows), mine, group=group, async_op=True)
        self._recent.append((work, [mine, rows], None))
        work.wait()
        return rows

    def gather_objects(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.num_ranks
        dist.all_gather_object(values, value, group=self.host_group)
        return values

    def share_objects(self, value: Any) -> list[Any]:
        if not self.shares_samples:
            return [value]
        values: list[Any] = [None] * dist.get_world_size(self._shared_group)
        dist.all_gather_object(values, value, group=self._shared_group)
        return values

    def gather_bytes(self, packed: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        longest = max(sizes)
        padded = torch.cat([packed, packed.new_zeros(longest - len(packed))])
        rows = packed.new_empty(self.num_ranks * longest)
        dist.all_gather_into_tensor(rows, padded, group=self._group_for(packed))
        return [rows[i * longest :][:size] for i, size in enumerate(sizes)]

    def sum(self, values: Tensor) -> Waitable | None:
        kind = values.device.type
        group = self._record_host if kind == "cpu" else self._record_group
        on_host = kind == "cpu" or f"{kind}:gloo" in dist.get_backend_config(group)
        sent = values.clone() if on_host else values
        boards = self._boards_of(group) if kind == "cpu" and len(values) <= WIDTH else None
        records = None if boards is None else boards.records
        work: Any
        if records is None:
            work = dist.all_reduce(sent, group=group, async_op=True)
        else:
            work = _Posted(records.post(values.tolist()), sent)
        if not on_host:
            return cast("Waitable", work)
        found = _OnHost(work, sent, values, self.rank)
        if records is None:
            self._recent.append((work, [sent], found))
        return found

    def share_largest(self, values: Tensor) -> None:
        if self.shares_samples:
            rows = self._gather(values.reshape(-1).tolist(), self._shared_group)
            largest = torch.tensor(rows, dtype=torch.float64).amax(0)
            values.copy_(largest.reshape(values.shape))

    def refuse_lost(self, error: RuntimeError) -> None:
        _refuse_lost(self.rank, error)

    def _group_for(self, tensor: Tensor) -> dist.ProcessGroup:
        """Offloaded parameters leave numbers on the host, which the device's group cannot send."""
        return self.host_group if tensor.device.type == "cpu" else self.group


def _refuse_lost(rank: int, error: RuntimeError) -> None:
    if _is_of_a_collective(error):
        raise _lost(rank, error) from error


def _lost(rank: int, error: RuntimeError) -> LostRanksError:
    return LostRanksError(
        f"rank {rank} lost contact with the other ranks: one has died, failed, or exceeded the process group's timeout "
        f"({' '.join(str(error).split())[:200]}). The group cannot be used any more; start all ranks again, from a "
        "checkpoint"
    )


def _is_of_a_collective(error: RuntimeError) -> bool:
    """Whether it was raised by a collective whose other ranks are gone. gloo's errors have no type of their own."""
    if isinstance(error, DistaccumError):
        return False  # it may quote one
    if isinstance(error, dist.DistBackendError):  # NCCL's
        return True
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    module = "" if place is None else str(place.tb_frame.f_globals.get("__name__", ""))
    is_inside = any(module == known or module.startswith(f"{known}.") for known in RUN_COLLECTIVES)
    is_inside = is_inside and not module.startswith("torch.distributed.rpc")  # the caller's, of no group
    return is_inside and LOST.search(str(error)) is not None


@dataclass
class _Posted:
    """A sum of what ranks leave on a board."""

    row: Rows
    values: Tensor

    def wait(self) -> None:
        self.values.copy_(torch.tensor(self.row.of_all(), dtype=self.values.dtype).sum(0))


@dataclass
class _OnHost:
    """A sum that gloo's threads compute in a tensor of its own, which nobody else may free; or that is on a board.

    An update that is kept holds it: it holds no peers.
    """

    reduction: Waitable | None  # until it has ended, since it holds what is sent
    sent: Tensor
    values: Tensor
    rank: int
    is_done: bool = False

    def wait(self) -> None:
        if self.is_done:
            return
        if self.reduction is not None:
            try:
                self.reduction.wait()
            except RuntimeError as error:
                _refuse_lost(self.rank, error)
                raise
            self.reduction = None
        self.values.copy_(self.sent)
        self.is_done = True


_Sent = tuple[Any, list[Tensor], _OnHost | None]  # a collective, its tensors, and who else may have them


def _release(recent: deque[_Sent]) -> None:
    """Releases collectives after gloo's threads have, which is some time after a collective's end.

    The last holder frees a collective's tensors, a thread under the interpreter's lock; and a process group that ends
    waits for its threads, and may hold that lock. So collectives are kept, and here their tensors outlive the threads'
    references.
    """
    until = time.monotonic() + 1
    while recent:
        work, tensors, holder = recent.popleft()
        with suppress(RuntimeError):  # of a rank that is gone
            work.wait(PATIENCE)
            if holder is not None:
                holder.reduction = None
        del work
        while any(map(is_shared, tensors)) and time.monotonic() < until:
            time.sleep(1e-4)  # which releases the lock


def host_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """A group of the same ranks whose collectives run on the host, made without asking other ranks."""
    if "cpu:" in dist.get_backend_config(group):
        return group
    return new_host_group(group)


def new_host_group(group: dist.ProcessGroup, ranks: Sequence[int] | None = None) -> dist.ProcessGroup:
    """A group on the host of the same ranks, or of these, with its timeout; made without asking other ranks."""
    ranks = list(ranks or dist.get_process_group_ranks(group))
    made: Any = dist.new_group(ranks, backend="gloo", use_local_synchronization=True, timeout=timeout_of(group))
    assert isinstance(made, dist.ProcessGroup)
    return made
