"""Choosing: the engine for the wrapper that a model has, and adapters for libraries. Nothing else knows all of them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn

from .adapter import Adapter, Prepared
from .engines import Engine, Sync, registered
from .engines.base import PlainEngine
from .engines.ddp import DDPEngine
from .engines.fsdp2 import FullyShardEngine
from .engines.unwrapped import UnwrappedEngine
from .meshes.pipeline import Pipeline
from .meshes.ranks import on_mesh
from .meshes.sharing import refuse_unclaimed_ranks
from .options import as_list

# Unsupported wrappers that would otherwise be taken for plain modules, by package; replicate() makes a torch DDP.
UNKNOWN = {
    "torch": ("DDP", "DataParallel"),
    "fairscale": ("FullyShardedDataParallel", "ShardedDataParallel"),
    "megatron": ("DistributedDataParallel",),
    "apex": ("DistributedDataParallel",),
    "deepspeed": ("PipelineEngine",),
    "torch_xla": ("XlaFullyShardedDataParallel",),
}


def _fsdp1() -> type[Engine]:
    from .wrappers.fsdp1 import FSDPEngine

    return FSDPEngine


def _deepspeed() -> type[Engine]:
    from .wrappers.deepspeed import DeepSpeedEngine

    return DeepSpeedEngine


# Engines that are imported when a model holds a wrapper of this name, since their libraries take long to import.
HEAVY = {"FullyShardedDataParallel": _fsdp1, "DeepSpeedEngine": _deepspeed}


def choose_engine(given: Prepared, sync: Sync, mesh: Any = None) -> Engine:
    """The engine for the wrapper that models hold (modules, or a schedule); `mesh`: dimensions that carry data."""
    models = given.models
    if all(isinstance(model, nn.Module) for model in models):
        engine = _engine_of(models, sync)
    else:
        pipeline = Pipeline(models, given.adapters)
        engine = _engine_of(pipeline.modules, sync, pipeline.group.size())
        pipeline.join(engine)
    if mesh is not None:
        engine.peers = on_mesh(engine.peers)
        engine.peers.cut_samples(mesh.mesh.flatten().tolist(), engine.name)
    sizes = [p.device_mesh.size() for p in engine.parameters() if hasattr(p, "device_mesh")]
    if mesh is not None or any(size < dist.get_world_size() for size in sizes):
        refuse_unclaimed_ranks(engine, mesh)
    return engine


def _engine_of(models: Sequence[nn.Module], sync: Sync, num_stages: int = 1) -> Engine:
    """The engine for these modules; `num_stages`: how many ranks are known to compute on the same samples."""
    modules = [module for model in models for module in model.modules()]
    kinds = {kind for module in modules for kind in type(module).__mro__}
    names = {kind.__name__ for kind in kinds}
    wrapping = _wrapping(modules, registered)
    for kind in () if wrapping else kinds:
        if kind.__name__ in UNKNOWN.get(kind.__module__.partition(".")[0], ()):
            raise ValueError(
                f"the model is wrapped by {kind.__module__}.{kind.__name__}, which has no engine here; use torch's "
                f"DistributedDataParallel(module) or fully_shard. There are engines for {_names_of(known_engines())}"
            )
    heavy = [imported() for wrapper, imported in HEAVY.items() if wrapper in names]
    wrapping = wrapping or _wrapping(modules, [DDPEngine, FullyShardEngine, *heavy])
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
        return UnwrappedEngine(models, sync)
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
        f"{cure}. There are engines for {_names_of(known_engines())}; an engine of your own needs @register"
    )


def _wrapping(modules: Sequence[nn.Module], engines: Sequence[type[Engine]]) -> set[type[Engine]]:
    return {engine for engine in engines for module in modules if engine.wraps(module)}


def known_engines() -> list[type[Engine]]:
    return [PlainEngine, DDPEngine, FullyShardEngine, *registered, *(imported() for imported in HEAVY.values())]


def _names_of(engines: Iterable[type[Engine]]) -> str:
    return " and ".join(sorted(engine.name for engine in engines))


def adapters_for(accelerator: Any) -> list[Adapter]:
    """The adapters of libraries that the caller has imported."""
    as_list("accelerator", None if accelerator is None else [accelerator], "distributed_type")
    adapters: list[Adapter] = []
    if accelerator is not None or "accelerate" in sys.modules:
        from .wrappers.accelerate import Accelerated

        adapters.append(Accelerated(accelerator))
    if "lightning_fabric" in sys.modules or "lightning" in sys.modules:
        from .wrappers.fabric import FromFabric

        adapters.append(FromFabric(accelerator))
    return adapters
