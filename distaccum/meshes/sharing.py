"""Ranks that compute on the same samples (tensor parallelism), and parameters cut over data ranks (experts)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from ..norms import names_of
from ..ranks import Groups, Peers
from ..text import warn
from .private import root_of
from .ranks import MeshPeers


def peers_of(parameters: Iterable[Any], peers: Peers) -> MeshPeers:
    """The data-parallel `peers`, which have different samples, and the ranks that compute on samples of each together.

    Those lie along the dimensions of the parameters' meshes that hold no other of the data-parallel ranks.
    """
    data, groups = peers.here, Groups()
    sharing = [[rank] for rank in data]
    for mesh in {id(mesh): mesh for p in parameters if (mesh := getattr(p, "device_mesh", None)) is not None}.values():
        beside = mesh.get_coordinate() and [i for i in range(mesh.ndim) if i not in _meeting(mesh, data)]
        places = [(mesh.mesh == rank).nonzero().tolist() for rank in data]
        # A mesh of only some, such as the tensor-parallel ranks alone, says nothing.
        if beside and all(places):
            sets = [_ranks_along(mesh, beside, place) for (place,) in places]
            if len(sets[0]) > len(sharing[0]):
                sharing, groups = sets, tuple(mesh.get_group(i) for i in beside)
    return MeshPeers(peers.groups, peers.here, sharing, groups)


def _ranks_along(mesh: Any, dimensions: Collection[int], place: Sequence[int] | None = None) -> list[int]:
    """The ranks along these dimensions of a mesh, from a place in it (by default this rank's)."""
    along = tuple(slice(None) if i in dimensions else at for i, at in enumerate(place or mesh.get_coordinate()))
    ranks: list[int] = mesh.mesh[along].flatten().tolist()
    return ranks


def _meeting(mesh: Any, ranks: Collection[int]) -> list[int]:
    """The dimensions of a mesh along which this rank shares a group with another of `ranks`."""
    others = {*ranks} - {dist.get_rank()}
    # A mesh makes its tensor of ranks anew each time, and each backward of a loss that is a DTensor asks this.
    return [i for i in range(mesh.ndim) if others & {*dist.get_process_group_ranks(mesh.get_group(i))}]


def lies_over(parameter: Any, data: Sequence[int]) -> tuple[list[int], tuple[Any, ...]]:
    """The ranks and the placements of a DTensor along the dimensions of its mesh that hold these ranks."""
    mesh = getattr(parameter, "device_mesh", None)
    if mesh is None or mesh.get_coordinate() is None:
        return [], ()
    along = _meeting(mesh, data)
    return _ranks_along(mesh, along) if along else [], tuple(parameter.placements[i] for i in along)


def whole_loss(loss: Any, data: Sequence[int]) -> Tensor:
    """Converts a loss that is a DTensor to a plain tensor, the same on each of its ranks; `data`: the data ranks."""
    ranks, placements = lies_over(loss, data)
    if ranks:
        raise ValueError(
            f"backward() got a loss that is a DTensor over the data-parallel ranks {ranks}, placed as "
            f"{placements}, expected one of this rank's samples alone; take the loss of local outputs (to_local())"
        )
    whole: Tensor = loss.full_tensor()
    return whole


def refuse_other_meshes(
    groups: Mapping[tuple[int, ...], Sequence[Any]], ranks: tuple[int, ...], name_of: Callable[[Any], str]
) -> None:
    """Raises if FSDP2 reduces parameters over fewer ranks than `ranks`, the largest set, and they are not experts.

    `groups` maps the ranks of a reduction to FSDP2's groups of parameters.
    """
    for reduced, of_ranks in groups.items():
        own = [p.sharded_param for one in of_ranks for p in one.fsdp_params]
        if reduced != ranks and not all(_is_expert(one, reduced, ranks) for one in own):
            seen = "; ".join(
                f"{name_of(one.fsdp_params[0])} over ranks {list(over)}" for over, (one, *_) in groups.items()
            )
            raise ValueError(
                f"fully_shard was called with meshes over different ranks ({seen}), expected one data-parallel "
                "group, or fewer ranks for parameters that are cut over the others (experts, as Shard on their own "
                "mesh); use an Accumulator each, or one mesh"
            )


def _is_expert(parameter: Any, reduced: Sequence[int], data_ranks: Sequence[int]) -> bool:
    """True if `parameter` is cut over the data ranks over which fully_shard does not reduce (it does over `reduced`).

    Its gradient then covers the samples of all data ranks.
    """
    mesh = parameter.device_mesh
    over = _meeting(mesh, data_ranks)
    unreduced = [i for i in over if not {*_ranks_along(mesh, [i])} <= {*reduced}]
    is_cut = not any(parameter.placements[i].is_replicate() for i in unreduced)
    return is_cut and {*_ranks_along(mesh, over)} == {*data_ranks}


def refuse_unclaimed_dimensions(engine: Any, given: Any) -> None:
    """Raises, or warns, if a mesh is a slice of one with a dimension that nobody says anything about.

    Its ranks must be reduced over, or compute on the same samples (tensor parallelism, stages). If the caller has named
    the dimensions with data (`given`), the others have parts of samples; otherwise they may be jobs of their own.
    """
    peers, meshes = engine.peers, [given, *(getattr(p, "device_mesh", None) for p in engine.parameters())]
    known = {*peers.here, *peers.by_samples(peers.ranks)[peers.rank]}
    for root in {id(root): root for mesh in meshes if mesh is not None and (root := root_of(mesh))}.values():
        for i in range(root.ndim) if root.get_coordinate() is not None else ():
            line = _ranks_along(root, [i])
            if known.issuperset(line):
                continue
            name = repr(root.mesh_dim_names[i]) if root.mesh_dim_names else str(i)
            seen = (
                f"the mesh is a slice of one with a dimension {name} (here ranks {line}) over which {engine.name} does "
                "not reduce, and no tensor-parallel parameters or stages lie along it, so its ranks train apart"
            )
            if given is not None:
                raise ValueError(
                    f"{seen}; if they have parts of the same samples, wrap the model over it too, and name only the "
                    "dimensions with data in mesh="
                )
            if peers.rank == 0:
                warn(f"{seen}; wrap the model over it too, or, if these are jobs of their own, give each its own mesh")
            return


class Experts:
    """Parameters that no wrapper reduces and that are cut over data-parallel ranks, such as experts."""

    def __init__(self, engine: Any) -> None:
        self._engine, self._ranks = engine, engine.peers.here
        # The groups that hold the same part, by the ranks of the cut.
        self._copies: dict[tuple[int, ...], Groups] = {}

    def find(self, parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        """Returns those of `parameters` that are cut over data-parallel ranks, so that each has a part of its own.

        Raises if a DTensor lies over these ranks in another way: its gradient could cover this rank's samples, or all
        ranks'.
        """
        experts = []
        for parameter in parameters:
            ranks, placements = lies_over(parameter, self._ranks)
            if any(one.is_replicate() or one.is_partial() for one in placements):
                name = names_of(self._engine.models).get(id(parameter), "a parameter")
                raise ValueError(
                    f"{name} is a DTensor outside of {self._engine.name}, placed as "
                    f"{placements} over ranks {ranks}, so it cannot be known whether its gradient is of this rank's "
                    f"samples or of all ranks'. Place it as Shard over data-parallel ranks (of {self._ranks}), or as a "
                    "plain tensor on each of them"
                )
            if ranks:
                experts.append(parameter)
                if (cut := tuple(ranks)) not in self._copies:
                    self._copies[cut] = () if sorted(cut) == sorted(self._ranks) else self._find_copies(parameter, cut)
        return experts

    def copies_of(self, parameter: nn.Parameter) -> Groups:
        every: Groups = self._engine.peers.groups
        return self._copies.get(tuple(lies_over(parameter, self._ranks)[0]), every)

    def _find_copies(self, parameter: Any, cut: tuple[int, ...]) -> Groups:
        """The group of ranks that hold the same part of a parameter that is cut over the ranks `cut`."""
        places = [
            ranks.index(rank) for rank, ranks in zip(self._ranks, self._engine.peers.gather_objects(cut), strict=True)
        ]
        copies = [rank for rank, place in zip(self._ranks, places, strict=True) if place == cut.index(dist.get_rank())]
        if len(copies) * len(cut) != len(self._ranks):
            raise ValueError(
                f"{self._engine.name}: parameters outside of it are cut over ranks {list(cut)}, and ranks {copies} "
                f"hold the same part, expected meshes of one size that divide the data-parallel ranks {self._ranks}"
            )
        root = root_of(parameter.device_mesh)
        for group in (*self._engine.peers.groups, *map(root.get_group, range(root.ndim))):
            if sorted(dist.get_process_group_ranks(group)) == sorted(copies):
                return (group,)
        raise ValueError(
            f"{self._engine.name}: parameters outside of it are cut over ranks {list(cut)}, and ranks {copies}, which "
            "hold the same part, have no group; take the mesh of the cut from one that has both dimensions, as in "
            "init_device_mesh(device, (copies, experts), mesh_dim_names=('copies', 'experts'))['experts']"
        )
