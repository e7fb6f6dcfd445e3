"""A window's plan: arithmetic without torch.

Every rank says what it has for the next window in one row of numbers (`Offer`), the rows are gathered
once, and every rank makes the same `Plan` of them. After that each micro-loss has one known factor, its
`share`, and nothing has to be corrected later.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from .errors import DistaccumError
from .shares import tidy


class Offer(NamedTuple):
    """What one rank has for a window. Travels as a row of floats (exact up to 2**53)."""

    update: int  # its index
    steps: int  # micro-batches per rank and update that this rank was told; 0: whatever comes
    drawn: int  # micro-batches that the loader gave
    kept: int  # those with a count above 0
    exhausted: bool  # the loader has no more
    whole: bool  # every micro-batch has every named count above 0
    whole_last: bool  # the last one has
    ready: bool  # holds a micro-batch from an earlier window, to stand in with
    failed: bool  # this rank could not plan, and will raise
    guarded: bool  # update() runs it: ranks agree before they reduce
    by_hand: bool  # no backward shall reduce: nobody knows yet whether all ranks come through
    ahead: bool  # the loader may be read before the window is over
    largest: int  # samples in a micro-batch, where they were cut
    widest: int  # numbers in a sample, likewise
    totals: tuple[float, ...]  # by name

    def to_row(self) -> list[float]:
        return [*map(float, self[:-1]), *self.totals]

    @classmethod
    def from_row(cls, row: Sequence[float]) -> Offer:
        update, steps, drawn, kept = map(int, row[:4])
        exhausted, whole, whole_last, ready, failed, guarded, by_hand, ahead = map(bool, row[4:12])
        return cls(
            *(update, steps, drawn, kept, exhausted, whole, whole_last, ready, failed, guarded, by_hand, ahead),
            largest=int(row[12]),
            widest=int(row[13]),
            totals=tuple(row[14:]),
        )


@dataclass(frozen=True)
class Plan:
    """What all ranks know of a window before its first backward."""

    counts: dict[str, float]  # the global denominators
    kept: tuple[int, ...]  # micro-batches by rank
    whole: bool  # no rank leaves a term out of any backward
    whole_last: bool  # no rank leaves one out of its last
    ready: tuple[bool, ...]  # by rank: holds a micro-batch from an earlier window, to stand in with
    empty: bool  # no rank drew anything: the epoch is over
    exhausted: bool  # no rank has more
    guarded: bool = False  # ranks agree before they reduce
    by_hand: bool = False  # no backward reduces: the engine does after the last, when all ranks came through
    ahead: bool = False  # all ranks may read their loaders before the window is over
    largest: int = 0  # samples in a micro-batch of any rank, where they were cut
    widest: int = 0  # numbers in a sample, likewise

    @property
    def uneven(self) -> bool:
        return min(self.kept) != max(self.kept)

    @property
    def nothing(self) -> bool:
        """No micro-batch has anything that counts, so there is no update."""
        return max(self.kept) == 0

    @property
    def some_rank_is_dry(self) -> bool:
        return min(self.kept) == 0


def make_plan(names: Sequence[str], offers: Sequence[Offer]) -> Plan:
    """The plan that follows from all ranks' offers; an error where they contradict each other."""
    by_rank: Any = Offer(*zip(*offers, strict=True))  # type: ignore[arg-type]  # of each field, all ranks'
    if any(by_rank.failed):
        failed = [str(rank) for rank, has_failed in enumerate(by_rank.failed) if has_failed]
        raise DistaccumError(
            f"rank {', '.join(failed)} could not plan this window (its own error says why); no gradient was touched"
        )
    _refuse_disagreement("the update's index", by_rank.update, "load the same state, and ask for as many windows")
    _refuse_disagreement(
        "who runs the window",
        ["update()" if is_guarded else "a loop" for is_guarded in by_rank.guarded],
        "call update(), or make a loop,",
    )
    _refuse_disagreement(
        "steps", [steps or "any" for steps in by_rank.steps], "give the same steps, batch_size and kind of window"
    )
    totals = map(sum, zip(*by_rank.totals, strict=True))
    return Plan(
        counts={name: tidy(total) for name, total in zip(names, totals, strict=True)},
        kept=by_rank.kept,
        whole=all(by_rank.whole),
        whole_last=all(by_rank.whole_last),
        ready=by_rank.ready,
        empty=not any(by_rank.drawn),
        exhausted=all(by_rank.exhausted),
        guarded=any(by_rank.guarded),
        by_hand=any(by_rank.by_hand),
        ahead=all(by_rank.ahead),
        largest=max(by_rank.largest),
        widest=max(by_rank.widest),
    )


def _refuse_disagreement(what: str, by_rank: Sequence[object], cure: str) -> None:
    if len(set(by_rank)) > 1:
        seen = ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(by_rank))
        raise DistaccumError(f"ranks disagree on {what} ({seen}), expected the same everywhere; {cure} on every rank")


def guess_counts(plan: Plan, steps: int) -> Plan:
    """Of a window that is not drawn yet, from its first micro-batches: a power of two near what it may hold.

    Shares that are made with it are corrected at the window's edge. A power of two rounds nothing, and all ranks make
    the same one.

    >>> plan = make_plan(["samples"], [Offer(0, 8, 1, 1, False, True, True, True, *[False] * 4, 0, 0, (6.0,))])
    >>> guess_counts(plan, steps=8).counts
    {'samples': 64.0}
    """
    return replace(plan, counts={name: 2.0 ** round(math.log2(n * steps)) for name, n in plan.counts.items()})
