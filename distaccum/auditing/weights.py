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

from ..text import plural
from .criterions import BY_CLASS
from .parts import RULES, Criterion, Part, Run, are_equal, bound_of, ends, is_equal, terms_of
from .reckoning import NOTE, UNJUDGED, Finding

SLIGHT = 0.05  # what an update may lack of one mean: a note


def weigh(run: Run) -> Iterator[Finding]:
    """Judges the weights of all units."""
    yield from _judge_unused(run)
    every = run.criterions()
    known = [criterion for criterion in every if _is_known(criterion)]
    for unknown in (criterion for criterion in every if criterion not in known):
        text = f"weights in {unknown.where}, whose loss is wholly or in part the script's own"
        yield Finding(UNJUDGED, "", text)
    for criterion in known:
        if criterion.common > 1 and all(part.term.get("pairs") for part in criterion.parts):
            text = "a loss over the pairs of a micro-batch, of which no window equals one big batch; contrast() does"
            yield Finding(NOTE, criterion.where, text)
        yield from _judge_units(criterion)
        findings = [*_judge_level(criterion, known)]
        yield from findings
        if all(finding.kind != "divisor" for finding in findings):
            yield from _judge_lengths(criterion)


def _is_known(criterion: Criterion) -> bool:
    """True for torch's criterions, and for the script's own sums, and means over equally many elements each time."""
    if not criterion.is_own:
        return True
    is_seen = criterion.factor is not None and all(part.total is not None for part in criterion.parts)
    return is_seen and (criterion.is_sum or len({part.term["count"] for part in criterion.parts}) == 1)


# Within an update


def _judge_units(criterion: Criterion) -> Iterator[Finding]:
    """Finds units of an update that weigh differently, by no factor of the script."""
    if empty := sum(not part.term["count"] and part.term["reduction"] == "mean" for part in criterion.parts):
        text = f"no token counts in {empty} micro-batches, and the mean over none is NaN"
        hand = "sum the loss, and divide it by the window's number of tokens"
        yield Finding("nan", criterion.where, text, hand)
    spread = dict[int, tuple[float, float]]()
    for index, parts in criterion.updates.items():
        if any(_rules_of(criterion, parts)):
            continue
        if _is_by_sample(criterion, index):
            text = f"the weights in {criterion.where}, which the script gives to samples itself"
            yield Finding(UNJUDGED, "", text)
            continue
        counted = [part for part in parts if part.has_weight]
        of_script = not all(part.term["intent"] for part in counted)
        spread[index] = ends(part.each(of_script=of_script) for part in counted)
    if spread:
        index = max(spread, key=lambda i: spread[i][1] / spread[i][0])
        low, high = spread[index]
        unit = "targets" if criterion.name in BY_CLASS else "elements"
        text = (
            f"{unit} of different micro-batches weigh {low:.3g} to {high:.3g} ({high / low:.3g} to 1) in update {index}"
            f"; so in {len(spread)} of {len(criterion.updates)} updates"
        )
        hand = f"sum the loss, and divide it by the {unit} of the whole window"
        hand += " on all ranks, times their number where the wrapper averages" * (criterion.run.num_ranks > 1)
        yield Finding("weights", criterion.where, text + _lines(criterion), hand)


def _rules_of(criterion: Criterion, parts: Sequence[Part]) -> Iterator[tuple[str, bool]]:
    """Yields the rules by which all of these that have a weight weigh alike."""
    counted = [part for part in parts if part.has_weight]
    for units, of_script in criterion.rules[:2] if criterion.is_own else criterion.rules:
        low, high = ends(part.each(units, of_script) for part in counted)
        is_even = high <= low * (1 + bound_of(part.term for part in counted))
        if is_even and (of_script or all(part.term["intent"] for part in counted)):
            yield units, of_script


def _is_by_sample(criterion: Criterion, index: int) -> bool:
    """True where calls of one backward weigh differently, as means by sample do."""
    sites = {part.site for part in criterion.parts}
    calls: dict[tuple[int, int], list[Part]] = defaultdict(list)
    for part in criterion.run.parts[criterion.place]:
        if part.index == index and part.site in sites and not part.is_own:
            calls[part.rank, part.backward].append(part)
    return not all(any(_rules_of(criterion, parts)) for parts in calls.values())


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
    even = [{*_rules_of(criterion, parts)} for parts in criterion.updates.values()]
    # What makes the units of an update equal, makes updates equal too
    rules = [rule for rule in criterion.rules if all(rule in of_update for of_update in even)] or criterion.rules
    weighs = "whose weights are not known"
    for totals in (criterion.totals_by(*rule) for rule in rules):
        level = statistics.median(criterion.usual_of(totals) or [0.0])
        if totals.keys() != criterion.totals.keys() or not level:
            break  # nobody looked at all of their graphs
        weights = {i: total / level for i, total in totals.items()}
        odd = {i: by for i, by in weights.items() if not is_equal(by, 1.0) and not _is_skipping(criterion, i)}
        if not odd:
            return
        if all(is_equal(by, criterion.lengths[i] / criterion.common) for i, by in odd.items()):
            yield _window(criterion, odd)
            return
        low, high = ends(weights.values())
        weighs = f"which weigh {low:.3g} to {high:.3g} of the usual"
    if criterion.is_sum and not criterion.is_own and all(abs(by - 1) <= SLIGHT for by in criterion.totals.values()):
        low, high = ends(criterion.totals.values())
        text = f"updates add up to {low:.3g} to {high:.3g} of one mean, as where targets count that nothing predicts"
        yield Finding(NOTE, criterion.where, text)
    else:
        yield Finding(UNJUDGED, "", f"updates, {weighs} in {criterion.where}")


def _is_skipping(criterion: Criterion, index: int) -> bool:
    """True where the script leaves out a micro-batch now and then, of as many as a loader usually gives."""
    ranks = criterion.run.updates[criterion.place, index]
    before = criterion.run.updates.get((criterion.place, index - 1), ranks)
    loader, now = ranks[0]["backwards"][-1]["batch"]
    old_loader, then = before[0]["backwards"][-1]["batch"]
    is_drawn = loader == old_loader and now - then == criterion.common
    return is_drawn and criterion.lengths[index] < criterion.common


def _window(criterion: Criterion, odd: Mapping[int, float]) -> Finding:
    common = criterion.common
    index = max(odd, key=lambda i: abs(math.log(odd[i])))
    length = criterion.lengths[index]
    text = (
        f"update {index} has {plural(length, 'micro-batch')}, and weighs {odd[index]:.3g} of the others, which have "
        f"{common}; so {len(odd)} of {len(criterion.lengths)} updates"
    )
    hand = f"step where (step + 1) % {common} == 0 and at an epoch's end; divide by the micro-batches that there are"
    where = criterion.updates[index][-1].site[0]
    return Finding("window", where, text + _lines(criterion, index), hand)


# What all updates add up to


def _judge_level(criterion: Criterion, others: Sequence[Criterion]) -> Iterator[Finding]:
    """Finds a usual weight that has one plausible reading."""
    run = criterion.run
    level = criterion.level
    if (fault := _undivided(criterion)) is not None:
        yield fault
    if fault is not None or criterion.factor is None or not level:
        return
    are_added = run.num_ranks > 1 and is_equal(criterion.factor, run.num_ranks)  # and no coefficient makes up for it
    if _is_mean(criterion, [rule for rule in criterion.rules if rule[1] or not are_added]):
        return
    if not criterion.is_own and not are_equal(criterion.usual_of(criterion.totals)):
        return  # not one level: updates differ
    text = f"the gradient is {level:.4g} times that of the mean"
    has_own = any(part.is_own for part in run.parts[criterion.place])
    is_alone = not has_own and are_equal(other.level for other in others if other.place == criterion.place)
    if is_alone and (reading := _reading(criterion)) is not None:
        what, hand = reading
        yield Finding("divisor", criterion.where, f"{what}: {text}{_lines(criterion)}", hand)
    else:
        text = f"{text}, in windows of {plural(criterion.common, 'micro-batch')}; right if that is a coefficient"
        divides = any(how == "div" and by and not by % 1 for part in criterion.parts for how, by in part.path or ())
        is_like = any(is_equal(level, by) or is_equal(level, 1 / by) for by in (criterion.common, run.num_ranks))
        yield Finding(UNJUDGED if criterion.is_own or divides or is_like else NOTE, criterion.where, text)


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
    is_whole = not divisors and is_equal(factor, 1.0) and not criterion.is_sum and _shows_samples(criterion)
    readings = [  # whether it is possible, the weight that it would give, its text and its cure
        (steps > 1 and is_whole, steps, f"nothing divides by the {steps} micro-batches", f"loss / {steps}"),
        (has_steps and ranks != steps, 1 / steps, f"the {steps} micro-batches divide twice", "leave one division out"),
        (ranks > 1, 1 / ranks, f"the {ranks} ranks divide twice", f"multiply by {ranks} where the wrapper averages"),
        (ranks > 1, ranks, "the ranks are added up, not averaged", f"divide by {ranks}"),
    ]
    level = criterion.level
    return next(((text, hand) for can_be, weight, text, hand in readings if can_be and is_equal(level, weight)), None)


def _shows_samples(criterion: Criterion) -> bool:
    """True if backwards are of different samples: no views of one batch, nor its real and its fake samples.

    A loader gives a batch for each, or their targets differ and no model goes through the steps in time of a batch.
    """
    numbers = [of_update[-1].batch[1] for of_update in criterion.updates.values()]
    if statistics.median([then - now for now, then in pairwise(numbers)] or [0]) >= criterion.common:
        return True
    prints = [[part.term["print"] for part in criterion.updates[index]] for index in criterion.usual]
    # Targets of a few classes are alike now and then.
    apart = [of_update for of_update in prints if all(of_update) and 2 * len({*of_update}) > len(of_update)]
    return 2 * len(apart) > len(prints) and not criterion.run.seen[0]["recurs"]


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
