"""Defects that are planted in the gradients of loops by hand, one at a time: does audit() find and name each?

    nice python -m tests.programs.planted

A hook changes what a backward gives in one of four updates, after the audit saw it. Prints "named" where the report
has the parameter or rank and the right word, and else what it says. The tests plant the same defects in windows.
"""

from __future__ import annotations

import itertools
import re
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy

from distaccum import audit
from tests.audit.test_receipt import PLANTS, Plant, wrapped
from tests.support.ranks import Ranks

BY_HAND = {"ddp": 2, "fsdp2": 2, "columns": 2, "hybrid": 4}
# What audit() says of a loop; of a factor that all parameters have it says which update weighs what.
SAYS = {
    "lost": "lost",
    "doubled": "count differently",
    "divisor": "weigh|times|count differently",
    "precision": "rounded",
    "stale": "still holds",
}


def by_hand(kind: str, name: str) -> str:
    plant, rank = PLANTS[name], dist.get_rank()
    model: Any = wrapped(kind)
    torch.manual_seed(rank)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    before: dict[int, Tensor] = {}
    hooks: list[Any] = []
    at = 0, 0  # update and micro-batch

    def change(plant: Plant, place: int, gradient: Tensor) -> Tensor | None:
        if at[0] == 1:
            before[place] = before.get(place, 0) + gradient
        is_there = rank in plant.ranks and at[1] in plant.steps and place in plant.parameters
        return plant.change(gradient, before[place]) if at[0] == 2 and is_there else None

    with audit(model) as report:
        for at in itertools.product(range(4), range(3)):
            step = at[1]
            x, y = torch.randn(4, 6), torch.randint(4, (4,))
            if kind != "ddp":
                model.set_requires_gradient_sync(step == 2)
            with model.no_sync() if kind == "ddp" and step < 2 else nullcontext():
                loss = cross_entropy(model(x), y) / 3
                leaves = list(enumerate(model.parameters()))  # gathered
                loss.backward()
            if not hooks:  # after the audit's own, which the first backward registers
                hooks = [leaf.register_hook(partial(change, plant, place)) for place, leaf in leaves]
            if step == 2:
                sgd.step()
                sgd.zero_grad()
    said = [one.text for one in report.findings] + report.notes
    (word,) = (
        word for what, word in SAYS.items() if what in name or (what == "lost" and "is lost" in PLANTS[name].says)
    )
    return "named" if any(re.search(word, one) for one in said) else f"NOT NAMED: {said}"


def main() -> None:
    told: list[str] = []
    for kind, world in BY_HAND.items():
        ranks = Ranks(world)
        for name in PLANTS:
            told += ranks.run(by_hand, kind, name, seconds=300)[:1]
            print(f"{kind}, {name}: {told[-1]}", flush=True)
        ranks.stop()
    print(f"{told.count('named')} of {len(told)} found and named")


if __name__ == "__main__":
    main()
