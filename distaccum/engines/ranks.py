"""What engines of several ranks share: telling each other numbers, and averaging gradients by hand."""

from __future__ import annotations

import re
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..law.errors import DistaccumError, LostRanksError
from ..law.plan import Plan
from ..law.update import Waitable
from ..observers.trace import gathering, span
from .averaging import is_part, lies_over
from .base import Engine, Sync

# What gloo, NCCL and the store under them say when a rank is gone or late.
LOST = re.compile(r"[Cc]onnection (closed|reset|refused)|[Bb]roken pipe|[Tt]imed? ?out|ncclRemoteError|aborted")
# Modules whose functions run collectives: the caller's own code says such words from frames of its own.
RUN_COLLECTIVES = (
    "torch.distributed",
    "torch.nn.parallel",
    "torch.nn.modules._functions",  # SyncBatchNorm
    "torch.autograd",  # DDP's reduction is started by backward, in C++
    "torch._ops",
    "deepspeed",
    "distaccum",
)


class RanksEngine(Engine):
    """Abstract: an engine whose ranks are a process group."""

    def __init__(self, models: Sequence[nn.Module], sync: Sync, group: dist.ProcessGroup) -> None:
        super().__init__(models, sync)
        self.group = group
        self.host_group = host_group(group)
        self.divisor = self.num_ranks = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        self.world_size, self.global_rank = dist.get_world_size(), dist.get_rank()
        self._apart: dist.ProcessGroup | None = None
        self._recent: deque[_Sent] = deque(maxlen=8)  # collectives of the host
        weakref.finalize(self, _let_go, self._recent)  # when the engine is dropped, or before the interpreter ends

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
        self._recent.append((work, [mine, *rows]))

        def wait() -> list[list[float]]:
            try:
                with waiting:
                    work.wait()
            except RuntimeError as error:
                raise self._lost_ranks(error) from error
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

    def whole_loss(self, loss: Any) -> Tensor:
        ranks, placements = lies_over(loss, self.group)
        if ranks:
            raise ValueError(
                f"backward() got a loss that is a DTensor over the data-parallel ranks {ranks}, placed as "
                f"{placements}, expected one of this rank's samples alone; take the loss of local outputs (to_local())"
            )
        return super().whole_loss(loss)

    def refuse_lost_ranks(self, error: RuntimeError) -> None:
        if _is_of_a_collective(error):
            raise self._lost_ranks(error) from error

    def _lost_ranks(self, error: RuntimeError) -> LostRanksError:
        return LostRanksError(
            f"rank {self.rank} waited for the others in vain: one of them died, failed on its own, or did not come "
            f"within the process group's timeout ({' '.join(str(error).split())[:200]}). The group cannot be used "
            "any more; start all ranks again, from a checkpoint"
        )

    def sum_over_ranks(self, values: Tensor) -> Waitable | None:
        group = self.group_for(values)
        kind = values.device.type
        on_host = kind == "cpu" or f"{kind}:gloo" in dist.get_backend_config(group)
        sent = values.clone() if on_host else values
        work = dist.all_reduce(sent, group=group, async_op=True)
        reduction: Waitable = work if self.trace is None else self.trace.watched(work)
        if not on_host:
            return reduction
        # The host computes it and ranks are together here. Left under way, it would keep a job from ending that never
        # reads its last loss.
        self._recent.append((work, [sent]))
        try:
            reduction.wait()
        except RuntimeError as error:
            self.refuse_lost_ranks(error)
            raise
        values.copy_(sent)
        return None

    def group_for(self, tensor: Tensor) -> dist.ProcessGroup:
        """Offloaded parameters leave numbers on the host, which the device's group cannot send."""
        return self.host_group if tensor.device.type == "cpu" else self.group

    def refuse_unknown_parts(self, parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        """Those of `parameters`, which no wrapper reduces, that are cut over the data-parallel ranks.

        Raises where a DTensor lies over some of these ranks in another way: whether its gradient is of this rank's
        samples or of all ranks' cannot be seen.
        """
        for parameter in parameters:
            ranks, placements = lies_over(parameter, self.group)
            if ranks and not is_part(parameter, self.group):
                raise ValueError(
                    f"{self.name_of(parameter)} is a DTensor outside of {self.name}, placed as {placements} over ranks "
                    f"{ranks}, so it cannot be known whether its gradient is of this rank's samples or of all ranks'. "
                    f"Place it as Shard over all data-parallel ranks {dist.get_process_group_ranks(self.group)}, or as "
                    "a plain tensor on each of them"
                )
        return [parameter for parameter in parameters if is_part(parameter, self.group)]

    def name_of(self, parameter: nn.Parameter) -> str:
        named = ((n, p) for model in self.models for n, p in model.named_parameters())
        return next((n for n, p in named if p is parameter), f"a parameter of shape {list(parameter.shape)}")

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


_Sent = tuple[Any, list[Tensor]]  # a collective, and its tensors, which nobody else has


def _let_go(recent: deque[_Sent]) -> None:
    """Lets go of collectives when gloo's threads have.

    They do some time after a collective's end. The last who holds it frees its tensors, a thread under the
    interpreter's lock; and a process group that ends waits for its threads, and may hold that lock. So collectives are
    kept, and here their tensors outlive what a thread has of them. Private: how many hold a tensor.
    """
    until = time.monotonic() + 1
    while recent:
        tensors = recent.popleft()[1]  # the collective goes
        while any(getattr(one, "_use_count", lambda: 1)() > 1 for one in tensors) and time.monotonic() < until:
            time.sleep(1e-4)  # which gives the lock away


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
