"""What a window is in mid-window, packed; and the state of what draws random numbers."""

from __future__ import annotations

import io
import random
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn

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
    box = io.BytesIO()
    torch.save({"window": None if unfinished is None else asdict(unfinished), "loader": loader}, box)
    return box.getvalue()


def unpack(packed: bytes | None) -> tuple[Unfinished | None, Any]:
    """What `pack` was given."""
    if not packed:
        return None, None
    box = torch.load(io.BytesIO(packed), map_location="cpu", weights_only=True)
    return None if box["window"] is None else Unfinished(**box["window"]), box["loader"]


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
