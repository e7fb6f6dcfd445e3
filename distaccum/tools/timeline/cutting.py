"""The part of the traces that belongs to some updates: what each rank, and its link, did at each moment."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

from ...law.table import table, width, wrapped
from .reading import COMPUTE, RankTrace, Span

KINDS = ("plan", *COMPUTE, "reduction", "waiting", "step")
COLUMNS = ("compute", "reduction", "waiting", "plan", "step", "other")


@dataclass(frozen=True)
class Piece:
    """A time during which a rank, or its link, did one thing."""

    kind: str
    begin: float
    end: float
    of: int | None = None  # the micro-batch; waiting: the rank that it waits for

    @property
    def length(self) -> float:
        return self.end - self.begin

    def within(self, begin: float, end: float) -> Piece:
        return Piece(self.kind, max(self.begin, begin), min(self.end, end), self.of)


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
        """Milliseconds of each rank, and percent of the whole."""
        rows = zip(self.rows, self.micro_batches, strict=True)
        return {
            "updates": [self.first, self.last],
            "milliseconds": self.length,
            "ranks": [{"rank": row.rank, "micro_batches": n, **self._of(row)} for row, n in rows],
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
        compute = [piece for piece in row.pieces if piece.kind in COMPUTE]
        hidden = sum(max(0.0, piece.within(one.begin, one.end).length) for one in busy for piece in compute)
        return {
            "milliseconds": spent,
            "percent": {name: 100 * value / self.length if self.length else 0.0 for name, value in spent.items()},
            "waited_for": {str(rank): value for rank, value in sorted(waited.items())},
            "link_busy": sum(piece.length for piece in busy),
            "link_busy_under_compute": hidden,
        }

    @property
    def title(self) -> str:
        updates = f"Update {self.first}" if self.first == self.last else f"Updates {self.first} to {self.last}"
        least, most = min(self.micro_batches), max(self.micro_batches)
        each = f"{least}" if least == most else f"{least} to {most}"
        noun = "micro-batch" if most == 1 == least else "micro-batches"
        ranks = f"{len(self.rows)} ranks" if len(self.rows) > 1 else "1 rank"
        return f"{updates}: {ranks} with {each} {noun} each, {self.length:.1f} ms"

    def __str__(self) -> str:
        ranks = self.as_dict()["ranks"]
        cells, sentences = [["", *COLUMNS]], []
        for row in ranks:
            spent = (f"{row['milliseconds'][name]:.1f} ms {row['percent'][name]:3.0f}%" for name in COLUMNS)
            cells.append([f"rank {row['rank']}", *spent])
            long = [f"{value:.1f} ms for rank {rank}" for rank, value in row["waited_for"].items() if value >= 0.05]
            busy = f"{row['link_busy']:.1f} ms, {row['link_busy_under_compute']:.1f} of them under compute"
            waited = f"waited {', '.join(long) or 'for no other'}"
            sentences.append(f"rank {row['rank']} {waited}; its link was busy for {busy}")
        sentences = sentences if len(ranks) > 1 else []
        return "\n".join(wrapped([self.title, *table(cells, width()), *sentences, *self.notes], width()))


def typical(traces: Sequence[RankTrace]) -> int:
    """The update of median length among those that every rank stepped at once.

    The first, which warms up, and those in which DDP lays out its buckets are taken only where there is no other.
    """
    lengths: dict[int, list[float]] = defaultdict(list)
    undone = {one.update for trace in traces for one in trace.spans if one.name == "undone window"}
    for trace in traces:
        for one in trace.spans:
            if one.name == "window" and one.about.get("outcome") == "stepped":
                lengths[one.update].append(one.end - one.begin)
    whole = sorted((max(found), update) for update, found in lengths.items() if len(found) == len(traces))
    if not whole:
        raise ValueError("the traces have no update that all ranks stepped; choose a partial one with --update")
    for worse in ({min(update for _, update in whole)}, _laying_out(traces), undone):
        whole = [one for one in whole if one[1] not in worse] or whole
    return whole[(len(whole) - 1) // 2][1]


def _laying_out(traces: Sequence[RankTrace]) -> set[int]:
    """Updates in which DDP orders its buckets as backward does: in the forward after its first reduction."""
    return {one.update for trace in traces for one in trace.spans if one.about.get("lays_out")}


def cut(traces: Sequence[RankTrace], first: int, last: int) -> Timeline:
    """Updates `first` to `last`, each of all ranks."""
    known = {one.update for trace in traces for one in trace.spans if one.name in COMPUTE}
    chosen = {update for update in known if first <= update <= last}
    if not chosen:
        seen = f"updates {min(known)} to {max(known)}" if known else "no update"
        asked = f"update {first}" if first == last else f"update {first} to {last}"
        raise ValueError(f"the traces hold {seen}, and not {asked}")
    of_updates = [[one for one in trace.spans if one.update in chosen] for trace in traces]
    every = [one for found in of_updates for one in found]
    inside = [one for one in every if "record" not in str(one.about.get("on"))] or every
    begin, end = min(one.begin for one in inside), max(one.end for one in inside)
    times = _by_collective(traces)  # of all updates: a rank that is ahead waits here for a later one of another
    rows = []
    for trace in traces:
        row = Row(trace.rank)
        painted: list[tuple[int, Piece]] = []
        for one in trace.spans:
            if one.end > begin and one.begin < end:
                _paint(one, row, painted, times)
        row.pieces, row.link = (
            [piece for piece in (one.within(begin, end) for one in pieces) if piece.length > 0]
            for pieces in (_on_top(painted), row.link)
        )
        rows.append(row)
    numbers = tuple(
        len({(one.update, one.about["micro_batch"]) for one in found if _is_micro_step(one, begin, end)})
        for found in of_updates
    )
    return Timeline(min(chosen), max(chosen), begin, end, rows, numbers, tuple(_notes(traces, chosen)))


def _is_micro_step(span: Span, begin: float, end: float) -> bool:
    is_inside = span.end > begin and span.begin < end
    return is_inside and "micro_batch" in span.about and "stand_in" not in span.about


def _notes(traces: Sequence[RankTrace], chosen: set[int]) -> Iterable[str]:
    engines = sorted({trace.about["engine"] for trace in traces if trace.about.get("gathers")})
    if engines and len(traces) > 1:
        yield (
            f"parameters are gathered inside of forward and backward by {', '.join(engines)}: here that is part of "
            "compute, and a link's busy time shows only reductions"
        )
    for update in sorted(_laying_out(traces) & chosen):
        yield f"DDP lays out its buckets in update {update}, once: others are shorter"


Times = dict[Any, dict[int, float]]  # by the collective's key and the rank


class Collectives(NamedTuple):
    """When each rank came."""

    gathers: Times  # by number
    reductions: Times  # by update, attempt and number
    records: Times  # by update


def _by_collective(traces: Sequence[RankTrace]) -> Collectives:
    found = Collectives(defaultdict(dict), defaultdict(dict), defaultdict(dict))
    for trace in traces:
        for one in trace.spans:
            if "gather" in one.about:
                found.gathers[one.about["gather"]][trace.rank] = one.about["arrived"]
            elif one.name == "reduction":
                found.reductions[_key(one)][trace.rank] = one.begin
            elif "sent" in one.about:
                found.records[one.update][trace.rank] = one.about["sent"]
    return found


def _key(reduction: Span) -> tuple[int, int, int]:
    return reduction.update, reduction.about.get("attempt", 0), reduction.about["number"]


def _paint(one: Span, row: Row, painted: list[tuple[int, Piece]], times: Collectives) -> None:
    """Higher layers hide lower ones."""
    if one.name == "undone window":
        row.undone.append(Piece("undone", one.begin, one.end))
    elif one.name == "reduction":
        who, since = _last(times.reductions[_key(one)])
        until = one.begin if who in (None, row.rank) else min(since, one.end)  # None: no other rank's is known
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
        came = times.records.get(one.update) if is_record else times.gathers.get(one.about.get("gather", -1))
        who, since = _last(came or {})
        until = one.end if who is None else min(max(since, one.begin), one.end)  # after it the collective itself
        until = one.begin if who == row.rank else until
        painted.append((4, Piece("waiting", one.begin, until, who)))
        painted.append((3, Piece("waiting" if is_record else "plan", until, one.end)))
    elif one.name in KINDS:
        layer = 2 if one.name in COMPUTE else 1
        painted.append((layer, Piece(one.name, one.begin, one.end, one.about.get("micro_batch"))))


def _last(times: Mapping[int, float]) -> tuple[int | None, float]:
    """The rank that came last, and when; None where no other is known."""
    if len(times) < 2:
        return None, float("-inf")
    rank = max(times, key=lambda one: times[one])
    return rank, times[rank]


def _on_top(painted: Sequence[tuple[int, Piece]]) -> list[Piece]:
    """The piece of the highest layer at each moment."""
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
