"""The picture of a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..picture import blank, save
from .cuts import number_of
from .network import LAST

LONGEST = 1024  # window
STYLES = {  # colours that the colour-blind can tell apart, and dashes for prints in grey
    "DDP, every": ("#D55E00", "--"),
    LAST: ("#0072B2", "-"),
    "ZeRO 3, last": ("#CC79A7", "-."),
    "FSDP2, every": ("#E69F00", "--"),
    "FSDP2, last": ("#E69F00", "-"),
    "FSDP2, gathered": ("#009E73", "--"),
    "ZeRO 1 and 2, last": ("#56B4E9", "-."),  # often on the line of gathered, so that both show
    "FSDP2 hybrid, replicas": ("#009E73", ":"),
}
PARTS = (
    ("compute", "#0072B2", "", "computing"),
    ("exposed", "#E69F00", "///", "waiting for communication"),
)


def draw_plan(forecast: Mapping[str, Any], path: Path) -> None:
    rows = [row for row in forecast["policies"] if row["line"] is not None]
    if not rows:
        cure = "give --ranks, --parameters, --link-gbit, --micro-step-seconds"
        if forecast["shared"]:
            cure = "leave out --tp, --cp and --pp, with which they are not predicted"
        raise ValueError(f"nothing to draw without seconds; {cure}")
    given, steps = forecast["given"], forecast["steps"]
    bars = [row for row in rows if row["timing"] is not None]
    figure = blank(path, 12 if bars else 7, max(4.8, 1.8 + 0.36 * len(rows)))
    panels = figure.subplots(1, 2 if bars else 1, squeeze=False)[0]
    _draw_lines(panels[0], rows, steps, given["micro_step_seconds"])
    handles = panels[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=5 if bars else 3, fontsize=8)
    if bars:
        _draw_bars(panels[1], bars, steps)
    shape = f"{number_of(given['ranks'], 'rank')} on {number_of(given['nodes'], 'node')}, {given['backend']}"
    rate = f", {given['link_gbit']:g} Gbit/s" if given["link_gbit"] is not None else ""
    figure.suptitle(f"Predicted: {shape}{rate}, {bytes_text(forecast['gradient_bytes'])} of gradients", fontsize=11)
    save(figure, path)


def _draw_lines(panel: Any, rows: Sequence[Mapping[str, Any]], steps: int | None, compute: float) -> None:
    from matplotlib.ticker import LogLocator

    lengths = [2**power for power in range(max(LONGEST, 2 * (steps or 1)).bit_length())]
    for row in (row for row in rows if row["policy"] in STYLES):
        colour, dashes = STYLES[row["policy"]]
        each, rest = row["line"]["per_micro_step"], row["line"]["per_update"]
        panel.plot(lengths, [each + rest / num for num in lengths], dashes, color=colour, label=row["policy"], lw=1.8)
    panel.axhline(compute, color="black", linewidth=1, linestyle=(0, (1, 1)), label="computing alone")
    if steps is not None:
        panel.axvline(steps, color="#888888", linewidth=1, label=f"planned: {number_of(steps, 'micro-step')}")
    panel.set(xlabel="micro-steps per update (window length)", ylabel="seconds per update / micro-steps")
    panel.set_title("Cost of a micro-step by the window's length", fontsize=10, loc="left")
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.set_xlim(1, lengths[-1])
    panel.set_xticks(lengths[::2], [f"{num:,}" for num in lengths[::2]])
    panel.grid(alpha=0.3)
    panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    panel.yaxis.set_major_formatter("{x:g}")
    panel.yaxis.set_minor_formatter("")


def _draw_bars(panel: Any, rows: Sequence[Mapping[str, Any]], steps: int) -> None:
    furthest, places = max(row["seconds_per_update"] for row in rows), range(len(rows))
    starts = [0.0] * len(rows)
    for name, colour, hatch, label in PARTS:
        lengths = [row["timing"][name] for row in rows]
        style = {"color": colour, "hatch": hatch, "edgecolor": "white", "height": 0.75, "label": label}
        panel.barh(places, lengths, left=starts, **style)
        starts = [start + length for start, length in zip(starts, lengths, strict=True)]
    for y, row in enumerate(rows):
        text = f"{seconds_text(starts[y])} s, {bytes_text(row['bytes_per_update'])}"
        panel.text(starts[y] + 0.01 * furthest, y, text, va="center", fontsize=8)
    panel.set_yticks(places, [row["policy"] for row in rows], fontsize=8)
    panel.set(ylim=(len(rows) - 0.4, -0.6), xlim=(0, 1.38 * furthest))
    panel.set_xlabel("seconds per update; bytes that a rank sends")
    panel.set_title(f"Time of an update of {number_of(steps, 'micro-step')}", fontsize=10, loc="left")
    panel.legend(fontsize=8, loc="lower right")


def bytes_text(number: int | None) -> str:
    if number is None:
        return "-"
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= size:
            return f"{number / size:.4g} {unit}" if number < 1000 * size else f"{number / size:,.0f} {unit}"
    return f"{number} B"


def seconds_text(number: float | None) -> str:
    return "-" if number is None else f"{number:.3g}" if number < 1000 else f"{number:,.0f}"
