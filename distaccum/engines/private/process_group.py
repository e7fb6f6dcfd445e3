"""Private names of torch's process groups, and of the tensors that their threads hold."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from torch import Tensor


def timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """The time after which its collectives fail, which has no public getter; None, torch's default, where unknown."""
    for device in getattr(group, "_device_types", ()):
        options = getattr(group._get_backend(device), "options", None)
        if isinstance(found := getattr(options, "_timeout", None), timedelta):
            return found
    return None


def is_shared(tensor: Tensor) -> bool:
    """Whether others hold `tensor` too, threads in C++ among them; without `_use_count`, never."""
    return getattr(tensor, "_use_count", lambda: 1)() > 1
