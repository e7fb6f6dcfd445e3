"""The verdict over all ranks: faults, and notes on what is none or was not seen."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ...law import shorten
from .receipts import Fault, Reckoning, same_on_all
from .weights import Key, among_updates, terms_of, within_updates

Seen = Sequence[dict[str, Any]]  # by rank
Updates = Mapping[Key, list[dict[str, Any]]]  # by optimizer and index, by rank
TAIL = "step at the end of an epoch too, and divide by the number of micro-batches that there are"
EVENTS = {
    "clip": ("clips in the middle of a window, so that early micro-batches shrink again", "clip before the step"),
    "unscale": ("unscales in the middle of a window, to which others are added", "call unscale_ before the step"),
    "schedule": ("steps the schedule in the middle of a window", "step it after the optimizer, once per update"),
    "empty": ("steps without a gradient, since all were cleared", "clear gradients after the step alone"),
    "eval": ("trains in eval mode, and did not at first", "call model.train() after each evaluation"),
}


def verdict(seen: Seen) -> tuple[list[Fault], list[str], str]:
    """Faults, notes, and what was looked at."""
    by_key: dict[Key, list[dict[str, Any]]] = defaultdict(list)
    for one in seen:
        for update in one["updates"]:
            by_key[update["optimizer"], update["index"]].append(update)
    updates = {key: ranks for key, ranks in by_key.items() if len(ranks) == len(seen)}
    notes = [_pace(seen)] if any(one["updates"] for one in seen) else []
    faults: list[Fault] = []
    factors: dict[Key, float] = {}
    before: dict[int, Tensor] = {}
    for (place, index), ranks in updates.items():
        places = [one.get("places") for one in ranks]
        if places[0] and all(one == places[0] for one in places):
            receipts = Reckoning(seen, ranks, before.get(place))
            factor, found, more = receipts.judge()
            faults, notes, before[place] = faults + found, notes + more, receipts.closed
            if factor is not None:
                factors[place, index] = factor
    terms = terms_of(updates, notes)
    faults += _cleared(seen, updates) + within_updates(terms, len(seen)) + among_updates(terms, len(seen), factors)
    faults += _traffic(seen, updates, notes) + _events(seen, updates) + _apart(seen, updates)
    if any(one.kind == "cleared" for one in faults):  # what is left of a window is no short one
        faults = [one for one in faults if one.kind != "window"]
    once = {(one.kind, one.where): one for one in reversed(faults)}
    about = f"weights in {len(terms)} criterions, receipts of {len(factors)} updates, order of calls"
    if not factors:
        notes.append("not seen: receipts, since what autograd gives, or what is stepped, has no parameter's shape")
    return sorted(once.values(), key=lambda one: one.where), list(dict.fromkeys(filter(None, notes))), about


def _cleared(seen: Seen, updates: Updates) -> list[Fault]:
    """Backwards like those that steps use, which none used."""
    faults = []
    for one in seen:
        lost = [cleared for cleared in one["cleared"] if set(cleared["lines"]) & set(one["own"][cleared["optimizer"]])]
        usual = {place: max(len(one["backwards"]) for one in ranks) for (place, _), ranks in updates.items()}
        times = Counter(place for place, _ in updates)
        short = [  # no whole window, now and then, as where its norm is not finite
            cleared
            for cleared in lost
            if len(cleared["lines"]) < usual.get(cleared["optimizer"], 1) or len(lost) > times[cleared["optimizer"]]
        ]
        for line in {cleared["line"] for cleared in short}:
            here = [cleared for cleared in short if cleared["line"] == line]
            num = sum(len(cleared["lines"]) for cleared in here)
            if all(cleared["ended"] for cleared in here):
                faults.append(
                    Fault("tail", line, f"clears {num} micro-batches at an epoch's end before any step", TAIL)
                )
            else:
                hand = "clear gradients after the step alone"
                faults.append(Fault("cleared", line, f"clears {num} backwards before any step", hand))
        for place, lines in one["pending"].items():
            if left := [line for line in lines if line in one["own"][place]]:
                faults.append(
                    Fault("tail", left[-1], f"no step follows the run's last {len(left)} micro-batches", TAIL)
                )
    return faults


def _events(seen: Seen, updates: Updates) -> list[Fault]:
    faults = []
    for kind, line, numbers in ((*key, numbers) for one in seen for key, numbers in one["found"].items()):
        text, hand = EVENTS[kind]
        faults.append(
            Fault(kind, line, f"{text} (first in update {numbers['update']}; {numbers['times']} times)", hand)
        )
    first = [ranks[0]["schedules"] for (place, _), ranks in updates.items() if place == min(updates)[0]]
    for line, num in Counter(each for one in first for each in one.items() if each[1] > 1):
        if 2 * sum(one.get(line) == num for one in first) >= len(first):
            hand = "step it once per update, on any number of ranks"
            faults.append(Fault("schedule", line, f"steps the schedule {num} times per update", hand))
    return faults


def _traffic(seen: Seen, updates: Updates, notes: list[str]) -> list[Fault]:
    """Reductions before a window's last backward: where gradients are alike on all ranks that got different ones."""
    early: Counter[str] = Counter()
    windows = sharded = 0
    for ranks in updates.values() if len(seen) > 1 else ():
        left = [one.get("left") or [None] for one in ranks]
        if len({len(one) for one in left}) > 1 or any(each is None for one in left for each in one) or len(left[0]) < 2:
            continue
        whole = [i for i, place in enumerate(ranks[0]["places"]) if place not in seen[0]["sharded"]]
        parts = [i for i, place in enumerate(ranks[0]["places"]) if place in seen[0]["sharded"]]
        windows += 1
        for k, backward in enumerate(ranks[0]["backwards"][:-1]):
            after, got = (torch.stack([one[key][k] for one in ranks]) for key in ("left", "received"))
            sharded += bool(parts) and bool(after[:, parts].any())
            if whole and after[:, whole].any() and _alike(after[:, whole]) and not _alike(got[:, whole]):
                early[backward["line"]] += 1
    size = f"{seen[0]['bytes'] / 2**20:.3g} MiB"
    if sharded:
        notes.append(
            f"shards are reduced {sharded / windows + 1:.3g} times per update, {size} each, which saves memory"
        )
    if not early:
        return []
    text = f"{early.total() / windows + 1:.3g} reductions of {size} per update, and the last would do"
    hand = "run forward and backward of all micro-batches of a window but the last in model.no_sync()"
    return [Fault("traffic", early.most_common(1)[0][0], text, hand)]


def _alike(values: Tensor) -> bool:
    return float((values - values[:1]).abs().max()) <= 1e-6 * float(values.abs().max())


def _apart(seen: Seen, updates: Updates) -> list[Fault]:
    """Parameters that were the same on all ranks at first, and are not any more."""
    known = [ranks for ranks in updates.values() if all(one.get("places") for one in ranks)]
    if len(seen) == 1 or not known:
        return []
    first, last = known[0], next(one for one in reversed(known) if one[0]["optimizer"] == known[0][0]["optimizer"])
    places = first[0]["places"]
    if any(one["places"] != places for one in (*first, *last)):
        return []
    begun, ended = (
        same_on_all([one["values"] for one in ranks], places, seen[0]["vectors"]) for ranks in (first, last)
    )
    apart = [seen[0]["names"].get(places[i], "a parameter") for i in (begun & ~ended).nonzero().flatten().tolist()]
    text = f"{shorten(apart)} were the same on all ranks, and differ in update {last[0]['index']}"
    return [Fault("apart", first[0]["line"], text, "reduce every gradient on every rank")] if apart else []


def _pace(seen: Seen) -> str:
    """How long the slowest rank waited for its loader, and the quickest for other ranks."""
    every = [one["updates"] for one in seen]
    total = sum(update["seconds"] for update in every[0]) or 1.0
    loader = max(sum(update["waited"] for update in updates) for updates in every) / total
    begins = [[update["backwards"][-1]["begun"] for update in updates] for updates in every]
    others = sum(max(one) - min(one) for one in zip(*begins, strict=False)) / total
    drawn = [[backward["drawn"] for backward in update["backwards"]] for update in every[0]]
    at_once = sum(two[0] - one[-1] >= len(two) > 1 for one, two in pairwise(drawn))
    text = f"waits for the loader {loader:.0%}, and for other ranks {others:.0%} of the time"
    text += ", and draws each window at once" if at_once * 2 > len(drawn) - 1 > 0 else ""
    return f"{text} (between its steps)" if total > 2 and max(loader, others) > 0.1 else ""
