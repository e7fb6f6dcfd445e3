"""Parts: what each backward gives to a loss's units (samples, tokens), and which lines are one criterion."""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby, takewhile
from typing import Any

from torch import Tensor

from .criterions import BY_CLASS
from .private import OWN
from .reckoning import SOFT, Reckoning, Seen
from .trained import CHANGED, WRITTEN

BOUND = 1e-3  # between equal weights
MEANS = ("mean", "batchmean")
# How units may be weighed, so that all are equal: by unit or row, with what the script intends or without.
RULES = (("count", True), ("count", False), ("rows", True), ("rows", False))
Site = tuple[str, str, str]  # line, function, inner line with its caller's
Term = Mapping[str, Any]  # a call of a criterion, or a row that has such calls


# The way from a loss to its criterion: how each step of its graph scales or adds, and by what (None: unknown).
# A step divides ("div"), multiplies ("mul"; by several numbers, of which it has the largest, "muls"), adds a term
# ("add"), takes a mean or a sum ("mean", "sum", with its elements, its rows, and those that a mask of 0 and 1 keeps),
# passes some elements on ("other"), or does what no sum does ("own", "pairs"). "product": by what a graph made too;
# "alone": of a parameter alone.
Path = Sequence[tuple[str, Any]]


def _coefficient(path: Path) -> float:
    """The product of what multiplies."""
    return float(math.prod(abs(by or 1.0) for how, by in path if how.startswith("mul")))


def _divisors(path: Path) -> list[float]:
    return [abs(by or 0.0) for how, by in path if how == "div"]


def _scale_in(path: Path, scale: float) -> float:
    """A scaler's factor in a path; 1 where a loss beside a scaled one lacks it."""
    return scale if any(how.startswith("mul") and is_equal(abs(by or 0.0), scale) for how, by in path) else 1.0


def _as_term(path: Path, scale: float) -> Term:
    """The mean or the sum that a loss of the script's own is, like a criterion's call; "seed" is None if neither.

    A sum is "kept" if a mask tells which of its elements count.
    """
    root = [*takewhile(lambda step: step[0] in ("div", "mul", "add", "product", "given"), path)]
    nums: Any
    kind, nums = next(iter(path[len(root) :]), ("", None))
    count, rows, kept = nums if kind in ("mean", "sum") else (0, 1, None)
    is_known = count and all(_divisors(root)) and not any(how == "pairs" for how, _ in path)
    given = math.prod(abs(by or 0.0) for how, by in root if how == "given")  # to backward, as its gradient
    seed = given * _coefficient(root) / math.prod(_divisors(root)) if is_known else None
    if kind == "sum" and kept is not None and kept >= 0:
        kind = "kept"
        count = kept
    about = {"seed": seed, "intent": _coefficient(root) / _scale_in(root, scale), "eps": 0.0, "divisors": path}
    return {"reduction": kind, "rows": rows, "count": count, **about}


@dataclass(frozen=True, eq=False)
class Part:
    """One call of a criterion, or one loss of the script's own, as a backward went through it."""

    index: int  # of its update
    rank: int
    backward: int  # its place in the update
    line: str  # of the backward
    batch: tuple[int, int]  # a loader, and the number of its batch
    factor: float  # by which its gradient is multiplied, and no longer by a scaler
    site: Site
    term: Term

    @property
    def total(self) -> float | None:
        """The weight of all its units together; None where it cannot be known."""
        seed = self.term["seed"]
        num = 1.0 if self.term["reduction"] in MEANS else self.term["count"]
        return None if seed is None else float(self.factor * seed * num)

    @property
    def is_own(self) -> bool:
        return self.site[1] == OWN

    @property
    def form(self) -> tuple[str, ...]:
        """Its reduction, and how a loss of the script's own is made: several in one backward are in no order."""
        return self.term["reduction"], *(how for how, _ in self.term["divisors"] or () if self.is_own and how != "add")

    @property
    def divisors(self) -> list[float]:
        return _divisors(self.term["divisors"] or ())  # None where no walk has reached it

    def weigh(self, units: str, of_script: bool) -> tuple[float, float]:
        """The weight of all units (`"rows"`: of a sum, of rows), and of each; without what the script intends."""
        num = self.term[units]
        whole = (self.total or 0.0) / (1.0 if of_script else self.term["intent"])
        is_of_rows = units == "rows" and self.term["reduction"] not in MEANS
        return whole * (num / (self.term["count"] or 1.0) if is_of_rows else 1.0), whole / num if num else 0.0

    @property
    def each(self) -> float:
        """The weight of a unit."""
        return self.weigh(*RULES[0])[1]


class Run:
    """An optimizer's updates, of ranks that train the same parameters.

    Attributes:
        of_ranks (list[list[dict]]): The updates of each rank.
        updates (dict[int, list[dict]]): Those that all make, by rank, with only the backwards that their steps used, if
            it is known which reached it; `num_left_out` are those that some ranks do not make.
        reckoned (dict[int, Reckoning]): What their gradients are made of, where there are receipts.
        compared (list[Reckoning]): Those that could tell.
        factors (dict[int, float]): By what their gradients are multiplied; `factor` is usual.
        is_own (bool): The script changes the gradients itself.
        is_moved (bool): It moves the parameters before it clears, as SAM does.
    """

    def __init__(self, seen: Seen, place: int) -> None:
        self.seen = seen
        self.place = place
        self.num_ranks = len(seen)
        self.of_ranks = [[update for update in rank["updates"] if update["optimizer"] == place] for rank in seen]
        by_index: dict[int, list[dict[str, Any]]] = defaultdict(list)
        for update in (update for update in chain(*self.of_ranks) if update["is_sure"]):
            used = [backward for backward in update["backwards"] if not backward["cleared"]]
            by_index[update["index"]].append(update | {"backwards": used})
        self.updates = {index: ranks for index, ranks in by_index.items() if len(ranks) == len(seen)}
        self.num_left_out = len(by_index) - len(self.updates)
        self.reckoned = dict[int, Reckoning]()
        before: Tensor | None = None
        for index, ranks in self.updates.items():
            places = ranks[0].get("places")
            if places and all(update.get("places") == places for update in ranks):
                is_next = not index or index - 1 in self.reckoned
                self.reckoned[index] = Reckoning(seen, ranks, before, is_next=is_next)
                before = self.reckoned[index].closed
        self.compared = [reckoning for reckoning in self.reckoned.values() if reckoning.is_compared]
        sound = {i: of for i, of in self.reckoned.items() if all(one.kind in SOFT for one in of.findings)}
        self.factors = {index: of.factor for index, of in sound.items() if of.factor is not None}
        self.factor = statistics.median(self.factors.values()) if self.factors else None
        self.is_own = any(reckoning.is_own for reckoning in self.reckoned.values())
        self.is_moved = any(update["moved"] for update in chain(*self.updates.values()))
        self.parts = [*self._parts()]

    def _parts(self) -> Iterator[Part]:
        every = chain(*self.updates.values())
        own = {term["site"] for update in every for term in terms_of(update) if _is_own(term)}
        for index, ranks in self.updates.items():
            is_whole = all(update["backwards"] for update in ranks)
            for rank, update in enumerate(ranks if is_whole else ()):
                factor = self.factors.get(index, self.factor or 1.0) / update["scale"]
                times = Counter(id(term) for term in terms_of(update))
                for i, backward in enumerate(update["backwards"]):
                    about = (index, rank, i, backward["line"], backward["batch"], factor)
                    for site, term in _summed(_terms_of(backward, times, own, update)):
                        yield Part(*about, site, term)

    @property
    def is_alone(self) -> bool:
        """True if each rank steps with a gradient of its own in all updates, without a wrapper."""
        num_alone = sum(reckoning.is_alone for reckoning in self.reckoned.values())
        return 0 < num_alone == len(self.compared) and not any(rank["wrapped"] for rank in self.seen)

    def criterions(self) -> list[Criterion]:
        """Puts lines together that take turns, as `if last:` and `else:` do; several in one micro-batch are tasks."""
        by_site: dict[Any, dict[Any, list[Part]]] = defaultdict(lambda: defaultdict(list))
        for part in self.parts:
            by_site[part.site, part.form][part.index, part.rank, part.backward].append(part)
        groups: dict[Any, list[list[Part]]] = defaultdict(list)
        for ((_, name, _), (reduction, *_)), backwards in by_site.items():
            calls = [*backwards.values()]
            varies = len({*map(len, calls)}) > 1
            if varies and all(are_equal(part.total or 0.0 for part in some) for some in calls):
                calls = [[_as_one(some)] for some in calls]
            for call in range(max(map(len, calls))):
                some = [parts[call] for parts in calls if call < len(parts)]
                merged = groups[name, reduction, call]
                group = next((group for group in merged if _take_turns(group, some, self.num_ranks)), [])
                if not group:
                    merged.append(group)
                group += some
        return [Criterion(self, group) for group in chain(*groups.values())]


class Criterion:
    """The calls of one function with one reduction on one optimizer's graph, wherever their lines are.

    Attributes:
        updates (dict[int, list[Part]]): Its calls, by update.
        lengths (dict[int, int]): How many micro-batches each update has.
        common (int): The usual length, which the updates `usual` have.
        readings (list[Reading]): What its units may be; `reading` has most that is even.
        totals (dict[int, float]): The weight of all units of an update; `level` is usual.
    """

    def __init__(self, run: Run, parts: Iterable[Part]) -> None:
        self.run = run
        self.parts = sorted(parts, key=lambda part: (part.index, part.rank, part.backward))
        self.updates = {index: list(every) for index, every in groupby(self.parts, key=lambda part: part.index)}
        self.where, self.name, _ = self.parts[0].site
        self.is_own = self.name == OWN
        reduction = self.parts[0].term["reduction"]
        self.is_sum = reduction not in MEANS
        of_ranks = {index: Counter(part.rank for part in every) for index, every in self.updates.items()}
        self.lengths = {index: max(nums.values()) for index, nums in of_ranks.items()}
        self.common = Counter(self.lengths.values()).most_common(1)[0][0]
        self.usual = [index for index, length in self.lengths.items() if length == self.common]
        # A row of a text has many targets, and a mask keeps as many elements of each as it likes.
        is_masked = reduction == "kept" or any(part.term["count"] < part.term.get("all", 0) for part in self.parts)
        rules = RULES[:2] if self.name in BY_CLASS or is_masked else RULES
        self.readings = [Reading(self, *rule) for rule in rules]
        self.reading = max(self.readings, key=lambda reading: (not reading.uneven, not reading.odd, reading.is_mean))
        self.totals = self.readings[0].totals
        self.level = self.readings[0].level

    def is_known(self, index: int) -> bool:
        """True if an update's weights in the gradient that is used are known: it is not changed unseen."""
        low, high = ends(self.run.factors.values())
        touched = {how for update in self.run.updates[index] for how in update["touched"]}
        may_change = high - low > 0.05 * high or bool(touched & {CHANGED, WRITTEN})
        is_seen = index in self.run.factors or not may_change
        return is_seen and all(part.total is not None for part in self.updates[index])

    def is_even(self, parts: Sequence[Part]) -> bool:
        """True if their units weigh alike by any reading."""
        return any(reading.is_even(parts) for reading in self.readings)

    @property
    def may_be_tasks(self) -> bool:
        """True where usual updates have each of its lines once, as those of tasks, and another lacks one."""
        nums = [len({part.site for part in parts}) for parts in self.updates.values()]
        return min(nums) < max(nums) == self.common

    @property
    def is_constant(self) -> bool:
        """True for a sum that a constant divides, or nothing: all units of all updates weigh the same."""
        return self.is_sum and are_equal(part.each for part in self.parts if part.total)

    def is_skipping(self, index: int) -> bool:
        """True where the script leaves out a micro-batch now and then, of as many as a loader usually gives."""
        before, now = (self.updates.get(i, self.updates[index])[-1].batch for i in (index - 1, index))
        return before[0] == now[0] and now[1] - before[1] == self.common > self.lengths[index]


class Reading:
    """A criterion's weights, if its units are of one kind, with or without what the script multiplies by.

    Attributes:
        uneven (list[int]): Updates in which they weigh differently.
        totals (dict[int, float]): The weight of all units of an update in the gradient that is used; `level` is usual.
        odd (dict[int, float]): How many times the usual others weigh.
        is_mean (bool): The usual one is one mean.
    """

    def __init__(self, criterion: Criterion, *rule: Any) -> None:
        self.rule = rule
        self.uneven = [index for index, parts in criterion.updates.items() if not self.is_even(parts)]
        known = {index: parts for index, parts in criterion.updates.items() if criterion.is_known(index)}
        num_ranks = criterion.run.num_ranks
        self.totals = {i: sum(part.weigh(*rule)[0] for part in parts) / num_ranks for i, parts in known.items()}
        self.level = statistics.median([self.totals[i] for i in criterion.usual if i in self.totals] or [0.0])
        self.is_mean = is_equal(self.level, 1.0)
        times = {index: total / (self.level or 1.0) for index, total in self.totals.items()}
        self.odd = {i: by for i, by in times.items() if by and not is_equal(by, 1.0) and not criterion.is_skipping(i)}

    def spread(self, parts: Iterable[Part]) -> tuple[float, float]:
        """The least and the most that a unit weighs."""
        return ends(part.weigh(*self.rule)[1] for part in parts if part.total and part.term["count"])

    def is_even(self, parts: Sequence[Part]) -> bool:
        low, high = self.spread(parts)
        return high <= low * (1 + max(map(_bound, (part.term for part in parts))))


def ends(values: Iterable[float]) -> tuple[float, float]:
    every = list(values)
    return (min(every), max(every)) if every else (0.0, 0.0)


def is_equal(value: float, other: float) -> bool:
    return abs(value - other) <= 5e-3 * abs(other)


def are_equal(values: Iterable[float]) -> bool:
    return is_equal(*ends(values))


def terms_of(update: Term) -> Iterator[Term]:
    return (term for backward in update["backwards"] for term in backward["terms"])


def _bound(term: Term) -> float:
    """The relative difference between equal weights."""
    return max(BOUND, 4 * float(term["eps"]))


def _is_own(term: Term) -> bool:
    """True where the script gives the units of one call different weights, or its loss does more than add up."""
    is_uneven = term["low"] is not None and term["seed"] > term["low"] * (1 + _bound(term))
    return is_uneven or any(how == OWN for how, _ in term["divisors"] or ())


def _terms_of(backward: Term, times: Counter[int], own: set[Any], update: Term) -> Iterator[tuple[Site, Term]]:
    """Yields criterions' calls, then losses of the script's own; a scaler's factor is no intent."""
    paths = [*backward["own"]]
    for term in backward["terms"]:
        num = times.pop(id(term), 0)  # 0 of a graph that another backward went through too
        path = term["divisors"] or ()
        if num and term["site"] in own:
            paths.append(path)
        elif num:
            # The script intends what it multiplies or divides by, unless that is a count, or one part in it.
            divisors = [by for by in _divisors(path) if by % 1 and not is_equal(by, term["count"])]
            muls = [abs(by or 0.0) for how, by in path if how == "mul" and term["reduction"] not in MEANS]
            parts_in = term["count"], term["count"] * len(update["backwards"])
            shares = [by for by in muls if any(is_equal(by * count, 1.0) for count in parts_in)]
            intent = _coefficient(path) / math.prod(shares) / math.prod(divisors) / _scale_in(path, update["scale"])
            yield term["site"], {**term, "seed": num * term["seed"], "intent": intent}
    for path in paths or [()] * (not backward["terms"]):
        yield (backward["line"], OWN, backward["inner"]), _as_term(path, update["scale"])


def _summed(terms: Iterable[tuple[Site, Term]]) -> list[tuple[Site, Term]]:
    """Adds up a backward's sums by one criterion whose units all weigh the same, as of a text's chunks."""
    every: dict[Any, tuple[Site, Term]] = {}
    for site, term in terms:
        is_sum = term["reduction"] not in MEANS and site[1] != OWN
        key = (site, term["seed"], term["intent"]) if is_sum else len(every)
        before = every[key][1] if key in every else {}
        every[key] = site, {**term, **{name: term[name] + before[name] for name in ("count", "rows") if before}}
    return [*every.values()]


def _as_one(calls: Sequence[Part]) -> Part:
    """A loop's calls in a backward, over samples or the steps of an episode, as a sum over them."""
    about = {"reduction": "calls", "count": len(calls), "rows": len(calls)}
    return replace(calls[0], term={**calls[0].term, **about})


def are_one_mean(indices: Iterable[int], parts: Iterable[Part], num_ranks: int, *, is_bare: bool = False) -> bool:
    """True if these updates add up to one mean each; `is_bare`: without what the script intends."""
    whole = dict.fromkeys(indices, 0.0)
    for part in parts:
        if part.index in whole:
            whole[part.index] += part.weigh("count", not (is_bare or part.is_own))[0] / num_ranks
    return are_equal([1.0, *whole.values()])


def _take_turns(some: Sequence[Part], others: Sequence[Part], num_ranks: int) -> bool:
    """True unless two lines are tasks: of one backward, a mean each, or in all updates as often as each other."""
    backwards, others_backwards = ({(p.index, p.rank, p.backward) for p in parts} for parts in (some, others))
    are_means = (are_one_mean({p.index for p in parts}, parts, num_ranks, is_bare=True) for parts in (some, others))
    is_one_line = some[0].site == others[0].site
    if backwards & others_backwards or (all(are_means) and not is_one_line):
        return False
    numbers, other_numbers = (Counter((part.index, part.rank) for part in parts) for parts in (some, others))
    shared = numbers.keys() & other_numbers.keys()
    return is_one_line or not shared or any(numbers[key] != other_numbers[key] for key in shared)
