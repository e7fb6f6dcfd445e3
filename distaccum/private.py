"""The private names of torch that the core needs, as they are in torch 2.9 to 2.15; GradScaler's are in scaling.py."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .law import DistaccumError

# Name, what for, the versions in which it was seen to work (from "2.9" on, or "2.9 to 2.11"), and what happens without
# it; a test takes each away and sees that.
NAMES = (
    ("torch._foreach_zero_", "zeros in one kernel", "2.9", "a kernel each"),
    ("torch._foreach_mul_", "products in one kernel", "2.9", "a kernel each"),
    ("torch.autograd.graph._engine_run_backward", "a backward without checks of shapes", "2.9", "the public call"),
    ("torch.Tensor._version", "tells whether a tensor was written to", "2.9", "only a new tensor is noticed"),
    ("torch.Tensor._base", "tells views, as of DDP's buckets", "2.9", "no loader's memory is watched"),
    ("torch.optim.Optimizer._optimizer_step_pre_hooks", "knows whether our hook is last", "2.9", "made anew"),
    ("torch.distributed.distributed_c10d._get_default_store", "who is missing, and why", "2.9", "errors name no rank"),
)
SEEN = {"torch": "2.9 to 2.15, FSDP2 2.13", "DeepSpeed": "0.18, 0.19", "Accelerate": "1.11 to 1.15", "Lightning": "2.6"}


# There is no store, or it is gone with the rank that had it.
NO_STORE = RuntimeError, ValueError, AttributeError


def store() -> Any:
    """The store by which the job's ranks met; one of NO_STORE if there is none, or the name is missing."""
    get = getattr(dist.distributed_c10d, "_get_default_store", None)
    if get is None:
        raise ValueError
    return get()


def step_hooks_of(optimizer: Any) -> dict[int, Any]:
    """The hooks before an optimizer's step, in order, by the ids of their handles; none if the name is missing."""
    hooks: dict[int, Any] = getattr(optimizer, "_optimizer_step_pre_hooks", {})
    return hooks


def require(library: str, owner: object, *names: str) -> None:
    """Raises if this version of a library lacks private names without which an engine cannot work."""
    missing = [name for name in names if not hasattr(owner, name)]
    if missing:
        kind = owner if isinstance(owner, type) else type(owner)
        raise DistaccumError(
            f"{kind.__name__} of this version of {library} has no {', '.join(missing)}, which distaccum needs; use "
            f"{library} {SEEN[library]}"
        )


def needed(table: Iterable[tuple[str, ...]], owner: str, *answers: str) -> list[str]:
    """The names of `owner` in a room's table without which the answer is "refused", or one of `answers`."""
    rows = [(name.rpartition("."), answer) for name, *_, answer in table]
    return [name for (of, _, name), answer in rows if of == owner and answer in ("refused", *answers)]


@contextmanager
def replaced(owner: Any, **values: Any) -> Iterator[None]:
    """Sets attributes of `owner` for the block; afterwards each has its own value again, or its class's."""
    own = {name: vars(owner)[name] for name in values if name in vars(owner)}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name in values.keys() - own:
            vars(owner).pop(name, None)
        for name, value in own.items():
            setattr(owner, name, value)


def _one_by_one(method: str) -> Callable[..., list[Tensor]]:
    return lambda tensors, *args: [getattr(tensor, method)(*args) for tensor in tensors]


# In one kernel for tensors of one device and dtype, as torch's optimizers and clipping do.
zero_all: Callable[[list[Tensor]], Any] = getattr(torch, "_foreach_zero_", _one_by_one("zero_"))
multiply_all: Callable[[list[Tensor], float | Tensor], Any] = getattr(torch, "_foreach_mul_", _one_by_one("mul_"))

# The public call without its checks of shapes, which take an eighth of a tiny micro-step: roots are scalars here, or
# outputs with their own gradients.
_run: Callable[..., Any] | None = getattr(torch.autograd.graph, "_engine_run_backward", None)
_flags = {"keep_graph": False, "create_graph": False, "inputs": (), "allow_unreachable": True, "accumulate_grad": True}
run_backward: Callable[..., Any] = torch.autograd.backward if _run is None else partial(_run, **_flags)

# How often a tensor was written to in place.
version_of: Callable[[Tensor], int] = attrgetter("_version") if hasattr(Tensor, "_version") else lambda _: 0


def own_version_of(tensor: Any) -> int | None:
    """The number of writes to this tensor; None for a view, which shares it with other views, or in inference mode."""
    return None if getattr(tensor, "_base", tensor) is not None or tensor.is_inference() else version_of(tensor)


def is_view(gradient: Any) -> bool:
    """Tells whether a gradient is a view of another tensor, such as a bucket of DDP."""
    return getattr(gradient, "_base", None) is not None
