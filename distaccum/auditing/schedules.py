"""Schedules: where each is at the end of a run, and how long it was made for."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from .parts import Run
from .reckoning import NOTE, UNJUDGED, Finding

LENGTHS = ("total_steps", "T_max", "total_iters")  # names in torch's schedules
WARMS_UP = ("LinearLR", "ConstantLR")  # whose end is not the run's


def about(schedule: Any, line: str, place: int) -> dict[str, Any]:
    """Where a schedule is after a step, with its line, in plain numbers: it may be gone when the run ends."""
    rates = zip(schedule.get_last_lr(), schedule.base_lrs, strict=True)
    at = int(schedule.last_epoch)
    length = _length(schedule)
    has_ended = abs(at - length) <= max(1, 0.01 * length) if length else all(now <= 0.01 * base for now, base in rates)
    name = type(schedule).__name__
    return {"line": line, "optimizer": place, "name": name, "at": at, "length": length, "has_ended": has_ended}


def _length(schedule: Any) -> int | None:
    """The number of steps that it was made for, if it tells."""
    given = [getattr(function, "keywords", {}) for function in getattr(schedule, "lr_lambdas", ()) or ()]
    lengths = [options.get("num_training_steps") for options in given]
    lengths += [getattr(schedule, name, None) for name in LENGTHS if type(schedule).__name__ not in WARMS_UP]
    return next((int(length) for length in lengths if length), None)


def judge_schedules(run: Run) -> Iterator[Finding]:
    """Finds schedules that step several times per update, or that were made for micro-batches and never end."""
    rank = run.seen[0]
    for key, known in rank["schedules"].items():
        updates = [update for update in rank["updates"] if update["optimizer"] == known["optimizer"]]
        stepped = [[line for _, line, _, whose in update["events"] if whose == key] for update in updates]
        num = int(statistics.median(map(len, stepped))) if updates else 0
        lines = {line for of_update in stepped for line in of_update}
        where = next(filter(None, sorted(lines)), known["line"])
        if num > 1:
            yield _often(rank, known, where, f"steps the schedule {num} times per update", by_window="" in lines)
        elif updates and known["length"] and rank["ended"] and not rank["is_cut"]:
            steps = int(statistics.median(len(update["backwards"]) for update in updates))
            text = f"{known['name']} is at step {known['at']} of {known['length']} when the run ends"
            off = abs(known["at"] * steps - known["length"])  # less than an update, where made for micro-batches
            if steps > 1 and off < steps and known["at"] > 2:
                text += f"; it was made for micro-batches, of which an update has {steps}"
                yield Finding("schedule", where, text, "make it for the number of updates")
            elif known["at"] < 0.9 * known["length"]:
                yield Finding(NOTE, where, text)


def _often(rank: dict[str, Any], known: dict[str, Any], where: str, text: str, by_window: bool) -> Finding:
    """Judges a schedule that steps several times per update: one that was made for as many steps ends with the run."""
    if by_window:
        window = "or leave scheduler= out of the Accumulator"
        return Finding("schedule", where, f"{text}, since window.step() steps it too", "leave this step out", window)
    if known["has_ended"]:
        return Finding(NOTE, where, f"{text}; it was made for so many, and ends with the run")
    if rank["is_cut"] and known["length"]:
        return Finding(UNJUDGED, where, f"{text}, and where the whole run would end it")
    return Finding("schedule", where, text, "step it after the optimizer, once per update, on any number of ranks")
