"""Ranks of a data-parallel group that have parts of the same samples, or share theirs with ranks outside it."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from typing import Any, final

import torch
import torch.distributed as dist

from ..batch import TokenCount, tensors_in
from ..law import DistaccumError, Plan, refuse_to_differ
from ..ranks import Groups, Peers, Rows, Value

# Fields of a report that must be equal on ranks that share their samples, and how an error describes their values.
ALIKE = {
    "num_drawn": "micro-batches {}",
    "num_micro_batches": "micro-batches that count {}",
    "totals": "counts {}",
    "fingerprint": "other numbers in their first micro-batch",
}
# Where a plan's row tells a rank's samples: the fingerprint of the first, then sizes and counts.
FINGERPRINT = Plan._fields.index("fingerprint")


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
        own = own._replace(fingerprint=0 if own.failed else _fingerprint(micro_batches))
        rows = self.gather(own.to_row(), everyone=True)
        plan = own.merged(rows)
        if plan.failed:
            return plan
        refuse_to_differ(rows)
        by_samples = self.by_samples(rows)
        once = [of_ranks[0] for of_ranks in by_samples]
        of_parts = [[once[rank] for rank in ranks] for ranks in self.parts]
        for ranks, of_ranks in zip(self.sharing, by_samples, strict=True):
            _refuse_unlike(own, ranks, of_ranks, ALIKE)
        for ranks, of_ranks in zip(self.parts, of_parts, strict=True):
            _refuse_unlike(own, [self.here[rank] for rank in ranks], of_ranks, ["num_drawn"])
        are_alike = all(row[FINGERPRINT:] == of_ranks[0][FINGERPRINT:] for of_ranks in of_parts for row in of_ranks)
        # The caller's own count may count this rank's part alone.
        counts_tokens = any(isinstance(one, TokenCount) for one in counts)
        if self.has_parts and counts_tokens and plan.num_drawn and are_alike:
            parts = next(ranks for ranks in self.parts if self.rank in ranks)
            raise DistaccumError(
                f"ranks {[self.here[rank] for rank in parts]} have parts of the same samples, and each counted the "
                f"same whole labels ({list(own.totals)}), so that all are counted {len(parts)} times; cut them before "
                "the window; or, where the criterion sums, divide: count=lambda batch: tokens(batch) / "
                f"{len(parts)}, with tokens = count_tokens(...)"
            )
        counted = own.merged(once)
        return plan._replace(num_micro_batches=counted.num_micro_batches, totals=counted.totals)

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


def _refuse_unlike(own: Plan, ranks: Sequence[int], rows: Rows, names: Iterable[str]) -> None:
    """Raises if ranks that go through their samples together report other ones in the rows of their plans."""
    if all(row == rows[0] for row in rows):
        return
    for name in names:
        values = [getattr(own.merged([row]), name) for row in rows]
        if len(set(values)) > 1:
            raise DistaccumError(
                f"ranks {list(ranks)} compute on the same samples together, and have {ALIKE[name].format(values)}; "
                "give them the same batches, or a part of each: draw and shuffle by the data-parallel rank, not by the "
                "rank in the job"
            )
