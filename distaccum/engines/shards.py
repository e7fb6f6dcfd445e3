"""A rank's part of tensors that lie over process groups, and the norm over all parts."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..norms import local, total_norm
from ..ranks import norm_over

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


def whole_loss(loss: Any, group: dist.ProcessGroup | None) -> Tensor:
    """The plain tensor of a loss that is a DTensor, the same on each of its ranks; `group`: the data-parallel ranks."""
    ranks, placements = ([], ()) if group is None else lies_over(loss, group)
    if ranks:
        raise ValueError(
            f"backward() got a loss that is a DTensor over the data-parallel ranks {ranks}, placed as "
            f"{placements}, expected one of this rank's samples alone; take the loss of local outputs (to_local())"
        )
    whole: Tensor = loss.full_tensor()
    return whole


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
        if groups or math.isinf(kind):
            norm = norm_over(groups, norm, kind)
        norms.append(norm)
    if len(norms) == 1:
        return norms[0]
    return total_norm([_stack(norms)] if norms else [], kind)


def _stack(norms: Sequence[Tensor]) -> Tensor:
    wide = torch.float64 if any(norm.dtype == torch.float64 for norm in norms) else torch.float32
    return torch.stack([norm.to(norms[0].device, wide) for norm in norms])
