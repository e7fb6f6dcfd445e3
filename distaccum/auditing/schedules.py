"""Schedules: where each is at the end of a run, and how long it was made for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, final

from .reckoning import Fault

LENGTHS = ("total_steps", "T_max", "total_iters")  # names in torch's schedules
WARMS_UP = ("LinearLR", "ConstantLR")  # whose end is not the run's


@final
class Schedules:
    """The schedules that a run steps, with the line that does."""

    def __init__(self) -> None:
        self.known: dict[int, dict[str, Any]] = {}  # by id, in plain numbers

    def note(self, schedule: Any, line: str, place: int) -> None:
        """Notes where a schedule is after its step, since it may be gone when the run ends."""
        self.known[id(schedule)] = _about(schedule, line, place)


def _about(schedule: Any, line: str, place: int) -> dict[str, Any]:
    rates = zip(schedule.get_last_lr(), schedule.base_lrs, strict=True)
    at, length = int(schedule.last_epoch), _length(schedule)
    has_ended = abs(at - length) <= max(1, 0.01 * length) if length else all(now <= 0.01 * base for now, base in rates)
    name = type(schedule).__name__
    return {"line": line, "optimizer": place, "name": name, "at": at, "length": length, "has_ended": has_ended}


def _length(schedule: Any) -> int | None:
    """The number of steps that it was made for, if it tells."""
    given = [getattr(function, "keywords", {}) for function in getattr(schedule, "lr_lambdas", ()) or ()]
    lengths = [options.get("num_training_steps") for options in given]
    lengths += [getattr(schedule, name, None) for name in LENGTHS if type(schedule).__name__ not in WARMS_UP]
    return next((int(length) for length in lengths if length), None)


def judge_lengths(rank: dict[str, Any], notes: list[str]) -> list[Fault]:
    """Finds schedules that were made for micro-batches and step once per update, so that they never end."""
    faults = []
    for known in rank["schedules"].values() if not rank["is_cut"] and rank["ended"] else ():
        updates = [update for update in rank["updates"] if update["optimizer"] == known["optimizer"]]
        sizes = Counter(len(update["backwards"]) for update in updates)
        if not known["length"] or not sizes:
            continue
        (steps, _), *_ = sizes.most_common(1)
        text = f"{known['name']} is at step {known['at']} of {known['length']} when the run ends"
        off = abs(known["at"] * steps - known["length"])  # less than an update, where it was made for micro-batches
        if steps > 1 and off < steps and known["at"] > 2:
            text += f"; it was made for micro-batches, of which an update has {steps}"
            faults.append(Fault("schedule", known["line"], text, "make it for the number of updates"))
        elif known["at"] < 0.9 * known["length"]:
            notes.append(f"{known['line']}: {text}")
    return faults


def ending(rank: dict[str, Any], ids: Sequence[int]) -> str:
    """How these schedules end: "with the run", "unknown" where the audit cut it, or ""."""
    known = [rank["schedules"][key] for key in ids if key in rank["schedules"]]
    if known and all(each["has_ended"] for each in known):
        return "with the run"
    return "unknown" if rank["is_cut"] and any(each["length"] for each in known) else ""
