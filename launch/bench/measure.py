"""What programs of this folder share: loops in turns, a fresh process's peak memory, ranks, and a result's header."""

from __future__ import annotations

import gc
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

Loop = Callable[[], object]
Name = TypeVar("Name", bound=Hashable)
CLOCKS = {"cpu": "seconds of the processor", "cuda": "seconds"}
# Of glibc. Resident memory is what is in use only where what is freed goes back to the system at once;
RETURNS = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
# and getting it again, page by page, takes time.
KEEPS = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)}


def in_turns(
    loops: Mapping[Name, Loop],
    rounds: int,
    device: torch.device,
    *,
    before: Mapping[Name, Loop] | None = None,
    clock: Callable[[], float] | None = None,
) -> dict[Name, list[float]]:
    """Seconds of each loop in each round; every other round goes backwards, and two more come first to warm up.

    What `before` has for a loop runs ahead of each of its turns and is not timed.
    """
    taken: dict[Name, list[float]] = {name: [] for name in loops}
    order = list(loops.items())
    if clock is None:
        clock = time.perf_counter if device.type == "cuda" else time.process_time  # others' programs do not count
    for turn in range(-2, rounds):
        for name, loop in order if turn % 2 else reversed(order):
            if before is not None:
                before[name]()
            wait_for(device)
            began = clock()
            loop()
            wait_for(device)
            if turn >= 0:
                taken[name].append(clock() - began)
    return taken


def ratios(times: Sequence[float], reference: Sequence[float]) -> dict[str, float]:
    """Round by round, so that a busy machine slows both."""
    found = [one / other for one, other in zip(times, reference, strict=True)]
    return {"median": statistics.median(found), "least": min(found), "most": max(found)}


def quartiles(values: Sequence[float]) -> dict[str, float]:
    """A median and how far the middle half of the values reaches."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else 3 * [values[0]]
    return {"median": middle, "low": low, "high": high}


def spelled(ratio: Mapping[str, float] | None) -> str:
    if ratio is None:
        return "-"
    return f"{ratio['median']:.2f} ({ratio['least']:.2f} to {ratio['most']:.2f})"


def peak_of(loop: Loop, device: torch.device) -> float:
    """MB that are in use at its peak beyond those in use before it."""
    gc.collect()
    wait_for(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        loop()
        wait_for(device)
        return (torch.cuda.max_memory_allocated(device) - before) / 1e6
    Path("/proc/self/clear_refs").write_text("5")  # Linux: the peak begins anew
    before = resident("VmRSS")
    loop()
    return (resident("VmHWM") - before) / 1e6


def resident(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def in_fresh_process(*options: str, environment: Mapping[str, str] | None = None) -> Any:
    """What this program prints with these options, read as JSON."""
    command = [sys.executable, sys.argv[0], *options]
    done = subprocess.run(command, env={**os.environ, **(environment or {})}, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"{shlex.join(command[1:])} failed (its own error says why)")
    return json.loads(done.stdout)


def in_ranks(num: int, function: Callable[..., Any], *args: Any, seconds: float) -> list[Any]:
    """What it gives on each of so many fresh processes with a gloo group, in their order."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
    from ranks import Ranks  # the tests' own harness

    ranks = Ranks(num)
    try:
        return ranks.run(function, *args, seconds=seconds)
    finally:
        ranks.stop()


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def relative_difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


def circumstances(device: torch.device) -> dict[str, str]:
    folder = Path(__file__).parent
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=folder, capture_output=True, text=True)
    program = Path(sys.argv[0]).name
    return {
        "command": shlex.join(["python", f"launch/bench/{program}", *sys.argv[1:]]),
        "commit": commit.stdout.strip(),
        "hardware": hardware(device),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
    }


def hardware(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    about = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    names = [line.split(":", 1)[1].strip() for line in about.splitlines() if line.startswith("model name")]
    cores = f"{os.cpu_count()} cores, others may use them too"
    return f"{names[0] if names else platform.machine()}, {torch.get_num_threads()} thread ({cores})"


def header(title: str, about: Mapping[str, str], *notes: str) -> list[str]:
    versions = f"torch {about['torch']}, Python {about['python']}"
    first = f"`{about['command']}`, commit {about['commit']}, {about['date']}, {versions}, {about['hardware']}."
    wrap = partial(textwrap.wrap, width=118, break_on_hyphens=False)
    return [f"# {title}", "", *(line for note in (first, *notes) for line in (*wrap(note), ""))]


def write(out: Path | None, text: str, result: Mapping[str, Any]) -> None:
    """To the terminal, and as OUT.md and OUT.json."""
    print(text)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.with_suffix(".md").write_text(text + "\n")
        out.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
