"""What engines of several ranks share: a process group, and what none of them can do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..law import DistaccumError, Plan, ranks_where, shorten
from ..ranks import GroupPeers, own_group
from .averaging import average_by_hand, unlike
from .base import Engine, Sync
from .shards import cut_over, is_part, lies_over


class RanksEngine(Engine):
    """An engine whose ranks are a process group. Abstract: subclass it for a wrapper that reduces over several ranks.

    Args:
        models: As in `Engine`.
        sync: As in `Engine`.
        group: The data-parallel ranks.
        sharing: For each of them, the ranks in the job that have its samples too (tensor parallelism); by default none.

    Attributes:
        group (dist.ProcessGroup): The same.
        host_group (dist.ProcessGroup): A group of the same ranks whose collectives run on the host.
        divisor (float): The number of ranks; set it to 1 after `super().__init__` if the wrapper sums.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        sync: Sync,
        group: dist.ProcessGroup,
        sharing: Sequence[Sequence[int]] | None = None,
    ) -> None:
        peers = GroupPeers(group, sharing)
        super().__init__(models, sync, peers)
        self.group, self.host_group = group, peers.host_group
        self.divisor = peers.num_ranks
        self.alike: set[int] = set()  # ids of parameters that the wrapper makes equal on all ranks
        self._copies: dict[tuple[int, ...], dist.ProcessGroup] = {}  # by the ranks over which a parameter is cut
        self._num_compared = 0  # parameters in the largest `average` so far

    def average(
        self, parameters: Sequence[nn.Parameter], is_zeroed: Callable[[nn.Parameter], bool] = lambda _: False
    ) -> None:
        """Reduces gradients of which the wrapper reduces none; on all ranks, with the same parameters.

        Args:
            parameters: Their `.grad` is summed over the ranks and divided by `divisor`.
            is_zeroed: Whether a parameter's gradient is zeros that stand for none, so that it may become None.
        """
        if len(parameters) > self._num_compared:
            self._refuse_unlike(parameters)
            self._num_compared = len(parameters)
        if parameters:
            average_by_hand(parameters, self._copies_of, self.host_group, self.divisor, is_zeroed)

    def _refuse_unlike(self, parameters: Sequence[nn.Parameter]) -> None:
        """Raises, on all ranks, if one of `parameters` is another on each rank, as experts may be.

        Looks at values once, before the first gradient is averaged. Parts that equal each other (biases of zeros)
        cannot be told from copies.
        """
        outside = [p for p in parameters if id(p) not in self.alike and not cut_over(p, self.group)]
        differ = unlike(outside, self.host_group) if outside else []
        if differ:
            raise DistaccumError(
                f"{shorten(list(map(self.name_of, differ)))} differs between the data-parallel ranks, and {self.name} "
                "does not reduce it, so that its gradient would be averaged over different parameters; if each rank "
                "has its own (experts), cut it over the ranks under fully_shard: distribute_tensor(whole, mesh, "
                "[Shard(0)]); if it is one parameter, give it the same values on all ranks"
            )

    def _copies_of(self, parameter: nn.Parameter) -> dist.ProcessGroup | None:
        """The ranks that hold what this rank does of `parameter`; None: no other."""
        if is_part(parameter, self.group):
            return None
        return self._copies.get(tuple(cut_over(parameter, self.group)), self.group)

    def _find_copies(self, cut: tuple[int, ...]) -> None:
        """For parameters that are cut over some of the ranks, as experts are: those with the same place among them."""
        here = dist.get_process_group_ranks(self.group)
        places = [ranks.index(rank) for rank, ranks in zip(here, self.peers.gather_objects(cut), strict=True)]
        copies = [rank for rank, place in zip(here, places, strict=True) if place == cut.index(dist.get_rank())]
        if len(copies) * len(cut) != len(here):
            raise ValueError(
                f"{self.name}: parameters outside of it are cut over ranks {list(cut)}, and ranks {copies} hold the "
                f"same part, expected meshes of one size that divide the data-parallel ranks {here}"
            )
        self._copies[cut] = own_group(self.group, copies, backend=None)

    def whole_loss(self, loss: Any) -> Tensor:
        ranks, placements = lies_over(loss, self.group)
        if ranks:
            raise ValueError(
                f"backward() got a loss that is a DTensor over the data-parallel ranks {ranks}, placed as "
                f"{placements}, expected one of this rank's samples alone; take the loss of local outputs (to_local())"
            )
        return super().whole_loss(loss)

    def refuse_unknown_parts(self, parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        """Those of `parameters`, which no wrapper reduces, that are cut over data-parallel ranks, or some of them.

        Raises if a DTensor lies over some of these ranks in another way: its gradient may be of this rank's samples or
        of all ranks'.
        """
        for parameter in parameters:
            ranks, placements = lies_over(parameter, self.group)
            cut = tuple(cut_over(parameter, self.group))
            if ranks and not cut:
                raise ValueError(
                    f"{self.name_of(parameter)} is a DTensor outside of {self.name}, placed as {placements} over ranks "
                    f"{ranks}, so it cannot be known whether its gradient is of this rank's samples or of all ranks'. "
                    "Place it as Shard over data-parallel ranks (of "
                    f"{dist.get_process_group_ranks(self.group)}), or as a plain tensor on each of them"
                )
            if cut and cut not in self._copies and not is_part(parameter, self.group):
                self._find_copies(cut)
        return [parameter for parameter in parameters if cut_over(parameter, self.group)]

    def name_of(self, parameter: nn.Parameter) -> str:
        named = ((n, p) for model in self.models for n, p in model.named_parameters())
        return next((n for n, p in named if p is parameter), f"a parameter of shape {list(parameter.shape)}")

    def refuse_synchronised_norms(self, plan: Plan) -> None:
        """SyncBatchNorm would take a stand-in's statistics too, or wait for a rank that has none."""
        if plan.uneven and any(
            isinstance(module, nn.SyncBatchNorm) and module.training for m in self.models for module in m.modules()
        ):
            raise DistaccumError(
                f"ranks have {list(plan.num_counted)} micro-batches, and SyncBatchNorm communicates in each forward: "
                "the ranks with more would wait for ever; give all ranks as many micro-batches, or freeze its "
                "statistics with eval()"
            )

    def refuse_dry_ranks(self, plan: Plan) -> None:
        """A rank without a micro-batch needs one of an earlier window to stand in with."""
        dry = [not (own or ready) for own, ready in zip(plan.num_counted, plan.has_stand_in, strict=True)]
        if any(dry):
            raise DistaccumError(
                f"ranks have {list(plan.num_counted)} micro-batches; under {self.name} each rank must run forward for "
                f"the others to go on; rank {ranks_where(dry)} has none from an earlier window to stand in with. Give "
                "each rank a micro-batch in the first window"
            )

    def refuse_left_out_terms(self, plan: Plan, cure: str) -> None:
        """Where modules communicate in backward, each loss must take part in each backward."""
        if not plan.all_terms:
            raise DistaccumError(
                f"a micro-batch has a count of 0 for one of {list(plan.counts)}; its loss would be left out, and so "
                "would modules in this backward for which the other ranks wait; give each micro-batch a count above 0 "
                f"for each name{cure}"
            )


def refuse_narrower(adds_up: Iterable[tuple[str, torch.dtype]], dtype: torch.dtype, cure: str) -> None:
    """`adds_up`: parts by name, and the dtype in which the wrapper adds up their gradients by itself."""
    for name, seen in adds_up:
        if torch.promote_types(seen, dtype) != seen:
            raise ValueError(f"WideSums({dtype}), and gradients of {name} add up in {seen}; {cure}")


def refuse_narrower_outside(parameters: Sequence[nn.Parameter], dtype: torch.dtype) -> None:
    """`parameters`: those that no shard holds, which add up in their own dtype."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    outside = [(f"a parameter of shape {list(p.shape)} outside of every shard", p.dtype) for p in trained]
    refuse_narrower(outside, dtype, "shard it too, or keep it in float32")
