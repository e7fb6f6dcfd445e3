"""A window that stopped between two micro-batches, packed to go on."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from ..engines import Engine
from ..gradients.snapshot import random_state
from ..law.errors import DistaccumError
from ..law.shares import whole_number_in
from .ledger import Losses
from .observer import Observer
from .status import DONE, Status


@dataclass(frozen=True)
class Unfinished:
    """A window that this rank has done some micro-batches of."""

    done: int
    index: int  # of the update
    counts: list[tuple[float, ...]]  # of this rank's micro-batches
    losses: Losses
    partial: dict[str, Any]  # what the engine's backwards added up
    random: dict[str, Any]
    observers: dict[str, Any] = field(default_factory=dict)  # the state of each, by its key


def suspended(
    status: Status,
    engine: Engine,
    observers: Sequence[Observer],
    devices: Sequence[torch.device],
) -> Unfinished:
    """What a window needs to go on, between two of its micro-batches; `devices` have random numbers of their own."""
    source = status.source
    if status.turn is not DONE or status.has_more_parts:
        raise DistaccumError(
            f"state_dict() {status.where()} before its backward, expected it after window.backward(loss), between "
            "two micro-batches"
        )
    if len(source.num_counted) > 1 and engine.shows_partial and not status.is_between_micro_batches:
        num = list(source.num_counted)
        raise DistaccumError(
            f"state_dict() {status.where()}, where another of the ranks may be past its last (they have {num}) and all "
            "cannot go on together; take it where window.can_pause, or after window.step()"
        )
    return Unfinished(
        done=status.num_done,
        index=status.index,
        counts=source.counts,
        losses=[(number, name, share, float(loss)) for number, name, share, loss in status.ledger.state()],
        partial=engine.partial(status.parameters),
        random=random_state(devices),
        observers={one.key: one.state() for one in observers if one.key},
    )


def pack(unfinished: Unfinished | None, loader: Any) -> bytes | None:
    """One value, which checkpoints of any kind hold as it is.

    `torch.distributed.checkpoint` loads what a fresh state shows already, and a fresh one cannot show the tensors of
    a window that it knows nothing of.
    """
    if unfinished is None and loader is None:
        return None
    if loader is not None:
        _refuse_what_cannot_be_loaded(loader)
    box = io.BytesIO()
    torch.save({"window": None if unfinished is None else asdict(unfinished), "loader": loader}, box)
    return box.getvalue()


def _refuse_what_cannot_be_loaded(loader: Any) -> None:
    """Now, and not in the job that wants to go on with it."""
    try:
        box = io.BytesIO()
        torch.save(loader, box)
        box.seek(0)
        torch.load(box, weights_only=True)
    except Exception as error:
        held = re.search(r"GLOBAL ([\w.]+)", str(error))
        what = (
            f"holds {held[1]}"
            if held
            else f"cannot be saved ({type(error).__name__}: {' '.join(str(error).split())[:120]})"
        )
        raise DistaccumError(
            f"the loader's state_dict() {what}, and a state is loaded without running code (weights_only=True), which "
            "takes numbers, texts, tensors, and lists, tuples and dicts of them; give those in the loader's "
            "state_dict() (of a numpy array tolist()), or allow it with torch.serialization.add_safe_globals in this "
            "job and in the one that resumes"
        ) from None


def unpack(packed: bytes | None) -> tuple[Unfinished | None, Any]:
    """What `pack` was given."""
    if not packed:
        return None, None
    try:
        box = torch.load(io.BytesIO(packed), map_location="cpu", weights_only=True)
        window, loader = box["window"], box["loader"]
        unfinished = None if window is None else Unfinished(**window)
    except Exception as error:
        # torch's own text tells to load it without weights_only, which runs what is in it.
        raise ValueError(
            f"the part of this rank in the state cannot be read ({type(error).__name__}): it is cut off, or of another "
            "program or version; take another checkpoint"
        ) from None
    if unfinished is not None:
        for name in ("done", "index"):
            whole_number_in(window, name, 0)
    return unfinished, loader
