"""FSDP2: modules under `fully_shard`, the root or only parts, on a mesh or a hybrid mesh.

FSDP2 reads in backward whether to reduce; until it does, gradients add up on hidden parameters, which `zero_grad` does
not clear. Each forward gathers parameters, so all ranks run equally many: ranks with fewer micro-batches stand in.

| sync       | forward gathers      | reduce-scatter   | all-reduce of replicas | kept between micro-steps            |
| ---------- | -------------------- | ---------------- | ---------------------- | ----------------------------------- |
| "last"     | each micro-step      | once             | once                   | whole gradient                      |
| "gathered" | once                 | once             | once                   | whole gradient and whole parameters |
| "every"    | each micro-step      | each micro-step  | each micro-step        | a shard of the gradient             |
| "replicas" | each micro-step      | each micro-step  | once                   | a shard of the gradient             |
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, final

import torch.distributed as dist
from torch import Tensor, nn

from ..law import DistaccumError, Plan
from ..meshes.sharing import copies_of, cut_over_data, peers_of, refuse_other_meshes
from ..norms import HALF, unique
from ..ranks import Peers
from ..text import shorten, warn
from .averaging import average, averaged
from .base import GRAD, Engine, Sync, refuse_left_out_terms, sparse_embeddings, why_tensor_parallel
from .private import fsdp2 as private


@final
class FullyShardEngine(Engine):
    name = "FSDP2 (fully_shard)"
    owns = frozenset(("sums", "dtype"))
    lockstep = True

    @classmethod
    def wraps(cls, module: nn.Module) -> bool:
        fsdp = sys.modules.get("torch.distributed.fsdp")
        return fsdp is not None and isinstance(module, fsdp.FSDPModule)

    def __init__(self, models: Sequence[nn.Module], sync: Sync) -> None:
        self._modules: list[Any] = [module for model in models for module in model.modules() if self.wraps(module)]
        self._states = list(dict.fromkeys(map(private.state_of, self._modules)))
        self._groups = [group for state in self._states for group in private.groups_of(state)]
        if not self._groups:
            raise ValueError("fully_shard was called on modules without parameters; call it on those that have some")
        # FSDP2's own kind of parameter, which holds the shard and what is gathered of it.
        self._every = [parameter for group in self._groups for parameter in group.fsdp_params]
        if sparse := [name for name, weight in sparse_embeddings(models).items() if weight.requires_grad]:
            raise ValueError(
                f"the embedding {shorten(sparse)} has sparse gradients, which FSDP2 cannot reduce; give it sparse=False"
            )
        if private.all_have(self._groups, "shard_mesh_dim"):
            is_hybrid = private.all_have(self._groups, "replicate_mesh_dim")
            self.policies = ("last", "every", "gathered", *(("replicas",) if is_hybrid else ()))
        # The groups by the ranks over which they reduce: their meshes have no tensor-parallel dimension.
        over: dict[tuple[int, ...], list[Any]] = {}
        for group in self._groups:
            over.setdefault(tuple(sorted(group.mesh_info.mesh.mesh.flatten().tolist())), []).append(group)
        ranks = max(over, key=len)
        if len(over) > 1:
            refuse_other_meshes(over, ranks)
        mesh = over[ranks][0].mesh_info.mesh
        groups = [mesh.get_group(i) for i in range(mesh.ndim)]
        if mesh.ndim > 1 and len(ranks) == dist.get_world_size():
            groups = [dist.group.WORLD]
        super().__init__(models, sync, peers_of([p.sharded_param for p in self._every], Peers(groups, ranks)))
        # In a window every reduction sums, whatever set_gradient_divide_factor says.
        self.divisor = 1
        self.read_grad = self._read_grad
        # The policy of the current window, which keeps gradients whole if it must not fail within a backward.
        self._policy = sync
        # Restores all flags after the window.
        self._undo = ExitStack()
        parts = cut_over_data(self, self._outside(self.parameters()))
        parts += [p.sharded_param for few in over if few != ranks for group in over[few] for p in group.fsdp_params]
        self._has_parts = bool(parts)
        if parts:
            self.policies = tuple(policy for policy in self.policies if policy != "gathered")
        if sync not in self.policies:
            raise ValueError(
                "sync='gathered' with experts, parameters cut over the data-parallel ranks outside of fully_shard: "
                "forwards wait for all ranks, and each rank would run only as many as it has micro-batches; use 'last' "
                "or 'every'"
            )
        # _every, by the id of the tensor that modules show instead.
        self._shown: dict[int, Any] = {}
        trained = [(group, p) for group in self._groups for p in group.fsdp_params if p.sharded_param.requires_grad]
        adds_up_low = any(private.adds_up_in(group, parameter) in HALF for group, parameter in trained)
        if adds_up_low and sync != "every" and self.peers.rank == 0:
            warn(
                "FSDP2 adds gradients up in half precision between micro-steps; use MixedPrecisionPolicy("
                "param_dtype=torch.bfloat16, reduce_dtype=torch.float32), which adds up in float32",
            )

    def parameters(self) -> list[nn.Parameter]:
        # No optimizer has what modules show instead of the shards.
        instead = {id(shown) for p in self._every for shown in private.shown_for(p)}
        every = [*super().parameters(), *(p.sharded_param for p in self._every)]
        return unique(p for p in every if id(p) not in instead)

    def _outside(self, parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        # The shards are looked up anew, since model.to() replaces them.
        shards = {id(p.sharded_param) for p in self._every}
        return [parameter for parameter in parameters if id(parameter) not in shards]

    def num_micro_steps(self, plan: Plan) -> tuple[int, int]:
        steps = super().num_micro_steps(plan)
        # With parameters gathered before the first forward, a rank that fails leaves nobody waiting.
        self._policy = "gathered" if plan.reduce_afterwards and "gathered" in self.policies else self.sync
        # Modules besides the root communicate within forward and backward.
        communicates = len(self._groups) > 1 or self._has_parts
        if self._policy != "gathered" and communicates and self.peers.num_ranks > 1:
            refuse_left_out_terms(plan, ", use sync='gathered', or wrap only the root with fully_shard")
        for group in self._groups:
            if private.has_all_reduce_hook(group):
                raise DistaccumError(
                    f"set_all_reduce_hook on the module of {private.name_of(group.fsdp_params[0])}: its divisor, and "
                    "its ranks, cannot be known; use a hybrid mesh (replicate, shard) instead"
                )
        return (max(1, plan.num_here), 0) if self._policy == "gathered" else steps

    def begin(self, plan: Plan, parameters: Sequence[nn.Parameter]) -> None:
        # Weights may have changed since they were gathered.
        self.show_parameters()
        self._by_hand = averaged(self, self._outside(parameters))
        # A loss may have brought more experts.
        cut_over_data(self, self._by_hand)
        # Without a gradient in this window, on this rank.
        self._unused = [p for p in self._every if p.sharded_param.requires_grad]
        lacks = plan.lacks_terms_in_last if self._policy in ("last", "gathered") else plan.lacks_terms
        self._reduces = not (lacks or plan.reduce_afterwards)
        is_uneven = plan.fewest != plan.most
        self._reshards = [group.reshard_after_backward for group in self._groups]
        self._undo.callback(private.flags_of(self._states))
        for module in self._modules:
            # FSDP2 divides by the ranks, or by the factor, or by it twice (2.13, 2.15; a mesh of one shard).
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
        for group in self._groups:
            private.reduce_unused(group)
            if self._policy == "gathered":
                group.post_forward_mesh_info = None
                # A module that a micro-step enters twice ends twice in backward. The first time its gradients are not
                # there yet, and FSDP2 reduces those of earlier micro-steps, on ranks with some (with zeros, on all).
                self._reduces &= not is_uneven or group.reduce_scatter_unused_params
        for module in self._modules if self._policy == "gathered" and is_uneven else ():
            self._undo.callback(module.register_state_dict_pre_hook(_refuse_state).remove)
        partial = [group for group in self._groups if not group.reduce_scatter_unused_params]
        # Those that FSDP2 leaves out of a reduction on a rank that did not use them, and in which reductions: a hash.
        self._used_in = {p: 0 for group in partial for p in group.fsdp_params if p.sharded_param.requires_grad}
        self._stands_in = False
        # A backward has left a gradient that replicas have yet to add.
        self._is_partial = False
        if plan.agrees and self._policy == "gathered":
            for module in self._modules:
                module.unshard()

    def will_reduce(self, reduce: bool) -> bool:
        return self._reduces and (reduce or self._policy == "replicas")

    def backward(self, losses: Sequence[Tensor], seeds: Sequence[Tensor], reduce: bool) -> None:
        if self._is_partial and not any(map(private.holds_gradients, self._groups)):
            raise DistaccumError(
                "gradients were discarded in mid-window, as by another Accumulator's window; step one before the next"
            )
        scatter = self.will_reduce(reduce)
        reduce = reduce and self._reduces
        for group, reshards in zip(self._groups, self._reshards, strict=True):
            group.reduce_grads = scatter
            group.all_reduce_grads = reduce
            group.reshard_after_backward = reshards and (reduce or self._policy != "gathered")
        seen: set[int] = set()
        with ExitStack() as hooks:
            if scatter:
                self._note_used()
                absent = {p for p in (*self._unused, *self._used_in) if private.standing_gradient(p) is None}
                for leaf in [leaf for p in absent if (leaf := private.gathered_of(p)) is not None]:
                    hooks.callback(leaf.register_post_accumulate_grad_hook(lambda leaf: seen.add(id(leaf))).remove)
            self.run_backward(tuple(losses), tuple(seeds))
        if scatter:
            self._is_partial = any(map(private.holds_gradients, self._groups))
            absent = {p for p in absent if id(private.gathered_of(p)) not in seen}
            self._note_uses(absent)
            if not self._stands_in:
                self._unused = [p for p in self._unused if p in absent]

    def _note_used(self) -> None:
        # A stand-in may come from an earlier window, and use parameters that no rank uses in this one.
        if not self._stands_in:
            self._unused = [p for p in self._unused if private.standing_gradient(p) is None]

    def _note_uses(self, absent: Collection[Any]) -> None:
        for parameter, uses in self._used_in.items():
            is_used = parameter not in absent
            # The hash fits into a byte.
            self._used_in[parameter] = (2 * uses + is_used) % 251

    def stand_in(self) -> None:
        self._note_used()
        self._stands_in = True

    def grad_leaves(self, parameters: Sequence[nn.Parameter]) -> Sequence[Any]:
        wanted = {id(p) for p in parameters}
        shown = [(private.gathered_of(one), one) for one in self._every if id(one.sharded_param) in wanted]
        self._shown = {id(gathered): one for gathered, one in shown if gathered is not None}
        return [*(gathered for gathered, _ in shown if gathered is not None), *parameters]

    def _read_grad(self, leaf: Any) -> Tensor | None:
        if (parameter := self._shown.get(id(leaf))) is not None:
            return private.standing_gradient(parameter)
        # A shard's gradient was reduced already.
        return None if hasattr(leaf, "to_local") else GRAD(leaf)

    def why_no_local_grad(self, parameters: Sequence[nn.Parameter]) -> str | None:
        parts = [p.sharded_param for p in self._every if getattr(p, "is_dtensor", False)]
        return why_tensor_parallel([*parts, *self._outside(parameters)])

    def finish(self) -> None:
        average(self, self._by_hand, copies_of=partial(copies_of, peers=self.peers))
        self._reduce_the_rest()
        self.show_parameters()
        self._release()

    def show_parameters(self, *, in_loop: bool = False) -> None:
        # Resharded in a loop that gathers once, this rank would gather alone in its next forward.
        if not in_loop or self._policy != "gathered":
            private.reshard_groups(self._groups)

    def _release(self) -> None:
        self._undo.close()
        self._by_hand = []
        self._unused = []
        self._used_in = {}

    def clear(self, parameters: Sequence[nn.Parameter]) -> None:
        self._release()
        private.discard_gradients(self._states)
        # An evaluation after the last backward gathered some parameters, which a step outdates.
        self.show_parameters()
        super().clear(parameters)

    def stale(self, parameters: Sequence[nn.Parameter]) -> bool:
        return super().stale(parameters) or any(map(private.holds_gradients, self._groups))

    def _reduce_the_rest(self) -> None:
        """Reduces what no backward did (it left a term or a module out), and removes gradients that no rank has.

        Ranks agree on both, in one small collective. Zeros were reduced for parameters that a rank did not
        use; if no rank used them, None exempts them from weight decay and momentum, as it would without sharding.
        """
        self._note_used()
        unused = {id(p) for p in self._unused}
        left = [private.holds_gradients(group) for group in self._groups]
        self._note_uses({p for p in self._used_in if private.standing_gradient(p) is None})
        uses = list(self._used_in.values())
        used = [id(p) not in unused for p in self._every]
        answers = self.peers.largest([*left, *used, *uses, *(255 - number for number in uses)])
        pairs = zip(self._used_in, answers[-2 * len(uses) :], answers[-len(uses) :], strict=False) if uses else ()
        if mixed := [private.name_of(p) for p, most, other in pairs if most + other != 255]:
            raise DistaccumError(
                f"{shorten(mixed)} was used on some ranks only in a micro-step that reduces, and this version of torch "
                "leaves out what a rank did not use, so that ranks add up gradients of different parameters; use torch "
                "2.15, call set_reduce_scatter_unused_params(True) on the module, or use the same "
                "parameters on all ranks"
            )
        for group, is_left in zip(self._groups, answers, strict=False):
            if is_left:
                private.reduce_now(group)
                if private.holds_gradients(group):
                    raise DistaccumError(
                        f"the module of {private.name_of(group.fsdp_params[0])} was used in earlier micro-steps and "
                        "not in the last, and this version of torch cannot reduce the gradient that it kept; use "
                        "sync='last', or every module in the last micro-batch"
                    )
        for parameter, is_used in zip(self._every, answers[len(left) :], strict=False):
            if not is_used:
                parameter.sharded_param.grad = None


def _refuse_state(*_: object) -> None:
    raise DistaccumError(
        "state_dict() of the model in mid-window with sync='gathered' and uneven ranks: it drops gathered parameters, "
        "and the ranks would wait for each other in different forwards; call it after the window's loop"
    )
