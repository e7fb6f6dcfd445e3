"""The loops that the programs here compare: each library's as its documentation has it, and each engine's by hand.

    python launch/bench/contenders.py                    # lists them
    python launch/bench/contenders.py --check --ranks 2  # compares two updates of each with big batches

    task = Task(net, loss_of, optimizer_of, steps=8, layers=(net[0], net[2]))  # a fresh net for each
    loop = one_of("DDP", "distaccum").set_up(task)
    loop.run(micro_batches)  # one whole update: forwards, backwards, reduction, step, clearing

All take the same micro-batches, on the CPU, and end with the same weights. Those on ranks expect a gloo group and the
environment that torchrun makes (`as_torchrun` makes it too).
"""

from __future__ import annotations

import argparse
import os
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from importlib import metadata
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from kit import in_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer

from distaccum import Accumulator

NEVER_CLIPS = 1e6  # a norm that is measured and not reached, so that the loops that clip end as the others do
OTHERS = ("accelerate", "lightning-fabric", "deepspeed")
BOUND = 1e-5  # float32
Unreduced = Callable[[Any], AbstractContextManager[None]]


@dataclass(frozen=True)
class Task:
    """What a contender trains. It wraps `module`, so each gets one of its own."""

    module: nn.Module
    loss_of: Callable[[nn.Module, Any], Tensor]  # of the wrapped module and a micro-batch: the mean over its samples
    optimizer_of: Callable[[Iterable[nn.Parameter]], Optimizer]
    steps: int  # micro-batches of an update on each rank, all of one size
    layers: tuple[nn.Module, ...] = ()  # of `module`, that fully_shard wraps by themselves


@dataclass(frozen=True)
class Loop:
    run: Callable[[Sequence[Any]], object]  # `steps` micro-batches of this rank: one whole update
    weights: Callable[[], Tensor]  # all of them in one vector, on every rank


@dataclass(frozen=True)
class Contender:
    """`engine` names what the model is wrapped in and when it reduces; ratios are taken among those that share it."""

    engine: str
    name: str
    set_up: Callable[[Task], Loop]

    @property
    def on_ranks(self) -> bool:
        return self.engine != "plain"

    @property
    def reference(self) -> str:
        """The loop of the same engine without another library: by hand, or DeepSpeed's own."""
        return "DeepSpeed" if self.engine.startswith("ZeRO") else "by hand"

    def __str__(self) -> str:
        return f"{self.engine}, {self.name}"


# By hand


def by_hand(
    task: Task,
    model: nn.Module,
    unreduced: Unreduced,
    *,
    seeded: bool = False,
    max_norm: float | None = None,
    in_place: bool = False,
) -> Loop:
    """All micro-steps but the last run in `unreduced(model)`; seeded, the share is the backward's, not in the graph."""
    loss_of, steps = task.loss_of, task.steps
    parameters = list(model.parameters())
    optimizer = task.optimizer_of(parameters)
    share = torch.full((), 1 / steps)

    def backward(micro_batch: Any) -> None:
        if seeded:
            loss_of(model, micro_batch).backward(share)
        else:
            (loss_of(model, micro_batch) / steps).backward()

    def run(micro_batches: Sequence[Any]) -> None:
        *early, last = micro_batches
        with unreduced(model) if early else nullcontext():
            for micro_batch in early:
                backward(micro_batch)
        backward(last)
        if max_norm is not None:
            nn.utils.clip_grad_norm_(parameters, max_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=not in_place)

    return Loop(run, lambda: full_weights(model))


def plain_by_hand(task: Task, **options: Any) -> Loop:
    return by_hand(task, task.module, at_once, **options)


def ddp_by_hand(task: Task, *, every: bool = False, views: bool = False, **options: Any) -> Loop:
    model = DistributedDataParallel(task.module, gradient_as_bucket_view=views)
    # Set to None, views of the buckets would lose the memory that they save.
    return by_hand(task, model, at_once if every else no_sync, in_place=views, **options)


def fsdp2_by_hand(task: Task, policy: str) -> Loop:
    unreduced = {"last": deferred, "every": at_once, "gathered": gathered}[policy]
    model = fully_sharded(task, reshard_after_forward=False if policy == "gathered" else None)
    return by_hand(task, model, unreduced)


def at_once(model: nn.Module) -> AbstractContextManager[None]:
    return nullcontext()


def no_sync(model: DistributedDataParallel) -> AbstractContextManager[None]:
    return model.no_sync()


@contextmanager
def deferred(model: Any) -> Iterator[None]:
    # With set_is_last_backward(False) too, the last backward prefetched a layer twice: one more gather per window.
    model.set_requires_gradient_sync(False)
    yield
    model.set_requires_gradient_sync(True)


@contextmanager
def gathered(model: Any) -> Iterator[None]:
    model.set_reshard_after_backward(False)
    with deferred(model):
        yield
    model.set_reshard_after_backward(True)


def fully_sharded(task: Task, reshard_after_forward: bool | None = None) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in task.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard_after_forward)
    return fully_shard(task.module, mesh=mesh, reshard_after_forward=reshard_after_forward)


def full_weights(model: nn.Module) -> Tensor:
    whole = (p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters())
    return torch.cat([p.detach().flatten() for p in whole]).clone()


# Other libraries


def accelerate(task: Task, *, max_norm: float | None = None) -> Loop:
    from accelerate import Accelerator

    loss_of, steps = task.loss_of, task.steps
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps)
    model, optimizer = accelerator.prepare(task.module, task.optimizer_of(task.module.parameters()))

    def run(micro_batches: Sequence[Any]) -> None:
        accelerator.gradient_accumulation_steps = steps  # all of a process share it; it is an entry of a dict
        for micro_batch in micro_batches:
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, micro_batch))
                if max_norm is not None and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), max_norm)
                optimizer.step()
                optimizer.zero_grad()

    return Loop(run, lambda: full_weights(model))


def lightning_fabric(task: Task, *, max_norm: float | None = None) -> Loop:
    from lightning_fabric import Fabric

    loss_of, steps = task.loss_of, task.steps
    ranks, local = num_ranks(), num_ranks(local=True)
    fabric = Fabric(accelerator="cpu", devices=local, num_nodes=ranks // local, strategy="ddp" if ranks > 1 else "auto")
    fabric.launch()
    model, optimizer = fabric.setup(task.module, task.optimizer_of(task.module.parameters()))

    def run(micro_batches: Sequence[Any]) -> None:
        for i, micro_batch in enumerate(micro_batches):
            is_accumulating = (i + 1) % steps != 0
            with fabric.no_backward_sync(model, enabled=is_accumulating):
                fabric.backward(loss_of(model, micro_batch) / steps)
            if not is_accumulating:
                if max_norm is not None:
                    fabric.clip_gradients(model, optimizer, max_norm=max_norm)
                optimizer.step()
                optimizer.zero_grad()

    return Loop(run, lambda: full_weights(model))


def deepspeed(task: Task, stage: int, *, coalesced: bool = False) -> Loop:
    """It divides by `gradient_accumulation_steps` and finds the window's end by itself; coalesced, the caller does."""
    loss_of, steps = task.loss_of, task.steps
    engine = deepspeed_engine(task, stage, 1 if coalesced else steps)

    def run(micro_batches: Sequence[Any]) -> None:
        for micro_batch in micro_batches:
            engine.backward(loss_of(engine, micro_batch))
            engine.step()

    def run_coalesced(micro_batches: Sequence[Any]) -> None:
        with engine.coalesce_grad_reduction():
            for micro_batch in micro_batches:
                engine.backward(loss_of(engine, micro_batch) / steps)
        engine.step()

    return Loop(run_coalesced if coalesced else run, lambda: zero_weights(engine))


def deepspeed_engine(task: Task, stage: int, steps: int) -> Any:
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    deepspeed = import_deepspeed()
    module = task.module
    config = {
        "train_micro_batch_size_per_gpu": 1,  # for its log alone
        "gradient_accumulation_steps": steps,
        "gradient_clipping": 0.0,  # its default of 1.0 clips
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": max(1000, sum(p.numel() for p in module.parameters())),  # one bucket
        },
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }
    with deepspeed_environment():
        optimizer = task.optimizer_of(module.parameters())
        engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)
    return engine


@cache
def import_deepspeed() -> Any:
    """On this process's gloo group."""
    with deepspeed_environment():
        import deepspeed

        # A kernel for shared memory, which it would compile when it starts; gloo does without.
        getattr(deepspeed.ops, "__compatible_ops__", {})["deepspeed_shm_comm"] = False
        deepspeed.utils.logger.setLevel("ERROR")
        deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    return deepspeed


def deepspeed_environment() -> AbstractContextManager[Any]:
    """What it asks for, and none of it afterwards: Accelerate would take one process for a job of several."""
    local_rank = os.environ.get("LOCAL_RANK", "0")
    return mock.patch.dict(
        os.environ,
        {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": local_rank, "LOCAL_SIZE": str(num_ranks(local=True))},
    )


def zero_weights(engine: Any) -> Tensor:
    import deepspeed

    parameters = list(engine.module.parameters())
    with deepspeed.zero.GatheredParameters(parameters) if engine.zero_optimization_stage() == 3 else nullcontext():
        return torch.cat([p.detach().flatten() for p in parameters]).clone()


# distaccum


def with_distaccum(
    task: Task,
    model: nn.Module,
    optimizer: Any,
    weights: Callable[[nn.Module], Tensor],
    *,
    from_loader: bool = False,
    **options: Any,
) -> Loop:
    """A window of micro-batches that the caller has; or `from_loader`, the next of the loader's windows."""
    loss_of = task.loss_of
    accumulator = Accumulator(model, optimizer, steps=task.steps, **options)

    def run(micro_batches: Sequence[Any]) -> None:
        window = accumulator.window(micro_batches)
        for micro_batch in window:
            window.backward(loss_of(model, micro_batch))
        window.step()

    coming: list[Any] = []

    def loader() -> Iterator[Any]:
        while True:
            yield coming.pop(0)

    windows = accumulator.windows(loader())

    def run_next(micro_batches: Sequence[Any]) -> None:
        coming.extend(micro_batches)
        window = next(windows)
        for micro_batch in window:
            window.backward(loss_of(model, micro_batch))
        window.step()

    return Loop(run_next if from_loader else run, lambda: weights(model))


def plain_distaccum(task: Task, **options: Any) -> Loop:
    optimizer = task.optimizer_of(task.module.parameters())
    return with_distaccum(task, task.module, optimizer, full_weights, **options)


def ddp_distaccum(task: Task, *, views: bool = False, **options: Any) -> Loop:
    model = DistributedDataParallel(task.module, gradient_as_bucket_view=views)
    return with_distaccum(task, model, task.optimizer_of(model.parameters()), full_weights, **options)


def fsdp2_distaccum(task: Task, policy: str) -> Loop:
    model = fully_sharded(task)
    return with_distaccum(task, model, task.optimizer_of(model.parameters()), full_weights, sync=policy)


def zero_distaccum(task: Task, stage: int, policy: str = "last") -> Loop:
    engine = deepspeed_engine(task, stage, 1)
    return with_distaccum(task, engine, None, zero_weights, sync=policy)


def accelerate_distaccum(task: Task) -> Loop:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(task.module, task.optimizer_of(task.module.parameters()))
    loop = with_distaccum(task, model, optimizer, full_weights, accelerator=accelerator)

    def run(micro_batches: Sequence[Any]) -> None:
        accelerator.gradient_accumulation_steps = 1  # as it was made; another contender of the process may have set it
        loop.run(micro_batches)

    return Loop(run, loop.weights)


# All of them

_clipped = {"max_norm": NEVER_CLIPS}
_distaccum_variants: dict[str, dict[str, Any]] = {
    "distaccum": {},
    "distaccum, windows(loader)": {"from_loader": True},
    "distaccum, on_nonfinite='ignore'": {"on_nonfinite": "ignore"},
    "distaccum, max_norm": _clipped,
}


def _alike(engine: str, hand: Callable[..., Loop], library: Callable[..., Loop]) -> list[Contender]:
    """Those that a plain module and DDP have alike."""
    return [
        Contender(engine, "by hand", hand),
        Contender(engine, "by hand, again", hand),
        Contender(engine, "by hand, seeded", partial(hand, seeded=True)),
        Contender(engine, "by hand, clipped", partial(hand, **_clipped)),
        *(Contender(engine, name, partial(library, **options)) for name, options in _distaccum_variants.items()),
        Contender(engine, "distaccum on Accelerate", accelerate_distaccum),
        Contender(engine, "Accelerate", accelerate),
        Contender(engine, "Accelerate, clipped", partial(accelerate, **_clipped)),
        Contender(engine, "Lightning Fabric", lightning_fabric),
        Contender(engine, "Lightning Fabric, clipped", partial(lightning_fabric, **_clipped)),
        Contender(engine, "DeepSpeed 0", partial(deepspeed, stage=0)),
    ]


CONTENDERS = [
    *_alike("plain", plain_by_hand, plain_distaccum),
    *_alike("DDP", ddp_by_hand, ddp_distaccum),
    Contender("DDP, views", "by hand", partial(ddp_by_hand, views=True)),
    Contender("DDP, views", "distaccum", partial(ddp_distaccum, views=True)),
    Contender("DDP, every micro-step", "by hand", partial(ddp_by_hand, every=True)),
    Contender("DDP, every micro-step", "distaccum", partial(ddp_distaccum, sync="every")),
    *(
        Contender(f"FSDP2, {policy}", name, partial(loop, policy=policy))
        for policy in ("last", "every", "gathered")
        for name, loop in {"by hand": fsdp2_by_hand, "distaccum": fsdp2_distaccum}.items()
    ),
    Contender("ZeRO 0", "DeepSpeed", partial(deepspeed, stage=0)),
    Contender("ZeRO 0", "distaccum", partial(zero_distaccum, stage=0)),
    Contender("ZeRO 1", "DeepSpeed", partial(deepspeed, stage=1)),
    Contender("ZeRO 1", "distaccum", partial(zero_distaccum, stage=1)),
    *(
        Contender(f"ZeRO {stage}, {policy}", name, loop)
        for stage in (2, 3)
        for policy in ("last", "every")
        for name, loop in {
            "DeepSpeed": partial(deepspeed, stage=stage, coalesced=policy == "last"),
            "distaccum": partial(zero_distaccum, stage=stage, policy=policy),
        }.items()
    ),
]


def one_of(engine: str, name: str) -> Contender:
    return next(one for one in CONTENDERS if (one.engine, one.name) == (engine, name))


def some_of(engine: str, *names: str) -> list[Contender]:
    return [one_of(engine, name) for name in names]


def versions() -> dict[str, str]:
    """Of the other libraries, all of which must be there."""
    try:
        return {name: metadata.version(name) for name in OTHERS}
    except metadata.PackageNotFoundError as missing:
        raise SystemExit(f"{missing.name} is not installed; pip install {' '.join(OTHERS)}") from None


def num_ranks(*, local: bool = False) -> int:
    """Of this job, or of it on this node."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    return int(os.environ.get("LOCAL_WORLD_SIZE", ranks)) if local else ranks


def as_torchrun() -> None:
    """The environment that torchrun makes, for a rank of this node whose group is there."""
    rank, ranks = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update({"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks})


def be_quiet() -> None:
    """Of what others warn of, and say of themselves, when they are made."""
    warnings.simplefilter("ignore")
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # else Accelerate says that it set it
    torch.set_num_threads(1)


# The check

CHECKED_STEPS, CHECKED_UPDATES, CHECKED_LR = 3, 2, 1.0


def errors(chosen: Sequence[Contender]) -> dict[str, float]:
    """How far two updates of each take the weights from where two big batches do, in parts of the way, on this rank."""
    be_quiet()
    ranks = num_ranks()
    if ranks > 1:
        as_torchrun()
    expected = moved_by_big_batches(ranks)
    found = {}
    for contender in chosen:
        net = checked_net()
        task = Task(net, checked_loss, partial(SGD, lr=CHECKED_LR), CHECKED_STEPS, layers=(net[0], net[2]))
        before = torch.cat([p.detach().flatten() for p in net.parameters()]).clone()
        loop = contender.set_up(task)
        for index in range(CHECKED_UPDATES):
            loop.run(checked_batches(index, dist.get_rank() if ranks > 1 else 0))
        moved = (loop.weights() - before).double()
        found[str(contender)] = ((moved - expected).norm() / expected.norm()).item()
    return found


def checked_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))


def checked_loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def checked_batches(index: int, rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 * index + rank)
    return [torch.randn(8, 16, generator=generator) for _ in range(CHECKED_STEPS)]


def moved_by_big_batches(ranks: int) -> Tensor:
    net = checked_net().double()
    parameters = list(net.parameters())
    before = nn.utils.parameters_to_vector(parameters).detach().clone()
    optimizer = SGD(parameters, lr=CHECKED_LR)
    for index in range(CHECKED_UPDATES):
        batch = torch.cat([x for rank in range(ranks) for x in checked_batches(index, rank)]).double()
        optimizer.zero_grad()
        checked_loss(net, batch).backward()
        optimizer.step()
    return nn.utils.parameters_to_vector(parameters).detach() - before


def errors_of(names: Sequence[str]) -> dict[str, float]:
    """By name, which travels to a rank where a loop does not."""
    return errors([one for one in CONTENDERS if str(one) in names])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--check", action="store_true", help="compare two updates of each with those of big batches, in float64"
    )
    parser.add_argument("--ranks", type=int, default=2, metavar="N", help="for those on ranks (%(default)s)")
    parser.add_argument("--only", default="", metavar="REGEX", help="in 'engine, name', such as '^DDP|ZeRO 2'")
    options = parser.parse_args()
    if options.ranks < 2:
        parser.error(f"--ranks {options.ranks}: a group takes 2 or more; what runs in one process is checked anyway")
    try:
        chosen = [one for one in CONTENDERS if re.search(options.only, str(one))]
    except re.error as wrong:
        parser.error(f"--only {options.only}: {wrong}")
    if not chosen:
        parser.error(f"--only {options.only}: no contender has that; without options all are listed")
    if not options.check:
        print("\n".join(map(str, chosen)))
        return 0
    alone = [one for one in chosen if not one.on_ranks]
    shared = [str(one) for one in chosen if one.on_ranks]
    found = [(1, errors(alone))] if alone else []
    if shared:
        each = in_ranks(options.ranks, errors_of, shared, seconds=300)
        found.append((options.ranks, {name: max(one[name] for one in each) for name in shared}))
    print("| contender | ranks | off by |\n| --- | --: | --: |")
    print("\n".join(f"| {name} | {num} | {off:.1e} |" for num, part in found for name, off in part.items()))
    wrong = [name for _, part in found for name, off in part.items() if not off <= BOUND]
    if wrong:
        print(f"not as the big batches: {'; '.join(wrong)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
