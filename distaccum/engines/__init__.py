"""What differs between the wrappers of a model: an engine each, chosen once by type."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn

from ..meshes.pipeline import Pipeline, schedule_in
from ..wrappers import deepspeed, fsdp1  # noqa: F401  # an engine is found as a subclass
from . import ddp, fsdp2  # noqa: F401
from .base import Engine, Sync
from .plain import PlainEngine
from .ranks import RanksEngine
from .shards import num_ranks_of_meshes
from .unwrapped import UnwrappedEngine

__all__ = ["Engine", "RanksEngine", "Sync", "choose_engine", "known_engines"]

# Unsupported wrappers that would be taken for a plain module, by the name of a class and of its package.
UNKNOWN = {
    ("DDP", "torch"): "DistributedDataParallel(module) in the place of composable replicate()",
    ("DataParallel", "torch"): "DistributedDataParallel, also for one process per GPU on one machine",
    ("PipelineEngine", "deepspeed"): "DeepSpeed without pipeline stages",
    ("DistributedDataParallel", "megatron"): "torch's DistributedDataParallel",
    ("DistributedDataParallel", "apex"): "torch's DistributedDataParallel",
    ("FullyShardedDataParallel", "fairscale"): "torch's fully_shard",
    ("ShardedDataParallel", "fairscale"): "torch's fully_shard",
    ("XlaFullyShardedDataParallel", "torch_xla"): "torch's fully_shard",
}


def choose_engine(models: Sequence[nn.Module], sync: Sync, mesh: Any = None) -> Engine:
    """`models`: modules, or a pipeline's schedule. `mesh`: the dimensions of a DeviceMesh that carry data; by default
    all ranks that an engine reduces over.
    """
    schedule = schedule_in(models)
    if schedule is None:
        engine = _engine_for(models, sync)
    else:
        pipeline = Pipeline(schedule)
        parts = max(1, num_ranks_of_meshes(module for stage in pipeline.modules for module in stage.modules()))
        engine = _engine_for(pipeline.modules, sync, lambda ranks: pipeline.group.size() * parts == ranks)
        engine.follow(pipeline)
    if mesh is not None:
        engine.peers.cut_samples(mesh.mesh.flatten().tolist(), engine.name)
    return engine


def _engine_for(
    models: Sequence[nn.Module], sync: Sync, share_samples: Callable[[int], bool] = lambda ranks: False
) -> Engine:
    """`share_samples`: whether this many ranks, all of the job, are known to have the same."""
    modules = [module for model in models for module in model.modules()]
    engines = known_engines()
    for module in modules:
        for ancestor in type(module).__mro__:
            cure = UNKNOWN.get((ancestor.__name__, ancestor.__module__.partition(".")[0]))
            if cure is not None:
                raise ValueError(
                    f"the model is wrapped by {ancestor.__module__}.{ancestor.__name__}, which has no engine here; "
                    f"use {cure}. There are engines for {_names_of(engines)}"
                )
    found = {engine for engine in engines for module in modules if engine.wraps(module)}
    if len(found) > 1:
        raise ValueError(
            f"the models are wrapped by {_names_of(sorted(found, key=lambda engine: engine.name))}, expected one kind; "
            "give each kind an Accumulator of its own"
        )
    if found:
        return found.pop()(models, sync)
    ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if ranks > 1:
        if num_ranks_of_meshes(modules) == ranks or share_samples(ranks):
            return UnwrappedEngine(models, sync)
        raise ValueError(f"{_refusal_of_plain(modules, ranks)}. There are engines for {_names_of(engines)}")
    return PlainEngine(models, sync)


def _refusal_of_plain(modules: Sequence[nn.Module], ranks: int) -> str:
    why = f"in a job of {ranks} ranks: nothing would reduce its gradients and the ranks would drift apart"
    is_parallel = any(hasattr(p, "to_local") for module in modules for p in module.parameters(recurse=False))
    what = f"{'a tensor-parallel module alone' if is_parallel else 'a plain module'} {why}"
    if any(ancestor.__name__ == "LightningModule" for module in modules for ancestor in type(module).__mro__):
        cure = "Lightning keeps its wrapper beside the LightningModule: give the Accumulator trainer.strategy.model"
    elif is_parallel:
        cure = (
            "its parameters do not lie over all ranks, so say which ranks have which data: make one mesh of all with "
            "init_device_mesh(device, (data, tensor), mesh_dim_names=('data', 'tensor')), parallelize over "
            "mesh['tensor'], and wrap with fully_shard(module, mesh=mesh['data'])"
        )
    else:
        cure = "wrap it in DistributedDataParallel, and give the Accumulator the wrapper and not the module in it"
    return f"{what}; {cure}"


def known_engines() -> list[type[Engine]]:
    """Those of this package, and all others that are defined."""
    return list(_final(Engine))  # type: ignore[type-abstract]  # those under it are final


def _final(engine: type[Engine]) -> Iterator[type[Engine]]:
    """The final classes under `engine`, those defined outside of this package too."""
    below = engine.__subclasses__()
    if not below:
        yield engine
    for one in below:
        yield from _final(one)


def _names_of(engines: Sequence[type[Engine]]) -> str:
    *names, last = [engine.name for engine in engines]
    return f"{', '.join(names)} and {last}" if names else last
