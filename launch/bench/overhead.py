"""What a window costs above the loop written by hand: microseconds per micro-step on a tiny model, one process.

The loops take turns window by window, so that a busy machine slows all of them; read the ratios.

    bash launch/venv.sh launch && .venv/bin/python launch/bench/overhead.py
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import SGD

from distaccum import Accumulator

Loop = Callable[[list[torch.Tensor]], None]


def loops() -> dict[str, Loop]:
    """Each on a model of its own: forward, weighted backward, step and clearing of a whole window."""

    def model() -> tuple[nn.Module, SGD]:
        torch.manual_seed(0)
        linear = nn.Linear(16, 16)
        return linear, SGD(linear.parameters(), lr=1e-4)

    def hand() -> Loop:
        linear, optimizer = model()

        def run(batches: list[torch.Tensor]) -> None:
            for batch in batches:
                loss = linear(batch).square().mean() / len(batches)
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return run

    def seeded() -> Loop:
        linear, optimizer = model()

        def run(batches: list[torch.Tensor]) -> None:
            share = torch.full((), 1 / len(batches))
            for batch in batches:
                linear(batch).square().mean().backward(share)
            optimizer.step()
            optimizer.zero_grad()

        return run

    def distaccum(**options: Any) -> Loop:
        linear, optimizer = model()
        accumulator = Accumulator(linear, optimizer, **options)

        def run(batches: list[torch.Tensor]) -> None:
            window = accumulator.window(batches)
            for batch in window:
                window.backward(linear(batch).square().mean())
            window.step()

        return run

    return {
        "by hand": hand(),
        "by hand, again": hand(),
        "by hand, seeded": seeded(),
        "distaccum": distaccum(),
        "distaccum, on_nonfinite='ignore'": distaccum(on_nonfinite="ignore"),
    }


def measure(steps: int, rounds: int) -> dict[str, list[float]]:
    """Microseconds per window, by loop."""
    batches = [torch.randn(8, 16) for _ in range(steps)]
    taken: dict[str, list[float]] = {name: [] for name in loops()}
    turns = list(loops().items())
    for turn in range(rounds + rounds // 10):
        for name, run in turns if turn % 2 else reversed(turns):
            start = time.perf_counter()
            run(batches)
            if turn >= rounds // 10:  # the first tenth warms up
                taken[name].append((time.perf_counter() - start) * 1e6)
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, nargs="+", default=[1, 8, 32, 128], help="micro-steps per window")
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent.parent / "results" / "overhead.json")
    options = parser.parse_args()
    torch.set_num_threads(1)

    medians: dict[int, dict[str, float]] = {}
    ratios: dict[int, dict[str, float]] = {}
    for steps in options.steps:
        taken = measure(steps, options.rounds)
        by_hand = taken["by hand"]
        medians[steps] = {name: statistics.median(times) / steps for name, times in taken.items()}
        ratios[steps] = {
            name: statistics.median(a / b for a, b in zip(times, by_hand, strict=True)) for name, times in taken.items()
        }
    few, many = min(options.steps), max(options.steps)
    marginal = {
        name: (medians[many][name] * many - medians[few][name] * few) / max(many - few, 1) for name in medians[many]
    }

    header = [f"{steps} steps" for steps in options.steps]
    print(f"| microseconds per micro-step (ratio to by hand) | {' | '.join(header)} | one more step |")
    print(f"| --- |{' --: |' * (len(header) + 1)}")
    for name in marginal:
        cells = [f"{medians[steps][name]:.0f} ({ratios[steps][name]:.2f})" for steps in options.steps]
        print(f"| {name} | {' | '.join(cells)} | {marginal[name]:.0f} ({marginal[name] / marginal['by hand']:.2f}) |")
    result = {"medians": medians, "ratios": ratios, "marginal": marginal, **circumstances()}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=2) + "\n")
    print(f"written to {options.out}")


def circumstances() -> dict[str, str]:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "command": "python launch/bench/overhead.py",
        "commit": commit.stdout.strip(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {torch.get_num_threads()} thread, CPU",
        "date": time.strftime("%Y-%m-%d"),
    }


if __name__ == "__main__":
    main()
