"""The verdict over all ranks: faults, and notes on what is none or was not seen."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Container, Sequence, Set
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ...law import shorten
from .receipts import Fault, Key, Reckoned, Reckoning, same_on_all
from .weights import CONTRAST, Updates, among_updates, is_one_mean, terms_of, within_updates, without_backward

Seen = Sequence[dict[str, Any]]  # by rank
Verdict = tuple[list[Fault], list[str], dict[str, int]]
ONE = torch.ones(1)
TAIL = "step at the end of an epoch too, and divide by the number of micro-batches that there are"
TRAINERS = {
    "AccumulatingTrainer": "AccumulatingTrainer(..., count=..., reduction=...) says what the loss is; it divides alone",
    "Trainer": "from distaccum.transformers import AccumulatingTrainer: use it in the place of Trainer, or with a "
    "subclass: class Mine(AccumulatingTrainer, SFTTrainer)",
}
EVENTS = {
    "clip": ("clips in the middle of a window, so that early micro-batches shrink again", "clip before the step"),
    "unscale": ("unscales in the middle of a window, to which others are added", "call unscale_ before the step"),
    "schedule": ("steps the schedule in the middle of a window", "step it after the optimizer, once per update"),
    "eval": ("trains in eval mode, and did not at first", "call model.train() after each evaluation"),
}


def verdict(seen: Seen) -> Verdict:
    """Faults, notes, and how much was judged."""
    faults, notes, judged = _each(seen) if _share_nothing(seen) else _together([_judge(seen)])
    trainers = {update.get("trainer", "") for one in seen for update in one["updates"]}
    return [_cured(one, trainers) for one in faults], notes, judged


def _each(seen: Seen) -> Verdict:
    return _together([_judge([one]) for one in seen])


def _together(judged: Sequence[Verdict]) -> Verdict:
    every = [one for found, _, _ in reversed(judged) for one in reversed(found)]
    faults = {(one.kind, one.text if one.kind == "shared" else one.where): one for one in every}
    notes = dict.fromkeys(note for _, notes, _ in judged for note in notes if note)
    return sorted(faults.values(), key=lambda one: one.where), list(notes), judged[-1][2]


def _cured(one: Fault, trainers: Set[str]) -> Fault:
    """With what a Trainer's user can do, who writes no loop."""
    cure = TRAINERS.get(next(iter(trainers))) if len(trainers) == 1 else None
    return one if cure is None or one.window == CONTRAST else one._replace(window=cure)


def _judge(seen: Seen) -> Verdict:
    by_key: dict[Key, list[dict[str, Any]]] = defaultdict(list)
    for one in seen:
        for update in one["updates"]:
            by_key[update["optimizer"], update["index"]].append(update)
    updates = {key: ranks for key, ranks in by_key.items() if len(ranks) == len(seen)}
    found = _reckon(seen, updates)
    moved = {place for (place, _), ranks in updates.items() if any(one.get("moved") for one in ranks)}  # SAM's
    known = ((place, one) for place, every in found.faults.items() for one in every if place not in moved)
    faults = [one for place, one in known if place not in found.own or one.kind not in ("uneven", "stale")]
    faults += _cleared(seen, found.kept | found.own | moved)
    notes = [_pace(seen)] * any(one["updates"] for one in seen) + found.notes
    updates = {key: [_used(one, key[0] in found.kept) for one in ranks] for key, ranks in updates.items()}
    updates = {key: ranks for key, ranks in updates.items() if all(one["backwards"] for one in ranks)}
    terms = terms_of(updates, notes)
    apart, are_alone = _apart(seen, updates, notes), 0 < len(found.alone) == found.compared
    if are_alone and not any(one["wrapped"] for one in seen) and not is_one_mean(terms, found.alone):
        each, more, judged = _each(seen)
        text = (
            "ranks never reduce, as independent runs or local SGD do; reduce each gradient if they are to train as one"
        )
        note = notes[-1] if apart is None else f"{next(iter(updates.values()))[0]['line']}: {text}"
        return each, [note, *more], judged
    faults += within_updates(terms, len(seen)) + among_updates(terms, updates, found, notes)
    faults += without_backward(terms, updates)
    faults += _traffic(seen, updates, notes) + _events(seen, updates) + (apart or [])
    if apart is None:
        faults = [one for one in faults if one.kind != "not reduced"]
    if any(one.kind == "cleared" for one in faults):  # what is left of a window is no short one
        faults = [one for one in faults if one.kind != "window"]
    if not found.compared:
        notes.append("not seen: receipts, since what autograd gives, or what is stepped, has no parameter's shape")
    return faults, notes, {"weights": len(terms), "receipts": found.compared}


def _reckon(seen: Seen, updates: Updates) -> Reckoned:
    found, before = Reckoned(), dict[int, Tensor]()
    for (place, index), ranks in updates.items():
        places = [one.get("places") for one in ranks]
        if not places[0] or any(one != places[0] for one in places):
            continue
        used = [_used(one, has_cleared=False) for one in ranks]
        receipts = Reckoning(seen, used, before.get(place))
        factor, faults, notes = receipts.judge()
        if (factor is None or faults or notes) and any(
            backward["cleared"] for one in ranks for backward in one["backwards"]
        ):
            every = Reckoning(seen, ranks, before.get(place))
            again = every.judge()
            if again[0] is not None or any(fault.kind == "lost" for fault in again[1]):
                found.kept.add(place)
                (factor, faults, notes), receipts = again, every
        found.faults[place] += faults
        found.notes += notes
        found.own |= {place} if receipts.is_own else set()
        before[place] = receipts.closed
        found.compared += factor is not None or bool(faults)
        found.shared[place, index] = receipts.shared
        found.tasks |= {(place, index)} if receipts.is_tasks else set()
        found.alone |= {(place, index): receipts.alone} if receipts.alone else {}
        found.factors |= {} if factor is None else {(place, index): factor}
    return found


def _share_nothing(seen: Seen) -> bool:
    """True for ranks that train parameters of their own, as stages of a pipeline do: each is judged alone."""
    first = [one["updates"][0] for one in seen if one["updates"] and "places" in one["updates"][0]]
    if len(first) < max(2, len(seen)) or seen[0]["sharded"]:
        return False
    places, values = first[0]["places"], [one["values"] for one in first]
    alike = all(one["places"] == places for one in first) and len({one.shape for one in values}) == 1
    if alike and same_on_all(values, places, seen[0]["vectors"]).any():
        return False
    alone = [Reckoning([one], [update], None).judge() for one, update in zip(seen, first, strict=True)]
    return all(factor is not None or faults for factor, faults, _ in alone)  # not so for shards of FSDP1


def _used(update: dict[str, Any], has_cleared: bool) -> dict[str, Any]:
    """The update with the backwards that its step used."""
    which = [i for i, one in enumerate(update["backwards"]) if has_cleared or not one["cleared"]]
    if len(which) == len(update["backwards"]):
        return update
    parts = {key: update[key][which] for key in ("received",) if key in update}
    left = {"left": [update["left"][i] for i in which]} if "left" in update else {}
    return {**update, **parts, **left, "backwards": [update["backwards"][i] for i in which]}


def _cleared(seen: Seen, kept: Container[int]) -> list[Fault]:
    """Backwards like those that steps use, which none used."""
    faults = []
    for one, place in ((rank, place) for rank in seen for place in rank["rest"] if place not in kept):
        used = [update["backwards"] for update in one["updates"] if update["optimizer"] == place]
        lengths = {sum(not backward["cleared"] for backward in backwards) for backwards in used}
        own = {backward["line"] for backwards in used for backward in backwards if not backward["cleared"]}
        empty = (
            update for update in one["updates"] if update["optimizer"] == place and not update.get("closed", ONE).any()
        )
        own |= {update["backwards"][-1]["line"] for update in empty if update["backwards"][-1]["cleared"]}
        groups: dict[tuple[int, str, bool], int] = Counter()
        when: dict[tuple[int, str, bool], int] = {}
        for i, backward in ((i, each) for i, each in enumerate([*used, one["rest"][place]]) for each in each):
            if backward["cleared"] and backward["cleared"][1] and backward["line"] in own:
                groups[tuple(backward["cleared"])] += 1
                when.setdefault(tuple(backward["cleared"]), i)
        parts = {key: i for key, i in when.items() if not key[2] and groups[key] not in lengths}
        # Else now and then, as where a loss is not finite, or before the first update
        is_often = 2 * len({*when.values()}) > len(used) or (len(parts) > 1 and _are_multiples([*parts.values()]))
        by_line: dict[tuple[str, bool], int] = defaultdict(int)
        for (_, line, ended), num in groups.items():
            if is_often or (ended and num != max(lengths)):
                by_line[line, ended] += num
        for (line, ended), num in by_line.items():
            if (line, False) not in by_line:
                faults.append(
                    Fault("tail", line, f"clears {num} micro-batches at an epoch's end before any step", TAIL)
                )
            elif not ended:
                text = f"clears {num + by_line.get((line, True), 0)} backwards before any step"
                faults.append(Fault("cleared", line, text, "clear gradients after the step alone"))
        left = [backward["line"] for backward in one["rest"][place] if not backward["cleared"]]
        if left := [line for line in left if line in own]:
            faults.append(Fault("tail", left[-1], f"no step follows the run's last {len(left)} micro-batches", TAIL))
    return faults


def _are_multiples(indices: Sequence[int]) -> bool:
    """True for updates at which epochs of equal length begin."""
    return indices[0] > 0 and all(one == (i + 1) * indices[0] for i, one in enumerate(indices))


def _events(seen: Seen, updates: Updates) -> list[Fault]:
    faults = []
    for kind, line, numbers in ((*key, numbers) for one in seen for key, numbers in one["found"].items()):
        if kind == "schedule" and 2 * numbers["times"] < len(seen[0]["updates"]):
            continue  # at the end of an epoch, which may be anywhere in a window
        text, hand = EVENTS[kind]
        faults.append(
            Fault(kind, line, f"{text} (first in update {numbers['update']}; {numbers['times']} times)", hand)
        )
    first = [ranks[0]["schedules"] for (place, _), ranks in updates.items() if place == min(updates)[0]]
    for line, known in Counter(each for one in first for each in one.items() if each[1][0] > 1):
        if 2 * sum(one.get(line) == known for one in first) >= len(first):
            hand, window = "step it once per update, on any number of ranks", {}
            text, by_window = f"steps the schedule {known[0]} times per update", known[1]
            if by_window:
                text += ", since window.step() steps it too"
                hand, window = "leave this step out", {"window": "or leave scheduler= out of the Accumulator"}
            faults.append(Fault("schedule", line, text, hand, **window))
    return faults


def _traffic(seen: Seen, updates: Updates, notes: list[str]) -> list[Fault]:
    """Reductions before a window's last backward: where gradients are alike on all ranks that got different ones."""
    early, scattered, mixed = Counter[str](), Counter[str](), 0  # by line
    windows = sent = least = shards = 0  # bytes
    for ranks in updates.values() if len(seen) > 1 else ():
        left = [one.get("left") or [None] for one in ranks]
        if len({len(one) for one in left}) > 1 or any(each is None for one in left for each in one) or len(left[0]) < 2:
            continue
        places, windows = ranks[0]["places"], windows + 1
        size = torch.tensor([seen[0]["bytes"][place] for place in places])
        copies = torch.tensor([seen[0]["sharded"].get(place, 0) for place in places])
        shards = int(size[copies > 0].sum())
        for k, backward in enumerate(ranks[0]["backwards"][:-1]):
            after, got = (torch.stack([one[key][k] for one in ranks]) for key in ("left", "received"))
            reduced = (copies == 0) & _alike(after, 1) & ~_alike(got, 1)
            if reduced.any():
                early[backward["line"]] += 1
                sent += int(size[reduced].sum())
            scattered[backward["line"]] += bool(after[:, copies > 0].any())
            mixed += bool(((copies > 1) & _alike(after, len(seen) // copies.clamp(min=1)) & ~_alike(got, 1)).any())
        least += int(size[(copies == 0) & after.any(-1).any(0)].sum())
    if num := scattered.total():
        (line, _), times = scattered.most_common(1)[0], f"{num / windows + 1:.3g} times per update"
        note = f"{line}: shards are reduced {times}, {_mib(shards)} each, which saves memory"
        more = "; so are their replicas, which does not: set_requires_all_reduce(False) before a window's last backward"
        notes.append(note + more * (mixed > 0))
    if not early:
        return []
    num = early.total()
    text = f"{num / windows + 1:.3g} reductions of {_mib(sent / num)} per update, and the last would do"
    if abs(sent * windows - least * num) > 0.01 * least * num:  # of a part of the parameters
        text += f" ({_mib((sent + least) / windows)}, where {_mib(least / windows)} is enough)"
    hand = "run forward and backward of all micro-batches of a window but the last in model.no_sync()"
    return [Fault("traffic", early.most_common(1)[0][0], text, hand)]


def _mib(size: float) -> str:
    return f"{size / 2**20:.3g} MiB"


def _alike(values: Tensor, groups: Tensor | int) -> Tensor:
    """Tells which parameters have as many different receipts, none of them 0, as there are groups of ranks."""
    size = values.abs().amax((0, 2)).clamp(min=1e-300)
    same = (values[:, None] - values[None]).abs().amax(-1) <= 1e-6 * size  # rank, rank, parameter
    firsts = (~(same & torch.ones(len(values), len(values)).tril(-1).bool()[:, :, None]).any(1)).sum(0)
    return (firsts <= groups) & values.any(-1).all(0)


def _apart(seen: Seen, updates: Updates, notes: list[str]) -> list[Fault] | None:
    """Parameters that were the same on all ranks at first, and are not any more; None if they come together again."""
    known = [ranks for ranks in updates.values() if all(one.get("places") for one in ranks)]
    known = [ranks for ranks in known if ranks[0]["optimizer"] == known[0][0]["optimizer"]]
    if len(seen) == 1 or not known:
        return []
    places = known[0][0]["places"]
    if any(one["places"] != places for ranks in known for one in ranks):
        return []
    same = [same_on_all([one["values"] for one in ranks], places, seen[0]["vectors"]) for ranks in known]
    if any(bool((~before & now).any()) for before, now in pairwise(same)):
        notes.append(f"{known[0][0]['line']}: each rank steps alone, and parameters are averaged now and then")
        return None
    apart = [seen[0]["names"][places[i]] for i in (same[0] & ~same[-1]).nonzero().flatten().tolist()]
    text = f"{shorten(apart)} were the same on all ranks, and differ in update {known[-1][0]['index']}"
    return [Fault("apart", known[0][0]["line"], text, "reduce every gradient on every rank")] if apart else []


def _pace(seen: Seen) -> str:
    """How long the slowest rank waited for its loader, and the quickest for other ranks, after the first update."""
    every = [one["updates"][1:] for one in seen]
    total = sum(update["seconds"] for update in every[0]) or 1.0
    loader = max(sum(update["waited"] for update in updates) for updates in every) / total
    works = [[update["worked"] for update in updates] for updates in every]  # up to where the last backward begins
    others = sum(max(one) - min(one) for one in zip(*works, strict=False)) / total
    drawn = [[backward["drawn"] for backward in update["backwards"]] for update in every[0]]
    at_once = sum(two[0] - one[-1] >= len(two) > 1 for one, two in pairwise(drawn))
    text = f"waits for the loader {loader:.0%}, and for other ranks {others:.0%} of the time"
    text += ", and draws each window at once" if at_once * 2 > len(drawn) - 1 > 0 else ""
    return f"{text} (between its steps)" if total > 2 and max(loader, others) > 0.1 else ""
