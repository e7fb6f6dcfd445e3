"""How an update's time grows with its micro-steps and with the ranks: a line for each library, and a picture of them.

    python launch/bench/growth.py --out launch/results/growth --plot launch/results/growth.png
    python launch/bench/growth.py --rounds 3 --ranks 1 2  # a quick look

On a tiny model, in one process and on 2 to 4 ranks (DDP, gloo); the loops are those of contenders.py.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from contenders import versions
from measure import circumstances, header, quartiles, write
from tiny import ABOUT, Key, seconds_per_update

NAMES = (
    "by hand",
    "by hand, again",
    "by hand, seeded",
    "distaccum",
    "Lightning Fabric",
    "Accelerate",
    "DeepSpeed 0",
)
# Okabe and Ito's colours, which all readers can tell apart, and a marker and a dash each for those who print.
STYLES = {
    "by hand": ("#000000", "o", "-"),
    "by hand, again": ("#999999", "x", ":"),
    "by hand, seeded": ("#56B4E9", "v", "--"),
    "distaccum": ("#D55E00", "*", "-"),
    "Lightning Fabric": ("#009E73", "s", "-."),
    "Accelerate": ("#CC79A7", "^", "--"),
    "DeepSpeed 0": ("#0072B2", "D", ":"),
}
Line = tuple[float, float]  # fixed part, and slope


def fit(times: Mapping[int, float]) -> Line:
    """The line with the least squares of relative deviations: a long window's noise is as large as a short one's is."""
    weights = [1 / time**2 for time in times.values()]
    total = sum(weights)
    mean_x = sum(w * x for w, x in zip(weights, times, strict=True)) / total
    mean_y = sum(w * y for w, y in zip(weights, times.values(), strict=True)) / total
    spread = sum(w * (x - mean_x) ** 2 for w, x in zip(weights, times, strict=True))
    joint = sum(w * (x - mean_x) * (y - mean_y) for w, (x, y) in zip(weights, times.items(), strict=True))
    slope = joint / spread
    return mean_y - slope * mean_x, slope


def explained(times: Mapping[int, float], line: Line) -> float:
    """R squared."""
    mean = statistics.fmean(times.values())
    left = sum((y - at(line, x)) ** 2 for x, y in times.items())
    return 1 - left / sum((y - mean) ** 2 for y in times.values())


def at(line: Line, steps: int) -> float:
    return line[0] + line[1] * steps


def rows(taken: Mapping[Key, Sequence[float]], steps: Sequence[int]) -> list[dict[str, Any]]:
    """A loop each, beside the first, which is the one by hand."""
    engine = next(iter(taken))[0]
    by_hand = NAMES[0]
    found = []
    for name in NAMES:
        times = {num: 1e6 * statistics.median(taken[engine, name, num]) for num in steps}
        line = fit(times)
        ratios = {}
        for num in steps:
            pairs = zip(taken[engine, name, num], taken[engine, by_hand, num], strict=True)
            ratios[num] = quartiles([one / other for one, other in pairs])
        found.append(
            {
                "loop": name,
                "microseconds": times,
                "ratio": ratios,
                "fixed": line[0],
                "slope": line[1],
                "r_squared": explained(times, line),
                "largest_deviation": max(abs(y / at(line, x) - 1) for x, y in times.items()),
            }
        )
    return found


def table(title: str, found: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = [
        f"## {title}",
        "",
        "| microseconds | per update | per micro-step | above by hand | slope / by hand | R² | deviates at most |",
        "| --- | --: | --: | --: | --: | --: | --: |",
    ]
    hand = found[0]
    for row in found:
        above = f"{row['fixed'] - hand['fixed']:+.0f} {row['slope'] - hand['slope']:+.1f} K"
        lines.append(
            f"| {row['loop']} | {row['fixed']:.0f} | {row['slope']:.1f} | {above} | {row['slope'] / hand['slope']:.2f} "
            f"| {row['r_squared']:.5f} | {100 * row['largest_deviation']:.1f}% |"
        )
    return [*lines, ""]


def plot(groups: Mapping[str, Sequence[Mapping[str, Any]]], path: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    num_rows, columns = -(-len(groups) // 2), min(2, len(groups))
    figure, grid = pyplot.subplots(
        num_rows, columns, figsize=(5.6 * columns, 4.4 * num_rows), squeeze=False, layout="constrained"
    )
    for panel in grid.flat[len(groups) :]:
        panel.set_visible(False)
    for panel, (title, found) in zip(grid.flat, groups.items(), strict=False):
        for row in found:
            colour, marker, dashes = STYLES[row["loop"]]
            times = row["microseconds"]
            lengths = list(times)
            line = [at((row["fixed"], row["slope"]), num) / 1000 for num in lengths]
            panel.plot(lengths, line, dashes, color=colour, linewidth=1.4)
            panel.plot([], [], dashes, marker=marker, color=colour, label=row["loop"])
            panel.plot(
                lengths,
                [one / 1000 for one in times.values()],
                marker,
                color=colour,
                markersize=9 if marker == "*" else 6,
            )
        panel.set_title(title)
        panel.set_xlabel("micro-steps per update")
        panel.set_ylabel("milliseconds per update")
        panel.set_xticks([num for num in lengths if num == 1 or num >= max(lengths) / 8], minor=False)
        panel.set_xlim(left=0)
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.3)
    figure.suptitle("Time of an update: medians, and lines fitted to them")
    handles, labels = grid.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2 * columns, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--steps", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64], metavar="N", help="(1 2 4 8 16 32 64)"
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 3, 4], metavar="N", help="(1 2 3 4)")
    parser.add_argument("--rounds", type=int, default=30, metavar="N", help="(%(default)s)")
    parser.add_argument("--out", type=Path, metavar="NAME", help="NAME.md and NAME.json are written")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="a picture, a panel for each number of ranks")
    options = parser.parse_args()
    steps, counts = sorted(set(options.steps)), sorted(set(options.ranks))
    if steps[0] < 1 or counts[0] < 1 or options.rounds < 1:
        parser.error("--steps, --ranks and --rounds are at least 1")
    if len(steps) < 3:
        parser.error(f"--steps {' '.join(map(str, steps))}: a line takes 3 or more lengths to be told from a curve")
    if options.plot is not None and options.plot.suffix not in (".png", ".pdf", ".svg"):
        parser.error(f"--plot {options.plot}: name a .png, .pdf or .svg file")
    torch.set_num_threads(1)

    about = circumstances(torch.device("cpu")) | versions()
    others = ", ".join(f"{name} {version}" for name, version in versions().items())
    lines = header(
        "How an update's time grows with its micro-steps",
        about,
        f"{ABOUT} {options.rounds} rounds. With {others}.",
        f"A straight line, fixed + slope x K, through the medians at K = {', '.join(map(str, steps))} micro-steps, by "
        "least squares of relative deviations. *Per update* is its fixed part, *per micro-step* its slope; *deviates "
        "at most* the median that is farthest from it. *By hand, again* is the same loop twice: what it differs by is "
        "noise. Where there are more ranks than cores, the ranks take turns on them too.",
    )
    groups = {}
    for ranks in counts:
        engine = "plain" if ranks == 1 else "DDP"
        keys = [(engine, name, num) for num in steps for name in NAMES]
        taken = seconds_per_update(ranks, keys, options.rounds, limit=120 + 30 * options.rounds)
        title = "one process" if ranks == 1 else f"{ranks} ranks, DDP on gloo"
        groups[title] = rows(taken, steps)
        lines += table(title, groups[title])
    if options.plot is not None:
        plot(groups, options.plot)
    write(options.out, "\n".join(lines).rstrip(), {**about, "rounds": options.rounds, "groups": groups})


if __name__ == "__main__":
    main()
