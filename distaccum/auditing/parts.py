"""Parts: what each backward gives to a loss's units (samples, tokens), and which lines are one criterion."""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from torch import Tensor

from .criterions import BY_CLASS
from .private import OWN
from .reckoning import Key, Reckoning, Seen
from .trained import CHANGED

BOUND = 1e-3  # between equal weights
MEANS = ("mean", "batchmean")
# How units may be weighed, so that all are equal: by unit or row, with what the script intends or without.
RULES = (("count", True), ("count", False), ("rows", True), ("rows", False))
Site = tuple[str, str, str]  # line, function, inner line


class Path(list[tuple[str, Any]]):
    """The way from a loss to its criterion: how each step of its graph scales or adds, and by what (None: unknown).

    Each divides ("div"), multiplies ("mul"; by several numbers, of which it has the largest, "muls"), adds a term
    ("add"), takes a mean or a sum ("mean", "sum", "rows", "kept"), passes some elements on ("other"), or does what no
    sum does ("own", "pairs").
    """

    @property
    def coefficient(self) -> float:
        """The product of what multiplies."""
        return float(math.prod(abs(by or 1.0) for how, by in self if how.startswith("mul")))

    def intent(self, count: float) -> float:
        """The product of what the script multiplies by, and divides by unless that is a count."""
        divisors = (abs(by) for how, by in self if how == "div" and by and by % 1 and not is_equal(by, count))
        return float(self.coefficient / math.prod(divisors))

    def as_term(self) -> dict[str, Any]:
        """The mean or the sum that a loss of the script's own is, like a criterion's call; "seed" is None if neither.

        A sum is "kept" if a mask tells which of its elements count.
        """
        root = Path(takewhile(lambda step: step[0] in ("div", "mul", "add"), self))
        below = dict(self[len(root) : len(root) + 3])
        kind = next(iter(below), "")
        is_known = kind in ("mean", "sum") and bool(below[kind]) and not any(how == "pairs" for how, _ in self)
        divisors = [abs(by or 0.0) for how, by in root if how == "div"]
        seed = root.coefficient / math.prod(divisors) if is_known and all(divisors) else None
        kept = below.get("kept")
        is_kept = kind == "sum" and kept is not None and kept >= 0
        count = kept if is_kept else below.get(kind, 1)
        kind = "kept" if is_kept else kind
        about = {"seed": seed, "intent": root.coefficient, "eps": 0.0}
        return {"reduction": kind, "rows": below.get("rows", 1), "count": count, **about}


@dataclass(frozen=True, eq=False)
class Part:
    """One call of a criterion, or one loss of the script's own, as a backward went through it."""

    index: int  # of its update
    rank: int
    backward: int  # its place in the update
    line: str  # of the backward
    batch: tuple[int, int]  # a loader, and the number of its batch
    site: Site
    call: int  # how many of this site the backward has had
    term: Mapping[str, Any]
    path: Path | None  # None where nobody looked at the graph

    @property
    def total(self) -> float | None:
        """The weight of all its units together; None where it cannot be known."""
        seed = self.term["seed"]
        return None if seed is None else float(seed * (1 if self.term["reduction"] in MEANS else self.term["count"]))

    @property
    def is_own(self) -> bool:
        return self.site[1] == OWN

    @property
    def has_weight(self) -> bool:
        return bool(self.total and self.term["count"])

    def weight(self, units: str = "count", of_script: bool = True) -> float:
        """The weight of all units (`"rows"`: of a sum, of rows); without what the script intends: by accumulation."""
        share = 1.0
        if units == "rows" and self.term["reduction"] not in MEANS:
            share = self.term["rows"] / (self.term["count"] or 1.0)
        return share * (self.total or 0.0) / (1.0 if of_script else self.term["intent"] or 1.0)

    def each(self, units: str = "count", of_script: bool = True) -> float:
        """The weight of a unit."""
        num = self.term[units]
        return self.weight("count", of_script) / num if num else 0.0


class Run:
    """The updates of ranks that train the same parameters, with their parts by optimizer.

    Attributes:
        whole (dict[Key, list[dict]]): The updates that all ranks make, by rank; `num_left_out` are the others.
        updates (dict[Key, list[dict]]): Those, with only the backwards that their steps used.
        reckoned (dict[Key, Reckoning]): What their gradients are made of, where there are receipts.
        own (set[int]): Optimizers whose gradients the script changes itself.
        moved (set[int]): Optimizers whose parameters it moves before it clears, as SAM does.
    """

    def __init__(self, seen: Seen) -> None:
        self.seen = seen
        self.num_ranks = len(seen)
        by_key: dict[Key, list[dict[str, Any]]] = defaultdict(list)
        for rank in seen:
            for update in rank["updates"]:
                by_key[update["optimizer"], update["index"]].append(update)
        self.whole = {key: ranks for key, ranks in by_key.items() if len(ranks) == len(seen)}
        self.num_left_out = len(by_key) - len(self.whole)
        self.reckoned = dict[Key, Reckoning]()
        used = {key: [_used(update) for update in ranks] for key, ranks in self.whole.items()}
        before = dict[int, Tensor]()
        for (place, index), ranks in used.items():
            places = ranks[0].get("places")
            if places and all(update.get("places") == places for update in ranks):
                self.reckoned[place, index] = Reckoning(seen, ranks, before.get(place))
                before[place] = self.reckoned[place, index].closed
        self.updates = {key: ranks for key, ranks in used.items() if all(update["backwards"] for update in ranks)}
        self.own = {place for (place, _), reckoning in self.reckoned.items() if reckoning.is_own}
        self.moved = {place for (place, _), ranks in self.whole.items() if any(update["moved"] for update in ranks)}
        every = (update for ranks in self.updates.values() for update in ranks)
        own = {tuple(term["site"]) for update in every for term in terms_of(update) if _is_own(term)}
        self.parts: dict[int, list[Part]] = defaultdict(list)
        for (place, index), ranks in self.updates.items():
            for i, update in enumerate(ranks):
                self.parts[place] += _parts_of(update, index, i, own)

    @property
    def num_compared(self) -> int:
        return sum(reckoning.is_compared for reckoning in self.reckoned.values())

    @property
    def is_alone(self) -> bool:
        """True if each rank steps with a gradient of its own in all updates, without a wrapper."""
        num_alone = sum(reckoning.is_alone for reckoning in self.reckoned.values())
        return 0 < num_alone == self.num_compared and not any(rank["wrapped"] for rank in self.seen)

    def criterions(self) -> list[Criterion]:
        """Puts lines together that take turns, as `if last:` and `else:` do; several in one micro-batch are tasks."""
        criterions = list[Criterion]()
        for place, parts in self.parts.items():
            groups: dict[Any, dict[Any, list[Part]]] = defaultdict(lambda: defaultdict(list))
            for part in parts:
                line, name, inner = part.site
                groups[name, part.term["reduction"], part.call][line, inner].append(part)
            for by_line in groups.values():
                merged: list[list[Part]] = []
                for some in by_line.values():
                    group = next((group for group in merged if _take_turns(group, some)), None)
                    if group is None:
                        merged.append([*some])
                    else:
                        group += some
                criterions += [Criterion(self, place, group) for group in merged]
        return criterions


class Criterion:
    """The calls of one function with one reduction on one optimizer's graph, wherever their lines are.

    Attributes:
        updates (dict[int, list[Part]]): Its calls, by update.
        lengths (dict[int, int]): How many micro-batches each update has.
        common (int): The usual length, which the updates `usual` have.
        factors (dict[int, float]): By what an update's gradients are multiplied; `factor` is usual.
        totals (dict[int, float]): The weight of all units of an update in the gradient that is used; `level` is usual.
            Of updates whose gradients the script has changed unseen, there is none.
    """

    def __init__(self, run: Run, place: int, parts: Iterable[Part]) -> None:
        self.run = run
        self.place = place
        self.parts = sorted(parts, key=lambda part: (part.index, part.rank, part.backward))
        self.updates: dict[int, list[Part]] = defaultdict(list)
        for part in self.parts:
            self.updates[part.index].append(part)
        self.where, self.name, _ = self.parts[0].site
        self.is_own = self.name == OWN
        self.is_sum = self.parts[0].term["reduction"] not in MEANS
        reckoned = ((index, run.reckoned.get((place, index))) for index in self.updates)
        self.factors = {index: of.factor for index, of in reckoned if of is not None and of.factor is not None}
        self.factor = statistics.median(self.factors.values()) if self.factors else None
        of_ranks = {index: Counter(part.rank for part in parts) for index, parts in self.updates.items()}
        self.lengths = {index: max(nums.values()) for index, nums in of_ranks.items()}
        self.common = Counter(self.lengths.values()).most_common(1)[0][0]
        self.usual = [index for index, length in self.lengths.items() if length == self.common]
        self.totals = self.totals_by("count", of_script=True)
        self.level = statistics.median(self.usual_of(self.totals) or [0.0])

    @property
    def rules(self) -> Sequence[tuple[str, bool]]:
        """A row of a text has many targets, and a mask keeps as many elements of each as it likes."""
        has_rows = self.name not in BY_CLASS and self.parts[0].term["reduction"] != "kept"
        return RULES if has_rows else RULES[:2]

    def totals_by(self, units: str, of_script: bool) -> dict[int, float]:
        totals = {}
        for index, parts in self.updates.items():
            has_changed = any(CHANGED in update["touched"] for update in self.run.updates[self.place, index])
            is_known = index in self.factors or not has_changed
            if is_known and all(part.total is not None and (of_script or part.term["intent"]) for part in parts):
                share = self.factors.get(index, self.factor or 1.0) / self.run.num_ranks
                totals[index] = share * sum(part.weight(units, of_script) for part in parts)
        return totals

    def usual_of(self, totals: Mapping[int, float]) -> list[float]:
        return [totals[index] for index in self.usual if index in totals]

    @property
    def is_constant(self) -> bool:
        """True for a sum that a constant divides, or nothing: all units of all updates weigh the same."""
        each = (part.each() * self.factors.get(part.index, 1.0) for part in self.parts if part.total)
        return self.is_sum and are_equal(each)


def ends(values: Iterable[float]) -> tuple[float, float]:
    every = list(values)
    return (min(every), max(every)) if every else (0.0, 0.0)


def is_equal(value: float, other: float) -> bool:
    return abs(value - other) <= 5e-3 * abs(other)


def are_equal(values: Iterable[float]) -> bool:
    return is_equal(*ends(values))


def terms_of(update: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    return (term for backward in update["backwards"] for term in backward["terms"])


def _used(update: dict[str, Any]) -> dict[str, Any]:
    """The update with only the backwards that its step used."""
    return {**update, "backwards": [each for each in update["backwards"] if not each["cleared"]]}


def bound_of(terms: Iterable[Mapping[str, Any]]) -> float:
    return max([BOUND, *(4 * float(term["eps"]) for term in terms)])


def _is_own(term: Mapping[str, Any]) -> bool:
    """True where the script gives the units of one call different weights, or its loss does more than add up."""
    is_uneven = term["low"] is not None and term["seed"] > term["low"] * (1 + bound_of([term]))
    return is_uneven or any(how == OWN for how, _ in term["divisors"] or ())


def _parts_of(update: Mapping[str, Any], index: int, rank: int, own: set[Any]) -> Iterator[Part]:
    scale = update["scale"]
    times = Counter(id(term) for term in terms_of(update))

    def unscaled(steps: Iterable[Any]) -> Path:
        return Path(tuple(step) for step in steps if tuple(step) != ("mul", scale))

    for i, backward in enumerate(update["backwards"]):
        paths = [*backward["own"]]
        terms = list[tuple[Site, Mapping[str, Any], Path | None]]()
        for term in backward["terms"]:
            num = times.pop(id(term), 0)  # 0 of a graph that another backward went through too
            if num and tuple(term["site"]) in own:
                paths.append(term["divisors"] or ())
            elif num:
                path = None if term["divisors"] is None else unscaled(term["divisors"])
                intent = None if path is None else path.intent(term["count"])
                terms.append(
                    (tuple(term["site"]), {**term, "seed": num * term["seed"] / scale, "intent": intent}, path)
                )
        for steps in paths or [()] * (not backward["terms"]):
            path = unscaled(steps)
            terms.append(((backward["line"], OWN, ""), path.as_term(), path))
        calls = Counter[Site]()
        for site, term, path in terms:
            calls[site] += 1
            yield Part(index, rank, i, backward["line"], tuple(backward["batch"]), site, calls[site], term, path)


def _take_turns(some: Sequence[Part], others: Sequence[Part]) -> bool:
    """True unless an update has both lines equally often, as it has those of tasks."""
    numbers, other_numbers = (Counter((part.index, part.rank) for part in parts) for parts in (some, others))
    return numbers != other_numbers
