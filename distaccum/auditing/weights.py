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
from .parts import BOUND, RULES, AllParts, Criterion, Part, Path, Updates, are_equal, criterions_of, ends, is_equal
from .reckoning import Fault, Key, Reckoning

COUNTS = {  # cures, by the unit of a mean
    "tokens": 'Accumulator(..., count=count_tokens("labels")), window.backward(mean)',
    "samples": "Accumulator(...), which counts samples, window.backward(mean)",
    "class weights": "Accumulator(..., count=...), a function that adds up those of a batch, window.backward(mean)",
    "elements": "Accumulator(..., count=...), a function that counts a batch's elements, window.backward(mean)",
}
UNDIVIDED = "loss / "  # how the cure of a missing division begins
Sums = dict[Key, dict[int, float]]  # by rank
CONTRAST = "Accumulator(...).contrast(batch, encode, loss_fn)"


def within_updates(parts: AllParts, ranks: int, notes: list[str], unjudged: list[str]) -> list[Fault]:
    """Finds units of an update that weigh differently, by no factor of the script."""
    faults, own, intended = [], _by_script(criterions_of(parts, by_call=False)), defaultdict[str, list[float]](list)
    for criterion in criterions_of(parts, by_call=True):
        if criterion.is_own or criterion.is_rooted:
            continue
        if empty := sum(not part.term["count"] and part.term["reduction"] == "mean" for part in criterion.parts):
            text = f"no token counts in {empty} micro-batches, and the mean over none is NaN"
            faults.append(
                Fault("nan", criterion.where, text, "sum the loss, and divide it by the window's number of tokens")
            )
        spread, is_ranks = dict[int, tuple[float, float]](), ranks > 1
        for index, every in criterion.updates.items():
            counted = [part for part in every if part.total and part.term["count"]]
            if any((criterion.place, part.site, index) in own for part in counted):
                unjudged.append(f"the weights in {criterion.where}, which the script gives to samples itself")
                continue
            rule, factors = _even(counted, criterion.name), [part.intent or 1.0 for part in counted]
            if rule is not None:
                intended[criterion.where] += factors * rule.endswith("intended")
                continue
            rule = "intended" if all(part.intent for part in counted) and not are_equal(factors) else ""
            low, high = spread[index] = ends(part.each(rule) for part in counted)
            by_rank = [ends(part.each(rule) for part in counted if part.rank == rank) for rank in range(ranks)]
            is_ranks &= all(high <= low * (1 + _bound(counted)) for low, high in by_rank)
        if not spread:
            continue
        index = max(spread, key=lambda i: spread[i][1] / spread[i][0])
        (low, high), unit = spread[index], _unit(criterion.parts)
        text = (
            f"{unit} of different {'ranks' if is_ranks else 'micro-batches'} weigh {low:.3g} to {high:.3g} "
            f"({high / low:.3g} to 1) in update {index}; so in {len(spread)} of {len(criterion.updates)} updates"
        )
        hand = f"sum the loss, and divide it by the {unit} of the whole window"
        hand += " on all ranks, times the number of ranks where the wrapper averages" if ranks > 1 else ""
        faults.append(Fault("weights", criterion.where, text, hand, COUNTS[unit]))
    for line, factors in ((line, factors) for line, factors in intended.items() if factors):
        low, high = ends(factors)
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
        low, high = ends(part.each(rule) for part in parts)
        if high <= low * (1 + _bound(parts)):
            return rule
    return None


def _by_script(coarse: Sequence[Criterion]) -> set[tuple[Any, ...]]:
    """Lines, each in an update, where calls of one backward weigh differently, as means by sample do."""
    calls: dict[Any, list[Part]] = defaultdict(list)
    for part, place in ((part, one.place) for one in coarse if not one.is_own for part in one.parts):
        if part.term["count"]:
            calls[part.rank, part.backward, place, part.site, part.index].append(part)
    return {key[2:] for key, parts in calls.items() if _even(parts, parts[0].site[1]) is None}


def _unit(parts: Sequence[Part]) -> str:
    terms = [part.term for part in parts]
    units = {"tokens" if one["unit"] == "samples" and one["count"] != one["rows"] else one["unit"] for one in terms}
    return units.pop() if len(units) == 1 else "tokens"


# From one update to another


def among_updates(
    parts: AllParts, updates: Updates, reckoned: Mapping[Key, Reckoning], notes: list[str], unjudged: list[str]
) -> list[Fault]:
    """Finds updates that weigh less or more than others, or whose usual weight is not that of a mean."""
    by_call = [criterion for criterion in criterions_of(parts, by_call=True) if not criterion.is_own]
    history = History(updates, reckoned, by_call, _sums(parts))
    levels = [(criterion.place, _level(history.usual(criterion), history, notes, unjudged)) for criterion in by_call]
    undivided = {place for place, fault in levels if fault is not None and fault.by_hand.startswith(UNDIVIDED)}
    short: dict[int, Fault] = {}  # criterion for an optimizer: its criterions have criterion cause
    for criterion in criterions_of(parts, by_call=False):
        if (
            criterion.place not in undivided
            and (fault := _short(history.usual(criterion), history, notes, unjudged)) is not None
        ):
            short.setdefault(criterion.place, fault)
    return [*short.values(), *(fault for _, fault in levels if fault is not None)]


def _sums(parts: AllParts) -> Sums:
    """The sum of what flows into all criterions of an update, by rank."""
    sums: Sums = defaultdict(lambda: defaultdict(float))
    for place, every in parts.items():
        for part in (part for part in every if not part.is_own):
            sums[place, part.index][part.rank] += part.total
    return sums


def is_one_mean(parts: AllParts, factors: Mapping[Key, Sequence[float]]) -> bool:
    """True if samples of all ranks weigh as one mean, given each rank's factor of each update."""
    sums = [(by_rank, factors[key]) for key, by_rank in _sums(parts).items() if key in factors]
    return bool(sums) and all(is_equal(sum(one[rank] * each[rank] for rank in one), 1.0) for one, each in sums)


class Usual:
    """A criterion's usual update: how many micro-batches it has (`common`), and what it weighs (`level`)."""

    def __init__(self, criterion: Criterion, factors: Mapping[int, float], ranks: int) -> None:
        self.criterion, self.lengths, self.factors = criterion, criterion.lengths(), factors
        self.factor = statistics.median(factors.values()) if factors else None
        self.common = Counter(self.lengths.values()).most_common(1)[0][0]
        self.updates = [index for index, length in self.lengths.items() if length == self.common]
        self.totals, self.intended = (criterion.totals(factors, self.factor or 1.0, ranks, rule) for rule in RULES[:2])
        self.level = self.level_of(self.totals)

    def level_of(self, totals: Mapping[int, float]) -> float:
        return statistics.median(totals[index] for index in self.updates)


@dataclass
class History:
    """All that happened in each update around its weights."""

    updates: Updates
    reckoned: Mapping[Key, Reckoning]
    criterions: Sequence[Criterion]
    sums: Sums

    @property
    def ranks(self) -> int:
        return len(next(iter(self.updates.values()), ()))

    def usual(self, criterion: Criterion) -> Usual:
        known = ((index, of_one.factor) for (place, index), of_one in self.reckoned.items() if place == criterion.place)
        return Usual(
            criterion, {i: factor for i, factor in known if factor is not None and i in criterion.updates}, self.ranks
        )

    def is_skipping(self, usual: Usual, index: int) -> bool:
        """True where the script leaves out a micro-batch now and then, or changes gradients unseen."""
        criterion, length, num_drawn = usual.criterion, usual.lengths[index], 0
        ranks, before = self.updates[criterion.place, index], self.updates.get((criterion.place, index - 1))
        sites = {part.site for part in criterion.parts}
        if before is not None:
            (loader, now, _), (old_loader, then, _) = (of[0]["backwards"][-1]["batch"] for of in (ranks, before))
            num_drawn = (now - then) * (loader == old_loader)
        unused = any(update["unused"].get(site) for update in ranks for site in sites)
        changed = any(update["changed"] for update in ranks) and index not in usual.factors
        return unused or changed or length < usual.common == num_drawn

    def carried(self, place: int, index: int) -> int:
        """How many micro-batches of an update a loader gave before it ended."""
        update = self.updates[place, index][0]
        ended = [before for kind, _, before, _ in update["events"] if kind == "ended"]
        return max((before for before in ended if before < len(update["backwards"])), default=0)


def _short(usual: Usual, history: History, notes: list[str], unjudged: list[str]) -> Fault | None:
    """Finds updates that weigh as many micro-batches as they have, where others weigh as one mean."""
    criterion, lengths = usual.criterion, usual.lengths
    is_mean = is_equal(usual.level, 1.0)
    if criterion.is_constant(usual.factors):
        if is_mean and not are_equal(usual.totals.values()):
            unjudged.append(f"{criterion.where}: a constant divides this sum, also in updates with fewer or more units")
        return None
    backwards = {(part.index, part.rank, part.backward) for part in criterion.parts}
    is_by_call = len(backwards) == len({backward[:2] for backward in backwards}) < len(criterion.parts)
    if not usual.level or (is_by_call and not is_mean):
        return None  # a graph of its own adds up, as over steps in time
    if criterion.is_own and not (is_mean and are_equal(part.total for part in criterion.parts)):
        return None  # it is not the window's length that divides it
    spread = (1.0, 1.0)
    for totals in (usual.totals, usual.intended):
        weights = {i: total / usual.level_of(totals) for i, total in totals.items()}
        odd = {i: w for i, w in weights.items() if not is_equal(w, 1.0) and not history.is_skipping(usual, i)}
        if not odd:
            if totals is usual.intended:
                text = f"updates weigh {spread[0]:.3g} to {spread[1]:.3g} of the usual, by a factor of the script"
                notes.append(f"{criterion.where}: {text}")
            return None
        if all(lengths[i] != usual.common and is_equal(w, lengths[i] / usual.common) for i, w in odd.items()):
            return _window(usual, history, odd)
        spread = ends(weights.values())
    if not (criterion.is_own or criterion.is_rooted):
        unjudged.append(f"updates, which weigh {spread[0]:.3g} to {spread[1]:.3g} of the usual in {criterion.where}")
    return None


def _window(usual: Usual, history: History, odd: Mapping[int, float]) -> Fault:
    criterion, common = usual.criterion, usual.common
    index = max(odd, key=lambda i: abs(math.log(odd[i])))
    length, last = usual.lengths[index], criterion.updates[index][-1]
    text = (
        f"update {index} has {plural(length, 'micro-batch')}, and weighs {odd[index]:.3g} of the others, which have "
        f"{common}; so {len(odd)} of {len(usual.lengths)} updates"
    )
    hand = "divide by the number of micro-batches of this window; an epoch's last has fewer"
    if usual.lengths.get(0) == 1 < common and 0 in odd:
        text += f". It steps after the 1st, {common + 1}th, {2 * common + 1}th ..., as `step % {common} == 0` does"
        hand = f"step where (step + 1) % {common} == 0, and at an epoch's end, where the divisor is what is left"
    elif length > common and (carried := history.carried(criterion.place, index)):
        text += f". {plural(carried, 'micro-batch')} of the epoch before {'is' if carried == 1 else 'are'} in it"
        hand = "step at an epoch's end too, and divide by the number of micro-batches that there are"
    lines = {f"backward: line {last.line.rpartition(':')[2]}": None} if last.line != last.site[0] else {}
    lines |= {
        f"also line {part.site[0].rpartition(':')[2]}": None for part in criterion.parts if part.site[0] != last.site[0]
    }
    return Fault("window", last.site[0], text + f" ({', '.join(lines)})" * bool(lines), hand)


def _level(usual: Usual, history: History, notes: list[str], unjudged: list[str]) -> Fault | None:
    """Finds a usual weight that is not that of a mean, and no coefficient."""
    criterion, level, common = usual.criterion, usual.level, usual.common
    if given := [index for index, parts in criterion.updates.items() if any(map(_is_sum_for_mean, parts))]:
        return _sum_for_mean(criterion.where, usual.totals, given)
    if criterion.is_constant(usual.factors) and usual.factor is not None and common > 1:
        each = max(part.each() for part in criterion.parts) * usual.factor
        if is_equal(each, 1.0):
            return _undivided(criterion.where, [*usual.totals.values()])
    sums = [
        sum(history.sums[criterion.place, i].values()) / history.ranks * usual.factors.get(i, 1.0)
        for i in usual.updates
    ]
    is_one = is_equal(level, 1.0) or all(is_equal(total, 1.0) for total in sums)  # by itself, or together
    if not level or is_one or not all(is_equal(usual.totals[i], level) for i in usual.updates):
        return None
    printed = [
        criterion.updates[i]
        for i in usual.updates
        if any(part.term["print"] is not None for part in criterion.updates[i])
    ]
    are_same = sum(map(_is_same, printed)) * 2 > len(printed)
    if are_same and (shared := _same_gradient(criterion, history, usual.updates[0], common)) is not None:
        return shared
    every = [history.updates[criterion.place, i][0] for i in usual.updates]
    if is_equal(level, common) and all(update["recurs"] for update in every):
        text = f"adds up {common} backwards, as steps in time; divide by {common} if they are not"
        notes.append(f"{criterion.where}: {text}")
        return None
    why = None if are_same else _reason(usual, history)
    if why is None:
        # A factor of 1 / 4 in a window of 4 may be a coefficient, or a second division.
        is_second = any(num > 1 and is_equal(level, 1 / num) for num in (common, history.ranks))
        is_coefficient = not is_second and all(is_equal(usual.intended[i], 1.0) for i in usual.updates)
        if not (is_coefficient or criterion.is_rooted or criterion.is_constant(usual.factors)):
            text = f"the gradient is {level:.4g} times that of the mean; right if that is a coefficient"
            unjudged.append(f"{criterion.where}: {text}")
        return None
    if why[1].startswith(UNDIVIDED):
        is_clipped = any(kind == "clip" for update in every for kind, *_ in update["events"])
        if all(update["linear"] for update in every) and len({*usual.lengths.values()}) == 1 and not is_clipped:
            unjudged.append(
                f"{criterion.where}: {why[0]}, as {common} times the learning rate would; {why[1]}, if it is not"
            )
            return None
    return Fault("divisor", criterion.where, f"{why[0]}: the gradient is {level:.4g} times that of the mean", why[1])


def _reason(usual: Usual, history: History) -> tuple[str, str] | None:
    """The known reason for the usual weight, with its cure; None where weights are of tasks, stages, or unseen."""
    criterion, level, ranks, first = usual.criterion, usual.level, history.ranks, usual.updates[0]
    path = next((part.path for part in criterion.parts if part.path is not None), None)
    known = (history.reckoned.get((criterion.place, index)) for index in criterion.updates)
    if usual.factor is None or path is None or any(of_one is not None and of_one.is_tasks for of_one in known):
        return None
    # Targets that show no different samples may be all real, then all fake.
    is_hidden = all(part.term["rows"] > 1 and not part.term["print"] for part in criterion.parts)
    if is_hidden or len({part.rank for part in criterion.parts}) < ranks:
        return None
    alike = sum(other.place == criterion.place and first in other.updates for other in history.criterions)
    total = sum(history.sums[criterion.place, first].values()) / ranks * usual.factors.get(first, usual.factor)
    is_part = not is_equal(total, level * alike) or any(
        part.addends in (usual.common, ranks) for part in criterion.parts
    )
    return _why(level, usual.factor, usual.common, ranks, criterion.name if criterion.is_sum else "mean", path, is_part)


def _same_gradient(criterion: Criterion, history: History, index: int, common: int) -> Fault | None:
    reckoning, parts = history.reckoned.get((criterion.place, index)), criterion.updates[index]
    if reckoning is None or not reckoning.shared or any(p.term["print"] != parts[0].term["print"] for p in parts):
        return None
    text = f"{reckoning.shared} gets the same gradient from each of {common} backwards of the same samples"
    return Fault("shared", criterion.where, text, f"divide its gradient by {common} before the step", CONTRAST)


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
    is_whole = term["reduction"] == "sum" and part.path == [] and term["count"] == term["expected"]
    return is_whole and bool(term["count"] > 1)


def _undivided(line: str, totals: Sequence[float]) -> Fault | None:
    if 2 * max(sum(is_equal(one, other) for one in totals) for other in totals) > len(totals):
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
    for criterion in criterions_of(parts, by_call=True):
        site, place = criterion.parts[0].site, criterion.place
        lost = {
            index: sum(update["unused"].get(site, 0) for update in updates[place, index]) for index in criterion.updates
        }
        shares = {i: len(criterion.updates[i]) / (len(criterion.updates[i]) + num) for i, num in lost.items() if num}
        if (
            not criterion.is_sum
            and 3 * len(shares) > len(criterion.updates) > 3
            and all(is_equal(sum(part.total for part in criterion.updates[i]), share) for i, share in shares.items())
        ):
            index = min(shares, key=lambda i: shares[i])
            text = (
                f"no backward follows {sum(lost.values())} losses, which count as micro-batches: update {index} weighs "
                f"{shares[index]:.3g}; so {len(shares)} of {len(criterion.updates)} updates"
            )
            hand = "call backward on each loss, and clear after the step alone"
            faults.append(Fault("unused", criterion.where, text, hand))
    return faults


def _why(
    level: float, factor: float, steps: int, ranks: int, what: str, path: Path, is_part: bool
) -> tuple[str, str] | None:
    """Says what is divided too often or too rarely, with the cure.

    `path` leads from the loss to its criterion; of several that weigh differently each `is_part`, with a coefficient.
    """
    path = [one for one in path if one[0] != "add"]
    plain = [value for how, value in path if how == "div" and value is not None]
    by_ranks = [value for how, value in path if how == "mul" and value is not None and is_equal(value, ranks)]
    by_steps = sum(is_equal(value, steps) for value in plain)
    # One of two divisions may be a coefficient
    by_each = steps > 1 and not is_part and (by_steps > (what == "mean") or (steps > 2 and 0 < by_steps == len(path)))
    is_known = ranks > 1 and len(plain) == len(path) and not is_part
    by_all = what in BY_CLASS or any(is_equal(one, ranks) or is_equal(one, ranks * steps) for one in plain)
    are_added = ranks > 1 and is_equal(factor, ranks) and len(plain) + len(by_ranks) == len(path)
    added, averages = "the ranks are added up, not averaged", ", since the wrapper averages" * is_equal(factor, 1.0)
    none, each = f"nothing divides by the {steps} micro-batches", f"the {steps} micro-batches divide"
    causes = [  # whether it is possible, the weight that it would give, its text and its cure
        (are_added, ranks, added, f"divide by {ranks}"),
        (steps > 1 and not path, steps, none, f"{UNDIVIDED}{steps}"),
        (by_each and what != "mean", 1 / steps, f"{each} what their tokens divide already", "leave one division out"),
        (by_each, 1 / steps, f"{each} twice", "divide once: here, or in the library that does so too"),
        (is_known and by_all, 1 / ranks, f"the {ranks} ranks divide twice{averages}", f"multiply by {ranks}"),
        (is_known, ranks, added, f"divide by {ranks}"),
    ]
    return next(((text, hand) for can_be, weight, text, hand in causes if can_be and is_equal(level, weight)), None)
