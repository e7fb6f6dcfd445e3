"""Random numbers: the states of all generators as a window begins, which a checkpoint keeps and a job puts back."""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import nn

from ..extension import Extension
from ..job import Job
from ..window import Window

# The modules with `get_rng_state(device)` and `set_rng_state(state, device)` of devices for which torch has none.
MODULES = {"xla": "torch_xla.core.xla_model"}
Numbers = dict[str, Any]


@final
class RandomNumbers(Extension):
    """This rank's generators: their states as a window begins, and those that a checkpoint puts back.

    Attributes:
        loaded: The states from a checkpoint, until a window begins.
        is_between: They are those before the next loader is opened.
    """

    def join(self, job: Job) -> None:
        # It does not hold the job, which holds it: the models of a dropped accumulator are freed at once.
        job.random, self._models, self._once = self, job.models, job.once
        self._devices: list[torch.device] | None = None
        self._numpy = NumpyState()
        self.resume(None, is_between=True)

    def resume(self, numbers: Numbers | None, *, is_between: bool) -> None:
        self.loaded = self._due = numbers
        self.is_between = is_between

    def open(self) -> None:
        """Called before a loader is opened, which may draw numbers: those of a state between two loops come first."""
        if self.is_between:
            self._set_due()

    def begin(self, window: Window) -> None:
        """Keeps the numbers before the first forward; the window's data are drawn, which may have drawn some too."""
        if window.plan.is_empty:
            return
        self.put_back()
        # They are looked up once: a large model has thousands of tensors.
        if self._devices is None:
            self._devices = random_devices(self._models)
        window.start.random = random_state(self._devices, self._numpy)

    def put_back(self) -> None:
        """Sets the random numbers of a loaded state, once."""
        self._set_due()
        self.loaded = None

    def now(self) -> Numbers:
        """The random numbers that a window would have if it began now."""
        return self._due or random_state(random_devices(self._models))

    def _set_due(self) -> None:
        due, self._due = self._due, None
        if due is None:
            return
        devices, saved = list(map(str, random_devices(self._models))), due["devices"]
        if [torch.device(name).type for name in devices] != [torch.device(name).type for name in saved]:
            self._once(
                "devices",
                f"the state has the random numbers of {list(saved) or 'no device'} and this model is on "
                f"{devices or 'none'}, so those of devices are left out",
            )
            devices = []
        set_random_state({**due, "devices": dict(zip(devices, saved.values(), strict=False))})


def random_devices(models: Sequence[nn.Module]) -> list[torch.device]:
    """The devices of these models that have random number generators of their own."""
    tensors = (tensor for model in models for tensor in (*model.parameters(), *model.buffers()))
    devices = dict.fromkeys(tensor.device for tensor in tensors)
    return [device for device in devices if hasattr(_module_of(device), "get_rng_state")]


def _module_of(device: torch.device) -> Any:
    return sys.modules.get(MODULES.get(device.type, f"torch.{device.type}"))


def numpy_state() -> Numbers:
    """The state of numpy's generator, in plain numbers, which a checkpoint can hold."""
    state = sys.modules["numpy.random"].get_state(legacy=False)
    words = {name: word.tolist() if hasattr(word, "tolist") else word for name, word in state["state"].items()}
    return {**state, "state": words}


@final
class NumpyState:
    """Calls `numpy_state`, which takes 50 microseconds, only where the generator's memory has moved.

    The memory is reached as numpy's documentation says, by its address.
    """

    def __init__(self) -> None:
        self._memory, self._state = b"", Numbers()

    def __call__(self) -> Numbers:
        # Before numpy 1.24 there is no get_bit_generator().
        generator: Any = getattr(sys.modules["numpy.random"], "get_bit_generator", object)()
        memory = b""
        # Of a second normal number that is ready (has_gauss) the memory, 624 words and a position, has no trace.
        if type(generator).__name__ == "MT19937" and not self._state.get("has_gauss", True):
            memory = ctypes.string_at(generator.ctypes.state_address, 4 * 625)
        if not memory or memory != self._memory:
            self._memory, self._state = memory, numpy_state()
        return self._state


def random_state(devices: Sequence[torch.device], of_numpy: Callable[[], Numbers] = numpy_state) -> Numbers:
    """The states of torch's generators on the host and these devices, of `random`, and of numpy if it was imported.

    Asking takes 1 microsecond for torch, and 8 for `random`.
    """
    state = {"torch": torch.get_rng_state(), "python": random.getstate()}
    state["devices"] = {str(device): _module_of(device).get_rng_state(device) for device in devices}
    if "numpy.random" in sys.modules:
        state["numpy"] = of_numpy()
    return state


def set_random_state(state: Numbers) -> None:
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    for device, of_device in state["devices"].items():
        _module_of(torch.device(device)).set_rng_state(of_device, torch.device(device))
    if "numpy" in state and (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.set_state(state["numpy"])


def set_seed(seed: int) -> None:
    """Seeds every generator that `random_state` reads."""
    torch.manual_seed(seed)
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed % 2**32)
