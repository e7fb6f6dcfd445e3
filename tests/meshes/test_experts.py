"""Experts over data-parallel ranks, on a mesh of their own or left out of fully_shard, against one big batch.

Ranks send tokens to the experts of all ranks, whose gradients hold all samples before anything is reduced.
"""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from distaccum import Accumulator, count_samples, count_tokens
from tests.support.collectives import Sum, gathered
from tests.support.oracle import everything, own, step_off
from tests.support.problems import IGNORED, seeded
from tests.support.ranks import mesh_of, on_ranks
from tests.support.windows import refused

EXPERTS = 4
# Sizes of micro-batches by data rank: even, uneven, two dry ranks.
WINDOWS = [[[2, 2], [2, 2], [1, 3], [2, 1]], [[3, 1], [2], [1, 2, 1], [4]], [[], [3, 1], [2], []]]


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, 8, 8) / 3)
        self.group: Any = None  # over which they are cut

    def forward(self, tokens: Tensor, gates: Tensor) -> Tensor:
        weight = self.weight
        if self.group is None:
            return torch.einsum("te,eij,tj->ti", gates, weight, tokens)
        here, sizes = dist.get_rank(self.group), [0] * dist.get_world_size(self.group)
        dist.all_gather_object(sizes, len(tokens), group=self.group)
        weight = weight.to_local() if hasattr(weight, "to_local") else weight
        every, gates = gathered(tokens, sizes, self.group), gathered(gates, sizes, self.group)
        gates = gates[:, here * len(weight) : (here + 1) * len(weight)]
        return Sum.apply(torch.einsum("te,eij,tj->ti", gates, weight, every), self.group).split(sizes)[here]


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.router, self.leave = nn.Linear(5, 8), nn.Linear(8, EXPERTS), nn.Linear(8, 4)
        self.experts = Experts()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        tokens = torch.tanh(self.enter(x)).flatten(0, 1)
        gates = torch.softmax(self.router(tokens), dim=-1)
        gates = gates * (gates >= gates.topk(2, dim=-1).values[:, 1:])  # the best two
        return self.leave(tokens + self.experts(tokens, gates)), gates.square().sum(-1).unflatten(0, x.shape[:2])


make_mixture = partial(seeded, Mixture)


def on_a_mesh(how: str) -> Mixture:
    net, ranks = make_mixture(), dist.get_world_size()
    num = ranks if how in ("ignored, over all", "beside sharded layers") else 2
    mesh = mesh_of((ranks // num, num), "copies", "experts")
    cut = distribute_tensor(net.experts.weight.detach(), mesh["experts"], [Shard(0)])
    net.experts.weight, net.experts.group = nn.Parameter(cut), mesh["experts"].get_group()
    every = mesh_of((ranks,))
    if how.startswith("ignored"):
        fully_shard(net, mesh=every, ignored_params={net.experts.weight})
        return net
    if how == "beside sharded layers":  # the root is no FSDPModule
        for layer in (net.enter, net.router, net.leave):
            fully_shard(layer, mesh=every)
        return net
    if how == "on a mesh of one shard":  # torchtitan's dp_replicate, with as many experts as shards
        mesh = mesh_of((ranks // num, 1, num), "replicate", "copies", "experts")
        cut = distribute_tensor(net.experts.weight.detach().full_tensor(), mesh["experts"], [Shard(0)])
        net.experts.weight = nn.Parameter(cut)
        fully_shard(net.experts, mesh=mesh["replicate", "copies"])
        net.experts.set_gradient_divide_factor(ranks)  # by which torch divides twice here, in float64
        every = mesh_of((ranks // num, num), "replicate", "shard")
    else:
        along = (lambda parameter: Shard(1)) if how == "along another dimension" else None
        fully_shard(net.experts, mesh=mesh["copies"], shard_placement_fn=along)
    fully_shard(net, mesh=every)
    return net


HOW = [
    "along another dimension",
    "along the same dimension",
    "on a mesh of one shard",
    "ignored, over some",
    "ignored, over all",
    "beside sharded layers",
]


def losses(net: nn.Module, batch: Any, router: bool) -> dict[str, Tensor]:
    logits, usage = net(batch["x"])
    found = {"tokens": cross_entropy(logits, batch["labels"].flatten(), ignore_index=IGNORED)}
    return {**found, "samples": 0.1 * usage.mean()} if router else found


def errors_with_experts(how: str, sync: str, router: bool) -> list[float]:
    """The errors of some windows' steps."""
    found: list[float] = []
    net = on_a_mesh(how)
    counts = {"tokens": count_tokens("labels"), **({"samples": count_samples} if router else {})}
    accumulator = Accumulator(net, SGD(net.parameters(), lr=1.0), sync=sync, count=counts, max_norm=1e9)
    for index, layout in enumerate(WINDOWS):
        window, everyone = accumulator.window(own(layout, index)), everything(layout, index)
        found += step_off(net, window, make_mixture(), everyone, partial(losses, router=router))
    return found


RUNS = [
    *((how, "last", False) for how in HOW),
    *((how, "every", False) for how in (HOW[0], HOW[3], HOW[5])),
    ("along another dimension", "last", True),
]


@pytest.mark.parametrize(("how", "sync", "router"), RUNS)
@on_ranks(4)
def test_law_holds_with_experts(how, sync, router):
    assert max(errors_with_experts(how, sync, router)) <= 1e-10


@on_ranks(4)
def test_experts_as_dtensors_are_refused_where_their_gradient_or_norm_is_unknown():
    net, ranks = make_mixture(), dist.get_world_size()
    mesh, experts = mesh_of((ranks // 2, 2), "copies", "experts"), net.experts
    whole, copied, no_slice = experts.weight.detach(), Experts(), Experts()
    experts.weight = nn.Parameter(distribute_tensor(whole, mesh["experts"], [Shard(0)]))
    copied.weight = nn.Parameter(distribute_tensor(whole, mesh["experts"], [Replicate()]))
    alone = DeviceMesh.from_group(mesh["experts"].get_group(), "cpu")
    no_slice.weight = nn.Parameter(distribute_tensor(whole, alone, [Shard(0)]))
    ddp, sharded = DistributedDataParallel(nn.Linear(5, 8)), fully_shard(nn.Linear(5, 8))
    flat = FullyShardedDataParallel(nn.Linear(5, 8), device_id=torch.device("cpu"))
    part = "weight is a DTensor or a part of one"
    for models, where, cure in (
        ([ddp, experts], part, "ignored_params"),
        ([DistributedDataParallel(net, init_sync=False)], f"experts.{part}", "ignored_params"),
        ([flat, experts], part, "use fully_shard"),
        ([sharded, no_slice], "does not tell which of the data-parallel ranks [0, 1, 2, 3] hold the same", "copies"),
        ([sharded, copied], "weight is a DTensor outside of FSDP2", "Place it as Shard over data-parallel ranks"),
    ):
        said = refused(Accumulator, models, SGD([p for one in models for p in one.parameters()], lr=1.0))
        assert where in said and cure in said


def test_gathered_parameters_are_refused_with_experts(ranks):
    for message in ranks(4).run(refused, errors_with_experts, "along another dimension", "gathered", False):
        assert "sync='gathered' with experts" in message and "use 'last' or 'every'" in message
