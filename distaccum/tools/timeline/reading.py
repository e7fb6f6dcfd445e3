"""The traces of a folder, on one clock."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...observers.trace_file import DEVICE, HOST, VERSION

COMPUTE = ("forward", "backward")
ON_DEVICE = {*COMPUTE, "reduction", "step"}  # by the device's own clock, where the trace has it


@dataclass(frozen=True)
class Span:
    name: str
    begin: float  # milliseconds, on a clock that all ranks have in common
    end: float
    about: Mapping[str, Any]

    @property
    def update(self) -> int:
        return int(self.about.get("update", -1))


@dataclass(frozen=True)
class RankTrace:
    rank: int
    about: Mapping[str, Any]  # of the whole file
    spans: list[Span]


def read_traces(folder: Path) -> list[RankTrace]:
    """The newest trace of each rank, on one clock."""
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}; name the one that was given to Accumulator(trace=...)")
    if not (folder / "rank0.json").exists():
        others = sorted(path.name for path in folder.glob("rank*.json"))
        seen = f"only {', '.join(others[:4])}" if others else "no trace"
        raise ValueError(f"{folder} has {seen}, expected rank0.json and one for each rank; copy them to one folder")
    first = _read_one(folder, 0)
    ranks = int(first.about["ranks"])
    missing = [str(rank) for rank in range(1, ranks) if not (folder / f"rank{rank}.json").exists()]
    if missing:
        raise ValueError(
            f"{folder} has no trace of rank {', '.join(missing)} of {ranks}; each node writes those of its own ranks, "
            "so copy them to one folder"
        )
    traces = [first, *(_read_one(folder, rank) for rank in range(1, ranks))]
    for trace in traces:
        if (seen := trace.about["ranks"]) != ranks:
            raise ValueError(
                f"{folder / f'rank{trace.rank}.json'} is of a job of {seen} ranks, and rank0.json of one of {ranks}; "
                "expected one job's, so copy its files to one folder"
            )
    return aligned(traces)


def _read_one(folder: Path, expected: int) -> RankTrace:
    path = folder / f"rank{expected}.json"
    try:
        found = json.loads(path.read_text())
        about = found["otherData"]
        events = [one for one in found["traceEvents"] if one["ph"] == "X"]
        version, rank = about["distaccum"], int(about["rank"])
        on_device = ON_DEVICE & {one["name"] for one in events if one["tid"] == DEVICE}
        spans = [
            Span(one["name"], one["ts"] / 1000, (one["ts"] + one["dur"]) / 1000, one["args"])
            for one in events
            if one["tid"] == (DEVICE if one["name"] in on_device else HOST)
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is not a whole trace ({type(error).__name__}: {error}); expected a file that trace= wrote"
        ) from error
    if version != VERSION:
        raise ValueError(
            f"{path} is a trace of version {version}, expected {VERSION}; draw it with the distaccum that wrote it"
        )
    if rank != expected:
        raise ValueError(
            f"{path} is the trace of rank {rank}, expected rank {expected}'s; copy the files of all nodes under their "
            "own names"
        )
    return RankTrace(rank, about, spans)


def aligned(traces: Sequence[RankTrace]) -> list[RankTrace]:
    """On the clock of rank 0; other machines are shifted by the ends of gatherings, which all ranks share."""
    first = traces[0]
    ends = _ends_of_gatherings(first)
    found = []
    for trace in traces:
        shift = 0.0
        if trace.about["boot"] != first.about["boot"]:
            apart = [ends[number] - end for number, end in _ends_of_gatherings(trace).items() if number in ends]
            shift = statistics.median(apart) if apart else _by_the_wall(trace) - _by_the_wall(first)
        spans = [Span(one.name, one.begin + shift, one.end + shift, _shifted(one.about, shift)) for one in trace.spans]
        found.append(RankTrace(trace.rank, trace.about, spans))
    return found


def _ends_of_gatherings(trace: RankTrace) -> dict[int, float]:
    return {one.about["gather"]: one.end for one in trace.spans if "gather" in one.about}


def _by_the_wall(trace: RankTrace) -> float:
    anchor = trace.about["anchor"]
    return float(anchor["time_ns"] - anchor["perf_counter_ns"]) / 1e6


def _shifted(about: Mapping[str, Any], shift: float) -> dict[str, Any]:
    """With the times among the arguments in milliseconds, too."""
    times = {name: about[name] / 1000 + shift for name in ("arrived", "computed", "sent") if name in about}
    return {**about, **times}
