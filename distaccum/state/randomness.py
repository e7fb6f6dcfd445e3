"""Random numbers: the states of all generators as a window begins, which a checkpoint keeps and a job puts back."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from typing import Any, final

import torch
from torch import nn

from ..extension import Extension
from ..job import Job, Start
from ..window import Window

# The modules with `get_rng_state(device)` and `set_rng_state(state, device)` of devices for which torch has none.
MODULES = {"xla": "torch_xla.core.xla_model"}
Numbers = dict[str, Any]


@final
class RandomNumbers(Extension):
    """This rank's generators: their states as a window begins, and those that a checkpoint puts back.

    Attributes:
        due: The states from a checkpoint, until they are put back.
    """

    def join(self, job: Job) -> None:
        # It does not hold the job, which holds it: the models of a dropped accumulator are freed at once.
        job.random = self
        self._models, self._once = job.models, job.once
        self._devices: list[torch.device] | None = None
        self.due: Numbers | None = None

    def begin(self, window: Window) -> None:
        """Keeps the numbers before the first forward; the window's data are drawn, which may have drawn some too."""
        if window.is_empty:
            return
        self.put_back()
        # They are looked up once: a large model has thousands of tensors.
        if self._devices is None:
            self._devices = random_devices(self._models)
        window.start.random = random_state(self._devices)

    def now(self, start: Start | None) -> Numbers:
        """The random numbers of the window that began at `start`, or that one would have if it began now."""
        begun = start and start.random
        numbers: Numbers = plain(begun or self.due or random_state(random_devices(self._models)))
        return numbers

    def put_back(self) -> None:
        """Sets the random numbers of a loaded state, once."""
        if (due := self.due) is None:
            return
        self.due = None
        devices = list(map(str, random_devices(self._models)))
        saved = due["devices"]
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
    devices = dict.fromkeys(t.device for model in models for t in (*model.parameters(), *model.buffers()))
    return [device for device in devices if hasattr(_module_of(device), "get_rng_state")]


def _module_of(device: torch.device) -> Any:
    return sys.modules.get(MODULES.get(device.type, f"torch.{device.type}"))


def random_state(devices: Sequence[torch.device]) -> Numbers:
    """The states of torch's generators on the host and these devices, of `random`, and of numpy's if it has drawn.

    Asking takes 1 microsecond for torch, 8 for `random`, and 36 for numpy, whose module of random numbers is imported
    when it is first used.
    """
    state = {"torch": torch.get_rng_state(), "python": random.getstate()}
    state["devices"] = {str(device): _module_of(device).get_rng_state(device) for device in devices}
    if (of_numpy := sys.modules.get("numpy.random")) is not None:
        state["numpy"] = of_numpy.get_state(legacy=False)
    return state


def plain(state: Any) -> Any:
    """A state with lists in place of numpy's arrays, which a checkpoint cannot hold."""
    if isinstance(state, dict):
        return {name: plain(value) for name, value in state.items()}
    return state.tolist() if type(state).__module__ == "numpy" else state


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
