"""Draws the guide's pictures and the logo, beside this file; the charts read their numbers from launch/results.

    python docs/images/draw.py

The background is transparent. Every colour has enough contrast on white and on a dark page; text is halfway between.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from xml.sax.saxutils import escape

HERE = Path(__file__).parent
RESULTS = HERE.parents[1] / "launch" / "results"
TEXT = "#727a86"  # readable on white and on a dark page
ON_FILL = "#ffffff"  # text on the fills below
BLUE, GREEN, ORANGE, VIOLET, GREY = "#2f6fd0", "#2b7f4f", "#b45a0c", "#8a55cf", "#6a7480"


class Drawing:
    def __init__(self, width: int, height: int, title: str, description: str) -> None:
        self._lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
            f'height="{height}" role="img" aria-labelledby="title desc" font-family="Helvetica, Arial, sans-serif" '
            'font-size="14">',
            f'<title id="title">{escape(title)}</title>',
            f'<desc id="desc">{escape(description)}</desc>',
        ]

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        colour: str = TEXT,
        size: int = 14,
        anchor: str = "start",
        bold: bool = False,
    ) -> None:
        """Adds a line of text; `y` is its middle."""
        extra = ("" if size == 14 else f' font-size="{size}"') + (' font-weight="bold"' if bold else "")
        extra += "" if anchor == "start" else f' text-anchor="{anchor}"'
        self._lines.append(f'<text x="{x:g}" y="{y + 0.35 * size:g}" fill="{colour}"{extra}>{escape(words)}</text>')

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        fill: str,
        words: str | tuple[str, ...] = (),
        size: int = 13,
    ) -> None:
        """Adds a filled box with lines of text in its middle."""
        self._lines.append(f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" fill="{fill}"/>')
        lines = (words,) if isinstance(words, str) else words
        for i, line in enumerate(lines):
            place = y + height / 2 + 17 * (i - (len(lines) - 1) / 2)
            self.text(x + width / 2, place, line, colour=ON_FILL, anchor="middle", size=size)

    def frame(self, x: float, y: float, width: float, height: float) -> None:
        self._lines.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6" fill="none" stroke="{TEXT}" '
            'stroke-dasharray="5 4"/>'
        )

    def line(self, x1: float, y1: float, x2: float, y2: float, *, dashed: bool = False, arrow: bool = False) -> None:
        dashes = ' stroke-dasharray="3 4"' if dashed else ""
        self._lines.append(
            f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{TEXT}" stroke-width="1"{dashes}/>'
        )
        if arrow:
            self._lines.append(f'<path d="M{x2:g} {y2 - 5:g}l9 5l-9 5z" fill="{TEXT}"/>')

    def write(self, path: Path) -> None:
        path.write_text("\n".join([*self._lines, "</svg>", ""]), encoding="utf-8")


def window() -> Drawing:
    """It is narrow, with large letters: a telephone shows it whole."""
    drawing = Drawing(
        560,
        330,
        "A window on two ranks",
        "Two ranks run one window, which is one update. First one small collective, the plan, gives each rank the "
        "window's denominator, here 16 samples. Rank 0 then runs three micro-batches of 4, 4 and 2 samples, rank 1 two "
        "of 4 and 2. Each loss is weighted by its samples over 16. Nothing is sent until the last micro-batch; there "
        "one reduction adds the gradients of both ranks up, and step() updates the weights.",
    )
    left, unit, top, height = 142, 21, 98, 62
    second = top + height + 24
    drawing.text(10, 20, "One window = the micro-batches of one update", bold=True, size=18)
    drawing.frame(64, 44, 490, 218)
    drawing.text(76, 68, "micro-batches: nothing is sent between them", size=16)
    drawing.box(72, top, 62, second + height - top, GREY, ("plan:", "N = 16", "on all", "ranks"), size=15)
    for y, rank, sizes in ((top, 0, (4, 4, 2)), (second, 1, (4, 2))):
        drawing.text(4, y + height / 2, f"rank {rank}", bold=True, size=15)
        x = float(left)
        for samples in sizes:
            label = f"{samples} samples" if samples > 2 else "2"
            drawing.box(x, y, unit * samples, height, BLUE, (label, f"{samples}/16"), size=15)
            x += unit * samples + 4
        if x < left + 10 * unit:
            drawing.line(x + 4, y + height / 2, left + 10 * unit + 6, y + height / 2, dashed=True)
            drawing.text(x + 20, y + height / 2 - 12, "waits", size=16)
    end = left + 10 * unit + 16
    drawing.box(
        end, top, 100, second + height - top, ORANGE, ("one", "reduction", "with the last", "backward"), size=15
    )
    drawing.box(end + 106, top, 58, second + height - top, GREEN, ("step()", "once"), size=15)
    drawing.line(end + 166, top + height + 12, end + 174, top + height + 12, arrow=True)
    drawing.text(10, 286, "4/16: the weight of this micro-batch's mean loss. The sum is", size=16)
    drawing.text(10, 308, "the mean over all 16 samples, exactly.", size=16)
    return drawing


def deferral() -> Drawing:
    forward, backward, starts, link = 1.0, 2.0, 0.7, 3.0  # `starts`: time from backward's start to the first bucket
    every = forward + starts + link
    whole = 3 * (forward + backward) + every
    unit, left = 36.0, 108.0
    drawing = Drawing(
        880,
        342,
        "DDP with and without deferral",
        "A timeline of one update of four micro-steps under DDP on a slow link; a sketch. Reduced in each micro-step: "
        "every backward starts an all-reduce and the next forward waits for it: four all-reduces are on the link. "
        "Deferred: four forwards and backwards follow each other, and one all-reduce runs with the last backward.",
    )

    def lanes(top: float, title: str, reduces: list[bool]) -> float:
        drawing.text(14, top, title, bold=True, size=16)
        drawing.text(14, top + 36, "compute")
        drawing.text(14, top + 70, "link")
        at = left
        for reduce in reduces:
            drawing.box(at, top + 21, forward * unit - 2, 30, GREY, "F")
            at += forward * unit
            drawing.box(at, top + 21, backward * unit - 2, 30, BLUE, "B")
            if reduce:
                drawing.box(at + starts * unit, top + 55, link * unit - 2, 30, ORANGE, "all-reduce")
            at += max(backward, starts + link) * unit if reduce else backward * unit
        drawing.line(at, top + 14, at, top + 92, dashed=True)
        drawing.text(at + 8, top + 36, "step()")
        return at

    lanes(20, "Reduced in each micro-step: 4 all-reduces of the whole gradient", [True] * 4)
    end = lanes(148, "Deferred: 1 all-reduce, hidden in part by the last backward", [False] * 3 + [True])
    assert abs(end - left - whole * unit) < 1e-6
    drawing.line(left, 264, 800, 264, arrow=True)
    drawing.text(816, 264, "time")
    for x, fill, words in ((14, GREY, "F: forward"), (130, BLUE, "B: backward")):
        drawing.box(x, 288, 16, 16, fill)
        drawing.text(x + 24, 296, words)
    drawing.box(260, 288, 16, 16, ORANGE)
    drawing.text(284, 296, "gradients of all ranks are added up, and the next forward waits for it")
    drawing.text(14, 324, "A sketch of one rank, on a link that takes longer than a backward; not a measurement.")
    return drawing


def sync() -> Drawing:
    drawing = Drawing(
        880,
        436,
        "What each sync policy keeps and sends under FSDP2",
        "For P parameters: last keeps P gradients between micro-steps, gathers parameters in each micro-step and "
        "reduce-scatters once per window. gathered keeps P gradients and P parameters, gathers and reduce-scatters "
        "once per window. every keeps a shard of the gradients, and gathers and reduce-scatters in each micro-step. "
        "replicas, on a hybrid mesh, keeps a shard, gathers and reduce-scatters in each micro-step and all-reduces "
        "over replicas once per window. The gradients are the same.",
    )
    names, kept, each, once, unit = 14, 112, 420, 634, 140
    drawing.text(names, 20, "What sync= says under FSDP2, per rank, for P parameters", bold=True, size=16)
    for x, words in ((kept, "kept between micro-steps"), (each, "in each micro-step"), (once, "once per window")):
        drawing.text(x, 52, words, bold=True)
    gradients, parameters, shard = (unit, BLUE, "P gradients"), (unit, VIOLET, "P parameters"), (34, BLUE, "")
    gather, scatter = (GREY, 62, "gather"), (ORANGE, 106, "reduce-scatter")
    reduce = (GREEN, 172, "all-reduce of replicas")
    rows = (
        ('"last"', (gradients,), (gather,), (scatter, reduce)),
        ('"gathered"', (gradients, parameters), (), (gather, scatter, reduce)),
        ('"every"', (shard,), (gather, scatter, reduce), ()),
        ('"replicas"', (shard,), (gather, scatter), (reduce,)),
    )
    for i, (name, bars, micro_step, whole) in enumerate(rows):
        y = 72 + 70 * i
        drawing.line(names, y, 866, y)
        drawing.text(names, y + 35, name, bold=True)
        x = float(kept)
        for width, fill, words in bars:
            drawing.box(x, y + 18, width - 2, 34, fill, words)
            x += width
        if bars == (shard,):
            drawing.text(x + 8, y + 35, "a shard of the gradients")
        for start, chips in ((each, micro_step), (once, whole)):
            if not chips:
                drawing.text(start, y + 35, "nothing")
            lines = [[chip for chip in chips if chip is not reduce], [chip for chip in chips if chip is reduce]]
            lines = [line for line in lines if line]
            for j, line in enumerate(lines):
                x = float(start)
                for fill, width, words in line:
                    drawing.box(x, y + 35 + 28 * (j - (len(lines) - 1) / 2) - 12, width, 24, fill, words)
                    x += width + 4
    drawing.line(names, 352, 866, 352)
    drawing.text(names, 374, "Gather: of parameters. All-reduce of replicas: only on a hybrid mesh.")
    drawing.text(names, 396, "The gradients at step() are the same under all four; only memory and traffic differ.")
    drawing.text(
        names, 418, 'DDP keeps P gradients; "last" all-reduces them once per window, "every" in each micro-step.'
    )
    return drawing


def numbers(page: str, row: str, *, after: str = "") -> list[float]:
    """The first number in each cell of a table's row, the first such row below `after`."""
    text = (RESULTS / f"{page}.md").read_text(encoding="utf-8")
    text = text[text.index(after) :]
    (cells,) = re.findall(rf"^\| {re.escape(row)} \|(.*)\|$", text, re.MULTILINE)[:1]
    found = [re.match(r" *([\d.]+)", cell) for cell in cells.split("|")]
    return [float(one[1]) if one else float("nan") for one in found]


def bars(title: str, unit: str, rows: Sequence[tuple[str, float, str]], note: str) -> Drawing:
    """Draws bars from rows of a name, a number and a colour."""
    described = "; ".join(f"{name}: {value:g} {unit}" for name, value, _ in rows)
    drawing = Drawing(880, 84 + 34 * len(rows), title, f"Bars. {described}. {note}")
    drawing.text(14, 20, title, bold=True, size=16)
    left, scale = 330, 360 / max(value for _, value, _ in rows)
    for i, (name, value, fill) in enumerate(rows):
        y = 44 + 34 * i
        drawing.text(left - 12, y + 13, name, anchor="end")
        drawing.box(left, y, scale * value, 26, fill)
        drawing.text(left + scale * value + 8, y + 13, f"{value:g} {unit}")
    drawing.text(14, 64 + 34 * len(rows), note)
    return drawing


def two_nodes() -> Drawing:
    every, rest = "DDP, every micro-step, by hand", "**Communication in each micro-step**"
    rows = [
        ("DDP, reduced in each micro-step", numbers("two_nodes", every)[0], ORANGE),
        ("DDP, by hand with no_sync", numbers("two_nodes", "DDP, by hand")[0], GREY),
        ("DDP, distaccum", numbers("two_nodes", "DDP, distaccum")[0], BLUE),
        ('FSDP2, "every", distaccum', numbers("two_nodes", "FSDP2, every, distaccum", after=rest)[0], BLUE),
        ('FSDP2, "last", distaccum', numbers("two_nodes", "FSDP2, last, distaccum", after=rest)[0], BLUE),
        ('FSDP2, "gathered", distaccum', numbers("two_nodes", "FSDP2, gathered, distaccum")[0], BLUE),
    ]
    rows = [(name, round(value, 2), fill) for name, value, fill in rows]
    return bars(
        "An update between two nodes, 8 micro-steps", "s", rows, "ResNet-18, gloo, 1 Gbit/s; shorter is better."
    )


def memory() -> Drawing:
    peaks = numbers("memory", "plain, distaccum")
    sizes = [(f"micro-batches of {size}", peak, BLUE) for size, peak in zip((1, 4, 16, 32), peaks, strict=True)]
    hand = ("one batch of 32, by hand", numbers("memory", "plain, by hand")[-1], GREY)
    note = "Resident memory beyond that of the process before the model was made. One process."
    return bars("Peak memory of an update of 32 images", "MiB", [hand, *sizes[::-1]], note)


def tokens() -> Drawing:
    ways = (
        ("fixed rows, padded", "fixed", GREY),
        ("ByCost", "cost", BLUE),
        ("fixed rows, sorted first", "sorted", GREEN),
    )
    rows = [(words, numbers("tokens", way)[0], fill) for words, way, fill in ways]
    note = (
        "64 rows per update, lengths with a median of 357 and a mean of 688 (divided by 8). The gradient is the same."
    )
    return bars("Rows of different lengths", "samples per second", rows, note)


def pace() -> Drawing:
    rows = []
    for steps in (1, 8, 32):
        cells = numbers("pace", f"{steps}, 2, 8, 10", after="## One process")
        rows.append((f"windows of {steps}", cells[2], BLUE))
        rows.append((f"windows of {steps}, drawn at once", cells[3], ORANGE))
    return bars(
        "Reading a loader: an epoch's time",
        "of the loop by hand",
        rows,
        "Two workers that take 8 ms per micro-batch, and 10 ms of compute.",
    )


def weights() -> Drawing:
    drawing = Drawing(
        880,
        252,
        "The weight of each sample in an update",
        "Three micro-batches of 4, 4 and 1 samples. Averaged by hand, the samples of the first two weigh 1/12 each and "
        "that of the last 1/3. In a window each of the nine weighs 1/9.",
    )
    drawing.text(14, 20, "What each of 9 samples weighs, in micro-batches of 4, 4 and 1", bold=True, size=16)
    by_hand = [1 / 3 / size for size in (4, 4, 1) for _ in range(size)]
    for left, words, heights, fill in (
        (14, "by hand: the mean of three means", by_hand, ORANGE),
        (460, "in a window: the mean of the samples", [1 / 9] * 9, BLUE),
    ):
        for i, height in enumerate(heights):
            x = left + 40 * i + 14 * (i // 4)
            drawing.box(x, 196 - 420 * height, 34, 420 * height, fill)
            drawing.text(x + 17, 184 - 420 * height, f"1/{round(1 / height)}", anchor="middle", size=13)
        drawing.text(left, 224, words)
    return drawing


def logo() -> Drawing:
    """Draws the logo: micro-batches that add up to one update."""
    drawing = Drawing(64, 64, "distaccum", "Four bars of different lengths and one that is their sum.")
    x = 6.0
    for width, fill in ((20, BLUE), (12, GREEN), (8, ORANGE), (6, VIOLET)):
        drawing.box(x, 12, width, 16, fill)
        x += width + 2
    drawing.box(6, 36, 52, 16, GREY)
    return drawing


CHARTS = {"two_nodes.svg": two_nodes, "memory.svg": memory, "tokens.svg": tokens, "pace.svg": pace}
PICTURES = {
    "window.svg": window,
    "deferral.svg": deferral,
    "sync.svg": sync,
    "weights.svg": weights,
    "logo.svg": logo,
    **CHARTS,
}


if __name__ == "__main__":
    for name, picture in PICTURES.items():
        picture().write(HERE / name)
