"""FSDP1: FullyShardedDataParallel, under any sharding strategy, the root or only parts.

Like FSDP2 it reads in backward whether to reduce, and each forward gathers parameters, so all ranks run the same number
of forwards. Between reductions it adds gradients up in the dtype that it computes in (a warning says so).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..engines.base import Engine, Leaf, Sync
from ..engines.shards import Groups, norm_over_shards, why_tensor_parallel
from ..law import DistaccumError, Plan, shorten, warn
from ..norms import HALF
from .private import fsdp1 as private


@final
class FSDPEngine(Engine):
    name = "FSDP1 (FullyShardedDataParallel)"
    lockstep = True
    hides_parameters = True

    @classmethod
    def wraps(cls, module: nn.Module) -> bool:
        fsdp = sys.modules.get("torch.distributed.fsdp")
        return fsdp is not None and isinstance(module, fsdp.FullyShardedDataParallel)

    def __init__(self, models: Sequence[nn.Module], sync: Sync) -> None:
        named = [(name or "the root", module) for model in models for name, module in model.named_modules()]
        self._wrappers: list[Any] = list(dict.fromkeys(module for _, module in named if self.wraps(module)))
        for wrapper in self._wrappers:
            private.require_private_fsdp1(wrapper)
        super().__init__(models, sync, _group_of_shards_and_replicas(self._wrappers))
        self._device: torch.device = self._wrappers[0].compute_device
        low = [name for name, module in named if self.wraps(module) and _adds_up_in(module) in HALF]
        if low and sync == "last" and self.peers.rank == 0:
            warn(
                f"FSDP1 adds gradients up in half precision between micro-steps (in {shorten(low)}), whatever its "
                "reduce_dtype; sync='every' adds them up in the dtype of the parameters, and so does fully_shard with "
                "MixedPrecisionPolicy(reduce_dtype=torch.float32)",
            )
        if sync == "every" and any(wrapper.cpu_offload.offload_params for wrapper in self._wrappers):
            raise ValueError("sync='every' with FSDP1's CPUOffload, which keeps only the last gradient; use 'last'")
        for parameter in self._outside(self.parameters()):
            if hasattr(parameter, "to_local"):
                raise ValueError(
                    f"{self.name_of(parameter)} is a DTensor outside of FSDP1, whose norm does not count it as a part; "
                    "use fully_shard, which does"
                )
        self._found: list[bool] = []
        self._by_hand: list[nn.Parameter] = []
        self._is_open = False  # a window began and did not finish

    def check(self, plan: Plan) -> None:
        super().check(plan)
        self.refuse_left_out_terms(plan, ", or use fully_shard")

    def num_early(self, plan: Plan) -> int:
        return max(plan.num_counted) - 1 if self.sync == "every" else 0

    def will_reduce(self, reduce: bool) -> bool:
        return reduce

    def begin(self, plan: Plan, parameters: Sequence[nn.Parameter]) -> None:
        self._by_hand = [p for p in self._outside(parameters) if p.requires_grad]
        self._found = [private.reduces(wrapper) for wrapper in self._wrappers]
        self._is_open = True

    def backward(self, losses: Sequence[Tensor], seeds: Sequence[Tensor], reduce: bool) -> None:
        private.set_reduces(self._wrappers, [reduce] * len(self._wrappers))
        try:
            self.run_backward(losses, seeds)
        except AssertionError as error:
            if private.KEPT_SHARD not in str(error):
                raise
            raise DistaccumError(
                "a module that FSDP1 wraps was used in an earlier micro-step and not in this one, which reduces; FSDP1 "
                "cannot reduce the gradient that it kept; use sync='every', use every wrapped module in the last "
                "micro-batch, or wrap with fully_shard"
            ) from error

    def holders(self, parameters: Sequence[nn.Parameter]) -> Sequence[Any]:
        return [handle.flat_param for handle in self._handles()]

    def hides_own(self, parameters: Sequence[nn.Parameter]) -> str | None:
        wanted = {id(p) for p in parameters}
        for handle in self._handles():
            trained = [id(p) in wanted for p in private.flattened(handle) if p.requires_grad]
            if any(trained) and not all(trained):
                return "which flattens parameters together of which the optimizer has only some; give it all of them"
        return why_tensor_parallel(self._outside(parameters))

    def hides_parts(self) -> str | None:
        if any(map(private.flattens_parts, self._handles())):
            return "over tensor-parallel modules, whose parts it flattens into plain tensors"
        return None

    def leaves(self, parameters: Sequence[nn.Parameter]) -> list[Leaf]:
        wanted = {id(p) for p in parameters}
        flat = [h.flat_param for h in self._handles() if wanted & {id(p) for p in _managed(h)}]
        return super().leaves([*flat, *self._outside(parameters)])

    def finish(self) -> None:
        self.average(self._by_hand)
        self._is_open = False

    def release(self) -> None:
        private.set_reduces(self._wrappers, self._found)
        self._found, self._by_hand = [], []

    def clear(self, parameters: Sequence[nn.Parameter]) -> None:
        super().clear(parameters)
        for wrapper in self._wrappers:
            private.free_gathered(wrapper)
        if self._is_open:
            for handle in self._handles():
                private.discard_gradient(handle)
            self._is_open = False

    def norm(self, parameters: Sequence[nn.Parameter], kind: float = 2.0, over: Tensor | None = None) -> Tensor:
        # Ranks may hold shards of different parameters, or none.
        wide = torch.float64 if any(p.dtype == torch.float64 for p in self.parameters()) else torch.float32
        return norm_over_shards(self.shards(parameters), self._device, kind, over, wide)

    def shards(self, parameters: Sequence[nn.Parameter]) -> dict[Groups, list[Tensor]]:
        """Gradients of this rank, by the groups over which they are cut: not over replicas, which have the same."""
        sharded = {id(p) for handle in self._handles() if handle.uses_sharded_strategy for p in _managed(handle)}
        shards: dict[Groups, list[Tensor]] = {(self._wrappers[0].process_group,): [], (): []}
        over, whole = shards.values()
        for parameter in parameters:
            if parameter.grad is not None:
                (over if id(parameter) in sharded else whole).append(parameter.grad)
        return shards

    def _handles(self) -> list[Any]:
        return private.handles_of(self._wrappers)

    def _outside(self, parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        own = {id(p) for handle in self._handles() for p in _managed(handle)}
        return [parameter for parameter in parameters if id(parameter) not in own]


def _group_of_shards_and_replicas(wrappers: Sequence[Any]) -> dist.ProcessGroup:
    seen = {dist.get_world_size(wrapper.process_group) * private.num_replicas(wrapper) for wrapper in wrappers}
    groups = {tuple(dist.get_process_group_ranks(wrapper.process_group)): wrapper.process_group for wrapper in wrappers}
    if len(seen) > 1 or len(groups) > 1:
        raise ValueError(
            f"the model holds FSDP1 modules over {' and '.join(map(str, seen))} ranks, in groups {list(groups)}, "
            "expected one process group for all; wrap them with the same, or use an Accumulator each"
        )
    (num,) = seen
    group: Any = next(iter(groups.values()))
    if num not in (dist.get_world_size(group), dist.get_world_size()):
        raise ValueError(
            f"FSDP1 over {num} ranks in a job of {dist.get_world_size()}: a hybrid strategy on a part of the ranks is "
            "not supported; use fully_shard with a hybrid mesh"
        )
    if num != dist.get_world_size(group):
        group = dist.group.WORLD
    assert isinstance(group, dist.ProcessGroup)
    return group


def _adds_up_in(wrapper: Any) -> torch.dtype | None:
    """The dtype in which it adds gradients up between reductions; None: it has none."""
    if not any(p.requires_grad for p in wrapper.parameters()):
        return None
    dtype: torch.dtype = wrapper.mixed_precision.param_dtype or next(wrapper.parameters()).dtype
    return dtype


def _managed(handle: Any) -> list[Any]:
    """The tensors of `handle` that the optimizer may hold."""
    return [handle.flat_param, *private.flattened(handle)]
