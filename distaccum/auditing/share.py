"""Ranks exchange what they saw in files, so that the audit runs no collective."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

PATIENCE, HASTE = 30.0, 3.0  # seconds to wait for the other ranks; after an error, since they may hang
LAUNCHERS = (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"))
STARTED = time.time() - 30  # older files are of a run that was killed
COMMON = ("MASTER_PORT", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "SLURM_STEP_ID")


def place_in_job() -> tuple[int, int]:
    """This process's rank and the number of ranks: of the process group, or as the launcher says."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return next(((int(os.environ[a]), int(os.environ[b])) for a, b in LAUNCHERS if {a, b} <= os.environ.keys()), (0, 1))


@contextmanager
def exchanged(mine: dict[str, Any], folder: str | None, number: int) -> Iterator[list[dict[str, Any]]]:
    """Tells other ranks what this one saw, and yields the parts of all that arrive in time; ranks leave after rank 0.

    They meet in a folder that is named by what ranks of a job have in common. Without a `folder` only those of a
    machine can.
    """
    world = mine["world"] if folder else min(mine["world"], int(os.environ.get("LOCAL_WORLD_SIZE", mine["world"])))
    if world == 1:
        yield [mine]
        return
    common = [os.environ.get(name, "") for name in COMMON]
    common += [str(number), "" if any(common) else str(os.getppid())]
    meeting = Path(folder or tempfile.gettempdir()) / "-".join(["distaccum-audit", *common]).replace(os.sep, "_")
    meeting.mkdir(parents=True, exist_ok=True)
    part = meeting / f"{mine['rank']}.part"
    torch.save(mine, part)
    part.rename(part.with_suffix(".pt"))

    def parts() -> list[Path]:
        return [one for one in meeting.glob("*.pt") if one.stat().st_mtime > STARTED]

    _wait(lambda: len(parts()) >= world, PATIENCE if mine["ended"] else HASTE)
    loaded = (torch.load(path, weights_only=True) for path in parts())
    seen = sorted(loaded, key=lambda about: int(about["rank"]))
    part.with_suffix(".read").touch()
    try:
        yield seen
    finally:
        if seen[0]["rank"] == mine["rank"]:
            _wait(lambda: len([*meeting.glob("*.read")]) >= len(seen))
            shutil.rmtree(meeting, ignore_errors=True)
        else:  # if this rank ended first, its launcher might kill rank 0 for its status
            _wait(lambda: not meeting.exists())


def _wait(until: Callable[[], bool], seconds: float = PATIENCE) -> None:
    latest = time.monotonic() + seconds
    while not until() and time.monotonic() < latest:
        time.sleep(0.01)
