"""Weights: a backward gives each unit (a sample, a token) what the script intends times what accumulation did.

What is intended is taken from the graph: coefficients, and weights of the script's own. The rest, which are divisors,
counts and ranks, is judged: it must be equal for all units of an update, and add up alike in each update. What it adds
up to is judged only where that has one reading.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from ..text import plural
from .parts import RULES, Criterion, Part, Run, are_equal, bound_of, ends, is_equal, terms_of
from .reckoning import DOUBT, NOTE, UNJUDGED, Finding

COUNTS = {  # cures, by the unit of a mean
    "tokens": 'Accumulator(..., count=count_tokens("labels")), window.backward(mean)',
    "targets": 'Accumulator(...), with count=count_tokens("labels") if they are tokens, window.backward(mean)',
    "samples": "Accumulator(...), which counts samples, window.backward(mean)",
    "class weights": "Accumulator(..., count=...), a function that adds up those of a batch, window.backward(mean)",
    "elements": "Accumulator(..., count=...), a function that counts a batch's elements, window.backward(mean)",
}
CONTRAST = "Accumulator(...).contrast(batch, encode, loss_fn)"
UNDIVIDED = "loss / "  # how the cure of a missing division begins
OWN_LOSS = "whose loss is wholly or in part the script's own"
SLIGHT = 0.05  # what an update may lack of one mean: a note


def weigh(run: Run) -> Iterator[Finding]:
    """Judges the weights of all units."""
    yield from _judge_unused(run)
    every = run.criterions()
    known = [criterion for criterion in every if _is_known(criterion)]
    undivided = set[int]()  # optimizers of which nothing divides a loss, or of which lengths have been judged
    for criterion in every:
        if criterion not in known:
            yield _not_judged(criterion)
            continue
        yield from _judge_units(criterion)
        yield from _note_pairs(criterion)
        for finding in _judge_level(criterion, known):
            yield finding
            undivided |= {criterion.place} if finding.by_hand.startswith(UNDIVIDED) else set()
    for criterion in known:
        for finding in _judge_lengths(criterion) if criterion.place not in undivided else ():
            yield finding
            undivided |= {criterion.place} if finding.kind == "window" else set()  # criterions have one cause


def sites_of(run: Run) -> set[Any]:
    """The lines, by optimizer, whose weights are judged."""
    return {(of.place, part.site) for of in run.criterions() if _is_known(of) for part in of.parts}


def _is_known(criterion: Criterion) -> bool:
    """True for torch's criterions, and for the script's own sums, and means over equally many elements each time."""
    if not criterion.is_own:
        return True
    is_seen = criterion.factor is not None and all(part.total is not None for part in criterion.parts)
    return is_seen and (criterion.is_sum or len({part.term["count"] for part in criterion.parts}) == 1)


def _not_judged(criterion: Criterion, why: str = "") -> Finding:
    lines = {part.line for part in criterion.parts}
    own = {(part.index, part.rank, part.backward) for part in criterion.parts}
    every = {
        (part.index, part.rank, part.backward) for part in criterion.run.parts[criterion.place] if part.line in lines
    }
    text = f"weights of {len(own)} of {len(every)} backwards in {criterion.where}, {OWN_LOSS}{why}"
    return Finding(UNJUDGED, "", text)


def _note_pairs(criterion: Criterion) -> Iterator[Finding]:
    pairs = [part.term["pairs"] for part in criterion.parts if part.term.get("pairs") is not None]
    if all(pairs) and len(pairs) > 1 and any(part.backward for part in criterion.parts):
        text = f"a loss over the pairs of a micro-batch, of which no window equals one big batch; {CONTRAST} does"
        yield Finding(NOTE, criterion.where, text)


# Within an update


def _judge_units(criterion: Criterion) -> Iterator[Finding]:
    """Finds units of an update that weigh differently, by no factor of the script."""
    if empty := sum(not part.term["count"] and part.term["reduction"] == "mean" for part in criterion.parts):
        text = f"no token counts in {empty} micro-batches, and the mean over none is NaN"
        hand = "sum the loss, and divide it by the window's number of tokens"
        yield Finding("nan", criterion.where, text, hand)
    ranks = range(criterion.run.num_ranks)
    spread = dict[int, tuple[float, float]]()
    for index, parts in criterion.updates.items():
        if any(_rules_of(criterion, parts)):
            continue
        if _is_by_sample(criterion, index):
            text = f"the weights in {criterion.where}, which the script gives to samples itself"
            yield Finding(UNJUDGED, "", text)
            continue
        counted = [part for part in parts if part.has_weight]
        if criterion.is_own and criterion.is_sum and not _are_means(counted):
            yield _not_judged(criterion, "; its sums have different divisors")
            continue
        of_script = not all(part.intent for part in counted)
        spread[index] = ends(part.each(of_script=of_script) for part in counted)
    if spread:
        index = max(spread, key=lambda i: spread[i][1] / spread[i][0])
        low, high = spread[index]
        unit = _unit(criterion.parts)
        of_ranks = ([part for part in criterion.updates[index] if part.rank == rank] for rank in ranks)
        is_ranks = len(ranks) > 1 and all(any(_rules_of(criterion, of_rank)) for of_rank in of_ranks)
        text = (
            f"{unit} of different {'ranks' if is_ranks else 'micro-batches'} weigh {low:.3g} to {high:.3g} "
            f"({high / low:.3g} to 1) in update {index}; so in {len(spread)} of {len(criterion.updates)} updates"
        )
        hand = f"sum the loss, and divide it by the {unit} of the whole window"
        hand += " on all ranks, times the number of ranks where the wrapper averages" if len(ranks) > 1 else ""
        yield Finding("weights", criterion.where, text + _lines(criterion), hand, COUNTS[unit])


def _rules_of(criterion: Criterion, parts: Sequence[Part]) -> Iterator[tuple[str, bool]]:
    """Yields the rules by which all of these that have a weight weigh alike."""
    counted = [part for part in parts if part.has_weight]
    for units, of_script in criterion.rules[:2] if criterion.is_own else criterion.rules:
        low, high = ends(part.each(units, of_script) for part in counted)
        is_even = high <= low * (1 + bound_of(part.term for part in counted))
        if is_even and (of_script or all(part.intent for part in counted)):
            yield units, of_script


def _are_means(parts: Sequence[Part]) -> bool:
    """True for sums of which each is divided by as many elements as its own mask keeps."""
    return parts[0].term["reduction"] == "kept" and are_equal(part.weight(of_script=False) for part in parts)


def _is_by_sample(criterion: Criterion, index: int) -> bool:
    """True where calls of one backward weigh differently, as means by sample do."""
    sites = {part.site for part in criterion.parts}
    calls: dict[tuple[int, int], list[Part]] = defaultdict(list)
    for part in criterion.run.parts[criterion.place]:
        if part.index == index and part.site in sites and not part.is_own:
            calls[part.rank, part.backward].append(part)
    return not all(any(_rules_of(criterion, parts)) for parts in calls.values())


def _unit(parts: Sequence[Part]) -> str:
    """The unit of these; not every target of a token counts."""
    terms = [part.term for part in parts]
    units = {"tokens" if t["unit"] == "targets" and t["count"] != t["rows"] else t["unit"] for t in terms}
    return units.pop() if len(units) == 1 else "tokens"


def _judge_unused(run: Run) -> Iterator[Finding]:
    """Finds losses of training batches that no backward follows, on lines where others have one."""
    calls = Counter((key[0], tuple(term["site"])) for key, ranks in run.updates.items() for term in terms_of(ranks[0]))
    for (place, site), num_used in sorted(calls.items()):
        updates = [ranks[0] for (owner, _), ranks in run.updates.items() if owner == place]
        skipped, unknown = zip(*(update["unused"].get(site, (0, 0)) for update in updates), strict=True)
        if 3 * sum(map(bool, skipped)) > len(updates) > 1:
            share = sum(skipped) / (sum(skipped) + num_used)
            text = f"no backward follows {sum(skipped)} losses, so that {share:.0%} of the batches are never trained"
            hand = "call backward on each loss, and clear after the step alone"
            yield Finding("unused", site[0], text, hand)
        elif 3 * sum(map(bool, unknown)) > len(updates) > 1:
            yield Finding(UNJUDGED, site[0], f"{sum(unknown)} losses that no backward follows")


# From one update to another


def _judge_lengths(criterion: Criterion) -> Iterator[Finding]:
    """Finds updates that weigh as many micro-batches as they have, where others weigh as one mean."""
    # What is no mean may add up as it shall: a sum over a constant, a loss of one's own
    is_mean = _is_mean(criterion, criterion.rules)
    if not is_mean and (not criterion.level or criterion.is_constant or criterion.is_own):
        return
    rules = [
        rule
        for rule in criterion.rules
        if rule in RULES[:2] or _are_one(criterion.usual_of(criterion.totals_by(*rule)))
    ]
    even = [{*_rules_of(criterion, parts)} for parts in criterion.updates.values()]
    # What makes the units of an update equal, makes updates equal too
    rules = [rule for rule in rules if all(rule in of_update for of_update in even)] or rules
    is_divided_alike = not criterion.is_own or are_equal(part.weight() for part in criterion.parts)
    spread = (1.0, 1.0)
    for totals in (criterion.totals_by(*rule) for rule in rules):
        level = statistics.median(criterion.usual_of(totals) or [0.0])
        if totals.keys() != criterion.totals.keys() or not level:
            break  # nobody looked at all of their graphs
        weights = {i: total / level for i, total in totals.items()}
        odd = {i: by for i, by in weights.items() if not is_equal(by, 1.0) and not _is_skipping(criterion, i)}
        if not odd:
            return
        if is_divided_alike and all(is_equal(by, criterion.lengths[i] / criterion.common) for i, by in odd.items()):
            yield _window(criterion, odd)
            return
        spread = ends(weights.values())
    weighs = f"which weigh {spread[0]:.3g} to {spread[1]:.3g} of the usual"
    if criterion.is_own:
        yield _not_judged(criterion, f"; its updates, {weighs}")
    elif criterion.is_constant:
        text = "a constant divides this sum, also in updates with fewer or more units"
        yield Finding(DOUBT, criterion.where, text)
    elif criterion.is_sum and all(abs(total - 1) <= SLIGHT for total in criterion.totals.values()):
        low, high = ends(criterion.totals.values())
        text = f"updates add up to {low:.3g} to {high:.3g} of one mean, as where targets count that nothing predicts"
        yield Finding(NOTE, criterion.where, text)
    else:
        yield Finding(DOUBT, "", f"updates, {weighs} in {criterion.where}")


def _is_skipping(criterion: Criterion, index: int) -> bool:
    """True where the script leaves out a micro-batch now and then."""
    ranks = criterion.run.updates[criterion.place, index]
    before = criterion.run.updates.get((criterion.place, index - 1), ranks)
    loader, now = ranks[0]["backwards"][-1]["batch"]
    old_loader, then = before[0]["backwards"][-1]["batch"]
    is_drawn = loader == old_loader and now - then == criterion.common
    is_unused = any(part.site in update["unused"] for update in ranks for part in criterion.parts)
    return is_unused or (is_drawn and criterion.lengths[index] < criterion.common)


def _window(criterion: Criterion, odd: Mapping[int, float]) -> Finding:
    common = criterion.common
    index = max(odd, key=lambda i: abs(math.log(odd[i])))
    length = criterion.lengths[index]
    text = (
        f"update {index} has {plural(length, 'micro-batch')}, and weighs {odd[index]:.3g} of the others, which have "
        f"{common}; so {len(odd)} of {len(criterion.lengths)} updates"
    )
    hand = "divide by the number of micro-batches of this window; an epoch's last has fewer"
    if criterion.lengths.get(0) == 1 < common and 0 in odd:
        text += f". It steps after the 1st, {common + 1}th, {2 * common + 1}th ..., as `step % {common} == 0` does"
        hand = f"step where (step + 1) % {common} == 0, and at an epoch's end, where the divisor is what is left"
    elif length > common:
        hand = "step at an epoch's end too, and divide by the number of micro-batches that there are"
    where = criterion.updates[index][-1].site[0]
    return Finding("window", where, text + _lines(criterion, index), hand)


# What all updates add up to


def _judge_level(criterion: Criterion, others: Sequence[Criterion]) -> Iterator[Finding]:
    """Finds a usual weight that has one plausible reading."""
    run = criterion.run
    level = criterion.level
    steps = criterion.common
    if (fault := _undivided(criterion)) is not None:
        yield fault
    if fault is not None or criterion.factor is None or not level:
        return
    are_added = run.num_ranks > 1 and is_equal(criterion.factor, run.num_ranks)  # and no coefficient makes up for it
    if _is_mean(criterion, [rule for rule in criterion.rules if rule[1] or not are_added]):
        return
    accumulated = criterion.usual_of(criterion.totals_by("count", of_script=False))
    if criterion.is_own:
        times = max(accumulated, default=level)
        text = f"; the {steps} of an update add up to {times:.4g} times their mean" * (steps > 1)
        yield _not_judged(criterion, text)
        return
    if not are_equal(criterion.usual_of(criterion.totals)):
        return  # not one level: updates differ
    text = f"the gradient is {level:.4g} times that of the mean"
    is_alone = are_equal(other.level for other in others if other.place == criterion.place and not other.is_own)
    reading = _reading(criterion) if is_alone and _shows_samples(criterion) else None
    updates = [run.updates[criterion.place, index][0] for index in criterion.usual]
    if reading is None:
        divisors = {by for part in criterion.parts for how, by in part.path or () if how == "div" and by and not by % 1}
        is_like = any(is_equal(level, by) or is_equal(level, 1 / by) for by in (steps, run.num_ranks))
        has_reason = is_like or divisors - {1.0, steps} or not accumulated  # that is not seen
        text = f"{text}, in windows of {plural(steps, 'micro-batch')}; right if that is a coefficient"
        yield Finding(DOUBT if has_reason else NOTE, criterion.where, text)
        return
    what, hand = reading
    is_rate = all(update["linear"] for update in updates)
    if hand.startswith(UNDIVIDED) and is_rate and len({*criterion.lengths.values()}) == 1:
        text = f"{what}, as {steps} times the learning rate would; {hand}, if it is not"
        yield Finding(DOUBT, criterion.where, text)
        return
    yield Finding("divisor", criterion.where, f"{what}: {text}{_lines(criterion)}", hand)


def _is_mean(criterion: Criterion, rules: Iterable[tuple[str, bool]]) -> bool:
    """True if a usual update adds up to one mean, by one of the rules or with the others of its kind."""
    # Where a row has as many elements as an update micro-batches, what divides by one may be meant for the other.
    rules = [rule for rule in rules if rule in RULES[:2] or not is_equal(criterion.level, criterion.common)]
    levels = [[criterion.level], *(criterion.usual_of(criterion.totals_by(*rule)) for rule in rules)]
    return any(map(_are_one, levels)) or _are_one([*_wholes(criterion)])


def _are_one(totals: Sequence[float]) -> bool:
    return bool(totals) and are_equal((1.0, *totals))


def _wholes(criterion: Criterion) -> Iterator[float]:
    """Yields what all criterions, or all losses of the script's own, add up to together in each usual update."""
    for index in criterion.usual:
        parts = [part for part in criterion.run.parts[criterion.place] if part.index == index]
        weights = (part.weight("count", not part.is_own) for part in parts if part.is_own == criterion.is_own)
        yield sum(weights) * criterion.factors.get(index, criterion.factor or 1.0) / criterion.run.num_ranks


def _reading(criterion: Criterion) -> tuple[str, str] | None:
    """Says what is divided too often or not at all, with the cure, if an update can mean nothing else."""
    steps = criterion.common
    ranks = criterion.run.num_ranks
    factor = criterion.factor or 1.0
    path = next((part.path for part in criterion.parts if part.path is not None), None)
    if path is None:
        return None
    divisors = [by for how, by in path if how == "div" and by != 1.0]
    has_steps = steps > 1 and (any(is_equal(by or 0.0, steps) for by in divisors) or is_equal(factor, 1 / steps))
    is_whole = steps > 1 and not divisors and is_equal(factor, 1.0) and not criterion.is_sum
    averages = ", since the wrapper averages" * is_equal(factor, 1.0)
    twice = f"the {steps} micro-batches divide {'what their tokens divide already' if criterion.is_sum else 'twice'}"
    once = "leave one division out" if criterion.is_sum else "divide once: here, or in the library that does so too"
    readings = [  # whether it is possible, the weight that it would give, its text and its cure
        (is_whole, steps, f"nothing divides by the {steps} micro-batches", f"{UNDIVIDED}{steps}"),
        (has_steps and ranks != steps, 1 / steps, twice, once),
        (ranks > 1, 1 / ranks, f"the {ranks} ranks divide twice{averages}", f"multiply by {ranks}"),
        (ranks > 1, ranks, "the ranks are added up, not averaged", f"divide by {ranks}"),
    ]
    level = criterion.level
    return next(((text, hand) for can_be, weight, text, hand in readings if can_be and is_equal(level, weight)), None)


def _shows_samples(criterion: Criterion) -> bool:
    """True if the backwards of an update surely are of different samples, and no loss of the script's own is there.

    They are not where targets are those of other backwards (views of a batch), or all alike in each (all real, then all
    fake), and where a recurrent model goes through the steps in time of a batch.
    """
    run = criterion.run
    if any(part.is_own and part.index in criterion.updates for part in run.parts[criterion.place]):
        return False
    if {part.rank for part in criterion.parts} != {*range(run.num_ranks)}:
        return False
    numbers = [of_update[-1].batch[1] for of_update in criterion.updates.values()]
    drawn = statistics.median([then - now for now, then in pairwise(numbers)] or [0])
    if run.seen[0]["recurs"] and drawn < criterion.common:
        return False
    printed = [part for part in criterion.parts if part.term["print"] is not None]
    if all(part.term["rows"] > 1 and not part.term["print"] for part in printed):
        return False
    prints = ([(part.rank, part.term["print"]) for part in criterion.updates[index]] for index in criterion.usual)
    known = [[by for by in of_update if by[1]] for of_update in prints]
    if not any(known):  # a sample each
        return not 0 < 2 * drawn <= criterion.common
    repeated = [of_update for of_update in known if 0 < 2 * len({*of_update}) <= len(of_update)]
    return 2 * len(repeated) < len(criterion.usual)  # targets of a few classes are alike now and then


def _undivided(criterion: Criterion) -> Finding | None:
    """Finds a sum over as many tokens as there are that nothing divides."""
    totals = [*criterion.totals.values()]
    each = max(part.each() for part in criterion.parts) * (criterion.factor or 0.0)
    if criterion.is_own or criterion.common == 1 or not criterion.is_constant or not is_equal(each, 1.0):
        return None
    if 2 * max(sum(is_equal(total, other) for total in totals) for other in totals) > len(totals):
        return None  # the sum is intended, with a short last micro-batch
    low, high = ends(totals)
    text = f"nothing divides this sum: updates weigh {low:.4g} to {high:.4g}, as their tokens do"
    return Finding("divisor", criterion.where, text, "divide by the window's number of tokens on all ranks")


def _lines(criterion: Criterion, index: int | None = None) -> str:
    """The line of the backward, if it is another."""
    part = criterion.parts[0] if index is None else criterion.updates[index][-1]
    path, _, line = part.line.rpartition(":")
    here = f"line {line}" if part.site[0].startswith(f"{path}:") else f"{Path(path).name}:{line}"
    return f" (backward: {here})" * (part.line != part.site[0])
