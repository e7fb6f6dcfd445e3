"""The private names of torch that the core needs, as they are in torch 2.9 to 2.15."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .law import DistaccumError

SEEN = {"torch": "2.9 to 2.15", "DeepSpeed": "0.18 to 0.19.8"}
FIRST = 10**9  # number of a group of ours, far from the caller's
_made: Counter[tuple[int, ...]] = Counter()  # groups of ours by their ranks


def timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """The time after which its collectives fail, which has no public getter; None, torch's default, where unknown."""
    for device in getattr(group, "_device_types", ()):
        options = getattr(group._get_backend(device), "options", None)
        if isinstance(found := getattr(options, "_timeout", None), timedelta):
            return found
    return None


def new_group(ranks: Sequence[int], backend: str | None, timeout: timedelta | None) -> dist.ProcessGroup:
    """A group that its ranks make without asking others, and that torch does not number.

    torch names groups by a number that all ranks of the job must have in common (from torch 2.15 also these), and only
    some may have an Accumulator: without `group_count` the next group of the caller's could wait for ever.
    """
    world: Any = dist.distributed_c10d._world
    before = world.group_count
    world.group_count = FIRST + _made[tuple(ranks)]
    _made[tuple(ranks)] += 1
    try:
        made: Any = dist.new_group(list(ranks), backend=backend, use_local_synchronization=True, timeout=timeout)
    finally:
        world.group_count = before
    assert isinstance(made, dist.ProcessGroup)
    return made


def require(library: str, owner: object, *names: str) -> None:
    """Raises if this version of a library lacks private names without which an engine cannot work."""
    missing = [name for name in names if not hasattr(owner, name)]
    if missing:
        kind = owner.__name__ if isinstance(owner, type) else type(owner).__name__
        raise DistaccumError(
            f"{kind} of this version of {library} has no {', '.join(missing)}, which distaccum needs; use {library} "
            f"{SEEN[library]}"
        )


def norms_of(alike: Sequence[Tensor], kind: float, dtype: torch.dtype | None) -> Sequence[Tensor]:
    """The norm of each of these tensors of one device and dtype, in one kernel; without the name, in one each."""
    if (foreach := getattr(torch, "_foreach_norm", None)) is None:
        return [torch.linalg.vector_norm(one, kind, dtype=dtype) for one in alike]
    norms: Sequence[Tensor] = foreach(alike, kind, dtype=dtype)
    return norms


# How often a tensor was written to in place; autograd's own check has no public name. Without the name: 0, so that such
# a write is not seen.
version_of: Callable[[Tensor], int] = attrgetter("_version") if hasattr(Tensor, "_version") else lambda _: 0


def own_version_of(tensor: Tensor) -> int | None:
    """The number of writes to this tensor; None for a view, which shares it with all other views, or in inference.

    Private: whether it is a view. Without the name: of the tensor and its views together.
    """
    return None if getattr(tensor, "_base", None) is not None or tensor.is_inference() else version_of(tensor)


def is_view(gradient: Tensor) -> bool:
    """Tells whether a gradient lies in the memory of another tensor, as in a bucket of DDP, which no public name tells.

    Without the name: yes, so that a gradient which somebody replaced in mid-window by another is not noticed.
    """
    return getattr(gradient, "_base", gradient) is not None
