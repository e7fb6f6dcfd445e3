"""The private names of torch that the core needs, as they are in torch 2.9 to 2.15; GradScaler's are in scaling.py."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .law import DistaccumError

SEEN = {"torch": "2.9 to 2.15", "DeepSpeed": "0.18 to 0.19.8"}
FIRST = 10**9  # number of our first group, far from the caller's
_made: Counter[tuple[int, ...]] = Counter()  # our groups, by their ranks


def timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """The group's timeout, which has no public getter; None, for torch's default, if unknown."""
    for device in getattr(group, "_device_types", ()):
        options = getattr(group._get_backend(device), "options", None)
        if isinstance(found := getattr(options, "_timeout", None), timedelta):
            return found
    return None


def new_group(ranks: Sequence[int], backend: str | None, timeout: timedelta | None) -> dist.ProcessGroup:
    """A group that its ranks make without the others, and that does not advance torch's numbering.

    torch names groups by a counter that all ranks of the job must agree on (from torch 2.15 even for such groups), and
    only some may have an Accumulator: if `group_count` moved, the caller's next group could wait for ever.
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


def has_step_hooks(optimizer: object) -> bool:
    """Tells whether `register_step_pre_hook` works: Optimizer.__init__ makes its dict, and a wrapper may skip that."""
    return not isinstance(optimizer, torch.optim.Optimizer) or hasattr(optimizer, "_optimizer_step_pre_hooks")


def require(library: str, owner: object, *names: str) -> None:
    """Raises if this version of a library lacks private names without which an engine cannot work."""
    missing = [name for name in names if not hasattr(owner, name)]
    if missing:
        kind = owner.__name__ if isinstance(owner, type) else type(owner).__name__
        raise DistaccumError(
            f"{kind} of this version of {library} has no {', '.join(missing)}, which distaccum needs; use {library} "
            f"{SEEN[library]}"
        )


@contextmanager
def replaced(owner: Any, **values: Any) -> Iterator[None]:
    """Sets attributes of `owner` for the block; afterwards each has its own value again, or its class's."""
    own = {name: vars(owner)[name] for name in values if name in vars(owner)}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name in values:
            if name in own:
                setattr(owner, name, own[name])
            else:
                vars(owner).pop(name, None)


require("torch", torch, "_foreach_norm", "_foreach_zero_")
norms_of: Callable[..., Sequence[Tensor]] = torch._foreach_norm  # of tensors of one device and dtype, in one kernel
zero_all: Callable[[list[Tensor]], Any] = torch._foreach_zero_  # in one kernel, as `Optimizer.zero_grad` does

# `torch.autograd.backward` on tuples, without its checks of shapes, which take an eighth of a tiny micro-step: roots
# are scalars here, or outputs with their own gradients. If the name is missing, the public call does the same.
_run_autograd: Callable[..., Any] | None = getattr(torch.autograd.graph, "_engine_run_backward", None)
run_backward: Callable[..., Any] = torch.autograd.backward
if _run_autograd is not None:
    run_backward = partial(
        _run_autograd, keep_graph=False, create_graph=False, inputs=(), allow_unreachable=True, accumulate_grad=True
    )


require("torch", Tensor, "_version", "_base")
version_of: Callable[[Tensor], int] = attrgetter("_version")  # how often a tensor was written to in place


def own_version_of(tensor: Any) -> int | None:
    """The number of writes to this tensor; None for a view, which shares it with other views, or in inference mode."""
    return None if tensor._base is not None or tensor.is_inference() else version_of(tensor)


def is_view(gradient: Any) -> bool:
    """Tells whether a gradient is a view of another tensor, such as a bucket of DDP."""
    return gradient._base is not None
