"""Modules without a wrapper: of one process, or in a job whose ranks all compute on the same samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from torch import nn

from ..law import Plan
from ..meshes.sharing import peers_of
from ..ranks import Peers
from .averaging import settle_placements
from .base import Engine, Sync, why_tensor_parallel


@final
class UnwrappedEngine(Engine):
    """Modules without a wrapper in a job whose ranks all compute on the same samples: tensor-parallel ones, or stages.

    DTensor itself sums over the parts in forward and backward. A gradient that it leaves as partial sums accumulates as
    such, and is summed once, after the last backward.
    """

    name = "modules without a wrapper"
    owns = frozenset(("sums", "dtype"))
    policies = ("last",)

    def __init__(self, models: Sequence[nn.Module], sync: Sync) -> None:
        parameters = [p for model in models for p in model.parameters()]
        super().__init__(models, sync, peers_of(parameters, Peers()))
        self._parameters: Sequence[nn.Parameter] = ()

    def begin(self, plan: Plan, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters

    def finish(self) -> None:
        for parameter in self._parameters:
            settle_placements(parameter)
        self._parameters = ()

    why_no_local_grad = staticmethod(why_tensor_parallel)
