"""A fault harness: random schedules of faults on real ranks, compared with the run without faults.

    python -m tests.programs.faults --schedules 2000

Each schedule trains a few updates on a plain module, DDP or FSDP2 with uneven micro-batches, and names its faults and
their places. The loop repeats lost work, as a careful user's would: after an error or a `break` the window, with the
same random numbers, and after a SIGTERM on one rank the rest, by a new job from the state that was saved between two
windows or inside one. At the end weights, samples and flags must equal those of the run without faults.
"""

from __future__ import annotations

import argparse
import copy
import os
import random
import signal
from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from distaccum import Accumulator, DistaccumError
from tests.support.engines import fully_sharded
from tests.support.problems import make_batch, make_net_without_router
from tests.support.ranks import RankError, Ranks

ENGINES = {"plain": 1, "DDP": 2, "FSDP2": 2}
UPDATES = 4


@dataclass(frozen=True)
class Fault:
    kind: str
    position: str  # of the micro-step; "edge": in step()
    phase: str  # forward, backward (of the last micro-step: the one that reduces), step
    update: int = 0
    rank: int = -1  # -1: all ranks

    @property
    def cell(self) -> str:
        return f"{self.kind} | {self.position} | {self.phase}"


WHERE = list(product(("first", "middle", "last"), ("forward", "backward")))
CELLS = [Fault(kind, *place) for kind in ("exception", "NaN", "break", "SIGTERM") for place in WHERE]
CELLS += [Fault(kind, "edge", "step") for kind in ("exception", "SIGTERM")]


@dataclass(frozen=True)
class Schedule:
    engine: str
    seed: int
    sizes: list[list[list[int]]]  # of micro-batches, by update and rank
    faults: list[Fault] = field(default_factory=list)


def make_schedule(engine: str, seed: int, first: Fault) -> Schedule:
    """Everything but the first fault is random; an update has one fault at most, which each of its ranks must meet."""
    draw, world = random.Random(f"{engine} {seed}"), ENGINES[engine]
    chosen = [first, *(draw.choice(CELLS) for _ in range(draw.randrange(3)))]
    updates = draw.sample(range(UPDATES), len(chosen))
    ranks = [draw.randrange(world) if one.kind in ("NaN", "SIGTERM") else -1 for one in chosen]
    faults = [replace(one, update=update, rank=rank) for one, update, rank in zip(chosen, updates, ranks, strict=True)]
    sizes = []
    for update in range(UPDATES):
        least = 3 if update in updates else 1
        sizes.append([[draw.randint(1, 3) for _ in range(draw.randint(least, 5))] for _ in range(world)])
    return Schedule(engine, seed, sizes, faults)


class Bug(Exception):  # noqa: N818
    pass


class InBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, what: Any) -> torch.Tensor:
        ctx.what = what
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return ctx.what(gradient), None


class Trunk(nn.Module):
    """Has dropout, and calls `strike` between its layers."""

    def __init__(self) -> None:
        super().__init__()
        net = make_net_without_router()
        self.body, self.head = net.body, net.head
        self.strike: Any = lambda x: x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.strike(nn.functional.dropout(self.body(x), 0.2)))


def flags(model: nn.Module) -> Any:
    """The flags that a window changes and must restore."""
    if isinstance(model, DistributedDataParallel):
        return model.require_backward_grad_sync, model.require_forward_param_sync
    states = [module._get_fsdp_state() for module in model.modules() if hasattr(module, "_get_fsdp_state")]
    groups = [group for state in states for group in state._fsdp_param_groups]
    whole = [getattr(one, "_unsharded_param", None) for group in groups for one in group.fsdp_params]
    held = any(one is not None and one.grad is not None for one in whole)
    return [(one.reduce_grads, one.all_reduce_grads, one.reshard_after_backward) for one in groups], held


class Run:
    """One rank's part of a job, which starts at the state that an earlier one saved."""

    def __init__(self, schedule: Schedule, met: set[int], state: Any) -> None:
        self.schedule, self.met, self.rank = schedule, met, dist.get_rank()
        self.model: nn.Module = Trunk()
        self.trunk = self.model
        if schedule.engine == "DDP":
            self.model = DistributedDataParallel(self.trunk)
        elif schedule.engine == "FSDP2":
            self.model, _ = fully_sharded()(self.trunk, 0.0)
        self.optimizer = SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.accumulator = Accumulator(self.model, self.optimizer, steps=5)
        self.committed: list[tuple[int, list[float]]] = []
        self.leaks: list[str] = []
        self.clean = flags(self.model)
        self.asked, self.breaks = False, ""
        self.optimizer.register_step_pre_hook(lambda *_: self.fail(self.pending("step")))
        torch.manual_seed(1000 + self.rank)
        self.random = torch.get_rng_state()
        self.state = state
        if state is not None:
            for value, saved in zip(self.local(), state["weights"], strict=True):
                value.copy_(saved)
            self.optimizer.load_state_dict(state["optimizer"])
            self.accumulator.load_state_dict(state["accumulator"])
            self.committed = state["committed"]

    def pending(self, phase: str, turn: int = 0, last: int = 0, own_last: int = 0) -> Fault | None:
        """The fault of this rank here; it strikes once, also in a restarted job."""
        for i, fault in enumerate(self.schedule.faults):
            # A NaN in a stand-in counts on no rank; every other fault strikes all ranks in the same micro-step.
            is_last = turn == (own_last if fault.kind == "NaN" else last)
            position = "edge" if phase == "step" else "first" if turn == 0 else "last" if is_last else "middle"
            here = (fault.update, fault.phase, fault.position) == (self.accumulator.index, phase, position)
            here = here and (fault.kind != "NaN" or turn <= own_last)
            if here and fault.rank in (-1, self.rank) and i not in self.met:
                self.met.add(i)
                return fault
        return None

    def fail(self, fault: Fault | None) -> None:
        if fault is not None and fault.kind == "SIGTERM":
            os.kill(os.getpid(), signal.SIGTERM)
        elif fault is not None and fault.kind == "exception":
            raise Bug(fault.cell)

    def loss(self, batch: Any, window: Any) -> torch.Tensor:
        where = window.num_done, window.num_micro_steps - 1, len(window) - 1
        forward, backward = self.pending("forward", *where), self.pending("backward", *where)

        def strike(x: torch.Tensor) -> torch.Tensor:
            self.fail(forward)
            return x if backward is None else InBackward.apply(x, what)

        def what(gradient: torch.Tensor) -> torch.Tensor:
            self.fail(backward)
            return gradient * float("nan") if backward is not None and backward.kind == "NaN" else gradient

        self.trunk.strike = strike
        loss = self.model(batch["x"]).square().mean()
        met = (one for one in (forward, backward) if one is not None)
        self.breaks = next((one.phase for one in met if one.kind == "break"), "")
        return loss * float("nan") if forward is not None and forward.kind == "NaN" else loss

    def micro_batches(self) -> list[Any]:
        """Starts at the current window; empty micro-batches, which count nothing, pad each rank's window to 5."""
        batches = []
        for update in range(self.accumulator.index, UPDATES):
            sizes, seed = self.schedule.sizes[update][self.rank], 7919 * self.schedule.seed % 100_000
            batches += [make_batch(n, seed=seed + 1000 * update + 100 * self.rank + i) for i, n in enumerate(sizes)]
            batches += [make_batch(0, seed=0)] * (5 - len(sizes))
        return batches

    def train(self) -> bool:
        """True at the end of training; False if a signal stopped it after a save."""
        while self.accumulator.index < UPDATES:
            try:
                if not self.windows():
                    return False
            except (Bug, DistaccumError) as error:
                if isinstance(error, DistaccumError) and "not finite" not in str(error):
                    raise
                torch.set_rng_state(self.random)
            self.check_flags()
        return True

    def windows(self) -> bool:
        for window in self.accumulator.windows(self.micro_batches()):
            inputs, least = [], min(map(len, self.schedule.sizes[window.index]))
            window.begin()  # which puts back the random numbers of a state
            self.random = torch.get_rng_state()
            for batch in window:
                loss = self.loss(batch, window)
                if not window.stand_in:
                    inputs.append(float(batch["x"].sum()))
                if self.breaks != "forward":
                    window.backward(loss)
                if self.breaks:
                    torch.set_rng_state(self.random)
                    return True  # leaves the window, which train() asks for again
                if window.num_done < least and self.agreed_to_stop():
                    return False
            update = window.step()
            assert update.stepped
            self.committed.append((update.index, inputs))
            self.check_flags()
            if self.agreed_to_stop():
                return False
        return True

    def check_flags(self) -> None:
        now = flags(self.model)
        if now != self.clean:
            self.leaks.append(f"flags {now}, expected {self.clean}")
        if any(p.grad is not None and bool((p.grad != 0).any()) for p in self.model.parameters()):
            self.leaks.append("a gradient")

    def agreed_to_stop(self) -> bool:
        dist.all_reduce(asked := torch.tensor([float(self.asked)]), op=dist.ReduceOp.MAX)
        if asked:
            state = {"weights": self.local(), "optimizer": self.optimizer.state_dict(), "committed": self.committed}
            self.state = copy.deepcopy({**state, "accumulator": self.accumulator.state_dict()})
        return bool(asked)

    def local(self) -> list[torch.Tensor]:
        values = self.model.state_dict().values()
        return [(p.to_local() if hasattr(p, "to_local") else p).detach() for p in values]


def train(schedule: Schedule) -> tuple[Any, ...]:
    """Runs on a rank to the end, in as many jobs as the signals make of it."""
    met: set[int] = set()
    run = Run(schedule, met, None)
    found = signal.signal(signal.SIGTERM, lambda *_: setattr(run, "asked", True))
    leaks = []
    try:
        while not run.train():
            leaks += run.leaks
            run = Run(schedule, met, run.state)
    finally:
        signal.signal(signal.SIGTERM, found)
    return run.local(), run.committed, leaks + run.leaks, met


@dataclass
class Result:
    schedule: Schedule
    met: list[str]
    problems: list[str]


def without_faults(schedule: Schedule) -> Schedule:
    return replace(schedule, faults=[])


def drive(ranks: Ranks, schedule: Schedule) -> Result:
    """Compares a schedule with the run without faults."""
    expected = ranks.run(train, without_faults(schedule))
    try:
        ended = ranks.run(train, schedule, seconds=30)
    except RankError as error:
        return Result(schedule, [], [str(error)[-3000:]])
    problems: list[str] = []
    for rank, ((weights, samples, *_), (ours, seen, leaks, _)) in enumerate(zip(expected, ended, strict=True)):
        problems += [f"rank {rank}: {leak}" for leak in leaks]
        if samples != seen:
            problems.append(f"rank {rank} took the samples {seen}, expected {samples}")
        if not all(map(torch.equal, weights, ours)):
            problems.append(f"rank {rank}: weights differ, expected the same bits")
    struck = [range(ranks.num) if fault.rank < 0 else [fault.rank] for fault in schedule.faults]
    met = [fault.cell for i, fault in enumerate(schedule.faults) if all(i in ended[rank][-1] for rank in struck[i])]
    return Result(schedule, met, problems)


def schedules(engine: str, number: int, seed: int) -> list[Schedule]:
    """Their first faults cycle through the cells."""
    return [make_schedule(engine, seed * 100_000 + i, CELLS[i % len(CELLS)]) for i in range(number)]


def few_schedules(engine: str, seed: int) -> list[Schedule]:
    """A greedy cover of the cells: each choice adds the most new cells."""
    made, found = schedules(engine, 4 * len(CELLS), seed), []
    left = {cell.cell for cell in CELLS}
    while left:
        found.append(max(made, key=lambda schedule: len(left & {fault.cell for fault in schedule.faults})))
        left -= {fault.cell for fault in found[-1].faults}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--schedules", type=int, default=2000, metavar="N", help="number of schedules (2000)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the schedules (0)")
    arguments, bad = parser.parse_args(), 0
    for engine, world in ENGINES.items():
        ranks, met = Ranks(world), Counter[str]()
        for schedule in schedules(engine, arguments.schedules // len(ENGINES), arguments.seed):
            result = drive(ranks, schedule)
            met.update(result.met)
            if result.problems:
                bad += 1
                print(schedule, *result.problems, sep="\n  ", flush=True)
        ranks.stop()
        print(engine, *(f"{met[cell.cell]:5} | {cell.cell}" for cell in CELLS), sep="\n", flush=True)
    print(f"{bad} schedules ended otherwise than without faults")
    return bool(bad)


if __name__ == "__main__":
    raise SystemExit(main())
