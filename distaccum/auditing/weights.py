"""Weights: a backward gives each unit (a sample, a token) what the script intends times what accumulation did.

What is intended is taken from the graph: coefficients, and weights of the script's own. The rest, which are divisors,
counts and ranks, is judged: it must be equal for all units of an update, and add up to one mean in each update.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..text import plural
from .criterions import BY_CLASS
from .parts import BOUND, Criterion, Part, Run, Steps, are_equal, ends, is_equal
from .reckoning import Fault, Verdict

COUNTS = {  # cures, by the unit of a mean
    "tokens": 'Accumulator(..., count=count_tokens("labels")), window.backward(mean)',
    "samples": "Accumulator(...), which counts samples, window.backward(mean)",
    "class weights": "Accumulator(..., count=...), a function that adds up those of a batch, window.backward(mean)",
    "elements": "Accumulator(..., count=...), a function that counts a batch's elements, window.backward(mean)",
}
CONTRAST = "Accumulator(...).contrast(batch, encode, loss_fn)"
# How units may be weighed, so that all are equal: by unit or row, with what the script intends or without.
RULES = (("count", True), ("count", False), ("rows", True), ("rows", False))
UNDIVIDED = "loss / "  # how the cure of a missing division begins


def weigh(run: Run, verdict: Verdict) -> list[str]:
    """Judges the weights of all units; returns what is not judged unless something is wrong."""
    doubts: list[str] = []
    fine = [criterion for criterion in run.criterions(by_call=True) if not criterion.is_own]
    of_script = _weighed_by_script(run)
    for criterion in fine:
        _judge_units(criterion, of_script, verdict)
        _judge_unused(criterion, verdict)
    levels = [(criterion.place, _level(criterion, fine, verdict.notes, doubts)) for criterion in fine]
    whole = run.criterions(by_call=False)
    levels += [(criterion.place, _own_level(criterion, doubts)) for criterion in whole if criterion.is_own]
    undivided = {place for place, fault in levels if fault is not None and fault.by_hand.startswith(UNDIVIDED)}
    short: dict[int, Fault] = {}  # one for an optimizer: its criterions have one cause
    for criterion in whole:
        if any(part.backward and part.term.get("pairs") for part in criterion.parts):
            text = f"{criterion.where}: a loss over the pairs of a micro-batch, of which no window equals one big batch"
            verdict.notes.append(f"{text}; {CONTRAST} does")
        fault = None if criterion.place in undivided else _short(criterion, verdict.notes, doubts)
        if fault is not None:
            short.setdefault(criterion.place, fault)
    verdict.faults.extend([*short.values(), *(fault for _, fault in levels if fault is not None)])
    return doubts


# Within an update


def _judge_units(criterion: Criterion, of_script: set[Any], verdict: Verdict) -> None:
    """Finds units of an update that weigh differently, by no factor of the script."""
    if criterion.is_rooted:
        return
    if empty := sum(not part.term["count"] and part.term["reduction"] == "mean" for part in criterion.parts):
        text = f"no token counts in {empty} micro-batches, and the mean over none is NaN"
        hand = "sum the loss, and divide it by the window's number of tokens"
        verdict.faults.append(Fault("nan", criterion.where, text, hand))
    spread, intended, num_ranks = dict[int, tuple[float, float]](), list[float](), criterion.run.num_ranks
    is_ranks = num_ranks > 1
    for index, parts in criterion.updates.items():
        counted = [part for part in parts if part.total and part.term["count"]]
        if any((criterion.place, part.site, index) in of_script for part in counted):
            verdict.unjudged.append(f"the weights in {criterion.where}, which the script gives to samples itself")
            continue
        rule = _even(counted)
        if rule is not None:
            intended += [part.intent or 1.0 for part in counted] * (not rule[1])
            continue
        is_intent = all(part.intent for part in counted) and not are_equal(part.intent or 1.0 for part in counted)
        low, high = spread[index] = ends(part.each(of_script=not is_intent) for part in counted)
        by_rank = [
            ends(p.each(of_script=not is_intent) for p in counted if p.rank == rank) for rank in range(num_ranks)
        ]
        is_ranks &= all(high <= low * (1 + _bound(counted)) for low, high in by_rank)
    if intended:
        low, high = ends(intended)
        text = f"taken as intended: the factors {low:.3g} to {high:.3g} of micro-batches"
        verdict.notes.append(f"{criterion.where}: {text}")
    if spread:
        index = max(spread, key=lambda i: spread[i][1] / spread[i][0])
        (low, high), unit = spread[index], _unit(criterion.parts)
        text = (
            f"{unit} of different {'ranks' if is_ranks else 'micro-batches'} weigh {low:.3g} to {high:.3g} "
            f"({high / low:.3g} to 1) in update {index}; so in {len(spread)} of {len(criterion.updates)} updates"
        )
        hand = f"sum the loss, and divide it by the {unit} of the whole window"
        hand += " on all ranks, times the number of ranks where the wrapper averages" if num_ranks > 1 else ""
        verdict.faults.append(Fault("weights", criterion.where, text + _lines(criterion), hand, COUNTS[unit]))


def _bound(parts: Iterable[Part]) -> float:
    return max([BOUND, *(4 * float(part.term["eps"]) for part in parts)])


def _even(parts: Sequence[Part]) -> tuple[str, bool] | None:
    """The first rule by which all of these weigh alike."""
    for units, of_script in RULES:
        if units == "rows" and parts[0].site[1] in BY_CLASS:
            break
        low, high = ends(part.each(units, of_script) for part in parts)
        if high <= low * (1 + _bound(parts)) and (of_script or all(part.intent for part in parts)):
            return units, of_script
    return None


def _weighed_by_script(run: Run) -> set[Any]:
    """Lines, each in an update, where calls of one backward weigh differently, as means by sample do."""
    calls: dict[Any, list[Part]] = defaultdict(list)
    for place, part in ((place, part) for place, parts in run.parts.items() for part in parts):
        if part.term["count"] and not part.is_own:
            calls[part.rank, part.backward, place, part.site, part.index].append(part)
    return {key[2:] for key, parts in calls.items() if _even(parts) is None}


def _unit(parts: Sequence[Part]) -> str:
    terms = [part.term for part in parts]
    units = {"tokens" if t["unit"] == "samples" and t["count"] != t["rows"] else t["unit"] for t in terms}
    return units.pop() if len(units) == 1 else "tokens"


def _judge_unused(criterion: Criterion, verdict: Verdict) -> None:
    """Finds losses without a backward that still count in the divisor of the others."""
    site, updates, ranks = criterion.parts[0].site, criterion.updates, criterion.run.updates
    lost = {i: sum(update["unused"].get(site, 0) for update in ranks[criterion.place, i]) for i in updates}
    shares = {i: len(updates[i]) / (len(updates[i]) + num) for i, num in lost.items() if num}
    if criterion.is_sum or not 3 * len(shares) > len(updates) > 3:
        return
    if all(is_equal(sum(part.total for part in updates[i]), share) for i, share in shares.items()):
        index = min(shares, key=lambda i: shares[i])
        text = (
            f"no backward follows {sum(lost.values())} losses, which count as micro-batches: update {index} weighs "
            f"{shares[index]:.3g}; so {len(shares)} of {len(updates)} updates"
        )
        hand = "call backward on each loss, and clear after the step alone"
        verdict.faults.append(Fault("unused", criterion.where, text, hand))


def _lines(criterion: Criterion, index: int | None = None) -> str:
    """The other lines that belong to a finding: of the division, of the backward, and of the same criterion."""
    part = criterion.parts[0] if index is None else criterion.updates[index][-1]
    # Only of the first updates is it known where a number divides.
    paths = [each.path for each in [part, *criterion.parts] if each.path and any(line for *_, line in each.path)]
    divisions = [line for how, value, line in (paths or [()])[0] if how == "div" and line and value != 1]
    named = [("division", line) for line in divisions] + [("backward", part.line)]
    named += [("also", site) for site in dict.fromkeys(part.site[0] for part in criterion.parts)]
    here = part.site[0].rpartition(":")[0] + ":"
    texts = {
        line: f"{what}: {line.replace(here, 'line ') if line.startswith(here) else Path(line).name}"
        for what, line in reversed(named)
        if line != part.site[0]
    }
    return f" ({', '.join(reversed(texts.values()))})" * bool(texts)


# From one update to another


def _short(criterion: Criterion, notes: list[str], doubts: list[str]) -> Fault | None:
    """Finds updates that weigh as many micro-batches as they have, where others weigh as one mean."""
    lengths, common, is_mean = criterion.lengths, criterion.common, is_equal(criterion.level, 1.0)
    if criterion.is_constant and not is_mean:
        return None
    backwards = {(part.index, part.rank, part.backward) for part in criterion.parts}
    is_by_call = len(backwards) == len({backward[:2] for backward in backwards}) < len(criterion.parts)
    if not criterion.level or (is_by_call and not is_mean):
        return None  # a graph of its own adds up, as over steps in time
    if criterion.is_own and not (is_mean and are_equal(part.total for part in criterion.parts)):
        return None  # it is not the window's length that divides it
    spread = (1.0, 1.0)
    for totals in (criterion.totals, criterion.accumulated):
        weights = {i: total / criterion.level_of(totals) for i, total in totals.items()}
        odd = {i: w for i, w in weights.items() if not is_equal(w, 1.0) and not criterion.is_skipping(i)}
        if not odd:
            if totals is criterion.accumulated:
                text = f"updates weigh {spread[0]:.3g} to {spread[1]:.3g} of the usual, by a factor of the script"
                notes.append(f"{criterion.where}: {text}")
            return None
        if all(lengths[i] != common and is_equal(w, lengths[i] / common) for i, w in odd.items()):
            return _window(criterion, odd)
        spread = ends(weights.values())
    if criterion.is_constant:
        doubts.append(f"{criterion.where}: a constant divides this sum, also in updates with fewer or more units")
    elif not (criterion.is_own or criterion.is_rooted):
        text = f"updates, which weigh {spread[0]:.3g} to {spread[1]:.3g} of the usual in {criterion.where}"
        doubts.append(text)
    return None


def _window(criterion: Criterion, odd: Mapping[int, float]) -> Fault:
    common, index = criterion.common, max(odd, key=lambda i: abs(math.log(odd[i])))
    length, last = criterion.lengths[index], criterion.updates[index][-1]
    text = (
        f"update {index} has {plural(length, 'micro-batch')}, and weighs {odd[index]:.3g} of the others, which have "
        f"{common}; so {len(odd)} of {len(criterion.lengths)} updates"
    )
    hand = "divide by the number of micro-batches of this window; an epoch's last has fewer"
    update = criterion.run.updates[criterion.place, index][0]
    ended = [before for kind, _, before, _ in update["events"] if kind == "ended"]
    carried = max((before for before in ended if before < len(update["backwards"])), default=0)
    if criterion.lengths.get(0) == 1 < common and 0 in odd:
        text += f". It steps after the 1st, {common + 1}th, {2 * common + 1}th ..., as `step % {common} == 0` does"
        hand = f"step where (step + 1) % {common} == 0, and at an epoch's end, where the divisor is what is left"
    elif length > common:
        # A loader that is never drawn to its end tells no epochs.
        of_before = f". {plural(carried, 'micro-batch')} of the epoch before {'is' if carried == 1 else 'are'} in it"
        text += of_before * bool(carried)
        hand = "step at an epoch's end too, and divide by the number of micro-batches that there are"
    return Fault("window", last.site[0], text + _lines(criterion, index), hand)


def _level(criterion: Criterion, others: Sequence[Criterion], notes: list[str], doubts: list[str]) -> Fault | None:
    """Finds a usual weight that is not that of a mean, and no coefficient."""
    level, common, run = criterion.level, criterion.common, criterion.run
    if given := [index for index, parts in criterion.updates.items() if any(map(_is_sum_for_mean, parts))]:
        text = (
            f"a sum goes into window.backward(), which expects a mean: the gradient is "
            f"{criterion.totals[given[0]]:.4g} times that of the mean in update {given[0]}; so {len(given)} of "
            f"{len(criterion.totals)} updates"
        )
        hand = "give it the mean, or the Accumulator reduction='sum_to_mean'"
        return Fault("divisor", criterion.where, text, hand, 'Accumulator(..., reduction="sum_to_mean")')
    most = max(part.each() for part in criterion.parts) * (criterion.factor or 0.0)
    if criterion.is_constant and common > 1 and is_equal(most, 1.0):
        return _undivided(criterion.where, [*criterion.totals.values()])
    sums = [sum(run.sums[criterion.place, i].values()) / run.num_ranks for i in criterion.usual]
    totals = [total * criterion.factors.get(i, 1.0) for i, total in zip(criterion.usual, sums, strict=True)]
    is_mean = is_equal(level, 1.0) or all(is_equal(total, 1.0) for total in totals)  # by itself, or together
    if not level or is_mean or not all(is_equal(criterion.totals[i], level) for i in criterion.usual):
        return None
    printed = [criterion.updates[i] for i in criterion.usual]
    printed = [parts for parts in printed if any(part.term["print"] is not None for part in parts)]
    are_same = sum(map(_is_same, printed)) * 2 > len(printed)
    if are_same and (shared := _same_gradient(criterion)) is not None:
        return shared
    usual = [run.updates[criterion.place, i][0] for i in criterion.usual]
    if is_equal(level, common) and all(update["recurs"] for update in usual):
        text = f"adds up {common} backwards, as steps in time; divide by {common} if they are not"
        notes.append(f"{criterion.where}: {text}")
        return None
    why = None if are_same else _reason(criterion, others)
    if why is None:
        # A factor of 1 / 4 in a window of 4 may be a coefficient, or a second division.
        is_second = any(num > 1 and is_equal(level, 1 / num) for num in (common, run.num_ranks))
        is_coefficient = not is_second and all(is_equal(criterion.accumulated[i], 1.0) for i in criterion.usual)
        if not (is_coefficient or criterion.is_rooted or criterion.is_constant):
            text = f"the gradient is {level:.4g} times that of the mean; right if that is a coefficient"
            doubts.append(f"{criterion.where}: {text}")
        return None
    text, hand = why
    return _off(criterion, text, hand, doubts)


def _off(criterion: Criterion, text: str, hand: str, doubts: list[str]) -> Fault | None:
    """The fault of a usual weight; only a doubt where the learning rate may make up for a missing division."""
    updates = [criterion.run.updates[criterion.place, index][0] for index in criterion.usual]
    is_clipped = any(kind == "clip" for update in updates for kind, *_ in update["events"])
    is_rate = all(update["linear"] for update in updates) and len({*criterion.lengths.values()}) == 1 and not is_clipped
    if hand.startswith(UNDIVIDED) and is_rate:
        as_rate = f"as {criterion.common} times the learning rate would"
        doubts.append(f"{criterion.where}: {text}, {as_rate}; {hand}, if it is not")
        return None
    text = f"{text}: the gradient is {criterion.level:.4g} times that of the mean{_lines(criterion)}"
    return Fault("divisor", criterion.where, text, hand)


def _own_level(criterion: Criterion, doubts: list[str]) -> Fault | None:
    """Finds a mean of the script's own that its micro-batches do not divide, if it is all that an optimizer gets."""
    if not _is_off_mean(criterion):
        return None
    steps, run, place = criterion.common, criterion.run, criterion.place
    usual = [part for index in criterion.usual for part in criterion.updates[index]]
    is_only = len(usual) == sum(part.index in criterion.usual for part in run.parts[place])
    loaders = [{part.batch[0] for part in criterion.updates[index]} for index in criterion.usual]
    are_drawn, batches = any(drawn != {0} for drawn in loaders), {(part.rank, part.batch) for part in usual}
    if not is_only or (are_drawn and (max(map(len, loaders)) > 1 or len(batches) < len(usual))):
        return None  # losses that an update adds up, as of tasks, or of views of a batch
    path = [step[:2] for step in usual[0].path or ()]
    recurs = any(run.updates[place, index][0]["recurs"] for index in criterion.usual)
    if not path and are_drawn and not recurs:
        return _off(criterion, f"nothing divides by the {steps} micro-batches", f"{UNDIVIDED}{steps}", doubts)
    how, num = path[0] if len(path) == 1 else ("", 0.0)
    if how == "div" and num > 1 and not num % 1 and is_equal(criterion.level, steps / num):
        text = f"the loss is divided by {num:.0f}, and each update has {steps} micro-batches"
        return _off(criterion, text, f"divide by {steps}", doubts)
    return None


def _is_off_mean(criterion: Criterion) -> bool:
    """True for means of the script's own that weigh alike in each update, and together another number than 1."""
    run, usual = criterion.run, [part for index in criterion.usual for part in criterion.updates[index]]
    backwards = (run.updates[criterion.place, part.index][part.rank]["backwards"][part.backward] for part in usual)
    return (
        criterion.is_own
        and criterion.common > 1
        and criterion.factor is not None
        and not is_equal(criterion.level, 1.0)
        and all(is_equal(criterion.totals[index], criterion.level) for index in criterion.usual)
        and are_equal(part.total for part in usual)
        and all(backward["is_mean"] for backward in backwards)
    )


def not_weighed(run: Run) -> list[str]:
    """Says which share of the backwards has a loss of the script's own, and what it adds up to."""
    parts = [(place, part) for place, of_place in run.parts.items() for part in of_place]
    own = Counter(part.line for _, part in parts if part.is_own)
    places = {(place, part.index, part.rank, part.backward, part.line) for place, part in parts}
    num = Counter(line for *_, line in places)
    means = {
        part.line: f"; the {criterion.common} of an update add up to {criterion.level:.4g} times their mean"
        for criterion in filter(_is_off_mean, run.criterions(by_call=False))
        for part in criterion.parts
    }
    return [
        f"weights of {times} of {num[line]} backwards in {line}, whose loss is wholly or in part the script's own"
        + means.get(line, "")
        for line, times in own.items()
    ]


def _reason(criterion: Criterion, others: Sequence[Criterion]) -> tuple[str, str] | None:
    """The known reason for the usual weight, with its cure; None where weights are of tasks, stages, or unseen."""
    level, run, first, factor = criterion.level, criterion.run, criterion.usual[0], criterion.factor
    path = next((part.path for part in criterion.parts if part.path is not None), None)
    known = (run.reckoned.get((criterion.place, index)) for index in criterion.updates)
    if factor is None or path is None or any(reckoning is not None and reckoning.is_tasks for reckoning in known):
        return None
    # Targets that show no different samples may be all real, then all fake.
    is_hidden = all(part.term["rows"] > 1 and not part.term["print"] for part in criterion.parts)
    if is_hidden or len({part.rank for part in criterion.parts}) < run.num_ranks:
        return None
    alike = sum(other.place == criterion.place and first in other.updates for other in others)
    total = sum(run.sums[criterion.place, first].values()) / run.num_ranks * criterion.factors.get(first, factor)
    is_part = not is_equal(total, level * alike) or any(
        part.addends in (criterion.common, run.num_ranks) for part in criterion.parts
    )
    return _why(criterion, factor, path, is_part)


def _why(criterion: Criterion, factor: float, path: Steps, is_part: bool) -> tuple[str, str] | None:
    """Says what is divided too often or too rarely, with the cure.

    `path` leads from the loss to its criterion; of several that weigh differently each `is_part`, with a coefficient.
    """
    level, steps, ranks = criterion.level, criterion.common, criterion.run.num_ranks
    path = [step for step in path if step[0] != "add"]
    plain = [value for how, value, _ in path if how == "div" and value is not None]
    by_ranks = [value for how, value, _ in path if how == "mul" and value is not None and is_equal(value, ranks)]
    by_steps = sum(is_equal(value, steps) for value in plain)
    # One of two divisions may be a coefficient.
    by_each = steps > 1 and not is_part
    by_each &= by_steps > (not criterion.is_sum) or (steps > 2 and 0 < by_steps == len(path))
    is_known = ranks > 1 and len(plain) == len(path) and not is_part
    by_all = (criterion.is_sum and criterion.name in BY_CLASS) or any(
        is_equal(value, ranks) or is_equal(value, ranks * steps) for value in plain
    )
    are_added = ranks > 1 and is_equal(factor, ranks) and len(plain) + len(by_ranks) == len(path)
    added, averages = "the ranks are added up, not averaged", ", since the wrapper averages" * is_equal(factor, 1.0)
    none, each = f"nothing divides by the {steps} micro-batches", f"the {steps} micro-batches divide"
    causes = [  # whether it is possible, the weight that it would give, its text and its cure
        (are_added, ranks, added, f"divide by {ranks}"),
        (steps > 1 and not path, steps, none, f"{UNDIVIDED}{steps}"),
        (by_each and criterion.is_sum, 1 / steps, f"{each} what their tokens divide already", "leave one division out"),
        (by_each, 1 / steps, f"{each} twice", "divide once: here, or in the library that does so too"),
        (is_known and by_all, 1 / ranks, f"the {ranks} ranks divide twice{averages}", f"multiply by {ranks}"),
        (is_known, ranks, added, f"divide by {ranks}"),
    ]
    return next(((text, hand) for can_be, weight, text, hand in causes if can_be and is_equal(level, weight)), None)


def _same_gradient(criterion: Criterion) -> Fault | None:
    """Finds that backwards of the same samples give a parameter the same gradient, as a loss over pairs does."""
    index, common = criterion.usual[0], criterion.common
    reckoning, parts = criterion.run.reckoned.get((criterion.place, index)), criterion.updates[index]
    if reckoning is None or not reckoning.shared or len({part.term["print"] for part in parts}) > 1:
        return None
    text = f"{reckoning.shared} gets the same gradient from each of {common} backwards of the same samples"
    return Fault("shared", criterion.where, text, f"divide its gradient by {common} before the step", CONTRAST)


def _is_sum_for_mean(part: Part) -> bool:
    """True for an undivided sum over what the window counts, if the window expects a mean."""
    term = part.term
    is_whole = term["reduction"] == "sum" and part.path == [] and term["count"] == term["expected"]
    return is_whole and bool(term["count"] > 1)


def _undivided(line: str, totals: Sequence[float]) -> Fault | None:
    if 2 * max(sum(is_equal(total, other) for total in totals) for other in totals) > len(totals):
        return None  # the sum is intended, with a short last micro-batch
    text = f"nothing divides this sum: updates weigh {min(totals):.4g} to {max(totals):.4g}, as their tokens do"
    return Fault("divisor", line, text, "divide by the window's number of tokens on all ranks")


def _is_same(parts: Sequence[Part]) -> bool:
    """True if most of these have the same targets as another."""
    prints = {(part.rank, part.term["print"]) for part in parts if part.term["print"]}
    return len(prints) * 2 <= sum(bool(part.term["print"]) for part in parts) > 0
