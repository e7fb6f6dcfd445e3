"""State: makes and loads a rank's checkpoint, with its random numbers and its loader's position."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from numbers import Real
from typing import Any

import torch
import torch.distributed as dist
from torch.amp import GradScaler

from ..extension import KEYS
from ..guard import OPEN
from ..job import Job
from ..law import DistaccumError, in_short, warn, whole_number
from ..planner import Planner
from .randomness import check_random_state
from .sizes import fit_of

Own = dict[str, Any]  # a rank's part
NOTHING: Own = {"random": None, "is_between": True, "loaders": []}
OF_STATE = "; give what state_dict() gave, of this version"


def state_dict_of(planner: Planner) -> dict[str, Any]:
    job, peers = planner.job, planner.job.engine.peers
    return {
        "index": job.index,
        "skipped": job.skipped,
        "fit": fit_of(job).state(),
        **{one.key: one.state() for one in job.extensions if one.key},
        "scaler": job.scaler.state_dict() if job.scaler else None,
        "ranks": _world_size(job),
        f"rank {peers.global_rank}": _pack_part(_part_of(planner)),
    }


def load_state(state: Mapping[str, Any], planner: Planner) -> None:
    """Resumes from the state; reads everything before it sets anything."""
    job = planner.job
    if planner.window is not None and planner.window.stage in OPEN:
        raise DistaccumError(
            f"load_state_dict() while a window is {planner.window.describe()}; finish it or discard() it"
        )
    if not isinstance(state, Mapping):
        raise TypeError(f"load_state_dict() got a {type(state).__name__}, expected what state_dict() gave")
    if missing := sorted(KEYS - set(state)):
        raise ValueError(f"the state has no {', '.join(missing)}{OF_STATE}")
    if (state["scaler"] is None) != (job.scaler is None):
        has, wants = ("no", "one") if state["scaler"] is None else ("a", "none")
        raise ValueError(f"the state holds {has} scaler and this accumulator has {wants}; give both the same")
    index, skipped, ranks = (whole_number(name, state[name], OF_STATE, 0) for name in ("index", "skipped", "ranks"))
    for name in ("fit", "scaler"):
        if not isinstance(state[name], Mapping) and (name, state[name]) != ("scaler", None):
            raise ValueError(f"the state has {name}={state[name]!r}, expected a dict{OF_STATE}")
    learned = fit_of(job).loaded(state["fit"], OF_STATE)
    if job.scaler is not None:
        _refuse_broken_scaler(state["scaler"], job.scaler)
    own = _own_part(state, ranks, job)
    for one in job.extensions:
        if one.key:
            one.load(state.get(one.key))

    if planner.window is not None:
        planner.window.discard()  # it may be planned
    planner.forget(warns=False)
    job.epochs.clear()  # schedules are loaded too
    job.random.load(own["random"], is_between=own["is_between"])
    planner.load(own["loaders"])
    job.index, job.skipped, job.start = index, skipped, None
    job.fit = learned
    if job.scaler is not None:
        job.scaler.load_state_dict(state["scaler"])


def _world_size(job: Job) -> int:
    """The number of ranks in the whole job, including tensor-parallel ranks."""
    return 1 if job.engine.peers.group is None else dist.get_world_size()


def _part_of(planner: Planner) -> Own:
    """This rank's random numbers and its loaders' positions where the next update begins."""
    job, start = planner.job, planner.job.start
    if start is not None and start.may_be_stepped:
        raise DistaccumError(
            "state_dict() between a window's loop and its step() with optimizer=None, where the weights may have "
            "been stepped already; take it after window.step()"
        )
    random = start.random if start is not None and start.random is not None else job.random.now()
    return {"random": random, "is_between": planner.is_between(), "loaders": planner.positions()}


def _pack_part(own: Own) -> bytes:
    """Packs a rank's part into one value, which checkpoints of any kind store unchanged.

    `torch.distributed.checkpoint` loads only entries that a fresh state also has, and a fresh state cannot have entries
    that are not known yet.
    """
    box = io.BytesIO()
    try:
        torch.save(own, box)
        if own["loaders"]:  # fail now, not in the job that wants to resume
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


def _unpack_part(packed: bytes) -> Own:
    try:
        box = torch.load(io.BytesIO(packed), map_location="cpu", weights_only=True)
        own = {name: box[name] for name in NOTHING}
        check_random_state(own["random"])
    except Exception as error:
        # torch's own text advises loading without weights_only, which would run code in the file.
        raise ValueError(
            f"the part of this rank in the state cannot be read ({type(error).__name__}): it is cut off, or of another "
            "program or version; take another checkpoint"
        ) from None
    return own


def _own_part(state: Mapping[str, Any], saved: int, job: Job) -> Own:
    """Reads this rank's part of a state of `saved` ranks."""
    rank, ranks = job.engine.peers.global_rank, _world_size(job)
    if saved != ranks:
        job.once(
            "ranks",
            f"the state is of {saved} ranks and this job has {ranks}: the positions of loaders and the random numbers "
            "are left out",
        )
        return NOTHING
    if f"rank {rank}" in state:
        return _unpack_part(state[f"rank {rank}"])
    if any(_unpack_part(part)["loaders"] for name, part in state.items() if name.startswith("rank ")):
        raise DistaccumError(
            f"the state was taken on another rank and has no loader's position for rank {rank}; save and load the "
            "state_dict() of every rank"
        )
    warn(
        f"the state has no part for rank {rank}: its random numbers are left out; save and load the state_dict() of "
        "every rank"
    )
    return NOTHING


def _refuse_broken_scaler(state: Mapping[str, Any], scaler: GradScaler) -> None:
    """Raises if the state lacks numbers; GradScaler itself would first load part of it."""
    for name in scaler.state_dict():
        if not isinstance(state.get(name), Real):
            raise ValueError(
                f"the state's scaler has {name}={state.get(name)!r}, expected a number; give what state_dict() gave"
            )
