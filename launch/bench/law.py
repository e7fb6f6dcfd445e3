"""The law's cases by each library's documented use: does the gradient equal that of one call on all samples?

    python launch/bench/law.py --out launch/results/law                      # all; about six minutes
    python launch/bench/law.py --libraries hand distaccum --cases tail zero  # seconds; only prints

Each cell runs in real processes on the CPU (one per rank, gloo). The reference is plain torch: one call of the
criterion on all samples of the window, of all ranks, in float64, from the weights before that window. The optimizer is
SGD with a learning rate of 1, so the weights' change is the gradient; the worst window counts. The cases are in
lawcases/cases.py; each library's way through them is in its own file next to it.

`pip install accelerate deepspeed lightning-fabric pytorch-lightning transformers` installs the others; a missing one
is reported as not installed.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import os
import re
import sys
import time
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from functools import partial
from importlib import metadata
from typing import Any

import torch
import torch.distributed as dist
from kit import CPU, Options, RankError, circumstances, header, in_ranks, listed, table, write
from lawcases import LIBRARIES
from lawcases.cases import CASES
from lawcases.judge import Verdict, judge
from lawcases.task import Library, Outcome, Task


def import_packages(name: str, port: int) -> None:
    """Imports a library before the clock of a case starts, with the variables that a launcher would set."""
    warnings.simplefilter("ignore")
    rank, world = dist.get_rank(), dist.get_world_size()
    if world > 1:
        os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)})
        os.environ.update({"LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
    for package in LIBRARIES[name].packages:
        importlib.import_module(package)


def run_cell(name: str, key: str) -> Outcome:
    """Runs a cell on this rank."""
    warnings.simplefilter("ignore")
    task = Task(CASES[key], dist.get_rank())
    return LIBRARIES[name].cells[key](task)


def verdict_of(name: str, key: str, seconds: float, port: int) -> Verdict:
    library, case = LIBRARIES[name], CASES[key]
    if any(importlib.util.find_spec(package) is None for package in library.packages):
        return Verdict("not installed")
    if key not in library.cells:
        return Verdict("absent" if key in library.absent else "-")
    prepare = partial(import_packages, name, port)
    try:
        outcomes = in_ranks(case.world, run_cell, name, key, seconds=seconds, before=prepare)
    except RankError as error:
        verdict = failure(error, seconds)
    else:
        verdict = judge(case, outcomes, narrower(case.dtype, library.dtype))
    if key in library.lacks and verdict.verdict != "exact":
        verdict.verdict = "absent"
    return verdict


def failure(error: RankError, seconds: float) -> Verdict:
    """The verdict on ranks that failed: the first rank's own error, or that they waited for each other."""
    raised = [text for text in error.errors.values() if "Traceback" in text and "Connection closed by peer" not in text]
    if raised:
        said = re.sub(r"\[/\S+\] ", "", raised[0].strip().splitlines()[-1])  # gloo prints its source files
        return Verdict("error", note=said.split(". ")[0])
    if any("did not end" in text for text in error.errors.values()):
        return Verdict("hangs", note=f"not ended after {seconds:g} s")
    return Verdict("error", note="a rank died")


def narrower(one: torch.dtype, other: torch.dtype) -> torch.dtype:
    return torch.float32 if torch.float32 in (one, other) else torch.float64


def measure(libraries: Sequence[str], cases: Sequence[str], seconds: float) -> dict[str, dict[str, Verdict]]:
    verdicts: dict[str, dict[str, Verdict]] = {}
    for number, name in enumerate(libraries):
        verdicts[name] = {}
        for key in cases:
            began = time.monotonic()
            verdicts[name][key] = verdict = verdict_of(name, key, seconds, 29600 + number)
            took = time.monotonic() - began
            print(f"{name}, {key}: {spelled(verdict)} {verdict.note} ({took:.0f} s)", file=sys.stderr, flush=True)
    return verdicts


def spelled(verdict: Verdict) -> str:
    """Formats a cell of the table."""
    if verdict.error is None:
        return verdict.verdict
    if verdict.verdict == "exact":
        return f"exact, {verdict.error:.0e}"
    if math.isnan(verdict.error):
        seen = "NaN"
    elif verdict.updates is not None:
        made, due = verdict.updates
        seen = f"{made} of {due} updates" if made < due else f"{made} updates for {due}"
    else:
        seen = f"{verdict.error:.2g}"
    return f"**wrong**, {seen}" if verdict.verdict == "wrong" else f"absent ({seen})"


def versions_of(libraries: Iterable[Library]) -> dict[str, str]:
    names = metadata.packages_distributions()
    there = {names[one][0] for library in libraries for one in library.packages if one in names}
    return {one: metadata.version(one) for one in sorted(there)}


NOTES = (
    "A cell: the norm of the gradient's difference to one call of the criterion on all samples of the window, on all "
    "ranks, in parts of that one's norm; of the worst window, each from the library's own weights before it. *Exact*: "
    "at most 1e-10 in float64, 1e-5 in float32 (DeepSpeed, and the case with the scaler), as many updates, and the "
    "same weights on all ranks. *Wrong*: the documented use takes the case without a word, and gives another gradient, "
    "another number of updates, or NaN. *Absent*: it has nothing for the case and no documented recipe, or says no; in "
    "brackets what its ordinary use gives, which takes the case without a word. "
    "*-*: not what it is for. *Error*, *hangs*: as it says.",
)


def main() -> int:
    parser = Options(__doc__)
    parser.add_argument(
        "--libraries", nargs="+", choices=LIBRARIES, default=list(LIBRARIES), metavar="NAME", help=", ".join(LIBRARIES)
    )
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--timeout", type=float, default=20, metavar="SECONDS", help="then a cell hangs (%(default)s)")
    options = parser.parse_args()
    if not 0 < options.timeout < 60:
        parser.error(f"--timeout {options.timeout:g} is not between 0 and 60 seconds, after which gloo itself gives up")
    torch.set_num_threads(1)
    verdicts = measure(options.libraries, options.cases, options.timeout)
    about = {**circumstances(CPU), "timeout": f"{options.timeout:g} s"}
    versions = versions_of(LIBRARIES[name] for name in verdicts)
    lines = header("The law, library by library", about, *NOTES, f"Versions: {listed(versions) or 'torch alone'}.")
    rows = [[LIBRARIES[name].name, *(spelled(cells[key]) for key in options.cases)] for name, cells in verdicts.items()]
    lines += table(["", *(CASES[key].title for key in options.cases)], rows)
    lines += [*(f"- **{CASES[key].title}**: {CASES[key].about}" for key in options.cases)]
    cells: dict[str, Any] = {name: {key: asdict(v) for key, v in row.items()} for name, row in verdicts.items()}
    write(options.out, "\n".join(lines), {**about, "versions": versions, "cells": cells})
    broken = [key for key, verdict in verdicts.get("distaccum", {}).items() if verdict.verdict != "exact"]
    if broken:
        print(f"distaccum is not exact in: {', '.join(broken)}")
    return 1 if broken else 0


if __name__ == "__main__":
    raise SystemExit(main())
