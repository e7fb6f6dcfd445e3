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
from .parts import RULES, Criterion, Part, Run, are_equal, are_one_mean, ends, is_equal, terms_of
from .reckoning import FACT, NOTE, UNJUDGED, Finding

SLIGHT = 0.05  # what an update may lack of one mean: a note


def weigh(run: Run) -> Iterator[Finding]:
    """Judges the weights of all units."""
    yield from _judge_unused(run)
    every = run.criterions()
    known = [criterion for criterion in every if _is_known(criterion)]
    for criterion in every:
        yield Finding(FACT, criterion.where, _fact(criterion))
        if criterion not in known:
            text = f"weights in {criterion.where}, whose loss is wholly or in part the script's own"
            yield Finding(UNJUDGED, "", text)
    for criterion in known:
        if criterion.common > 1 and all(part.term.get("pairs") for part in criterion.parts):
            text = "row i has the target i: of a loss over pairs no window equals one big batch; contrast() does"
            yield Finding(NOTE, criterion.where, text)
        yield from _judge_units(criterion)
        fault = _undivided(criterion) or _misread(criterion, known)
        if fault is not None:
            yield fault
        if fault is None or fault.kind != "divisor":
            yield from _judge_lengths(criterion)


def _fact(criterion: Criterion) -> str:
    what = "a loss of the script's own" if criterion.is_own else criterion.name
    least, most = map(int, ends(criterion.lengths.values()))
    text = f"{what}, {f'{least} to ' * (least < most)}{plural(most, 'micro-batch')} an update"
    if any(part.total is None for part in criterion.parts):
        return f"{text}: neither a mean nor a sum, so that its weights are not known"
    each = [(part.each for part in parts if part.total) for parts in criterion.updates.values()]
    ratio = max([high / low for low, high in map(ends, each) if low], default=1.0)
    low, high = ends(criterion.totals.values())
    adds_up = f"{low:.4g}" if high - low <= 5e-3 * high else f"{low:.4g} to {high:.4g}"
    text += f": weigh 1 to {ratio:.3g}" if ratio > 1 + 1e-3 else ": weigh alike"
    if not criterion.totals:
        return f"{text} as backward gives them; what a step adds up to is not known"
    return f"{text} within an update, which adds up to {adds_up} of its mean"


def _is_known(criterion: Criterion) -> bool:
    """True for torch's criterions, the script's own sums, and its means whose elements surely weigh alike or not."""
    if not criterion.is_own:
        return True
    is_seen = criterion.run.factor is not None and all(part.total is not None for part in criterion.parts)
    is_weighed = not criterion.readings[0].uneven and are_equal(criterion.totals.values())  # by its elements
    is_alike = criterion.is_sum or is_weighed or len({part.term["count"] for part in criterion.parts}) == 1
    return is_seen and (is_alike or all(reading.uneven for reading in criterion.readings))


# Within an update


def _judge_units(criterion: Criterion) -> Iterator[Finding]:
    """Finds units of an update that weigh differently, by no factor of the script."""
    if empty := sum(not part.term["count"] and part.term["reduction"] == "mean" for part in criterion.parts):
        text = f"no token counts in {empty} micro-batches, and the mean over none is NaN"
        hand = "sum the loss, and divide it by the window's number of tokens"
        yield Finding("nan", criterion.where, text, hand)
    unlike = [index for index, parts in criterion.updates.items() if not criterion.is_even(parts)]
    uneven = [index for index in unlike if not (_is_by_sample(criterion, index) or _is_by_source(criterion, index))]
    if len(uneven) < len(unlike):
        yield Finding(UNJUDGED, "", f"the weights in {criterion.where}, which the script gives to samples or sources")
    if uneven:
        spreads = {index: criterion.readings[1].spread(criterion.updates[index]) for index in uneven}
        index = max(uneven, key=lambda i: spreads[i][1] / spreads[i][0])
        low, high = spreads[index]
        unit = "targets" if criterion.name in BY_CLASS else "elements"
        text = (
            f"{unit} of different micro-batches weigh {low:.3g} to {high:.3g} ({high / low:.3g} to 1) in update {index}"
            f"; so in {len(uneven)} of {len(criterion.updates)} updates"
        )
        hand = f"sum the loss, and divide it by the {unit} of the whole window"
        hand += ", each with its class's weight" * any((part.term["count"] or 0) % 1 for part in criterion.parts)
        hand += ", or by the sum of their weights" * criterion.is_own
        hand += " on all ranks, times their number where the wrapper averages" * (criterion.run.num_ranks > 1)
        if len({part.term["count"] for part in criterion.updates[index]}) == 1:
            hand = "run one backward of each loss, and divide all by one number"
        yield Finding("weights", criterion.where, text + _line(criterion.parts[0]), hand)


def _is_by_sample(criterion: Criterion, index: int) -> bool:
    """True where calls of one backward weigh differently, as means by sample do."""
    sites = {part.site for part in criterion.parts}
    calls: dict[tuple[int, int], list[Part]] = defaultdict(list)
    for part in criterion.run.parts:
        if part.index == index and part.site in sites and not part.is_own:
            calls[part.rank, part.backward].append(part)
    return not all(map(criterion.is_even, calls.values()))


def _is_by_source(criterion: Criterion, index: int) -> bool:
    """True where each divisor has as many micro-batches as it says, as means over several sources in one loop have."""
    nums = Counter((part.rank, *(part.divisors or [0.0])[-1:]) for part in criterion.updates[index])
    return len(nums) > criterion.run.num_ranks and all(by == num for (_, by), num in nums.items())


def _judge_unused(run: Run) -> Iterator[Finding]:
    """Finds losses of training batches that no backward follows, on lines where others have one."""
    calls = Counter(term["site"] for ranks in run.updates.values() for term in terms_of(ranks[0]))
    updates = [ranks[0]["unused"] for ranks in run.updates.values()]
    for site in sorted({site for unused in updates for site in unused}):
        skipped, unknown = zip(*(unused.get(site, (0, 0)) for unused in updates), strict=True)
        yield Finding(FACT, site[0], f"{sum(skipped + unknown)} losses with no backward")
        if site not in calls:
            continue
        if 3 * sum(map(bool, skipped)) > len(updates) > 1:
            share = sum(skipped) / (sum(skipped) + calls[site])
            text = f"no backward follows {sum(skipped)} losses, so that {share:.0%} of the batches are never trained"
            hand = "call backward on each loss, and clear after the step alone"
            yield Finding("unused", site[0], text, hand)
        elif 3 * sum(map(bool, unknown)) > len(updates) > 1:
            yield Finding(UNJUDGED, site[0], f"{sum(unknown)} losses that no backward follows")


# From one update to another


def _judge_lengths(criterion: Criterion) -> Iterator[Finding]:
    """Finds updates that weigh as many micro-batches as they have, where others weigh as one mean."""
    reading = criterion.reading
    if not criterion.totals:
        yield Finding(UNJUDGED, "", f"updates, whose weights are not known in {criterion.where}")
    # What is no mean may add up as it shall: a sum over a constant, a loss of one's own
    is_free = not criterion.level or criterion.is_constant or criterion.is_own
    if not reading.odd or (is_free and not _is_mean(criterion)) or _add_up(criterion, criterion.updates):
        return
    nums = {index: len(ranks[0]["backwards"]) for index, ranks in criterion.run.updates.items()}
    usual = criterion.common, nums[criterion.usual[0]]
    of_odd = [(by, criterion.lengths[i] / usual[0], nums[i] / usual[1]) for i, by in reading.odd.items()]
    if not criterion.may_be_tasks and all(map(are_equal, of_odd)):
        yield _window(criterion, reading.odd)
    elif criterion.is_sum and not criterion.is_own and all(abs(by - 1) <= SLIGHT for by in criterion.totals.values()):
        low, high = ends(criterion.totals.values())
        text = f"updates add up to {low:.3g} to {high:.3g} of one mean, as where targets count that nothing predicts"
        yield Finding(NOTE, criterion.where, text)
    else:
        low, high = ends([1.0, *reading.odd.values()])
        yield Finding(UNJUDGED, "", f"updates, which weigh {low:.3g} to {high:.3g} of the usual in {criterion.where}")


def _window(criterion: Criterion, odd: Mapping[int, float]) -> Finding:
    common = criterion.common
    index = max(odd, key=lambda i: abs(math.log(odd[i])))
    length = criterion.lengths[index]
    is_usual = 2 * len(criterion.usual) > len(criterion.lengths)  # otherwise it is a ramp
    others = f"the others, which have {common}" if is_usual else f"those of {common}"
    text = f"update {index} has {plural(length, 'micro-batch')}, and weighs {odd[index]:.3g} of {others}"
    text += f"; so {len(odd)} of {len(criterion.lengths)} updates"
    step = f"step where (step + 1) % {common} == 0 and at an epoch's end; " * is_usual
    last = criterion.updates[index][-1]
    return Finding("window", last.site[0], text + _line(last), f"{step}divide by the micro-batches that there are")


# What all updates add up to


def _misread(criterion: Criterion, others: Sequence[Criterion]) -> Finding | None:
    """Finds a usual weight that is no mean's, and what it is if it has one plausible reading."""
    run = criterion.run
    level = criterion.level
    is_one = criterion.is_own or not any(index in criterion.readings[0].odd for index in criterion.usual)
    is_penalty = any(how == "alone" for how, _ in criterion.parts[0].term["divisors"] or ())
    if run.factor is None or not level or not is_one or _is_mean(criterion) or (is_penalty and _divides(criterion)):
        return None
    low, high = ends(criterion.totals[index] for index in criterion.usual if index in criterion.totals)
    if not is_equal(low, high):
        text = f"what divides this: updates add up to {low:.4g} to {high:.4g} of one mean"
        return Finding(UNJUDGED, criterion.where, text)
    text = f"the gradient is {level:.4g} times that of the mean"
    has_own = any(part.is_own for part in run.parts)
    are_alike = are_equal(other.level for other in others) or all(map(_is_mean, {*others} - {criterion}))
    is_alone = are_alike and not (has_own or criterion.may_be_tasks)
    if is_alone and (reading := _reading(criterion)) is not None:
        what, hand = reading
        return Finding("divisor", criterion.where, f"{what}: {text}" + _line(criterion.parts[0]), hand)
    text = f"{text}, in windows of {plural(criterion.common, 'micro-batch')}; right if that is a coefficient"
    calls = [part for part in run.parts if part.site == criterion.parts[0].site]  # as for each joint of a skeleton
    divides = any(by and not by % 1 for part in criterion.parts for by in part.divisors)
    divides &= not are_one_mean(criterion.usual, calls, run.num_ranks, is_bare=True)
    sizes = [by**sign for by in (criterion.common, run.num_ranks) if by > 1 for sign in (1, -1)]
    is_like = any(is_equal(level, by) for by in sizes)
    if criterion.is_own or divides:
        # Without what the script intends, of the mean or of each element of a sum
        first = criterion.parts[0]
        bare = [times / (first.term["intent"] or 1.0) for times in (level, first.each * criterion.common)]
        may_lack = not _divides(criterion) and any(is_equal(times, by) for times in bare for by in sizes)
        is_like |= may_lack or not _is_beside(criterion, others)
    return Finding(UNJUDGED if is_like else NOTE, criterion.where, text)


def _is_beside(criterion: Criterion, others: Sequence[Criterion]) -> bool:
    """True for a term that weighs a constant times another of the same backwards, if that or both add up to a mean."""
    weights = {(part.index, part.rank, part.backward): part.total for part in criterion.parts}
    for other in others:
        theirs = {(part.index, part.rank, part.backward): part.total for part in other.parts}
        is_pair = other is not criterion and theirs.keys() == weights.keys() and all(theirs.values())
        is_pair &= not _divides(other) or _divides(criterion)
        is_pair = is_pair and (_is_mean(other) or is_equal(criterion.level + other.level, 1.0))
        if is_pair and are_equal((weights[key] or 0.0) / (theirs[key] or 1.0) for key in weights):
            return True
    return False


def _divides(criterion: Criterion) -> bool:
    """True if it is divided by the number of micro-batches, or multiplied by one part of so many."""
    steps = {step for part in criterion.parts for step in part.term["divisors"] or () if step[0] in ("div", "mul")}
    return any(by and is_equal(abs(by) if how == "div" else 1 / abs(by), criterion.common) for how, by in steps)


def _is_mean(criterion: Criterion) -> bool:
    """True if a usual update adds up to one mean, by one of the rules or with the others of its kind."""
    run = criterion.run
    # Where a row has as many elements as an update micro-batches, what divides by one may be meant for the other.
    is_either = is_equal(criterion.level, criterion.common)
    are_added = run.num_ranks > 1 and is_equal(run.factor or 1.0, run.num_ranks)  # and no coefficient makes up for it
    doubted = [rule for rule in RULES if (is_either and rule[0] == "rows") or (are_added and not rule[1])]
    if any(reading.is_mean and reading.rule not in doubted for reading in criterion.readings):
        return True
    return _add_up(criterion, criterion.usual)


def _add_up(criterion: Criterion, indices: Iterable[int]) -> bool:
    """True if updates add up to one mean with all calls of its lines, as of steps in time, or with all losses alike."""
    sites = {part.site for part in criterion.parts}
    of_lines = [part for part in criterion.run.parts if part.site in sites]
    alike = [part for part in criterion.run.parts if part.is_own == criterion.is_own]
    return any(are_one_mean(indices, parts, criterion.run.num_ranks) for parts in (of_lines, alike))


def _reading(criterion: Criterion) -> tuple[str, str] | None:
    """Says what is divided too often or not at all, with the cure, if an update can mean nothing else."""
    steps = criterion.common
    ranks = criterion.run.num_ranks
    factor = criterion.run.factor or 1.0
    if criterion.parts[0].term["divisors"] is None:
        return None
    divisors = [by for by in criterion.parts[0].divisors if by != 1.0]
    has_steps = steps > 1 and (any(is_equal(by, steps) for by in divisors) or is_equal(factor, 1 / steps))
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
    is_free = criterion.is_own or criterion.parts[0].term["reduction"] == "calls"
    if is_free or criterion.common == 1 or not criterion.is_constant or criterion.run.factor is None:
        return None
    # Most are alike where the sum is intended, with a short last micro-batch.
    num_alike = max(sum(is_equal(total, other) for total in totals) for other in totals)
    if 2 * num_alike > len(totals) or not is_equal(max(part.each for part in criterion.parts), 1.0):
        return None
    low, high = ends(totals)
    text = f"nothing divides this sum: updates weigh {low:.4g} to {high:.4g}, as their tokens do"
    return Finding("divisor", criterion.where, text, "divide by the window's number of tokens on all ranks")


def _line(part: Part) -> str:
    """The line of the backward, if it is another."""
    path, _, line = part.line.rpartition(":")
    here = f"line {line}" if part.site[0].startswith(f"{path}:") else f"{Path(path).name}:{line}"
    return f" (backward: {here})" * (part.line != part.site[0])
