"""FSDP1: FullyShardedDataParallel, under any sharding strategy, the root or only parts.

Like FSDP2 it reads in backward whether to reduce, and each forward gathers parameters, so all ranks run equally many
forwards. Between reductions it adds gradients up in the dtype that it computes in (with a warning).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel

from ..engines.averaging import average, averaged
from ..engines.base import Engine, Gradient, Sync, refuse_left_out_terms, refuse_parts
from ..law import Plan
from ..norms import HALF
from ..ranks import Groups
from ..text import warn
from . import private


@final
class FSDPEngine(Engine):
    name = "FSDP1 (FullyShardedDataParallel)"
    lockstep = True
    owns = frozenset(("sums", "stages", "dtype", "parameters"))

    @classmethod
    def wraps(cls, module: nn.Module) -> bool:
        return isinstance(module, FullyShardedDataParallel)

    def __init__(self, models: Sequence[nn.Module], sync: Sync) -> None:
        modules = [module for model in models for module in model.modules() if self.wraps(module)]
        self._wrappers: list[Any] = list(dict.fromkeys(modules))
        self._handles = private.handles_of(self._wrappers)
        super().__init__(models, sync, _group_of_shards_and_replicas(self._wrappers))
        trained = [one for one in self._wrappers if any(p.requires_grad for p in one.parameters())]
        dtypes = [one.mixed_precision.param_dtype or next(one.parameters()).dtype for one in trained]
        if sync == "last" and not {*HALF}.isdisjoint(dtypes) and self.peers.rank == 0:
            warn(
                "FSDP1 adds gradients up in half precision between micro-steps; use sync='every', or fully_shard with "
                "MixedPrecisionPolicy(reduce_dtype=torch.float32)",
            )
        if sync == "every" and any(wrapper.cpu_offload.offload_params for wrapper in self._wrappers):
            raise ValueError("sync='every' with FSDP1's CPUOffload, which keeps only the last gradient; use 'last'")
        refuse_parts(self, [p for p in self._outside(self.parameters()) if hasattr(p, "to_local")])
        refuse_parts(self, [handle.flat_param for handle in self._handles if private.flattens_parts(handle)])
        self._by_hand: list[nn.Parameter] = []

    def num_micro_steps(self, plan: Plan) -> tuple[int, int]:
        steps = super().num_micro_steps(plan)
        refuse_left_out_terms(plan, ", or use fully_shard")
        return steps

    def will_reduce(self, reduce: bool) -> bool:
        return reduce

    def begin(self, plan: Plan, parameters: Sequence[nn.Parameter]) -> None:
        self._by_hand = averaged(self, self._outside(parameters))

    def backward(self, losses: Sequence[Tensor], seeds: Sequence[Tensor], reduce: bool) -> None:
        with private.reducing(self._wrappers, reduce):
            super().backward(losses, seeds, reduce)

    def grad_leaves(self, parameters: Sequence[nn.Parameter]) -> Sequence[Any]:
        # A write of torch's own cannot be told from the caller's, so those gradients go unwatched.
        return [handle.flat_param for handle in self._handles if not _fills_gaps(handle)]

    def why_no_local_grad(self, parameters: Sequence[nn.Parameter]) -> str | None:
        return "which flattens parameters together; use fully_shard"

    def finish(self) -> None:
        average(self, self._by_hand)

    def clear(self, parameters: Sequence[nn.Parameter]) -> None:
        super().clear(parameters)
        # Otherwise the end of a backward that failed would show gradients.
        with private.reducing(self._wrappers, False):
            for wrapper in reversed(self._wrappers):  # the root ends them all
                private.forget_window(wrapper)

    def gradient(self, parameters: Sequence[nn.Parameter]) -> Gradient:
        sharded = {id(p) for handle in self._handles if handle.uses_sharded_strategy for p in _managed(handle)}
        cuts: list[Groups] = [(self._wrappers[0].process_group,) if id(p) in sharded else () for p in parameters]
        return Gradient(parameters, cuts, device=self._wrappers[0].compute_device)

    def _outside(self, parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        own = {id(p) for handle in self._handles for p in _managed(handle)}
        return [parameter for parameter in parameters if id(parameter) not in own]


def _group_of_shards_and_replicas(wrappers: Sequence[Any]) -> Any:
    group = wrappers[0].process_group
    over = {(*dist.get_process_group_ranks(one.process_group), private.num_replicas(one)) for one in wrappers}
    shards = dist.get_world_size(group)
    replicas = private.num_replicas(wrappers[0])
    # Over replicas of one shard torch reduces nothing.
    is_hybrid = shards > 1 and shards * replicas == dist.get_world_size()
    if len(over) > 1 or not (replicas == 1 or is_hybrid):
        raise ValueError(
            f"the model holds FSDP1 modules over {replicas} replicas of {shards} shards, in {len(over)} groups and a "
            f"job of {dist.get_world_size()} ranks, expected one process group, or a hybrid strategy over all ranks "
            "with several shards; use fully_shard with a hybrid mesh, or an Accumulator each"
        )
    return group if replicas == 1 else dist.group.WORLD


def _managed(handle: Any) -> list[Any]:
    """The tensors of `handle` that the optimizer may hold."""
    return [handle.flat_param, *private.flattened(handle)]


def _fills_gaps(handle: Any) -> bool:
    """Tells whether torch's next forward writes zeros into the flat gradient: for original parameters without one."""
    return handle.flat_param.grad is not None and any(p.grad is None and p.numel() for p in private.flattened(handle))
