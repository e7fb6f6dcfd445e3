"""Random numbers of this rank when a window begins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch
from torch import nn

from .law import Once
from .snapshot import random_devices, random_state, set_random_state


@final
class RandomNumbers:
    """This rank's random numbers when a window begins: kept for a state, and put back from one."""

    def __init__(self, models: Sequence[nn.Module], once: Once) -> None:
        self._models, self._once = models, once
        self.loaded: dict[str, Any] | None = None  # of a state, until a window begins
        self.at_start: dict[str, Any] = {}  # of the last window
        self._devices: list[torch.device] | None = None

    def begin(self) -> None:
        """A window begins, before its first forward: its data are drawn, which may have drawn numbers too."""
        self.put_back()
        if self._devices is None:  # looked up once: a large model has thousands of tensors
            self._devices = random_devices(self._models)
        self.at_start = random_state(self._devices, self.at_start)

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
