"""The arithmetic of a window: shares, even cuts, schedules. No torch."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

Reduction = Literal["mean", "sum", "sum_to_mean"]
REDUCTIONS: tuple[Reduction, ...] = get_args(Reduction)


def share_of(reduction: Reduction, count: float, total: float, divisor: float) -> float:
    """The factor that makes a micro-loss its part of the big batch's loss.

    `count` is the micro-batch's denominator, `total` the window's over all ranks, `divisor` what the
    engine's reduction divides by.

    >>> share_of("mean", count=2, total=8, divisor=1)
    0.25
    """
    if reduction == "mean":
        return divisor * count / total
    if reduction == "sum_to_mean":
        return divisor / total
    return float(divisor)


def whole_number(name: str, value: object, cure: str = "") -> int:
    """`value` as an int of at least 1, or an error that says what it was.

    >>> whole_number("steps", 8)
    8
    """
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)  # type: ignore[arg-type]  # this is the check
    except TypeError:
        raise TypeError(f"{name}={value!r} is a {type(value).__name__}, expected a whole number{cure}") from None
    if number < 1:
        raise ValueError(f"{name}={number}, expected at least 1")
    return number


def steps_for(batch_size: int, micro_batch_size: int, ranks: int) -> int:
    """The fewest micro-batches per rank that hold `batch_size` samples.

    >>> steps_for(batch_size=100, micro_batch_size=16, ranks=2)
    4
    """
    return -(-batch_size // (ranks * micro_batch_size))


def cut_evenly(length: int, *, parts: int | None = None, largest: int | None = None) -> list[int]:
    """Sizes of the parts of `length` samples: as even as can be, the larger ones last.

    Either `parts` of them (fewer where there are not as many samples), or the fewest of at most `largest`.
    The largest comes last because its backward hides more of the reduction.

    >>> cut_evenly(101, largest=50)
    [33, 34, 34]
    >>> cut_evenly(3, parts=8)
    [1, 1, 1]
    """
    return [size for times, size in even_cut(length, parts=parts, largest=largest) for _ in range(times)]


def even_cut(length: int, *, parts: int | None = None, largest: int | None = None) -> list[tuple[int, int]]:
    """What `cut_evenly` gives, as (how often, size): as short for a trillion samples.

    >>> even_cut(101, largest=50)
    [(1, 33), (2, 34)]
    """
    if parts is None:
        assert largest is not None
        parts = -(-length // largest)
    parts = min(parts, length)
    if not parts:
        return []
    size, larger = divmod(length, parts)
    return [(times, size) for times, size in ((parts - larger, size), (larger, size + 1)) if times]


def as_int_if_whole(number: float) -> float:
    """Whole numbers as int, so that a count prints as one."""
    return int(number) if number == int(number) else number


def shorten(names: Sequence[str]) -> str:
    """The first names, and how many more there are.

    >>> shorten(["a", "b", "c", "d", "e"])
    'a, b, c and 2 more'
    """
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


Schedule = int | Callable[[int], int]


def at_update(name: str, schedule: Schedule, index: int, cure: str = "") -> int:
    """The value of an int or of a ramp (a callable of the update's index) at update `index`."""
    if callable(schedule):
        return whole_number(f"{name}({index})", schedule(index), cure)
    return schedule


def whole_number_in(state: Mapping[str, Any], name: str, least: int) -> int:
    """The number of this name, or an error that says what stands there."""
    value = state.get(name)
    try:
        number = least - 1 if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]  # this is the check
    except TypeError:
        number = least - 1
    if number < least:
        raise ValueError(
            f"the state has {name}={value!r}, expected a whole number of at least {least}; give what state_dict() "
            "gave, of this version"
        )
    return number
