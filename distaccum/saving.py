"""Saves a training to one file, and loads it: models that each rank has whole, plain or under DDP."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from .accumulator import Accumulator
from .batch import tensors_in
from .guesses import answering
from .law import all_or_none
from .ranks import whole_job
from .text import in_short

SHARDED = ("FullyShardedDataParallel", "DeepSpeedEngine")


@answering
def save(path: str | os.PathLike[str], **parts: Any) -> None:
    """Writes the states of `parts` (models, optimizers, schedules, Accumulators) to the file `path`. All ranks call it.

    Rank 0 writes, with every rank's part of an Accumulator's state: its random numbers and its loader's position. A job
    that is killed meanwhile leaves the old file or the new one. If it fails on one rank, all ranks raise.

    Raises:
        ValueError: A part is sharded (FSDP, ZeRO), and no rank has all of it: use torch.distributed.checkpoint.

    Example:
        >>> import os, tempfile
        >>> model, file = torch.nn.Linear(2, 1), os.path.join(tempfile.mkdtemp(), "run.pt")
        >>> save(file, model=model)
        >>> load(file, model=model)
    """
    states = dict[str, Any]()
    error = None
    try:
        states = {name: _state_of(name, part) for name, part in parts.items()}
    except Exception as raised:
        error = raised
    own = {name: state for name, state in states.items() if isinstance(parts[name], Accumulator)}
    peers = whole_job()
    everyone = peers.gather_objects((error and in_short(error), own))
    all_or_none([failed for failed, _ in everyone], error, "save() failed on rank {ranks}: {why}; nothing was written")
    if peers.rank == 0:
        for name in own:
            states[name] = {key: value for _, of_rank in everyone for key, value in of_rank[name].items()}
        new = Path(f"{os.fspath(path)}.new")
        try:
            torch.save(states, new)
            new.replace(path)
        except Exception as raised:
            error = raised
    # The others wait here until the file is there.
    all_or_none(peers.gather_objects(error and in_short(error)), error, "save() could not write on rank {ranks}: {why}")


@answering
def load(path: str | os.PathLike[str], **parts: Any) -> None:
    """Loads what `save` wrote to `path` into `parts` of the same names, on any number of ranks. It runs no code."""
    states = torch.load(path, map_location="cpu", weights_only=True)
    if missing := [name for name in parts if name not in states]:
        raise ValueError(f"{path} has no {', '.join(missing)}, expected names among {', '.join(states)}")
    for name, part in parts.items():
        _whole(part).load_state_dict(states[name])


def _state_of(name: str, part: Any) -> Any:
    is_sharded = any(kind.__name__ in SHARDED for kind in type(part).__mro__)
    state = {} if is_sharded else _whole(part).state_dict()
    if is_sharded or any(hasattr(tensor, "to_local") for _, tensor in tensors_in(state)):
        raise ValueError(
            f"{name} is sharded over ranks, expected a part that each rank has whole; save it with "
            "torch.distributed.checkpoint, or as its wrapper does, beside the Accumulator's state_dict()"
        )
    return state


def _whole(part: Any) -> Any:
    """The module under DDP, whose state has the same names on any number of ranks."""
    return part.module if isinstance(part, DistributedDataParallel) else part
