"""What an Accumulator is given: each value checked where it comes in, with what was seen, expected and the cure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch

from ..law.batches import Count
from ..law.shares import REDUCTIONS, Reduction, Schedule, whole_number

WHOLE = "; write 100 // 50 for 100 / 50, or give batch_size=100, micro_batch_size=50"


def several(name: str, value: Any, needs: str) -> list[Any]:
    """One or several things that have `needs`, as a list; None is none of them."""
    values = [] if value is None else list(value) if isinstance(value, list | tuple) else [value]
    for one in values:
        if type(one).__module__.startswith("torch.distributed.pipelining"):
            raise TypeError(
                f"{name} is a pipeline's {type(one).__name__}, whose schedule runs forward and backward of all "
                "micro-batches itself, so that no window can; let the schedule accumulate, with its n_microbatches"
            )
        if not hasattr(one, needs) or isinstance(one, type):
            raise TypeError(f"{name}={one!r} is a {type(one).__name__} without {needs}, expected a {name}")
    if name != "model" and len({id(one) for one in values}) < len(values):
        raise ValueError(f"{name} holds the same {type(values[0]).__name__} twice, which would step twice per update")
    if not values and (name == "model" or value is not None):
        raise ValueError(f"{name}={value!r}, expected a {name} or a sequence of them")
    return values


def wanted_sizes(
    steps: Schedule | None, batch_size: Schedule | None, micro_batch_size: int | Literal["auto"] | None
) -> tuple[Schedule | None, Schedule | None, int | Literal["auto"] | None]:
    if steps is not None and (batch_size is not None or micro_batch_size is not None):
        raise ValueError(
            "steps says how many micro-batches, batch_size and micro_batch_size how many samples; give one or the other"
        )
    if batch_size is not None and micro_batch_size is None:
        raise ValueError(f"{batch_size=} without micro_batch_size, the samples that one forward on a rank can hold")
    return (
        steps if steps is None or callable(steps) else whole_number("steps", steps, WHOLE),
        batch_size if batch_size is None or callable(batch_size) else whole_number("batch_size", batch_size),
        micro_batch_size
        if micro_batch_size is None or micro_batch_size == "auto"
        else whole_number("micro_batch_size", micro_batch_size, ", or 'auto'"),
    )


def by_name(
    reduction: Reduction | Mapping[str, Reduction], count: Count | Mapping[str, Count]
) -> tuple[dict[str, Reduction], dict[str, Count]]:
    """Reduction and count of each named loss; one name where no dict gives several."""
    given = [one for one in (reduction, count) if isinstance(one, Mapping)]
    names = list(given[0]) if given else [_name_of(count)]
    if not names or (len(given) == 2 and given[0].keys() != given[1].keys()):
        raise ValueError(
            f"reduction names {list(given[0])} and count names {list(given[-1])}, expected the same losses in both"
        )
    reductions = dict(reduction) if isinstance(reduction, Mapping) else dict.fromkeys(names, reduction)
    counts = dict(count) if isinstance(count, Mapping) else dict.fromkeys(names, count)
    for name in names:
        choice("reduction", reductions[name], REDUCTIONS)
        if not callable(counts[name]):
            raise TypeError(f"count={counts[name]!r} for {name!r}, expected a callable: batch -> number")
    return reductions, {name: counts[name] for name in reductions}


def _name_of(count: object) -> str:
    name = getattr(count, "__name__", "")
    return {"count_samples": "samples", "tokens": "tokens"}.get(name, "count")


def choice(name: str, value: Any, known: Sequence[Any]) -> Any:
    if value not in known:
        raise ValueError(f"{name}={value!r}, expected one of {', '.join(map(repr, known))}")
    return value


def positive(name: str, value: float | None) -> float | None:
    if value is not None and not value > 0:
        raise ValueError(f"{name}={value!r}, expected a number above 0, or None")
    return value


def dtype_of_sums(value: Any) -> torch.dtype | None:
    """A floating dtype in which gradients add up."""
    if value is not None and value not in (torch.float32, torch.float64):
        raise ValueError(
            f"accumulate_dtype={value!r}, expected torch.float32 or torch.float64, or None for the parameters' own"
        )
    dtype: torch.dtype | None = value
    return dtype
