"""Random schedules of faults on real ranks: training ends with the bits and the samples of the run without faults.

The loop repeats a lost window with the same random numbers, as a careful user's would. FAULTS_SEED draws others.
"""

from __future__ import annotations

import os
import random
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from distaccum import Accumulator, DistaccumError
from tests.support.engines import fully_sharded
from tests.support.problems import make_batch, make_net_without_router
from tests.support.ranks import on_ranks

ENGINES = {"plain": 1, "DDP": 2, "DDP, views": 2, "FSDP2": 2, "FSDP2, gathered": 2}
UPDATES, STEPS = 4, 5
# Kind, micro-step ("edge": in step()) and phase; the backward of the last micro-step is the one that reduces.
CELLS = [*product(("exception", "NaN", "break"), ("first", "middle", "last"), ("forward", "backward"))]
CELLS += [("exception", "edge", "step")]


class Run:
    """A rank's training with these faults, by update: the cell, and the rank it strikes (-1: all)."""

    def __init__(self, engine: str, sizes: Any, faults: dict[int, tuple[Any, int]], seed: int) -> None:
        self.sizes, self.faults, self.seed, self.rank = sizes, dict(faults), seed, dist.get_rank()
        self.forward = self.backward = ""  # the kinds that strike between the layers
        self.model: Any = make_net_without_router()
        self.model.body.append(nn.Dropout(0.2))
        self.model.body.register_forward_hook(lambda *given: self.strike(given[-1]))
        if engine.startswith("DDP"):
            self.model = DistributedDataParallel(self.model, gradient_as_bucket_view="views" in engine)
        elif engine.startswith("FSDP2"):
            self.model, _ = fully_sharded()(self.model, 0.0)
        optimizer = SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        optimizer.register_step_pre_hook(lambda *_: self.fail(self.struck("step")))
        sync = "gathered" if "gathered" in engine else "last"
        self.accumulator = Accumulator(self.model, optimizer, steps=STEPS, sync=sync)
        self.committed: list[tuple[int, list[float]]] = []
        torch.manual_seed(1000 + self.rank)
        while self.accumulator.index < UPDATES:
            try:
                self.windows()
            except (ArithmeticError, DistaccumError) as error:
                if isinstance(error, DistaccumError) and "not finite" not in str(error):
                    raise
                torch.set_rng_state(self.random)
            assert getattr(self.model, "require_backward_grad_sync", True)
            assert not any(p.grad is not None and bool((p.grad != 0).any()) for p in self.model.parameters())
        self.weights = [getattr(p, "_local_tensor", p).detach() for p in self.model.state_dict().values()]

    def struck(self, phase: str, turn: int = 0, last: int = 0, own_last: int = 0) -> str:
        """The kind of the fault that strikes this rank here, once."""
        (kind, position, where), rank = self.faults.get(self.accumulator.index, (("", "", ""), -1))
        is_last = turn == (own_last if kind == "NaN" else last)  # a NaN in a stand-in counts on no rank
        here = "edge" if phase == "step" else "first" if turn == 0 else "last" if is_last else "middle"
        if (phase, here) != (where, position) or rank not in (-1, self.rank) or (kind == "NaN" and turn > own_last):
            return ""
        del self.faults[self.accumulator.index]
        return kind

    def fail(self, kind: str) -> None:
        if kind == "exception":
            raise ArithmeticError

    def strike(self, x: torch.Tensor) -> None:
        self.fail(self.forward)
        kind = self.backward
        x.register_hook(lambda gradient: self.fail(kind) or (gradient * float("nan") if kind == "NaN" else gradient))

    def windows(self) -> None:
        for window in self.accumulator.windows(self.micro_batches()):
            self.random, inputs = torch.get_rng_state(), []
            for batch in window:
                if not window.stand_in:
                    inputs.append(float(batch["x"].sum()))
                place = window.num_done, window.num_micro_steps - 1, len(window) - 1
                self.forward, self.backward = self.struck("forward", *place), self.struck("backward", *place)
                loss = self.model(batch["x"]).square().mean()
                if self.forward != "break":
                    window.backward(loss * float("nan") if self.forward == "NaN" else loss)
                if "break" in (self.forward, self.backward):
                    torch.set_rng_state(self.random)
                    return  # leaves the window, which the next call asks for again
            update = window.step()
            self.committed.append((update.index, inputs))

    def micro_batches(self) -> list[Any]:
        """From the current window on; empty ones, which count nothing, pad each rank's windows to as many."""
        batches = []
        for update in range(self.accumulator.index, UPDATES):
            sizes, seed = self.sizes[update][self.rank], self.seed + 1000 * update + 100 * self.rank
            batches += [make_batch(n, seed=seed + i) for i, n in enumerate(sizes)]
            batches += [make_batch(0, seed=0)] * (STEPS - len(sizes))
        return batches


@pytest.mark.parametrize("engine", ENGINES)
@on_ranks(lambda engine: ENGINES[engine])
def test_training_with_faults_ends_as_without_them(engine):
    """Each fault in each place, up to three in a training."""
    draw, world = random.Random(f"{engine} {os.environ.get('FAULTS_SEED', '1')}"), ENGINES[engine]
    cells = draw.sample(CELLS, len(CELLS))
    for first in range(0, len(cells), UPDATES - 1):
        few = cells[first : first + UPDATES - 1]
        at = draw.sample(range(UPDATES), len(few))
        struck = [(cell, draw.randrange(world) if cell[0] == "NaN" else -1) for cell in few]
        faults = dict(zip(at, struck, strict=True))
        sizes = [
            [[draw.randint(1, 3) for _ in range(draw.randint(3 if update in at else 1, STEPS))] for _ in range(world)]
            for update in range(UPDATES)
        ]
        whole, broken = (Run(engine, sizes, these, 7919 * first) for these in ({}, faults))
        assert not [cell for cell, rank in broken.faults.values() if rank in (-1, broken.rank)], "all faults were met"
        assert broken.committed == whole.committed
        assert all(map(torch.equal, broken.weights, whole.weights)), faults
