"""The verdict over all ranks: a fold over what rules find in runs."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import accumulate
from operator import and_, or_, sub
from typing import Any

import torch
from torch import Tensor

from ..text import plural, shorten
from .parts import Run
from .reckoning import FACT, NOTE, SOFT, UNJUDGED, Finding, Seen
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


# Changes of gradients at the wrong moment: their text and cure, and the least by which they change something
EVENTS = {
    "clip": ("clips in the middle of a window, so that early micro-batches shrink again", CLIP, 1.0),
    # A bound that no gradient comes near to is there for the norm.
    "late": ("clips after the step, which has used the gradient unclipped", CLIP, 1e-3),
    "scaled": ("clips the gradient while the scaler's factor is in it, so that another bound holds", UNSCALE, 1.0),
    "unscale": ("unscales in the middle of a window, to which others are added", UNSCALE, -1.0),
    "again": ("steps again with the gradient of the step before", "step once per backward, then clear", -1.0),
    "grows": ("adds to what a closure's call before has left", "clear gradients as the closure begins", -1.0),
    "eval": ("trains in eval mode, and did not at first", "call model.train() after each evaluation", -1.0),
}
WITHIN = ("clip", "unscale")  # are wrong in a window alone; before the step they are right


def verdict(seen: Seen) -> list[Finding]:
    """All faults, with the facts that they are made of, and what else is said beside them."""
    at_work = [rank for rank in seen if rank["updates"]] or seen
    groups: dict[Any, list[dict[str, Any]]] = defaultdict(list)  # ranks with parameters of the same shapes
    for rank in at_work:
        groups[tuple((row["numel"], row["vector"]) for row in rank["parameters"])].append(rank)
    findings = list[Finding]()
    runs = list[Run]()
    for group in groups.values():
        for place in group[0]["rest"]:
            run = Run(group, place)
            if run.is_alone:
                findings.append(Finding(UNJUDGED, next(iter(run.updates.values()))[0]["line"], ALONE))
            runs += [Run([rank], place) for rank in group] if run.is_alone else [run]
    findings += [finding for run in runs for rule in RULES for finding in rule(run)]
    if len(groups) > 1:
        text = f"{len(groups)} groups of ranks train different parameters, as stages do; each is judged alone"
        findings.append(Finding(NOTE, "", text))
    if idle := [str(rank["rank"]) for rank in seen if rank not in at_work]:
        findings.append(Finding(NOTE, "", f"rank {', '.join(idle)} makes no update"))
    if lost := seen[0]["world"] - len(seen):
        text = f"{lost} of {seen[0]['world']} ranks, which did not tell what they saw (--folder)"
        findings.append(Finding(UNJUDGED, "", text))
    findings += [Finding(kind, "", text) for rank in seen for kind, text in rank["said"]]
    return _settled(findings)


def _settled(findings: Sequence[Finding]) -> list[Finding]:
    """Faults by their lines, but for what follows from another, and what is said beside them."""
    faults = [finding for finding in findings if finding.kind not in SOFT]
    hidden = {kind for fault in faults for kind in CAUSES.get(fault.kind, ())}
    left = {(fault.kind, fault.where): fault for fault in reversed(faults) if fault.kind not in hidden}
    beside = dict.fromkeys(finding for finding in findings if finding.kind in SOFT)
    return [*sorted(left.values(), key=lambda fault: fault.where), *beside]


def _receipts(run: Run) -> Iterator[Finding]:
    """Finds gradients that are no sum of what autograd gave, by no purpose of the script."""
    for reckoning in run.reckoned.values():
        for finding in reckoning.findings:
            is_meant = run.is_moved or (run.is_own and finding.kind in ("uneven", "stale"))
            if finding.kind in SOFT or not is_meant:
                yield finding
    said = {finding.kind for reckoning in run.reckoned.values() for finding in reckoning.findings}
    if run.updates and not run.compared and UNJUDGED not in said:
        text = "receipts: what is stepped is changed after a clip, or backward gave zeros, nothing, or another shape"
        yield Finding(UNJUDGED, "", text)
    if 3 * run.num_left_out > len(run.updates):
        yield Finding(UNJUDGED, "", f"{plural(run.num_left_out, 'update')}, which not all ranks make")


def _unreached(run: Run) -> Iterator[Finding]:
    """Says what some backwards of a line do not reach, in most updates."""
    every = Counter(reckoning.unreached() for reckoning in run.reckoned.values())
    for (line, text), times in every.items():
        if text and 2 * times > every.total() > 1:
            yield Finding(UNJUDGED, line, text)


def _switched(run: Run) -> Iterator[Finding]:
    """Says what all backwards of a line reach in some updates, and none in others, and some in a few."""
    parts = {index: part for index, reckoning in run.reckoned.items() if (part := reckoning.reached())}
    switched = dict[str, int]()
    for name in {name for part in parts.values() for name in part}:
        of_name = {index: part.get(name, 0.0) for index, part in parts.items()}
        partly = [index for index, part in of_name.items() if 0 < part < 1]
        if partly and 3 * len(partly) <= len(of_name) and {0.0, 1.0} <= {*of_name.values()}:
            switched[name] = partly[0]
    if switched:
        text = f"{shorten(sorted(switched))}, switched on or off within update {min(switched.values())}"
        yield Finding(UNJUDGED, "", text)


def _ended(run: Run) -> Iterator[Finding]:
    """Says what has no gradient from an update on, to the end, although it requires one."""
    updates = run.of_ranks[0]
    absent = [{*update["absent"]} for update in updates]
    since = [*accumulate(reversed(absent), and_)][::-1]
    for i, lost in enumerate(map(sub, since[1:-1], accumulate(absent, or_)), start=1):
        names = shorten([run.seen[0]["parameters"][place]["name"] for place in sorted(lost)])
        text = f"{names}, of which there is no gradient from update {updates[i]['index']} on, although it is required"
        yield from [Finding(UNJUDGED, "", text)] * bool(lost)


def _cleared(run: Run) -> Iterator[Finding]:
    """Finds backwards that no step used, on lines whose other backwards steps do use."""
    is_meant = run.is_own or run.is_moved
    for rank, of_rank in zip(run.seen, run.of_ranks, strict=True):
        updates = [update["backwards"] for update in of_rank]
        used = [[backward for backward in update if not backward["cleared"]] for update in updates]
        at_once = [Counter(each["cleared"] for each in whole if each["cleared"]) for whole in updates]
        lack = [0 < len(some) < max(of.values(), default=0) for some, of in zip(used, at_once, strict=True)]
        if run.is_moved and any(lack):
            yield Finding(UNJUDGED, "", "steps with fewer backwards where parameters had moved than are cleared there")
        every = [*updates, rank["rest"][run.place]]
        lines = {backward["line"] for backwards in (used if any(used) else updates) for backward in backwards}
        clearings = list[tuple[int, str, bool, int]]()  # update, line, whether a loader had ended, backwards
        for index, backwards in enumerate(every):
            hows = (each["cleared"] for each in backwards if each["cleared"] and each["line"] in lines)
            sizes = Counter(how for how in hows if how[1])
            clearings += [(index, line, ended, size) for (_, line, ended), size in sizes.items()]
        is_often = 2 * len({index for index, *_ in clearings}) > len(used)
        lengths = {*map(len, used)}
        starts = [index for index, _, ended, size in clearings if not ended and size not in lengths]  # of epochs
        at_epochs = len(starts) > 1 and starts == [(i + 1) * max(1, starts[0]) for i in range(len(starts))]
        left = [each["line"] for each in every[-1] if not each["cleared"] and each["line"] in lines and rank["ended"]]
        total = sum(map(len, every))
        for line in dict.fromkeys(line for _, line, *_ in clearings):
            of_line = [(ended, size) for _, at, ended, size in clearings if at == line]
            # Otherwise it is now and then, as for a loss that is not finite, or before the first update.
            num = sum(size for ended, size in of_line if is_often or at_epochs or (ended and size != max(lengths)))
            num_cleared = sum(size for _, size in of_line)
            yield Finding(FACT, line, f"clears {plural(num_cleared, 'backward')} that no step used")
            if is_meant:
                continue
            if is_often and not all(ended for ended, _ in of_line):
                text = f"clears {num} backwards before any step"
                yield Finding("cleared", line, text, "clear gradients after the step alone")
            elif num:
                text = f"clears {plural(num, 'micro-batch')} at an epoch's end before any step"
                text += f", and no step follows the run's last {len(left)}" * bool(left)
                yield Finding("tail", line, f"{text}: {(num + len(left)) / total:.0%} of all", TAIL)
        if left and not is_meant:
            text = f"no step follows the run's last {plural(len(left), 'micro-batch')}: {len(left) / total:.0%} of all"
            yield Finding("rest", left[-1], text, TAIL)


def _events(run: Run) -> Iterator[Finding]:
    """Finds what happens to gradients or models at the wrong moment."""
    for updates in run.of_ranks:
        facts: dict[tuple[str, str], list[int]] = defaultdict(list)  # updates, by kind and line
        wrong: dict[tuple[str, str], list[int]] = defaultdict(list)
        for update in updates:
            lines = [backward["line"] for backward in update["backwards"]]
            for how in update["touched"]:
                facts[f"gradients are {how}", ""].append(update["index"])
            for kind, line, before, by in update["events"]:
                is_wrong = line and kind in EVENTS and by > EVENTS[kind][-1]
                if line and kind in WITHIN:
                    facts[kind, line].append(update["index"])
                    is_wrong &= bool({*lines[:before]} & {*lines[before:]})
                if is_wrong:
                    wrong[kind, line].append(update["index"])
        for (kind, line), indices in facts.items():
            yield Finding(FACT, line, f"{kind} in {plural(len({*indices}), 'update')}, first in {indices[0]}")
        for (kind, line), indices in wrong.items():
            text, by_hand, _ = EVENTS[kind]
            yield Finding(kind, line, f"{text} (first in update {indices[0]}; {len(indices)} times)", by_hand)


def _mixed(run: Run) -> Iterator[Finding]:
    """Says where an optimizer uses what another one's loss left in its parameters, beside a loss of its own alone."""
    for ranks in (ranks for ranks in run.updates.values() if "places" in ranks[0]):
        by_reach = {backward["num_reached"] > 1: backward["line"] for backward in ranks[0]["backwards"]}
        if len(by_reach) > 1:
            text = f"what {by_reach[True]} leaves for this step, which trains another optimizer's parameters too"
            yield Finding(UNJUDGED, by_reach[False], text)
            return


def _scaled(run: Run) -> Iterator[Finding]:
    """Finds steps with a gradient in which a GradScaler's factor still is."""
    for index, (update, *_) in run.updates.items():
        scale = update["left_scaled"]
        if scale > 1 and run.factors.get(index, 0.0) * scale > 2:
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
        is_whole = torch.tensor([not run.seen[0]["parameters"][place]["copies"] for place in ranks[0]["places"]])
        reduces = list[bool]()
        for of_ranks in zip(*every, strict=True):
            after, got = (torch.stack([backward[key] for backward in of_ranks]) for key in ("left", "received"))
            reduces.append(bool((is_whole & _alike(after) & ~_alike(got)).any()))
        if reduces.pop():
            windows += 1
            early.update(backward["line"] for backward, does in zip(every[0], reduces, strict=False) if does)
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
    if run.num_ranks > 1 and run.reckoned:
        every = [*run.reckoned.values()]
        first = every[0]
        last = every[-1]
        if first.names == last.names and (apart := first.same & ~last.equal).any():
            text = f"{first.named(apart)} were the same on all ranks, and differ in update {last.index}"
            yield Finding("apart", first.line, text, "reduce every gradient on every rank")


def _span(run: Run) -> Iterator[Finding]:
    """Says which updates have receipts."""
    if looked := [index for index, ranks in run.updates.items() if "places" in ranks[0]]:
        num = next((i for i, index in enumerate(looked) if i != index), len(looked))
        spans = [f"0 to {num - 1}"] * (num > 0) + [", ".join(map(str, looked[num:][:8]))] * (len(looked) > num)
        text = f"receipts in updates {', then '.join(spans)}, of 0 to {run.seen[0]['made'][run.place] - 1}"
        yield Finding(FACT, "", f"{text}; what others do alone is not seen")


REACH = (_unreached, _switched, _ended)
RULES = (weigh, _receipts, *REACH, _cleared, _events, _mixed, judge_schedules, _scaled, _traffic, _apart, _span)
