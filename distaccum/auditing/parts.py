"""Parts: what each backward gives to a criterion's units (samples, tokens), and which lines are one criterion."""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

from .private import OWN
from .reckoning import Key, Reckoning

BOUND = 1e-3  # between equal weights
MEANS = ("mean", "batchmean")
Updates = Mapping[Key, Sequence[dict[str, Any]]]  # by rank
Site = tuple[str, str, str]  # line, function, inner line


Steps = Sequence[tuple[str, Any, str]]  # how a node scales or adds, by what (None: it cannot be read), in which line


class Path(list[tuple[str, Any, str]]):
    """The way from a loss to its criterion: the steps of its graph.

    Each divides ("div"), multiplies ("mul"; by several numbers, of which it has the largest, "muls"), adds a term
    ("add"), takes a mean over so many elements ("mean"), or does what no sum does ("own").
    """

    @property
    def is_bent(self) -> bool:
        """True where each element of a mean goes through what is no sum."""
        kinds = [how for how, *_ in self]
        return "mean" in kinds and OWN in kinds[kinds.index("mean") :] and OWN not in kinds[: kinds.index("mean")]

    @property
    def mean(self) -> tuple[float, float, int] | None:
        """Returns a mean's divisor and factor at the root, and its number of elements; None if there is no mean."""
        root = Path(takewhile(lambda step: step[0] in ("div", "mul", "add"), self))
        kind, num, _ = self[len(root)] if len(root) < len(self) else ("", 0, "")
        divisors = [by for how, by, _ in root if how == "div"]
        if kind != "mean" or not num or not all(divisors) or any(how == "pairs" for how, *_ in self):
            return None
        return abs(math.prod(divisors)), root.coefficient, int(num)

    @property
    def coefficient(self) -> float:
        """The product of what multiplies."""
        return float(math.prod(abs(by or 1.0) for how, by, _ in self if how.startswith("mul")))

    @property
    def at_root(self) -> float:
        """The product of what divides and multiplies next to the loss, up to a node that does something else."""
        factors = [(how, abs(by or 0.0)) for how, by, _ in self if how != "add"]
        known = takewhile(lambda step: step[0] in ("div", "mul") and step[1], factors)
        return float(math.prod(1 / by if how == "div" else by for how, by in known))

    def intent(self, count: float) -> float:
        """The product of what the script multiplies by, and divides by unless that is a count."""
        divisors = (abs(by) for how, by, _ in self if how == "div" and by and by % 1 and not is_equal(by, count))
        return float(self.coefficient / math.prod(divisors))

    def without_coefficient(self) -> Path:
        return Path(step for step in self if not step[0].startswith("mul") and step[:2] != ("div", 1.0))


@dataclass(frozen=True, eq=False)
class Part:
    """One call of a criterion, as a backward went through it; of a loss of the script's own, one for a backward."""

    index: int  # of its update
    rank: int
    backward: int  # its place in the update
    line: str  # of the backward
    batch: tuple[int, int, int]  # a loader, the number of its batch, and how many passes over loaders had ended
    site: Site
    call: int  # how many of this site the backward has had
    term: dict[str, Any]
    path: Steps | None  # None where nobody looked at the graph
    total: float  # the weight of all its units together
    intent: float | None = None  # by what the script multiplies
    num_addends: int = 0  # of which the loss is a sum, where the audit does not know all of them
    is_rooted: bool = False  # its loss goes through more than what scales and adds up
    addends: Sequence[Path] = ()  # of the script's own loss

    @property
    def is_own(self) -> bool:
        return self.site[1] == OWN

    @property
    def accumulated(self) -> float:
        """The weight without what the script intends: what accumulation did."""
        return self.total / (self.intent or 1.0)

    def each(self, units: str = "count", of_script: bool = True) -> float:
        """The weight of a unit (`"rows"`: of a row), with or without what the script intends."""
        total, num = self.total if of_script else self.accumulated, self.term[units]
        return total / num if num else 0.0


@dataclass
class Run:
    """The updates of ranks that train the same parameters, with their parts by optimizer.

    `sums` is the weight of all criterions of an update together, by rank.
    """

    updates: Updates
    reckoned: Mapping[Key, Reckoning]
    num_ranks: int

    def __post_init__(self) -> None:
        self.parts: dict[int, list[Part]] = defaultdict(list)
        every = [update for ranks in self.updates.values() for update in ranks]
        self.weighed = {tuple(term["site"]) for update in every for term in terms_of(update) if _is_weighed(term)}
        for (place, index), ranks in self.updates.items():
            for rank, update in enumerate(ranks):
                times = Counter(id(term) for backward in update["backwards"] for term in backward["terms"])
                for i, backward in enumerate(update["backwards"]):
                    about = {"index": index, "rank": rank, "backward": i, "line": backward["line"]}
                    about["batch"] = tuple(backward["batch"])
                    self.parts[place] += _parts(about, backward, update["scale"], times, self.weighed)
        self.sums: dict[Key, dict[int, float]] = defaultdict(lambda: defaultdict(float))
        for place, parts in self.parts.items():
            # Nobody may have looked at the graph of later updates.
            rooted, counting = {part.site for part in parts if part.is_rooted}, _multiplied_by_counts(parts)
            self.parts[place] = parts = [replace(part, is_rooted=part.site in rooted) for part in parts]
            for i, part in enumerate(parts):
                if part.site in counting and part.path is not None:
                    parts[i] = replace(part, intent=1.0, path=Path(part.path).without_coefficient())
                if not part.is_own:
                    self.sums[place, part.index][part.rank] += part.total

    def is_one_mean(self, factors: Mapping[Key, Sequence[float]]) -> bool:
        """True if samples of all ranks weigh as one mean, given each rank's factor of each update."""
        sums = [(by_rank, factors[key]) for key, by_rank in self.sums.items() if key in factors]
        totals = [sum(by_rank[rank] * of_ranks[rank] for rank in by_rank) for by_rank, of_ranks in sums]
        return bool(totals) and all(is_equal(total, 1.0) for total in totals)

    def criterions(self, by_call: bool) -> list[Criterion]:
        """Puts lines together that take turns, as `if last:` and `else:` do; several in one micro-batch are tasks."""
        criterions = list[Criterion]()
        for place, parts in self.parts.items():
            groups: dict[Any, dict[Any, list[Part]]] = defaultdict(lambda: defaultdict(list))
            for part in parts:
                line, name, inner = part.site
                groups[name, part.term["reduction"], part.call if by_call else 0][line, inner].append(part)
            for by_line in groups.values():
                criterions += _in_common([Criterion(self, place, lines) for lines in by_line.values()])
        return criterions


class Criterion:
    """The calls of one function with one reduction on one optimizer's graph, wherever their lines are.

    Attributes:
        updates (dict[int, list[Part]]): Its calls, by update.
        lengths (dict[int, int]): How many micro-batches each update has: backwards, or calls if there is one backward.
        common (int): The usual length, which the updates `usual` have.
        factors (dict[int, float]): By what an update's gradients are multiplied; `factor` is usual.
        totals (dict[int, float]): The weight of all units of an update in the gradient that is used; `level` is usual.
        accumulated (dict[int, float]): The same, without what the script intends.
    """

    def __init__(self, run: Run, place: int, parts: Iterable[Part]) -> None:
        self.run, self.place = run, place
        self.parts = sorted(parts, key=lambda part: (part.index, part.rank, part.backward))
        self.updates: dict[int, list[Part]] = defaultdict(list)
        for part in self.parts:
            self.updates[part.index].append(part)
        (self.where, self.name, _), self.is_sum = self.parts[0].site, self.parts[0].term["reduction"] not in MEANS
        self.sites = {part.site for part in self.parts}
        self.is_own, self.is_rooted = self.name == OWN, any(part.is_rooted for part in self.parts)
        reckoned = ((index, run.reckoned.get((place, index))) for index in self.updates)
        self.factors = {index: of.factor for index, of in reckoned if of is not None and of.factor is not None}
        self.factor = statistics.median(self.factors.values()) if self.factors else None
        self.lengths = _micro_batches(self.updates)
        self.common = Counter(self.lengths.values()).most_common(1)[0][0]
        self.usual = [index for index, length in self.lengths.items() if length == self.common]
        shares = {index: self.factors.get(index, self.factor or 1.0) / run.num_ranks for index in self.updates}
        self.totals = {i: shares[i] * sum(part.total for part in parts) for i, parts in self.updates.items()}
        known = {i: parts for i, parts in self.updates.items() if all(part.intent is not None for part in parts)}
        self.accumulated = {i: shares[i] * sum(part.accumulated for part in parts) for i, parts in known.items()}
        self.level = self.level_of(self.totals)

    def level_of(self, totals: Mapping[int, float]) -> float:
        known = [totals[index] for index in self.usual if index in totals]
        return statistics.median(known or [0.0])

    @property
    def is_constant(self) -> bool:
        """True for a sum that a constant divides, or nothing: all units of all updates weigh the same."""
        each = (part.each() * self.factors.get(part.index, 1.0) for part in self.parts if part.total)
        return self.is_sum and are_equal(each)

    def is_skipping(self, index: int) -> bool:
        """True where the script leaves out a micro-batch now and then, or changes gradients unseen."""
        updates, num_drawn = self.run.updates, 0
        ranks, before = updates[self.place, index], updates.get((self.place, index - 1))
        if before is not None:
            (loader, now, _), (old_loader, then, _) = (of[0]["backwards"][-1]["batch"] for of in (ranks, before))
            num_drawn = (now - then) * (loader == old_loader)
        is_unused = any(site in update["unused"] for update in ranks for site in self.sites)
        has_changed = any(update["changed"] for update in ranks) and index not in self.factors
        return is_unused or has_changed or self.lengths[index] < self.common == num_drawn


def ends(values: Iterable[float]) -> tuple[float, float]:
    every = list(values)
    return (min(every), max(every)) if every else (0.0, 0.0)


def is_equal(value: float, other: float) -> bool:
    return abs(value - other) <= 5e-3 * abs(other)


def are_equal(values: Iterable[float]) -> bool:
    return is_equal(*ends(values))


def terms_of(update: dict[str, Any]) -> Iterable[dict[str, Any]]:
    return (term for backward in update["backwards"] for term in backward["terms"])


def _is_weighed(term: dict[str, Any]) -> bool:
    """True where the script gives the units of one call different weights."""
    is_uneven = term["low"] is not None and term["seed"] > term["low"] * (1 + max(BOUND, 4 * term["eps"]))
    return is_uneven or (term["divisors"] is not None and Path(term["divisors"]).is_bent)


def _parts(
    about: dict[str, Any], backward: dict[str, Any], scale: float, times: Counter[int], weighed: set[Site]
) -> Iterable[Part]:
    calls, terms = Counter[Site](), backward["terms"]
    own = [_unscaled(path, scale) for path in backward["own"]]
    num_added = max((sum(how == "add" for how, *_ in term["divisors"] or ()) for term in terms), default=0)
    for term in terms:
        num, site = times.pop(id(term), 0), tuple(term["site"])
        if not num:
            continue  # of a graph that another backward went through too
        calls[site] += 1
        path = None if term["divisors"] is None else _unscaled(term["divisors"], scale)
        is_rooted = any(how == OWN for how, *_ in path or ())
        if is_rooted or site in weighed:
            own.append(path or Path())
        if site not in weighed:
            known = {"total": num * term["seed"] / scale * (1 if term["reduction"] in MEANS else term["count"])}
            known |= {"num_addends": (num_added + 1) * (num_added >= len(terms)), "is_rooted": is_rooted, "path": path}
            intent = None if path is None else path.intent(term["count"])
            yield Part(**about, site=site, call=calls[site], term=term, intent=intent, **known)
    if own or not terms:
        path = (own or [Path()])[0]
        term = {"reduction": "mean", "count": 1, "rows": 1, "eps": 0.0}
        known = {"path": path, "addends": own, "total": path.at_root}
        yield Part(**about, site=(about["line"], OWN, ""), call=1, term=term, **known)


def _unscaled(path: Steps, scale: float) -> Path:
    return Path(step for step in path if step[:2] != ("mul", scale))


def _multiplied_by_counts(parts: Sequence[Part]) -> set[Site]:
    """Criterions whose losses are multiplied by their counts, which no script intends as a weight."""
    by_site: dict[Site, list[tuple[float, float]]] = defaultdict(list)
    for part in parts:
        if part.path is not None and part.term["count"] and part.term["reduction"] in MEANS and not part.is_own:
            by_site[part.site].append((part.term["count"], Path(part.path).coefficient))
    return {
        site
        for site, known in by_site.items()
        if not are_equal(count for count, _ in known) and are_equal(factor / count for count, factor in known)
    }


def _micro_batches(updates: Mapping[int, Sequence[Part]]) -> dict[int, int]:
    of_each = {}
    for by_backward in (True, False):
        for index, parts in updates.items():
            ranks = {(part.rank, part.backward if by_backward else id(part)) for part in parts}
            of_each[index] = max(Counter(rank for rank, _ in ranks).values())
        if {*of_each.values()} != {1}:
            break
    return of_each


def _in_common(lines: Sequence[Criterion]) -> Sequence[Criterion]:
    every = {index for line in lines for index in line.updates}
    means = (
        (are_equal((*totals.values(), 1.0)) for totals in (line.totals, line.accumulated) if totals) for line in lines
    )
    if all(map(any, means)) and all(every == line.updates.keys() for line in lines):
        return lines  # each is a whole mean by itself
    merged: list[list[Part]] = []
    for line in lines:
        group = next((group for group in merged if _take_turns(group, line.parts)), None)
        if group is None:
            merged.append([*line.parts])
        else:
            group += line.parts
    return [Criterion(lines[0].run, lines[0].place, group) for group in merged]


def _take_turns(some: Sequence[Part], others: Sequence[Part]) -> bool:
    """True if no micro-batch has both lines."""
    loaders, other_loaders = ({part.batch[0] for part in parts} for parts in (some, others))
    if 0 not in loaders | other_loaders:
        batches, other_batches = ({(part.rank, part.batch) for part in parts} for parts in (some, others))
        return loaders == other_loaders and batches.isdisjoint(other_batches)
    numbers, other_numbers = (Counter((part.index, part.rank) for part in parts) for parts in (some, others))
    return numbers != other_numbers
