"""Modules without a wrapper in a job whose ranks all compute on the same samples: tensor-parallel ones, or stages.

Nothing is reduced over data-parallel ranks, since there is one. DTensor sums over the parts by itself in forward and
backward; a gradient that it leaves as partial sums adds up so, and is summed once, after the last backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..law import Plan
from ..ranks import own_group
from .averaging import settle_placements
from .base import Sync
from .ranks import RanksEngine
from .shards import norm_over_shards, ranks_sharing, shards_of, why_tensor_parallel


@final
class UnwrappedEngine(RanksEngine):
    """Not found by `wraps`: it stands in for PlainEngine where all ranks of a job share their samples."""

    name = "modules without a wrapper"
    follows = True
    policies = ("last",)

    def __init__(self, models: Sequence[nn.Module], sync: Sync) -> None:
        assert dist.group.WORLD is not None
        alone = own_group(dist.group.WORLD, [dist.get_rank()], backend=None)
        parameters = [p for model in models for p in model.parameters()]
        super().__init__(models, sync, alone, ranks_sharing(parameters, alone))
        self._parameters: Sequence[nn.Parameter] = ()

    def check(self, plan: Plan) -> None:
        pass

    def begin(self, plan: Plan, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters

    def backward(self, losses: Sequence[Tensor], seeds: Sequence[Tensor], reduce: bool) -> None:
        self.run_backward(losses, seeds)

    def finish(self) -> None:
        for parameter in self._parameters:
            settle_placements(parameter)

    def release(self) -> None:
        self._parameters = ()

    def hides_own(self, parameters: Sequence[nn.Parameter]) -> str | None:
        return why_tensor_parallel(parameters)

    def norm(self, parameters: Sequence[nn.Parameter], kind: float = 2.0, over: Tensor | None = None) -> Tensor:
        device = next((p.device for p in parameters), torch.device("cpu"))
        return norm_over_shards(shards_of(parameters), device, kind, over)
