"""The cost of measuring the gradient noise scale per update, and its error on a problem with a known value.

    python launch/bench/noise.py --out launch/results/noise
    python launch/bench/noise.py --rounds 5 --runs 3  # a quick look

Cost: updates with `NoiseScale()` beside the same without, in turns, in one process and on two gloo ranks (DDP),
which share a GPU. Value: a linear problem whose gradient of a sample is the sample, drawn from a known distribution.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from kit import Options, circumstances, header, in_ranks, in_turns, quartiles, spelled, table, wrapped, write
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from distaccum import Accumulator
from distaccum.extensions import NoiseScale

STEPS = (1, 8)
LAYERS = {"tiny": (16, 1, 8), "small": (256, 4, 32)}  # width, layers, samples in a micro-batch
ABOUT = {
    "tiny": "Linear(16, 16), micro-batches of 8: 272 parameters, so that the rest shows",
    "small": "4 x Linear(256, 256) with ReLU, micro-batches of 32: 263,168 parameters",
}
MEAN, DEVIATION, SIZE = 0.5, 2.0, 100  # of each element of a sample, all alike
TRUE = DEVIATION**2 / MEAN**2
MICRO_BATCH, MICRO_STEPS = 4, 2
AFTER = [10, 30, 100, 300, 1000]  # updates


def in_ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model) if dist.is_initialized() else model


def update_of(shape: str, steps: int, device: torch.device, *, measures: bool) -> Callable[[], object]:
    width, layers, samples = LAYERS[shape]
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(layers)]
    model = in_ddp(nn.Sequential(*blocks).to(device))
    accumulator = Accumulator(model, SGD(model.parameters(), lr=1e-4), extensions=[NoiseScale()] if measures else [])
    batches = [torch.randn(samples, width, device=device) for _ in range(steps)]

    def update() -> None:
        window = accumulator.window(batches)
        for batch in window:
            window.backward(model(batch).square().mean())
        window.step()

    return update


def repeated(update: Callable[[], object], times: int) -> None:
    for _ in range(times):
        update()


def cost(shape: str, rounds: int, device: torch.device) -> dict[int, dict[str, Any]]:
    """By micro-steps: microseconds of an update without, and the ratio with to without in the same round."""
    torch.set_num_threads(1)
    shared = dist.is_initialized()
    clock = time.perf_counter if shared else None  # on ranks waiting counts
    found = {}
    for steps in STEPS:
        # The first again, to see what two of the same differ by.
        loops = {
            name: update_of(shape, steps, device, measures=name == "with") for name in ("without", "with", "again")
        }
        times = max(1, 64 // steps) if shape == "tiny" else 4
        turns = {name: partial(repeated, update, times) for name, update in loops.items()}
        taken = in_turns(turns, rounds, device, clock=clock)
        base = taken["without"]
        by_name = {
            name: quartiles([one / other for one, other in zip(taken[name], base, strict=True)])
            for name in ("with", "again")
        }
        found[steps] = {"microseconds": 1e6 * quartiles(base)["median"] / times, **by_name}
    return found


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(SIZE))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def estimates(seeds: Sequence[int], after: Sequence[int]) -> list[list[float]]:
    """By run: the smoothed value after each number of updates in `after`, in parts of the true one."""
    torch.set_num_threads(1)
    rank = dist.get_rank() if dist.is_initialized() else 0
    found = []
    for seed in seeds:
        generator = torch.Generator().manual_seed(1000 * seed + rank)
        model = in_ddp(Linear())
        accumulator = Accumulator(model, SGD(model.parameters(), lr=1e-3), steps=MICRO_STEPS, extensions=[NoiseScale()])
        number = MICRO_STEPS * max(after)
        loader = (MEAN + DEVIATION * torch.randn(MICRO_BATCH, SIZE, generator=generator) for _ in range(number))
        values: list[float] = []
        for window in accumulator.windows(loader):
            for x in window:
                window.backward(model(x).mean())
            update = window.step()
            if update.index + 1 in after:
                assert update.noise_scale is not None
                values.append(update.noise_scale / TRUE)
        found.append(values)
    return found


def main() -> None:
    parser = Options(__doc__)
    parser.device()
    parser.counts("--rounds", 30, "of the cost")
    parser.counts("--runs", 10, "of the value")
    parser.counts("--after", AFTER, "updates")
    options = parser.parse_args()
    torch.set_num_threads(1)
    after = sorted(set(options.after))
    seeds = list(range(options.runs))

    device = torch.device(options.device)
    about = circumstances(device)
    limit = 120 + 20 * options.rounds + 60 * options.runs
    costs = {}
    for shape in LAYERS:
        costs[shape, "one process"] = cost(shape, options.rounds, device)
        costs[shape, "2 ranks, DDP"] = in_ranks(2, cost, shape, options.rounds, device, seconds=limit)[0]
    values = {
        "one process": estimates(seeds, after),
        "2 ranks, DDP": in_ranks(2, estimates, seeds, after, seconds=limit)[0],
    }

    lines = header(
        "The gradient noise scale: what it costs, and how near it comes",
        about,
        f"{options.rounds} rounds, {options.runs} runs.",
    )
    lines += [
        "## Cost of an update",
        "",
        *(f"- {name}: {text}" for name, text in ABOUT.items()),
        "",
        *wrapped(
            "Microseconds without (median), the ratio with to without in the same round (median, and the middle half "
            "of the rounds), and the same of a second loop without: what two alike differ by is noise. One process by "
            "the processor's time (on a GPU by the clock), ranks by rank 0's clock. A window of one micro-step has two "
            "gradients on ranks alone, where each parameter's norm is taken within the backward; in one process "
            "nothing is measured."
        ),
    ]
    rows = []
    for (shape, where), by_steps in costs.items():
        for steps, row in by_steps.items():
            both = spelled(row["with"]), spelled(row["again"])
            rows.append((f"{shape}, {where}", steps, f"{row['microseconds']:.0f}", *both))
    lines += table(("", "micro-steps", "without, us", "with", "without, again"), rows)
    batches = {"one process": MICRO_BATCH * MICRO_STEPS, "2 ranks, DDP": 2 * MICRO_BATCH * MICRO_STEPS}
    lines += [
        "## Value",
        "",
        *wrapped(
            f"Samples of {SIZE} independent elements of mean {MEAN} and deviation {DEVIATION}: the noise scale is "
            f"{TRUE:.0f} samples. {MICRO_STEPS} micro-batches of {MICRO_BATCH} per rank and update. The table has "
            "the value after these updates, in parts of the true one: the median of the runs, and their middle half."
        ),
    ]
    heads = ["updates", *(f"{where} (batch {batch})" for where, batch in batches.items())]
    of_runs = [
        [number, *(spelled(quartiles([run[i] for run in runs]), 2) for runs in values.values())]
        for i, number in enumerate(after)
    ]
    lines += table(heads, of_runs)
    result = {
        **about,
        "rounds": options.rounds,
        "cost": {f"{shape}, {where}": by_steps for (shape, where), by_steps in costs.items()},
        "true": TRUE,
        "after": after,
        "in_parts_of_true": values,
    }
    write(options.out, "\n".join(lines).rstrip(), result)


if __name__ == "__main__":
    main()
