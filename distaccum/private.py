"""The private names of torch that the core needs, as they are in torch 2.9 to 2.15; GradScaler's are in scaling.py."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .law import DistaccumError, LostRanksError

# Name, what for, since which version, and what happens without it; a test takes each away and sees that.
NAMES = (
    ("torch._foreach_norm", "norms in one kernel", "2.9", "a kernel each"),
    ("torch._foreach_zero_", "zeros in one kernel", "2.9", "a kernel each"),
    ("torch._foreach_mul_", "products in one kernel", "2.9", "a kernel each"),
    ("torch.autograd.graph._engine_run_backward", "a backward without checks of shapes", "2.9", "the public call"),
    ("torch.Tensor._version", "tells whether a tensor was written to", "2.9", "only a new tensor is noticed"),
    ("torch.Tensor._base", "tells views, as of DDP's buckets", "2.9", "no loader's memory is watched"),
    ("torch.optim.Optimizer._optimizer_step_pre_hooks", "knows whether our hook is last", "2.9", "made anew"),
    ("torch.distributed.ProcessGroup._device_types", "a group's timeout", "2.9", "torch's default timeout"),
    ("torch.distributed.ProcessGroup._get_backend", "messages without dispatch, timeouts", "2.9", "with dispatch"),
    ("torch._C._distributed_c10d.Backend.Options._timeout", "a group's timeout", "2.9", "torch's default timeout"),
    ("torch.distributed.distributed_c10d._world", "the number of the caller's next group", "2.9", "refused"),
    ("torch.distributed.distributed_c10d._get_default_store", "who is missing, and why", "2.9", "errors name no rank"),
)
SEEN = {"torch": "2.9 to 2.15", "DeepSpeed": "0.18 to 0.19.8", "Accelerate": "1.11 to 1.15", "Lightning": "2.6"}
# The number of our first group, far from the caller's.
FIRST = 10**9
# The name of the note that tells why a rank could not make its Accumulator.
FAILED = "failed"
# There is no store, or it is gone with the rank that had it.
NO_STORE = RuntimeError, ValueError, AttributeError
# How often ranks came together, by what they did and by the ranks.
_places: Counter[tuple[str, tuple[int, ...]]] = Counter()


def timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """The group's timeout, which has no public getter; None, for torch's default, if unknown."""
    backend_of: Callable[[Any], Any] = getattr(group, "_get_backend", lambda _: None)
    options = [getattr(backend_of(device), "options", None) for device in getattr(group, "_device_types", ())]
    return next((known for one in options if (known := getattr(one, "_timeout", None)) is not None), None)


def host_backend(group: dist.ProcessGroup) -> Any:
    """The group's gloo, which sends without torch's dispatcher; the group itself if torch has no such name."""
    backend_of: Callable[[Any], Any] = getattr(group, "_get_backend", lambda _: group)
    return backend_of(torch.device("cpu"))


def new_group(ranks: Sequence[int], backend: str | None, timeout: timedelta | None) -> dist.ProcessGroup:
    """A group that its ranks make without the others, and that does not advance torch's numbering.

    torch names groups by a counter that all ranks of the job must agree on (from torch 2.15 even for such groups), and
    only some may have an Accumulator: if `group_count` moved, the caller's next group could wait for ever.
    """
    require("torch", dist.distributed_c10d, "_world")
    world: Any = dist.distributed_c10d._world
    before = world.group_count
    # torch_xla replaces dist.new_group by a function without local synchronization.
    make: Any = dist.distributed_c10d.new_group
    cure = " to make an Accumulator too; make it on all ranks of the model's group"
    try:
        with coming_together("group", ranks, f"{timeout or 'in vain'}", cure):
            world.group_count = FIRST + _places["group", tuple(ranks)]
            made: Any = make(list(ranks), backend=backend, use_local_synchronization=True, timeout=timeout)
    finally:
        world.group_count = before
    assert isinstance(made, dist.ProcessGroup)
    return made


def _store() -> Any:
    """The job's store; None if the name is missing."""
    return getattr(dist.distributed_c10d, "_get_default_store", lambda: None)()


def leave_note(name: str, text: str) -> None:
    """Leaves a text of this rank in the job's store, if there is one, for others who wait for it in vain."""
    with suppress(*NO_STORE):
        _store().set(f"distaccum/{name}/{dist.get_rank()}", text)


def read_note(name: str, rank: int) -> str | None:
    """The text that a rank left in the job's store; None if it left none."""
    store, key = _store(), f"distaccum/{name}/{rank}"
    return store.get(key).decode() if store.check([key]) else None


@contextmanager
def coming_together(what: str, ranks: Sequence[int], waited: str, cure: str) -> Iterator[None]:
    """A block to which all of `ranks` shall come; if it fails and some did not, the error names them."""
    key = what, tuple(ranks)
    _places[key] += 1
    place = f"{what} {_places[key]} of {zlib.crc32(repr(key).encode())}"
    leave_note(place, "")
    try:
        yield
    except RuntimeError as error:
        absent = why = ""
        with suppress(*NO_STORE):
            ranks = [rank for rank in ranks if read_note(place, rank) is None]
            why = next((f" ({text})" for rank in ranks if (text := read_note(FAILED, rank))), "")
            absent = ", ".join(map(str, ranks))
        if absent:
            raise LostRanksError(
                f"rank {dist.get_rank()} lost contact with the other ranks: it waited {waited} for rank {absent}{why}"
                f"{cure}, alike, and start all ranks again"
            ) from error
        raise


def has_step_hooks(optimizer: object) -> bool:
    """Tells whether `register_step_pre_hook` works: Optimizer.__init__ makes its dict, and a wrapper may skip that."""
    if isinstance(optimizer, torch.optim.Optimizer):
        try:
            optimizer.register_step_pre_hook(lambda *_: None).remove()
        except AttributeError:
            return False
    return True


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
norms_of: Callable[..., Sequence[Tensor]] = getattr(torch, "_foreach_norm", _one_by_one("norm"))
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
