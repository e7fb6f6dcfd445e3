"""Engine: what differs between the wrappers of a model, and nothing else.

An engine knows no window. It postpones the reduction of gradients, runs the backward that reduces, and
clears; a window tells it when.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal

from torch import Tensor, nn

from ..shares import Plan
from ..update import Waitable

Sync = Literal["last", "every", "replicas", "gathered"]


class Engine(ABC):
    """Abstract: one final class per kind of wrapper."""

    policies: tuple[Sync, ...] = ("last", "every")

    divisor: int = 1  # what the reduction divides by
    num_ranks: int = 1  # of the data-parallel group
    rank: int = 0  # in it

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self.models = tuple(models)

    @abstractmethod
    def gather(self, row: list[float]) -> list[list[float]]:
        """The rows of all ranks, in their order; through the host, never through the device's queue."""

    @abstractmethod
    def sum_over_ranks(self, values: Tensor) -> Waitable | None:
        """Starts to sum `values` in place over the ranks."""

    @abstractmethod
    def check(self, plan: Plan) -> None:
        """Raises, on all ranks, what this plan cannot be on this engine."""

    @abstractmethod
    def begin(self, plan: Plan, parameters: Sequence[nn.Parameter]) -> None:
        """Postpones reductions from here on."""

    @abstractmethod
    def backward(self, losses: Sequence[Tensor], seeds: Sequence[Tensor], reduce: bool) -> None:
        """One backward from `losses`, weighted by `seeds`; reduces what has added up if `reduce`."""

    @abstractmethod
    def finish(self) -> None:
        """After the last backward: reduces what is left, so that gradients are final."""

    @abstractmethod
    def release(self) -> None:
        """Puts the wrappers back as `begin` found them, whatever happened since. Twice is no harm."""

    @abstractmethod
    def clear(self, parameters: Sequence[nn.Parameter]) -> None:
        """No gradient remains, nor anything that would count as one."""

    def stale(self, parameters: Sequence[nn.Parameter], *, in_window: bool = False) -> bool:
        """Whether gradients stand that `clear` did not leave; `in_window`: that no backward of it made."""
        return any(parameter.grad is not None for parameter in parameters)
