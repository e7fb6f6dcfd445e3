"""Parts: what each backward gives to a criterion's units (samples, tokens), and which lines are one criterion."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .private import OWN
from .reckoning import Key

BOUND = 1e-3  # between equal weights
MEANS = ("mean", "batchmean")
RULES = ("", "intended", "row", "row, intended")  # how units may be weighed, so that all are equal
Updates = Mapping[Key, Sequence[dict[str, Any]]]  # by rank
Path = Sequence[tuple[str, Any]]


@dataclass(frozen=True, eq=False)
class Part:
    """One call of a criterion, as a backward went through it; of a loss of the script's own, one for a backward."""

    index: int  # of its update
    rank: int
    backward: int  # its place in the update
    line: str  # of the backward
    batch: tuple[int, int, int]  # a loader, the number of its batch, and how many passes over loaders had ended
    site: tuple[str, str, str]  # line, function, inner line
    call: int  # how many of this site the backward has had
    term: dict[str, Any]
    path: Path | None  # by what its loss is divided and multiplied, from the root on; None where nobody looked
    total: float  # the weight of all its units together
    intent: float | None = None  # by what the script multiplies
    addends: int = 0  # of which the loss is a sum, where the audit does not know all of them
    is_rooted: bool = False  # its loss goes through more than what scales and adds up

    @property
    def is_own(self) -> bool:
        return self.site[1] == OWN

    def each(self, rule: str = "") -> float:
        """The weight of a unit, as one of RULES looks at it."""
        units = self.term["rows"] if rule.startswith("row") else self.term["count"]
        return self.total / units / ((rule.endswith("intended") and self.intent) or 1.0) if units else 0.0


AllParts = dict[int, list[Part]]  # by optimizer


@dataclass
class Criterion:
    """The calls of one function with one reduction on one optimizer's graph, wherever their lines are."""

    place: int
    parts: list[Part]

    def __post_init__(self) -> None:
        self.parts = sorted(self.parts, key=lambda part: (part.index, part.rank, part.backward))
        self.updates: dict[int, list[Part]] = defaultdict(list)
        for part in self.parts:
            self.updates[part.index].append(part)
        (self.where, self.name, _), self.is_sum = self.parts[0].site, self.parts[0].term["reduction"] not in MEANS
        self.is_own, self.is_rooted = self.name == OWN, any(part.is_rooted for part in self.parts)

    def lengths(self) -> dict[int, int]:
        """How many micro-batches each update has: backwards, or calls where there is one backward."""
        of_each = {}
        for by_backward in (True, False):
            for index, parts in self.updates.items():
                ranks = {(part.rank, part.backward if by_backward else id(part)) for part in parts}
                of_each[index] = max(Counter(rank for rank, _ in ranks).values())
            if set(of_each.values()) != {1}:
                break
        return of_each

    def is_constant(self, factors: Mapping[int, float]) -> bool:
        """True for a sum that a constant divides, or nothing: all units of all updates weigh the same."""
        return self.is_sum and are_equal(
            part.each() * factors.get(part.index, 1.0) for part in self.parts if part.total
        )

    def totals(self, factors: Mapping[int, float], usual: float, ranks: int, rule: str = "") -> dict[int, float]:
        """The weight of all units of an update together, in the gradient that is used."""
        sums = {
            index: sum(part.total / ((rule and part.intent) or 1.0) for part in parts)
            for index, parts in self.updates.items()
        }
        return {index: total / ranks * factors.get(index, usual) for index, total in sums.items()}


def ends(values: Iterable[float]) -> tuple[float, float]:
    every = list(values)
    return (min(every), max(every)) if every else (0.0, 0.0)


def is_equal(value: float, other: float) -> bool:
    return abs(value - other) <= 5e-3 * abs(other)


def are_equal(values: Iterable[float]) -> bool:
    return is_equal(*ends(values))


def parts_of(updates: Updates) -> AllParts:
    """The parts to judge, by optimizer."""
    every: AllParts = defaultdict(list)
    for (place, index), ranks in updates.items():
        for rank, update in enumerate(ranks):
            times = Counter(id(term) for backward in update["backwards"] for term in backward["terms"])
            for i, backward in enumerate(update["backwards"]):
                about = {"index": index, "rank": rank, "backward": i, "line": backward["line"]}
                about["batch"] = tuple(backward["batch"])
                every[place] += _parts(about, backward, update["scale"], times)
    for place, parts in every.items():  # of later updates nobody may have looked at the graph
        rooted = {part.site for part in parts if part.is_rooted}
        every[place] = [replace(part, is_rooted=part.site in rooted) for part in parts]
    return every


def _parts(about: dict[str, Any], backward: dict[str, Any], scale: float, times: Counter[int]) -> Iterable[Part]:
    calls, own, terms = Counter[Any](), [*backward["own"]], backward["terms"]
    adds = max((sum(how == "add" for how, _ in term["divisors"] or ()) for term in terms), default=0)
    for term in terms:
        num, site = times.pop(id(term), 0), tuple(term["site"])
        if not num:
            continue  # of a graph that another backward went through too
        calls[site] += 1
        path = term["divisors"] and [factor for factor in term["divisors"] if factor != ("mul", scale)]
        is_rooted = any(how == OWN for how, _ in path or ())
        # The script may give the units of one call different weights.
        is_weighed = term["low"] is not None and term["seed"] > term["low"] * (1 + max(BOUND, 4 * term["eps"]))
        own += [path or []] * (is_rooted or is_weighed)
        if not is_weighed:
            total = num * term["seed"] / scale * (1 if term["reduction"] in MEANS else term["count"])
            intent = None if path is None else _intent(path, term["count"])
            known = {"call": calls[site], "term": term, "path": path, "total": total, "intent": intent}
            yield Part(**about, site=site, **known, addends=(adds + 1) * (adds >= len(terms)), is_rooted=is_rooted)
    if own or not terms:
        path = [factor for factor in (own or [[]])[0] if factor != ("mul", scale)]
        term = {"reduction": "mean", "count": 1, "rows": 1, "eps": 0.0}
        yield Part(**about, site=(about["line"], OWN, ""), call=1, term=term, path=path, total=_leading(path))


def _leading(path: Path) -> float:
    """The product of what divides and multiplies a loss at its root."""
    product = 1.0
    for how, value in path:
        if how not in ("div", "mul", "add") or (how != "add" and not value):
            break
        product *= 1.0 if how == "add" else 1 / abs(value) if how == "div" else abs(value)
    return product


def _intent(path: Path, count: float) -> float:
    """The product of what the script multiplies by, and divides by unless that is a count."""
    others = (value for how, value in path if how == "div" and value and value % 1 and not is_equal(value, count))
    product = math.prod(abs(value or 1.0) for how, value in path if how.startswith("mul"))
    return float(product / math.prod(map(abs, others)))


def criterions_of(parts: AllParts, by_call: bool) -> list[Criterion]:
    """Puts lines together that take turns, as `if last:` and `else:` do; several in one micro-batch are tasks."""
    criterions = []
    for place, every in parts.items():
        groups: dict[Any, dict[Any, list[Part]]] = defaultdict(lambda: defaultdict(list))
        for part in every:
            line, name, inner = part.site
            groups[name, part.term["reduction"], part.call if by_call else 0][line, inner].append(part)
        for by_line in groups.values():
            criterions += [Criterion(place, merged) for merged in _in_common(place, [*by_line.values()])]
    return criterions


def _in_common(place: int, lines: list[list[Part]]) -> list[list[Part]]:
    apart = [Criterion(place, line) for line in lines]
    ranks = 1 + max(part.rank for line in lines for part in line)
    every = {index for line in apart for index in line.updates}
    totals = [[line.totals({}, 1.0, ranks, rule).values() for rule in RULES[:2]] for line in apart]
    is_whole = [any(all(is_equal(total, 1.0) for total in of_rule) for of_rule in of_line) for of_line in totals]
    if all(is_whole) and all(every == line.updates.keys() for line in apart):
        return lines  # each is a whole mean by itself
    merged: list[list[Part]] = []
    for line in lines:
        group = next((group for group in merged if _take_turns(group, line)), None)
        if group is None:
            merged.append([*line])
        else:
            group += line
    return merged


def _take_turns(some: Sequence[Part], others: Sequence[Part]) -> bool:
    """True if no micro-batch has both lines."""
    loaders, other_loaders = ({part.batch[0] for part in parts} for parts in (some, others))
    if 0 not in loaders | other_loaders:
        batches, other_batches = ({(part.rank, part.batch) for part in parts} for parts in (some, others))
        return loaders == other_loaders and batches.isdisjoint(other_batches)
    numbers, other_numbers = (Counter((part.index, part.rank) for part in parts) for parts in (some, others))
    return numbers != other_numbers
