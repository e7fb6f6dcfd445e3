"""What engines of several ranks share: telling each other numbers, and averaging gradients by hand."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..precision import Sum, local
from ..shares import DistaccumError, Plan
from ..trace import gathering, span
from ..update import Waitable
from .base import Engine, Sync

# What gloo, NCCL and the store under them say when a rank is gone or late.
LOST = re.compile(r"[Cc]onnection (closed|reset|refused)|[Bb]roken pipe|[Tt]imed? ?out|ncclRemoteError|aborted")
BUCKET_BYTES = 25 * 2**20  # as DDP's own buckets


class RanksEngine(Engine):
    """Abstract: an engine whose ranks are a process group."""

    def __init__(self, models: Sequence[nn.Module], sync: Sync, group: dist.ProcessGroup) -> None:
        super().__init__(models, sync)
        self.group = group
        self.host_group = host_group(group)
        self.divisor = self.num_ranks = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        self._apart: dist.ProcessGroup | None = None

    def gather(self, row: list[float]) -> list[list[float]]:
        return self._gather(row, self.host_group)()

    def gather_later(self, row: list[float]) -> Callable[[], list[list[float]]]:
        return self._gather(row, self.host_group)

    def agree(self, row: list[float]) -> list[list[float]]:
        # On the group of the gradients it would meet the collective of a rank that is further on, and be taken for it.
        if self._apart is None:
            with span(self.trace, "waiting", on="the making of a group"):
                self._apart = new_host_group(self.group)
        return self._gather(row, self._apart)()

    def _gather(self, row: list[float], group: dist.ProcessGroup) -> Callable[[], list[list[float]]]:
        mine = torch.tensor(row, dtype=torch.float64)
        rows = [torch.empty_like(mine) for _ in range(self.num_ranks)]
        waiting = gathering(self.trace)
        work = dist.all_gather(rows, mine, group=group, async_op=True)

        def wait() -> list[list[float]]:
            try:
                with waiting:
                    work.wait()
            except RuntimeError as error:
                self.refuse_lost_ranks(error)
                raise
            return [row.tolist() for row in rows]

        return wait

    def gather_objects(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.num_ranks
        dist.all_gather_object(values, value, group=self.host_group)
        return values

    def gather_bytes(self, packed: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        longest = max(sizes)
        padded = torch.cat([packed, packed.new_zeros(longest - len(packed))])
        rows = packed.new_empty(self.num_ranks * longest)
        dist.all_gather_into_tensor(rows, padded, group=self.group_for(packed))
        return [rows[i * longest :][:size] for i, size in enumerate(sizes)]

    def refuse_lost_ranks(self, error: RuntimeError) -> None:
        if LOST.search(str(error)):
            raise DistaccumError(
                f"rank {self.rank} waited for the others in vain: one of them died, failed on its own, or did not come "
                f"within the process group's timeout ({' '.join(str(error).split())[:200]}). The group cannot be used "
                "any more; start all ranks again, from a checkpoint"
            ) from error

    def sum_over_ranks(self, values: Tensor) -> Waitable | None:
        work: Waitable = dist.all_reduce(values, group=self.group_for(values), async_op=True)
        return work if self.trace is None else self.trace.watched(work)

    def group_for(self, tensor: Tensor) -> dist.ProcessGroup:
        """Offloaded parameters leave numbers on the host, which the device's group cannot send."""
        return self.host_group if tensor.device.type == "cpu" else self.group

    def refuse_synchronised_norms(self, plan: Plan) -> None:
        """Stand-ins, or a rank without any, would enter the statistics; and the longer ranks wait for ever."""
        if plan.uneven and any(
            isinstance(module, nn.SyncBatchNorm) and module.training for m in self.models for module in m.modules()
        ):
            raise DistaccumError(
                f"ranks have {list(plan.kept)} micro-batches, and SyncBatchNorm communicates in each forward: "
                "the longer ranks would wait for ever; give all ranks as many micro-batches, or freeze its "
                "statistics with eval()"
            )

    def refuse_dry_ranks(self, plan: Plan) -> None:
        """A rank without a micro-batch of its own, nor one from before to stand in with."""
        dry = [rank for rank, (kept, ready) in enumerate(zip(plan.kept, plan.ready, strict=True)) if not kept | ready]
        if dry:
            raise DistaccumError(
                f"ranks have {list(plan.kept)} micro-batches, and under {self.name} each of them must run forward for "
                f"the others to go on; rank {', '.join(map(str, dry))} has none from an earlier window to stand in "
                "with. Give each rank a micro-batch in the first window"
            )


def host_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """A group of the same ranks whose collectives run on the host, made without asking other ranks."""
    if "cpu:" in dist.get_backend_config(group):
        return group
    return new_host_group(group)


def new_host_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    ranks = dist.get_process_group_ranks(group)
    made: Any = dist.new_group(ranks, backend="gloo", use_local_synchronization=True, timeout=_timeout(group))
    assert isinstance(made, dist.ProcessGroup)
    return made


def _timeout(group: dist.ProcessGroup) -> timedelta | None:
    """After which its collectives give up. Private; where it has moved, that of torch's default."""
    for device in group._device_types:
        options = getattr(group._get_backend(device), "options", None)
        if isinstance(found := getattr(options, "_timeout", None), timedelta):
            return found
    return None


UNUSED, DENSE, SPARSE = range(3)


def average_by_hand(
    holders: Sequence[Any],
    group: dist.ProcessGroup,
    hosts: dist.ProcessGroup,
    divisor: float,
    is_zeroed: Callable[[Any], bool] = lambda _: False,
) -> None:
    """Sums gradients over `group` and divides by `divisor`, a bucket at a time; those that no rank has stay None.

    `holders` are parameters, or the sums of their gradients. Costs one reduction per bucket, and one small collective
    on the host: what each rank has.
    """
    kinds = torch.tensor([_kind(one, is_zeroed) for one in holders], dtype=torch.uint8)
    dist.all_reduce(kinds, op=dist.ReduceOp.MAX, group=hosts)
    dense: list[Any] = []
    for one, kind in zip(holders, kinds.tolist(), strict=True):
        if kind == UNUSED:
            one.grad = None
        elif kind == SPARSE:
            _average_sparse(one, group, divisor)
        else:
            if one.grad is None:
                one.grad = torch.zeros_like(_parameter(one), dtype=one.dtype)
            dense.append(one)

    flying: deque[tuple[list[Tensor], Tensor, Any]] = deque()
    for gradients in _in_buckets([local(one.grad) for one in dense]):
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients]).div_(divisor)
        flying.append((gradients, flat, dist.all_reduce(flat, group=group, async_op=True)))
        if len(flying) > 1:  # two buckets at a time: no copy of the whole gradient
            _land(*flying.popleft())
    while flying:
        _land(*flying.popleft())


def _parameter(holder: Any) -> Tensor:
    parameter: Tensor = holder.parameter if isinstance(holder, Sum) else holder
    return parameter


def _kind(holder: Any, is_zeroed: Callable[[Any], bool]) -> int:
    if holder.grad is None or is_zeroed(holder):
        return UNUSED
    return SPARSE if holder.grad.is_sparse else DENSE


def _in_buckets(gradients: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    sizes: dict[tuple[torch.device, torch.dtype], int] = {}
    for gradient in gradients:
        kind = gradient.device, gradient.dtype
        by_kind.setdefault(kind, []).append(gradient)
        sizes[kind] = sizes.get(kind, 0) + gradient.numel() * gradient.element_size()
        if sizes[kind] >= BUCKET_BYTES:
            yield by_kind.pop(kind)
            del sizes[kind]
    yield from by_kind.values()


def _land(gradients: Sequence[Tensor], flat: Tensor, work: Any) -> None:
    work.wait()
    pieces = torch.split(flat, [gradient.numel() for gradient in gradients])
    for gradient, piece in zip(gradients, pieces, strict=True):
        gradient.copy_(piece.view(gradient.shape))


def _average_sparse(holder: Any, group: dist.ProcessGroup, divisor: float) -> None:
    """An embedding's gradient: rows that were looked up."""
    gradient = holder.grad
    if gradient is None:
        parameter = _parameter(holder)
        rows = torch.empty((1, 0), dtype=torch.int64, device=parameter.device)
        values = parameter.new_empty((0, *parameter.shape[1:]), dtype=holder.dtype)
        gradient = torch.sparse_coo_tensor(rows, values, parameter.shape, check_invariants=False)
    gradient = (gradient / divisor).coalesce()
    dist.all_reduce(gradient, group=group)
    holder.grad = gradient
