"""Buffers and random numbers, kept and put back."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


class Snapshot:
    """Buffers and random numbers as they were before the window; gradients are the window's own to clear."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._models = models
        self._buffers: list[tuple[nn.Module, str, Tensor]] = []
        self._copies: list[Tensor] = []
        self.random: dict[str, Any] = {}

    def take(self) -> None:
        # All of them: what batch normalisation does to its statistics shows in no version counter.
        modules = {id(module): module for model in self._models for module in model.modules()}.values()
        found = [(m, name, b) for m in modules for name, b in m.named_buffers(recurse=False, remove_duplicate=False)]
        if [id(b) for *_, b in found] != [id(b) for *_, b in self._buffers]:
            with torch.inference_mode(False):  # else they could not be written to outside of it
                self._copies = [torch.empty_like(buffer) for *_, buffer in found]
        self._buffers = found
        _copy(self._copies, [buffer for *_, buffer in found])
        self.random = random_state(random_devices(self._models))

    def buffers_of(self, module: nn.Module) -> list[tuple[Tensor, Tensor]]:
        """A module's own, as they are and as they were."""
        pairs = zip(self._buffers, self._copies, strict=True)
        return [(module._buffers.get(name, was), was) for (of, name, _), was in pairs if of is module]  # type: ignore[misc]

    def restore(self) -> None:
        self.restore_buffers()
        set_random_state(self.random)

    def restore_buffers(self) -> None:
        pairs = zip(self._buffers, self._copies, strict=True)
        places = [_without_repeats(buffer, copy) for (*_, buffer), copy in pairs]
        _copy([buffer for buffer, _ in places], [copy for _, copy in places])
        for module, name, buffer in self._buffers:
            module._buffers[name] = buffer  # the loss may have put another in its place


def _without_repeats(buffer: Tensor, copy: Tensor) -> tuple[Tensor, Tensor]:
    """Both, where an expanded buffer has each element once: torch writes to no other."""
    if buffer.layout is torch.strided:
        for dim, (stride, size) in enumerate(zip(buffer.stride(), buffer.shape, strict=True)):
            if stride == 0 and size > 1:
                buffer, copy = buffer.narrow(dim, 0, 1), copy.narrow(dim, 0, 1)
    return buffer, copy


@torch.no_grad()
def _copy(to: Sequence[Tensor], of: Sequence[Tensor]) -> None:
    for target, source in zip(to, of, strict=True):
        target.copy_(source)


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
