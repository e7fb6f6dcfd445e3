"""Forwards that communicate where the library cannot know it: an extension declares them."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from distaccum import Extension
from tests.support.oracle import gradients_off
from tests.support.problems import trunk
from tests.support.ranks import on_ranks
from tests.support.windows import accumulating


class Scaling(nn.Module):
    """Reduces the largest value over the ranks in each forward, as scaling of float8 does."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.num = inner, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        largest = x.detach().abs().max()
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        self.num += 1
        return self.inner(x)


class EachForwardWaits(Extension):
    def join(self, job):
        job.engine.lockstep = True


@on_ranks(2)
def test_declared_forwards_run_equally_often_on_uneven_ranks():
    model = Scaling(trunk())
    ddp, accumulator = accumulating(DistributedDataParallel(model), extensions=[EachForwardWaits()])
    for layout in ([[2, 1], [3, 2, 4]], [[1], [2, 2, 1]]):
        before = model.num
        assert max(gradients_off(ddp, accumulator, [layout], trunk)) <= 1e-12
        assert model.num - before == 3
