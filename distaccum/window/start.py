"""Where a window starts: random numbers and the loader's state, as a state of the accumulator has them."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from typing import Any, final

import torch
from torch import nn

from ..law import DistaccumError, Once
from ..snapshot import check_random_state, random_devices, random_state, set_random_state


@final
class Start:
    """This rank's random numbers when a window begins: kept for a state, and put back from one."""

    def __init__(self, models: Sequence[nn.Module], once: Once) -> None:
        self._models, self._once = models, once
        self.loaded: dict[str, Any] | None = None  # of a state, until a window begins
        self.random: dict[str, Any] = {}  # when the last window began
        self._devices: list[torch.device] | None = None

    def begin(self) -> None:
        """A window begins, before its first forward: its data are drawn, which may have drawn numbers too."""
        self.put_back()
        if self._devices is None:  # looked up once: a large model has thousands of tensors
            self._devices = random_devices(self._models)
        self.random = random_state(self._devices, self.random)

    def put_back(self) -> None:
        """Sets the numbers of a loaded state, once."""
        loaded, self.loaded = self.loaded, None
        if loaded is None:
            return
        devices, found = random_devices(self._models), list(loaded["devices"].items())
        if [device.type for device in devices] == [torch.device(name).type for name, _ in found]:
            found = [(str(device), numbers) for device, (_, numbers) in zip(devices, found, strict=True)]
        else:
            self._once(
                "devices",
                f"the state has the random numbers of {[name for name, _ in found] or 'no device'} and this model is "
                f"on {list(map(str, devices)) or 'none'}, so those of devices are left out",
            )
            found = []
        set_random_state({**loaded, "devices": dict(found)})

    def now(self) -> dict[str, Any]:
        """The numbers that a window which began now would have."""
        return random_state(random_devices(self._models)) if self.loaded is None else self.loaded


def pack(random: dict[str, Any], loader: Any) -> bytes:
    """One value, which checkpoints of any kind hold as it is.

    `torch.distributed.checkpoint` loads what a fresh state shows already, and a fresh one cannot show what it knows
    nothing of.
    """
    if loader is not None:
        _refuse_what_cannot_be_loaded(loader)
    box = io.BytesIO()
    torch.save({"random": random, "loader": loader}, box)
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


def unpack(packed: bytes) -> tuple[dict[str, Any], Any]:
    """Random numbers and the loader's state, as `pack` was given them."""
    try:
        box = torch.load(io.BytesIO(packed), map_location="cpu", weights_only=True)
        random, loader = box["random"], box["loader"]
        check_random_state(random)
    except Exception as error:
        # torch's own text tells to load it without weights_only, which runs what is in it.
        raise ValueError(
            f"the part of this rank in the state cannot be read ({type(error).__name__}): it is cut off, or of another "
            "program or version; take another checkpoint"
        ) from None
    return random, loader
