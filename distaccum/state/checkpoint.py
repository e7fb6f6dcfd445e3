"""State: makes and loads a rank's checkpoint, with its random numbers and its loader's position."""

from __future__ import annotations

import io
import random
import re
from collections.abc import Mapping
from numbers import Real
from typing import Any

import torch
import torch.distributed as dist

from ..extension import KEYS
from ..guard import Stage
from ..job import Job
from ..law import DistaccumError, whole_number
from ..planning import Planner
from ..runs.memory import fit_of
from ..text import a, in_short, warn

Part = dict[str, Any]
NOTHING: Part = {"random": None, "is_between": True, "loader": None}
OF_STATE = "; give what state_dict() gave, of this version"


def state_dict_of(planner: Planner) -> dict[str, Any]:
    """The state where the next update begins, with this rank's random numbers and its loader's position."""
    job = planner.job
    stage = None if job.open is None or job.start is None else job.open.stage
    # By the caller, or by an engine that owns the step.
    if (stage is Stage.COMPLETE and not job.steps) or (stage is Stage.STEPPING and not job.optimizers):
        raise DistaccumError(
            "state_dict() between a window's loop and its step() with optimizer=None, where the weights may have "
            "been stepped already; take it after window.step()"
        )
    part = {
        "random": job.random.now(job.start),
        # A job that resumes begins with a loop over windows().
        "is_between": planner.place.is_read and job.start is None,
        "loader": planner.place.position(),
    }
    return {
        "index": job.index,
        "skipped": job.skipped,
        "due": len(job.due),
        "fit": fit_of(job).state(),
        **{extension.key: extension.state() for extension in job.extensions if extension.key},
        "scaler": job.scaler.state_dict() if job.scaler else None,
        "ranks": _world_size(job),
        f"rank {job.engine.peers.global_rank}": _pack(part),
    }


def load_state(state: Mapping[str, Any], planner: Planner) -> None:
    """Resumes from the state; reads everything before it sets anything."""
    job = planner.job
    window = job.open
    if window is not None and window.stage in (Stage.RUNNING, Stage.STEPPING):
        raise DistaccumError(f"load_state_dict() while a window is {window.describe()}; finish it or discard() it")
    if not isinstance(state, Mapping):
        raise TypeError(f"load_state_dict() got {a(type(state).__name__)}, expected what state_dict() gave")
    if missing := sorted(KEYS - set(state)):
        raise ValueError(f"the state has no {', '.join(missing)}{OF_STATE}")
    scaler = state["scaler"]
    if (scaler is None) != (job.scaler is None):
        has, wants = ("no", "one") if scaler is None else ("a", "none")
        raise ValueError(f"the state holds {has} scaler and this accumulator has {wants}; give both the same")
    index, skipped, due, ranks = (whole_number(n, state[n], OF_STATE, 0) for n in ("index", "skipped", "due", "ranks"))
    # A GradScaler itself would load some numbers before it missed another.
    numbers = {} if job.scaler is None else {"scaler": [*job.scaler.state_dict()]}
    for name, keys in {"fit": [], **numbers}.items():
        own = state[name]
        if not isinstance(own, Mapping) or not all(isinstance(own.get(key), Real) for key in keys):
            raise ValueError(f"the state has {name}={own!r}, expected {', '.join(keys) or 'a dict'}{OF_STATE}")
    learned = fit_of(job).loaded(state["fit"], OF_STATE)
    part = _part_for(state, ranks, job)
    for extension in job.extensions:
        if extension.key:
            extension.load(state.get(extension.key))

    if window is not None:
        window.discard()
    # The schedules are loaded too.
    job.epochs.clear()
    # They step when the next window is planned: until then they may be loaded too.
    job.due = job.schedulers[-due:] if due else []
    job.random.due = part["random"]
    planner.place.load(part["loader"], is_between=part["is_between"])
    job.index = index
    job.skipped = skipped
    job.start = None
    job.fit = learned
    if job.scaler is not None:
        job.scaler.load_state_dict(scaler)


def _world_size(job: Job) -> int:
    """The number of ranks in the whole job, including tensor-parallel ranks."""
    return dist.get_world_size() if job.engine.peers.groups or job.engine.peers.beside else 1


def _pack(part: Part) -> bytes:
    """Packs a rank's part into one value, which checkpoints of any kind store unchanged.

    `torch.distributed.checkpoint` loads only entries that a fresh state also has, and a fresh state cannot have entries
    that are not known yet.
    """
    box = io.BytesIO()
    try:
        torch.save(part, box)
        # This fails now, not in the job that wants to resume.
        if part["loader"]:
            torch.load(io.BytesIO(box.getvalue()), weights_only=True)
    except Exception as error:
        held = re.search(r"GLOBAL ([\w.]+)", str(error))
        what = f"holds {held[1]}" if held else f"cannot be saved ({in_short(error)})"
        raise DistaccumError(
            f"the loader's state_dict() {what}, and a state is loaded without running code (weights_only=True), which "
            "takes numbers, texts, tensors, and lists, tuples and dicts of them; give those in the loader's "
            "state_dict() (of a numpy array tolist()), or allow it with torch.serialization.add_safe_globals in this "
            "job and in the one that resumes"
        ) from None
    return box.getvalue()


def _unpack(packed: bytes) -> Part:
    try:
        box = torch.load(io.BytesIO(packed), map_location="cpu", weights_only=True)
        torch.Generator().set_state(box["random"]["torch"])
        random.Random().setstate(box["random"]["python"])
        return {name: box[name] for name in NOTHING}
    except Exception as error:
        # torch's own text advises loading without weights_only, which would run code in the file.
        raise ValueError(
            f"the part of this rank in the state cannot be read ({type(error).__name__}): it is cut off, or of another "
            "program or version; take another checkpoint"
        ) from None


def _part_for(state: Mapping[str, Any], saved: int, job: Job) -> Part:
    """Reads this rank's part of a state of `saved` ranks."""
    rank = job.engine.peers.global_rank
    ranks = _world_size(job)
    if saved != ranks:
        job.once(
            "ranks",
            f"the state is of {saved} ranks and this job has {ranks}: the loader's position and the random numbers "
            "are left out",
        )
    elif f"rank {rank}" in state:
        return _unpack(state[f"rank {rank}"])
    elif any(_unpack(part)["loader"] for name, part in state.items() if name.startswith("rank ")):
        raise DistaccumError(
            f"the state was taken on another rank and has no loader's position for rank {rank}; save and load the "
            "state_dict() of every rank"
        )
    else:
        warn(
            f"the state has no part for rank {rank}: its random numbers are left out; save and load the state_dict() "
            "of every rank"
        )
    return NOTHING
