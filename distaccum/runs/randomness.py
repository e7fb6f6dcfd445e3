"""Random number states of torch, Python and numpy, as they are when a window begins."""

from __future__ import annotations

import ctypes
import random
import sys
from array import array
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, final

import torch
from torch import nn

from ..law import Once

# The modules with `get_rng_state(device)` and `set_rng_state(state, device)` of devices for which torch has none.
MODULES = {"xla": "torch_xla.core.xla_model"}


@final
class RandomNumbers:
    """This rank's random number state when a window begins: kept for a checkpoint, and put back from one."""

    def __init__(self, models: Sequence[nn.Module], once: Once) -> None:
        self._models, self._once = models, once
        self.loaded: dict[str, Any] | None = None  # from a checkpoint, until a window begins
        self.is_between = True  # the loaded numbers are those before the next loader is opened
        self._is_put_back = False
        self._at_start: dict[str, Any] = {}  # of the last window
        self._devices: list[torch.device] | None = None

    def load(self, numbers: dict[str, Any] | None, *, is_between: bool) -> None:
        self.loaded, self.is_between, self._is_put_back = numbers, is_between, False

    def open(self) -> None:
        """Called before a loader is opened, which may draw numbers: those of a state between two loops come first."""
        if self.loaded is not None and self.is_between:
            self._set(self.loaded)
            self._is_put_back = True

    def begin(self) -> dict[str, Any]:
        """Called as a window begins, before its first forward; its data are drawn, which may have drawn numbers too."""
        self.put_back()
        if self._devices is None:  # looked up once: a large model has thousands of tensors
            self._devices = random_devices(self._models)
        self._at_start = random_state(self._devices, self._at_start)
        return self._at_start

    def put_back(self) -> None:
        """Sets the random numbers of a loaded state, once."""
        loaded, self.loaded = self.loaded, None
        if loaded is not None and not self._is_put_back:
            self._set(loaded)

    def _set(self, loaded: dict[str, Any]) -> None:
        devices, found = list(map(str, random_devices(self._models))), loaded["devices"]
        if [torch.device(name).type for name in devices] != [torch.device(name).type for name in found]:
            self._once(
                "devices",
                f"the state has the random numbers of {list(found) or 'no device'} and this model is on "
                f"{devices or 'none'}, so those of devices are left out",
            )
            devices = []
        set_random_state({**loaded, "devices": dict(zip(devices, found.values(), strict=False))})

    def now(self) -> dict[str, Any]:
        """The random numbers that a window would have if it began now."""
        if self.loaded is None or self._is_put_back:
            return random_state(random_devices(self._models))
        return self.loaded


def random_devices(models: Sequence[nn.Module]) -> list[torch.device]:
    """The devices of these models that have random number generators of their own."""
    tensors = (tensor for model in models for tensor in (*model.parameters(), *model.buffers()))
    devices = dict.fromkeys(tensor.device for tensor in tensors)
    return [device for device in devices if hasattr(_module_of(device), "get_rng_state")]


def _module_of(device: torch.device) -> Any:
    return sys.modules.get(MODULES.get(device.type, f"torch.{device.type}"))


def random_state(devices: Sequence[torch.device], known: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
    """The random state of torch on the host and these devices, of `random`, and of numpy if it is loaded.

    `known` is an earlier state, whose parts for Python and numpy are reused if they have not changed.
    """
    python = known.get("python")
    if python is None or not _python_is_at(*python):
        version, (*numbers, position), second = random.getstate()
        python = version, array("I", [position, *numbers]).tobytes(), second
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": python, "devices": {}}
    for device in devices:
        state["devices"][str(device)] = _module_of(device).get_rng_state(device)
    if (numpy := sys.modules.get("numpy")) is not None:
        found = known.get("numpy")
        if found is None or not _numpy_is_at(numpy, *found):
            kind, keys, *rest = numpy.random.get_state()
            found = (kind, keys.tobytes(), *rest)
        state["numpy"] = found
    return state


def _python_is_at(_: int, memory: bytes, second: float | None) -> bool:
    """Tells whether Python's state is still this one, without `getstate`, which takes as long as 10 of torch's.

    CPython's generator holds its position and its numbers behind an object's usual head (torch needs CPython, too). If
    it did not, the memory would differ from a state that `getstate` gave, and this would be False.
    """
    generator: Any = getattr(random.getstate, "__self__", None)
    if type(generator) is not random.Random or vars(generator)["gauss_next"] != second:
        return False
    return ctypes.string_at(id(generator) + object.__basicsize__, len(memory)) == memory


def _numpy_is_at(numpy: Any, kind: str, keys: bytes, position: int, has_normal: int, _: float) -> bool:
    """Tells whether numpy's state is still this one, without `get_state`, which takes as long as 40 of torch's.

    If numpy holds a second normal number ready (`has_normal`), drawing it leaves no trace in the compared memory.
    """
    generator: Any = getattr(numpy.random, "get_bit_generator", lambda: None)()  # from numpy 1.24 on
    if has_normal or type(generator).__name__ != kind or kind != "MT19937":
        return False
    expected = keys + position.to_bytes(4, sys.byteorder)
    return ctypes.string_at(generator.ctypes.state_address, len(expected)) == expected


def set_random_state(state: Mapping[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    version, memory, second = state["python"]
    position, *words = array("I", memory)
    random.setstate((version, (*words, position), second))
    for device, of_device in state["devices"].items():
        _module_of(torch.device(device)).set_rng_state(of_device, torch.device(device))
    if "numpy" in state and (numpy := sys.modules.get("numpy")) is not None:
        kind, keys, *rest = state["numpy"]
        numpy.random.set_state((kind, numpy.frombuffer(keys, dtype=numpy.uint32), *rest))


def check_random_state(state: Mapping[str, Any]) -> None:
    """Raises if `set_random_state` could not set this state."""
    before = random_state([])
    try:
        set_random_state({**state, "devices": {}})
    finally:
        set_random_state(before)


def set_seed(seed: int) -> None:
    """Seeds every generator that `random_state` reads."""
    torch.manual_seed(seed)
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed % 2**32)
