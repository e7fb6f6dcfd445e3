"""Puts a module into each wrapper that distaccum supports; for the programs here and the tests.

model = ddp(network)
model = fully_sharded(network, network.layers, shape=(2, 4))  # two replicas of four shards
engine, optimizer = deepspeed(network, optimizer, zero_config(2))
accelerator, model, optimizer = accelerated(network, optimizer, cpu=True)
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


def ddp(module: nn.Module, **options: Any) -> nn.parallel.DistributedDataParallel:
    return nn.parallel.DistributedDataParallel(module, **options)


def mesh_of(module: nn.Module, shape: Sequence[int] = ()) -> Any:
    """A mesh over all ranks: `(shards,)`, or `(replicas, shards)`; without a shape, one shard per rank."""
    from torch.distributed.device_mesh import init_device_mesh

    shape = tuple(shape or ()) or (dist.get_world_size(),)
    return init_device_mesh(_device_type(module), shape, mesh_dim_names=("replicas", "shards")[-len(shape) :])


def fully_sharded(
    module: nn.Module,
    parts: Iterable[nn.Module] = (),
    *,
    root: bool = True,
    shape: Sequence[int] = (),
    mesh: Any = None,
    **options: Any,
) -> nn.Module:
    """FSDP2 (`fully_shard`) on each of the module's parts, and then on the module itself if `root`."""
    from torch.distributed.fsdp import fully_shard

    mesh = mesh_of(module, shape) if mesh is None else mesh
    for part in (*parts, *([module] if root else [])):
        fully_shard(part, mesh=mesh, **options)
    return module


def fsdp1(
    module: nn.Module, parts: Iterable[nn.Module] = (), *, root: bool = True, strategy: str = "", **options: Any
) -> nn.Module:
    """FSDP1 around each of the module's parts, and then around the module itself if `root`."""
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    device = next(module.parameters()).device
    options = {"device_id": device, "use_orig_params": True, **options}
    if strategy:
        options["sharding_strategy"] = ShardingStrategy[strategy]
    parts = list(parts)
    for parent in list(module.modules()):
        for name, child in parent.named_children():
            if child in parts:
                setattr(parent, name, FullyShardedDataParallel(child, **options))
    return FullyShardedDataParallel(module, **options) if root else module


def deepspeed(
    module: nn.Module, optimizer: Any, config: dict[str, Any], *, scheduler: Any = None, **options: Any
) -> tuple[Any, Any]:
    """DeepSpeed's engine, which is the model from now on, and its optimizer."""
    device = _device_type(module)
    with deepspeed_environment(device):
        engine, optimizer, *_ = import_deepspeed(device).initialize(
            model=module, optimizer=optimizer, lr_scheduler=scheduler, config=config, **options
        )
    return engine, optimizer


def zero_config(stage: int, **config: Any) -> dict[str, Any]:
    """DeepSpeed's config for a ZeRO stage, without clipping and without its own accumulation; `config` overrides it."""
    return {
        "train_micro_batch_size_per_gpu": 2,  # used only by its log
        "zero_optimization": {"stage": stage, "overlap_comm": False, "reduce_bucket_size": 2 * 10**6},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,  # its default of 1.0 clips
        "steps_per_print": 10**9,
        **config,
    }


def import_deepspeed(device: str = "cpu") -> Any:
    """Imports the package, silenced and in this process's group; makes the group if there is none."""
    with deepspeed_environment(device):
        import deepspeed

        if device == "cpu":  # it would first compile a kernel for shared memory; gloo needs none
            getattr(deepspeed.ops, "__compatible_ops__", {})["deepspeed_shm_comm"] = False
        deepspeed.utils.logger.setLevel("ERROR")
        deepspeed.init_distributed(dist_backend="nccl" if device == "cuda" else "gloo", verbose=False)
    return deepspeed


def zero_weights(engine: Any) -> Tensor:
    """All weights of a DeepSpeed engine in one vector, on every rank."""
    import deepspeed

    parameters = list(engine.module.parameters())
    with deepspeed.zero.GatheredParameters(parameters) if engine.zero_optimization_stage() == 3 else nullcontext():
        return torch.cat([p.detach().flatten() for p in parameters]).clone()


def deepspeed_variables(device: str = "cpu") -> dict[str, str]:
    """The environment variables that DeepSpeed reads when it is imported and when an engine is made."""
    variables = {"LOCAL_RANK": os.environ.get("LOCAL_RANK", "0")}
    if device == "cpu":  # without them it looks for a GPU
        world = dist.get_world_size() if dist.is_initialized() else 1
        variables |= {"DS_ACCELERATOR": "cpu", "LOCAL_SIZE": os.environ.get("LOCAL_WORLD_SIZE", str(world))}
    return variables


@contextmanager
def deepspeed_environment(device: str = "cpu") -> Iterator[None]:
    """Sets these variables for the block, and restores the old ones: Accelerate would take them for a launcher's."""
    wanted = deepspeed_variables(device)
    before = {name: os.environ[name] for name in wanted if name in os.environ}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name in wanted:
            os.environ.pop(name, None)
        os.environ.update(before)


def accelerated(module: nn.Module, optimizer: Any, **options: Any) -> tuple[Any, nn.Module, Any]:
    """An `Accelerator` made with these options, and what it prepared."""
    from accelerate import Accelerator

    accelerator = Accelerator(**options)
    return accelerator, *accelerator.prepare(module, optimizer)


def _device_type(module: nn.Module) -> str:
    return next(module.parameters()).device.type
