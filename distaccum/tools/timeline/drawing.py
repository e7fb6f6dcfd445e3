"""The picture of a timeline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...law.table import wrapped
from ..picture import blank, save
from .cutting import Row, Timeline
from .reading import COMPUTE

# Okabe and Ito's colours, which all readers can tell apart, and hatches for time without computation.
LOOKS: dict[str, tuple[str, str, str]] = {
    "plan": ("#CC79A7", "", "plan: draw, count, exchange"),
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

    length = until or timeline.length or 1.0
    used: set[str] = set()
    ticks: dict[float, str] = {}
    for place, row in enumerate(rows):
        lanes = [(row.pieces, float(place), 0.5)] + ([(row.link, place + 0.42, 0.2)] if several else [])
        ticks |= dict(zip((y for _, y, _ in lanes), (f"rank {row.rank}", "its link"), strict=False))
        for pieces, y, height in lanes:
            for kind, (colour, hatch, _) in LOOKS.items():
                bars = [(piece.begin - timeline.begin, piece.length) for piece in pieces if piece.kind == kind]
                if bars:
                    used.add(kind)
                    edge = {"edgecolor": HATCH, "linewidth": 0.6} if hatch else {"linewidth": 0}
                    axis.broken_barh(bars, (y - height / 2, height), facecolors=colour, hatch=hatch, **edge)
        for piece in row.undone:
            begin = max(0.0, piece.begin - timeline.begin)
            bar = [(begin, piece.end - timeline.begin - begin)]
            axis.broken_barh(bar, (place - 0.3, 0.6), facecolors="none", edgecolors="#000000", linestyle="--")
            axis.text(begin + bar[0][1] / 2, place - 0.31, "undone", ha="center", va="bottom", fontsize=8)
        _label(axis, row, place, timeline.begin, length)
    axis.set_yticks([*ticks], [*ticks.values()])
    measured = "milliseconds since the update began" if timeline.first == timeline.last else "milliseconds"
    axis.set(ylim=(len(rows) - 0.3, -0.5), xlim=(0, length), title=title or timeline.title)
    axis.set_xlabel("\n".join([measured, *wrapped(timeline.notes, NOTE)]))
    axis.grid(axis="x", alpha=0.3)
    axis.set_axisbelow(True)
    looks = [
        Patch(facecolor=colour, hatch=hatch, edgecolor=HATCH if hatch else colour, label=text)
        for kind, (colour, hatch, text) in LOOKS.items()
        if kind in used
    ]
    figure.legend(handles=looks, loc="outside lower center", ncols=4, frameon=False)
    save(figure, path)


def _label(axis: Any, row: Row, place: int, begin: float, length: float) -> None:
    """The micro-batch's number, and the rank that is waited for, where there is room."""
    for piece in row.pieces:
        at = (piece.begin + piece.end) / 2 - begin
        if piece.of is None:
            continue
        if piece.kind in COMPUTE and piece.length > 0.012 * length:
            colour = "#000000" if piece.kind == "forward" else "#FFFFFF"
            axis.text(at, place, str(piece.of), ha="center", va="center", fontsize=8, color=colour)
        elif piece.kind == "waiting" and piece.length > 0.13 * length:
            box = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
            axis.text(at, place, f"for rank {piece.of}", ha="center", va="center", fontsize=8, bbox=box)
