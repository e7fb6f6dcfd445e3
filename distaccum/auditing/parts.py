"""Parts: what each backward gives to a criterion's units (samples, tokens), and which lines are one criterion."""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from .private import OWN
from .reckoning import Key, Reckoning

BOUND = 1e-3  # between equal weights
MEANS = ("mean", "batchmean")
Updates = Mapping[Key, Sequence[dict[str, Any]]]  # by rank
Site = tuple[str, str, str]  # line, function, inner line
Steps = Sequence[tuple[str, Any]]  # how a node scales or adds, and by what (None: it cannot be read)


class Path(list[tuple[str, Any]]):
    """The way from a loss to its criterion: the steps of its graph.

    Each divides ("div"), multiplies ("mul"; by several numbers, of which it has the largest, "muls"), adds a term
    ("add"), takes a mean over so many elements ("mean"), or does what no sum does ("own").
    """

    @property
    def is_bent(self) -> bool:
        """True where the weight of a unit hangs on what the script computes: on the way there is what is no sum."""
        return any(how == OWN for how, _ in self)

    @property
    def mean(self) -> tuple[float, float, int] | None:
        """A mean's divisor and factor at the root, and its number of elements; None if there is no mean."""
        root = Path(takewhile(lambda step: step[0] in ("div", "mul", "add"), self))
        divisors = [by for how, by in root if how == "div"]
        if len(root) == len(self) or not all(divisors) or any(how == "pairs" for how, _ in self):
            return None
        kind, num = self[len(root)]
        return (abs(math.prod(divisors)), root.coefficient, int(num)) if kind == "mean" and num else None

    @property
    def coefficient(self) -> float:
        """The product of what multiplies."""
        return float(math.prod(abs(by or 1.0) for how, by in self if how.startswith("mul")))

    def intent(self, count: float) -> float:
        """The product of what the script multiplies by, and divides by unless that is a count."""
        divisors = (abs(by) for how, by in self if how == "div" and by and by % 1 and not is_equal(by, count))
        return float(self.coefficient / math.prod(divisors))


@dataclass(frozen=True, eq=False)
class Part:
    """One call of a criterion, or one mean of a loss of the script's own, as a backward went through it."""

    index: int  # of its update
    rank: int
    backward: int  # its place in the update
    line: str  # of the backward
    batch: tuple[int, int, int]  # a loader, the number of its batch, and how many passes over loaders had ended
    site: Site
    call: int  # how many of this site the backward has had
    term: Mapping[str, Any]
    path: Path | None  # None where nobody looked at the graph
    total: float | None  # the weight of all its units together; None where it cannot be known
    intent: float | None = None  # by what the script multiplies

    @property
    def is_own(self) -> bool:
        return self.site[1] == OWN

    def weight(self, of_script: bool = True) -> float:
        """Its weight; without what the script intends it is what accumulation did."""
        return (self.total or 0.0) / (1.0 if of_script else self.intent or 1.0)

    def each(self, units: str = "count", of_script: bool = True) -> float:
        """The weight of a unit (`"rows"`: of a row)."""
        num = self.term[units]
        return self.weight(of_script) / num if num else 0.0


class Run:
    """The updates of ranks that train the same parameters, with their parts by optimizer."""

    def __init__(self, updates: Updates, reckoned: Mapping[Key, Reckoning], num_ranks: int) -> None:
        self.updates = updates
        self.reckoned = reckoned
        self.num_ranks = num_ranks
        own = {tuple(term["site"]) for ranks in updates.values() for each in ranks for term in terms_of(each, _is_own)}
        self.parts: dict[int, list[Part]] = defaultdict(list)
        for (place, index), ranks in updates.items():
            for rank, update in enumerate(ranks):
                self.parts[place] += _parts_of(update, index, rank, own)

    def sum_of(self, key: Key, rank: int | None = None) -> float:
        """The weight of all criterions of an update together, on one rank or on all."""
        parts = (part for part in self.parts[key[0]] if part.index == key[1] and not part.is_own)
        return sum(part.weight() for part in parts if rank is None or part.rank == rank)

    def is_one_mean(self, factors: Mapping[Key, Sequence[float]]) -> bool:
        """True if samples of all ranks weigh as one mean, given each rank's factor of each update."""
        totals = [sum(self.sum_of(key, rank) * by for rank, by in enumerate(of)) for key, of in factors.items()]
        return bool(totals) and are_equal((1.0, *totals))

    def criterions(self, by_call: bool) -> list[Criterion]:
        """Puts lines together that take turns, as `if last:` and `else:` do; several in one micro-batch are tasks."""
        criterions = list[Criterion]()
        for place, parts in self.parts.items():
            groups: dict[Any, dict[Any, list[Part]]] = defaultdict(lambda: defaultdict(list))
            for part in parts:
                line, name, inner = part.site
                groups[name, part.term["reduction"], part.call if by_call else 0][line, inner].append(part)
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
        lengths (dict[int, int]): How many micro-batches each update has: backwards, or calls if there is one backward.
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
        self.lengths = _micro_batches(self.updates)
        self.common = Counter(self.lengths.values()).most_common(1)[0][0]
        self.usual = [index for index, length in self.lengths.items() if length == self.common]
        self.totals = self.totals_of(of_script=True)
        self.level = self.level_of(self.totals)

    def totals_of(self, of_script: bool) -> dict[int, float]:
        totals = {}
        for index, parts in self.updates.items():
            has_changed = any(update["changed"] for update in self.run.updates[self.place, index])
            is_known = (of_script or all(part.intent for part in parts)) and (index in self.factors or not has_changed)
            if is_known and all(part.total is not None for part in parts):
                share = self.factors.get(index, self.factor or 1.0) / self.run.num_ranks
                totals[index] = share * sum(part.weight(of_script) for part in parts)
        return totals

    def level_of(self, totals: Mapping[int, float]) -> float:
        return statistics.median([totals[index] for index in self.usual if index in totals] or [0.0])

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


def terms_of(update: Mapping[str, Any], are_meant: Any = None) -> Iterator[Mapping[str, Any]]:
    every = (term for backward in update["backwards"] for term in backward["terms"])
    return filter(are_meant, every) if are_meant else every


def bound_of(terms: Iterable[Mapping[str, Any]]) -> float:
    return max([BOUND, *(4 * float(term["eps"]) for term in terms)])


def _is_own(term: Mapping[str, Any]) -> bool:
    """True where the script gives the units of one call different weights, or its loss does more than add up."""
    is_uneven = term["low"] is not None and term["seed"] > term["low"] * (1 + bound_of([term]))
    return is_uneven or Path(term["divisors"] or ()).is_bent


def _parts_of(update: Mapping[str, Any], index: int, rank: int, own: set[Any]) -> Iterator[Part]:
    scale = update["scale"]
    times = Counter(id(term) for term in terms_of(update))
    for i, backward in enumerate(update["backwards"]):
        about = {"index": index, "rank": rank, "backward": i, "line": backward["line"]}
        about["batch"] = tuple(backward["batch"])
        calls = Counter[Site]()
        means = [*backward["own"]]
        for term in backward["terms"]:
            num = times.pop(id(term), 0)
            if not num:
                continue  # of a graph that another backward went through too
            site = tuple(term["site"])
            path = None if term["divisors"] is None else _unscaled(term["divisors"], scale)
            if site in own:
                means.append(term["divisors"] or ())
                continue
            calls[site] += 1
            total = num * term["seed"] / scale * (1 if term["reduction"] in MEANS else term["count"])
            intent = None if path is None else path.intent(term["count"])
            yield Part(**about, site=site, call=calls[site], term=term, path=path, total=total, intent=intent)
        for call, steps in enumerate(means or [()] * (not backward["terms"]), start=1):
            yield _own_part(about, call, _unscaled(steps, scale))


def _own_part(about: Mapping[str, Any], call: int, path: Path) -> Part:
    """A loss of the script's own; of a mean at its root it is known what divides it."""
    divisor, coefficient, num = path.mean or (1.0, 1.0, 0)
    term = {"reduction": "mean", "count": 1, "rows": 1, "eps": 0.0, "unit": "micro-batches", "num": num, "print": None}
    total = coefficient / divisor if num else None
    return Part(
        **about, site=(about["line"], OWN, ""), call=call, term=term, path=path, total=total, intent=coefficient
    )


def _unscaled(path: Steps, scale: float) -> Path:
    return Path(step for step in path if tuple(step) != ("mul", scale))


def _micro_batches(updates: Mapping[int, Sequence[Part]]) -> dict[int, int]:
    of_each = {}
    for by_backward in (True, False):
        for index, parts in updates.items():
            ranks = {(part.rank, part.backward if by_backward else id(part)) for part in parts}
            of_each[index] = max(Counter(rank for rank, _ in ranks).values())
        if {*of_each.values()} != {1}:
            break
    return of_each


def _take_turns(some: Sequence[Part], others: Sequence[Part]) -> bool:
    """True if no micro-batch has both lines."""
    loaders, other_loaders = ({part.batch[0] for part in parts} for parts in (some, others))
    if 0 not in loaders | other_loaders:
        batches, other_batches = ({(part.rank, part.batch) for part in parts} for parts in (some, others))
        return loaders == other_loaders and batches.isdisjoint(other_batches)
    numbers, other_numbers = (Counter((part.index, part.rank) for part in parts) for parts in (some, others))
    return numbers != other_numbers
