"""Ranks of a data-parallel group that have parts of the same samples, or share theirs with ranks outside it."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from typing import Any, final

import torch
import torch.distributed as dist

from ..batch import TokenCount, tensors_in
from ..law import DistaccumError, Plan
from ..ranks import Groups, Peers, Value

# Fields of a report that must be equal on ranks that share their samples, and how an error describes their values.
ALIKE = {
    "num_drawn": "micro-batches {}",
    "num_micro_batches": "micro-batches that count {}",
    "totals": "counts {}",
    "unlike": "other numbers in their first micro-batch",
}


@final
class MeshPeers(Peers):
    """The ranks of a data-parallel group on a mesh with more dimensions.

    Attributes:
        sharing: For each rank of the group, the global ranks that compute on its samples.
        parts: Lists of ranks in the group that have parts of the same samples.
    """

    def __init__(
        self,
        groups: Sequence[dist.ProcessGroup],
        here: Sequence[int] | None = None,
        sharing: Sequence[Sequence[int]] | None = None,
        beside: Groups = (),
    ) -> None:
        super().__init__(groups, here)
        self.beside = beside
        self._take(sharing or [[rank] for rank in self.here], [[rank] for rank in range(self.num_ranks)])

    def _take(self, sharing: Sequence[Sequence[int]], parts: Sequence[Sequence[int]]) -> None:
        self.sharing = sharing
        self.parts = parts
        self.num_data_ranks = len(parts)
        self.is_alone = len(sharing) == len(sharing[0]) == 1
        self.shares_samples = len(sharing[0]) > 1
        self.has_parts = len(parts[0]) > 1
        self.ranks = sorted({rank for ranks in sharing for rank in ranks})

    def cut_samples(self, data_ranks: Sequence[int], name: str) -> None:
        """Declares that only `data_ranks` have samples of their own; the other ranks have parts of the same samples."""
        by_rank = self.gather_objects(list(data_ranks))
        places = [ranks.index(one) if one in ranks else -1 for one, ranks in zip(self.here, by_rank, strict=True)]
        parts = [[rank for rank, place in enumerate(places) if place == one] for one in range(len(data_ranks))]
        if not set(data_ranks) <= set(self.here) or len({len(ranks) for ranks in parts}) != 1 or -1 in places:
            raise ValueError(
                f"mesh has the data ranks {list(data_ranks)}, and {name} reduces over ranks {self.here}, expected "
                "some of these; give the dimensions of one mesh that carry data, as mesh=mesh['data'], and wrap the "
                "model over them and those that cut samples"
            )
        self._take(self.sharing, parts)

    def add_stages(self, group: dist.ProcessGroup) -> None:
        """Declares that the ranks of `group` hold other stages of the model, for the same samples."""
        self.stages = (group,)
        self.beside = (*self.beside, group)
        groups = (*self.beside, *self.groups)
        every = self._rows([self.global_rank], groups)[:, 0].int().view(self.num_ranks, -1).tolist()
        # The rows come by data-parallel rank, and each has those that compute on its samples.
        self._take([sorted(next(of for of in every if rank in of)) for rank in self.here], self.parts)

    def plan(self, own: Plan, micro_batches: Sequence[Any], counts: Iterable[Any]) -> Plan:
        """Merges plans, in which a rank alone adds up the samples that it shares.

        Raises if ranks do not go through the samples that they share together, or count them twice.
        """
        if not (self.shares_samples or self.has_parts):
            return super().plan(own, micro_batches, counts)
        sharing = self.sharing[self.rank]
        own = own._replace(unlike=0 if own.failed else _fingerprint(micro_batches))
        # Numbers of ranks that say the same add up to 0.
        parts = next(ranks for ranks in self.parts if self.rank in ranks)
        apart = unlike = 0
        if self.shares_samples:
            apart = _told([getattr(own, name) for name in ALIKE], sharing, self.global_rank)
        if self.has_parts:
            apart += _told(own.num_drawn, parts, self.rank)
            unlike = _told((own.unlike, own.totals), parts, self.rank)
        sent = own._replace(apart=apart, unlike=unlike)
        if self.shares_samples and self.global_rank != sharing[0]:
            sent = sent._replace(num_micro_batches=0, totals=(0.0,) * len(own.totals))
        plan = super().plan(sent, micro_batches, counts)
        if plan.failed:
            return plan
        if plan.apart:
            of_sets = self.by_samples(self.gather_objects(own, everyone=True))
            for ranks, of_set in zip(self.sharing, of_sets, strict=True):
                _refuse_unlike(ranks, of_set, ALIKE)
            for ranks in self.parts:
                _refuse_unlike([self.here[rank] for rank in ranks], [of_sets[rank][0] for rank in ranks], ["num_drawn"])
        # The caller's own count may count this rank's part alone.
        counts_tokens = any(isinstance(one, TokenCount) for one in counts)
        if self.has_parts and counts_tokens and plan.num_drawn and not plan.unlike:
            raise DistaccumError(
                f"ranks {[self.here[rank] for rank in parts]} have parts of the same samples, and each counted the "
                f"same whole labels ({list(own.totals)}), so that all are counted {len(parts)} times; cut them before "
                "the window; or, where the criterion sums, divide: count=lambda batch: tokens(batch) / "
                f"{len(parts)}, with tokens = count_tokens(...)"
            )
        return plan

    def by_samples(self, values: Sequence[Value]) -> list[list[Value]]:
        if not self.shares_samples:
            return super().by_samples(values)
        by_rank = dict(zip(self.ranks, values, strict=True))
        return [[by_rank[rank] for rank in ranks] for ranks in self.sharing]


def on_mesh(peers: Peers) -> MeshPeers:
    """These peers, or ones of the same groups that may have parts of the same samples, or share them."""
    if isinstance(peers, MeshPeers):
        return peers
    on_mesh = MeshPeers(peers.groups, peers.here)
    on_mesh.device = peers.device
    return on_mesh


def _fingerprint(micro_batches: Sequence[Any]) -> int:
    """A hash of some values of each tensor in the first micro-batch, read at once."""
    tensors = [one.detach() for _, one in tensors_in(micro_batches[:1]) if not hasattr(one, "to_local")]
    dense = [one for one in tensors if one.layout is torch.strided and not one.is_nested and one.numel()]
    some = [one.reshape(-1)[:: -(-one.numel() // 64)].double() for one in dense if not one.is_complex()]
    values = torch.cat([one.to(some[0].device) for one in some]).tolist() if some else []
    return zlib.crc32(repr(([tuple(one.shape) for one in dense], values)).encode())


def _told(said: object, ranks: Sequence[int], rank: int) -> int:
    """A number for each of `ranks`, of which one says this; their sum is 0 if all say the same, or else it is not."""
    number = zlib.crc32(repr((ranks, said)).encode())
    # The first rank outweighs the others.
    is_first = rank == ranks[0]
    return (len(ranks) - 1) * number if is_first else -number


def _refuse_unlike(ranks: Sequence[int], plans: Sequence[Plan], names: Iterable[str]) -> None:
    """Raises if ranks that go through their samples together report other ones."""
    for name in names:
        values = [getattr(one, name) for one in plans]
        if len(set(values)) > 1:
            raise DistaccumError(
                f"ranks {list(ranks)} compute on the same samples together, and have {ALIKE[name].format(values)}; "
                "give them the same batches, or a part of each: draw and shuffle by the data-parallel rank, not by the "
                "rank in the job"
            )
