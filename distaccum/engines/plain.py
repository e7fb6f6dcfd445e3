"""A module in a single process: there is nothing to postpone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

from torch import Tensor, nn

from ..shares import Plan
from .base import Engine, gradients_of, put_gradients


@final
class PlainEngine(Engine):
    name = "a plain module"
    can_be_cast = True
    shows_partial = True

    def gather(self, row: list[float]) -> list[list[float]]:
        return [row]

    def sum_over_ranks(self, values: Tensor) -> None:
        return None

    def check(self, plan: Plan) -> None:
        pass

    def begin(self, plan: Plan, parameters: Sequence[nn.Parameter]) -> None:
        pass

    def backward(self, losses: Sequence[Tensor], seeds: Sequence[Tensor], reduce: bool) -> None:
        self.run_backward(losses, seeds)

    def finish(self) -> None:
        pass

    def release(self) -> None:
        pass

    def partial(self, parameters: Sequence[nn.Parameter]) -> dict[str, Any]:
        return {"gradients": gradients_of(parameters)}

    def put_partial(self, parameters: Sequence[nn.Parameter], partial: dict[str, Any]) -> None:
        put_gradients(parameters, partial["gradients"])

    def clear(self, parameters: Sequence[nn.Parameter]) -> None:
        for parameter in parameters:
            parameter.grad = None
