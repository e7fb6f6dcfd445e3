"""Private names of FSDP1, whose wrappers expose neither their flat parameters nor whether they reduce."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from ...private import require

FSDP, FLAT = "torch.distributed.fsdp._common_utils._FSDPState", "torch.distributed.fsdp._flat_param.FlatParameter"
# Name, what for, since which version, and what happens without it.
NAMES = (
    ("torch.distributed.fsdp.FullyShardedDataParallel._sync_gradients", "postpones the reduction", "2.9", "refused"),
    (f"{FSDP}._handle", "the flat parameter", "2.9", "refused"),
    (f"{FSDP}._is_root", "tells whether there was a forward", "2.9", "refused"),
    ("torch.distributed.fsdp._runtime_utils._reshard", "frees gathered parameters", "2.9", "refused"),
    (f"{FLAT}._params", "the parameters that it is made of", "2.9", "only the flat one is known"),
    (f"{FLAT}._param_extensions", "finds tensor-parallel parts", "2.9", "they go unseen"),
    (f"{FLAT}._saved_grad_shard", "forgets a reduced gradient", "2.9", "there is none to forget"),
    ("torch.distributed.fsdp._init_utils._inter_node_pg", "the ranks with the same shard", "2.9", "there are none"),
)
RUNTIME = "torch.distributed.fsdp._runtime_utils"
# A flat parameter's reduced gradient, until a window's last backward.
KEPT_SHARD = "_saved_grad_shard"


def handles_of(wrappers: Sequence[Any]) -> list[Any]:
    """The handles of flat parameters; a wrapper without parameters has none."""
    for wrapper in wrappers:
        require("torch", wrapper, "_sync_gradients", "_handle", "_is_root")
    require("torch", sys.modules.get(RUNTIME), "_reshard")
    return [wrapper._handle for wrapper in wrappers if wrapper._handle is not None]


def reduces(wrapper: Any) -> bool:
    """The flag of no_sync(), a context that only the root has; the root may lie outside the models."""
    return bool(wrapper._sync_gradients)


def set_reduces(wrappers: Sequence[Any], flags: Sequence[bool]) -> None:
    for wrapper, flag in zip(wrappers, flags, strict=False):
        wrapper._sync_gradients = flag


def flattened(handle: Any) -> list[Any]:
    """The parameters that the flat one is made of, with use_orig_params=True; none if the name is missing."""
    return list(getattr(handle.flat_param, "_params", None) or [])


def fills_gaps(handle: Any) -> bool:
    """Returns whether torch's next forward writes zeros into the flat gradient: for original parameters without one."""
    return handle.flat_param.grad is not None and any(p.grad is None and p.numel() for p in flattened(handle))


def flattens_parts(handle: Any) -> bool:
    """Returns whether it was flattened from tensor-parallel parameters; False if the name is missing."""
    return any(cut is not None for cut in getattr(handle.flat_param, "_param_extensions", None) or ())


def num_replicas(wrapper: Any) -> int:
    """The number of ranks that hold the same shard, under a hybrid strategy; 1 if the name is missing."""
    replicas = getattr(wrapper, "_inter_node_pg", None)
    return 1 if replicas is None else dist.get_world_size(replicas)


def free_gathered(wrapper: Any) -> None:
    """Frees gathered parameters: an evaluation after the last backward leaves some, which a step outdates."""
    handle = wrapper._handle
    if handle is not None and handle.uses_sharded_strategy and wrapper._is_root is not None:
        sys.modules[RUNTIME]._reshard(wrapper, handle, True)


def discard_gradient(handle: Any) -> None:
    """Discards gradients that were not reduced, or were reduced but are not shown yet."""
    handle.flat_param.grad = None
    if hasattr(handle.flat_param, KEPT_SHARD):
        delattr(handle.flat_param, KEPT_SHARD)
