"""A fault harness: random schedules of faults on real ranks, compared with the run without faults.

    python tests/faults.py --schedules 2000 --out launch/results/faults

Each schedule trains a few updates on a plain module, DDP or FSDP2 with uneven micro-batches, and names its faults and
their places. The loop repeats lost work, as a careful user's would. After an error or a `break` it repeats the window
with the same random numbers. After a kill or a SIGTERM it restarts the job from its last checkpoint, which may lie
between two windows or inside one. At the end weights, samples and flags must equal those of the run without faults.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from engines import fully_sharded
from inside import window_of
from problems import make_batch, make_net_without_router
from ranks import RankError, Ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from distaccum import Accumulator, DistaccumError
from distaccum.sizes import PROOFS

ENGINES = {"plain": 1, "DDP": 2, "FSDP2": 2}
POSITIONS = ("first", "middle", "last")
UPDATES = 4
LOST = re.compile("lost contact with the other ranks|[Cc]onnection (closed|reset)|[Tt]imed? ?out")


@dataclass(frozen=True)
class Fault:
    kind: str
    position: str  # of the micro-step; "edge": in step()
    phase: str  # forward, backward (of the last micro-step: the one that reduces), step
    update: int = 0
    rank: int = -1  # -1: all ranks

    @property
    def cell(self) -> str:
        where = "reducing backward" if (self.position, self.phase) == ("last", "backward") else self.phase
        return f"{self.kind} | {self.position} | {where}"


def cells(engine: str) -> list[Fault]:
    """The faults that each engine must meet, in a loop or in update()."""
    steps = [Fault("", position, phase) for position in POSITIONS for phase in ("forward", "backward")]
    edge = Fault("", "edge", "step")
    found = []
    for kind, where in {
        "exception": [*steps, edge],
        "exception on one rank": steps if ENGINES[engine] > 1 else [],
        "out of memory": steps,
        "out of memory on one rank": steps if ENGINES[engine] > 1 else [],
        "NaN": steps,
        "break": steps,
        "kill -9": [*steps, edge],
        "SIGTERM": [*steps, edge],
    }.items():
        found += [Fault(kind, one.position, one.phase) for one in where]
    return found


@dataclass(frozen=True)
class Schedule:
    engine: str
    seed: int
    by_update: bool  # Accumulator.update() cuts and runs the windows, not a loop
    sizes: list[list[list[int]]]  # of micro-batches, by update and rank; with update() their sum is the batch
    faults: list[Fault] = field(default_factory=list)
    saves: list[tuple[int, int]] = field(default_factory=list)  # update, and micro-batches done in it (0: none yet)

    @property
    def is_exact(self) -> bool:
        """Whether sums keep their order, so that the bits must agree."""
        return not any(fault.kind.startswith("out of memory") for fault in self.faults)


def make_schedule(engine: str, seed: int, first: Fault | None = None) -> Schedule:
    """Everything but the first fault is random."""
    draw = random.Random(f"{engine} {seed}")
    known = cells(engine)
    first = first or draw.choice(known)
    by_update = first.kind.startswith("out of memory") or first.kind == "exception on one rank"
    fitting = [
        one for one in known if (one.kind.startswith("out of") or one.kind == "exception on one rank") == by_update
    ]
    if by_update and draw.random() < 0.5:
        fitting += [one for one in known if one.kind in ("exception", "kill -9") and one.phase != "step"]
    # A kill costs seconds, so only the first fault may be one.
    fitting = [one for one in fitting if one.kind != "kill -9"] or fitting
    chosen = [first, *(draw.choice(fitting) for _ in range(draw.randrange(3)))]
    memory = [one for one in chosen if one.kind.startswith("out of memory")]
    chosen = memory[:2] + [one for one in chosen if one not in memory]  # two halvings of 8 samples leave 2
    world = ENGINES[engine]
    # In the reducing backward of one rank only before the size is proven: later, such a fault ends the job.
    unproven = {f"{what} on one rank | last | reducing backward" for what in ("out of memory", "exception")}
    chosen.sort(key=lambda one: one.cell not in unproven)
    # One fault per window: a fault of one rank could keep that rank from a fault of all ranks.
    free, faults = list(range(UPDATES)), []
    for one in chosen:
        fits = [update for update in free if update < PROOFS or one.cell not in unproven]
        if fits:
            rank = draw.randrange(world) if one.kind not in ("exception", "break", "out of memory") else -1
            faults.append(Fault(one.kind, one.position, one.phase, draw.choice(fits), rank))
            free.remove(faults[-1].update)
    struck = {fault.update for fault in faults}
    sizes = []
    for update in range(UPDATES):
        least = 3 if update in struck or by_update else 1
        most = 3 if not by_update else 9
        sizes.append([[draw.randint(most - 2, most) for _ in range(draw.randint(least, 5))] for _ in range(world)])
    saves = [(draw.randrange(UPDATES), draw.randrange(3)) for _ in range(2)] if not by_update else []
    return Schedule(engine, seed, by_update, sizes, faults, saves)


class Break(Exception):  # noqa: N818
    pass


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
        self.strike: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.dropout(self.body(x), 0.2)
        return self.head(x if self.strike is None else self.strike(x))


def flags(model: nn.Module) -> Any:
    """The flags that a window changes and must restore."""
    if isinstance(model, DistributedDataParallel):
        return model.require_backward_grad_sync, model.require_forward_param_sync
    if hasattr(model, "_get_fsdp_state"):
        groups = [
            g for m in model.modules() if hasattr(m, "_get_fsdp_state") for g in m._get_fsdp_state()._fsdp_param_groups
        ]
        held = any(getattr(p, "_unsharded_param", None) is not None and p._unsharded_param.grad is not None
                   for g in groups for p in g.fsdp_params)  # fmt: skip
        return [(g.reduce_grads, g.all_reduce_grads, g.reshard_after_backward) for g in groups], held
    return None


class Run:
    """One process's part of a schedule, starting at the last checkpoint."""

    def __init__(self, schedule: Schedule, folder: str) -> None:
        self.schedule, self.folder = schedule, Path(folder)
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        trunk = Trunk()
        self.trunk = trunk
        self.model: nn.Module = trunk
        if schedule.engine == "DDP":
            self.model = DistributedDataParallel(trunk)
        elif schedule.engine == "FSDP2":
            self.model, _ = fully_sharded()(trunk, 0.0)
        self.optimizer = SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        options: dict[str, Any] = {"steps": 5} if not schedule.by_update else {"micro_batch_size": 8}
        if schedule.by_update and schedule.engine == "FSDP2":
            options["sync"] = "gathered"  # a failing rank then leaves no other rank waiting
        self.accumulator = Accumulator(self.model, self.optimizer, **options)
        self.committed: list[tuple[int, list[float]]] = []
        self.seen: list[str] = []  # faults met by this rank
        self.leaks: list[str] = []
        self.clean = flags(self.model)
        self.asked = False
        self.optimizer.register_step_pre_hook(self.before_step)
        torch.manual_seed(1000 + self.rank)
        self.random = torch.get_rng_state()
        latest = self.folder / "latest"
        if latest.exists():
            self.load(latest.read_text())

    # Faults

    def pending(self, phase: str, turn: int, last: int, own_last: int) -> Fault | None:
        for i, fault in enumerate(self.schedule.faults):
            mark = self.folder / f"met-{i}-{self.rank}"
            # A NaN in a stand-in counts on no rank; every other fault strikes all ranks in the same micro-step.
            is_last = turn == (own_last if fault.kind == "NaN" else last)
            position = "edge" if phase == "step" else "first" if turn == 0 else "last" if is_last else "middle"
            here = (fault.update, fault.phase, fault.position) == (self.accumulator.index, phase, position)
            here = here and (fault.kind != "NaN" or turn <= own_last)
            if here and fault.rank in (-1, self.rank) and not mark.exists():
                mark.touch()  # each fault strikes once, also in a restarted job
                return fault
        return None

    def before_step(self, *_: object) -> None:
        fault = self.pending("step", 0, 0, 0)
        if fault is not None:
            self.fail(fault)

    def fail(self, fault: Fault) -> None:
        if fault.kind == "kill -9":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault.kind == "SIGTERM":
            os.kill(os.getpid(), signal.SIGTERM)
        if fault.kind.startswith("exception"):
            raise Bug(fault.cell)
        if fault.kind.startswith("out of memory"):
            raise torch.OutOfMemoryError("CUDA out of memory. (not really)")

    def loss(self, batch: Any, window: Any) -> torch.Tensor:
        where = window.num_done, window.num_micro_steps - 1, len(window) - 1
        forward, backward = self.pending("forward", *where), self.pending("backward", *where)
        self.trunk.strike = None
        if forward is not None or backward is not None:
            self.trunk.strike = lambda x: self.strike(x, forward, backward)
        try:
            outputs = self.model(batch["x"])
        finally:
            self.trunk.strike = None
        loss = outputs.square().mean()
        if forward is not None and forward.kind == "NaN":
            loss = loss * float("nan")
        if forward is not None and forward.kind == "break":
            raise Break  # before its backward
        if backward is not None and backward.kind == "break":
            self.asked_to_break = True
        return loss

    def strike(self, x: torch.Tensor, forward: Fault | None, backward: Fault | None) -> torch.Tensor:
        if forward is not None:
            self.fail(forward)
        if backward is None or backward.kind == "break":
            return x

        def what(gradient: torch.Tensor) -> torch.Tensor:
            self.fail(backward)
            return gradient * float("nan") if backward.kind == "NaN" else gradient

        return InBackward.apply(x, what)

    # Training

    def batch(self, update: int, place: int, size: int) -> Any:
        seed = 7919 * self.schedule.seed % 100_000 + 1000 * update + 100 * self.rank + place
        return make_batch(size, seed=seed)

    def micro_batches(self) -> list[Any]:
        """Starts at the current window; empty micro-batches, which count nothing, pad each rank's window to 5."""
        batches = []
        for update in range(self.accumulator.index, UPDATES):
            sizes = self.schedule.sizes[update][self.rank]
            batches += [self.batch(update, i, size) for i, size in enumerate(sizes)]
            batches += [make_batch(0, seed=0)] * (5 - len(sizes))
        return batches

    def train(self) -> bool:
        """True at the end of training; False if a signal stopped it after a save."""
        while self.accumulator.index < UPDATES:
            try:
                if not (self.update() if self.schedule.by_update else self.windows()):
                    return False
            except (Bug, Break, DistaccumError) as error:
                message = str(error)
                if isinstance(error, DistaccumError) and not re.search("not finite|failed in update", message):
                    raise
                if not self.schedule.by_update:  # update() restores them itself
                    torch.set_rng_state(self.random)
            self.check_flags()
        return True

    def windows(self) -> bool:
        for window in self.accumulator.windows(self.micro_batches()):
            inputs, least = [], min(map(len, self.schedule.sizes[window.index]))
            window.begin()  # which puts back the random numbers of a state
            self.random = torch.get_rng_state()
            for batch in window:
                self.asked_to_break = False
                loss = self.loss(batch, window)
                if not window.stand_in:
                    inputs.append(float(batch["x"].sum()))
                window.backward(loss)
                if self.asked_to_break:
                    raise Break
                if window.num_done < least and self.agreed_to_stop((self.accumulator.index, window.num_done)):
                    return False
            self.commit(window.step(), inputs)
            if self.agreed_to_stop((self.accumulator.index, 0)):
                return False
        return True

    def update(self) -> bool:
        index = self.accumulator.index
        sizes = self.schedule.sizes[index][self.rank]
        batches = [self.batch(index, i, size) for i, size in enumerate(sizes)]
        batch = {key: torch.cat([one[key] for one in batches]) for key in batches[0]}
        state = {"turn": 0, "inputs": 0.0}

        def loss_fn(micro_batch: Any) -> torch.Tensor:
            window = window_of(self.accumulator)
            if window.num_done == 0:
                state["inputs"] = 0.0
            state["inputs"] += float(micro_batch["x"].sum())
            return self.loss(micro_batch, window)

        update = self.accumulator.update(batch, loss_fn)
        self.commit(update, [round(state["inputs"], 6)])
        return not self.agreed_to_stop((self.accumulator.index, 0))

    def commit(self, update: Any, inputs: list[float]) -> None:
        assert update.stepped
        self.committed.append((update.index, inputs))
        self.check_flags()

    def check_flags(self) -> None:
        now = flags(self.model)
        if now != self.clean:
            self.leaks.append(f"flags {now}, expected {self.clean}")
        if any(p.grad is not None and bool((p.grad != 0).any()) for p in self.model.parameters()):
            self.leaks.append("a gradient")

    # Stopping and resuming

    def agreed_to_stop(self, place: tuple[int, int]) -> bool:
        asked = torch.tensor([float(self.asked)])
        dist.all_reduce(asked, op=dist.ReduceOp.MAX)
        stop = bool(asked)
        mark = self.folder / f"saved-{place}"
        if stop or (place in self.schedule.saves and not mark.exists()):
            dist.barrier()
            if self.rank == 0:
                mark.touch()
            self.save(place)
        return stop

    def local(self) -> list[torch.Tensor]:
        values = self.model.state_dict().values()
        return [(p.to_local() if hasattr(p, "to_local") else p).detach().clone() for p in values]

    def save(self, place: tuple[int, int]) -> None:
        name = f"{place[0]}-{place[1]}"
        state = {
            "weights": self.local(),
            "optimizer": self.optimizer.state_dict(),
            "accumulator": self.accumulator.state_dict(),
            "committed": self.committed,
        }
        torch.save(state, self.folder / f"{name}.{self.rank}")
        dist.barrier()
        if self.rank == 0:
            (self.folder / "partial").write_text(name)
            (self.folder / "partial").replace(self.folder / "latest")
        dist.barrier()

    def load(self, name: str) -> None:
        state = torch.load(self.folder / f"{name}.{self.rank}", weights_only=False)
        with torch.no_grad():
            for value, saved in zip(self.model.state_dict().values(), state["weights"], strict=True):
                (value.to_local() if hasattr(value, "to_local") else value).copy_(saved)
        self.optimizer.load_state_dict(state["optimizer"])
        self.accumulator.load_state_dict(state["accumulator"])
        self.committed = state["committed"]


def attempt(schedule: Schedule, folder: str) -> Any:
    """Runs on a rank, from the last checkpoint to the end or to a signal."""
    run = Run(schedule, folder)
    found = signal.signal(signal.SIGTERM, lambda *_: setattr(run, "asked", True))
    try:
        ended = run.train()
    finally:
        signal.signal(signal.SIGTERM, found)
    return ended, run.local(), run.committed, run.leaks


@dataclass
class Result:
    schedule: Schedule
    met: list[str]
    wrong: float  # the largest difference of a weight, relative to the largest weight
    problems: list[str]
    starts: int


def without_faults(schedule: Schedule) -> Schedule:
    return Schedule(schedule.engine, schedule.seed, schedule.by_update, schedule.sizes)


def drive(ranks: Ranks, schedule: Schedule) -> Result:
    """Restarts the job until it ends, then compares it with the run without faults."""
    problems: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        expected = ranks.run(attempt, without_faults(schedule), folder)
    folder = tempfile.mkdtemp()
    try:
        for starts in range(1, 20):
            try:
                ended = ranks.run(attempt, schedule, folder, seconds=30)
            except RankError as error:
                killed = [f for f in schedule.faults if f.kind == "kill -9"]
                message = str(error)
                if not killed or "did not end" in message or (ranks.num > 1 and not LOST.search(message)):
                    problems.append(f"start {starts}: {message[-3000:]}")
                    break
                continue
            if all(done for done, *_ in ended):
                break
        else:
            problems.append("did not end")
        met = [
            fault.cell
            for i, fault in enumerate(schedule.faults)
            if all((Path(folder) / f"met-{i}-{r}").exists() for r in range(ranks.num) if fault.rank in (-1, r))
        ]
    finally:
        shutil.rmtree(folder)
    if problems:
        return Result(schedule, met, float("inf"), problems, starts)
    wrong = 0.0
    for rank, ((_, weights, samples, _), (_, ours, seen, leaks)) in enumerate(zip(expected, ended, strict=True)):
        problems += [f"rank {rank}: {leak}" for leak in leaks]
        if samples != seen:
            problems.append(f"rank {rank} took the samples {seen}, expected {samples}")
        same = all(map(torch.equal, weights, ours))
        for mine, theirs in zip(ours, weights, strict=True):
            if theirs.numel():
                wrong = max(wrong, float((mine - theirs).abs().max() / theirs.abs().max()))
        if schedule.is_exact and not same:
            problems.append(f"rank {rank}: weights differ by {wrong:.1e}, expected the same bits")
        if wrong > 1e-12:
            problems.append(f"rank {rank}: weights differ by {wrong:.1e}")
    return Result(schedule, met, wrong, problems, starts)


def schedules(number: int, seed: int) -> list[Schedule]:
    """The same number of schedules for each engine; their first faults cycle through the engine's cells."""
    made = []
    for i, engine in enumerate(ENGINES):
        known = cells(engine)
        for j in range(i, number, len(ENGINES)):
            made.append(make_schedule(engine, seed * 100_000 + j, known[j // len(ENGINES) % len(known)]))
    return made


def few_schedules(seed: int) -> list[Schedule]:
    """A greedy cover of each engine's cells: each choice adds the most new cells."""
    made = []
    for engine in ENGINES:
        known = cells(engine)
        of_engine = [make_schedule(engine, seed * 100_000 + j, known[j % len(known)]) for j in range(4 * len(known))]
        left = {cell.cell for cell in known}
        while left:
            best = max(of_engine, key=lambda schedule: len(left & {fault.cell for fault in schedule.faults}))
            left -= {fault.cell for fault in best.faults}
            made.append(best)
    return made


def run_all(planned: list[Schedule], ranks: Any, show: Any = None) -> list[Result]:
    results = []
    for i, schedule in enumerate(planned):
        results.append(drive(ranks(ENGINES[schedule.engine]), schedule))
        if show is not None:
            show(i, results[-1])
    return results


def counts(results: list[Result]) -> dict[str, Counter[str]]:
    """How often each engine met each fault at each place."""
    found: dict[str, Counter[str]] = {engine: Counter() for engine in ENGINES}
    for result in results:
        found[result.schedule.engine].update(result.met)
    return found


def table(results: list[Result]) -> str:
    met = counts(results)
    rows = list(dict.fromkeys(cell.cell for engine in ENGINES for cell in cells(engine)))
    lines = ["| fault | micro-step | where | " + " | ".join(ENGINES) + " |", "| --- " * (3 + len(ENGINES)) + "|"]
    for row in rows:
        numbers = [met[engine][row] if row in [c.cell for c in cells(engine)] else "-" for engine in ENGINES]
        lines.append(f"| {row} | {' | '.join(map(str, numbers))} |")
    return "\n".join(lines)


def report(results: list[Result], seconds: float, arguments: Any) -> str:
    bad = [result for result in results if result.problems]
    exact = [result for result in results if result.schedule.is_exact]
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    worst = max(result.wrong for result in results)
    met, starts = sum(len(result.met) for result in results), sum(result.starts for result in results)
    return f"""# Faults

`python tests/faults.py --schedules {arguments.schedules} --seed {arguments.seed} --out launch/results/faults`
at commit {commit}, torch {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} shared cores,
{time.strftime("%Y-%m-%d")}; {seconds / 60:.0f} minutes.

{len(results)} random schedules with {met} faults, {starts} starts of a job; {len(bad)} differed at the end from the
run without faults. {len(exact)} of them have no out-of-memory fault and must end with the same bits. In the others the
micro-batches, and so the order of the sums, differ: the largest difference of a weight is {worst:.1e} of the largest
weight (float64). Each was also checked for hangs, for leftover flags and gradients, and for lost or repeated samples.

Number of times each fault was met, in the first, a middle or the last micro-step of a window, or in `step()`:

{table(results)}
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--schedules", type=int, default=2000, metavar="N", help="number of schedules (2000)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the schedules (0)")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="folder for faults.md")
    arguments = parser.parse_args()
    started: dict[int, Ranks] = {}
    began = time.monotonic()

    def show(i: int, result: Result) -> None:
        if result.problems:
            print(f"{result.schedule}\n  " + "\n  ".join(result.problems), flush=True)
        if i % 50 == 49:
            print(f"{i + 1} of {arguments.schedules}, {time.monotonic() - began:.0f} s", flush=True)

    try:
        planned = schedules(arguments.schedules, arguments.seed)
        results = run_all(planned, lambda n: started.setdefault(n, Ranks(n)), show)
    finally:
        for one in started.values():
            one.stop()
    text = report(results, time.monotonic() - began, arguments)
    print(text)
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / "faults.md").write_text(text)
    return 1 if any(result.problems for result in results) else 0


if __name__ == "__main__":
    raise SystemExit(main())
