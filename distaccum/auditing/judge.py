"""The verdict over all ranks: faults, and notes on what is no fault or was not seen."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Container, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..text import plural, shorten
from .facts import facts_of
from .parts import Run, Updates
from .reckoning import Fault, Key, Reckoning, Seen, Verdict, columns, same_on_all
from .schedules import judge_schedules
from .weights import OWN_LOSS, weigh

WHERE = ("eval", "again", "late", "scaled")  # wrong wherever they are
# So many times the bound clips; one that no gradient comes near to is there for its norm.
LEAST = {"clip": 1e-3, "late": 1e-3, "scaled": 1.0}
ALONE = (
    "each rank steps with a gradient of its own, as independent runs and local SGD do, or a step that reduces; reduce "
    "each gradient if they are to train as one"
)
# Faults that follow from another: the rest of a window after a clearing is not a short window.
CAUSES = {
    "clip": ("uneven", "lost"),
    "unscale": ("uneven", "lost"),
    "cleared": ("window", "lost"),
    "window": ("run's tail",),
    "tail": ("run's tail",),
}
TAIL = "step at the end of an epoch too, and divide by the number of micro-batches that there are"
TRAINER = (
    "AccumulatingTrainer of distaccum.transformers in the place of Trainer, with count= and a loss that nothing else "
    "divides; in Lightning callbacks=[ExactAccumulation(count=...)], of distaccum.lightning"
)
EVENTS = {
    "clip": ("clips in the middle of a window, so that early micro-batches shrink again", "clip before the step"),
    "late": ("clips after the step, which has used the gradient unclipped", "clip before the step"),
    "scaled": (
        "clips the gradient while the scaler's factor is in it, so that another bound holds",
        "call scaler.unscale_(optimizer) before it clips",
    ),
    "unscale": ("unscales in the middle of a window, to which others are added", "call unscale_ before the step"),
    "again": ("steps again with the gradient of the step before", "step once per backward, and clear after the step"),
    "eval": ("trains in eval mode, and did not at first", "call model.train() after each evaluation"),
}


def verdict(seen: Seen) -> Verdict:
    at_work = [rank for rank in seen if rank["updates"]] or seen
    groups: dict[Any, list[dict[str, Any]]] = defaultdict(list)  # ranks with parameters of the same shapes
    for rank in at_work:
        groups[tuple(rank["parameters"]["numel"]), tuple(rank["parameters"]["vector"])].append(rank)
    faults, notes, unjudged, judged, facts = _together([_judge(group) for group in groups.values()])
    if len(groups) > 1:
        notes.append(f"{len(groups)} groups of ranks train different parameters, as stages do; each is judged alone")
    if idle := [str(rank["rank"]) for rank in seen if rank not in at_work]:
        notes.append(f"rank {', '.join(idle)} makes no update")
    if any(update["trainer"] for rank in seen for update in rank["updates"]):  # whose user writes no loop
        faults = [fault._replace(window=TRAINER) for fault in faults]
    return Verdict(faults, notes, unjudged, judged, facts)


def _together(judged: Sequence[Verdict]) -> Verdict:
    every = [fault for group in reversed(judged) for fault in reversed(group.faults)]
    faults = {(fault.kind, fault.where): fault for fault in every}
    notes = dict.fromkeys(text for group in judged for text in group.notes)
    unjudged = dict.fromkeys(text for group in judged for text in group.unjudged)
    facts = dict.fromkeys(text for group in judged for text in group.facts)
    most = {what: max(group.judged[what] for group in judged) for what in judged[0].judged}
    return Verdict(
        sorted(faults.values(), key=lambda fault: fault.where), list(notes), list(unjudged), most, list(facts)
    )


def _judge(seen: Seen) -> Verdict:
    by_key: dict[Key, list[dict[str, Any]]] = defaultdict(list)
    for rank in seen:
        for update in rank["updates"]:
            by_key[update["optimizer"], update["index"]].append(update)
    whole = {key: ranks for key, ranks in by_key.items() if len(ranks) == len(seen)}
    reckoned, kept = _reckon(seen, whole)
    used = {key: [_used(update, key[0] in kept) for update in ranks] for key, ranks in whole.items()}
    updates = {key: ranks for key, ranks in used.items() if all(update["backwards"] for update in ranks)}
    run = Run(updates, reckoned, len(seen))
    compared = sum(reckoning.factor is not None or bool(reckoning.faults) for reckoning in reckoned.values())
    alone = {key: reckoning.alone for key, reckoning in reckoned.items() if reckoning.alone}
    if 0 < len(alone) == compared and not any(rank["wrapped"] for rank in seen) and not run.is_one_mean(alone):
        each = _together([_judge([rank]) for rank in seen])
        return each._replace(unjudged=[f"{next(iter(updates.values()))[0]['line']}: {ALONE}", *each.unjudged])
    own = {place for (place, _), reckoning in reckoned.items() if reckoning.is_own}
    moved = {place for (place, _), ranks in whole.items() if any(update["moved"] for update in ranks)}  # as SAM does
    verdict = Verdict([], [], [], {"weights": 0, "receipts": compared})
    for (place, _), reckoning in sorted(reckoned.items(), key=lambda known: known[0]):
        verdict.notes.extend(reckoning.notes)
        verdict.unjudged.extend(reckoning.unjudged)
        are_meant = [fault for fault in reckoning.faults if place not in own or fault.kind not in ("uneven", "stale")]
        verdict.faults.extend(are_meant if place not in moved else [])
    verdict.faults.extend(_cleared(seen, kept | own | moved))
    doubts = weigh(run, verdict)  # which adds to its lists
    judge_schedules(seen[0], verdict)
    verdict.faults.extend(_scaled(updates, reckoned) + _traffic(seen, updates) + _events(seen, verdict.notes))
    verdict.faults.extend(_apart(seen, updates))
    if updates and not compared and not any(reckoning.unjudged for reckoning in reckoned.values()):
        verdict.unjudged.append("receipts, since what is stepped has no gradient from backward, or in another shape")
    left_out = len(by_key) - len(whole)
    verdict.unjudged.extend([f"{plural(left_out, 'update')}, which not all ranks make"] * (4 * left_out > len(by_key)))
    verdict.unjudged.extend(doubts * (not verdict.faults))
    verdict.unjudged.sort(key=lambda text: OWN_LOSS in text)
    kinds = {fault.kind for fault in verdict.faults}
    hidden = {by for kind, others in CAUSES.items() if kind in kinds for by in others}
    left = [
        fault._replace(kind=fault.kind.removeprefix("run's ")) for fault in verdict.faults if fault.kind not in hidden
    ]
    return verdict._replace(faults=left, facts=facts_of(run, seen))


def _reckon(seen: Seen, updates: Updates) -> tuple[dict[Key, Reckoning], set[int]]:
    """Compares each update; also returns optimizers whose gradients the script keeps elsewhere as it clears them."""
    reckoned = dict[Key, Reckoning]()
    kept = set[int]()
    before = dict[int, Tensor]()
    for (place, index), ranks in updates.items():
        places = ranks[0].get("places")
        if not places or any(update.get("places") != places for update in ranks):
            continue
        reckoning = Reckoning(seen, [_used(update, has_cleared=False) for update in ranks], before.get(place))
        is_unclear = reckoning.factor is None or reckoning.faults or reckoning.notes
        if is_unclear and any(backward["cleared"] for update in ranks for backward in update["backwards"]):
            every = Reckoning(seen, ranks, before.get(place))
            by_hand = not any(backward["cleared"] and backward["cleared"][1] for backward in ranks[0]["backwards"])
            if every.factor is not None or (by_hand and any(fault.kind == "lost" for fault in every.faults)):
                reckoning = every
                kept = kept | {place}
        reckoned[place, index] = reckoning
        before[place] = reckoning.closed
    return reckoned, kept


def _used(update: dict[str, Any], has_cleared: bool) -> dict[str, Any]:
    """The update with only the backwards that its step used."""
    return {**update, "backwards": [each for each in update["backwards"] if has_cleared or not each["cleared"]]}


def _cleared(seen: Seen, kept: Container[int]) -> list[Fault]:
    """Finds backwards that no step used, on lines whose other backwards steps do use."""
    faults = []
    for rank, place in ((each, place) for each in seen for place in each["rest"] if place not in kept):
        updates = [update for update in rank["updates"] if update["optimizer"] == place]
        used = [_used(update, has_cleared=False)["backwards"] for update in updates]
        every = [*(update["backwards"] for update in updates), rank["rest"][place]]
        own = {backward["line"] for backwards in (used if any(used) else every[:-1]) for backward in backwards}
        groups: dict[Any, list[int]] = defaultdict(list)  # the updates of backwards that went together
        for i, backward in ((i, backward) for i, backwards in enumerate(every) for backward in backwards):
            if backward["line"] in own and backward["cleared"] and backward["cleared"][1]:
                groups[tuple(backward["cleared"])].append(i)
        lengths = {*map(len, used)}
        is_often = 2 * len({indices[0] for indices in groups.values()}) > len(used)
        others = sorted(i[0] for (*_, ended), i in groups.items() if not ended and len(i) not in lengths)
        at_epochs = _are_multiples(others)
        left = [each["line"] for each in every[-1] if not each["cleared"] and each["line"] in own and rank["ended"]]
        for line in dict.fromkeys(line for _, line, _ in groups):
            of_line = [(ended, len(indices)) for (_, at, ended), indices in groups.items() if at == line]
            # Otherwise it is now and then, as for a loss that is not finite, or before the first update.
            tails = [num for ended, num in of_line if is_often or at_epochs or (ended and num != max(lengths))]
            if is_often and not all(ended for ended, _ in of_line):
                text = f"clears {sum(tails)} backwards before any step"
                faults.append(Fault("cleared", line, text, "clear gradients after the step alone"))
            elif tails:
                text = f"clears {plural(sum(tails), 'micro-batch')} at an epoch's end before any step"
                text += f", and no step follows the run's last {len(left)}" * bool(left)
                faults.append(Fault("tail", line, f"{text}{_share(sum(tails) + len(left), every)}", TAIL))
        if left:
            text = f"no step follows the run's last {plural(len(left), 'micro-batch')}{_share(len(left), every)}"
            faults.append(Fault("run's tail", left[-1], text, TAIL))
    return faults


def _share(num: int, backwards: Sequence[Sequence[Any]]) -> str:
    return f": {num / sum(map(len, backwards)):.0%} of all"


def _are_multiples(indices: Sequence[int]) -> bool:
    """True if epochs of equal length begin at these updates."""
    return len(indices) > 1 and indices[0] > 0 and all(index == (i + 1) * indices[0] for i, index in enumerate(indices))


def _events(seen: Seen, notes: list[str]) -> list[Fault]:
    """Finds what happens to gradients or models at the wrong moment."""
    faults = []
    for rank in seen:
        where: dict[tuple[str, str], list[int]] = defaultdict(list)  # updates, by kind and line
        clipped = set[int]()
        for update in rank["updates"]:
            lines = [backward["line"] for backward in update["backwards"]]
            for kind, line, before, by in update["events"]:
                clipped |= {update["index"]} if kind == "clip" else set()
                is_within = kind in EVENTS and {*lines[:before]} & {*lines[before:]}
                if line and by > LEAST.get(kind, -1) and (kind in WHERE or is_within):
                    where["idle clip" if kind == "clip" and by <= 1 else kind, line].append(update["index"])
        for (kind, line), indices in where.items():
            if kind == "idle clip":
                notes.append(f"{line}: clips in the middle of a window, which has changed nothing so far")
            elif kind != "late" or not clipped.issuperset(indices):
                text, hand = EVENTS[kind]
                faults.append(Fault(kind, line, f"{text} (first in update {indices[0]}; {len(indices)} times)", hand))
    return faults


def _scaled(updates: Updates, reckoned: Mapping[Key, Reckoning]) -> list[Fault]:
    """Finds steps with a gradient in which a GradScaler's factor still is."""
    faults: dict[str, Fault] = {}
    for key, (update, *_) in updates.items():
        scale = update["left_scaled"]
        factor = reckoned[key].factor if key in reckoned else None
        if scale > 1 and factor is not None and factor * scale > 2:
            text = f"steps with a gradient that is {scale:.6g} times too large: nothing unscales it"
            hand = "call scaler.step(optimizer), which unscales it"
            faults[update["line"]] = Fault("scaled", update["line"], text, hand, "Accumulator(..., scaler=scaler)")
    return [*faults.values()]


def _traffic(seen: Seen, updates: Updates) -> list[Fault]:
    """Finds reductions before a window's last backward: after it, ranks with different gradients have equal ones."""
    early = Counter[str]()  # by line
    windows = 0
    for ranks in updates.values() if len(seen) > 1 else ():
        every = [update["backwards"] for update in ranks]
        is_known = all("left" in backward for backwards in every for backward in backwards)
        if len({*map(len, every)}) > 1 or len(every[0]) < 2 or not is_known:
            continue
        windows += 1
        is_whole = columns(seen[0], ranks[0]["places"])["copies"] == 0
        for of_ranks in list(zip(*every, strict=True))[:-1]:
            after, got = (torch.stack([backward[key] for backward in of_ranks]) for key in ("left", "received"))
            early[of_ranks[0]["line"]] += bool((is_whole & _alike(after) & ~_alike(got)).any())
    num = early.total()
    if 2 * num <= windows:  # none, or now and then
        return []
    text = f"{num / windows + 1:.3g} reductions per update, and the last would do"
    hand = "run forward and backward of all micro-batches of a window but the last in model.no_sync()"
    return [Fault("traffic", early.most_common(1)[0][0], text, hand)]


def _alike(values: Tensor) -> Tensor:
    """Tells which parameters have equal receipts on all ranks, none of them 0."""
    size = values.abs().amax((0, 2)).clamp(min=1e-300)
    return ((values - values[:1]).abs().amax((0, 2)) <= 1e-6 * size) & values.any(-1).all(0)


def _apart(seen: Seen, updates: Updates) -> list[Fault]:
    """Finds parameters that were equal on all ranks at first and not at the end."""
    known = [ranks for ranks in updates.values() if all("places" in update for update in ranks)]
    if len(seen) == 1 or not known:
        return []
    places = known[0][0]["places"]
    known = [ranks for ranks in known if all(update["places"] == places for update in ranks)]
    about = columns(seen[0], places)
    first, last = (same_on_all([update["values"] for update in known[i]], about["vector"]) for i in (0, -1))
    apart = [about["name"][i] for i in (first & ~last).nonzero().flatten().tolist()]
    text = f"{shorten(apart)} were the same on all ranks, and differ in update {known[-1][0]['index']}"
    return [Fault("apart", known[0][0]["line"], text, "reduce every gradient on every rank")] if apart else []
