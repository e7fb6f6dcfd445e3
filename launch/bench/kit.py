"""Shared parts of the benchmarks: loops in turns, peak memory, ranks, options, tables and headers."""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import platform
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
import traceback
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # launch/: wrappers, training
CPU = torch.device("cpu")
SLOW_IMPORTS = ("torch.distributed.fsdp", "distaccum", "accelerate", "lightning.fabric", "deepspeed")

Loop = Callable[[], object]
Name = TypeVar("Name", bound=Hashable)
# For glibc: resident memory equals the memory in use only if freed memory goes back to the system at once.
RETURNS = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


def in_turns(
    loops: Mapping[Name, Loop],
    rounds: int,
    device: torch.device,
    *,
    before: Mapping[Name, Loop] | None = None,
    clock: Callable[[], float] | None = None,
) -> dict[Name, list[float]]:
    """Seconds of each loop in each round; every other round is in reverse order, and two untimed ones come first.

    The callable that `before` has for a loop runs ahead of each of its turns, and is not timed.
    """
    taken: dict[Name, list[float]] = {name: [] for name in loops}
    order = list(loops.items())
    if clock is None:
        clock = time.perf_counter if device.type == "cuda" else time.process_time  # leaves out other programs
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
    """Compares round by round, so that a busy machine slows both."""
    values = [time / other for time, other in zip(times, reference, strict=True)]
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def quartiles(values: Sequence[float]) -> dict[str, float]:
    """The median, and the range of the middle half of the values."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else 3 * [values[0]]
    return {"median": middle, "low": low, "high": high}


def listed(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def spelled(ratio: Mapping[str, float] | None) -> str:
    """Formats a median and its range, which may be that of all values or of the middle half."""
    if ratio is None:
        return "-"
    median, low, high = (f"{value:.2f}" for value in ratio.values())
    return f"{median} ({low} to {high})"


def peak_of(loop: Loop, device: torch.device) -> float:
    """MB in use at the peak of `loop` beyond those in use before it."""
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
    """Runs this program with these options and reads its output as JSON."""
    command = [sys.executable, sys.argv[0], *options]
    done = subprocess.run(command, env={**os.environ, **(environment or {})}, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"{shlex.join(command[1:])} failed (its own error says why)")
    return json.loads(done.stdout)


# Ranks


class RankError(Exception):
    """Ranks failed; `errors` has the traceback of each, or says that it died or did not end."""

    def __init__(self, errors: Mapping[int, str]) -> None:
        super().__init__("\n".join(f"rank {rank}: {text}" for rank, text in errors.items()))
        self.errors = errors


def in_ranks(
    num: int,
    function: Callable[..., Any],
    *args: Any,
    seconds: float,
    before: Loop | None = None,
    anew: bool = False,
) -> list[Any]:
    """The function's value on each rank of a fresh gloo group; `before` runs first, and does not count in `seconds`.

    `anew`: ranks are not forks of this process, so glibc reads the environment variables that are set now.
    """
    # A process with one thread can be forked safely; otherwise a server is forked, which imports the program once.
    threads = len(list(Path("/proc/self/task").iterdir())) if Path("/proc/self/task").exists() else 2
    context: Any = multiprocessing.get_context("fork" if threads == 1 and not anew else "forkserver")
    if threads > 1 or anew:  # before Python 3.14 the server leaves the program's own imports to each rank
        context.set_forkserver_preload([one for one in SLOW_IMPORTS if one in sys.modules])
    store = str(Path(tempfile.mkdtemp(), "store"))
    processes, pipes = [], []
    try:
        for rank in range(num):
            ours, theirs = context.Pipe()
            given = rank, num, store, theirs, before, function, args
            processes.append(context.Process(target=_run_rank, args=given, daemon=True))
            processes[-1].start()
            theirs.close()
            pipes.append(ours)
        _collect(pipes, seconds=300)  # imports are slow on a busy machine
        return _collect(pipes, seconds)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _collect(pipes: Sequence[Connection], seconds: float) -> list[Any]:
    values: dict[int, Any] = {}
    errors: dict[int, str] = {}
    until = time.monotonic() + seconds
    left = {pipe: rank for rank, pipe in enumerate(pipes)}
    while left and (ready := wait(list(left), timeout=max(0.0, until - time.monotonic()))):
        for pipe in ready:
            rank = left.pop(pipe)  # type: ignore[call-overload]
            try:
                is_good, value = pipe.recv()  # type: ignore[union-attr]
            except (EOFError, OSError):
                is_good, value = False, "died"
            if is_good:
                values[rank] = value
            else:
                errors[rank] = value
                until = min(until, time.monotonic() + 3)  # the others may wait for it forever
    errors |= dict.fromkeys(left.values(), f"did not end within {seconds:g} s")
    if errors:
        raise RankError(errors)
    return [values[rank] for rank in range(len(pipes))]


def _run_rank(
    rank: int, num: int, store: str, pipe: Connection, before: Loop | None, function: Callable[..., Any], args: Any
) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # otherwise Accelerate sets it, with a warning
    minutes = timedelta(minutes=1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num, timeout=minutes)
    try:
        if before is not None:
            before()
        pipe.send((True, None))
        torch.manual_seed(0)
        answer = (True, function(*args))
    except Exception:
        answer = (False, traceback.format_exc())
    pipe.send(answer)
    pipe.poll(60)  # until it is killed: the parent reads tensors from this process's memory


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def relative_difference(value: torch.Tensor, expected: torch.Tensor) -> float:
    return ((value - expected).norm() / expected.norm()).item()


def circumstances(device: torch.device) -> dict[str, str]:
    folder = Path(__file__).parent
    git = shutil.which("git")  # a machine that is lent for a run may lack it, or the history
    asked = [git or "true", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(asked, cwd=folder, capture_output=True, text=True).stdout.strip()
    program = Path(sys.argv[0]).name
    return {
        "command": shlex.join(["python", f"launch/bench/{program}", *sys.argv[1:]]),
        "commit": commit or "unknown",
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
    return [f"# {title}", "", *(line for note in (first, *notes) for line in wrapped(note))]


def write(out: Path | None, text: str, result: Mapping[str, Any]) -> None:
    """Prints the page, and writes OUT.md and OUT.json."""
    print(text)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.with_suffix(".md").write_text(text.rstrip("\n") + "\n")
        out.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")


# The command line, and parts of a page


class Options(argparse.ArgumentParser):
    """A parser with `--out`, to which a program adds its own options; its docstring is the help."""

    def __init__(self, text: str | None) -> None:
        super().__init__(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
        self.add_argument("--out", type=Path, metavar="NAME", help="NAME.md and NAME.json are written")

    def counts(self, name: str, default: Any, text: str = "", **more: Any) -> None:
        """Adds an option that takes a number of at least 1, or a list of them if the default is a list."""
        many = {"nargs": "+"} if isinstance(default, list) else {}
        shown = " ".join(map(str, default)) if many else default
        help_text = f"{text} ({shown})".strip()
        self.add_argument(name, type=_count, default=default, metavar="N", help=help_text, **many, **more)

    def device(self) -> None:
        default = "cuda" if torch.cuda.is_available() else "cpu"
        self.add_argument("--device", choices=["cuda", "cpu"], default=default, help="(%(default)s)")

    def hidden(self, *names: str, **more: Any) -> None:
        """Adds an option that a program passes to its own processes."""
        self.add_argument(*names, help=argparse.SUPPRESS, **more)


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}, expected a number of at least 1")
    return int(text)


def table(heads: Sequence[object], rows: Iterable[Sequence[object]]) -> list[str]:
    """The lines of a Markdown table and an empty one; all columns but the first are aligned to the right."""
    lines = [heads, ["---", *["--:"] * (len(heads) - 1)], *rows]
    return [*(f"| {' | '.join(map(str, cells))} |" for cells in lines), ""]


def wrapped(text: str) -> list[str]:
    return [*textwrap.wrap(text, width=118, break_on_hyphens=False), ""]
