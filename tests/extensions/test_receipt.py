"""Receipt: an update's gradient is the sum of its micro-batches, or it raises."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from distaccum import Accumulator, DistaccumError
from distaccum.extensions import Receipt
from tests.support.ranks import on_ranks


def net():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))


def wrapped(kind):
    model = net()
    if kind == "ddp":
        return DistributedDataParallel(model)
    if kind == "hybrid":
        mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("replicate", "shard"))
        fully_shard(model[0], mesh=mesh)
        return fully_shard(model, mesh=mesh)
    return fully_shard(model) if kind == "fsdp2" else model


def train(model, updates=3, **options):
    rank = dist.get_rank() if dist.is_initialized() else 0
    torch.manual_seed(rank)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    accumulator = Accumulator(model, sgd, steps=3, extensions=[Receipt(every=1)], **options)
    found = []
    for window in accumulator.windows([(torch.randn(2 + i % 2, 6), i) for i in range(3 * updates + rank)]):
        for x, _ in window:
            window.backward(cross_entropy(model(x), torch.arange(len(x)) + 1))
        found.append(window.step().notes["receipt"])
    return found


def test_right_updates_pass_on_a_plain_module():
    assert max(train(net(), updates=20)) < 1e-5


@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "hybrid"])
@on_ranks(2)
def test_right_updates_pass(kind):
    assert max(train(wrapped(kind))) < 1e-5
    if kind == "fsdp2":
        assert max(train(wrapped(kind), sync="every")) < 1e-5


@on_ranks(2)
def test_gradient_that_ddp_does_not_reduce_raises_on_all_ranks():
    model = wrapped("ddp")
    model.register_comm_hook(None, lose_the_other_ranks)
    with pytest.raises(DistaccumError, match=r"0\.weight.* is not the sum of what its micro-batches gave"):
        train(model)


def lose_the_other_ranks(_, bucket):  # torch refuses annotations that are texts
    done = torch.futures.Future()
    done.set_result(bucket.buffer() * (dist.get_rank() == 0))
    return done


@on_ranks(2)
def test_engine_that_hides_gradients_is_refused():
    model = FullyShardedDataParallel(net(), device_id=torch.device("cpu"), use_orig_params=True)
    with pytest.raises(ValueError, match="cannot be seen"):
        train(model)


@on_ranks(2)
def test_shards_that_are_not_rows_are_refused():
    model = net()
    fully_shard(model, shard_placement_fn=lambda parameter: Shard(parameter.ndim - 1))
    with pytest.raises(ValueError, match=r"not cut by rows alone: .* cannot be seen"):
        train(model)


def test_gradient_that_no_backward_gave_raises():
    model = net()
    model.unused = nn.Parameter(torch.zeros(3))
    model.forward = lambda x: model[2](model[1](model[0](x)))
    model[0].weight.register_post_accumulate_grad_hook(lambda _: setattr(model.unused, "grad", torch.ones(3)))
    with pytest.raises(DistaccumError, match="the gradient of unused in update 0 is not the sum"):
        train(model)
