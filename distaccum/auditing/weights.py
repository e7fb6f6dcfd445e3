"""Weights: a backward gives each unit (a sample, a token) what the script intends times what accumulation did.

What is intended is taken from the graph: coefficients, and weights of the script's own. The rest, which are divisors,
counts and ranks, is judged: it must be equal for all units of an update, and add up alike in each update. What it adds
up to is judged only where that has one reading.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..text import plural
from .criterions import BY_CLASS
from .parts import Criterion, Part, Run, are_equal, bound_of, ends, is_equal, terms_of
from .reckoning import Fault, Verdict

COUNTS = {  # cures, by the unit of a mean
    "tokens": 'Accumulator(..., count=count_tokens("labels")), window.backward(mean)',
    "samples": "Accumulator(...), which counts samples, window.backward(mean)",
    "class weights": "Accumulator(..., count=...), a function that adds up those of a batch, window.backward(mean)",
    "elements": "Accumulator(..., count=...), a function that counts a batch's elements, window.backward(mean)",
    "micro-batches": "Accumulator(...), window.backward(mean)",
}
CONTRAST = "Accumulator(...).contrast(batch, encode, loss_fn)"
# How units may be weighed, so that all are equal: by unit or row, with what the script intends or without.
RULES = (("count", True), ("count", False), ("rows", True), ("rows", False))
UNDIVIDED = "loss / "  # how the cure of a missing division begins
OWN_LOSS = "whose loss is wholly or in part the script's own"


def weigh(run: Run, verdict: Verdict) -> list[str]:
    """Judges the weights of all units; returns what is not judged unless something is wrong."""
    doubts: list[str] = []
    window_faults: dict[int, Fault] = {}  # one for an optimizer: its criterions have one cause
    undivided = set[int]()
    _judge_unused(run, verdict)
    known = [criterion for criterion in run.criterions(by_call=True) if _is_known(criterion)]
    for criterion in known:
        _judge_units(criterion, verdict)
        fault = _judge_level(criterion, known, verdict, doubts)
        if fault is not None:
            verdict.faults.append(fault)
            undivided |= {criterion.place} if fault.by_hand.startswith(UNDIVIDED) else set()
    every = run.criterions(by_call=False)
    for criterion in every:
        if not _is_known(criterion):
            verdict.unjudged.append(_not_judged(criterion))
            continue
        _note_pairs(criterion, verdict)
        fault = None if criterion.place in undivided else _judge_lengths(criterion, doubts)
        if fault is not None:
            window_faults.setdefault(criterion.place, fault)
    verdict.faults.extend(window_faults.values())
    sites = {(of.place, part.site) for of in every if _is_known(of) for part in of.parts}
    verdict.judged["weights"] = len(sites)
    return doubts


def _is_known(criterion: Criterion) -> bool:
    """True for torch's criterions, and for means of the script's own that are over equally many elements each time."""
    sizes = {(part.call, part.term["num"]) for part in criterion.parts if part.is_own}
    has_mean = all(part.total is not None for part in criterion.parts) and criterion.factor is not None
    return not criterion.is_own or (has_mean and len(sizes) == len({call for call, _ in sizes}))


def _not_judged(criterion: Criterion, why: str = "") -> str:
    lines = {part.line for part in criterion.parts}
    own = {(part.index, part.rank, part.backward) for part in criterion.parts}
    every = {
        (part.index, part.rank, part.backward) for part in criterion.run.parts[criterion.place] if part.line in lines
    }
    return f"weights of {len(own)} of {len(every)} backwards in {criterion.where}, {OWN_LOSS}{why}"


def _note_pairs(criterion: Criterion, verdict: Verdict) -> None:
    pairs = [part.term["pairs"] for part in criterion.parts if part.term.get("pairs") is not None]
    if all(pairs) and len(pairs) > 1 and any(part.backward for part in criterion.parts):
        text = f"{criterion.where}: a loss over the pairs of a micro-batch, of which no window equals one big batch"
        verdict.notes.append(f"{text}; {CONTRAST} does")


# Within an update


def _judge_units(criterion: Criterion, verdict: Verdict) -> None:
    """Finds units of an update that weigh differently, by no factor of the script."""
    if empty := sum(not part.term["count"] and part.term["reduction"] == "mean" for part in criterion.parts):
        text = f"no token counts in {empty} micro-batches, and the mean over none is NaN"
        hand = "sum the loss, and divide it by the window's number of tokens"
        verdict.faults.append(Fault("nan", criterion.where, text, hand))
    ranks = range(criterion.run.num_ranks)
    spread = dict[int, tuple[float, float]]()
    is_ranks = len(ranks) > 1
    for index, parts in criterion.updates.items():
        counted = [part for part in parts if part.total and part.term["count"]]
        rule = _even(counted)
        if rule is None and _is_by_sample(criterion, index):
            verdict.unjudged.append(f"the weights in {criterion.where}, which the script gives to samples itself")
        elif rule is None:
            of_script = not all(part.intent for part in counted) or are_equal(part.intent or 1.0 for part in counted)
            spread[index] = ends(part.each(of_script=of_script) for part in counted)
            of_ranks = [[part for part in counted if part.rank == rank] for rank in ranks]
            is_ranks &= all(_even(of_rank) is not None for of_rank in of_ranks)
    if spread:
        index = max(spread, key=lambda i: spread[i][1] / spread[i][0])
        low, high = spread[index]
        unit = _unit(criterion.parts)
        of_what = "" if criterion.is_own else f"{unit} of different "
        text = (
            f"{of_what}{'ranks' if is_ranks else 'micro-batches'} weigh {low:.3g} to {high:.3g} "
            f"({high / low:.3g} to 1) in update {index}; so in {len(spread)} of {len(criterion.updates)} updates"
        )
        hand = f"sum the loss, and divide it by the {unit} of the whole window"
        hand += " on all ranks, times the number of ranks where the wrapper averages" if len(ranks) > 1 else ""
        hand = "divide all of them alike" if criterion.is_own else hand
        verdict.faults.append(Fault("weights", criterion.where, text + _lines(criterion), hand, COUNTS[unit]))


def _even(parts: Sequence[Part]) -> tuple[str, bool] | None:
    """The first rule by which all of these weigh alike."""
    for units, of_script in RULES:
        if units == "rows" and parts[0].site[1] in BY_CLASS:
            break
        low, high = ends(part.each(units, of_script) for part in parts)
        if high <= low * (1 + bound_of(part.term for part in parts)) and (of_script or all(p.intent for p in parts)):
            return units, of_script
    return None


def _is_by_sample(criterion: Criterion, index: int) -> bool:
    """True where calls of one backward weigh differently, as means by sample do."""
    sites = {part.site for part in criterion.parts}
    calls: dict[tuple[int, int], list[Part]] = defaultdict(list)
    for part in criterion.run.parts[criterion.place]:
        if part.index == index and part.site in sites and part.term["count"]:
            calls[part.rank, part.backward].append(part)
    return any(_even(parts) is None for parts in calls.values())


def _unit(parts: Sequence[Part]) -> str:
    terms = [part.term for part in parts]
    units = {"tokens" if t["unit"] == "samples" and t["count"] != t["rows"] else t["unit"] for t in terms}
    return units.pop() if len(units) == 1 else "tokens"


def _judge_unused(run: Run, verdict: Verdict) -> None:
    """Finds losses of training batches that no backward follows, on lines where others have one."""
    calls = Counter((key[0], tuple(term["site"])) for key, ranks in run.updates.items() for term in terms_of(ranks[0]))
    for (place, site), num_used in sorted(calls.items()):
        updates = [ranks[0] for (owner, _), ranks in run.updates.items() if owner == place]
        skipped, unknown = zip(*(update["unused"].get(site, (0, 0)) for update in updates), strict=True)
        if 3 * sum(map(bool, skipped)) > len(updates) > 1:
            share = sum(skipped) / (sum(skipped) + num_used)
            text = f"no backward follows {sum(skipped)} losses, so that {share:.0%} of the batches are never trained"
            hand = "call backward on each loss, and clear after the step alone"
            verdict.faults.append(Fault("unused", site[0], text, hand))
        elif 3 * sum(map(bool, unknown)) > len(updates) > 1:
            verdict.unjudged.append(f"{site[0]}: {sum(unknown)} losses that no backward follows")


# From one update to another


def _judge_lengths(criterion: Criterion, doubts: list[str]) -> Fault | None:
    """Finds updates that weigh as many micro-batches as they have, where others weigh as one mean."""
    is_mean = is_equal(criterion.level, 1.0)
    backwards = {(part.index, part.rank, part.backward) for part in criterion.parts}
    is_by_call = len(backwards) == len({backward[:2] for backward in backwards}) < len(criterion.parts)
    # What is no mean may add up as it shall: a sum over a constant, a graph over steps in time, a loss of one's own
    if not is_mean and (not criterion.level or is_by_call or criterion.is_constant or criterion.is_own):
        return None
    if criterion.is_own and not are_equal(part.weight() for part in criterion.parts):
        return None  # it is not the window's length that divides it
    spread = (1.0, 1.0)
    for totals in (criterion.totals, criterion.totals_of(of_script=False)):
        level = criterion.level_of(totals)
        if totals.keys() != criterion.totals.keys() or not level:
            break  # nobody looked at all of their graphs
        weights = {i: total / level for i, total in totals.items()}
        odd = {i: by for i, by in weights.items() if not is_equal(by, 1.0) and not _is_skipping(criterion, i)}
        if odd and all(_is_by_length(criterion, i, by) for i, by in odd.items()):
            return _window(criterion, odd)
        if not odd:
            return None
        spread = ends(weights.values())
    if criterion.is_constant:
        doubts.append(f"{criterion.where}: a constant divides this sum, also in updates with fewer or more units")
    elif not criterion.is_own:
        text = f"updates, which weigh {spread[0]:.3g} to {spread[1]:.3g} of the usual in {criterion.where}"
        doubts.append(text)
    return None


def _is_by_length(criterion: Criterion, index: int, weight: float) -> bool:
    length = criterion.lengths[index]
    return length != criterion.common and is_equal(weight, length / criterion.common)


def _is_skipping(criterion: Criterion, index: int) -> bool:
    """True where the script leaves out a micro-batch now and then."""
    ranks = criterion.run.updates[criterion.place, index]
    before = criterion.run.updates.get((criterion.place, index - 1), ranks)
    loader, now, _ = ranks[0]["backwards"][-1]["batch"]
    old_loader, then, _ = before[0]["backwards"][-1]["batch"]
    is_drawn = loader == old_loader and now - then == criterion.common
    is_unused = any(part.site in update["unused"] for update in ranks for part in criterion.parts)
    return is_unused or (is_drawn and criterion.lengths[index] < criterion.common)


def _window(criterion: Criterion, odd: Mapping[int, float]) -> Fault:
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
    return Fault("window", where, text + _lines(criterion, index), hand)


# What all updates add up to


def _judge_level(
    criterion: Criterion, others: Sequence[Criterion], verdict: Verdict, doubts: list[str]
) -> Fault | None:
    """Finds a usual weight that has one plausible reading; notes another one that is constant."""
    run = criterion.run
    level = criterion.level
    steps = criterion.common
    if (fault := _sum_for_mean(criterion)) is not None or criterion.factor is None or not level:
        return fault
    totals = [criterion.totals[index] for index in criterion.usual if index in criterion.totals]
    most = max(part.each() for part in criterion.parts) * criterion.factor
    if criterion.is_constant and steps > 1 and is_equal(most, 1.0) and not are_equal(criterion.totals.values()):
        return _undivided(criterion)
    accumulated = criterion.totals_of(of_script=False)
    by_accumulation = [accumulated[index] for index in criterion.usual if index in accumulated]
    are_added = run.num_ranks > 1 and is_equal(criterion.factor, run.num_ranks)  # and no coefficient makes up for it
    is_mean = bool(by_accumulation) and are_equal((1.0, *by_accumulation)) and not are_added
    if is_mean or is_equal(level, 1.0) or are_equal((1.0, *_wholes(criterion))):
        return None
    if criterion.is_own:
        text = f"; the {steps} of an update add up to {max(by_accumulation):.4g} times their mean" * (steps > 1)
        verdict.unjudged.append(_not_judged(criterion, text))
        return None
    if not are_equal(totals):
        return None  # not one level: updates differ
    text = f"the gradient is {level:.4g} times that of the mean"
    is_alone = are_equal(other.level for other in others if other.place == criterion.place and not other.is_own)
    reading = _reading(criterion) if is_alone and _shows_samples(criterion) else None
    updates = [run.updates[criterion.place, index][0] for index in criterion.usual]
    if reading is not None:
        what, hand = reading
        if hand.startswith(UNDIVIDED) and _is_rate(criterion, updates):
            doubts.append(f"{criterion.where}: {what}, as {steps} times the learning rate would; {hand}, if it is not")
            return None
        return Fault("divisor", criterion.where, f"{what}: {text}{_lines(criterion)}", hand)
    divisors = {by for part in criterion.parts for how, by in part.path or () if how == "div" and by and not by % 1}
    is_like = any(is_equal(level, by) or is_equal(level, 1 / by) for by in (steps, run.num_ranks))
    recurs = all(update["recurs"] for update in updates)  # steps in time add up
    if (is_like and not recurs) or divisors - {1.0, steps} or not by_accumulation:  # for a reason that is not seen
        text = f"{text}, in windows of {plural(steps, 'micro-batch')}; right if that is a coefficient"
        doubts.append(f"{criterion.where}: {text}")
    elif not criterion.is_constant:
        verdict.notes.append(f"{criterion.where}: {text} in every update; right if that is a coefficient")
    return None


def _wholes(criterion: Criterion) -> Iterator[float]:
    """Yields what all criterions, or all losses of the script's own, add up to together in each usual update."""
    for index in criterion.usual:
        parts = [part for part in criterion.run.parts[criterion.place] if part.index == index]
        weights = (part.weight(not part.is_own) for part in parts if part.is_own == criterion.is_own)
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
        (has_steps, 1 / steps, twice, once),
    ]
    level = criterion.level
    return next(((text, hand) for can_be, weight, text, hand in readings if can_be and is_equal(level, weight)), None)


def _shows_samples(criterion: Criterion) -> bool:
    """True if the backwards of an update surely are of different samples, and no loss of the script's own is there.

    They are not where targets are those of other backwards, or all alike in each (all real, then all fake), where a
    loader's batch has several, as of views of it, or tasks, and where steps in time recur.
    """
    run, place = criterion.run, criterion.place
    printed = [part for part in criterion.parts if part.term["print"] is not None]
    if any(reckoning.is_tasks for (owner, _), reckoning in run.reckoned.items() if owner == place):
        return False
    if any(part.is_own and part.index in criterion.updates for part in run.parts[place]):
        return False
    if {part.rank for part in criterion.parts} != {*range(run.num_ranks)}:
        return False
    if all(run.updates[place, index][0]["recurs"] for index in criterion.usual):
        return False
    if all(part.term["rows"] > 1 and not part.term["print"] for part in printed):
        return False
    is_drawn = len({part.batch for part in criterion.parts}) > 1  # as the run goes on
    repeated = [index for index in criterion.usual if _is_repeated(criterion.updates[index], is_drawn)]
    return 2 * len(repeated) < len(criterion.usual)  # targets of a few classes are alike now and then


def _is_repeated(parts: Sequence[Part], is_drawn: bool) -> bool:
    """True if backwards have the targets of others, or a loader's batch has several, as of views of it."""
    prints = [(part.rank, part.term["print"]) for part in parts if part.term["print"]]
    batches = {(part.rank, part.batch) for part in parts if part.batch[0] and is_drawn}
    backwards = {(part.rank, part.backward) for part in parts if part.batch[0]}
    return len({*prints}) * 2 <= len(prints) if prints else 0 < len(batches) * 2 <= len(backwards)


def _is_rate(criterion: Criterion, updates: Sequence[Mapping[str, Any]]) -> bool:
    """True where the learning rate may make up for a missing division."""
    is_clipped = any(kind == "clip" for update in updates for kind, *_ in update["events"])
    is_linear = all(update["linear"] for update in updates)
    return is_linear and not is_clipped and len({*criterion.lengths.values()}) == 1


def _sum_for_mean(criterion: Criterion) -> Fault | None:
    """Finds an undivided sum over what the window counts, if the window expects a mean."""
    wrong = [
        part.index
        for part in criterion.parts
        if part.term["reduction"] == "sum" and part.path == [] and 1 < part.term["count"] == part.term["expected"]
    ]
    if not wrong:
        return None
    text = (
        f"a sum goes into window.backward(), which expects a mean: the gradient is {criterion.totals[wrong[0]]:.4g} "
        f"times that of the mean in update {wrong[0]}; so {len({*wrong})} of {len(criterion.totals)} updates"
    )
    hand = "give it the mean, or the Accumulator reduction='sum_to_mean'"
    return Fault("divisor", criterion.where, text, hand, 'Accumulator(..., reduction="sum_to_mean")')


def _undivided(criterion: Criterion) -> Fault | None:
    totals = [*criterion.totals.values()]
    if 2 * max(sum(is_equal(total, other) for total in totals) for other in totals) > len(totals):
        return None  # the sum is intended, with a short last micro-batch
    low, high = ends(totals)
    text = f"nothing divides this sum: updates weigh {low:.4g} to {high:.4g}, as their tokens do"
    return Fault("divisor", criterion.where, text, "divide by the window's number of tokens on all ranks")


def _lines(criterion: Criterion, index: int | None = None) -> str:
    """The other lines that belong to a finding: of the backward, and of the same criterion."""
    part = criterion.parts[0] if index is None else criterion.updates[index][-1]
    sites = dict.fromkeys(part.site[0] for part in criterion.parts)
    named = [("backward", part.line), *(("also", site) for site in sites)]
    here = part.site[0].rpartition(":")[0] + ":"
    texts = {
        line: f"{what}: {line.replace(here, 'line ') if line.startswith(here) else Path(line).name}"
        for what, line in reversed(named)
        if line != part.site[0]
    }
    return f" ({', '.join(reversed(texts.values()))})" * bool(texts)
