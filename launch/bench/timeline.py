"""The same job with and without deferral, seen from both ranks; and the cost of writing the trace.

    sudo python launch/bench/timeline.py --out launch/results/timeline
    python launch/bench/timeline.py --no-pictures --rounds 20  # what it costs alone, without root
    python launch/bench/timeline.py --no-pictures --device cuda  # the same where events of the GPU are timed

NAME_every.png and NAME_last.png: two network namespaces of this machine, a link of --rate between them, a rank in each,
ResNet-18 as in two_nodes.py; the update of median length under sync="every" and "last", on one scale. NAME.md and
NAME.json: trace= against no trace in turns, in one process and on two ranks. Needs matplotlib; for the pictures also
root, iproute2 and torchvision.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from kit import Options, circumstances, header, in_ranks, in_turns, quartiles, write
from nodes import on_each, two_nodes
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from distaccum import Accumulator
from distaccum.tools.timeline.cutting import Timeline, cut, typical
from distaccum.tools.timeline.drawing import draw
from distaccum.tools.timeline.reading import read_traces

POLICIES = {"every": "reduced in each micro-step", "last": "reduced once, in the last backward"}
STEPS = 8
SHAPES = {"a few ms": (512, 4, 64), "tiny": (16, 1, 8)}  # width, layers, samples of a micro-batch
SECONDS = 300.0


# The pictures


def train_here(sync: Any, steps: int, updates: int, folder: str) -> None:
    """On a node."""
    from two_nodes import loss_of, micro_batches, network

    dist.init_process_group("gloo")
    model = DistributedDataParallel(network())
    accumulator = Accumulator(model, SGD(model.parameters(), lr=0.01), steps=steps, sync=sync, trace=folder)
    batches = micro_batches(dist.get_rank(), steps)
    for window in accumulator.windows(batches * updates):
        for batch in window:
            window.backward(loss_of(model, batch))
        window.step()


def pictures(out: Path, rate: str, steps: int, updates: int) -> dict[str, Timeline]:
    found = {}
    with two_nodes(rate) as nodes, tempfile.TemporaryDirectory() as folder:
        for sync in POLICIES:
            traces = Path(folder) / sync
            passed = ["--here", sync, "--traces", str(traces), "--steps", str(steps), "--updates", str(updates)]
            on_each(nodes, passed, SECONDS)
            seen = read_traces(traces)
            update = typical(seen)
            found[sync] = cut(seen, update, update)
    longest = max(timeline.length for timeline in found.values())
    for sync, timeline in found.items():
        title = f'sync="{sync}", {POLICIES[sync]}: an update of {timeline.length:.0f} ms'
        draw(timeline, out.with_name(f"{out.name}_{sync}.png"), title=title, until=longest)
    return found


def table_of_pictures(found: Mapping[str, Timeline]) -> list[str]:
    lines = [
        "| ms of an update | all | compute | reduction, not hidden | waiting | plan | step | other | link busy |",
        "| --- |" + " --: |" * 8,
    ]
    for sync, timeline in found.items():
        for row in timeline.as_dict()["ranks"]:
            spent = " | ".join(f"{value:.0f}" for value in row["milliseconds"].values())
            lines.append(
                f'| `sync="{sync}"`, rank {row["rank"]} | {timeline.length:.0f} | {spent} | {row["link_busy"]:.0f} |'
            )
    return lines


# What it costs


def costs(shape: tuple[int, int, int], rounds: int, windows: int, device: torch.device) -> dict[str, list[float]]:
    """Seconds of `windows` windows with and without a trace, in turns; "off, again" shows the noise."""
    clock = time.perf_counter if dist.is_initialized() else None
    with tempfile.TemporaryDirectory() as folder:
        loops = {
            "off": updates_of(shape, windows, device, None),
            "on": updates_of(shape, windows, device, folder),
            "off, again": updates_of(shape, windows, device, None),
        }
        return in_turns(loops, rounds, device, clock=clock)


def updates_of(
    shape: tuple[int, int, int], windows: int, device: torch.device, trace: str | None
) -> Callable[[], None]:
    torch.manual_seed(0)
    width, layers, samples = shape
    model: nn.Module = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers))).to(device)
    if dist.is_initialized():
        model = DistributedDataParallel(model)
    accumulator = Accumulator(model, SGD(model.parameters(), lr=1e-4), steps=STEPS, trace=trace)
    batches = [torch.randn(samples, width, device=device) for _ in range(STEPS)] * windows

    def run() -> None:
        for window in accumulator.windows(batches):
            for batch in window:
                window.backward(model(batch).square().mean())
            window.step()

    return run


def measure(rounds: int, device: torch.device) -> list[dict[str, Any]]:
    rows = []
    for ranks in (1, 2):
        for name, shape in SHAPES.items():
            windows = 2 if name != "tiny" else 8
            many = partial(costs, shape, rounds, windows, device)
            taken = many() if ranks == 1 else in_ranks(2, many, seconds=SECONDS)[0]
            per_step = {one: 1e6 * statistics.median(found) / windows / STEPS for one, found in taken.items()}
            of_off = {
                one: quartiles([a / b for a, b in zip(taken[one], taken["off"], strict=True)])
                for one in ("on", "off, again")
            }
            rows.append({"ranks": ranks, "micro_step": name, "microseconds": per_step, "ratio": of_off})
    return rows


def table_of_costs(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = ["| | micro-step, us | with a trace | ratio | the same twice |", "| --- | --: | --: | --: | --: |"]
    for row in rows:
        where = "one process" if row["ranks"] == 1 else "2 ranks, DDP on gloo"
        spread = (f"{one['median']:.3f} ({one['low']:.3f} to {one['high']:.3f})" for one in row["ratio"].values())
        each = row["microseconds"]
        lines.append(f"| {where}, {row['micro_step']} | {each['off']:.0f} | {each['on']:.0f} | {' | '.join(spread)} |")
    return lines


def main() -> None:
    parser = Options(__doc__)
    parser.device()
    parser.add_argument("--rate", default="1gbit", help="of the link, as tc takes it (%(default)s)")
    parser.counts("--steps", 4, "micro-steps of the pictures")
    parser.counts("--updates", 7, "of which one is drawn")
    parser.counts("--rounds", 100, "with and without a trace")
    parser.add_argument("--no-pictures", action="store_true", help="what it costs alone")
    parser.hidden("--here", choices=POLICIES)
    parser.hidden("--traces")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.here:
        train_here(options.here, options.steps, options.updates, options.traces)
        return

    if options.out is None and not options.no_pictures:
        parser.error("--out is where the pictures go; or say --no-pictures")
    device = torch.device(options.device)
    about = circumstances(device)
    result: dict[str, Any] = {**about, "rate": options.rate, "rounds": options.rounds}
    notes, lines = [], []
    if not options.no_pictures:
        found = pictures(options.out, options.rate, options.steps, options.updates)
        result["updates"] = {sync: timeline.as_dict() for sync, timeline in found.items()}
        notes.append(
            f"The pictures: ResNet-18 with GroupNorm in float32 (46.8 MB of gradients), {options.steps} micro-steps of "
            f"4 images on each of two ranks, each in a network namespace, {options.rate} between them; of "
            f"{options.updates} updates the one of median length. *Link busy*: from where the last rank has come to a "
            "reduction until it ends, added up."
        )
        lines = [*table_of_pictures(found), "", *(f"![{sync}]({options.out.name}_{sync}.png)" for sync in found), ""]
    result["costs"] = rows = measure(options.rounds, device)
    notes.append(
        f"The cost: windows of {STEPS} micro-steps with a trace and without, in turns, {options.rounds} rounds: the "
        "median ratio of a round, and how far the middle half of the rounds reaches. *The same twice* is noise. In one "
        "process by the processor's time (on a GPU by the clock); on ranks, where waiting counts, by the clock of "
        "rank 0. *A few ms*: 4 layers of Linear(512, 512) on 64 samples; *tiny*: Linear(16, 16) on 8."
    )
    title = "An update seen from both ranks, and what the trace costs"
    lines = [*header(title, about, *notes), *lines, *table_of_costs(rows)]
    write(options.out, "\n".join(lines).rstrip(), result)


if __name__ == "__main__":
    main()
