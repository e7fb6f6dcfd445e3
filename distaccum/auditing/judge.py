"""The verdict over all ranks: a fold over what rules find in runs."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..text import plural
from .facts import facts_of
from .parts import Run
from .reckoning import NOTE, SOFT, UNJUDGED, Finding, Seen, columns
from .schedules import judge_schedules
from .weights import weigh

CLIP = "clip before the step"
UNSCALE = "call scaler.unscale_(optimizer) once, before it clips and steps"
ALONE = "each rank steps with a gradient of its own, as independent runs and local SGD do, or a step that reduces"
# Faults that follow from another: the rest of a window after a clearing is not a short window.
CAUSES = {
    "clip": ("uneven", "lost"),
    "unscale": ("uneven", "lost"),
    "cleared": ("window", "lost"),
    "window": ("rest",),
    "tail": ("rest",),
}
TAIL = "step at the end of an epoch too, and divide by the number of micro-batches that there are"


class Event(NamedTuple):
    """A change of gradients at the wrong moment: its text and cure, and the least by which it changes something."""

    text: str
    by_hand: str
    least: float = -1.0
    is_only_within: bool = False  # a window; before the step it is right


EVENTS = {
    "clip": Event("clips in the middle of a window, so that early micro-batches shrink again", CLIP, 1.0, True),
    # A bound that no gradient comes near to is there for the norm.
    "late": Event("clips after the step, which has used the gradient unclipped", CLIP, 1e-3),
    "scaled": Event("clips the gradient while the scaler's factor is in it, so that another bound holds", UNSCALE, 1.0),
    "unscale": Event("unscales in the middle of a window, to which others are added", UNSCALE, is_only_within=True),
    "again": Event("steps again with the gradient of the step before", "step once per backward, then clear"),
    "eval": Event("trains in eval mode, and did not at first", "call model.train() after each evaluation"),
}


def verdict(seen: Seen) -> tuple[list[Finding], list[str]]:
    """All findings, and the facts that they are made of."""
    at_work = [rank for rank in seen if rank["updates"]] or seen
    groups: dict[Any, list[dict[str, Any]]] = defaultdict(list)  # ranks with parameters of the same shapes
    for rank in at_work:
        groups[tuple(rank["parameters"]["numel"]), tuple(rank["parameters"]["vector"])].append(rank)
    findings = list[Finding]()
    runs = list[Run]()
    for group in groups.values():
        run = Run(group)
        if run.is_alone:
            findings.append(Finding(UNJUDGED, next(iter(run.updates.values()))[0]["line"], ALONE))
        runs += [Run([rank]) for rank in group] if run.is_alone else [run]
    findings += [finding for run in runs for rule in RULES for finding in rule(run)]
    if len(groups) > 1:
        text = f"{len(groups)} groups of ranks train different parameters, as stages do; each is judged alone"
        findings.append(Finding(NOTE, "", text))
    if idle := [str(rank["rank"]) for rank in seen if rank not in at_work]:
        findings.append(Finding(NOTE, "", f"rank {', '.join(idle)} makes no update"))
    return _settled(findings), [*dict.fromkeys(fact for run in runs for fact in facts_of(run))]


def _settled(findings: Sequence[Finding]) -> list[Finding]:
    """Faults by their lines, but for what follows from another, and what is said beside them."""
    faults = [finding for finding in findings if finding.kind not in SOFT]
    hidden = {kind for fault in faults for kind in CAUSES.get(fault.kind, ())}
    left = {(fault.kind, fault.where): fault for fault in reversed(faults) if fault.kind not in hidden}
    beside = dict.fromkeys(finding for finding in findings if finding.kind in SOFT)
    return [*sorted(left.values(), key=lambda fault: fault.where), *beside]


def _receipts(run: Run) -> Iterator[Finding]:
    """Finds gradients that are no sum of what autograd gave, by no purpose of the script."""
    for (place, _), reckoning in sorted(run.reckoned.items(), key=lambda known: known[0]):
        for finding in reckoning.findings:
            is_meant = place in run.moved or (place in run.own and finding.kind in ("uneven", "stale"))
            if finding.kind in SOFT or not is_meant:
                yield finding
    said = {finding.kind for reckoning in run.reckoned.values() for finding in reckoning.findings}
    if run.whole and not run.num_compared and UNJUDGED not in said:
        text = "receipts, since what is stepped has no gradient from backward, or in another shape"
        yield Finding(UNJUDGED, "", text)
    if 4 * run.num_left_out > run.num_left_out + len(run.whole):
        yield Finding(UNJUDGED, "", f"{plural(run.num_left_out, 'update')}, which not all ranks make")


def _cleared(run: Run) -> Iterator[Finding]:
    """Finds backwards that no step used, on lines whose other backwards steps do use."""
    excused = run.own | run.moved
    for rank, place in ((each, place) for each in run.seen for place in each["rest"] if place not in excused):
        updates = [update["backwards"] for update in rank["updates"] if update["optimizer"] == place]
        used = [[backward for backward in update if not backward["cleared"]] for update in updates]
        every = [*updates, rank["rest"][place]]
        lines = {backward["line"] for backwards in (used if any(used) else updates) for backward in backwards}
        groups = Counter[Any]()  # clearings with their number, line, whether a loader had ended, and the update
        for i, backwards in enumerate(every):
            cleared = [each["cleared"] for each in backwards if each["cleared"] and each["line"] in lines]
            groups.update((*how, i) for how in cleared if how[1])
        is_often = 2 * len({index for *_, index in groups}) > len(used)
        lengths = {*map(len, used)}
        at_epochs = _are_multiples(sorted(key[-1] for key, num in groups.items() if not key[2] and num not in lengths))
        left = [each["line"] for each in every[-1] if not each["cleared"] and each["line"] in lines and rank["ended"]]
        total = sum(map(len, every))
        for line in dict.fromkeys(line for _, line, *_ in groups):
            of_line = [(ended, num) for (_, at, ended, _), num in groups.items() if at == line]
            # Otherwise it is now and then, as for a loss that is not finite, or before the first update.
            num = sum(num for ended, num in of_line if is_often or at_epochs or (ended and num != max(lengths)))
            if is_often and not all(ended for ended, _ in of_line):
                hand = "clear gradients after the step alone"
                yield Finding("cleared", line, f"clears {num} backwards before any step", hand)
            elif num:
                text = f"clears {plural(num, 'micro-batch')} at an epoch's end before any step"
                text += f", and no step follows the run's last {len(left)}" * bool(left)
                yield Finding("tail", line, f"{text}: {(num + len(left)) / total:.0%} of all", TAIL)
        if left:
            text = f"no step follows the run's last {plural(len(left), 'micro-batch')}: {len(left) / total:.0%} of all"
            yield Finding("rest", left[-1], text, TAIL)


def _are_multiples(indices: Sequence[int]) -> bool:
    """True if epochs of equal length begin at these updates."""
    return len(indices) > 1 and indices[0] > 0 and all(index == (i + 1) * indices[0] for i, index in enumerate(indices))


def _events(run: Run) -> Iterator[Finding]:
    """Finds what happens to gradients or models at the wrong moment."""
    for rank in run.seen:
        where: dict[tuple[str, str], list[int]] = defaultdict(list)  # updates, by kind and line
        for update in rank["updates"]:
            lines = [backward["line"] for backward in update["backwards"]]
            for kind, line, before, by in update["events"]:
                if line and kind in EVENTS:
                    is_wrong = not EVENTS[kind].is_only_within or {*lines[:before]} & {*lines[before:]}
                    where[kind, line] += [update["index"]] if is_wrong and by > EVENTS[kind].least else []
        for (kind, line), indices in where.items():
            if indices:
                text = f"{EVENTS[kind].text} (first in update {indices[0]}; {len(indices)} times)"
                yield Finding(kind, line, text, EVENTS[kind].by_hand)


def _scaled(run: Run) -> Iterator[Finding]:
    """Finds steps with a gradient in which a GradScaler's factor still is."""
    for key, (update, *_) in run.updates.items():
        scale = update["left_scaled"]
        factor = run.reckoned[key].factor if key in run.reckoned else None
        if scale > 1 and factor is not None and factor * scale > 2:
            text = f"steps with a gradient that is {scale:.6g} times too large: nothing unscales it"
            hand = "call scaler.step(optimizer), which unscales it"
            yield Finding("scaled", update["line"], text, hand)


def _traffic(run: Run) -> Iterator[Finding]:
    """Finds reductions before a window's last backward: after it, ranks with different gradients have equal ones."""
    early = Counter[str]()  # by line
    windows = 0
    for ranks in run.updates.values() if len(run.seen) > 1 else ():
        every = [update["backwards"] for update in ranks]
        is_known = all("left" in backward for backwards in every for backward in backwards)
        if len({*map(len, every)}) > 1 or len(every[0]) < 2 or not is_known:
            continue
        windows += 1
        is_whole = columns(run.seen[0], ranks[0]["places"])["copies"] == 0
        for of_ranks in list(zip(*every, strict=True))[:-1]:
            after, got = (torch.stack([backward[key] for backward in of_ranks]) for key in ("left", "received"))
            early[of_ranks[0]["line"]] += bool((is_whole & _alike(after) & ~_alike(got)).any())
    num = early.total()
    if 2 * num > windows:  # not now and then
        text = f"{num / windows + 1:.3g} reductions per update, and the last would do"
        hand = "run forward and backward of all micro-batches of a window but the last in model.no_sync()"
        yield Finding("traffic", early.most_common(1)[0][0], text, hand)


def _alike(values: Tensor) -> Tensor:
    """Tells which parameters have equal receipts on all ranks, none of them 0."""
    size = values.abs().amax((0, 2)).clamp(min=1e-300)
    return ((values - values[:1]).abs().amax((0, 2)) <= 1e-6 * size) & values.any(-1).all(0)


def _apart(run: Run) -> Iterator[Finding]:
    """Finds parameters that were equal on all ranks at first and not at the end."""
    for place in {place for place, _ in run.reckoned} if len(run.seen) > 1 else ():
        every = [known for (owner, _), known in run.reckoned.items() if owner == place]
        first = every[0]
        last = every[-1]
        if first.names == last.names and (apart := first.same & ~last.same).any():
            text = f"{first.named(apart)} were the same on all ranks, and differ in update {last.index}"
            yield Finding("apart", first.line, text, "reduce every gradient on every rank")


RULES = (_receipts, _cleared, weigh, judge_schedules, _scaled, _traffic, _events, _apart)
