"""Ranks of a data-parallel group that have parts of the same samples, or share theirs with ranks outside it."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from typing import Any, final

import torch
import torch.distributed as dist

from ..cutting import TokenCount, refuse_to_wait, tensors_in
from ..engines.base import Engine
from ..law import DistaccumError, RankReport
from ..ranks import Peers, Value, own_group

# Fields of a report that must be equal on ranks that share their samples, and how an error describes their values.
ALIKE = {
    "num_drawn": "micro-batches {}",
    "num_counted": "micro-batches that count {}",
    "totals": "counts {}",
    "fingerprint": "other numbers in their first micro-batch",
}


@final
class MeshPeers(Peers):
    """The ranks of a data-parallel group on a mesh with more dimensions.

    Attributes:
        sharing: For each rank of the group, the global ranks that compute on its samples.
        parts: Lists of ranks in the group that have parts of the same samples.
    """

    def __init__(self, group: dist.ProcessGroup | None, sharing: Sequence[Sequence[int]] | None = None) -> None:
        self._here = [0] if group is None else dist.get_process_group_ranks(group)
        sharing = sharing or [[rank] for rank in self._here]
        super().__init__(group, _all_of(sharing))
        self._take(sharing, [[rank] for rank in range(self.num_ranks)])

    def _take(self, sharing: Sequence[Sequence[int]], parts: Sequence[Sequence[int]]) -> None:
        self.sharing, self.parts, self.num_data_ranks = sharing, parts, len(parts)
        self.is_alone = len(sharing) == len(sharing[0]) == 1
        self.shares_samples, self.has_parts = len(sharing[0]) > 1, len(parts[0]) > 1
        self.fingerprint = _fingerprint if self.shares_samples or self.has_parts else None
        self.plan_with(_all_of(sharing))

    def cut_samples(self, data_ranks: Sequence[int], name: str) -> None:
        """Declares that only `data_ranks` have samples of their own; the other ranks have parts of the same samples."""
        by_rank = self.gather_objects(list(data_ranks))
        places = [ranks.index(one) if one in ranks else -1 for one, ranks in zip(self._here, by_rank, strict=True)]
        parts = [[rank for rank, place in enumerate(places) if place == one] for one in range(len(data_ranks))]
        if not set(data_ranks) <= set(self._here) or len({len(ranks) for ranks in parts}) != 1 or -1 in places:
            raise ValueError(
                f"mesh has the data ranks {list(data_ranks)}, and {name} reduces over ranks {self._here}, expected "
                "some of these; give the dimensions of one mesh that carry data, as mesh=mesh['data'], and wrap the "
                "model over them and those that cut samples"
            )
        self._take(self.sharing, parts)

    def add_stages(self, group: dist.ProcessGroup) -> None:
        """Declares that the ranks of `group` hold other stages of the model, for the same samples."""
        if self.group is None:
            return  # a schedule on one rank alone
        column = dist.get_process_group_ranks(group)
        of_stages: list[Any] = [None] * len(column)
        dist.all_gather_object(of_stages, list(self.sharing[self.rank]), group=own_group(group))
        rows = self.gather_objects(({rank for ranks in of_stages for rank in ranks}, column))
        self._take([sorted(ranks) for ranks, _ in rows], self.parts)
        self.record_over(own_group(self.group, sorted({one for _, ranks in rows for one in ranks}), backend=None))

    def combine(self, reports: Sequence[RankReport], counts: Iterable[Any]) -> Sequence[RankReport]:
        """Merges the reports of each set of ranks that share samples; raises if they do not go through these samples
        together, or count them twice.
        """
        shared = zip(self.sharing, self.by_samples(reports), strict=True)
        found = [_common(ranks, of_set) for ranks, of_set in shared]
        for ranks in self.parts if self.has_parts else ():
            # The caller's own count may count only this rank's part of the labels.
            _refuse_unlike_parts(
                ranks, [found[rank] for rank in ranks], any(isinstance(one, TokenCount) for one in counts)
            )
        return found

    def by_samples(self, values: Sequence[Value]) -> list[list[Value]]:
        if not self.shares_samples:
            return super().by_samples(values)
        by_rank = dict(zip(_all_of(self.sharing), values, strict=True))
        return [[by_rank[rank] for rank in ranks] for ranks in self.sharing]


def _all_of(sharing: Iterable[Iterable[int]]) -> list[int]:
    return sorted({rank for ranks in sharing for rank in ranks})


def on_mesh(engine: Engine) -> MeshPeers:
    """The engine's peers, turned into ones that may have parts of the same samples, or share them."""
    if not isinstance(engine.peers, MeshPeers):
        engine.peers = MeshPeers(engine.peers.group)
    return engine.peers


def _fingerprint(micro_batches: Sequence[Any], *, ahead: bool) -> int:
    """A hash of some values of each tensor in the first micro-batch, read at once."""
    first = micro_batches[:1]
    if ahead:
        refuse_to_wait(first)
    found = [one.detach() for _, one in tensors_in(first) if not hasattr(one, "to_local")]
    dense = [one for one in found if one.layout is torch.strided and not one.is_nested and one.numel()]
    some = [one.reshape(-1)[:: -(-one.numel() // 64)].double() for one in dense if not one.is_complex()]
    values = torch.cat([one.to(some[0].device) for one in some]).tolist() if some else []
    return zlib.crc32(repr(([tuple(one.shape) for one in dense], values)).encode())


def _common(ranks: Sequence[int], reports: Sequence[RankReport]) -> RankReport:
    """The common report of ranks that share their samples."""
    if len(reports) == 1:
        return reports[0]
    for name, seen in ALIKE.items():
        values = [getattr(one, name) for one in reports]
        if len(set(values)) > 1:
            raise DistaccumError(
                f"ranks {list(ranks)} compute on the same samples together, and have {seen.format(values)}; give "
                "them the same batches: draw and shuffle by the data-parallel rank, not by the rank in the job"
            )
    return reports[0]._replace(
        no_more_after=all(one.no_more_after for one in reports),
        has_stand_in=all(one.has_stand_in for one in reports),
        reduce_afterwards=any(one.reduce_afterwards for one in reports),
    )


def _refuse_unlike_parts(ranks: Sequence[int], reports: Sequence[RankReport], counts_tokens: bool) -> None:
    drawn, seen = [one.num_drawn for one in reports], f"ranks {list(ranks)} of the group have parts of the same samples"
    if len(set(drawn)) > 1:
        raise DistaccumError(
            f"{seen}, and have {drawn} micro-batches; give each of them its part of every micro-batch, also one in "
            "which nothing counts"
        )
    if drawn[0] and counts_tokens and len({(one.fingerprint, one.totals) for one in reports}) == 1:
        raise DistaccumError(
            f"{seen}, and each counted the same whole labels ({list(reports[0].totals)}), so that all are counted "
            f"{len(ranks)} times; cut them before the window; or, where the criterion sums, divide: "
            f"count=lambda batch: tokens(batch) / {len(ranks)}, with tokens = count_tokens(...)"
        )
