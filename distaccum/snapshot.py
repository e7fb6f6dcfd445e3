"""Buffers, modes and random numbers: copied before the model runs, and restored."""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn


class Snapshot:
    """Copies buffers and random numbers, and restores them; each `take` writes to the same memory."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._models = models
        self._buffers: list[tuple[nn.Module, str, Tensor]] = []
        self._copies: list[Tensor] = []
        self.random: dict[str, Any] = {}

    @torch.no_grad()
    def take(self) -> Snapshot:
        # All of them: what batch normalisation does to its statistics shows in no version counter.
        modules = {id(module): module for model in self._models for module in model.modules()}.values()
        own = [(module, module.named_buffers(recurse=False, remove_duplicate=False)) for module in modules]
        found = [(module, name, buffer) for module, buffers in own for name, buffer in buffers]
        if [id(b) for *_, b in found] != [id(b) for *_, b in self._buffers]:
            with torch.inference_mode(False):  # else they could not be written to outside of it
                self._copies = [torch.empty_like(buffer) for *_, buffer in found]
        self._buffers = found
        for copy, (*_, buffer) in zip(self._copies, found, strict=True):
            copy.copy_(buffer)
        self.random = random_state(random_devices(self._models))
        return self

    def restore(self) -> None:
        self.restore_buffers()
        set_random_state(self.random)

    @torch.no_grad()
    def restore_buffers(self) -> None:
        for (module, name, buffer), copy in zip(self._buffers, self._copies, strict=True):
            if not _has_repeats(buffer):
                buffer.copy_(copy)
            if getattr(module, name, None) is not buffer:  # the loss put another in its place, or deleted it
                (setattr if hasattr(module, name) else nn.Module.register_buffer)(module, name, buffer)


@contextmanager
def kept(models: Sequence[nn.Module], parameters: Iterable[nn.Parameter] = ()) -> Iterator[Snapshot]:
    """Restores buffers, random numbers, modes and these parameters' gradients at its end."""
    gradients = [(p, p.grad, p.grad.clone()) for p in parameters if p.grad is not None]
    modes = [(module, module.training) for model in models for module in model.modules()]
    snapshot = Snapshot(models).take()
    try:
        yield snapshot
    finally:
        for module, training in modes:
            module.training = training
        snapshot.restore()
        for parameter, gradient, values in gradients:
            parameter.grad = gradient.copy_(values)


def _has_repeats(buffer: Tensor) -> bool:
    """Tells whether it was expanded, so that no operation of torch writes to it."""
    is_strided = buffer.layout is torch.strided
    return is_strided and any(step == 0 and n > 1 for step, n in zip(buffer.stride(), buffer.shape, strict=True))


def random_devices(models: Sequence[nn.Module]) -> list[torch.device]:
    """The devices that these models compute on and that have random numbers of their own."""
    tensors = (tensor for model in models for tensor in (*model.parameters(), *model.buffers()))
    return list({tensor.device: None for tensor in tensors if tensor.device.type in ("cuda", "xpu", "mps")})


def random_state(devices: Sequence[torch.device], known: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
    """The state of torch on the host and on these devices, of `random`, and of numpy if it is loaded.

    `known` is an earlier one, of which numpy's is taken over where it has not changed.
    """
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate(), "devices": {}}
    for device in devices:
        state["devices"][str(device)] = torch.get_device_module(device).get_rng_state(device)
    if (numpy := sys.modules.get("numpy")) is not None:
        found = known.get("numpy")
        if found is None or not _is_unchanged(numpy, *found):
            kind, keys, *rest = numpy.random.get_state()
            found = (kind, keys.tobytes(), *rest)
        state["numpy"] = found
    return state


def _is_unchanged(numpy: Any, kind: str, keys: bytes, position: int, has_normal: int, _: float) -> bool:
    """Tells whether numpy's numbers are still these, without `get_state`, which takes as long as 40 of torch's.

    A second normal number that waits (`has_normal`) may be drawn without a trace in the memory that is compared.
    """
    generator: Any = getattr(numpy.random, "get_bit_generator", lambda: None)()  # from numpy 1.24 on
    if has_normal or type(generator).__name__ != kind or kind != "MT19937":
        return False
    expected = keys + position.to_bytes(4, sys.byteorder)
    return ctypes.string_at(generator.ctypes.state_address, len(expected)) == expected


def set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    random.setstate(_tuples(state["python"]))
    for device, of_device in state["devices"].items():
        torch.get_device_module(device).set_rng_state(of_device, torch.device(device))
    if "numpy" in state and (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.set_state(_numpy_state(numpy, state["numpy"]))


def check_random_state(state: dict[str, Any]) -> None:
    """Raises if `set_random_state` could not set it."""
    torch.Generator().set_state(state["torch"])
    random.Random().setstate(_tuples(state["python"]))
    for name, of_device in state["devices"].items():
        torch.device(name), of_device.shape
    if "numpy" in state and (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.RandomState().set_state(_numpy_state(numpy, state["numpy"]))


def same_random(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Tells whether nothing was drawn between the two."""
    tensors = [[state["torch"], *state["devices"].values()] for state in (one, other)]
    drawn = any(not torch.equal(a, b) for a, b in zip(*tensors, strict=True))
    return not drawn and all(one[name] == other[name] for name in {"python", "numpy"} & one.keys() & other.keys())


def set_seed(seed: int) -> None:
    """Seeds every generator that `random_state` reads."""
    torch.manual_seed(seed)
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed % 2**32)


def _numpy_state(numpy: Any, state: Sequence[Any]) -> tuple[Any, ...]:
    kind, keys, *rest = state
    return (kind, numpy.frombuffer(keys, dtype=numpy.uint32), *rest)


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list | tuple) else value
