"""Weights: the gradient that flows into each criterion, per sample or token; all must weigh the same."""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..law import plural
from .criterions import BY_CLASS
from .reckoning import Fault, Key, Reckoning

BOUND = 1 + 1e-3  # between equal weights
MEANS = ("mean", "batchmean")
COUNTS = {  # cures, by the unit of a mean
    "tokens": 'Accumulator(..., count=count_tokens("labels")), window.backward(mean)',
    "samples": "Accumulator(...), which counts samples, window.backward(mean)",
    "class weights": "Accumulator(..., count=...), a function that adds up those of a batch, window.backward(mean)",
    "elements": "Accumulator(..., count=...), a function that counts a batch's elements, window.backward(mean)",
}
CONTRAST = "Accumulator(...).contrast(batch, encode, loss_fn)"
Updates = Mapping[Key, Sequence[dict[str, Any]]]  # by rank
Terms = dict[tuple[Any, ...], dict[int, list[dict[str, Any]]]]  # by optimizer and criterion, then by update


def terms_of(updates: Updates, notes: list[str]) -> Terms:
    """The terms to judge, with the gradient that flows into all of one (`total`) and into one sample of it (`each`)."""
    found: Terms = defaultdict(lambda: defaultdict(list))
    unseen: Counter[str] = Counter()
    for (place, index), ranks in updates.items():
        for rank, update in enumerate(ranks):
            times = Counter(id(term) for backward in update["backwards"] for term in backward["terms"])
            for backward in update["backwards"]:
                calls: Counter[Any] = Counter()
                adds = max((_num_added(one["divisors"]) for one in backward["terms"]), default=0)
                if not backward["terms"]:
                    unseen[f"the loss of {backward['line']}, which is none of torch's"] += 1
                for term in backward["terms"]:
                    site, num = tuple(term["site"]), times.pop(id(term), 0)
                    if not num:
                        continue  # of a graph that another backward went through too
                    calls[site] += 1
                    is_even = term["low"] is None or term["seed"] <= term["low"] * (1 + max(1e-3, 4 * term["eps"]))
                    if not is_even:
                        unseen[f"the weights in {site[0]}, which the script gives to samples itself"] += 1
                        continue
                    total = num * term["seed"] / update["scale"] * (1 if term["reduction"] in MEANS else term["count"])
                    each = total / term["count"] if term["count"] else 0.0
                    more = {"rank": rank, "total": total, "each": each, "backward": id(backward)}
                    by = _product(term["divisors"], term["count"])
                    more["by"] = by and by / update["scale"]
                    more["parts"] = (adds + 1) * (adds >= len(backward["terms"]))  # of a loss, one of them unseen
                    found[place, site[0], site[1], site[2], calls[site]][index].append(term | more)
    notes += [f"not seen: {what} ({times} times)" for what, times in unseen.items()]
    for by_update in found.values():
        every = [one for ones in by_update.values() for one in ones]
        low, high = _ends(one["by"] for one in every if one["by"])
        for one in every if high <= low * BOUND else ():
            one["by"] = 1.0
    return found


def _num_added(path: Sequence[tuple[str, Any]] | None) -> int:
    return sum(how == "add" for how, _ in path or ())


def _product(path: Sequence[tuple[str, Any]] | None, count: float) -> float | None:
    """The product of what the script multiplies by, and divides by unless that is a count; None where nobody looked."""
    if path is None:
        return None
    others = (value for how, value in path if how == "div" and value and value % 1 and not _is(value, count))
    return float(
        math.prod(abs(value or 1.0) for how, value in path if how.startswith("mul")) / math.prod(map(abs, others))
    )


def within_updates(terms: Terms, ranks: int, notes: list[str]) -> list[Fault]:
    faults, own = [], _own(terms)
    for (place, *site, _), by_update in terms.items():
        line, name, *_ = site
        if empty := sum(
            not one["count"] and one["reduction"] == "mean" for every in by_update.values() for one in every
        ):
            text = f"no token counts in {empty} micro-batches, and the mean over none is NaN"
            faults.append(Fault("nan", line, text, "sum the loss, and divide it by the window's number of tokens"))
        spread: dict[int, tuple[float, float]] = {}
        is_ranks = ranks > 1
        for index, every in by_update.items():
            counted = _uneven([one for one in every if one["total"] and one["count"]], name)
            if not counted:
                continue
            if (place, *site, index) in own:
                notes.append(f"not seen: the weights in {line}, which the script gives to samples itself")
                continue
            low, high = _ends(one["each"] for one in counted)
            bound = _bound(counted)
            spread[index] = low, high
            by_rank = [_ends(one["each"] for one in counted if one["rank"] == rank) for rank in range(ranks)]
            is_ranks &= all(high <= low * bound for low, high in by_rank)
        if not spread:
            continue
        index = max(spread, key=lambda one: spread[one][1] / spread[one][0])
        (low, high), unit = spread[index], _unit(one for every in by_update.values() for one in every)
        text = (
            f"{unit} of different {'ranks' if is_ranks else 'micro-batches'} weigh {low:.3g} to {high:.3g} "
            f"({high / low:.3g} to 1) in update {index}; so in {len(spread)} of {len(by_update)} updates"
        )
        hand = f"sum the loss, and divide it by the {unit} of the whole window"
        hand += " on all ranks, times the number of ranks where the wrapper averages" if ranks > 1 else ""
        faults.append(Fault("weights", line, text, hand, COUNTS[unit]))
    return faults


def _bound(terms: Iterable[dict[str, Any]]) -> float:
    return max([BOUND, *(1 + 4 * float(one["eps"]) for one in terms)])


def _uneven(terms: Sequence[dict[str, Any]], name: str) -> Sequence[dict[str, Any]]:
    """These, if what they weigh differs, also by what the script multiplies by, as in mixup; else none."""
    scaled = [one | {key: one[key] / one["by"] for key in ("each", "total")} for one in terms if one["by"]]
    for some in (terms, scaled):
        low, high = _ends(one["each"] for one in some)
        by_row = _ends(one["total"] / one["rows"] for one in some)
        if high <= low * _bound(some) or (name not in BY_CLASS and by_row[1] <= by_row[0] * _bound(some)):
            return []
    return scaled


def _own(terms: Terms) -> set[tuple[Any, ...]]:
    """Criterions, each with an update, in which a script does more than to scale and to add up.

    It takes a root, or calls of one backward weigh differently, as in losses that are means by sample.
    """
    paths: dict[tuple[Any, ...], list[str]] = {}
    calls: dict[tuple[Any, ...], list[dict[str, Any]]] = defaultdict(list)
    for (place, *site, _), by_update in terms.items():
        for index, one in ((index, one) for index, every in by_update.items() for one in every if one["count"]):
            calls[(place, *site, index), one["backward"]].append(one)
            if one["divisors"] is not None:
                paths.setdefault((place, *site), []).extend(how for how, _ in one["divisors"])
    return {key for (key, _), every in calls.items() if "own" in paths.get(key[:-1], ["own"]) or _uneven(every, key[2])}


def _unit(terms: Iterable[dict[str, Any]]) -> str:
    units = {"tokens" if one["unit"] == "samples" and one["count"] != one["rows"] else one["unit"] for one in terms}
    return units.pop() if len(units) == 1 else "tokens"


def _ends(values: Any) -> tuple[float, float]:
    found = list(values)
    return (min(found), max(found)) if found else (0.0, 0.0)


def is_one_mean(terms: Terms, factors: Mapping[Key, Sequence[float]]) -> bool:
    """True if samples of all ranks weigh as one mean, given each rank's factor of each update."""
    sums = [(by_rank, factors[key]) for key, by_rank in _sums(terms).items() if key in factors]
    return bool(sums) and all(_is(sum(one[rank] * each[rank] for rank in one), 1.0) for one, each in sums)


def _sums(terms: Terms) -> dict[Key, Counter[int]]:
    """The sum of what flows into all criterions of an update, by rank."""
    sums: dict[Key, Counter[int]] = defaultdict(Counter)
    for (place, *_), by_update in terms.items():
        for index, one in ((index, one) for index, every in by_update.items() for one in every):
            sums[place, index][one["rank"]] += one["total"]
    return sums


def without_backward(terms: Terms, updates: Updates) -> list[Fault]:
    """Finds losses without a backward that still count in the divisor of the others."""
    faults = []
    for (place, *site, _), by_update in terms.items():
        lost = {i: sum(one["unused"].get(tuple(site), 0) for one in updates[place, i]) for i in by_update}
        shares = {i: len(by_update[i]) / (len(by_update[i]) + num) for i, num in lost.items() if num}
        means = all(one["reduction"] in MEANS for i in shares for one in by_update[i])
        if (
            means
            and 3 * len(shares) > len(by_update) > 3
            and all(_is(sum(one["total"] for one in by_update[i]), share) for i, share in shares.items())
        ):
            index = min(shares, key=lambda i: shares[i])
            text = (
                f"no backward follows {sum(lost.values())} losses, which count as micro-batches: update {index} weighs "
                f"{shares[index]:.3g}; so {len(shares)} of {len(by_update)} updates"
            )
            faults.append(Fault("unused", site[0], text, "call backward on each loss, and clear after the step alone"))
    return faults


def among_updates(terms: Terms, updates: Updates, found: Mapping[Key, Reckoning], notes: list[str]) -> list[Fault]:
    """Finds updates that weigh less or more than others, or whose usual weight is not that of a mean."""
    faults, ranks = [], len(next(iter(updates.values()), ()))
    factors = {key: one.factor for key, one in found.items() if one.factor is not None}
    sums = {key: by_rank.total() / ranks for key, by_rank in _sums(terms).items()}
    for (place, line, name, inner, _), by_update in terms.items():
        known = [found[place, index] for index in by_update if (place, index) in found]
        factor = statistics.median([one.factor for one in known if one.factor is not None] or [0.0]) or None
        steps = {index: max(Counter(one["rank"] for one in every).values()) for index, every in by_update.items()}
        totals = {
            index: sum(one["total"] for one in every) / ranks * factors.get((place, index), factor or 1.0)
            for index, every in by_update.items()
        }
        common = Counter(steps.values()).most_common(1)[0][0]
        usual = [index for index in totals if steps[index] == common]
        level = statistics.median(totals[index] for index in usual)
        every = [one for ones in by_update.values() for one in ones if one["total"]]
        if not level or not every:
            continue
        if given := [i for i, ones in by_update.items() if any(_is_sum_for_mean(one) for one in ones)]:
            faults.append(_sum_for_mean(line, totals, given))
            continue
        is_sum, (low, high) = every[0]["reduction"] not in MEANS, _ends(one["each"] for one in every)
        if factor is not None and is_sum and common > 1 and _is(low * factor, 1.0) and _is(high * factor, 1.0):
            faults += _undivided(line, [*totals.values()])
            low, high = _ends(totals.values())
        if not all(_is(totals[index], level) for index in usual):
            if not is_sum:
                low, high = _ends(totals.values())
                notes.append(f"{line}: updates weigh {low:.3g} to {high:.3g}, by a factor that the script changes")
            continue
        skipped = {i for i in totals if any(one["unused"].get((line, name, inner)) for one in updates[place, i])}
        skipped |= {i for i in totals if steps[i] < common == _num_drawn(updates, place, i)}
        skipped |= {i for i in totals if _is_changed(updates[place, i]) and (place, i) not in factors}
        if not (is_sum and _is(low, high)):  # otherwise a constant divides it
            relative = {i: total / level for i, total in totals.items() if i not in skipped}
            faults += _short(line, steps, common, relative)
        paths = [one["divisors"] for one in every if one["divisors"] is not None]
        whole = all(_is(sums[place, index] * factors.get((place, index), 1.0), 1.0) for index in usual)
        if factor is None or not paths or whole or any(found[place, i].is_tasks for i in usual if (place, i) in found):
            continue  # together they are one mean, or tasks of the same samples
        if sum(_is_same(by_update[index]) for index in usual) * 2 > len(usual):  # pairs, or tasks of the same samples
            names = found[place, usual[0]].shared if (place, usual[0]) in found else ""
            if names and all(one["print"] == every[0]["print"] for one in by_update[usual[0]]):
                text = f"{names} gets the same gradient from each of {common} backwards of the same samples"
                faults.append(Fault("shared", line, text, f"divide its gradient by {common} before the step", CONTRAST))
            continue
        # Stages of a pipeline, or targets that show no different samples: all real, then all fake
        if len({one["rank"] for one in every}) < ranks or all(one["rows"] > 1 and not one["print"] for one in every):
            continue
        alike = sum(key[0] == place and usual[0] in others for key, others in terms.items()) * level
        is_part = not _is(sums[place, usual[0]] * factors.get((place, usual[0]), factor), alike)
        is_part |= any(one["parts"] in (common, ranks) for one in every)
        why = _why(level, factor, common, ranks, "mean" if not is_sum else name, paths[0], is_part)
        if why and why[1] == f"loss / {common}" and all(updates[place, i][0]["recurs"] for i in usual):
            notes.append(f"{line}: adds up {common} backwards, as steps in time; divide by {common} if they are not")
        elif why:
            text = f"{why[0]}: the gradient is {level:.4g} times that of the mean"
            faults.append(Fault("divisor", line, text, why[1]))
    return faults


def _sum_for_mean(line: str, totals: Mapping[int, float], given: Sequence[int]) -> Fault:
    text = (
        f"a sum goes into window.backward(), which expects a mean: the gradient is {totals[given[0]]:.4g} times that "
        f"of the mean in update {given[0]}; so {len(given)} of {len(totals)} updates"
    )
    hand = "give it the mean, or the Accumulator reduction='sum_to_mean'"
    return Fault("divisor", line, text, hand, 'Accumulator(..., reduction="sum_to_mean")')


def _is_sum_for_mean(term: dict[str, Any]) -> bool:
    """True for an undivided sum over what the window counts, if the window expects a mean."""
    is_whole = term["reduction"] == "sum" and term["divisors"] == [] and term["count"] == term["expected"]
    return is_whole and bool(term["count"] > 1)


def _undivided(line: str, totals: Sequence[float]) -> list[Fault]:
    if 2 * max(sum(_is(one, other) for one in totals) for other in totals) > len(totals):
        return []  # the sum is intended, with a short last micro-batch
    text = f"nothing divides this sum: updates weigh {min(totals):.4g} to {max(totals):.4g}, as their tokens do"
    return [Fault("divisor", line, text, "divide by the window's number of tokens on all ranks")]


def _short(line: str, steps: Mapping[int, int], common: int, weights: Mapping[int, float]) -> list[Fault]:
    odd = [i for i, weight in weights.items() if steps[i] != common and not _is(weight, 1.0)]
    if not odd or not all(_is(weights[i], steps[i] / common) for i in odd):
        return []
    own, weight = plural(steps[odd[-1]], "micro-batch"), weights[odd[-1]]
    text = (
        f"update {odd[-1]} has {own}, and weighs {weight:.3g} of the others, which have {common}; so {len(odd)} of "
        f"{len(steps)} updates"
    )
    hand = "divide by the number of micro-batches of this window; an epoch's last has fewer"
    return [Fault("window", line, text, hand)]


def _is_changed(ranks: Sequence[dict[str, Any]]) -> bool:
    return any(one["changed"] for one in ranks)


def _num_drawn(updates: Updates, place: int, index: int) -> int:
    """The number of micro-batches that a loader gave since the previous update."""
    if (place, index - 1) not in updates:
        return 0
    now, before = (updates[place, i][0]["backwards"][-1]["drawn"] for i in (index, index - 1))
    return int(now - before)


def _is_same(terms: Sequence[dict[str, Any]]) -> bool:
    """True if most of these have the same targets as another."""
    prints = {(one["rank"], one["print"]) for one in terms if one["print"]}
    return len(prints) * 2 <= sum(bool(one["print"]) for one in terms) > 0


def _why(
    level: float, factor: float, steps: int, ranks: int, what: str, path: Sequence[tuple[str, Any]], is_part: bool
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


def _is(value: float, other: float) -> bool:
    return abs(value - other) <= 5e-3 * abs(other)
