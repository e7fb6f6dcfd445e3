"""Weights: a backward gives each unit (a sample, a token) what the script intends times what accumulation did.

What is intended is taken from the graph: coefficients, and weights of the script's own. The rest, which are divisors,
counts and ranks, is judged: it must be equal for all units of an update, and add up to one mean in each update.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..law import plural
from .criterions import BY_CLASS
from .private import OWN
from .reckoning import Fault, Key, Reckoning

BOUND = 1e-3  # between equal weights
MEANS = ("mean", "batchmean")
COUNTS = {  # cures, by the unit of a mean
    "tokens": 'Accumulator(..., count=count_tokens("labels")), window.backward(mean)',
    "samples": "Accumulator(...), which counts samples, window.backward(mean)",
    "class weights": "Accumulator(..., count=...), a function that adds up those of a batch, window.backward(mean)",
    "elements": "Accumulator(..., count=...), a function that counts a batch's elements, window.backward(mean)",
}
CONTRAST = "Accumulator(...).contrast(batch, encode, loss_fn)"
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
    total: float  # the weight of all its units together
    intent: float | None  # by what the script multiplies; None where nobody looked
    addends: int = 0  # of which the loss is a sum, where the audit does not know all of them
    is_rooted: bool = False  # its loss goes through more than what scales and adds up

    @property
    def path(self) -> Path | None:
        path: Path | None = self.term["divisors"]
        return path

    @property
    def is_own(self) -> bool:
        return self.site[1] == OWN

    def each(self, rule: str) -> float:
        """The weight of a unit, as one of RULES looks at it."""
        by_row, is_intended = rule.startswith("row"), rule.endswith("intended")
        units = self.term["rows"] if by_row else self.term["count"]
        return self.total / units / ((is_intended and self.intent) or 1.0) if units else 0.0


AllParts = dict[int, list[Part]]  # by optimizer
RULES = ("", "intended", "row", "row, intended")  # any may show that all weights are equal


@dataclass
class Criterion:
    """The calls of one function with one reduction on one optimizer's graph, wherever their lines are."""

    place: int
    parts: list[Part]
    updates: dict[int, list[Part]]

    @classmethod
    def of(cls, place: int, parts: Iterable[Part]) -> Criterion:
        by_update: dict[int, list[Part]] = defaultdict(list)
        every = sorted(parts, key=lambda part: (part.index, part.rank, part.backward))
        for part in every:
            by_update[part.index].append(part)
        return cls(place, every, dict(by_update))

    @property
    def name(self) -> str:
        return self.parts[0].site[1]

    @property
    def is_rooted(self) -> bool:
        return any(part.is_rooted for part in self.parts)

    @property
    def is_sum(self) -> bool:
        return self.parts[0].term["reduction"] not in MEANS

    @property
    def where(self) -> str:
        return self.parts[0].site[0]

    def lengths(self) -> dict[int, int]:
        """How many micro-batches each update has: backwards, or calls where there is one backward."""
        calls = {index: _most(part.rank for part in parts) for index, parts in self.updates.items()}
        backwards = {
            index: _most(rank for rank, _ in {(part.rank, part.backward) for part in parts})
            for index, parts in self.updates.items()
        }
        return calls if set(backwards.values()) == {1} else backwards

    def is_constant(self, factors: Mapping[int, float]) -> bool:
        """True if a constant divides it, or nothing: all units of all updates weigh the same."""
        low, high = _ends(part.each("") * factors.get(part.index, 1.0) for part in self.parts if part.total)
        return _is(low, high)

    def totals(self, factors: Mapping[int, float], usual: float, ranks: int, rule: str = "") -> dict[int, float]:
        """What all units of an update weigh together, in the gradient that is used."""
        return {
            index: sum(part.total / (part.intent or 1.0 if rule else 1.0) for part in parts)
            / ranks
            * factors.get(index, usual)
            for index, parts in self.updates.items()
        }


def _most(values: Iterable[Any]) -> int:
    return max(Counter(values).values())


# From what was seen to criterions


def parts_of(updates: Updates) -> AllParts:
    """The parts to judge, by optimizer."""
    every: dict[int, list[Part]] = defaultdict(list)
    rooted = _rooted(updates)
    for (place, index), ranks in updates.items():
        for rank, update in enumerate(ranks):
            times = Counter(id(term) for backward in update["backwards"] for term in backward["terms"])
            for order, backward in enumerate(update["backwards"]):
                calls: Counter[Any] = Counter()
                about = {"index": index, "rank": rank, "backward": order, "line": backward["line"]}
                about["batch"] = tuple(backward["batch"])
                own = [*backward["own"]]
                adds = max(
                    (sum(how == "add" for how, _ in term["divisors"] or ()) for term in backward["terms"]), default=0
                )
                for term in backward["terms"]:
                    num = times.pop(id(term), 0)
                    if not num:
                        continue  # of a graph that another backward went through too
                    site = tuple(term["site"])
                    calls[site] += 1
                    path = term["divisors"] and [one for one in term["divisors"] if one != ("mul", update["scale"])]
                    if _is_weighed(term) or (place, site) in rooted:
                        own.append(path or [])
                    if _is_weighed(term):
                        continue
                    total = num * term["seed"] / update["scale"] * (1 if term["reduction"] in MEANS else term["count"])
                    intent = None if path is None else _intent(path, term["count"])
                    addends = (adds + 1) * (adds >= len(backward["terms"]))
                    known = {
                        "term": {**term, "divisors": path},
                        "is_rooted": (place, site) in rooted,
                        "addends": addends,
                    }
                    every[place].append(Part(**about, **known, site=site, call=calls[site], total=total, intent=intent))
                if own or not backward["terms"]:
                    path = [one for one in (own or [[]])[0] if one != ("mul", update["scale"])]
                    total, site = _leading(path), (backward["line"], OWN, "")
                    term = {"reduction": "mean", "count": 1, "rows": 1, "divisors": path, "eps": 0.0}
                    every[place].append(Part(**about, site=site, call=1, term=term, total=total, intent=None))
    return every


def _rooted(updates: Updates) -> set[Any]:
    """Criterions whose loss goes through more than what scales and adds up, such as a root."""
    return {
        (place, tuple(term["site"]))
        for (place, _), ranks in updates.items()
        for update in ranks
        for backward in update["backwards"]
        for term in backward["terms"]
        if any(how == OWN for how, _ in term["divisors"] or ())
    }


def _is_weighed(term: dict[str, Any]) -> bool:
    """True if the script gives the units of one call different weights."""
    return term["low"] is not None and term["seed"] > term["low"] * (1 + max(BOUND, 4 * term["eps"]))


def _leading(path: Path) -> float:
    """The product of what divides and multiplies a loss at its root."""
    product = 1.0
    for how, value in path:
        if how not in ("div", "mul", "add") or (how != "add" and not value):
            break
        if how != "add":
            product *= 1 / abs(value) if how == "div" else abs(value)
    return product


def _intent(path: Path, count: float) -> float:
    """The product of what the script multiplies by, and divides by unless that is a count."""
    others = (value for how, value in path if how == "div" and value and value % 1 and not _is(value, count))
    product = math.prod(abs(value or 1.0) for how, value in path if how.startswith("mul"))
    return float(product / math.prod(map(abs, others)))


def criterions_of(parts: AllParts, by_call: bool) -> list[Criterion]:
    """Puts lines together that take turns, as `if last:` and `else:` do; several in one micro-batch are tasks."""
    found = []
    for place, every in parts.items():
        groups: dict[Any, dict[Any, list[Part]]] = defaultdict(lambda: defaultdict(list))
        for part in every:
            line, name, inner = part.site
            key = name, part.term["reduction"] in MEANS, part.term["reduction"], part.call if by_call else 0
            groups[key][line, inner].append(part)
        for by_line in groups.values():
            found += [Criterion.of(place, parts) for parts in _merged(place, list(by_line.values()))]
    return found


def _merged(place: int, lines: list[list[Part]]) -> list[list[Part]]:
    apart = [Criterion.of(place, line) for line in lines]
    indices = {index for line in apart for index in line.updates}
    ranks = 1 + max(part.rank for line in lines for part in line)
    if all(
        indices == line.updates.keys()
        and any(
            all(_is(total, 1.0) for total in line.totals({}, 1.0, ranks, rule).values()) for rule in ("", "intended")
        )
        for line in apart
    ):
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
    batches = [{(part.rank, part.batch) for part in parts} for parts in (some, others)]
    loaders = [{part.batch[0] for part in parts} for parts in (some, others)]
    if all(0 not in each for each in loaders):
        return loaders[0] == loaders[1] and batches[0].isdisjoint(batches[1])
    numbers = [Counter((part.index, part.rank) for part in parts) for parts in (some, others)]
    return numbers[0] != numbers[1]


# Within an update


def within_updates(parts: AllParts, ranks: int, notes: list[str], unjudged: list[str]) -> list[Fault]:
    """Finds units of an update that weigh differently, by no factor of the script."""
    faults, own, intended = [], _by_script(criterions_of(parts, by_call=False)), defaultdict[str, list[float]](list)
    for one in criterions_of(parts, by_call=True):
        if one.name == OWN or one.is_rooted:
            continue
        if empty := sum(not part.term["count"] and part.term["reduction"] == "mean" for part in one.parts):
            text = f"no token counts in {empty} micro-batches, and the mean over none is NaN"
            faults.append(Fault("nan", one.where, text, "sum the loss, and divide it by the window's number of tokens"))
        spread, is_ranks = dict[int, tuple[float, float]](), ranks > 1
        for index, every in one.updates.items():
            counted = [part for part in every if part.total and part.term["count"]]
            if any((one.place, part.site, index) in own for part in counted):
                unjudged.append(f"the weights in {one.where}, which the script gives to samples itself")
                continue
            rule = _even(counted, one.name)
            if rule is not None:
                if rule.endswith("intended"):
                    intended[one.where] += [part.intent or 1.0 for part in counted]
                continue
            rule = "intended" if all(part.intent for part in counted) and _varies(counted) else ""
            low, high = spread[index] = _ends(part.each(rule) for part in counted)
            by_rank = [_ends(part.each(rule) for part in counted if part.rank == rank) for rank in range(ranks)]
            is_ranks &= all(high <= low * (1 + _bound(counted)) for low, high in by_rank)
        if not spread:
            continue
        index = max(spread, key=lambda one: spread[one][1] / spread[one][0])
        (low, high), unit = spread[index], _unit(one.parts)
        text = (
            f"{unit} of different {'ranks' if is_ranks else 'micro-batches'} weigh {low:.3g} to {high:.3g} "
            f"({high / low:.3g} to 1) in update {index}; so in {len(spread)} of {len(one.updates)} updates"
        )
        hand = f"sum the loss, and divide it by the {unit} of the whole window"
        hand += " on all ranks, times the number of ranks where the wrapper averages" if ranks > 1 else ""
        faults.append(Fault("weights", one.where, text, hand, COUNTS[unit]))
    for line, factors in intended.items():
        low, high = _ends(factors)
        notes.append(f"{line}: taken as intended: the factors {low:.3g} to {high:.3g} of micro-batches")
    return faults


def _bound(parts: Iterable[Part]) -> float:
    return max([BOUND, *(4 * float(part.term["eps"]) for part in parts)])


def _even(parts: Sequence[Part], name: str) -> str | None:
    """The first rule by which all of these weigh alike."""
    for rule in RULES:
        if rule.startswith("row") and name in BY_CLASS:
            break
        if rule.endswith("intended") and not all(part.intent for part in parts):
            continue
        low, high = _ends(part.each(rule) for part in parts)
        if high <= low * (1 + _bound(parts)):
            return rule
    return None


def _varies(parts: Sequence[Part]) -> bool:
    low, high = _ends(part.intent or 1.0 for part in parts)
    return high > low * (1 + BOUND)


def _by_script(coarse: Sequence[Criterion]) -> set[tuple[Any, ...]]:
    """Lines, each in an update, where calls of one backward weigh differently, as in losses that are means by sample."""
    own = set[tuple[Any, ...]]()
    for one in coarse:
        calls: dict[Any, list[Part]] = defaultdict(list)
        for part in (part for part in one.parts if part.term["count"] and not part.is_own):
            calls[part.index, part.rank, part.backward, part.site].append(part)
        own |= {(one.place, key[-1], key[0]) for key, parts in calls.items() if _even(parts, one.name) is None}
    return own


def _unit(parts: Sequence[Part]) -> str:
    terms = [part.term for part in parts]
    units = {"tokens" if one["unit"] == "samples" and one["count"] != one["rows"] else one["unit"] for one in terms}
    return units.pop() if len(units) == 1 else "tokens"


def _ends(values: Iterable[float]) -> tuple[float, float]:
    every = list(values)
    return (min(every), max(every)) if every else (0.0, 0.0)


def _is(value: float, other: float) -> bool:
    return abs(value - other) <= 5e-3 * abs(other)


# From one update to another


def among_updates(
    parts: AllParts, updates: Updates, reckoned: Mapping[Key, Reckoning], notes: list[str], unjudged: list[str]
) -> list[Fault]:
    """Finds updates that weigh less or more than others, or whose usual weight is not that of a mean."""
    criterions = criterions_of(parts, by_call=True)
    history = History(updates, reckoned, criterions, _sums(parts))
    undivided, faults = set[int](), []
    for one in criterions:
        fault = None if one.name == OWN else _level(one, history, notes, [] if one.is_rooted else unjudged)
        if fault is not None:
            faults.append(fault)
            undivided |= {one.place} if fault.kind == "undivisor" else set()
    short: dict[int, Fault] = {}
    for one in criterions_of(parts, by_call=False):
        if (
            one.place not in undivided
            and (fault := _short(one, history, notes, [] if one.is_rooted else unjudged)) is not None
        ):
            short.setdefault(one.place, fault)
    return [*short.values(), *(one._replace(kind=one.kind.removeprefix("un")) for one in faults)]


def _sums(parts: AllParts) -> dict[Key, Counter[int]]:
    """The sum of what flows into all criterions of an update, by rank."""
    sums: dict[Key, Counter[int]] = defaultdict(Counter)
    for place, every in parts.items():
        for part in (part for part in every if not part.is_own):
            sums[place, part.index][part.rank] += part.total
    return sums


def is_one_mean(parts: AllParts, factors: Mapping[Key, Sequence[float]]) -> bool:
    """True if samples of all ranks weigh as one mean, given each rank's factor of each update."""
    sums = [(by_rank, factors[key]) for key, by_rank in _sums(parts).items() if key in factors]
    return bool(sums) and all(_is(sum(one[rank] * each[rank] for rank in one), 1.0) for one, each in sums)


@dataclass
class History:
    """What happened in each update around its weights."""

    updates: Updates
    reckoned: Mapping[Key, Reckoning]
    criterions: Sequence[Criterion]
    sums: Mapping[Key, Counter[int]]

    @property
    def ranks(self) -> int:
        return len(next(iter(self.updates.values()), ()))

    def factors(self, place: int) -> dict[int, float]:
        """What the gradients that were used are of those that backward gave, by update."""
        known = ((index, one.factor) for (owner, index), one in self.reckoned.items() if owner == place)
        return {index: factor for index, factor in known if factor is not None}

    def is_skipping(self, one: Criterion, index: int, length: int, common: int) -> bool:
        """True where the script leaves out a micro-batch now and then, or changes gradients unseen."""
        ranks = self.updates[one.place, index]
        sites = {part.site for part in one.parts}
        unused = any(each["unused"].get(site) for each in ranks for site in sites)
        changed = any(each["changed"] for each in ranks) and index not in self.factors(one.place)
        return unused or changed or length < common == self._num_drawn(one.place, index)

    def _num_drawn(self, place: int, index: int) -> int:
        """The number of micro-batches that the loader gave since the previous update."""
        if (place, index - 1) not in self.updates:
            return 0
        now, before = (self.updates[place, i][0]["backwards"][-1]["batch"] for i in (index, index - 1))
        return int(now[1] - before[1]) * (now[0] == before[0])

    def carried(self, place: int, index: int) -> int:
        """How many micro-batches of an update a loader gave before it ended."""
        update = self.updates[place, index][0]
        ends = [before for kind, _, before, _ in update["events"] if kind == "ended"]
        return max((before for before in ends if before < len(update["backwards"])), default=0)


def _short(one: Criterion, history: History, notes: list[str], unjudged: list[str]) -> Fault | None:
    """Finds updates that weigh as many micro-batches as they have, where others weigh as one mean."""
    factors = history.factors(one.place)
    usual_factor = statistics.median(factors.values()) if factors else 1.0
    lengths, every = one.lengths(), [part for part in one.parts if part.total]
    common = Counter(lengths.values()).most_common(1)[0][0]
    if not every:
        return None
    if one.is_sum and one.is_constant(factors):
        return None
    worst = dict[int, float]()
    for rule in ("", "intended"):
        totals = one.totals(factors, usual_factor, history.ranks, rule)
        level = statistics.median(totals[index] for index in totals if lengths[index] == common)
        weights = {
            index: total / level
            for index, total in totals.items()
            if level and not history.is_skipping(one, index, lengths[index], common)
        }
        odd = {index: weight for index, weight in weights.items() if not _is(weight, 1.0)}
        if not odd:
            if rule and not worst:
                return None
            if rule:
                low, high = _ends(worst.values())
                notes.append(
                    f"{one.where}: updates weigh {low:.3g} to {high:.3g} of the usual, by a factor of the script"
                )
            return None
        if one.name == OWN and (not _is(level, 1.0) or any(not _is(part.total, every[0].total) for part in every)):
            return None  # not the division by a window's length
        if all(lengths[index] != common and _is(weight, lengths[index] / common) for index, weight in odd.items()):
            return _window(one, history, lengths, common, odd)
        worst = odd
    low, high = _ends(worst.values())
    if one.name != OWN:
        unjudged.append(f"updates, which weigh {low:.3g} to {high:.3g} of the usual in {one.where}")
    return None


def _window(one: Criterion, history: History, lengths: dict[int, int], common: int, odd: dict[int, float]) -> Fault:
    index = max(odd, key=lambda index: abs(math.log(odd[index])))
    length, last = lengths[index], one.updates[index][-1]
    text = (
        f"update {index} has {plural(length, 'micro-batch')}, and weighs {odd[index]:.3g} of the others, which have "
        f"{common}; so {len(odd)} of {len(lengths)} updates"
    )
    hand = "divide by the number of micro-batches of this window; an epoch's last has fewer"
    if lengths.get(0) == 1 < common and 0 in odd:
        text += f". It steps after the 1st, {common + 1}th, {2 * common + 1}th ..., as `step % {common} == 0` does"
        hand = f"step where (step + 1) % {common} == 0, and at an epoch's end, where the divisor is what is left"
    elif length > common and (carried := history.carried(one.place, index)):
        text += f". {plural(carried, 'micro-batch')} of the epoch before {'is' if carried == 1 else 'are'} in it"
        hand = "step at an epoch's end too, and divide by the number of micro-batches that there are"
    others = {part.site[0] for part in one.parts} - {last.site[0]}
    also = [f"backward: line {_number(last.line)}"] * (last.line != last.site[0]) + [
        f"also line {_number(x)}" for x in others
    ]
    return Fault("window", last.site[0], text + f" ({', '.join(also)})" * bool(also), hand)


def _number(line: str) -> str:
    return line.rpartition(":")[2]


def _level(one: Criterion, history: History, notes: list[str], unjudged: list[str]) -> Fault | None:
    """Finds a usual weight that is not that of a mean, and no coefficient."""
    place, ranks, lengths = one.place, history.ranks, one.lengths()
    known = [history.reckoned[place, index] for index in one.updates if (place, index) in history.reckoned]
    factors = {index: factor for index, factor in history.factors(place).items() if index in one.updates}
    factor = statistics.median(factors.values()) if factors else None
    totals = one.totals(factors, factor or 1.0, ranks)
    common = Counter(lengths.values()).most_common(1)[0][0]
    usual = [index for index in totals if lengths[index] == common]
    level, every = statistics.median(totals[index] for index in usual), [part for part in one.parts if part.total]
    if not level or not every:
        return None
    if given := [index for index, parts in one.updates.items() if any(map(_is_sum_for_mean, parts))]:
        return _sum_for_mean(one.where, totals, given)
    low, high = _ends(part.each("") for part in every)
    is_constant = one.is_sum and _is(low, high) and one.is_constant(factors)
    if is_constant and factor is not None and common > 1 and _is(low * factor, 1.0):
        return _undivided(one.where, [*totals.values()])
    if not all(_is(totals[index], level) for index in usual):
        return None
    intended = one.totals(factors, factor or 1.0, ranks, "intended")
    whole = all(_is(history.sums[place, index].total() / ranks * factors.get(index, 1.0), 1.0) for index in usual)
    paths = [part.path for part in every if part.path is not None]
    if _is(level, 1.0) or whole or any(reckoning.is_tasks for reckoning in known):
        return None  # together they are one mean, or tasks of the same samples
    if sum(_is_same(one.updates[index]) for index in usual) * 2 > len(usual):  # pairs, or tasks of the same samples
        return _shared(one, history, usual[0], common)
    # Stages of a pipeline, or targets that show no different samples: all real, then all fake
    is_alike = len({part.rank for part in every}) < ranks or all(
        part.term["rows"] > 1 and not part.term["print"] for part in every
    )
    others = [other for other in history.criterions if other.place == place and other.name != OWN]
    alike = level * sum(usual[0] in other.updates for other in others)
    is_part = not _is(history.sums[place, usual[0]].total() / ranks * factors.get(usual[0], factor or 1.0), alike)
    is_part |= any(part.addends in (common, ranks) for part in every)
    why = None
    if factor is not None and paths and not is_alike:
        why = _why(level, factor, common, ranks, one.name if one.is_sum else "mean", paths[0], is_part)
    if why and why[1] == f"loss / {common}":
        every_update = [history.updates[place, index][0] for index in usual]
        if all(update["recurs"] for update in every_update):
            notes.append(
                f"{one.where}: adds up {common} backwards, as steps in time; divide by {common} if they are not"
            )
            return None
        clips = any(kind == "clip" for update in every_update for kind, *_ in update["events"])
        if all(update["linear"] for update in every_update) and len(set(lengths.values())) == 1 and not clips:
            unjudged.append(f"{one.where}: {why[0]}, as {common} times the learning rate would; {why[1]}, if it is not")
            return None
    if why:
        kind = "undivisor" if why[1] == f"loss / {common}" else "divisor"
        return Fault(kind, one.where, f"{why[0]}: the gradient is {level:.4g} times that of the mean", why[1])
    if not is_constant and not all(_is(intended[index], 1.0) for index in usual):
        unjudged.append(
            f"{one.where}: the gradient is {level:.4g} times that of the mean; right if that is a coefficient"
        )
    return None


def _shared(one: Criterion, history: History, index: int, common: int) -> Fault | None:
    reckoning, parts = history.reckoned.get((one.place, index)), one.updates[index]
    if reckoning is None or not reckoning.shared or any(p.term["print"] != parts[0].term["print"] for p in parts):
        return None
    text = f"{reckoning.shared} gets the same gradient from each of {common} backwards of the same samples"
    return Fault("shared", one.where, text, f"divide its gradient by {common} before the step", CONTRAST)


def _sum_for_mean(line: str, totals: Mapping[int, float], given: Sequence[int]) -> Fault:
    text = (
        f"a sum goes into window.backward(), which expects a mean: the gradient is {totals[given[0]]:.4g} times that "
        f"of the mean in update {given[0]}; so {len(given)} of {len(totals)} updates"
    )
    hand = "give it the mean, or the Accumulator reduction='sum_to_mean'"
    return Fault("divisor", line, text, hand, 'Accumulator(..., reduction="sum_to_mean")')


def _is_sum_for_mean(part: Part) -> bool:
    """True for an undivided sum over what the window counts, if the window expects a mean."""
    term = part.term
    is_whole = term["reduction"] == "sum" and term["divisors"] == [] and term["count"] == term["expected"]
    return is_whole and bool(term["count"] > 1)


def _undivided(line: str, totals: Sequence[float]) -> Fault | None:
    if 2 * max(sum(_is(one, other) for one in totals) for other in totals) > len(totals):
        return None  # the sum is intended, with a short last micro-batch
    text = f"nothing divides this sum: updates weigh {min(totals):.4g} to {max(totals):.4g}, as their tokens do"
    return Fault("divisor", line, text, "divide by the window's number of tokens on all ranks")


def _is_same(parts: Sequence[Part]) -> bool:
    """True if most of these have the same targets as another."""
    prints = {(part.rank, part.term["print"]) for part in parts if part.term["print"]}
    return len(prints) * 2 <= sum(bool(part.term["print"]) for part in parts) > 0


def without_backward(parts: AllParts, updates: Updates) -> list[Fault]:
    """Finds losses without a backward that still count in the divisor of the others."""
    faults = []
    for one in criterions_of(parts, by_call=True):
        site, place = one.parts[0].site, one.place
        lost = {index: sum(update["unused"].get(site, 0) for update in updates[place, index]) for index in one.updates}
        shares = {i: len(one.updates[i]) / (len(one.updates[i]) + num) for i, num in lost.items() if num}
        if (
            not one.is_sum
            and 3 * len(shares) > len(one.updates) > 3
            and all(_is(sum(part.total for part in one.updates[i]), share) for i, share in shares.items())
        ):
            index = min(shares, key=lambda i: shares[i])
            text = (
                f"no backward follows {sum(lost.values())} losses, which count as micro-batches: update {index} weighs "
                f"{shares[index]:.3g}; so {len(shares)} of {len(one.updates)} updates"
            )
            hand = "call backward on each loss, and clear after the step alone"
            faults.append(Fault("unused", one.where, text, hand))
    return faults


def _why(
    level: float, factor: float, steps: int, ranks: int, what: str, path: Path, is_part: bool
) -> tuple[str, str] | None:
    """Says what is divided too often or too rarely, with the cure.

    `path` leads from the loss to its criterion; of several that weigh differently each `is_part`, with a coefficient.
    """
    path = [one for one in path if one[0] != "add"]
    plain = [value for how, value in path if how == "div" and value is not None]
    by_ranks = [value for how, value in path if how == "mul" and value is not None and _is(value, ranks)]
    by_steps = sum(_is(value, steps) for value in plain)
    # One of two divisions may be a coefficient
    by_each = steps > 1 and not is_part and (by_steps > (what == "mean") or (steps > 2 and 0 < by_steps == len(path)))
    is_known = ranks > 1 and len(plain) == len(path) and not is_part
    by_all = what in BY_CLASS or any(_is(one, ranks) or _is(one, ranks * steps) for one in plain)
    are_added = ranks > 1 and _is(factor, ranks) and len(plain) + len(by_ranks) == len(path)
    added, averages = "the ranks are added up, not averaged", ", since the wrapper averages" * _is(factor, 1.0)
    none, each = f"nothing divides by the {steps} micro-batches", f"the {steps} micro-batches divide"
    causes = [  # whether it is possible, the weight that it would give, its text and its cure
        (are_added, ranks, added, f"divide by {ranks}"),
        (steps > 1 and not path, steps, none, f"loss / {steps}"),
        (by_each and what != "mean", 1 / steps, f"{each} what their tokens divide already", "leave one division out"),
        (by_each, 1 / steps, f"{each} twice", "divide once: here, or in the library that does so too"),
        (is_known and by_all, 1 / ranks, f"the {ranks} ranks divide twice{averages}", f"multiply by {ranks}"),
        (is_known, ranks, added, f"divide by {ranks}"),
    ]
    return next(((text, hand) for can_be, weight, text, hand in causes if can_be and _is(level, weight)), None)
