"""Engines: the differences between wrappers of a model, chosen once by type."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn

from ..doors import opened
from .base import Engine, PlainEngine, Sync
from .ddp import DDPEngine
from .fsdp2 import FullyShardEngine

__all__ = ["Engine", "Sync", "choose_engine", "known_engines", "register"]

_REGISTERED: list[type[Engine]] = []
# Engines outside the core, by the name of the wrapper's class: opened when a model holds one.
OUTSIDE = {"FullyShardedDataParallel": "FSDPEngine", "DeepSpeedEngine": "DeepSpeedEngine"}
# Unsupported wrappers that would otherwise be taken for plain modules, by package; replicate() makes a torch DDP.
UNKNOWN = {
    "torch": ("DDP", "DataParallel"),
    "fairscale": ("FullyShardedDataParallel", "ShardedDataParallel"),
    "megatron": ("DistributedDataParallel",),
    "apex": ("DistributedDataParallel",),
    "deepspeed": ("PipelineEngine",),
    "torch_xla": ("XlaFullyShardedDataParallel",),
}
Kind = TypeVar("Kind", bound=type[Engine])


def register(engine: Kind) -> Kind:
    """Class decorator: makes Accumulators try the `wraps` of your engine, before those of the library's own."""
    if engine not in _REGISTERED:
        _REGISTERED.append(engine)
    return engine


def choose_engine(models: Sequence[Any], sync: Sync, mesh: Any = None) -> Engine:
    """The engine for the wrapper that `models` hold (modules, or a schedule); `mesh`: dimensions that carry data."""
    if all(isinstance(model, nn.Module) for model in models):
        engine = _engine_of(models, sync)
    else:
        pipeline = opened("Pipeline")(models)
        engine = _engine_of(pipeline.modules, sync, pipeline.group.size())
        pipeline.join(engine)
    if mesh is not None:
        opened("on_mesh")(engine).cut_samples(mesh.mesh.flatten().tolist(), engine.name)
    sizes = [p.device_mesh.size() for p in engine.parameters() if hasattr(p, "device_mesh")]
    if mesh is not None or any(size < dist.get_world_size() for size in sizes):
        opened("refuse_unclaimed_dimensions")(engine, mesh)
    return engine


def _engine_of(models: Sequence[nn.Module], sync: Sync, num_stages: int = 1) -> Engine:
    """The engine for these modules; `num_stages`: how many ranks are known to compute on the same samples."""
    modules = [module for model in models for module in model.modules()]
    kinds = {kind for module in modules for kind in type(module).__mro__}
    names = {kind.__name__ for kind in kinds}
    wrapping = _wrapping(modules, _REGISTERED)
    for kind in () if wrapping else kinds:
        if kind.__name__ in UNKNOWN.get(kind.__module__.partition(".")[0], ()):
            raise ValueError(
                f"the model is wrapped by {kind.__module__}.{kind.__name__}, which has no engine here; use torch's "
                f"DistributedDataParallel(module) or fully_shard. There are engines for {_names_of(known_engines())}"
            )
    outside = [opened(engine) for wrapper, engine in OUTSIDE.items() if wrapper in names]
    wrapping = wrapping or _wrapping(modules, [DDPEngine, FullyShardEngine, *outside])
    if len(wrapping) > 1:
        raise ValueError(
            f"the models are wrapped by {_names_of(wrapping)}, expected one kind; give each an Accumulator of its own"
        )
    is_job = dist.is_available() and dist.is_initialized()
    ranks = dist.get_world_size() if is_job else 1
    if wrapping:
        engine = wrapping.pop()(models, sync)
        if ranks > 1 and not engine.peers.groups:
            raise ValueError(
                f"{type(engine).__name__} has no group in a job of {ranks} ranks, which would train apart; give "
                "it an __init__(models, sync) that passes the group of the data-parallel ranks to Engine.__init__"
            )
        return engine
    # The package reads no other variable: a launcher that nobody listens to cannot be seen in another way.
    launched = os.environ.get("WORLD_SIZE", "1")
    if not is_job and launched != "1":
        raise ValueError(
            f"WORLD_SIZE={launched} and no process group: each of these ranks would train a model of its own; call "
            "torch.distributed.init_process_group() and wrap the model, as in DistributedDataParallel(model), before "
            "the Accumulator is made (or take WORLD_SIZE out of the environment, if they shall train apart)"
        )
    if ranks == 1:
        return PlainEngine(models, sync)
    sizes = [p.device_mesh.size() for model in models for p in model.parameters() if hasattr(p, "device_mesh")]
    if ranks == num_stages * max(sizes, default=1):
        unwrapped: Engine = opened("UnwrappedEngine")(models, sync)
        return unwrapped
    what, cure = "a plain module", "wrap it in DistributedDataParallel, and give the wrapper and not the module in it"
    if "LightningModule" in names:
        cure = "give the Accumulator trainer.strategy.model, where Lightning keeps its wrapper"
    elif sizes:
        what = "a tensor-parallel module alone"
        cure = (
            "say which ranks have which data: make one mesh of all with init_device_mesh(device, (data, tensor), "
            "mesh_dim_names=('data', 'tensor')), parallelize over mesh['tensor'], and wrap with "
            "fully_shard(module, mesh=mesh['data'])"
        )
    raise ValueError(
        f"{what} in a job of {ranks} ranks: nothing would reduce its gradients and the ranks would drift apart; "
        f"{cure}. There are engines for {_names_of(known_engines())}"
    )


def _wrapping(modules: Sequence[nn.Module], engines: Sequence[type[Engine]]) -> set[type[Engine]]:
    return {engine for engine in engines for module in modules if engine.wraps(module)}


def known_engines() -> list[type[Engine]]:
    return [PlainEngine, DDPEngine, FullyShardEngine, *_REGISTERED, *map(opened, OUTSIDE.values())]


def _names_of(engines: Iterable[type[Engine]]) -> str:
    return " and ".join(sorted(engine.name for engine in engines))
