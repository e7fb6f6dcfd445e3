"""Late weights in a loop of one's own, with gradients of several kinds, on real ranks."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from distaccum import count_tokens
from distaccum.trainers.late import LateWindow
from tests.grids.test_models import ids
from tests.support.problems import join, make_batch, token_loss
from tests.support.ranks import on_ranks
from tests.support.windows import error, gradient

COUNT = count_tokens("labels")
KEPT = [[0.5, 0, 0.8], [0.3, 0.6, 0]]  # labels of each micro-batch of each rank; none in rank 1's last, which reduces


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(12, 6, sparse=True), nn.Linear(6, 4)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embedding(ids({"x": x}))))


summed = partial(token_loss, how="sum")


def mean(model: Any, batch: Any) -> Tensor:
    """Has a gradient of NaN where nothing counts: 0 / 0."""
    return summed(model, batch) / COUNT(batch)


@pytest.mark.parametrize("world", [1, 2])
@on_ranks()
def test_late_weights_give_the_gradient_of_the_big_batch_where_something_counts_and_none_elsewhere(world):
    rank = dist.get_rank() if world > 1 else 0
    for wrap in (DistributedDataParallel, fully_shard) if world > 1 else (lambda net: net,):
        for reduction, loss_of in {"mean": mean, "sum": summed, "sum_to_mean": summed}.items():
            net = Net()
            net.embedding.sparse = wrap is not fully_shard
            model, late = wrap(net), LateWindow(reduction, COUNT)
            whole = join([make_batch(2, seed=10 * r + i, kept=n) for r in range(world) for i, n in enumerate(KEPT[r])])
            exact = Net()
            expected = (summed if reduction == "sum" else mean)(exact, whole)
            expected.backward()
            for kept in (KEPT[rank], [0, 0, 0]):
                for i, number in enumerate(kept):
                    batch = make_batch(2, seed=10 * rank + i, kept=number)
                    late.begin_micro_batch()
                    late.weigh(loss_of(model, batch), [COUNT(batch)]).backward()
                loss, counts = late.divide(model.parameters()), any(kept)
                update = late.record(3, None, stepped=True)
                assert update.counts == {"tokens": int(COUNT(whole)) if counts else 0}
                if counts:
                    assert error(gradient(net), gradient(exact)) <= 1e-12, (wrap, reduction)
                    assert update.loss == pytest.approx(float(expected.detach()), rel=1e-12)
                    model.zero_grad()
            assert loss is None and all(parameter.grad is None for parameter in net.parameters())
            assert (update.stepped, update.reason) == (False, "no tokens in any micro-batch of any rank")
