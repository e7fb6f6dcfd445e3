"""What a window is in mid-window, packed; and the state of what draws random numbers."""

from __future__ import annotations

import io
import operator
import random
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from numbers import Real
from typing import Any

import torch
from torch import nn
from torch.amp import GradScaler

from .errors import DistaccumError

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


def whole_number_in(state: Mapping[str, Any], name: str, least: int) -> int:
    """The number of this name, or an error that says what stands there."""
    value = state.get(name)
    try:
        number = least - 1 if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]  # this is the check
    except TypeError:
        number = least - 1
    if number < least:
        raise ValueError(
            f"the state has {name}={value!r}, expected a whole number of at least {least}; give what state_dict() "
            "gave, of this version"
        )
    return number


def refuse_broken_scaler(state: Mapping[str, Any], scaler: GradScaler) -> None:
    """GradScaler itself sets what it finds before it misses anything."""
    wanted = scaler.state_dict()
    wrong = [name for name in wanted if isinstance(state.get(name), bool) or not isinstance(state.get(name), Real)]
    if wrong:
        seen = ", ".join(f"{name}={state.get(name)!r}" for name in wrong)
        raise ValueError(
            f"the state's scaler has {seen}, expected numbers; give what state_dict() gave, of this version"
        )


def random_devices(models: Sequence[nn.Module]) -> list[torch.device]:
    """Those with random numbers of their own that these compute on."""
    tensors = (tensor for model in models for tensor in (*model.parameters(), *model.buffers()))
    return list({tensor.device: None for tensor in tensors if tensor.device.type in ("cuda", "xpu", "mps")})


def random_state(devices: Sequence[torch.device]) -> dict[str, Any]:
    """Of torch on the host and on these devices, of `random`, and of numpy where it is loaded."""
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate(), "devices": {}}
    for device in devices:
        state["devices"][str(device)] = _module(device).get_rng_state(device)
    if (numpy := sys.modules.get("numpy")) is not None:
        kind, keys, *rest = numpy.random.get_state()
        state["numpy"] = (kind, keys.tolist(), *rest)
    return state


def set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    random.setstate(_tuples(state["python"]))
    for device, of_device in state["devices"].items():
        _module(torch.device(device)).set_rng_state(of_device, torch.device(device))
    if "numpy" in state and (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.set_state(state["numpy"])


def same_random(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether nothing was drawn between the two."""
    tensors = [[state["torch"], *state["devices"].values()] for state in (one, other)]
    drawn = any(not torch.equal(a, b) for a, b in zip(*tensors, strict=True))
    return not drawn and all(one[name] == other[name] for name in {"python", "numpy"} & one.keys() & other.keys())


def set_seed(seed: int) -> None:
    """Of all that `random_state` knows."""
    torch.manual_seed(seed)
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed % 2**32)


def _module(device: torch.device) -> Any:
    return getattr(torch, device.type)


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list | tuple) else value
