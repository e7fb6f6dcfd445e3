"""Options: each argument of an Accumulator and of its methods is checked on entry."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, get_args

from torch.utils.data import Dataset, IterableDataset

from .batch import Columns, Count, Names, count_samples, count_tokens, is_array
from .law import REDUCTIONS, Reduction, Schedule, whole_number
from .text import a, shown

if TYPE_CHECKING:
    from .feeding.by_cost import ByCost


Sync = Literal["last", "every", "replicas", "gathered"]
BatchNorm = Literal["warn", "ignore"]
OnNonfinite = Literal["raise", "skip", "ignore"]
CURE_OF_STEPS = (
    "; give a number without quotes, as 4 or 100 // 50 (1 makes each micro-batch an update), or a function that "
    "returns one for the index of an update"
)


@dataclass(frozen=True)
class Config:
    """The options of an Accumulator, with the reduction and the count of each named loss."""

    steps: Schedule | None
    batch_size: Schedule | None
    micro_batch_size: int | Literal["auto"] | ByCost | None
    reductions: Mapping[str, Reduction]
    counts: Mapping[str, Count]
    max_norm: float | None
    sync: Sync
    on_nonfinite: OnNonfinite
    batchnorm: BatchNorm
    mesh: Any

    def __post_init__(self) -> None:
        for name, known in (("sync", Sync), ("on_nonfinite", OnNonfinite), ("batchnorm", BatchNorm)):
            choice(name, getattr(self, name), get_args(known))
        if self.mesh is not None and not (hasattr(self.mesh, "mesh") and hasattr(self.mesh, "get_coordinate")):
            raise TypeError(
                f"mesh={self.mesh!r} is {a(type(self.mesh).__name__)}, expected the dimensions of a DeviceMesh that "
                "carry data, as mesh['data'] or mesh['replica', 'data']"
            )
        if self.max_norm is not None and not (hasattr(self.max_norm, "__float__") and self.max_norm > 0):
            raise ValueError(f"max_norm={shown(self.max_norm)}, expected a number above 0, or None")
        if self.steps is not None and (self.batch_size is not None or self.micro_batch_size is not None):
            raise ValueError(
                "steps is a number of micro-batches, batch_size and micro_batch_size are numbers of samples; give one "
                "or the other"
            )
        if self.batch_size is not None and (self.micro_batch_size is None or self.by_cost is not None):
            raise ValueError(
                f"batch_size={self.batch_size!r} with micro_batch_size={self.micro_batch_size!r}, expected a number of "
                "samples that one forward holds; beside ByCost(...), which cuts whole batches, leave batch_size out"
            )
        of_rows = None if self.micro_batch_size == "auto" or self.by_cost is not None else self.micro_batch_size
        for name, value, cure in (
            ("steps", self.steps, CURE_OF_STEPS),
            ("batch_size", self.batch_size, ""),
            ("micro_batch_size", of_rows, ", 'auto' or ByCost(...)"),
        ):
            if value is not None and (not callable(value) or name.startswith("micro")):
                # A whole number of numpy becomes an int.
                object.__setattr__(self, name, whole_number(name, value, cure))

    @cached_property
    def by_cost(self) -> ByCost | None:
        """The `ByCost` given as the size, which cuts by the cost of rows; None if rows are counted."""
        size: Any = self.micro_batch_size
        return size if hasattr(size, "cut") else None

    @cached_property
    def most(self) -> int | Literal["auto"] | None:
        """The most that a micro-batch may hold, in samples or in cost."""
        size: Any = self.micro_batch_size
        most: int | Literal["auto"] | None = getattr(size, "most", size)
        return most

    def columns(self, call: str, length: int | None, whole: Names) -> Columns:
        """The description of a batch that `call` cuts; raises if no size was given to cut it to."""
        if self.steps is None and self.micro_batch_size is None:
            raise ValueError(f"{call}() cuts a batch and no size was given; pass micro_batch_size= or steps=")
        if is_array(length) or isinstance(length, Mapping | Sequence):
            raise TypeError(
                f"{call}() got {shown(length)} for length=, expected a number; give one batch, as {call}((x, y))"
            )
        return Columns(length, whole)

    def refuse_to_group(self) -> None:
        """Raises if no number says how many micro-batches of a loader make a window."""
        # By cost, each batch of the loader is cut.
        has_size = self.batch_size is not None or self.by_cost is not None
        if self.steps is None and (self.most == "auto" or not has_size):
            raise ValueError(
                "windows() groups micro-batches and no number was given; pass steps=, or batch_size= and "
                "micro_batch_size= as a number, to the Accumulator ('auto' is for update(), which cuts)"
            )

    def steps_at(self, index: int) -> int | None:
        """Micro-batches per rank in the update of this index; None if `steps` was not given."""
        if not callable(self.steps):
            return self.steps
        return whole_number(f"steps({index})", self.steps(index), CURE_OF_STEPS)


def as_list(name: str, value: Any, needs: str) -> list[Any]:
    """One object or several, as a list; each must have the attribute `needs`. None gives an empty list."""
    values = [] if value is None else list(value) if isinstance(value, list | tuple) else [value]
    for item in values:
        kind = type(item).__name__
        steps = name == "model" and hasattr(item, "step")
        if type(item).__module__.startswith("torch.distributed.pipelining"):
            # A schedule holds the stages.
            if steps:
                continue
            raise TypeError(f"{name} is a pipeline's {kind}, expected its schedule, as the model")
        if not hasattr(item, needs) or isinstance(item, type):
            swapped = "; the model comes first, then the optimizer" * steps
            seen = f"{shown(item)} is {a(kind)}" if item is None or isinstance(item, str | int) else kind
            raise TypeError(f"{name}={seen} without {needs}, expected {a(name)}{swapped}")
    if name != "model" and len(set(map(id, values))) < len(values):
        raise ValueError(f"{name} holds the same {type(values[0]).__name__} twice, which would step twice per update")
    if not values and (name == "model" or value is not None):
        raise ValueError(f"{name}={value!r}, expected {a(name)} or a sequence of them")
    return values


def by_name(
    reduction: Reduction | Mapping[str, Reduction], count: Count | Mapping[str, Count]
) -> tuple[dict[str, Reduction], dict[str, Count]]:
    """Reduction and count of each named loss; a single name unless a dict gives several."""
    given = [one for one in (reduction, count) if isinstance(one, Mapping)]
    names = list(given[0]) if given else [getattr(count, "unit", "samples" if count is count_samples else "count")]
    if not names or (len(given) == 2 and given[0].keys() != given[1].keys()):
        raise ValueError(
            f"reduction names {list(given[0])} and count names {list(given[-1])}, expected the same losses in both"
        )
    reductions = dict(reduction) if isinstance(reduction, Mapping) else dict.fromkeys(names, reduction)
    counts = dict(count) if isinstance(count, Mapping) else dict.fromkeys(names, count)
    for name in names:
        choice("reduction", reductions[name], REDUCTIONS)
        if not callable(counts[name]) or num_required(counts[name]) > 1 or counts[name] is count_tokens:
            raise TypeError(
                f"count={shown(counts[name])} for {name!r}, expected a callable: batch -> number, as "
                "count_tokens('labels')"
            )
    return reductions, {name: counts[name] for name in reductions}


def choice(name: str, value: Any, known: Sequence[Any]) -> None:
    if value not in known:
        raise ValueError(f"{name}={shown(value)}, expected one of {', '.join(map(repr, known))}")


def num_required(function: Callable[..., Any]) -> int:
    """The arguments that a function written in Python cannot do without; 1 for any other callable."""
    if not inspect.isfunction(function):
        return 1
    own = inspect.signature(function).parameters.values()
    return sum(one.default is one.empty and one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD) for one in own)


def function(call: str, name: str, value: Any, most: int = 1) -> None:
    """Raises if an argument of `call` is no function of the caller, or needs more than `most` arguments."""
    if not callable(value) or num_required(value) > most:
        seen = f"{value.__name__}{inspect.signature(value)}" if callable(value) else a(type(value).__name__)
        raise TypeError(
            f"{call}() got {seen} as {name}, expected a function that it calls with one argument, each micro-batch, or "
            "with its outputs, as accumulator.update(batch, lambda part: criterion(model(part['x']), part['y']))"
        )


def refuse_as_loader(loader: Any) -> None:
    """Raises if this does not yield micro-batches."""
    cure = ""
    if is_array(loader):
        cure = "; cut it, as tensor.split(8) does, or give split() or update() a whole batch"
    elif isinstance(loader, Dataset) and not isinstance(loader, IterableDataset):
        cure = (
            ", and a dataset yields samples; give a DataLoader(dataset, batch_size=8), or batch_size=None for batches"
        )
    elif not isinstance(loader, Mapping | str) and (hasattr(loader, "__iter__") or hasattr(loader, "__getitem__")):
        return
    raise TypeError(f"windows() got {a(type(loader).__name__)}, expected a loader: an iterable of micro-batches{cure}")
