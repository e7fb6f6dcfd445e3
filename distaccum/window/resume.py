"""A window that stopped between two micro-batches, packed to go on."""

from __future__ import annotations

import io
import re
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from ..law.errors import DistaccumError
from ..law.shares import whole_number_in

Losses = list[tuple[int, str, float, Any]]  # micro-batch, name, share, loss (a tensor)


@dataclass(frozen=True)
class Unfinished:
    """A window that this rank has done some micro-batches of."""

    done: int
    index: int  # of the update
    counts: list[tuple[float, ...]]  # of this rank's micro-batches
    losses: Losses
    partial: dict[str, Any]  # as the engine gave it
    random: dict[str, Any]
    statistics: list[Any] = field(default_factory=list)  # of batch normalisation, where they are pooled
    noise: Any = None  # of the first micro-batch, where the noise scale is measured


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
            "job and the one that goes on"
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
