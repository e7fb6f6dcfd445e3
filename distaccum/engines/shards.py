"""A rank's part of tensors that lie over process groups, and the norm over all parts."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..norms import local, total_norm

Groups = tuple[dist.ProcessGroup, ...]  # over which a tensor is cut; none: each rank has the whole


def ranks_along(mesh: Any, dimensions: Collection[int]) -> list[int]:
    """The ranks that one meets from here along these dimensions of a mesh."""
    here = mesh.get_coordinate()
    ranks: list[int] = (
        mesh.mesh[tuple(slice(None) if i in dimensions else c for i, c in enumerate(here))].flatten().tolist()
    )
    return ranks


def lies_over(parameter: Any, group: dist.ProcessGroup) -> tuple[list[int], tuple[Any, ...]]:
    """The ranks and the placements of a DTensor along those dimensions of its mesh that meet `group`."""
    mesh = getattr(parameter, "device_mesh", None)
    if mesh is None or mesh.get_coordinate() is None:
        return [], ()
    others = set(dist.get_process_group_ranks(group)) - {dist.get_rank()}
    meeting = [i for i in range(mesh.ndim) if others & set(dist.get_process_group_ranks(mesh.get_group(i)))]
    return ranks_along(mesh, meeting) if meeting else [], tuple(parameter.placements[i] for i in meeting)


def cut_over(parameter: Any, group: dist.ProcessGroup) -> list[int]:
    """The ranks of `group` over which `parameter` is cut as a DTensor, a part of its own each; none: it is not."""
    ranks, placements = lies_over(parameter, group)
    return [] if any(one.is_replicate() or one.is_partial() for one in placements) else ranks


def is_part(parameter: Any, group: dist.ProcessGroup) -> bool:
    """Whether `parameter` is a DTensor that is cut over the whole of `group`: each rank has a part of its own."""
    return sorted(cut_over(parameter, group)) == sorted(dist.get_process_group_ranks(group))


def num_ranks_of_meshes(modules: Iterable[nn.Module]) -> int:
    """The most ranks that a parameter lies over, as a DTensor; 0 where none does."""
    parameters: Iterable[Any] = (p for module in modules for p in module.parameters(recurse=False))
    meshes = [p.device_mesh for p in parameters if hasattr(p, "to_local")]
    return max((mesh.size() for mesh in meshes), default=0)


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


def shard_of(parameter: Any) -> tuple[Groups, Tensor]:
    """This rank's part of a gradient, and the groups that hold the others, tensor-parallel ones included."""
    # DTensor keeps the results of earlier calls, and may place a gradient on another mesh that equals the parameter's.
    mesh, gradient = getattr(parameter, "device_mesh", None), parameter.grad
    if mesh is None or not hasattr(gradient, "placements"):
        return (), gradient
    if any(placement.is_partial() for placement in gradient.placements):
        return (), gradient.full_tensor()
    sharded = [i for i, placement in enumerate(gradient.placements) if not placement.is_replicate()]
    return tuple(mesh.get_group(i) for i in sharded), local(gradient)


def shards_of(parameters: Iterable[nn.Parameter]) -> dict[Groups, list[Tensor]]:
    """This rank's parts of gradients, by the groups over which they are cut.

    One entry for groups of the same ranks: a job that makes a mesh twice has several, and parameters of one model may
    lie on either, not on all ranks alike.
    """
    shards: dict[Groups, list[Tensor]] = {}
    first: dict[tuple[tuple[int, ...], ...], Groups] = {}  # by their ranks
    for parameter in parameters:
        if parameter.grad is not None:
            groups, shard = shard_of(parameter)
            if groups not in shards:
                ranks = tuple(tuple(dist.get_process_group_ranks(group)) for group in groups)
                groups = first.setdefault(ranks, groups)
            shards.setdefault(groups, []).append(shard)
    return shards


def why_tensor_parallel(parameters: Sequence[Any]) -> str | None:
    """Why a rank's own gradient cannot be seen if one of `parameters` is a DTensor."""
    if any(hasattr(parameter, "to_local") for parameter in parameters):
        return "which holds tensor-parallel parameters: a rank has a part of each gradient; use data parallelism alone"
    return None


def norm_over_shards(
    shards: Mapping[Groups, Sequence[Tensor]], device: torch.device, kind: float, over: Tensor | None, dtype: Any = None
) -> Tensor:
    """The norm of gradients, divided by `over`, of which each rank has the parts `shards`, by the groups that cut them.

    One reduction per group, also on a rank that has no part. `dtype` is needed where ranks' parts differ in theirs.
    """
    norms = []
    for groups, parts in shards.items():
        norm = total_norm(parts, kind, over).to(device, dtype)
        if math.isinf(kind):
            # The larger of a number and NaN is, in a reduction, either of them.
            norm = norm.nan_to_num(nan=math.inf, posinf=math.inf)
            for group in groups:
                dist.all_reduce(norm, op=dist.ReduceOp.MAX, group=group)
        elif groups:
            norm = norm.pow(kind)
            for group in groups:
                dist.all_reduce(norm, group=group)
            norm = norm.pow(1 / kind)
        norms.append(norm)
    if len(norms) == 1:
        return norms[0]
    return total_norm([_stack(norms)] if norms else [], kind)


def part_of_square(shards: Mapping[Groups, Sequence[Tensor]], device: torch.device, num_ranks: int) -> Tensor:
    """This rank's part of the square of that norm over `num_ranks` ranks, some of which may hold the same parts."""
    parts = []
    for groups, gradients in shards.items():
        copies = num_ranks / math.prod(dist.get_world_size(group) for group in groups)
        parts.append(total_norm(gradients, 2.0).to(device).square() / copies)
    return _stack(parts).sum() if parts else torch.zeros((), device="cpu")


def _stack(norms: Sequence[Tensor]) -> Tensor:
    wide = torch.float64 if any(norm.dtype == torch.float64 for norm in norms) else torch.float32
    return torch.stack([norm.to(wide) for norm in norms])
