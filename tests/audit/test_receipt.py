"""Receipt: an update's gradient is the sum of its micro-batches, or it raises."""

from __future__ import annotations

import os
import random
import re
import sys
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleZBVZeroBubble
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from distaccum import Accumulator, DistaccumError, count_tokens
from distaccum.auditing import Receipt
from tests.support.engines import TORCH, import_deepspeed, zero_config
from tests.support.ranks import mesh_of, on_ranks


def net():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))


def wrapped(kind):
    model = net()
    if kind == "ddp":
        return DistributedDataParallel(model)
    if kind == "plain":
        return model
    options = {"shard_placement_fn": lambda parameter: Shard(parameter.ndim - 1)} if kind == "columns" else {}
    if kind == "hybrid":
        shape = (2, dist.get_world_size() // 2)
        options = {"mesh": mesh_of(shape, "replicate", "shard")}
    fully_shard(model[0], reshard_after_forward=False, **options)
    return fully_shard(model, **options)


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


def random_net(kind, dtype, draw):
    width, out = draw.choice([3, 8, 33, 64]), draw.choice([2, 7, 16])
    norm = nn.LayerNorm(width) if draw.random() < 0.5 else nn.Identity()
    model = nn.Sequential(nn.Embedding(20, width), norm, nn.Linear(width, width), nn.Tanh(), nn.Linear(width, out))
    with torch.no_grad():
        scale = 10 ** draw.uniform(-3, 2)
        for parameter in model.parameters():
            parameter.mul_(scale)
    if kind != "fsdp2":
        model = model.to(dtype)
        return model if kind == "plain" else DistributedDataParallel(model)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=draw.choice([dtype, torch.float32]))
    fully_shard(model[2], mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


@pytest.mark.parametrize("num", [int(os.environ.get("RECEIPTS", "40"))])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kind", "world"), [("plain", 1), ("ddp", 2), ("fsdp2", 2)])
@on_ranks()
def test_random_right_windows_pass(kind, world, dtype, num):
    """Shapes, scales, lengths, sizes and shares of ranks are drawn anew for every 20 windows."""
    warnings.filterwarnings("ignore", "gradients of .* add up in half precision")  # as they shall here
    for seed in range(num // 20):
        draw, own = random.Random(seed), random.Random(100 * seed + dist.get_rank())
        torch.manual_seed(seed)
        model = random_net(kind, dtype, draw)
        sgd = torch.optim.SGD(model.parameters(), lr=1e-4)
        accumulator = Accumulator(model, sgd, max_norm=1.0, extensions=[Receipt(every=1)])
        for _ in range(20):
            window = accumulator.window(
                [torch.randint(0, 20, (own.randint(1, 9), 5)) for _ in range(own.randint(1, 6))]
            )
            for rows in window:
                outputs = model(rows).float().mean(1)
                window.backward(cross_entropy(outputs, rows[:, 0] % outputs.shape[1]))
            assert window.step().notes["receipt"] < (2e-5 if dtype == torch.float32 else 0.05)


@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "columns", "hybrid"])
@on_ranks(2)
def test_right_updates_pass(kind):
    assert max(train(wrapped(kind))) < 1e-5
    if kind == "fsdp2":
        assert max(train(wrapped(kind), sync="every")) < 1e-5


# Where the gradient of a whole parameter, or what is stepped, cannot be seen.
HIDDEN = {
    "fsdp1": "FSDP1 .* which flattens parameters together",
    "tensor parallel": "FSDP2 .* which holds tensor-parallel parameters",
    "experts": "FSDP2 .* which holds tensor-parallel parameters",
    "zero bubble": ".* whose schedule runs backward for weights apart",
    "zero": "DeepSpeed",
}
if TORCH < (2, 13):
    del HIDDEN["zero bubble"]  # stages of torch 2.9 greet in another dtype: gloo aborts


def hidden(kind):
    if kind == "fsdp1":
        return FullyShardedDataParallel(net(), device_id=torch.device("cpu"), use_orig_params=True)
    if kind == "tensor parallel":
        mesh = mesh_of((1, 2), "data", "tensor")
        model = parallelize_module(net(), mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        return fully_shard(model, mesh=mesh["data"])
    if kind == "experts":
        model, mesh = net(), mesh_of((2,))
        model.experts = nn.Parameter(distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)]))
        return fully_shard(model, mesh=mesh, ignored_params={model.experts})
    if kind == "zero":
        model = net()
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        return import_deepspeed().initialize(model=model, optimizer=sgd, config=zero_config(1))[0]
    places = [dist.get_rank(), 3 - dist.get_rank()]
    stages = [PipelineStage(nn.Linear(6, 6), place, 4, torch.device("cpu")) for place in places]
    return ScheduleZBVZeroBubble(stages, 2, loss_fn=cross_entropy, scale_grads=False)


@pytest.mark.parametrize("kind", list(HIDDEN))
@on_ranks(2)
def test_engine_that_hides_gradients_is_refused(kind):
    with pytest.raises(ValueError, match=rf"^Receipt\(\) with {HIDDEN[kind]}.* cannot be seen"):
        Accumulator(hidden(kind), steps=3, on_nonfinite="ignore", extensions=[Receipt()])


def num_calls(extensions, steps):
    """Calls of Python and C in the fourth window."""
    model = net()
    accumulator = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), extensions=extensions)
    for _ in range(4):
        seen: list[str] = []
        sys.setprofile(lambda _, event, __, seen=seen: seen.append(event))
        window = accumulator.window([torch.ones(2, 6)] * steps)
        for x in window:
            window.backward(model(x).sum())
        window.step()
        sys.setprofile(None)
    return sum(event.endswith("call") for event in seen)


def test_windows_that_are_not_checked_cost_a_few_calls_whatever_their_length():
    num_calls([Receipt(every=1)], 2)  # which fills caches
    assert num_calls([Receipt(every=4)], 20) - num_calls([], 20) < 10
    assert num_calls([Receipt(every=1)], 20) - num_calls([], 20) > 1000


def test_sparse_gradient_is_seen():
    table = nn.Embedding(50, 6, sparse=True)
    model = nn.Sequential(table, nn.Linear(6, 4))
    hooked = []

    def plant(gradient):
        hooked.append(gradient)
        return gradient * 2 if len(hooked) == 5 else None

    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    accumulator = Accumulator(model, sgd, steps=3, extensions=[Receipt(every=1)])

    def go():
        window = accumulator.window([torch.randint(50, (4,)) for _ in range(3)])
        for rows in window:
            loss = cross_entropy(model(rows), rows % 4)
            hook = table.weight.register_hook(plant)
            window.backward(loss)
            hook.remove()
        return window.step()

    assert go().notes["receipt"] < 1e-5
    with pytest.raises(DistaccumError, match=r"gradient of 0\.weight in .* micro-batch 1 of rank 0 counts twice"):
        go()


def test_gradient_that_no_backward_gave_raises():
    model = net()
    model.unused = nn.Parameter(torch.zeros(3))
    model.forward = lambda x: model[2](model[1](model[0](x)))
    model[0].weight.register_post_accumulate_grad_hook(lambda _: setattr(model.unused, "grad", torch.ones(3)))
    with pytest.raises(DistaccumError, match="the gradient of unused in update 0 is not the sum"):
        train(model)


# Planted defects: a hook that changes, after the receipt was taken, what a backward gives.


class Plant(NamedTuple):
    change: Callable[[Tensor, Tensor], Tensor]  # of a gradient, and the one of the update before
    says: str
    ranks: tuple[int, ...] = (0, 1, 2, 3)  # by samples
    steps: tuple[int, ...] = (0, 1, 2)
    parameters: tuple[int, ...] = (0, 1, 2, 3)


PLANTS = {
    "lost": Plant(lambda g, _: 0 * g, "micro-batch 1 of rank 1 is lost", (1,), (1,)),
    "lost in one bucket": Plant(lambda g, _: 0 * g, "micro-batch 2 of rank 0 is lost", (0,), (2,), (1,)),
    "two are lost": Plant(lambda g, _: 0 * g, "micro-batch 0 of rank 1 is lost, micro-batch 2 of rank 1", (1,), (0, 2)),
    "doubled": Plant(lambda g, _: 2 * g, "micro-batch 0 of rank 0 counts twice", (0,), (0,)),
    "one divisor": Plant(lambda g, _: g / 3, "micro-batch 2 of rank 1 counts 0.333 times", (1,), (2,)),
    "a rank is lost": Plant(lambda g, _: 0 * g, "rank 1 is lost", (1,)),
    "a rank is doubled": Plant(lambda g, _: 2 * g, "rank 0 counts twice", (0,)),
    "divisor": Plant(lambda g, _: g / 2, "it is 0.5 times that"),
    "divisor in one bucket": Plant(lambda g, _: 2 * g, "it is 2 times that", parameters=(2, 3)),
    "stale": Plant(lambda g, before: g + before, "it still holds that of update 0", steps=(0,)),
    "a little more": Plant(lambda g, _: 1.01 * g, "micro-batch 0 of rank 1 counts 1.01 times", (1,), (0, 2)),
    "lower precision": Plant(lambda g, _: g.bfloat16().float(), "rounded as by sums"),
}


WORLDS = {"ddp": 2, "fsdp2": 2, "columns": 2, "context": 2, "hybrid": 4, "pipeline": 4, "sharded pipeline": 4}
if TORCH < (2, 15):
    del WORLDS["sharded pipeline"]  # is refused
if TORCH < (2, 13):
    del WORLDS["pipeline"]


@pytest.mark.parametrize("name", PLANTS)
@pytest.mark.parametrize(
    ("kind", "world"),
    [pytest.param(*one, marks=[pytest.mark.long] if one[1] == 4 else []) for one in WORLDS.items()],
)
@on_ranks()
def test_planted_defect_is_named_before_the_step(kind, world, name):
    """Three updates, the second with the defect: it raises, leaves the weights alone, and the third is right again."""
    plant = PLANTS[name]
    options: dict[str, Any] = {}
    if "pipeline" in kind:
        mesh = mesh_of((2, 2), "data", "stage")
        stage = mesh["stage"].get_local_rank()
        torch.manual_seed(stage)
        inner = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        if kind == "pipeline":
            model: nn.Module = DistributedDataParallel(inner, process_group=mesh["data"].get_group())
        else:
            model = fully_shard(inner, mesh=mesh["data"])
        made = PipelineStage(model, stage, 2, torch.device("cpu"), group=mesh["stage"].get_group())
        trained: Any = Schedule1F1B(made, 2, loss_fn=cross_entropy, scale_grads=False)
        rank, shown = mesh["data"].get_local_rank(), "rank (0|1)" if "rank 0" in plant.says else "rank (2|3)"
    else:
        trained = inner = model = wrapped(kind)
        rank, shown = dist.get_rank(), None
    if kind == "context":  # both ranks have parts of the same samples
        options = {"mesh": mesh_of((1, 2), "data", "context")["data"]}
        options["count"] = count_tokens(1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    accumulator = Accumulator(trained, sgd, steps=3, extensions=[Receipt(every=1)], **options)
    torch.manual_seed(rank)
    sums: list[Any] = [{}, {}, {}]

    def change(update, step, place, gradient):
        sums[update][place] = sums[update].get(place, 0) + gradient
        is_there = rank in plant.ranks and step in plant.steps and place in plant.parameters
        return plant.change(gradient, sums[0].get(place)) if update == 1 and is_there else None

    def go(update):
        window = accumulator.window([(torch.randn(4, 6), torch.randint(4, (4,))) for _ in range(3)])
        hooks: list[Any] = []

        def plant(*_):  # after a forward, on what it gathered
            for place, one in enumerate(() if hooks else inner.parameters()):
                hooks.append(one.register_hook(partial(change, update, window.micro_step, place)))

        planting = inner.register_forward_hook(plant)
        try:
            for x, y in window:
                window.run(x, target=y) if "pipeline" in kind else window.backward(cross_entropy(model(x), y))
                while hooks:
                    hooks.pop().remove()
        finally:
            planting.remove()
        return window.step()

    go(0)
    before = [one.detach().clone() for one in model.parameters()]
    says = plant.says if shown is None else re.sub(r"rank \d", shown, plant.says)
    with pytest.raises(DistaccumError, match=f"is not the sum .*{says}.*; nothing was stepped"):
        go(1)
    assert all(map(torch.equal, before, model.parameters()))
    assert go(2).notes["receipt"] < 1e-5
