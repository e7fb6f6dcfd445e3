"""Weights: a backward gives each unit (a sample, a token) what the script intends times what accumulation did.

What is intended is taken from the graph: coefficients, and weights of the script's own. The rest, which are divisors,
counts and ranks, is judged: it must be equal for all units of an update, and add up alike in each update. What it adds
up to is judged only where that has one reading.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..text import plural
from .criterions import BY_CLASS
from .parts import BOUND, Criterion, Part, Run, are_equal, ends, is_equal, terms_of
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
OWN_LOSS = "whose loss is wholly or in part the script's own"


def weigh(run: Run, verdict: Verdict) -> list[str]:
    """Judges the weights of all units; returns what is not judged unless something is wrong."""
    doubts: list[str] = []
    fine = [criterion for criterion in run.criterions(by_call=True) if not criterion.is_own]
    of_script = _weighed_by_script(run)
    for criterion in fine:
        _judge_units(criterion, of_script, verdict)
    _judge_unused(run, verdict)
    levels = [(criterion.place, _level(criterion, fine, verdict, doubts)) for criterion in fine]
    whole = run.criterions(by_call=False)
    levels += [(criterion.place, _judge_own(criterion, verdict)) for criterion in whole if criterion.is_own]
    undivided = {place for place, fault in levels if fault is not None and fault.by_hand.startswith(UNDIVIDED)}
    short: dict[int, Fault] = {}  # one for an optimizer: its criterions have one cause
    for criterion in whole:
        pairs = [part.term["pairs"] for part in criterion.parts if part.term.get("pairs") is not None]
        if all(pairs) and len(pairs) > 1 and any(part.backward for part in criterion.parts):
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
        rule = _even(counted)
        if rule is None and any((criterion.place, part.site, index) in of_script for part in counted):
            verdict.unjudged.append(f"the weights in {criterion.where}, which the script gives to samples itself")
            continue
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


def _judge_unused(run: Run, verdict: Verdict) -> None:
    """Finds losses of training batches that no backward follows, on lines where others have one."""
    trained = {(place, part.site) for place in run.parts for part in run.parts[place]}
    weighed = {(place, tuple(term["site"])) for (place, _), ranks in run.updates.items() for term in terms_of(ranks[0])}
    for place, site in sorted(trained | weighed):
        updates = [ranks[0] for (owner, _), ranks in run.updates.items() if owner == place]
        counts = [update["unused"].get(site, (0, 0)) for update in updates]
        skipped = [num for num, _ in counts if num]
        unknown = [num for _, num in counts if num]
        if 3 * len(skipped) > len(updates) > 1:
            share = sum(skipped) / (sum(skipped) + sum(_num_calls(update, site) for update in updates))
            text = f"no backward follows {sum(skipped)} losses, so that {share:.0%} of the batches are never trained"
            hand = "call backward on each loss, and clear after the step alone"
            verdict.faults.append(Fault("unused", site[0], text, hand))
        elif 3 * len(unknown) > len(updates) > 1:
            verdict.unjudged.append(f"{site[0]}: {sum(unknown)} losses that no backward follows")


def _num_calls(update: Mapping[str, Any], site: Any) -> int:
    return len(
        {i for i, each in enumerate(update["backwards"]) if any(tuple(t["site"]) == site for t in each["terms"])}
    )


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
        if totals.keys() != lengths.keys() or not (level := criterion.level_of(totals)):
            break  # nobody looked at all of their graphs
        weights = {i: total / level for i, total in totals.items()}
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


# What all updates add up to


def _level(criterion: Criterion, others: Sequence[Criterion], verdict: Verdict, doubts: list[str]) -> Fault | None:
    """Finds a usual weight that has one plausible reading; notes another one that is constant."""
    level, run = criterion.level, criterion.run
    if given := [index for index, parts in criterion.updates.items() if any(map(_is_sum_for_mean, parts))]:
        text = (
            f"a sum goes into window.backward(), which expects a mean: the gradient is "
            f"{criterion.totals[given[0]]:.4g} times that of the mean in update {given[0]}; so {len(given)} of "
            f"{len(criterion.totals)} updates"
        )
        hand = "give it the mean, or the Accumulator reduction='sum_to_mean'"
        return Fault("divisor", criterion.where, text, hand, 'Accumulator(..., reduction="sum_to_mean")')
    if criterion.factor is None or not level:
        return None
    most = max(part.each() for part in criterion.parts) * criterion.factor
    if criterion.is_constant and criterion.common > 1 and is_equal(most, 1.0):
        return _undivided(criterion.where, [*criterion.totals.values()])
    sums = [sum(run.sums[criterion.place, i].values()) / run.num_ranks for i in criterion.usual]
    totals = [total * criterion.factors.get(i, 1.0) for i, total in zip(criterion.usual, sums, strict=True)]
    if are_equal((1.0, *totals)) or not all(is_equal(criterion.totals[i], level) for i in criterion.usual):
        return None  # one mean together, or not one level
    accumulated = [criterion.accumulated[i] for i in criterion.usual if i in criterion.accumulated]
    are_added = run.num_ranks > 1 and is_equal(criterion.factor, run.num_ranks)  # and no coefficient makes up for it
    if is_equal(level, 1.0) or (accumulated and are_equal((1.0, *accumulated)) and not are_added):
        return None
    if (shared := _same_gradient(criterion)) is not None:
        return shared
    reading = _reading(criterion, others)
    if reading is not None:
        return _off(criterion, *reading, doubts)
    if _recurs(criterion):
        steps = criterion.common
        text = f"{criterion.where}: adds up {steps} backwards, as steps in time; divide by {steps} if they are not"
        verdict.notes.append(text)
        return None
    text = f"{criterion.where}: the gradient is {level:.4g} times that of the mean"
    divisors = {by for part in criterion.parts for how, by, _ in part.path or () if how == "div" and by and not by % 1}
    # Not one of the readings, and still as if: there may be a reason that is not seen.
    is_like = any(is_equal(level, by) or is_equal(level, 1 / by) for by in (criterion.common, run.num_ranks))
    if is_like or any(num > 1 and num != criterion.common for num in divisors) or not accumulated:
        doubts.append(
            f"{text}, in windows of {plural(criterion.common, 'micro-batch')}; right if that is a coefficient"
        )
    elif not (criterion.is_rooted or criterion.is_constant):
        verdict.notes.append(f"{text} in every update; right if that is a coefficient")
    return None


def _reading(criterion: Criterion, others: Sequence[Criterion]) -> tuple[str, str] | None:
    """Says what is divided too often or not at all, with the cure, if an update can mean nothing else."""
    level, steps, run, factor = criterion.level, criterion.common, criterion.run, criterion.factor or 1.0
    path = next((part.path for part in criterion.parts if part.path is not None), None)
    updates = [criterion.updates[index] for index in criterion.usual]
    is_drawn = len({part.batch for part in criterion.parts}) > 1  # as the run goes on
    tasks = [reckoning.is_tasks for (place, _), reckoning in run.reckoned.items() if place == criterion.place]
    if path is None or any(tasks) or any(_is_repeated(parts, is_drawn) for parts in updates) or _is_hidden(criterion):
        return None
    levels = [
        other.level for other in others if other.place == criterion.place and {*other.updates} & {*criterion.usual}
    ]
    has_own = any(part.is_own for part in run.parts[criterion.place] if part.index in criterion.updates)
    num_addends = max(part.num_addends for part in criterion.parts)
    # One of several losses may have a coefficient.
    if has_own or num_addends in (steps, run.num_ranks) or not are_equal(levels):
        return None
    divisors = [by for how, by, _ in path if how == "div" and by != 1.0]
    ranks, is_sum = run.num_ranks, criterion.is_sum
    has_steps = any(by is not None and is_equal(by, steps) for by in divisors) or is_equal(factor, 1 / steps)
    by_count = "what their tokens divide already" if is_sum else "twice"
    hand = "leave one division out" if is_sum else "divide once: here, or in the library that does so too"
    averages = ", since the wrapper averages" * is_equal(factor, 1.0)
    readings = [  # whether it is possible, the weight that it would give, its text and its cure
        (
            steps > 1 and not divisors and is_equal(factor, 1.0) and not is_sum,
            steps,
            f"nothing divides by the {steps} micro-batches",
            f"{UNDIVIDED}{steps}",
        ),
        (steps > 1 and has_steps and ranks != steps, 1 / steps, f"the {steps} micro-batches divide {by_count}", hand),
        (ranks > 1, 1 / ranks, f"the {ranks} ranks divide twice{averages}", f"multiply by {ranks}"),
        (ranks > 1, ranks, "the ranks are added up, not averaged", f"divide by {ranks}"),
        (steps > 1 and has_steps, 1 / steps, f"the {steps} micro-batches divide {by_count}", hand),
    ]
    return next(((text, hand) for can_be, weight, text, hand in readings if can_be and is_equal(level, weight)), None)


def _is_hidden(criterion: Criterion) -> bool:
    """True where targets show no different samples (all real, then all fake), or steps in time recur."""
    printed = [part for part in criterion.parts if part.term["print"] is not None]
    if len({part.rank for part in criterion.parts}) < criterion.run.num_ranks:
        return True
    return _recurs(criterion) or all(part.term["rows"] > 1 and not part.term["print"] for part in printed)


def _recurs(criterion: Criterion) -> bool:
    updates = [criterion.run.updates[criterion.place, index][0] for index in criterion.usual]
    return is_equal(criterion.level, criterion.common) and all(update["recurs"] for update in updates)


def _is_repeated(parts: Sequence[Part], is_drawn: bool) -> bool:
    """True if backwards have the targets of others, or a loader's batch has several, as of views of it."""
    prints = {(part.rank, part.term["print"]) for part in parts if part.term["print"]}
    num_printed = sum(bool(part.term["print"]) for part in parts)
    batches = {(part.rank, part.batch) for part in parts if part.batch[0] and is_drawn}
    backwards = {(part.rank, part.backward) for part in parts if part.batch[0]}
    return len(prints) * 2 <= num_printed if num_printed else 0 < len(batches) * 2 <= len(backwards)


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


# Losses of the script's own: differences within the run alone


def _judge_own(criterion: Criterion, verdict: Verdict) -> Fault | None:
    """Judges a loss of the script's own by what divides its means; if they are not one mean, it is not judged."""
    run, known = criterion.run, [part for part in criterion.parts if part.addends]
    means = [[path.mean for path in part.addends if path.mean is not None] for part in known]
    if criterion.factor is None or list(map(len, means)) != [len(part.addends) for part in known]:
        _not_judged(criterion, "", verdict)
        return None
    sizes = {tuple(num for _, _, num in of_part) for of_part in means}
    by_update: dict[int, list[Sequence[tuple[float, float, int]]]] = defaultdict(list)
    for part, of_part in zip(known, means, strict=True):
        by_update[part.index].append(of_part)
    if len(sizes) > 1:
        low, high = ends(num for of_part in sizes for num in of_part)
        _not_judged(criterion, f"; its means are over {low} to {high} elements", verdict)
        return None
    levels, wholes = list[float](), list[float]()
    for index, of_update in by_update.items():
        wholes.append(0.0)
        for addend in zip(*of_update, strict=True):
            weights = [1 / divisor for divisor, *_ in addend]
            low, high = ends(weights)
            if high > low * (1 + 5e-3) and not are_equal(by / divisor for divisor, by, _ in addend):
                text = f"micro-batches weigh {low:.3g} to {high:.3g} ({high / low:.3g} to 1) in update {index}"
                return Fault("weights", criterion.where, text + _lines(criterion), "divide all of them alike")
            levels.append(sum(weights) * criterion.factors.get(index, criterion.factor) / run.num_ranks)
            wholes[-1] += levels[-1]
    if are_equal((1.0, *levels)) or are_equal((1.0, *wholes)):
        verdict.judged["own"] = verdict.judged.get("own", 0) + 1
        return None
    usual = [index for index in criterion.usual if index in by_update]
    level = f"; the {criterion.common} of an update add up to {max(levels):.4g} times their mean" if usual else ""
    _not_judged(criterion, level * (criterion.common > 1), verdict)
    return None


def _not_judged(criterion: Criterion, why: str, verdict: Verdict) -> None:
    run, line = criterion.run, criterion.where
    lines = {part.line for part in criterion.parts}
    every = {(part.index, part.rank, part.backward) for part in run.parts[criterion.place] if part.line in lines}
    text = f"weights of {len(criterion.parts)} of {len(every)} backwards in {line}, {OWN_LOSS}{why}"
    verdict.unjudged.append(text)


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
