"""Modules without a wrapper: in a single process, or in a job whose ranks all compute on the same samples.

There is nothing to postpone. DTensor sums over the parts by itself in forward and backward; a gradient that it leaves
as partial sums adds up so, and is summed once, after the last backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import final

import torch.distributed as dist
from torch import nn

from ..law import Plan
from ..ranks import own_group
from .averaging import settle_placements
from .base import Engine, Sync
from .shards import shards_of, why_tensor_parallel


@final
class PlainEngine(Engine):
    name = "a plain module"
    follows = True
    can_be_cast = True
    shows_gradients = True

    hides_own = staticmethod(why_tensor_parallel)


@final
class UnwrappedEngine(Engine):
    """Stands in for PlainEngine where all ranks of a job share their samples: tensor-parallel modules, or stages."""

    name = "modules without a wrapper"
    follows = True
    policies = ("last",)

    def __init__(self, models: Sequence[nn.Module], sync: Sync) -> None:
        assert dist.group.WORLD is not None
        alone = own_group(dist.group.WORLD, [dist.get_rank()], backend=None)
        parameters = [p for model in models for p in model.parameters()]
        ranks_sharing = import_module("distaccum.meshes.sharing").ranks_sharing
        super().__init__(models, sync, alone, ranks_sharing(parameters, alone))
        self._parameters: Sequence[nn.Parameter] = ()

    def begin(self, plan: Plan, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters

    def finish(self) -> None:
        for parameter in self._parameters:
            settle_placements(parameter)

    def release(self) -> None:
        self._parameters = ()

    shards = staticmethod(shards_of)

    hides_own = staticmethod(why_tensor_parallel)
