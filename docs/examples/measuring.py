"""Shared parts of the programs measure_NAME.py: ranks as processes, the measured copy, errors, tables.

A program starts itself once per rank with --child FILE. The child runs the script that get.py wrote and looks at the
gradients just before `optimizer.step()`, with a hook that torch calls for every optimizer.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import runpy
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import get
import torch
from torch import Tensor


def arguments(name: str, description: str) -> tuple[Path | None, dict[str, Any] | None]:
    """The folder with `original` and `moved`, made if necessary; or in a child, its task."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("folder", nargs="?", type=Path, help=f"what get.py {name} wrote (default: fetch it)")
    parser.add_argument("--from", type=Path, metavar="CHECKOUT", dest="checkout", help="a local clone; no network")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child is not None:
        return None, json.loads(args.child.read_text())
    if args.folder is not None and not (args.folder / "moved").is_dir():
        parser.error(f"{args.folder} has no folder `moved`; run get.py first")
    try:
        folder = args.folder or get.get(name, Path(tempfile.mkdtemp()) / name, args.checkout)
        return folder.resolve(), None  # children change their working directory
    except get.ExampleError as error:
        parser.exit(1, f"measure_{name}.py: {error}\n")


def copy(folder: Path, into: Path, replacements: Mapping[str, Sequence[tuple[str, str]]]) -> Path:
    """Copies a folder with replacements in its files. Each replaced text must occur once."""
    shutil.copytree(folder, into)
    for path, pairs in replacements.items():
        text = (into / path).read_text()
        for old, new in pairs:
            if text.count(old) != 1:
                raise ValueError(f"{old!r} is {text.count(old)} times in {path}")
            text = text.replace(old, new)
        (into / path).write_text(text)
    return into


def remove(folder: Path) -> None:
    """Removes the folder of an earlier run."""
    shutil.rmtree(folder, ignore_errors=True)


def start(name: str, description: str, main: Callable[[Path], None], child: Callable[[dict[str, Any]], None]) -> None:
    """Runs a program, either to measure a folder or as one of the ranks that do."""
    folder, spec = arguments(name, description)
    if spec is not None:
        child(spec)
    else:
        assert folder is not None
        main(folder)


def run_well(what: Mapping[str, Any], ranks: int = 1, timeout: float = 300) -> list[dict[str, Any]]:
    """Like `run`, but exits with the output of a rank that failed."""
    results = run(what, ranks, timeout)
    for result in results:
        if result["error"]:
            sys.exit(result["output"])
    return results


def run(what: Mapping[str, Any], ranks: int = 1, timeout: float = 300) -> list[dict[str, Any]]:
    """Runs the program in `ranks` children with --child; returns the result that each wrote with `report`."""
    with tempfile.TemporaryDirectory() as temporary:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        children = []
        for rank in range(ranks):
            spec = Path(temporary, f"{rank}.json")
            spec.write_text(json.dumps({**what, "rank": rank, "ranks": ranks, "result": f"{temporary}/{rank}.pt"}))
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "CUDA_VISIBLE_DEVICES": ""}
            if ranks > 1:
                environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
                environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            children.append(
                subprocess.Popen(
                    [sys.executable, sys.argv[0], "--child", str(spec)],
                    env=environment,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
        outputs = []
        for child in children:
            try:
                outputs.append(child.communicate(timeout=timeout)[0])
            except subprocess.TimeoutExpired:
                child.kill()
                outputs.append(f"{child.communicate()[0]}\nno end within {timeout} seconds")
        results = []
        for rank, (child, output) in enumerate(zip(children, outputs, strict=True)):
            path = Path(temporary, f"{rank}.pt")
            result = torch.load(path, weights_only=False) if path.exists() else {}
            errors = [line for line in output.splitlines() if "Error: " in line] or ["an error"]
            results.append({**result, "output": output, "error": "" if child.returncode == 0 else errors[-1]})
    return results


def script(folder: str, path: str, words: Sequence[str] = ()) -> dict[str, Any]:
    """Runs a script like `python path words` in its folder; returns its globals."""
    os.chdir(folder)
    sys.path[0] = folder  # instead of docs/examples, whose files have names of libraries
    sys.argv = [path, *words]
    return runpy.run_path(path, run_name="__main__")


def before_steps(look: Callable[[torch.optim.Optimizer], None]) -> None:
    """Calls `look` before each `optimizer.step()` of this process."""
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    register_optimizer_step_pre_hook(lambda optimizer, *_: look(optimizer))


def relative(found: Iterable[Tensor], exact: Iterable[Tensor]) -> float:
    """The norm of the difference relative to that of `exact`, over all tensors."""
    pairs = [(a.detach().double(), b.detach().double()) for a, b in zip(found, exact, strict=True)]
    difference = sum(((a - b).square().sum() for a, b in pairs), torch.zeros((), dtype=torch.float64))
    whole = sum((b.square().sum() for _, b in pairs), torch.zeros((), dtype=torch.float64))
    return float((difference / whole).sqrt())


def number(value: float) -> str:
    """Formats a value with two digits, and rounding errors as a power of ten."""
    return "0" if value == 0 else f"{value:.1e}" if value < 1e-3 else f"{value:.2g}"


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Prints a Markdown table."""
    print("|", " | ".join(header), "|")
    print("|", " | ".join(["---"] + ["--:"] * (len(header) - 1)), "|")
    for row in rows:
        print("|", " | ".join(str(cell) for cell in row), "|")


def versions(name: str) -> None:
    """Prints the versions that the figures depend on."""
    entry = get.originals()[name]
    print(f"\n{entry['repository'].removeprefix('https://github.com/')} {entry['commit'][:10]},", end=" ")
    print(f"torch {torch.__version__}, Python {platform.python_version()}")
