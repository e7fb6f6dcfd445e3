"""Timeline: all ranks' traces beside each other: when each computed, when the link was busy, who waited for whom."""

from __future__ import annotations

import heapq
import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from ..law.table import table, width, wrapped
from ..observers.trace_file import DEVICE, HOST, VERSION
from .picture import blank, save

COMPUTE = ("forward", "backward")
KINDS = ("plan", *COMPUTE, "reduction", "waiting", "step")
COLUMNS = ("compute", "reduction", "waiting", "plan", "step", "other")
ON_DEVICE = {*COMPUTE, "reduction", "step"}  # by the device's own clock, where it was read


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
class Trace:
    rank: int
    about: Mapping[str, Any]  # of the whole file
    spans: list[Span]


@dataclass(frozen=True)
class Piece:
    """What a rank, or its link, did for a while."""

    kind: str
    begin: float
    end: float
    of: int | None = None  # the micro-batch; waiting: the rank that it waits for

    @property
    def length(self) -> float:
        return self.end - self.begin


@dataclass
class Row:
    rank: int
    pieces: list[Piece] = field(default_factory=list)  # one at a time
    link: list[Piece] = field(default_factory=list)
    undone: list[Piece] = field(default_factory=list)


@dataclass(frozen=True)
class Timeline:
    first: int  # update
    last: int
    begin: float
    end: float
    rows: list[Row]
    micro_batches: tuple[int, ...]  # by rank
    notes: tuple[str, ...] = ()  # on what these updates do not show

    @property
    def length(self) -> float:
        return self.end - self.begin

    def as_dict(self) -> dict[str, Any]:
        """Milliseconds of each rank, and in percent of all."""
        return {
            "updates": [self.first, self.last],
            "milliseconds": self.length,
            "ranks": [{"rank": row.rank, "micro_batches": n, **self._of(row)} for row, n in self._numbered()],
            "notes": list(self.notes),
        }

    def _of(self, row: Row) -> dict[str, Any]:
        spent = dict.fromkeys(COLUMNS, 0.0)
        waited: dict[int, float] = defaultdict(float)
        for piece in row.pieces:
            spent["compute" if piece.kind in COMPUTE else piece.kind] += piece.length
            if piece.kind == "waiting" and piece.of is not None:
                waited[piece.of] += piece.length
        spent["other"] = max(0.0, self.length - sum(spent.values()))
        busy = [piece for piece in row.link if piece.kind == "link busy"]
        hidden = sum(
            max(0.0, min(one.end, piece.end) - max(one.begin, piece.begin))
            for one in busy
            for piece in row.pieces
            if piece.kind in COMPUTE
        )
        return {
            "milliseconds": spent,
            "percent": {name: 100 * value / self.length if self.length else 0.0 for name, value in spent.items()},
            "waited_for": {str(rank): value for rank, value in sorted(waited.items())},
            "link_busy": sum(piece.length for piece in busy),
            "link_busy_under_compute": hidden,
        }

    def _numbered(self) -> Iterable[tuple[Row, int]]:
        return zip(self.rows, self.micro_batches, strict=True)

    @property
    def title(self) -> str:
        updates = f"Update {self.first}" if self.first == self.last else f"Updates {self.first} to {self.last}"
        numbers = sorted(set(self.micro_batches))
        each = f"{numbers[0]}" if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"
        noun = "micro-batch" if numbers == [1] else "micro-batches"
        ranks = f"{len(self.rows)} ranks" if len(self.rows) > 1 else "1 rank"
        return f"{updates}: {ranks} with {each} {noun} each, {self.length:.1f} ms"

    def __str__(self) -> str:
        found = self.as_dict()
        cells = [["", *COLUMNS]]
        for row in found["ranks"]:
            spent = (f"{row['milliseconds'][name]:.1f} ms {row['percent'][name]:3.0f}%" for name in COLUMNS)
            cells.append([f"rank {row['rank']}", *spent])
        lines = [self.title, *table(cells, width())]
        for row in found["ranks"]:
            told = [f"{value:.1f} ms for rank {rank}" for rank, value in row["waited_for"].items() if value >= 0.05]
            waited = f"waited {', '.join(told)}" if told else "waited for nobody"
            if len(self.rows) > 1:
                hidden = row["link_busy_under_compute"]
                busy = f"its link was busy for {row['link_busy']:.1f} ms, {hidden:.1f} of them under compute"
                lines.append(f"rank {row['rank']} {waited}; {busy}")
        return "\n".join(wrapped([*lines, *self.notes], width()))


# Reading
def read(folder: Path) -> list[Trace]:
    """The newest trace of each rank, on one clock."""
    first = folder / "rank0.json"
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}; name the one that was given to Accumulator(trace=...)")
    if not first.exists():
        others = sorted(path.name for path in folder.glob("rank*.json"))
        seen = f"only {', '.join(others[:4])}" if others else "no trace"
        raise ValueError(f"{folder} has {seen}, expected rank0.json and one for each rank; copy them to one folder")
    zeroth = _read_one(first, 0)
    ranks = int(zeroth.about["ranks"])
    missing = [rank for rank in range(1, ranks) if not (folder / f"rank{rank}.json").exists()]
    if missing:
        raise ValueError(
            f"{folder} has no trace of rank {', '.join(map(str, missing))} of {ranks}; each node writes those of its "
            "own ranks, so copy them to one folder"
        )
    traces = [zeroth]
    for rank in range(1, ranks):
        path = folder / f"rank{rank}.json"
        traces.append(_read_one(path, rank))
        if (seen := traces[-1].about["ranks"]) != ranks:
            raise ValueError(
                f"{path} is of a job of {seen} ranks, and rank0.json of one of {ranks}; expected one job's, so copy "
                "its files to one folder"
            )
    return aligned(traces)


def _read_one(path: Path, expected: int) -> Trace:
    try:
        found = json.loads(path.read_text())
        about = found["otherData"]
        events = [one for one in found["traceEvents"] if one["ph"] == "X"]
        version, rank = about["distaccum"], int(about["rank"])
        on_device = {one["name"] for one in events if one["tid"] == DEVICE}
        spans = [
            Span(one["name"], one["ts"] / 1000, (one["ts"] + one["dur"]) / 1000, one["args"])
            for one in events
            if one["tid"] == (DEVICE if one["name"] in ON_DEVICE & on_device else HOST)
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is not a whole trace ({type(error).__name__}: {error}); expected what trace= writes"
        ) from error
    if version != VERSION:
        raise ValueError(
            f"{path} is a trace of version {version}, expected {VERSION}; draw it with the distaccum that wrote it"
        )
    if rank != expected:
        raise ValueError(
            f"{path} is the trace of rank {rank}, expected rank {expected}'s; copy the files of all nodes under the "
            "names that they were written with"
        )
    return Trace(rank, about, spans)


def aligned(traces: Sequence[Trace]) -> list[Trace]:
    """On the clock of rank 0. Those of other machines by what ends on all ranks at once: a gathering of the plans."""
    first = traces[0]
    ends = _ends_of_gatherings(first)
    found = []
    for trace in traces:
        shift = 0.0
        if trace.about["boot"] != first.about["boot"]:
            apart = [ends[number] - end for number, end in _ends_of_gatherings(trace).items() if number in ends]
            shift = statistics.median(apart) if apart else _by_the_wall(trace) - _by_the_wall(first)
        spans = [Span(one.name, one.begin + shift, one.end + shift, _shifted(one.about, shift)) for one in trace.spans]
        found.append(Trace(trace.rank, trace.about, spans))
    return found


def _ends_of_gatherings(trace: Trace) -> dict[int, float]:
    return {one.about["gather"]: one.end for one in trace.spans if "gather" in one.about}


def _by_the_wall(trace: Trace) -> float:
    anchor = trace.about["anchor"]
    return float(anchor["time_ns"] - anchor["perf_counter_ns"]) / 1e6


def _shifted(about: Mapping[str, Any], shift: float) -> dict[str, Any]:
    """Times among the arguments too, in milliseconds."""
    times = {name: about[name] / 1000 + shift for name in ("arrived", "computed", "sent") if name in about}
    return {**about, **times}


# Cutting
def typical(traces: Sequence[Trace]) -> int:
    """The update of median length among those that all ranks stepped at once.

    The first, which warms up, and those in which DDP lays out its buckets are taken where there is no other.
    """
    lengths: dict[int, list[float]] = defaultdict(list)
    undone = {one.update for trace in traces for one in trace.spans if one.name == "undone window"}
    for trace in traces:
        for one in trace.spans:
            if one.name == "window" and one.about.get("outcome") == "stepped":
                lengths[one.update].append(one.end - one.begin)
    whole = sorted((max(found), update) for update, found in lengths.items() if len(found) == len(traces))
    if len(whole) > 1:
        whole = [one for one in whole if one[1] != min(update for _, update in whole)]
    laying_out = _laying_out(traces)
    whole = [one for one in whole if one[1] not in laying_out] or whole
    whole = [one for one in whole if one[1] not in undone] or whole
    if not whole:
        raise ValueError("the traces hold no update that all ranks stepped; --update names one that is not whole")
    return whole[(len(whole) - 1) // 2][1]


def _laying_out(traces: Sequence[Trace]) -> set[int]:
    """Updates in which DDP gives its buckets the order that backward has: in the forward after its first reduction."""
    return {one.update for trace in traces for one in trace.spans if one.about.get("lays_out")}


def cut(traces: Sequence[Trace], first: int, last: int) -> Timeline:
    """Updates `first` to `last`, each of all ranks."""
    known = {one.update for trace in traces for one in trace.spans if one.name in COMPUTE}
    chosen = {update for update in known if first <= update <= last}
    if not chosen:
        seen = f"updates {min(known)} to {max(known)}" if known else "no update"
        asked = f"update {first}" if first == last else f"update {first} to {last}"
        raise ValueError(f"the traces hold {seen}, and not {asked}")
    spans = {trace.rank: [one for one in trace.spans if one.update in chosen] for trace in traces}
    every = [one for found in spans.values() for one in found if not one.about.get("ahead")]
    inside = [one for one in every if "record" not in str(one.about.get("on"))] or every
    begin, end = min(one.begin for one in inside), max(one.end for one in inside)
    spans = {trace.rank: [one for one in trace.spans if one.end > begin and one.begin < end] for trace in traces}
    # Of all updates: a rank that is ahead waits here for what another does after the end.
    arrivals, starts, sent = _by_collective(traces)
    rows = []
    for rank, found in spans.items():
        row = Row(rank)
        painted: list[tuple[int, Piece]] = []
        for one in found:
            _paint(one, row, painted, arrivals, starts, sent)
        row.pieces = [_within(piece, begin, end) for piece in _on_top(painted)]
        row.pieces = [piece for piece in row.pieces if piece.length > 0]
        row.link = [piece for piece in (_within(p, begin, end) for p in row.link) if piece.length > 0]
        rows.append(row)
    numbers = tuple(
        len(
            {
                (one.update, one.about["micro_batch"])
                for one in found
                if "micro_batch" in one.about and one.update in chosen and "stand_in" not in one.about
            }
        )
        for found in spans.values()
    )
    return Timeline(min(chosen), max(chosen), begin, end, rows, numbers, tuple(_notes(traces, chosen)))


def _notes(traces: Sequence[Trace], chosen: set[int]) -> Iterable[str]:
    engines = sorted({trace.about["engine"] for trace in traces if trace.about.get("gathers")})
    if engines and len(traces) > 1:
        yield (
            f"parameters are gathered inside of forward and backward by {', '.join(engines)}: that is part of compute "
            "here, and of a link's busy time only what reduces is seen"
        )
    for update in sorted(_laying_out(traces) & chosen):
        yield f"DDP lays out its buckets in update {update}, once: others are shorter"


Gathers = Mapping[int, Mapping[int, float]]  # by number and rank: when it came
Reductions = Mapping[tuple[int, int, int], Mapping[int, float]]  # likewise, by update, attempt and number
Records = Mapping[int, Mapping[int, float]]  # likewise, by update


def _by_collective(traces: Sequence[Trace]) -> tuple[Gathers, Reductions, Records]:
    arrivals: dict[int, dict[int, float]] = defaultdict(dict)
    starts: dict[tuple[int, int, int], dict[int, float]] = defaultdict(dict)
    sent: dict[int, dict[int, float]] = defaultdict(dict)
    for trace in traces:
        for one in trace.spans:
            if "gather" in one.about:
                arrivals[one.about["gather"]][trace.rank] = one.about["arrived"]
            elif one.name == "reduction":
                starts[_key(one)][trace.rank] = one.begin
            elif "sent" in one.about:
                sent[one.update][trace.rank] = one.about["sent"]
    return arrivals, starts, sent


def _key(reduction: Span) -> tuple[int, int, int]:
    return reduction.update, reduction.about.get("attempt", 0), reduction.about["number"]


def _paint(
    one: Span, row: Row, painted: list[tuple[int, Piece]], arrivals: Gathers, starts: Reductions, sent: Records
) -> None:
    """Later layers hide what is under them."""
    place = one.about.get("micro_batch")
    if one.name == "undone window":
        row.undone.append(Piece("undone", one.begin, one.end))
    elif one.name == "reduction":
        who, since = _last(starts[_key(one)])
        until = one.begin if who in (None, row.rank) else min(since, one.end)  # None: nothing of the others' beside it
        computed = max(one.begin, one.about.get("computed", one.begin))
        if until > one.begin:
            row.link.append(Piece("waiting", one.begin, until, who))
        row.link.append(Piece("link busy", until, one.end))
        if until > computed:
            painted.append((4, Piece("waiting", computed, until, who)))
        if "computed" in one.about or one.about.get("by_hand"):
            painted.append((3, Piece("reduction", computed, one.end)))
    elif one.name == "waiting":
        is_record = "record" in str(one.about.get("on"))
        who, since = _last(sent.get(one.update, {}) if is_record else arrivals.get(one.about.get("gather", -1), {}))
        told = who is not None  # what comes after the last rank's arrival is the collective itself
        until = one.begin if who == row.rank else min(max(since, one.begin), one.end) if told else one.end
        painted.append((4, Piece("waiting", one.begin, until, who)))
        painted.append((3, Piece("waiting" if is_record else "plan", until, one.end)))
    elif one.name in KINDS:
        painted.append((2 if one.name in COMPUTE else 1, Piece(one.name, one.begin, one.end, place)))


def _last(times: Mapping[int, float]) -> tuple[int | None, float]:
    """The rank that came last, and when; None where no other is known."""
    if len(times) < 2:
        return None, float("-inf")
    rank = max(times, key=lambda one: times[one])
    return rank, times[rank]


def _on_top(painted: Sequence[tuple[int, Piece]]) -> list[Piece]:
    """What shows at each moment."""
    edges = sorted({edge for _, piece in painted for edge in (piece.begin, piece.end)})
    order = sorted(painted, key=lambda one: one[1].begin)
    active: list[tuple[int, int, Piece]] = []
    shown: list[Piece] = []
    i = 0
    for begin, end in pairwise(edges):
        while i < len(order) and order[i][1].begin <= begin:
            heapq.heappush(active, (-order[i][0], -i, order[i][1]))
            i += 1
        while active and active[0][2].end <= begin:
            heapq.heappop(active)
        if not active:
            continue
        top = active[0][2]
        before = shown[-1] if shown else None
        if before is not None and before.end == begin and (before.kind, before.of) == (top.kind, top.of):
            shown[-1] = Piece(top.kind, before.begin, end, top.of)
        else:
            shown.append(Piece(top.kind, begin, end, top.of))
    return shown


def _within(piece: Piece, begin: float, end: float) -> Piece:
    return Piece(piece.kind, max(piece.begin, begin), min(piece.end, end), piece.of)


# Drawing

# Okabe and Ito's colours, which all readers can tell apart, and hatches for what nobody computes in.
LOOKS: dict[str, tuple[str, str, str]] = {
    "plan": ("#CC79A7", "", "plan: draw, count, tell"),
    "forward": ("#56B4E9", "", "forward"),
    "backward": ("#0072B2", "", "backward"),
    "reduction": ("#E69F00", "", "reduction that nothing hides"),
    "waiting": ("#FFFFFF", "////", "waits for another rank"),
    "step": ("#009E73", "", "step"),
    "link busy": ("#000000", "", "link busy"),
}
HATCH = "#D55E00"
NOTE = 110  # letters of a note in a line


def draw(timeline: Timeline, path: Path, *, title: str | None = None, until: float | None = None) -> None:
    """`until`: milliseconds on the axis, so that two pictures have the same scale."""
    rows = timeline.rows
    several = len(rows) > 1
    figure = blank(path, 11, 1.9 + (0.85 if several else 0.6) * len(rows))
    axis = figure.subplots()

    from matplotlib.patches import Patch

    width = until or timeline.length or 1.0
    used: set[str] = set()
    ticks, labels = [], []
    for place, row in enumerate(rows):
        lanes = [(row.pieces, float(place), 0.5)] + ([(row.link, place + 0.42, 0.2)] if several else [])
        for pieces, y, height in lanes:
            for kind, (colour, hatch, _) in LOOKS.items():
                bars = [(piece.begin - timeline.begin, piece.length) for piece in pieces if piece.kind == kind]
                if bars:
                    used.add(kind)
                    edge = {"edgecolor": HATCH, "linewidth": 0.6} if hatch else {"linewidth": 0}
                    axis.broken_barh(bars, (y - height / 2, height), facecolors=colour, hatch=hatch, **edge)
        for piece in row.undone:
            begin = max(0.0, piece.begin - timeline.begin)
            long = piece.end - timeline.begin - begin
            axis.broken_barh(
                [(begin, long)], (place - 0.3, 0.6), facecolors="none", edgecolors="#000000", linestyle="--"
            )
            axis.text(begin + long / 2, place - 0.31, "undone", ha="center", va="bottom", fontsize=8)
        _label(axis, row, place, timeline.begin, width)
        ticks += [float(place), place + 0.42] if several else [float(place)]
        labels += [f"rank {row.rank}", "its link"] if several else [f"rank {row.rank}"]
    axis.set_yticks(ticks, labels)
    axis.set_ylim(len(rows) - 0.3, -0.5)
    axis.set_xlim(0, width)
    measured = "milliseconds since the update began" if timeline.first == timeline.last else "milliseconds"
    axis.set_xlabel("\n".join([measured, *wrapped(timeline.notes, NOTE)]))
    axis.set_title(title or timeline.title)
    axis.grid(axis="x", alpha=0.3)
    axis.set_axisbelow(True)
    looks = [
        Patch(facecolor=colour, hatch=hatch, edgecolor=HATCH if hatch else colour, label=text)
        for kind, (colour, hatch, text) in LOOKS.items()
        if kind in used
    ]
    figure.legend(handles=looks, loc="outside lower center", ncols=4, frameon=False)
    save(figure, path)


def _label(axis: Any, row: Row, place: int, begin: float, width: float) -> None:
    """The micro-batch's number, and who is waited for, where there is room."""
    for piece in row.pieces:
        if piece.of is None:
            continue
        at = (piece.begin + piece.end) / 2 - begin
        if piece.kind in COMPUTE and piece.length > 0.012 * width:
            colour = "#000000" if piece.kind == "forward" else "#FFFFFF"
            axis.text(at, place, str(piece.of), ha="center", va="center", fontsize=8, color=colour)
        elif piece.kind == "waiting" and piece.length > 0.13 * width:
            box = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
            axis.text(at, place, f"for rank {piece.of}", ha="center", va="center", fontsize=8, bbox=box)
