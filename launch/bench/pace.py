"""The cost of reading a loader: windows(loader), the loop by hand, Accelerate and Fabric on the same loaders.

The dataset and the compute sleep, so any machine shows who waits for whom. Runs in one process and on two ranks of DDP.
"""

from __future__ import annotations

import multiprocessing
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from kit import CPU, Options, circumstances, header, in_ranks, spelled, table, write
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from distaccum import Accumulator

# Micro-steps per window, workers, milliseconds per micro-batch from all workers together, milliseconds of its compute.
CASES = [(1, 2, 8, 10), (8, 2, 8, 10), (32, 2, 8, 10), (32, 4, 4, 10), (32, 2, 12, 10), (128, 4, 8, 10), (8, 0, 4, 4)]
WINDOWS, MICRO_STEPS = 6, 80  # of an epoch, at least; its first window, in which workers start, is not timed
Way = Callable[["Job"], Iterator[None]]  # runs an epoch; yields after each update


class Slow(Dataset[Any]):
    def __init__(self, num: int, seconds: float) -> None:
        self.num, self.seconds = num, seconds

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, place: int) -> Any:
        time.sleep(self.seconds)
        return torch.randn(8, 16)


class Job:
    def __init__(self, steps: int, workers: int, load: float, compute: float) -> None:
        self.steps, self.workers, self.load, self.compute = steps, workers, load, compute
        net = nn.Linear(16, 16)
        self.model = DistributedDataParallel(net) if dist.is_initialized() else net
        self.optimizer = torch.optim.SGD(net.parameters(), lr=0.01)

    def loader(self) -> Any:
        multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # ranks have workers
        item = self.load * max(self.workers, 1) / 1000
        dataset = Slow(max(self.steps * WINDOWS, MICRO_STEPS), item)
        return DataLoader(dataset, batch_size=None, num_workers=self.workers)

    def loss(self, inputs: Any, model: nn.Module | None = None) -> torch.Tensor:
        time.sleep(self.compute / 1000)
        value: torch.Tensor = (model or self.model)(inputs).square().mean()
        return value


def by_hand(job: Job) -> Iterator[None]:
    model: Any = job.model
    for i, inputs in enumerate(job.loader()):
        is_last = (i + 1) % job.steps == 0
        with nullcontext() if is_last or not dist.is_initialized() else model.no_sync():
            (job.loss(inputs) / job.steps).backward()
        if is_last:
            job.optimizer.step()
            job.optimizer.zero_grad()
            yield


def windows(job: Job, *, ahead: bool = True) -> Iterator[None]:
    for window in Accumulator(job.model, job.optimizer, steps=job.steps).windows(job.loader(), ahead=ahead):
        for inputs in window:
            window.backward(job.loss(inputs))
        window.step()
        yield


def by_accelerate(job: Job) -> Iterator[None]:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=job.steps)
    model, optimizer, loader = accelerator.prepare(job.model, job.optimizer, job.loader())
    for inputs in loader:
        with accelerator.accumulate(model):
            accelerator.backward(job.loss(inputs, model))
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            yield


def by_fabric(job: Job) -> Iterator[None]:
    from lightning_fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
    model, optimizer = fabric.setup(job.model, job.optimizer)
    for i, inputs in enumerate(fabric.setup_dataloaders(job.loader())):
        is_last = (i + 1) % job.steps == 0
        with fabric.no_backward_sync(model, enabled=not is_last):
            fabric.backward(job.loss(inputs, model) / job.steps)
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
            yield


ON_RANKS: dict[str, Way] = {"distaccum": windows, "distaccum, ahead=False": partial(windows, ahead=False)}
ALONE = {**ON_RANKS, "Accelerate": by_accelerate, "Fabric": by_fabric}


def seconds_of(way: Way, case: tuple[int, int, int, int]) -> float:
    """Seconds per window, leaving out the first."""
    ends = [time.perf_counter() for _ in way(Job(*case))]
    return (ends[-1] - ends[0]) / (len(ends) - 1)


def measure(cases: list[tuple[int, int, int, int]], rounds: int) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    measured = []
    for case in cases:
        ways = ALONE if not dist.is_initialized() else ON_RANKS
        hand: list[float] = []
        others: dict[str, list[float]] = {name: [] for name in ["by hand, again", *ways]}
        for _ in range(rounds):
            hand.append(seconds_of(by_hand, case))
            for name, way in {"by hand, again": by_hand, **ways}.items():
                others[name].append(seconds_of(way, case) / hand[-1])
        measured.append({"case": case, "milliseconds": 1000 * sorted(hand)[len(hand) // 2], "ratios": others})
    return measured


def lines_of(measured: list[dict[str, Any]]) -> list[str]:
    names = list(measured[0]["ratios"])
    rows = []
    for case in measured:
        steps, workers, load, compute = case["case"]
        values = [sorted(case["ratios"][name]) for name in names]
        ratios = [{"median": v[len(v) // 2], "least": v[0], "most": v[-1]} for v in values]
        rows.append([f"{steps}, {workers}, {load}, {compute}", f"{case['milliseconds']:.0f}", *map(spelled, ratios)])
    return table(["steps, workers, load ms, compute ms", "by hand, ms", *names], rows)


def main() -> int:
    warnings.simplefilter("ignore")  # of other libraries
    parser = Options(__doc__)
    parser.counts("--rounds", 3, "rounds of all ways by turns")
    parser.counts("--cases", len(CASES), "how many of the loaders")
    options = parser.parse_args()
    cases = CASES[: options.cases]
    alone = measure(cases, options.rounds)
    on_ranks = in_ranks(2, measure, cases, options.rounds, seconds=900)[0]
    notes = (
        f"Time of a window of an epoch of at least {WINDOWS} windows and {MICRO_STEPS} micro-steps, the first left "
        "out: the dataset sleeps so that all workers together give a micro-batch each so often, and each micro-step "
        "sleeps for its compute. The ratio to the loop "
        f"by hand in the same round: the median, the least and the most of {options.rounds}.",
    )
    about = circumstances(CPU)
    page = [*header("The pace of a loader", about, *notes), "## One process", "", *lines_of(alone)]
    page += ["## Two ranks, DDP on gloo", "", *lines_of(on_ranks)]
    write(options.out, "\n".join(page), {**about, "alone": alone, "ranks": on_ranks})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
