"""The loops that the benchmarks compare: each library's, as documented, and one by hand for each engine.

    python launch/bench/contenders.py  # lists them

    task = Task(net, loss_of, optimizer_of, steps=8, layers=(net[0], net[2]))  # a fresh net for each loop
    loop = one_of("DDP", "distaccum").set_up(task)
    loop.run(micro_batches)  # one whole update: forwards, backwards, reduction, step, clearing

All take the same micro-batches on the CPU and end with the same weights, as tests/launch/test_bench.py shows. On ranks
they expect a gloo group and torchrun's environment variables (`as_torchrun` sets them).
"""

from __future__ import annotations

import itertools
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import wrappers

from distaccum import Accumulator

NEVER_CLIPS = 1e6  # the norm is computed but never reached, so loops that clip end with the same weights
OTHERS = ("accelerate", "lightning-fabric", "deepspeed")
Unreduced = Callable[[Any], AbstractContextManager[None]]


@dataclass(frozen=True)
class Task:
    """The work of one contender, which wraps `module`: each contender gets its own task."""

    module: nn.Module
    loss_of: Callable[[nn.Module, Any], Tensor]  # (wrapped module, micro-batch) -> the mean over its samples
    optimizer_of: Callable[[Iterable[nn.Parameter]], Optimizer]
    steps: int  # micro-batches of an update on each rank, all of one size
    layers: tuple[nn.Module, ...] = ()  # parts of `module` that fully_shard wraps one by one


@dataclass(frozen=True)
class Loop:
    run: Callable[[Sequence[Any]], object]  # `steps` micro-batches of this rank: one whole update
    weights: Callable[[], Tensor]  # all of them in one vector, on every rank


@dataclass(frozen=True)
class Contender:
    """A loop; `engine` names its wrapper and when it reduces."""

    engine: str
    name: str
    set_up: Callable[[Task], Loop]

    @property
    def on_ranks(self) -> bool:
        return self.engine != "plain"

    def __str__(self) -> str:
        return f"{self.engine}, {self.name}"


# By hand


def by_hand(
    task: Task, model: nn.Module, unreduced: Unreduced, *, max_norm: float | None = None, in_place: bool = False
) -> Loop:
    """Runs all micro-steps but the last in `unreduced(model)`."""
    loss_of, steps = task.loss_of, task.steps
    parameters = list(model.parameters())
    optimizer = task.optimizer_of(parameters)

    def run(micro_batches: Sequence[Any]) -> None:
        *early, last = micro_batches
        with unreduced(model) if early else nullcontext():
            for micro_batch in early:
                (loss_of(model, micro_batch) / steps).backward()
        (loss_of(model, last) / steps).backward()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(parameters, max_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=not in_place)

    return Loop(run, lambda: full_weights(model))


def plain_by_hand(task: Task, **options: Any) -> Loop:
    return by_hand(task, task.module, at_once, **options)


def ddp_by_hand(task: Task, *, every: bool = False, views: bool = False, **options: Any) -> Loop:
    model = wrappers.ddp(task.module, gradient_as_bucket_view=views)
    # Setting them to None would drop the views of the buckets, and the memory that they save.
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
    # Adding set_is_last_backward(False) made the last backward prefetch a layer twice: one more gather per window.
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
    return wrappers.fully_sharded(task.module, task.layers, reshard_after_forward=reshard_after_forward)


def full_weights(model: nn.Module) -> Tensor:
    whole = (p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters())
    return torch.cat([p.detach().flatten() for p in whole]).clone()


# Other libraries


def accelerate(task: Task, *, max_norm: float | None = None, cpu: bool = True, **options: Any) -> Loop:
    loss_of, steps = task.loss_of, task.steps
    optimizer = task.optimizer_of(task.module.parameters())
    accelerator, model, optimizer = wrappers.accelerated(
        task.module, optimizer, cpu=cpu, gradient_accumulation_steps=steps, **options
    )

    def run(micro_batches: Sequence[Any]) -> None:
        accelerator.gradient_accumulation_steps = steps  # shared by all in the process: an entry of a dict
        for micro_batch in micro_batches:
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, micro_batch))
                if max_norm is not None and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), max_norm)
                optimizer.step()
                optimizer.zero_grad()

    return Loop(run, lambda: full_weights(model))


def lightning_fabric(task: Task, *, max_norm: float | None = None, accelerator: str = "cpu", **options: Any) -> Loop:
    try:
        from lightning_fabric import Fabric
    except ImportError:  # the package `lightning` has it under another name
        from lightning.fabric import Fabric

    loss_of, steps = task.loss_of, task.steps
    ranks, local = num_ranks(), num_ranks(local=True)
    options |= {"devices": local, "num_nodes": ranks // local, "strategy": "ddp" if ranks > 1 else "auto"}
    fabric = Fabric(accelerator=accelerator, **options)
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


def deepspeed(task: Task, stage: int, *, coalesced: bool = False, **config: Any) -> Loop:
    """Lets DeepSpeed divide by `gradient_accumulation_steps` and find the window's end; coalesced, the caller does."""
    loss_of, steps = task.loss_of, task.steps
    engine = deepspeed_engine(task, stage, 1 if coalesced else steps, **config)

    def run(micro_batches: Sequence[Any]) -> None:
        for micro_batch in micro_batches:
            engine.backward(loss_of(engine, micro_batch))
            engine.step()

    def run_coalesced(micro_batches: Sequence[Any]) -> None:
        with engine.coalesce_grad_reduction():
            for micro_batch in micro_batches:
                engine.backward(loss_of(engine, micro_batch) / steps)
        engine.step()

    return Loop(run_coalesced if coalesced else run, lambda: wrappers.zero_weights(engine))


def deepspeed_engine(task: Task, stage: int, steps: int, **config: Any) -> Any:
    parameters = list(task.module.parameters())
    if not dist.is_initialized():
        backend = "nccl" if parameters[0].is_cuda else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    one_bucket = max(1000, sum(p.numel() for p in parameters))
    config["zero_optimization"] = {"stage": stage, "reduce_bucket_size": one_bucket}
    config = wrappers.zero_config(stage, gradient_accumulation_steps=steps, **config)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return wrappers.deepspeed(task.module, task.optimizer_of(parameters), config)[0]


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
    """Runs a window of the caller's micro-batches, or with `from_loader` the loader's next window."""
    accumulator = Accumulator(model, optimizer, steps=task.steps, **options)
    given: Sequence[Any] = ()
    windows: Iterator[Any] = iter(())

    def run(micro_batches: Sequence[Any]) -> None:
        nonlocal given, windows
        if from_loader and micro_batches is not given:  # otherwise the loader was read ahead in the last window
            given = micro_batches
            windows = accumulator.windows(itertools.cycle(micro_batches))
        window = next(windows) if from_loader else accumulator.window(micro_batches)
        for micro_batch in window:
            window.backward(task.loss_of(model, micro_batch))
        window.step()

    return Loop(run, lambda: weights(model))


def plain_distaccum(task: Task, **options: Any) -> Loop:
    optimizer = task.optimizer_of(task.module.parameters())
    return with_distaccum(task, task.module, optimizer, full_weights, **options)


def ddp_distaccum(task: Task, *, views: bool = False, **options: Any) -> Loop:
    model = wrappers.ddp(task.module, gradient_as_bucket_view=views)
    return with_distaccum(task, model, task.optimizer_of(model.parameters()), full_weights, **options)


def fsdp2_distaccum(task: Task, policy: str) -> Loop:
    model = fully_sharded(task)
    return with_distaccum(task, model, task.optimizer_of(model.parameters()), full_weights, sync=policy)


def zero_distaccum(task: Task, stage: int, policy: str = "last") -> Loop:
    engine = deepspeed_engine(task, stage, 1)
    return with_distaccum(task, engine, None, wrappers.zero_weights, sync=policy)


def accelerate_distaccum(task: Task) -> Loop:
    optimizer = task.optimizer_of(task.module.parameters())
    accelerator, model, optimizer = wrappers.accelerated(task.module, optimizer, cpu=True)
    loop = with_distaccum(task, model, optimizer, full_weights, accelerator=accelerator)

    def run(micro_batches: Sequence[Any]) -> None:
        accelerator.gradient_accumulation_steps = 1  # as at first; another contender in the process may have set it
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
    """The contenders that exist both for a plain module and for DDP."""
    return [
        Contender(engine, "by hand", hand),
        Contender(engine, "by hand, again", hand),
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
    *(
        Contender(f"FSDP2, {policy}", name, partial(loop, policy=policy))
        for policy in ("last", "every", "gathered")
        for name, loop in {"by hand": fsdp2_by_hand, "distaccum": fsdp2_distaccum}.items()
    ),
    *(
        Contender(f"ZeRO {stage}", name, partial(loop, stage=stage))
        for stage in (0, 1)
        for name, loop in {"DeepSpeed": deepspeed, "distaccum": zero_distaccum}.items()
    ),
    Contender("ZeRO 2, last", "DeepSpeed", partial(deepspeed, stage=2, coalesced=True)),
    Contender("ZeRO 2, last", "distaccum", partial(zero_distaccum, stage=2)),
    *(Contender(f"ZeRO {n}, every", "distaccum", partial(zero_distaccum, stage=n, policy="every")) for n in (2, 3)),
]


def one_of(engine: str, name: str) -> Contender:
    return next(contender for contender in CONTENDERS if (contender.engine, contender.name) == (engine, name))


def some_of(engine: str, *names: str) -> list[Contender]:
    return [one_of(engine, name) for name in names]


def versions() -> dict[str, str]:
    """Versions of the other libraries, all of which must be installed."""
    try:
        return {name: metadata.version(name) for name in OTHERS}
    except metadata.PackageNotFoundError as missing:
        raise SystemExit(f"{missing.name} is not installed; pip install {' '.join(OTHERS)}") from None


def named(chosen: Sequence[Contender], parts: Sequence[str]) -> list[Contender]:
    """Those whose name contains one of the parts, or all if there are none; --only takes them."""
    for part in parts:
        if not any(part in str(contender) for contender in chosen):
            raise ValueError(f"--only {part}: in none of {'; '.join(map(str, chosen))}")
    return [contender for contender in chosen if not parts or any(part in str(contender) for part in parts)]


def num_ranks(*, local: bool = False) -> int:
    """The number of ranks in this job, or on this node."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    return int(os.environ.get("LOCAL_WORLD_SIZE", ranks)) if local else ranks


def as_torchrun() -> None:
    """Sets torchrun's environment variables for this rank; its group exists already."""
    rank, ranks = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update({"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks})


def be_quiet() -> None:
    """Silences other libraries' messages at set-up."""
    warnings.simplefilter("ignore")
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # otherwise Accelerate sets it and says so
    torch.set_num_threads(1)


if __name__ == "__main__":
    print("\n".join(map(str, CONTENDERS)))
