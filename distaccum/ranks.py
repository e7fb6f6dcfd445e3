"""Peers: the ranks of a data-parallel group, which exchange small values.

There is no group of the library's own. Messages travel on the groups of the wrapper, or of the mesh, in order with its
own collectives: as a window begins, at votes of `update()`, and at a step, which all ranks reach in the same order.
Where more ranks take part than one group has, they go over each group in turn.
"""

from __future__ import annotations

import logging
import pickle
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from .law import DistaccumError, LostRanksError, Plan, refuse_to_differ
from .text import in_short

# Errors of gloo, NCCL and their store when a rank is gone or late. Types do not tell: NCCL's is also that of misuse.
LOST = re.compile(r"[Cc]onnection (closed|reset|refused)|[Bb]roken pipe|[Tt]im(ed? ?|ing )out|ncclRemoteError|aborted")
logger = logging.getLogger("distaccum")  # by default to stderr
# torch 2.13 renamed it.
gather_single: Any = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor", None)

Value = TypeVar("Value")
Rows = list[list[float]]
Groups = tuple[dist.ProcessGroup, ...]


class Peers:
    """The ranks of a data-parallel group; without a group, this process alone.

    Attributes:
        rank, num_ranks, global_rank (int): The rank in the group, the group's size, and the rank in the whole job.
        groups (tuple): The groups over which to reduce in turn: one, or the dimensions of a mesh.
        here (list[int]): The ranks in the job of the data-parallel ranks, in order.
        ranks (list[int]): The ranks in the job that take part in updates.
        num_data_ranks (int): Ranks with samples of their own: all of them, except on a mesh (`meshes/ranks.py`).
        is_alone (bool): No other rank takes part in updates.
        shares_samples, has_parts (bool): Ranks outside the group have the same samples; ranks in it, parts of them.
    """

    shares_samples = has_parts = False
    stages: Groups = ()  # over which other ranks have other parameters, for the same samples
    beside: Groups = ()  # over which other ranks compute on the same samples, stages included
    device: torch.device | None = None  # the model's

    def __init__(
        self, group: dist.ProcessGroup | Sequence[dist.ProcessGroup] | None = None, here: Sequence[int] | None = None
    ) -> None:
        """`here`: the ranks of several groups together, in order."""
        self.groups: Groups = () if group is None else (*group,) if isinstance(group, Sequence) else (group,)
        is_job = dist.is_available() and dist.is_initialized()
        self.global_rank = dist.get_rank() if is_job else 0
        self.here = list(here or (dist.get_process_group_ranks(self.groups[0]) if self.groups else [self.global_rank]))
        self.rank = self.here.index(self.global_rank)
        self.num_ranks = len(self.here)
        self.num_data_ranks = self.num_ranks
        self.is_alone = self.num_ranks == 1
        self.ranks = self.here
        self._orders: dict[Groups, list[int]] = {}
        self._served: tuple[Groups, set[str]] = ((), set())
        self._stream: Any = None

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The data-parallel group; None if this process is alone, or if they are several."""
        return self.groups[0] if len(self.groups) == 1 else None

    def plan(self, own: Plan, micro_batches: Sequence[Any], counts: Iterable[Any]) -> Plan:
        """Merges a window's plans of all ranks that take part in updates; all of them call it as a window begins.

        Raises if they contradict each other; `counts`: of the job.
        """
        if self.is_alone:
            return own
        rows = self.gather(own.to_row(), everyone=True)
        plan = own.merged(rows)
        if not plan.failed:
            refuse_to_differ(rows)
        return plan

    def by_samples(self, values: Sequence[Value]) -> list[list[Value]]:
        """Groups the values of all that take part in updates: for each rank of the group, those of its samples."""
        return [[value] for value in values]

    def gather(self, row: Sequence[float], *, everyone: bool = False) -> Rows:
        """The rows of the group's ranks in order; `everyone`: of all that take part in updates."""
        return self._gathered(row, everyone).tolist()

    def largest(self, row: Sequence[float], *, everyone: bool = False) -> list[float]:
        """The largest value of each column of the rows that `gather` returns."""
        groups = (*self.beside, *self.groups) if everyone else self.groups
        if not groups or not row:
            return list(row)
        with in_contact(), self._aside():
            values = torch.tensor(row, dtype=torch.float64, device=self._device())
            for group in groups:
                dist.all_reduce(values, dist.ReduceOp.MAX, group=group)
            return values.tolist()

    def gather_objects(self, value: Any, *, everyone: bool = False) -> list[Any]:
        """Like `gather`, for values of any kind."""
        if self.is_alone:
            return [value]
        own = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        length = int(self.largest([len(own)], everyone=everyone)[0])
        rows = self._gathered(pad(own, (0, length - len(own))), everyone)
        return [pickle.loads(row.numpy().data) for row in rows]

    def _gathered(self, row: Any, everyone: bool) -> Tensor:
        """The rows of the ranks in order."""
        groups = (*self.beside, *self.groups) if everyone else self.groups
        rows = self._rows(row, groups)
        return rows if len(groups) < 2 else rows[self._order_of(groups)]

    def gather_rows(self, rows: Tensor) -> Tensor:
        """Rows of all the group's ranks, in order, on the device that they came from; each gives as many."""
        joined = self._joined(rows, self.groups)
        if len(self.groups) > 1:
            joined = joined.view(self.num_ranks, *rows.shape)[self._order_of(self.groups)].view(joined.shape)
        return joined.to(rows.device)

    def _order_of(self, groups: Groups) -> list[int]:
        """The places of the ranks, in order, among rows that travelled over several groups; asked once."""
        if groups not in self._orders:
            self._orders[groups] = self._rows([self.global_rank], groups)[:, 0].argsort().tolist()
        return self._orders[groups]

    def _rows(self, row: Any, groups: Groups) -> Tensor:
        """A row of each rank, all of one length, on the host."""
        own = torch.as_tensor(row, dtype=None if isinstance(row, Tensor) else torch.float64, device="cpu")
        with self._aside():
            return self._joined(own[None], groups).cpu()

    def _joined(self, rows: Tensor, groups: Groups) -> Tensor:
        rows = self._there(rows)
        with in_contact():
            for group in groups:
                of_ranks = rows.new_empty(dist.get_world_size(group) * len(rows), rows.shape[1])
                gather_single(of_ranks, rows, group=group)
                rows = of_ranks
        return rows

    def _device(self) -> torch.device:
        """A device that the groups' backends serve: the host if they can, or else the model's."""
        kinds = self._kinds()
        if not kinds or "cpu" in kinds:
            return torch.device("cpu")
        if self.device is not None and self.device.type in kinds:
            return self.device
        kind = min(kinds)
        return torch.device(kind, torch.get_device_module(kind).current_device())

    def _there(self, tensor: Tensor) -> Tensor:
        """The tensor, where the groups' backends can send it."""
        return tensor if tensor.device.type in self._kinds() else tensor.to(self._device())

    def _aside(self) -> AbstractContextManager[Any]:
        """A stream of its own for the block, if a device has streams: to read a row waits for no other kernel then."""
        device = self._device()
        if device.type == "cpu" or not hasattr(torch.get_device_module(device), "Stream"):
            return nullcontext()
        module: Any = torch.get_device_module(device)
        self._stream = self._stream or module.Stream(device)
        aside: AbstractContextManager[Any] = module.stream(self._stream)
        return aside

    def _kinds(self) -> set[str]:
        """The types of devices that all the groups' backends serve."""
        groups = (*self.beside, *self.groups)
        if self._served[0] != groups:
            configs = [dist.get_backend_config(group) for group in groups]
            sets = [{part.partition(":")[0] for part in config.split(",")} for config in configs]
            self._served = groups, set.intersection(*sets) if sets else set()
        return self._served[1]

    def sum(self, values: Tensor) -> None:
        """Sums `values` over the ranks with other losses, in place."""
        groups = [group for group in (*self.stages, *self.groups) if dist.get_world_size(group) > 1]
        there = self._there(values) if groups else values
        with in_contact():
            for group in groups:
                dist.all_reduce(there, group=group)
        if there is not values:
            values.copy_(there)

    def tell(self, error: Exception) -> None:
        """Logs an error of a loader, a count or `update()`, which this rank keeps until it can tell the others."""
        if not self.is_alone:
            logger.error(
                "rank %d failed, and the other ranks hear of it when they plan or vote: %s", self.rank, in_short(error)
            )


def whole_job() -> Peers:
    """All ranks of the job; without a process group, this process alone."""
    return Peers(dist.group.WORLD if dist.is_available() and dist.is_initialized() else None)


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
    if LOST.search(str(error)):
        raise LostRanksError(
            f"rank {dist.get_rank()} lost contact with the other ranks: one has died, failed, or exceeded the process "
            f"group's timeout ({in_short(error)}). The group cannot be used any more; start all ranks again, from a "
            "checkpoint"
        ) from error
