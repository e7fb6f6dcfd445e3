"""When to accumulate: held-out loss by samples and by time for windows of 1 to 64 micro-batches, and a picture of it.

    sudo python launch/bench/advice.py --out launch/results/advice --plot launch/results/advice.png
    python launch/bench/advice.py --parts train --out launch/results/advice  # half of it, without root

Two tasks of launch/train.py, in one process: a small network on digits with SGD, a small GPT on the guide with AdamW.
A window of K micro-batches on each of two ranks has the gradient of one of 2K in one process, so that the same runs
tell of two nodes; how long their updates take is measured between two network namespaces. `--parts` runs some parts and
keeps what OUT.json has of the others. Needs root and iproute2 for the nodes, and what launch/ needs.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from kit import CPU, Options, circumstances, header, pyplot, save, write
from nodes import on_each, two_nodes
from torch import nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from training.config import Config
from training.data import MicroBatches, Order
from training.tasks import Task, make_task
from training.wrapping import make_optimizer

from distaccum import Accumulator

LENGTHS = (1, 2, 4, 8, 16, 32, 64)  # the last is of two ranks with 32 each
FACTORS = (0.5, 1.0, 2.0, 4.0)  # of the rate that the rule gives
SEEDS = (0, 1, 2)
RATES = ("100mbit", "1gbit")
FIGURES = "## The figures"  # what is above them in OUT.md stays
LOOKS = 24  # at the held-out loss, in a run
COLOURS = ("#000000", "#E69F00", "#56B4E9", "#009E73", "#CC79A7", "#0072B2", "#D55E00")
MARKERS = "os^Dvx*"


@dataclass(frozen=True)
class Setting:
    title: str
    config: Config
    samples: int  # that a run sees
    target: float  # held-out loss
    rule: str

    def rate(self, length: int, factor: float) -> float:
        """The rule's, for a window of `length`, and `factor` times it."""
        return self.config.lr * factor * (length if self.rule == "linear" else math.sqrt(length))


SETTINGS = {
    "digits": Setting(
        "CNN on digits, SGD with momentum",
        Config(model="cnn", data="digits", image_size=16, micro_batch_size=4, lr=0.005, schedule="constant"),
        samples=1438 * 5,
        target=0.25,
        rule="linear",
    ),
    "language": Setting(
        "GPT on bytes of the guide, AdamW",
        Config(
            task="language", model="gpt", data="docs", context=32, width=32, layers=1, micro_batch_size=4,
            optimizer="adamw", lr=2e-3, schedule="constant",
        ),
        samples=1295 * 5,
        target=2.9,
        rule="square root",
    ),
}  # fmt: skip
Curve = list[tuple[int, int, float]]  # samples, updates, held-out loss


def train(setting: Setting, length: int, factor: float, seed: int) -> Curve:
    config = setting.config
    config = Config(**{**vars(config), "seed": seed, "lr": setting.rate(length, factor), "batch_size": 0})
    task = make_task(config)
    order = Order(len(task.train), length * config.micro_batch_size, seed)
    updates = -(-setting.samples // order.batch_size)
    optimizer, _ = make_optimizer(task.model, config, updates)
    accumulator = Accumulator(task.model, optimizer, steps=length, count=task.count, max_norm=1.0)
    held_out = task.collate([task.held_out[i] for i in range(len(task.held_out))])  # type: ignore[arg-type]
    curve, samples = [(0, 0, loss_of(task, held_out))], 0
    while accumulator.index < updates:
        for window in accumulator.windows(epoch(task, order, accumulator.index, updates, length)):
            for batch in window:
                window.backward(task.loss(task.model, batch))
                samples += len(batch[0] if isinstance(batch, tuple) else batch["tokens"])
            window.step()
            if samples >= curve[-1][0] + setting.samples / LOOKS or accumulator.index == updates:
                curve.append((samples, accumulator.index, loss_of(task, held_out)))
    return curve


def epoch(task: Task, order: Order, first: int, updates: int, length: int) -> Iterator[Any]:
    for keys in MicroBatches(order, first, updates, length, rank=0, ranks=1):
        yield task.collate([task.train[key] for key in keys])


@torch.no_grad()
def loss_of(task: Task, batch: Any) -> float:
    task.model.eval()
    count, loss, _ = task.measure(task.model, batch).tolist()
    task.model.train()
    return float(loss / count)


def reached(curve: Sequence[Sequence[float]], target: float) -> tuple[float, float]:
    """Samples and updates until the held-out loss is `target`, on the line between two looks; infinite if never."""
    for (s0, u0, l0), (s1, u1, l1) in pairwise(curve):
        if l1 <= target:
            part = (l0 - target) / (l0 - l1) if l0 > l1 else 1.0
            return s0 + part * (s1 - s0), u0 + part * (u1 - u0)
    return math.inf, math.inf


def trained(setting: Setting, lengths: Sequence[int], seeds: Sequence[int]) -> dict[str, Any]:
    """For each length the curves of all seeds at the first one's best rate, and of the first at the rule's."""
    found = {}
    for length in lengths:
        began = time.monotonic()
        tried = {factor: train(setting, length, factor, seeds[0]) for factor in FACTORS}
        best = min(FACTORS, key=lambda factor: (reached(tried[factor], setting.target)[0], last(tried[factor])))
        others = [train(setting, length, best, seed) for seed in seeds[1:]]
        curves = {"rule": [tried[1.0]], "best": [tried[best], *others]}
        found[str(length)] = {
            "lr": {"rule": setting.rate(length, 1.0), "best": setting.rate(length, best)},
            "tried": {str(f): (reached(c, setting.target)[0], last(c)) for f, c in tried.items()},
            "curves": curves,
        }
        print(f"{setting.title}, {length}: {time.monotonic() - began:.0f} s, best factor {best}", file=sys.stderr)
    return found


def last(curve: Sequence[Sequence[float]]) -> float:
    return curve[-1][2] if math.isfinite(curve[-1][2]) else math.inf


# Seconds of an update


def seconds_here(rounds: int) -> dict[str, dict[str, float]] | None:
    """By task and window length, of the slower rank; alone in a job of one. In turns, the first round warms up."""
    ranks = int(torch.distributed.get_world_size()) if dist.is_initialized() else 1
    rank = dist.get_rank() if ranks > 1 else 0
    found: dict[str, dict[str, float]] = {}
    for name, setting in SETTINGS.items():
        task = make_task(setting.config)
        model: nn.Module = DistributedDataParallel(task.model) if ranks > 1 else task.model
        optimizer, _ = make_optimizer(model, setting.config, 1)
        accumulators = {n: Accumulator(model, optimizer, steps=n, count=task.count, max_norm=1.0) for n in LENGTHS[:-1]}
        size = setting.config.micro_batch_size
        batches = [task.collate([task.train[(rank + ranks * i) * size + j] for j in range(size)]) for i in range(32)]
        taken: dict[int, list[float]] = {length: [] for length in accumulators}
        for turn in range(-1, rounds):
            for length, accumulator in accumulators.items():
                if ranks > 1:
                    dist.barrier()
                began = time.perf_counter()
                for window in accumulator.windows(batches[:length]):
                    for batch in window:
                        window.backward(task.loss(model, batch))
                    window.step()
                if turn >= 0:
                    taken[length].append(time.perf_counter() - began)
        both: list[Any] = [taken] * ranks
        if ranks > 1:
            dist.all_gather_object(both, taken)
        found[name] = {
            str(length): statistics.median(max(turns) for turns in zip(*(one[length] for one in both), strict=True))
            for length in taken
        }
    return found if rank == 0 else None


def seconds_of_updates(rounds: int) -> dict[str, Any]:
    found: dict[str, Any] = {"one device": seconds_here(rounds)}
    for rate in RATES:
        with two_nodes(rate) as nodes:
            found[rate] = json.loads(on_each(nodes, ["--here", "--rounds", str(rounds)], 300.0))
    return found


def seconds_of_another(path: Path) -> dict[str, Any]:
    """As two_nodes.py measured its updates: micro-steps alone, and what DDP's one reduction adds to them."""
    measured = json.loads(path.read_text())
    medians = {row["name"]: statistics.median(row["seconds"]) for row in measured["rows"] if row["group"] == "once"}
    micro_step, reduction = medians["compute alone"] / 8, medians["DDP, distaccum"] - medians["compute alone"]
    found = {"one device": 0.0, "1gbit": reduction}
    by_length = {where: {str(n): n * micro_step + more for n in LENGTHS[:-1]} for where, more in found.items()}
    return {where: dict.fromkeys(SETTINGS, each) for where, each in by_length.items()}


# The tables


def summary(
    setting: Setting, name: str, trained: Mapping[str, Any], seconds: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """A row for each window length."""
    rows = []
    for length, one in trained.items():
        row: dict[str, Any] = {"length": int(length), "lr": one["lr"]}
        for which in ("rule", "best"):
            ends = [reached(curve, setting.target) for curve in one["curves"][which]]
            row[which] = {
                "samples": spread([samples for samples, _ in ends]),
                "updates": statistics.median(updates for _, updates in ends),
                "last": statistics.median(last(curve) for curve in one["curves"][which]),
            }
        row["seconds"] = {}
        for where, by_task in seconds.items():
            ranks = 1 if where == "one device" else 2
            per_update = by_task[name].get(str(int(length) // ranks)) if int(length) % ranks == 0 else None
            if per_update is not None:
                row["seconds"][where] = row["best"]["updates"] * per_update
        rows.append(row)
    return rows


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def table(setting: Setting, name: str, rows: Sequence[Mapping[str, Any]], seconds: Mapping[str, Any]) -> list[str]:
    size = setting.config.micro_batch_size
    lines = [
        f"### {setting.title}",
        "",
        f"To a held-out loss of {setting.target}; micro-batches of {size}; a run sees {setting.samples} samples.",
        "",
        f"| micro-batches per update | samples per update | rate: rule ({setting.rule}), best | "
        "samples, rule's rate, first seed | samples, best rate: median, least to most | updates | loss at the end |",
        "| --: | --: | --: | --: | --: | --: | --: |",
    ]
    for row in rows:
        best = row["best"]["samples"]
        samples = f"{spelled(best['median'])} ({spelled(best['least'])} to {spelled(best['most'])})"
        lines.append(
            f"| {row['length']} | {row['length'] * size} | {row['lr']['rule']:.2g}, {row['lr']['best']:.2g} | "
            f"{spelled(row['rule']['samples']['median'])} | {samples} | {spelled(row['best']['updates'])} | "
            f"{row['best']['last']:.3f} |"
        )
    if seconds:
        lines += [
            "",
            "Seconds to that loss at the best rate, and milliseconds of an update. On two nodes each rank has that",
            "number of micro-batches, so an update has twice the samples.",
            "",
            f"| micro-batches per update and rank | {' | '.join(f'{where}: s | ms' for where in seconds)} |",
            f"| --: | {' | '.join('--: | --:' for _ in seconds)} |",
        ]
        by_length = {row["length"]: row for row in rows}
        for length in LENGTHS[:-1]:
            cells = []
            for where, by_task in seconds.items():
                row = by_length.get(length * (1 if where == "one device" else 2))
                total = math.inf if row is None else row["seconds"].get(where, math.inf)
                cells.append(f"{spelled(total, 2)} | {1000 * by_task[name][str(length)]:.1f}")
            lines.append(f"| {length} | {' | '.join(cells)} |")
    return [*lines, ""]


def spelled(value: float, digits: int = 0) -> str:
    return f"{value:.{digits}f}" if math.isfinite(value) else "not reached"


def plot(path: Path, result: Mapping[str, Any]) -> None:
    from matplotlib.ticker import FixedLocator, NullLocator
    from PIL import Image  # which matplotlib needs

    seconds = result["seconds"]
    slow = next((where for where in seconds if where != "one device"), "")
    figure, grid = pyplot().subplots(
        len(SETTINGS),
        4 if seconds else 1,
        figsize=(15, 7.4) if seconds else (6, 8),
        squeeze=False,
        layout="constrained",
    )
    for line, (name, setting) in zip(grid, SETTINGS.items(), strict=True):
        runs, ends = result["trained"][name], dict[str, list[float]]()  # a little after the target
        size = setting.config.micro_batch_size
        for (length, one), colour, marker in zip(runs.items(), COLOURS, MARKERS, strict=True):
            curve = middle(one["curves"]["best"])
            style = {"color": colour, "marker": marker, "markersize": 5, "markevery": 4, "linewidth": 1.3}
            line[0].plot([seen for seen, _, _ in curve], [x for _, _, x in curve], label=length, **style)
            for axis, where, ranks in ((line[1], "one device", 1), (line[2], slow, 2)) if seconds else ():
                own = int(length) // ranks
                each = seconds[where][name].get(str(own)) if own * ranks == int(length) else None
                if each is not None:
                    ends.setdefault(where, []).append(1.2 * each * reached(curve, setting.target)[1])
                    axis.plot([u * each for _, u, _ in curve], [x for _, _, x in curve], **style)
        for axis, where in zip(line[1:3], ends, strict=False):
            axis.set_xlim(right=max(end for end in ends[where] if math.isfinite(end)))
        titles = [setting.title, "one device", f"two nodes, {slow}, half of the window each"]
        units = ["samples seen", "seconds", "seconds"]
        for axis, title, unit in zip(line, titles, units, strict=False):
            axis.set_title(title, fontsize=10)
            axis.set_xlabel(unit)
            axis.set_ylabel("held-out loss")
            axis.axhline(setting.target, color="#999999", linestyle=":", linewidth=1.2)
            axis.set_yscale("log")
            axis.set_xlim(left=0)
            low, high = axis.get_ylim()
            axis.yaxis.set_major_locator(
                FixedLocator([t for t in (0.1, 0.2, 0.5, 1, 2, 2.5, 3, 4, 5) if low <= t <= high])
            )
            axis.yaxis.set_minor_locator(NullLocator())
            axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
            axis.grid(alpha=0.3)
        if seconds:
            axis = line[3]
            rows = summary(setting, name, runs, seconds)
            for where, colour, marker in zip(seconds, ("#000000", "#D55E00", "#0072B2"), "os^", strict=False):
                label = where if where == "one device" else f"two nodes, {where}"
                ranks = 1 if where == "one device" else 2
                points = [(row["length"] // ranks, row["seconds"][where]) for row in rows if where in row["seconds"]]
                points = [(x, y) for x, y in points if math.isfinite(y)]
                axis.plot(*zip(*points, strict=True), color=colour, marker=marker, label=label)
            axis.set_xscale("log", base=2)
            axis.set_yscale("log")
            axis.set_xticks(LENGTHS[:-1], [str(n) for n in LENGTHS[:-1]])
            axis.xaxis.set_minor_locator(NullLocator())
            low, high = axis.get_ylim()
            ticks = [m * 10.0**e for e in range(-2, 4) for m in (1, 1.5, 2, 3, 5, 7)]
            axis.yaxis.set_major_locator(FixedLocator([t for t in ticks if low <= t <= high]))
            axis.yaxis.set_minor_locator(NullLocator())
            axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
            axis.set_xlabel(f"micro-batches of {size} per update and rank")
            axis.set_ylabel(f"seconds to a loss of {setting.target}")
            axis.set_title("time to that loss", fontsize=10)
            axis.grid(alpha=0.3)
            axis.legend(fontsize=8)
    handles, labels = grid[0, 0].get_legend_handles_labels()
    figure.legend(
        handles, labels, title="micro-batches per update, over all ranks (each at the best of four rates)",
        loc="outside lower center", ncols=len(labels) if seconds else 4, frameon=False,
    )  # fmt: skip
    save(figure, path, 90)
    if path.suffix == ".png":
        Image.open(path).quantize(128).save(path)  # a third of the bytes


def middle(curves: Sequence[Curve]) -> Curve:
    """Over the seeds, look by look."""
    return [(s, u, statistics.median(curve[i][2] for curve in curves)) for i, (s, u, _) in enumerate(curves[0])]


MEASURED = (
    "Seconds: medians of updates in turns, wall clock, without looks and without making batches; of the slower rank on "
    f"two nodes (DDP on gloo, a namespace each, {' or '.join(RATES)} between them)."
)
TAKEN = (
    "Seconds: not of these tasks, but as those of ResNet-18 in two_nodes.md: micro-steps of 84 ms, and 369 ms more for "
    "the reduction between two nodes that the last backward does not hide. (So a window of 1 takes 453 ms; measured "
    "there were 471.)"
)


def notes(seconds: str) -> list[str]:
    factors = ", ".join(f"{factor:g}" for factor in FACTORS)
    return [
        f"Seeds {', '.join(map(str, SEEDS))}. Rates: the rule's (linear in the batch for SGD, square root for AdamW), "
        f"and the best of {factors} times it: with the first seed, by the fewest samples to the target. No schedule, "
        "no warm-up; the norm is clipped at 1. Samples until the target are read off the line between two of "
        f"{LOOKS} looks at the held-out loss.",
        seconds + " The runs themselves are of one process: a window of K on two ranks has the gradient of one of 2K "
        "there.",
    ]


def main() -> int:
    parser = Options(__doc__, picture=True)
    parser.add_argument("--parts", nargs="*", choices=("train", "seconds"), default=["train", "seconds"])
    parser.counts("--rounds", 15, "of turns, for the seconds")
    parser.add_argument(
        "--seconds-of", type=Path, metavar="FILE", help="two_nodes.json: its updates' seconds, and none measured"
    )
    parser.hidden("--here", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.here:
        dist.init_process_group("gloo")
        found = seconds_here(options.rounds)
        if found is not None:
            print(json.dumps(found), flush=True)
        return 0
    kept = options.out.with_suffix(".json") if options.out else None
    result = json.loads(kept.read_text()) if kept and kept.exists() else {"trained": {}, "seconds": {}, "about": {}}
    about = circumstances(CPU)
    if options.seconds_of is not None:
        result["seconds"] = seconds_of_another(options.seconds_of)
        result["about"] |= {"seconds": about, "seconds of": options.seconds_of.name}
    elif "seconds" in options.parts:
        try:
            result["seconds"] = seconds_of_updates(options.rounds)
        except RuntimeError as error:
            parser.error(f"{error}; or leave the nodes out with --parts train")
        result["about"]["seconds"] = about
        result["about"].pop("seconds of", None)
    if "train" in options.parts:
        result["trained"] = {name: trained(setting, LENGTHS, SEEDS) for name, setting in SETTINGS.items()}
        result["about"]["train"] = about
    if not result["trained"]:
        parser.error("--parts seconds without runs in OUT.json; leave --parts out")
    lines = header(
        "",
        result["about"]["train"],
        *notes(TAKEN if "seconds of" in result["about"] else MEASURED if result["seconds"] else "No seconds yet."),
    )
    if "seconds" in result["about"]:
        of_seconds = result["about"]["seconds"]
        source = f"Seconds: `{of_seconds['command']}`, commit {of_seconds['commit']}, {of_seconds['date']}."
        place = lines.index("", 2) + 1
        lines[place:place] = [*textwrap.wrap(source, width=118, break_on_hyphens=False), ""]
    lines[0] = FIGURES
    for name, setting in SETTINGS.items():
        rows = summary(setting, name, result["trained"][name], result["seconds"])
        lines += table(setting, name, rows, result["seconds"])
    if options.plot is not None:
        plot(options.plot, result)
    page = options.out.with_suffix(".md") if options.out else None
    words = page.read_text().split(FIGURES)[0] if page and page.exists() else "# When to accumulate\n\n"
    write(options.out, words + "\n".join(lines).rstrip(), result)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
