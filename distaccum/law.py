"""The law: shares, the plan of a window, and errors. It needs neither torch nor other ranks.

Each rank makes a `Plan` of its part of a window. These merge to one, the same on every rank. Each micro-loss then has
one known factor, its share, and nothing is corrected later.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple, get_args

from .text import ranks_where, shown


class DistaccumError(RuntimeError):
    """A broken protocol, such as `step()` in mid-window; its text says what was seen, what was expected, and the cure.

    Wrong arguments raise ValueError or TypeError. If ranks can learn of each other's errors, all of them raise.
    """


class LostRanksError(DistaccumError):
    """Contact with other ranks was lost: they died or did not arrive. Start all ranks again, from a checkpoint."""


def all_or_none(failed: Sequence[object], error: Exception | None, message: str) -> None:
    """Raises on every rank if any failed: this rank's own error, or a DistaccumError.

    `failed` has each rank's error in short, or a flag; it fills in `{ranks}` and `{why}` in the message.
    """
    if error is not None:
        try:
            raise error
        finally:
            # Otherwise its traceback would keep itself alive.
            del error
    if any(failed):
        why = "; ".join(dict.fromkeys(str(one) for one in failed if one))
        raise DistaccumError(message.replace("{ranks}", ranks_where(failed)).replace("{why}", why))


Counts = tuple[float, ...]  # denominators of one micro-batch, by name
Reduction = Literal["mean", "sum", "sum_to_mean"]
REDUCTIONS: tuple[Reduction, ...] = get_args(Reduction)
Schedule = int | Callable[[int], int]  # a ramp is called with the update's index


def share_of(reduction: Reduction, count: float, total: float, divisor: float) -> float:
    """The factor that turns a micro-loss into its part of the big batch's loss.

    `count` is the micro-batch's denominator, `total` the window's over all ranks, `divisor` the reduction's.

    >>> share_of("mean", count=2, total=8, divisor=1)
    0.25
    """
    if reduction == "mean":
        return divisor * count / total
    return divisor / total if reduction == "sum_to_mean" else float(divisor)


def whole_number(name: str, value: Any, cure: str = "", least: int = 1) -> int:
    """`value` as an int of at least `least`, or an error that says what it was."""
    # A number that is not whole has no index, and a tensor may have none.
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or number < least:
        kind = TypeError if number is None else ValueError
        raise kind(f"{name}={shown(value)}, expected a whole number of at least {least}{cure}")
    return number


def steps_for(batch_size: int, micro_batch_size: int, ranks: int) -> int:
    """The fewest micro-batches per rank that hold `batch_size` samples."""
    return -(-batch_size // (ranks * micro_batch_size))


def cut_evenly(length: int, *, parts: int | None = None, largest: int | None = None) -> list[int]:
    """Sizes of the parts of `length` samples: as even as possible, the larger ones last.

    Either `parts` of them (fewer if there are not as many samples), or as few as possible of at most `largest`. The
    largest comes last because its backward hides more of the reduction.

    >>> cut_evenly(101, largest=50)
    [33, 34, 34]
    """
    parts = min(-(-length // largest) if largest is not None else parts or 1, length)
    size, larger = divmod(length, parts or 1)
    return [size] * (parts - larger) + [size + 1] * larger


def as_int_if_whole(number: float) -> float:
    """`number` as an int if it is whole, so that a count prints without a decimal point."""
    return int(number) if number == int(number) else number


class Plan(NamedTuple):
    """The knowledge of a rank, or of any number of them together, of a window before its first backward.

    Each rank makes one of its own part. They travel as rows of floats (exact up to 2**53) and merge to one, in any
    order: each column to its largest value, or as `MERGES` says.

    Attributes:
        update (int): The update's index.
        agrees (bool): `update()` runs the window: ranks agree before they reduce.
        steps (int): The micro-batches per rank that were requested; 0: any number.
        fewest, most (int): Micro-batches with a count above 0, of the ranks that have the fewest and the most.
        stranded (int): The first rank with neither a micro-batch nor one to stand in with; `NOBODY`: there is none.
        has_more (bool): Any rank's loader has not ended.
        lacks_terms, lacks_terms_in_last (bool): A micro-batch, or a rank's last one, has a named count of 0.
        failed (bool): A rank could not draw or count, and will raise.
        reduce_afterwards (bool): No backward may reduce: it is not known yet whether all ranks succeed.
        changed (bool): Parameters are others than those that ranks compared.
        num_drawn (int): The most micro-batches that a rank drew or cut; 0: the epoch is over.
        num_micro_batches (int): Micro-batches that count, of all ranks.
        fingerprint (int): Of a rank's first micro-batch, where ranks have the same samples (`meshes/ranks.py`).
        measured (tuple): Two numbers that mean something to the room that runs the window: the largest of any rank.
        totals (tuple): Denominators by name.
        names (tuple): The losses' names; these and the next one do not travel.
        num_here (int): This rank's micro-batches that count.
    """

    update: int
    agrees: bool
    steps: int
    fewest: int
    most: int
    stranded: int
    has_more: bool
    lacks_terms: bool
    lacks_terms_in_last: bool
    failed: bool
    reduce_afterwards: bool
    changed: bool
    num_drawn: int
    num_micro_batches: int
    fingerprint: int = 0
    measured: tuple[int, int] = (0, 0)
    totals: tuple[float, ...] = ()
    names: tuple[str, ...] = ()
    num_here: int = 0

    def to_row(self) -> list[float]:
        numbers: Any = self[:MEASURED]
        return [*numbers, *self.measured, *self.totals]

    def merged(self, rows: Iterable[Sequence[float]]) -> Plan:
        """The plan of all ranks, of which `rows` are the rows."""
        columns = zip(*rows, strict=True)
        numbers: dict[str, Any] = {name: int(MERGES.get(name, max)(next(columns))) for name in self._fields[:MEASURED]}
        measured = int(max(next(columns))), int(max(next(columns)))
        return self._replace(**numbers, measured=measured, totals=tuple(map(sum, columns)))


MEASURED = Plan._fields.index("measured")
MERGES: dict[str, Callable[[Iterable[float]], float]] = {"fewest": min, "stranded": min, "num_micro_batches": sum}
# In place of the first rank where there is none.
NOBODY = 2**31
# The first fields of a row, which must be equal on all ranks: how an error names them and their values, and the cure.
AGREED: dict[str, tuple[str, Callable[[Any], object], str]] = {
    "update": ("the update's index", int, "load the same state, and ask for as many windows"),
    "agrees": ("who runs the window", lambda runs: "update()" if runs else "a loop", "call update(), or make a loop,"),
    "steps": ("steps", lambda steps: steps or "any", "give the same steps, batch_size and kind of window"),
}


def refuse_to_differ(rows: Iterable[Sequence[float]]) -> None:
    """Raises if the rows of all ranks, in order, contradict each other; names a rank for each value."""
    for (what, say, cure), column in zip(AGREED.values(), zip(*rows, strict=True), strict=False):
        ranks = {say(int(value)): column.index(value) for value in dict.fromkeys(column)}
        if len(ranks) > 1:
            seen = ", ".join(f"rank {rank}: {value}" for value, rank in ranks.items())
            raise DistaccumError(
                f"ranks disagree on {what} ({seen}), expected the same everywhere; {cure} on every rank"
            )
