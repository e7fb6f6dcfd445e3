"""Inspection: after which micro-batch the gradient was not finite any more."""

from __future__ import annotations

import math
from typing import final

import torch
from torch import Tensor

from ..engines import Engine
from ..gradients.norms import total_norm
from ..window.observer import Observer
from ..window.status import Status


@final
class Inspection(Observer):
    """Looks at the gradient after each micro-batch, in windows whose backwards do not reduce."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._seen: list[tuple[int, Tensor]] = []  # the number of a micro-batch, the largest gradient after it

    def begin(self, at: Status) -> None:
        self._seen = []

    def after_micro_batch(self, at: Status) -> None:
        if not at.source.is_stand_in:
            gradients = [one.grad for one in self._engine.holders(at.parameters) if one.grad is not None]
            self._seen.append((at.source.numbers[at.source.place], total_norm(gradients, float("inf"))))

    def first_nonfinite(self) -> int:
        """The number of that micro-batch; -1: none."""
        if not self._seen:
            return -1
        device = self._seen[0][1].device
        read = torch.stack([value.to(device, torch.float32) for _, value in self._seen]).tolist()
        return next((n for (n, _), value in zip(self._seen, read, strict=True) if not math.isfinite(value)), -1)
