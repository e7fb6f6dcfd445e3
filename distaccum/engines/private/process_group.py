"""Private names of torch's process groups."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

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
