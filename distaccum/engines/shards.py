"""The ranks that tensors lie over."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor


def ranks_along(mesh: Any, dimensions: Collection[int]) -> list[int]:
    """The ranks that one meets from here along these dimensions of a mesh."""
    here = mesh.get_coordinate()
    place = tuple(slice(None) if i in dimensions else at for i, at in enumerate(here))
    ranks: list[int] = mesh.mesh[place].flatten().tolist()
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


def why_tensor_parallel(parameters: Sequence[Any]) -> str | None:
    """Why a rank's own gradient cannot be seen if one of `parameters` is a DTensor."""
    if any(hasattr(parameter, "to_local") for parameter in parameters):
        return "which holds tensor-parallel parameters: a rank has a part of each gradient; use data parallelism alone"
    return None
