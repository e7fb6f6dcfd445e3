"""Schedules: where each is at the end of a run, and how long it was made for."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from .parts import Run
from .reckoning import FACT, UNJUDGED, Finding

LENGTHS = ("total_steps", "T_max", "total_iters")  # names in torch's schedules
WARMS_UP = ("LinearLR", "ConstantLR")  # whose end is not the run's


def about(schedule: Any, line: str, place: int) -> dict[str, Any]:
    """Where a schedule is after a step, with its line, in plain numbers: it may be gone when the run ends."""
    rates = zip(schedule.get_last_lr(), schedule.base_lrs, strict=True)
    at = int(schedule.last_epoch)
    length = _length(schedule)
    has_ended = hasattr(schedule, "lr_lambdas") and all(now <= 0.01 * base for now, base in rates)
    if length:
        has_ended = abs(at - length) <= max(1, 0.01 * length)
    known = {"line": line, "optimizer": place, "name": type(schedule).__name__, "at": at, "length": length}
    return known | {"has_ended": has_ended, "restarts": hasattr(schedule, "T_0")}


def _length(schedule: Any) -> int | None:
    """The number of steps that it was made for, if it tells."""
    given = [getattr(function, "keywords", {}) for function in getattr(schedule, "lr_lambdas", ()) or ()]
    lengths = [options.get("num_training_steps") for options in given]
    lengths += [getattr(schedule, name, None) for name in LENGTHS if type(schedule).__name__ not in WARMS_UP]
    return next((int(length) for length in lengths if length), None)


def judge_schedules(run: Run) -> Iterator[Finding]:
    """Finds schedules that step several times per update, or that were made for micro-batches and never end."""
    rank = run.seen[0]
    is_whole = rank["ended"] and not rank["is_cut"]
    updates = run.of_ranks[0]
    own = {key: known for key, known in rank["schedules"].items() if known["optimizer"] == run.place}
    for key, known in own.items():
        of = f" of {known['length']}" * bool(known["length"])
        yield Finding(FACT, known["line"], f"{known['name']} is at step {known['at']}{of} at the end")
        if not updates or known["has_ended"]:  # also one that was made for as many steps as it makes
            continue
        num = int(statistics.median(sum(whose == key for *_, whose in update["events"]) for update in updates))
        steps = int(statistics.median(len(update["backwards"]) for update in updates))
        length = known["length"] or 0
        text = f"steps the schedule {num} times per update"
        if num > 1 and (known["restarts"] or (rank["is_cut"] and length)):
            why = "what its T_0 counts" if known["restarts"] else "where the whole run would end it"
            yield Finding(UNJUDGED, known["line"], f"{text}, and {why}")
        elif num > 1:
            hand = "step it once per update: after the optimizer, or by window.step()"
            lines = (line for update in updates for _, line, _, whose in update["events"] if whose == key)
            yield Finding("schedule", statistics.mode(lines), text, hand)
        elif is_whole and steps > 1 and known["at"] > 2 and abs(known["at"] * steps - length) < steps:
            text = f"{known['name']} is at step {known['at']} of {length} when the run ends: made for micro-batches"
            yield Finding("schedule", known["line"], text, "make it for the number of updates")
