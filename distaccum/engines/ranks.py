"""What engines of several ranks share: a process group, and what no such engine can do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from ..law.errors import DistaccumError
from ..law.plan import Plan
from .averaging import is_part, lies_over
from .base import Engine, Sync
from .peers import GroupPeers


class RanksEngine(Engine):
    """Abstract: an engine whose ranks are a process group."""

    def __init__(self, models: Sequence[nn.Module], sync: Sync, group: dist.ProcessGroup) -> None:
        peers = GroupPeers(group)
        super().__init__(models, sync, peers)
        self.group, self.host_group = group, peers.host_group
        self.divisor = peers.num_ranks

    def whole_loss(self, loss: Any) -> Tensor:
        ranks, placements = lies_over(loss, self.group)
        if ranks:
            raise ValueError(
                f"backward() got a loss that is a DTensor over the data-parallel ranks {ranks}, placed as "
                f"{placements}, expected one of this rank's samples alone; take the loss of local outputs (to_local())"
            )
        return super().whole_loss(loss)

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
                f"ranks have {list(plan.num_counted)} micro-batches, and SyncBatchNorm communicates in each forward: "
                "the longer ranks would wait for ever; give all ranks as many micro-batches, or freeze its "
                "statistics with eval()"
            )

    def refuse_dry_ranks(self, plan: Plan) -> None:
        """A rank without a micro-batch of its own, nor one from before to stand in with."""
        dry = [
            rank
            for rank, (kept, ready) in enumerate(zip(plan.num_counted, plan.has_stand_in, strict=True))
            if not kept | ready
        ]
        if dry:
            raise DistaccumError(
                f"ranks have {list(plan.num_counted)} micro-batches; under {self.name} each rank must run forward "
                f"for the others to go on; rank {', '.join(map(str, dry))} has none from an earlier window to stand in "
                "with. Give each rank a micro-batch in the first window"
            )
