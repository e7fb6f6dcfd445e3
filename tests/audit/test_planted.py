"""Defects that are planted in the gradients of two ranks, one at a time: `audit()` names each."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from distaccum import audit
from tests.support.ranks import on_ranks
from tests.support.versions import needs

FSDP2 = needs("torch", "2.13", "FSDP2")


def wrapped(kind: str) -> Any:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    if kind == "ddp":
        return DistributedDataParallel(model)
    options = {"shard_placement_fn": lambda parameter: Shard(parameter.ndim - 1)} if kind == "columns" else {}
    fully_shard(model[0], reshard_after_forward=False, **options)
    return fully_shard(model, **options)


class Plant(NamedTuple):
    change: Callable[[Tensor, Tensor], Tensor]  # of a gradient, and the sum of those of the update before
    says: str
    ranks: tuple[int, ...] = (0, 1)  # by samples
    steps: tuple[int, ...] = (0, 1, 2)
    parameters: tuple[int, ...] = (0, 1, 2, 3)


PLANTS = {
    "nothing": Plant(lambda g, _: g, "^audit: right in 4 updates of 2 ranks"),
    "lost": Plant(lambda g, _: 0 * g, r"1 of 3 backwards are lost in update 2 on rank 1 .*1, 0, 1\)", (1,), (1,)),
    "lost in one bucket": Plant(lambda g, _: 0 * g, r"0\.bias: 1 of 3 backwards are lost", (0,), (2,), (1,)),
    "two are lost": Plant(lambda g, _: 0 * g, r"2 of 3 backwards are lost .*0, 1, 0\)", (1,), (0, 2)),
    "doubled": Plant(lambda g, _: 2 * g, "backwards count differently in update 2", (0,), (0,)),
    "one divisor": Plant(lambda g, _: g / 3, "backwards count differently in update 2", (1,), (2,)),
    "a rank is lost": Plant(lambda g, _: 0 * g, "3 of 3 backwards are lost in update 2 on rank 1", (1,)),
    "a divisor": Plant(lambda g, _: g / 2, "weigh 0.5 to 1 of the usual"),
    "a divisor in one bucket": Plant(lambda g, _: 2 * g, "2.weight, 2.bias", parameters=(2, 3)),
    "stale": Plant(lambda g, before: g + before, "still holds that of the update before", steps=(0,)),
    "lower precision": Plant(lambda g, _: g.bfloat16().float(), "^audit: right in 4 updates of 2 ranks"),
}


@pytest.mark.parametrize("name", PLANTS)
@pytest.mark.parametrize("kind", ["ddp", *(pytest.param(kind, marks=FSDP2) for kind in ("fsdp2", "columns"))])
@on_ranks(2)
def test_planted_defect_is_named(kind, name):
    """A hook changes what a backward gives in the third of four updates, after the audit saw it."""
    plant = PLANTS[name]
    rank = dist.get_rank()
    model = wrapped(kind)
    torch.manual_seed(rank)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    before: dict[int, Tensor] = {}
    hooks: list[Any] = []
    now = (0, 0)  # update and micro-batch

    def change(place: int, gradient: Tensor) -> Tensor | None:
        update, step = now
        if update == 1:
            before[place] = before.get(place, 0) + gradient
        is_there = rank in plant.ranks and step in plant.steps and place in plant.parameters
        return plant.change(gradient, before[place]) if update == 2 and is_there else None

    with audit(model) as report:
        for now in itertools.product(range(4), range(3)):
            is_last = now[1] == 2
            x, y = torch.randn(4, 6), torch.randint(4, (4,))
            if kind != "ddp":
                model.set_requires_gradient_sync(is_last)
            with nullcontext() if is_last or kind != "ddp" else model.no_sync():
                loss = cross_entropy(model(x), y) / 3
                leaves = list(model.parameters())  # gathered
                loss.backward()
            if not hooks:  # after the audit's own, which the first backward registers
                hooks = [leaf.register_hook(partial(change, place)) for place, leaf in enumerate(leaves)]
            if is_last:
                sgd.step()
                sgd.zero_grad()
    text = " ".join(str(report).split())
    assert rank or re.search(plant.says, text), text
