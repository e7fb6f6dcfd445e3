"""Each engine, tried on a layer."""

from __future__ import annotations

import dataclasses
import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD

from ...accumulator import Accumulator
from ...engines import Engine, choose_engine, known_engines
from ...law import DistaccumError
from .findings import Finding
from .job import Job

TOLERANCE = 1e-4  # relative, of a gradient's norm in float32
Wrapped = tuple[nn.Module, Any, dict[str, Any]]  # model, optimizer, more options of the Accumulator
Wrap = Callable[[nn.Module], Wrapped]
Trial = Callable[[Job], str]  # what was seen


def _with_sgd(model: nn.Module) -> Wrapped:
    return model, SGD(model.parameters(), lr=0.1), {}


def _fsdp1(net: nn.Module) -> Wrapped:
    from torch.distributed.fsdp import FullyShardedDataParallel

    device = next(net.parameters()).device
    return _with_sgd(FullyShardedDataParallel(net, device_id=device, use_orig_params=True))


def _fully_sharded(net: nn.Module) -> Wrapped:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    kind = next(net.parameters()).device.type
    fully_shard(net, mesh=init_device_mesh(kind, (dist.get_world_size(),)))
    return _with_sgd(net)


def _zero(net: nn.Module) -> Wrapped:
    """ZeRO 2. What DeepSpeed needs in the environment is taken out again: Accelerate would believe in a launcher."""
    kind = next(net.parameters()).device.type
    variables = {"LOCAL_RANK": os.environ.get("LOCAL_RANK", "0")}
    if kind == "cpu":  # else it looks for a GPU
        variables |= {
            "DS_ACCELERATOR": "cpu",
            "LOCAL_SIZE": os.environ.get("LOCAL_WORLD_SIZE", str(dist.get_world_size())),
        }
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        import deepspeed

        if kind == "cpu":  # it would compile a kernel for shared memory; gloo needs none
            getattr(deepspeed.ops, "__compatible_ops__", {})["deepspeed_shm_comm"] = False
        deepspeed.utils.logger.setLevel("ERROR")
        deepspeed.init_distributed(dist_backend="nccl" if kind == "cuda" else "gloo", verbose=False)
        engine, optimizer, *_ = deepspeed.initialize(
            model=net, optimizer=SGD(net.parameters(), lr=0.1), config=ZERO_CONFIG
        )
    finally:
        os.environ.clear()
        os.environ.update(before)
    return engine, optimizer, {}


def _accelerated(net: nn.Module) -> Wrapped:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=next(net.parameters()).device.type == "cpu")
    model, optimizer = accelerator.prepare(net, SGD(net.parameters(), lr=0.1))
    return model, optimizer, {"accelerator": accelerator}


WRAPS: Mapping[str, Wrap] = {  # by engine
    "PlainEngine": _with_sgd,
    "DDPEngine": lambda net: _with_sgd(nn.parallel.DistributedDataParallel(net)),
    "FSDPEngine": _fsdp1,
    "FullyShardEngine": _fully_sharded,
    "DeepSpeedEngine": _zero,
}
ZERO_CONFIG = {
    "train_micro_batch_size_per_gpu": 2,  # only its log uses it
    "zero_optimization": {"stage": 2, "overlap_comm": False},
    "zero_allow_untested_optimizer": True,
    "gradient_clipping": 0.0,  # its default of 1.0 clips
    "steps_per_print": 10**9,
}


def try_engines(job: Job, all_of_them: bool) -> Iterator[Finding]:
    """Whether a window of each engine, under each of its policies, has the norm of the big batch's gradient."""
    about = f"engines, each tried on {job.world} {'rank' if job.world == 1 else 'ranks'} on {job.kind}"
    failed = ""
    trials = list(_trials(job, all_of_them))
    on_ranks = job.gather({name: cannot and dataclasses.asdict(cannot) for name, _, cannot in trials})
    for name, trial, _ in trials:
        cannot = _untried_on_any(name, on_ranks)  # a rank that tried alone would wait for the others
        if cannot is not None:
            yield dataclasses.replace(cannot, about=about, name=name)
            continue
        if failed:
            yield Finding(about, name, f"not tried, since {failed} failed", "absent")
            continue
        try:
            seen, wrong = trial(job), ""
        except Exception as error:
            seen, wrong = "", f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        try:  # a rank that waits in a collective gives up later than one that failed before it
            all_wrong = [one for one in job.gather(wrong, patience=1.5) if one]
        except DistaccumError as error:
            job.whole = False
            yield Finding(about, name, "; ".join(filter(None, [wrong, str(error)])), "wrong")
            return
        if all_wrong:
            yield Finding(about, name, all_wrong[0], "wrong", "see docs/limits.md, or another version of it")
            failed = name if job.world > 1 else ""  # some ranks may still be inside a collective
        else:
            yield Finding(about, name, seen)


def _untried_on_any(name: str, on_ranks: Sequence[Mapping[str, dict[str, Any] | None]]) -> Finding | None:
    """Why no rank tries this engine, by the reasons of each rank; None if all can."""
    unknown = dataclasses.asdict(Finding("", "", "unknown", "absent"))
    reasons = [one.get(name, unknown) for one in on_ranks]
    first = next(filter(None, reasons), None)
    if first is None:
        return None
    alike = [str(rank) for rank, one in enumerate(reasons) if one == first]
    where = "" if len(alike) == len(reasons) else f" on rank {', '.join(alike)}"
    return Finding(**{**first, "seen": first["seen"] + where})


def _trials(job: Job, all_of_them: bool) -> Iterator[tuple[str, Trial, Finding | None]]:
    """Name, trial, and the finding if it is not tried."""
    order = list(WRAPS)
    known = sorted(known_engines(), key=lambda one: order.index(one.__name__) if one.__name__ in order else len(order))
    for engine in known:
        if engine.__name__ != "UnwrappedEngine":  # of tensor-parallel modules, which need a mesh of the job's own
            wrapping = WRAPS.get(engine.__name__, _with_sgd)
            yield engine.name, partial(_tried, wrapping), _untried(engine, job, all_of_them)
    yield "what Accelerate prepared", partial(_tried, _accelerated), untried_package("accelerate", all_of_them)


def _untried(engine: type[Engine], job: Job, all_of_them: bool) -> Finding | None:
    name = engine.__name__
    if name not in WRAPS:
        return Finding("", "", f"of {engine.__module__}; the doctor does not know how to wrap for it", "absent")
    if name == "PlainEngine" and job.world > 1:
        return Finding("", "", "for one process", "absent", "wrap the model in DistributedDataParallel")
    return untried_package("deepspeed", all_of_them) if name == "DeepSpeedEngine" else None


def untried_package(package: str, all_of_them: bool) -> Finding | None:
    if find_spec(package) is None:
        return Finding("", "", f"{package} is not installed", "absent", f"pip install 'distaccum[{package}]'")
    if not all_of_them:
        return Finding("", "", f"{package} is installed; --all tries it (about 20 seconds)", "absent")
    return None


def _tried(wrapping: Wrap, job: Job) -> str:
    """The abilities of an engine, after a window under each of its policies."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine = choose_engine([wrapping(_layer().to(job.device))[0]], "last")
        for sync in engine.policies:
            model, optimizer, options = wrapping(_layer().to(job.device))
            accumulator = Accumulator(model, optimizer, steps=2, sync=sync, max_norm=math.inf, **options)
            for window in accumulator.windows(one.to(job.device) for one in _micro_batches(job.rank)):
                for inputs in window:
                    window.backward(model(inputs).square().mean())
                norm = window.step().grad_norm
            expected = _expected_norm(job.world)
            if norm is None or not abs(norm - expected) <= TOLERANCE * expected:
                raise DistaccumError(f"the gradient's norm is {norm} under sync={sync!r}, expected {expected:.6g}")
    seen = [f"sync={', '.join(map(repr, engine.policies))}"]
    seen += ["owns the step"] if engine.owns_step else []
    seen += [str(one.message).split(": ")[0] for one in caught if "reduces gradients in each" in str(one.message)][:1]
    return "; ".join(seen)


def _layer() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(4, 1)


def _micro_batches(rank: int) -> list[torch.Tensor]:
    """3 and 2 samples, different on each rank."""
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(size, 4, generator=generator) for size in (3, 2)]


def _expected_norm(world: int) -> float:
    """Of the gradient of one big batch of all ranks."""
    net = _layer()
    net(torch.cat([one for rank in range(world) for one in _micro_batches(rank)])).square().mean().backward()
    return math.hypot(*(float(p.grad.norm()) for p in net.parameters() if p.grad is not None))
