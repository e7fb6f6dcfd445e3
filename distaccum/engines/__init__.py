"""What differs between the wrappers of a model: an engine each, chosen once by type."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from .base import Engine, Sync
from .ddp import DDPEngine
from .plain import PlainEngine

__all__ = ["Engine", "Sync", "choose_engine"]

# By the name of a class anywhere in a module's ancestry, so that nothing optional is imported to look.
UNKNOWN = {
    "FullyShardedDataParallel": "FSDP",
    "FSDPModule": "FSDP2 (fully_shard)",
    "DeepSpeedEngine": "DeepSpeed",
}


def choose_engine(models: Sequence[nn.Module]) -> Engine:
    modules = [module for model in models for module in model.modules()]
    for module in modules:
        for ancestor in type(module).__mro__:
            if ancestor.__name__ in UNKNOWN:
                raise ValueError(
                    f"the model is wrapped by {UNKNOWN[ancestor.__name__]}, which this version has no engine "
                    "for; it has them for a plain module and for DistributedDataParallel"
                )
    if any(isinstance(module, DistributedDataParallel) for module in modules):
        return DDPEngine(models)
    ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if ranks > 1:
        raise ValueError(
            f"a plain module in a job of {ranks} ranks: nothing would reduce its gradients and the ranks would "
            "drift apart; wrap it in DistributedDataParallel"
        )
    return PlainEngine(models)
