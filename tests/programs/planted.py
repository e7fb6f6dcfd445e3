"""Defects that are planted in gradients, one at a time: is each found, and named?

    nice python -m tests.programs.planted                  # windows under Receipt, and loops by hand under audit()
    nice python -m tests.programs.planted --only by-hand   # of the two, the one whose name contains this

A hook changes what a backward gives in one of three or four updates, after the receipt of it was taken. The table says
"named" where the report has the parameter or rank and the right word, and else what it says.
"""

from __future__ import annotations

import argparse
import itertools
import re
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy

from distaccum import Accumulator, audit
from distaccum.extensions import Receipt
from tests.extensions.test_receipt import HIDDEN, PLANTS, WORLDS, Plant, hidden, is_found, wrapped
from tests.support.ranks import Ranks
from tests.support.windows import refused

BY_HAND = {"ddp": 2, "fsdp2": 2, "columns": 2, "hybrid": 4}
# What audit() says of a loop; of a factor that all parameters have it says which update weighs what.
SAYS = {
    "lost": "lost",
    "doubled": "count differently",
    "divisor": "weigh|times|count differently",
    "precision": "rounded",
    "stale": "still holds",
}


def in_window(kind: str, name: str) -> str:
    try:
        is_found(kind, PLANTS[name])
    except BaseException as error:  # pytest's failures are none of Exception
        return f"NOT NAMED: {error}"
    return "named"


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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="")
    only = parser.parse_args().only
    for where, run, kinds in (("window", in_window, WORLDS), ("by-hand", by_hand, BY_HAND)):
        if only not in where:
            continue
        told: list[str] = []
        for kind, world in kinds.items():
            ranks = Ranks(world)
            for name in PLANTS:
                told += ranks.run(run, kind, name, seconds=300)[:1]
                print(f"{where}, {kind}, {name}: {told[-1]}", flush=True)
            ranks.stop()
        print(f"{where}: {told.count('named')} of {len(told)} found and named", flush=True)
    ranks = Ranks(2)
    for kind in HIDDEN if only in "window" else ():
        print(f"window, {kind}: {ranks.run(is_refused, kind, seconds=300)[0]}", flush=True)
    ranks.stop()


def is_refused(kind: str) -> str:
    return f"refused, {refused(Accumulator, hidden(kind), on_nonfinite='ignore', extensions=[Receipt()])}"


if __name__ == "__main__":
    main()
