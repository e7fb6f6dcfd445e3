"""Ranks that compute on the same samples (tensor parallelism), and parameters cut over data ranks (experts)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast, final

import torch.distributed as dist
from torch import nn

from ..engines.averaging import settle_placements
from ..engines.base import Engine, Sync
from ..engines.shards import lies_over, why_tensor_parallel
from ..law import Plan
from ..norms import names_of
from ..ranks import own_group


def ranks_sharing(parameters: Iterable[Any], group: dist.ProcessGroup) -> list[list[int]]:
    """For each rank of `group`, whose ranks have different samples, those that compute on its samples together.

    They lie along the dimensions of the parameters' meshes on which no other rank of `group` is met.
    """
    data, here = dist.get_process_group_ranks(group), dist.get_rank()
    found = [[rank] for rank in data]
    for mesh in {id(mesh): mesh for p in parameters if (mesh := getattr(p, "device_mesh", None)) is not None}.values():
        if mesh.get_coordinate() is None:
            continue
        along = [set(dist.get_process_group_ranks(mesh.get_group(i))) for i in range(mesh.ndim)]
        beside = {i for i, ranks in enumerate(along) if not (ranks - {here}) & set(data)}
        places = [(mesh.mesh == rank).nonzero().tolist() for rank in data]
        if not all(places):
            continue  # a mesh of some of them, as that of the tensor-parallel ranks alone
        sets = [
            mesh.mesh[tuple(slice(None) if i in beside else at for i, at in enumerate(place))].flatten().tolist()
            for (place,) in places
        ]
        if len(sets[0]) > len(found[0]):
            found = sets
    return found


class Experts:
    """Parameters that no wrapper reduces and that are cut over data-parallel ranks, as experts are."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._group = engine, cast("dist.ProcessGroup", engine.peers.group)
        self._ranks = dist.get_process_group_ranks(self._group)
        self._copies: dict[tuple[int, ...], dist.ProcessGroup | None] = {(): self._group}  # by the ranks of a cut

    def find(self, parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        """Returns those of `parameters` that are cut over data-parallel ranks, a part of its own on each.

        Raises if a DTensor lies over some of these ranks in another way: its gradient may be of this rank's samples or
        of all ranks'.
        """
        found = []
        for parameter in parameters:
            ranks, placements = lies_over(parameter, self._group)
            cut = self._cut(parameter)
            if ranks and not cut:
                name = names_of(self._engine.models).get(id(parameter), "a parameter")
                raise ValueError(
                    f"{name} is a DTensor outside of {self._engine.name}, placed as "
                    f"{placements} over ranks {ranks}, so it cannot be known whether its gradient is of this rank's "
                    f"samples or of all ranks'. Place it as Shard over data-parallel ranks (of {self._ranks}), or as a "
                    "plain tensor on each of them"
                )
            if cut:
                found.append(parameter)
                if cut not in self._copies:
                    self._copies[cut] = None if sorted(cut) == sorted(self._ranks) else self._find_copies(cut)
        return found

    def copies_of(self, parameter: nn.Parameter) -> dist.ProcessGroup | None:
        return self._copies[self._cut(parameter)]

    def _cut(self, parameter: nn.Parameter) -> tuple[int, ...]:
        ranks, placements = lies_over(parameter, self._group)
        return () if any(one.is_replicate() or one.is_partial() for one in placements) else tuple(ranks)

    def _find_copies(self, cut: tuple[int, ...]) -> dist.ProcessGroup:
        """The ranks with the same place among those over which a parameter is cut."""
        places = [
            ranks.index(rank) for rank, ranks in zip(self._ranks, self._engine.peers.gather_objects(cut), strict=True)
        ]
        copies = [rank for rank, place in zip(self._ranks, places, strict=True) if place == cut.index(dist.get_rank())]
        if len(copies) * len(cut) != len(self._ranks):
            raise ValueError(
                f"{self._engine.name}: parameters outside of it are cut over ranks {list(cut)}, and ranks {copies} "
                f"hold the same part, expected meshes of one size that divide the data-parallel ranks {self._ranks}"
            )
        return own_group(self._group, copies, backend=None)


@final
class UnwrappedEngine(Engine):
    """Modules without a wrapper in a job whose ranks all compute on the same samples: tensor-parallel ones, or stages.

    DTensor sums over the parts by itself in forward and backward; a gradient that it leaves as partial sums adds up
    so, and is summed once, after the last backward.
    """

    name = "modules without a wrapper"
    owns = frozenset(("sums", "dtype"))
    policies = ("last",)

    def __init__(self, models: Sequence[nn.Module], sync: Sync) -> None:
        assert dist.group.WORLD is not None
        alone = own_group(dist.group.WORLD, [dist.get_rank()], backend=None)
        parameters = [p for model in models for p in model.parameters()]
        super().__init__(models, sync, alone, ranks_sharing(parameters, alone))
        self._parameters: Sequence[nn.Parameter] = ()

    def begin(self, plan: Plan, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters

    def finish(self) -> None:
        for parameter in self._parameters:
            settle_placements(parameter)
        self._parameters = ()

    hides_own = staticmethod(why_tensor_parallel)
