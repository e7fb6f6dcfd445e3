"""Signals: SIGTERM and Ctrl-C stop all ranks after the same update, and the clock of the first asks all to save."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from distaccum import Extension, Update, Window

from .job import Job

STOPS = (signal.SIGTERM, signal.SIGINT)


class Signals(Extension):
    """Handles signals; what each rank is asked for is summed with the losses of an update, in the same message.

    A launcher passes one Ctrl-C on a second time, so a second signal changes nothing.
    """

    key = "asked"

    def __init__(self, job: Job, tensor_mesh: Any = None) -> None:
        self._job, self._tensor_mesh = job, tensor_mesh  # of ranks that share samples, over which no loss is summed
        self._number = 0
        self.is_save_due: Callable[[], bool] = lambda: False  # by this rank's clock

    def __enter__(self) -> Signals:
        self._handlers = {number: signal.signal(number, self._note) for number in STOPS}
        self._job.wait_for_all()  # a rank that a signal killed before this would leave the others waiting
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _note(self, number: int, _: object) -> None:
        self._number = number

    def numbers(self, window: Window) -> Tensor:
        asked = [*(self._number == number for number in STOPS), self.is_save_due()]
        numbers = torch.cat([torch.full((1,), float(value), device=self._job.device) for value in asked])
        if self._tensor_mesh is not None:
            dist.all_reduce(numbers, group=self._tensor_mesh.get_group())
        return numbers

    def asked(self, update: Update) -> tuple[int, bool]:
        """The signal that stops all ranks after this update (0: none), and whether to save; the same on all."""
        # The step has waited for the device already, to see that the gradient is finite.
        summed = update.summed(self.key)
        *stops, saves = [0] * (len(STOPS) + 1) if summed is None else summed.tolist()
        number = next((number for number, ranks in zip(STOPS, stops, strict=True) if ranks), 0)
        return number, bool(saves or number)
