"""FSDP1: FullyShardedDataParallel, under any sharding strategy, the root or only parts.

Like FSDP2 it reads in backward whether to reduce, and each forward gathers parameters, so all ranks run as many. What
it adds up without reducing is in the dtype that it computes in (a warning says so).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..gradients.norms import HALF, total_norm
from ..law.errors import DistaccumError, warn
from ..law.plan import Plan
from ..law.shares import listed
from .averaging import average_by_hand
from .base import Leaf, Sync, refuse_narrower, refuse_narrower_outside, why_tensor_parallel
from .ranks import RanksEngine


@final
class FSDPEngine(RanksEngine):
    name = "FSDP1 (FullyShardedDataParallel)"
    lockstep = True
    gathers = True
    gradients_stay = False  # a rank has those that its shard holds
    hides_parameters = True

    @classmethod
    def wraps(cls, module: nn.Module) -> bool:
        fsdp = sys.modules.get("torch.distributed.fsdp")
        return fsdp is not None and isinstance(module, fsdp.FullyShardedDataParallel)

    def __init__(self, models: Sequence[nn.Module], sync: Sync) -> None:
        modules = [(name, module) for model in models for name, module in model.named_modules()]
        self._wrappers: list[Any] = list(dict.fromkeys(module for _, module in modules if self.wraps(module)))
        super().__init__(models, sync, _data_parallel_group(self._wrappers))
        low = [
            name or "the root"
            for name, module in modules
            if self.wraps(module) and _computes_in(module) in HALF and any(p.requires_grad for p in module.parameters())
        ]
        if low and sync == "last" and self.peers.rank == 0:
            warn(
                f"FSDP1 adds gradients up in half precision between micro-steps (in {listed(low)}), whatever its "
                "reduce_dtype; sync='every' adds them up in the dtype of the parameters, and so does fully_shard with "
                "MixedPrecisionPolicy(reduce_dtype=torch.float32)",
            )
        if sync == "every" and any(wrapper.cpu_offload.offload_params for wrapper in self._wrappers):
            raise ValueError("sync='every' with FSDP1's CPUOffload, which keeps only the last gradient; use 'last'")
        own = {id(p) for handle in self._handles() for p in _managed(handle)}
        for parameter in self.parameters():
            if id(parameter) not in own and hasattr(parameter, "to_local"):
                raise ValueError(
                    f"{self.name_of(parameter)} is a DTensor outside of FSDP1, whose norm does not count it as a part; "
                    "use fully_shard, which does"
                )
        self._found: list[bool] = []
        self._by_hand: list[nn.Parameter] = []
        self._is_open = False  # a window began and did not finish

    def accumulate_in(self, dtype: torch.dtype, parameters: Sequence[nn.Parameter]) -> None:
        adds_up: dict[str, torch.dtype] = {}
        for model in self.models:
            for name, module in model.named_modules():
                kept = next((p.dtype for p in module.parameters() if p.requires_grad), None)
                if self.wraps(module) and kept is not None:
                    low = self.sync == "every" and module.mixed_precision.keep_low_precision_grads
                    computes = _computes_in(module) if self.sync == "last" or low else kept
                    adds_up[name or "the root"] = computes or kept
        refuse_narrower(
            adds_up,
            dtype,
            "use sync='every' with parameters in float32, which adds up in their dtype, or fully_shard with "
            "MixedPrecisionPolicy(reduce_dtype=torch.float32)",
        )
        own = {id(p) for handle in self._handles() for p in _managed(handle)}
        refuse_narrower_outside(parameters, own, dtype)

    def check(self, plan: Plan) -> None:
        self.refuse_synchronised_norms(plan)
        self.refuse_dry_ranks(plan)
        if not plan.all_terms:
            raise DistaccumError(
                f"a micro-batch has a count of 0 for one of {list(plan.counts)}; left out, its loss would leave "
                "modules out of backward, and the other ranks would wait for this one to gather them. Give each "
                "micro-batch a count above 0 for each name, or use fully_shard"
            )

    def num_micro_steps(self, plan: Plan) -> int:
        return max(plan.num_counted)

    def num_early_reductions(self, plan: Plan) -> int:
        return max(plan.num_counted) - 1 if self.sync == "every" else 0

    def will_reduce(self, reduce: bool) -> bool:
        return reduce

    def begin(self, plan: Plan, parameters: Sequence[nn.Parameter]) -> None:
        own = {id(p) for handle in self._handles() for p in _managed(handle)}
        self._by_hand = [p for p in parameters if p.requires_grad and id(p) not in own]
        # Private: what no_sync() sets. That context must hold the root, which may be outside of these models.
        self._found = [wrapper._sync_gradients for wrapper in self._wrappers]
        self._is_open = True

    def backward(self, losses: Sequence[Tensor], seeds: Sequence[Tensor], reduce: bool) -> None:
        for wrapper in self._wrappers:
            wrapper._sync_gradients = reduce
        try:
            self.run_backward(losses, seeds)
        except AssertionError as error:
            if "_saved_grad_shard" not in str(error):
                raise
            raise DistaccumError(
                "a module that FSDP1 wraps was used in an earlier micro-step and not in this one, which reduces; it "
                "cannot reduce what it kept; use sync='every', use every wrapped module in the last micro-batch, or "
                "wrap with fully_shard"
            ) from error

    def holders(self, parameters: Sequence[nn.Parameter]) -> Sequence[Any]:
        return [handle.flat_param for handle in self._handles()]

    def hides_own(self, parameters: Sequence[nn.Parameter]) -> str | None:
        wanted = {id(p) for p in parameters}
        for handle in self._handles():
            trained = [id(p) in wanted for p in handle.flat_param._params or [] if p.requires_grad]
            if any(trained) and not all(trained):
                return "which flattens parameters together that the optimizer has a part of; give it all of them"
        own = {id(p) for handle in self._handles() for p in _managed(handle)}
        return why_tensor_parallel([p for p in parameters if id(p) not in own])

    def hides_parts(self) -> str | None:
        # Private: how FSDP1 notes what a part of its flat parameter was cut from, in a tensor-parallel module.
        flat = [handle.flat_param for handle in self._handles()]
        if any(cut is not None for one in flat for cut in getattr(one, "_param_extensions", None) or ()):
            return "over tensor-parallel modules, whose parts it flattens into plain tensors"
        return None

    def leaves(self, parameters: Sequence[nn.Parameter]) -> list[Leaf]:
        wanted = {id(p) for p in parameters}
        flat = [h.flat_param for h in self._handles() if wanted & {id(p) for p in _managed(h)}]
        own = {id(p) for handle in self._handles() for p in _managed(handle)}
        outside = [p for p in parameters if id(p) not in own]
        return [Leaf(p, partial(getattr, p, "grad")) for p in (*flat, *outside) if p.requires_grad]

    def finish(self) -> None:
        if self._by_hand:
            average_by_hand(self._by_hand, self.group, self.host_group, self.divisor)
        self._is_open = False

    def release(self) -> None:
        for wrapper, found in zip(self._wrappers, self._found, strict=False):
            wrapper._sync_gradients = found
        self._found, self._by_hand = [], []

    def clear(self, parameters: Sequence[nn.Parameter]) -> None:
        for parameter in parameters:
            parameter.grad = None
        for wrapper in self._wrappers:
            # Evaluated after the last backward, modules keep parameters gathered that are out of date now.
            handle = wrapper._handle
            if handle is not None and handle.uses_sharded_strategy and wrapper._is_root is not None:
                sys.modules["torch.distributed.fsdp._runtime_utils"]._reshard(wrapper, handle, True)  # private
        if self._is_open:
            for handle in self._handles():
                handle.flat_param.grad = None
                if hasattr(handle.flat_param, "_saved_grad_shard"):
                    del handle.flat_param._saved_grad_shard
            self._is_open = False

    def norm(self, parameters: Sequence[nn.Parameter], kind: float = 2.0, over: Tensor | None = None) -> Tensor:
        sharded = {id(p) for handle in self._handles() if handle.uses_sharded_strategy for p in _managed(handle)}
        here = [p.grad for p in parameters if p.grad is not None and id(p) in sharded]
        everywhere = [p.grad for p in parameters if p.grad is not None and id(p) not in sharded]
        # Ranks may hold shards of different parameters, or none.
        wide = torch.float64 if any(p.dtype == torch.float64 for p in self.parameters()) else torch.float32
        norm: Tensor = total_norm(here, kind, over).to(self._wrappers[0].compute_device, wide)
        group = self._wrappers[0].process_group  # not over replicas, which have the same shards
        if math.isinf(kind):
            dist.all_reduce(norm, op=dist.ReduceOp.MAX, group=group)
        else:
            norm = norm.pow(kind)
            dist.all_reduce(norm, group=group)
            norm = norm.pow(1 / kind)
        if not everywhere:
            return norm
        both = torch.stack([norm, total_norm(everywhere, kind, over).to(norm)])
        return total_norm([both], kind)

    def part_of_square(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        sharded = {id(p) for handle in self._handles() if handle.uses_sharded_strategy for p in _managed(handle)}
        here = [p.grad for p in parameters if p.grad is not None and id(p) in sharded]
        everywhere = [p.grad for p in parameters if p.grad is not None and id(p) not in sharded]
        shards = dist.get_world_size(self._wrappers[0].process_group)
        parts = [total_norm(here, 2.0).square() * shards, total_norm(everywhere, 2.0).square()]
        return torch.stack([one.to(self._wrappers[0].compute_device) for one in parts]).sum() / self.peers.num_ranks

    def _handles(self) -> list[Any]:
        return [wrapper._handle for wrapper in self._wrappers if wrapper._handle is not None]


def _data_parallel_group(wrappers: Sequence[Any]) -> dist.ProcessGroup:
    """The ranks of shards and replicas."""
    seen = {_num_ranks(wrapper): wrapper for wrapper in wrappers}
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


def _num_ranks(wrapper: Any) -> int:
    replicas = getattr(wrapper, "_inter_node_pg", None)
    return dist.get_world_size(wrapper.process_group) * (1 if replicas is None else dist.get_world_size(replicas))


def _managed(handle: Any) -> list[Any]:
    """The tensors that the optimizer may hold of it."""
    return [handle.flat_param, *(handle.flat_param._params or [])]


def _computes_in(wrapper: Any) -> torch.dtype | None:
    dtype: torch.dtype | None = wrapper.mixed_precision.param_dtype
    return dtype or next((p.dtype for p in wrapper.parameters()), None)
