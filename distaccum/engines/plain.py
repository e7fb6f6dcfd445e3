"""A module in a single process: there is nothing to postpone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor, nn

from ..gradients.wide import Phase, Sums
from ..law import Plan
from .base import Engine
from .shards import why_tensor_parallel


@final
class PlainEngine(Engine):
    name = "a plain module"
    follows = True
    can_be_cast = True

    def accumulate_in(self, dtype: torch.dtype, parameters: Sequence[nn.Parameter]) -> None:
        self.sums = Sums(parameters, dtype)

    def check(self, plan: Plan) -> None:
        pass

    def begin(self, plan: Plan, parameters: Sequence[nn.Parameter]) -> None:
        if self.sums is not None:
            self.sums.watch(parameters)

    def backward(self, losses: Sequence[Tensor], seeds: Sequence[Tensor], reduce: bool) -> None:
        if self.sums is not None:
            self.sums.phase = Phase.ADD
        self.run_backward(losses, seeds)

    def finish(self) -> None:
        if self.sums is not None:
            self.sums.phase = Phase.OFF
            self.sums.round()

    def release(self) -> None:
        if self.sums is not None:
            self.sums.phase = Phase.OFF

    def hides_own(self, parameters: Sequence[nn.Parameter]) -> str | None:
        return why_tensor_parallel(parameters)
