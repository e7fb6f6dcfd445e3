"""Ranks that compute on the same samples (tensor parallelism), and parameters cut over data ranks (experts)."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ..norms import names_of
from ..ranks import Groups, Peers
from ..text import warn
from .private import root_of
from .ranks import MeshPeers


def peers_of(parameters: Iterable[Any], peers: Peers) -> MeshPeers:
    """The data-parallel `peers`, which have different samples, and the ranks that compute on samples of each together.

    Those lie along the dimensions of the parameters' meshes that hold no other of the data-parallel ranks.
    """
    data = peers.here
    sharing = [[rank] for rank in data]
    groups = Groups()
    for mesh in {id(mesh): mesh for p in parameters if (mesh := getattr(p, "device_mesh", None)) is not None}.values():
        beside = mesh.get_coordinate() and [i for i in range(mesh.ndim) if i not in _meeting(mesh, data)]
        places = [(mesh.mesh == rank).nonzero().tolist() for rank in data] if beside else []
        # A mesh of only some, such as the tensor-parallel ranks alone, says nothing.
        if beside and all(places):
            sets = [_ranks_along(mesh, beside, place) for (place,) in places]
            if len(sets[0]) > len(sharing[0]):
                sharing = sets
                groups = tuple(mesh.get_group(i) for i in beside)
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


def refuse_other_meshes(groups: Mapping[tuple[int, ...], Sequence[Any]], ranks: tuple[int, ...]) -> None:
    """Raises if FSDP2 reduces parameters over fewer ranks than `ranks`, the largest set, and they are not experts.

    `groups` maps the ranks of a reduction to FSDP2's groups of parameters.
    """
    for reduced, of_ranks in groups.items():
        own = [p.sharded_param for one in of_ranks for p in one.fsdp_params]
        if reduced != ranks and not all(_is_expert(one, reduced, ranks) for one in own):
            raise ValueError(
                f"fully_shard was called with meshes over different ranks ({' and '.join(map(str, groups))}), expected "
                "one data-parallel group, or fewer ranks for parameters that are cut over the others (experts, as "
                "Shard on their own mesh); use an Accumulator each, or one mesh"
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


def refuse_unclaimed_ranks(engine: Any, given: Any) -> None:
    """Raises, or warns, if a mesh is a slice of one with ranks that nobody says anything about.

    They must be reduced over, or compute on the same samples (tensor parallelism, stages). If the caller has named the
    dimensions with data (`given`), they have parts of samples; otherwise they may be jobs of their own.
    """
    meshes = [given, *(getattr(p, "device_mesh", None) for p in engine.parameters())]
    for mesh in {id(mesh): mesh for mesh in meshes if mesh is not None}.values():
        root = root_of(mesh)
        others = sorted({*root.mesh.flatten().tolist()} - {*engine.peers.ranks})
        if root.get_coordinate() is None or not others:
            continue
        seen = (
            f"the mesh is a slice of one with the dimensions {root.mesh_dim_names}, over whose ranks {others} "
            f"{engine.name} does not reduce; no tensor-parallel parameters or stages lie there, so they train apart"
        )
        if given is not None:
            raise ValueError(
                f"{seen}; if they have parts of the same samples, wrap the model over them too, and name only the "
                "dimensions with data in mesh="
            )
        if engine.peers.rank == 0:
            warn(f"{seen}; wrap the model over them too, or, if these are jobs of their own, give each its own mesh")
        return


def cut_over_data(engine: Any, parameters: Iterable[Any]) -> list[Any]:
    """Returns those of `parameters`, which no wrapper reduces, that are cut over data-parallel ranks, such as experts.

    Raises if a DTensor lies over these ranks in another way: its gradient could cover this rank's samples, or all
    ranks'.
    """
    data = engine.peers.here
    cut = []
    for parameter in parameters:
        ranks, placements = lies_over(parameter, data)
        if any(one.is_replicate() or one.is_partial() for one in placements):
            name = names_of(engine.models).get(id(parameter), "a parameter")
            raise ValueError(
                f"{name} is a DTensor outside of {engine.name}, placed as {placements} over ranks {ranks}, so it "
                "cannot be known whether its gradient is of this rank's samples or of all ranks'. Place it as Shard "
                f"over data-parallel ranks (of {data}), or as a plain tensor on each of them"
            )
        if ranks:
            copies = copies_of(parameter, engine.peers)
            if len(ranks) * math.prod(map(dist.get_world_size, copies)) != len(data):
                raise ValueError(
                    f"{engine.name}: parameters outside of it are cut over ranks {ranks}, and their mesh does not tell "
                    f"which of the data-parallel ranks {data} hold the same part; take the mesh of the cut from one "
                    "that has both dimensions, as in init_device_mesh(device, (copies, experts), "
                    "mesh_dim_names=('copies', 'experts'))['experts']"
                )
            cut.append(parameter)
    return cut


def copies_of(parameter: Any, peers: Peers) -> Groups:
    """The groups over which data-parallel ranks hold the same part of a parameter; of a plain one, all of them."""
    ranks, _ = lies_over(parameter, peers.here)
    if not ranks:
        return peers.groups
    root = root_of(parameter.device_mesh)
    groups = [root.get_group(i) for i in _meeting(root, peers.here)]
    return tuple(group for group in groups if not {*ranks}.issuperset(dist.get_process_group_ranks(group)))
