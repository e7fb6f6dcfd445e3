"""FSDP2: modules under `fully_shard`, the root or only parts, on a mesh or a hybrid mesh.

FSDP2 reads in backward whether to reduce; until then gradients add up on parameters that nobody sees, which
`zero_grad` does not clear. Each forward gathers parameters, so all ranks run as many: the shorter ones stand in.

| sync       | forward gathers      | reduce-scatter   | all-reduce of replicas | kept between micro-steps            |
| ---------- | -------------------- | ---------------- | ---------------------- | ----------------------------------- |
| "last"     | each micro-step      | once             | once                   | whole gradient                      |
| "gathered" | once                 | once             | once                   | whole gradient and whole parameters |
| "every"    | each micro-step      | each micro-step  | each micro-step        | a shard of the gradient             |
| "replicas" | each micro-step      | each micro-step  | once                   | a shard of the gradient             |
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..gradients.norms import HALF, local, total_norm
from ..law.errors import DistaccumError, warn
from ..law.plan import Plan
from ..law.shares import listed
from .averaging import average_by_hand
from .base import (
    Leaf,
    Sync,
    from_host,
    gradients_of,
    on_host,
    put_gradients,
    refuse_narrower,
    refuse_narrower_outside,
    why_tensor_parallel,
)
from .ranks import RanksEngine

EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)


@final
class FullyShardEngine(RanksEngine):
    name = "FSDP2 (fully_shard)"
    shows_partial = True
    lockstep = True
    gathers = True

    @classmethod
    def wraps(cls, module: nn.Module) -> bool:
        fsdp = sys.modules.get("torch.distributed.fsdp")
        return fsdp is not None and isinstance(module, fsdp.FSDPModule)

    def __init__(self, models: Sequence[nn.Module], sync: Sync) -> None:
        self._states = list(_states(models))
        self._groups = [group for state in self._states for group in _groups(state)]
        if not self._groups:
            raise ValueError("fully_shard was called on modules without parameters; call it on those that have some")
        embeddings = ((n, one) for m in models for n, one in m.named_modules() if isinstance(one, EMBEDDINGS))
        sparse = [name for name, one in embeddings if one.sparse and one.weight.requires_grad]
        if sparse:
            raise ValueError(
                f"the embedding {listed(sparse)} has sparse gradients, which FSDP2 cannot reduce; make it with "
                "sparse=False"
            )
        if all(_is_sharded(group) for group in self._groups):
            self.policies = ("last", "every", "gathered")
            if all(_is_hybrid(group) for group in self._groups):
                self.policies += ("replicas",)
        super().__init__(models, sync, _data_parallel_group(self._groups))
        self._device = self._groups[0].fsdp_params[0].sharded_param.device
        self._policy = sync  # of the window at hand
        self._found: list[_Flags] = []
        self._by_hand: list[nn.Parameter] = []
        self._is_open = False  # a window began and did not finish
        self._parts = self.refuse_unknown_parts([p for p in self.parameters() if id(p) not in self._own()])
        if self._parts:  # whose forwards wait for all ranks; with "gathered" each would run as many as it has
            self.policies = tuple(policy for policy in self.policies if policy != "gathered")
            if sync == "gathered":
                raise ValueError(
                    f"sync='gathered' with {listed(list(map(self.name_of, self._parts)))}, cut over the data-parallel "
                    "ranks outside of fully_shard: forwards wait for all ranks, and each rank would run as many as it "
                    "has micro-batches; use 'last' or 'every'"
                )
        self._reduces = True  # in backward; else by hand, after the last
        self._stands_in = False
        self._unused: list[Any] = []  # FSDP's parameters without a gradient in this window, on this rank
        low = [
            _name(p)
            for g in self._groups
            for p in g.fsdp_params
            if _is_trained(p) and _adds_up_in(g, p, "last") in HALF
        ]
        if low and sync != "every" and self.peers.rank == 0:
            warn(
                f"gradients of {listed(low)} add up in half precision between micro-steps; "
                "MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) adds up in float32",
            )

    def parameters(self) -> list[nn.Parameter]:
        # While they are gathered, modules show other tensors than those that the optimizer has.
        shards = [p.sharded_param for group in self._groups for p in group.fsdp_params]
        gathered = {id(getattr(p, "_unsharded_param", None)) for group in self._groups for p in group.fsdp_params}
        return list({id(p): p for p in [*super().parameters(), *shards] if id(p) not in gathered}.values())

    def _own(self) -> set[int]:
        return {id(p.sharded_param) for group in self._groups for p in group.fsdp_params}

    def accumulate_in(self, dtype: torch.dtype, parameters: Sequence[nn.Parameter]) -> None:
        low = {_adds_up_in(g, p, self.sync): _name(p) for g in self._groups for p in g.fsdp_params if _is_trained(p)}
        refuse_narrower(
            {name: adds_up for adds_up, name in low.items()},
            dtype,
            "wrap with MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32), whose sums are in "
            "reduce_dtype"
            + (
                ", and keep the parameters themselves in float32, in whose dtype shards add up" * (self.sync == "every")
            ),
        )
        refuse_narrower_outside(parameters, self._own(), dtype)

    def check(self, plan: Plan) -> None:
        self.refuse_synchronised_norms(plan)
        self.refuse_dry_ranks(plan)
        # With parameters gathered before the first forward, a rank that fails leaves nobody waiting.
        self._policy = "gathered" if plan.reduce_afterwards and "gathered" in self.policies else self.sync
        communicates = len(self._groups) > 1 or bool(self._parts)  # within forward and backward, besides the root
        if not plan.all_terms and self._policy != "gathered" and communicates and self.peers.num_ranks > 1:
            raise DistaccumError(
                f"a micro-batch has a count of 0 for one of {list(plan.counts)}; left out, its loss would leave "
                "modules out of backward, and the other ranks would wait for this one to gather them. Give each "
                "micro-batch a count above 0 for each name, use sync='gathered', or wrap only the root with fully_shard"
            )
        self.divisor = self._divides_by()

    def num_micro_steps(self, plan: Plan) -> int:
        return max(1, plan.num_counted[self.peers.rank]) if self._policy == "gathered" else max(plan.num_counted)

    def num_early_reductions(self, plan: Plan) -> int:
        return max(plan.num_counted) - 1 if self._policy == "every" else 0

    def begin(self, plan: Plan, parameters: Sequence[nn.Parameter]) -> None:
        own = self._own()
        self._by_hand = [p for p in parameters if p.requires_grad and id(p) not in own]
        self.refuse_unknown_parts(self._by_hand)  # a loss's own too
        self._unused = [p for group in self._groups for p in group.fsdp_params if p.sharded_param.requires_grad]
        self._reduces = not plan.reduce_afterwards and (
            plan.all_terms_in_last if self._policy in ("last", "gathered") else plan.all_terms
        )
        self._found = [_Flags.of(state, group) for state in self._states for group in _groups(state)]
        for group in self._groups:
            if self._policy == "gathered":
                group.post_forward_mesh_info = None
            if hasattr(group, "_validate_unused_param_grad_dtypes") and _zeros_can_be_made(group):
                # A parameter that only some ranks use would make their reductions differ in size. Before this
                # check came to torch, zeros of another dtype than their neighbours' were an error of their own
                # (pytorch#196996), so there it is left to the user.
                group.reduce_scatter_unused_params = True
        may_be_uneven = plan.uneven or max(plan.num_counted) == 1  # streaming, only the first is known
        if self._policy == "gathered" and may_be_uneven and not all(map(_always_reduces, self._groups)):
            # A module that a micro-step enters twice ends twice in backward. The first time its gradients have not
            # come, and FSDP2 reduces what earlier micro-steps left, on those ranks that had some.
            self._reduces = False
        self._is_open, self._stands_in = True, False
        if plan.agrees and self._policy == "gathered":
            self._gather_parameters()

    def will_reduce(self, reduce: bool) -> bool:
        return self._reduces and (reduce or self._policy == "replicas")

    def backward(self, losses: Sequence[Tensor], seeds: Sequence[Tensor], reduce: bool) -> None:
        scatter = self.will_reduce(reduce)
        reduce = reduce and self._reduces
        for group, found in zip(self._groups, self._found, strict=True):
            group.reduce_grads, group.all_reduce_grads = scatter, reduce
            group.reshard_after_backward = found.reshard_after_backward and (reduce or self._policy != "gathered")
        if not scatter or self._stands_in:
            self.run_backward(losses, seeds)
            return
        self._unused = [p for p in self._unused if _unsharded_gradient(p) is None]
        seen: set[int] = set()
        hooks = [_when_used(p, seen) for p in self._unused if getattr(p, "_unsharded_param", None) is not None]
        try:
            self.run_backward(losses, seeds)
        finally:
            for hook in hooks:
                hook.remove()
        self._unused = [p for p in self._unused if id(p) not in seen]

    def stand_in(self) -> None:
        # It may be of an earlier window, and use what nobody uses in this one.
        if not self._stands_in:
            self._unused = [p for p in self._unused if _unsharded_gradient(p) is None]
        self._stands_in = True

    def skip(self) -> None:
        if self._policy != "gathered":
            _reshard(self._groups)  # as a backward would: the next forward gathers, on all ranks

    def holders(self, parameters: Sequence[nn.Parameter]) -> Sequence[Any]:
        gathered = (getattr(p, "_unsharded_param", None) for group in self._groups for p in group.fsdp_params)
        return [one for one in gathered if one is not None]

    def hides_own(self, parameters: Sequence[nn.Parameter]) -> str | None:
        own = self._own()
        gathered = [getattr(p, "_unsharded_param", None) for group in self._groups for p in group.fsdp_params]
        if any(getattr(p, "is_dtensor", False) for group in self._groups for p in group.fsdp_params):
            return why_tensor_parallel([*gathered, self._groups[0].fsdp_params[0].sharded_param])
        return why_tensor_parallel([p for p in parameters if id(p) not in own])

    def leaves(self, parameters: Sequence[nn.Parameter]) -> list[Leaf]:
        wanted = {id(p): p for p in parameters}
        found = []
        for one in (p for group in self._groups for p in group.fsdp_params):
            gathered = getattr(one, "_unsharded_param", None)  # made by its first forward
            if wanted.pop(id(one.sharded_param), None) is not None and gathered is not None and gathered.requires_grad:
                found.append(Leaf(gathered, partial(_standing, one)))
        return [*found, *(Leaf(p, partial(getattr, p, "grad")) for p in wanted.values() if p.requires_grad)]

    def finish(self) -> None:
        if self._by_hand:
            average_by_hand(self._by_hand, self.group, self.host_group, self.divisor)
        self._reduce_what_is_left()
        self.show_parameters()
        self._is_open = False

    def show_parameters(self) -> None:
        _reshard(self._groups)

    def release(self) -> None:
        for found in self._found:
            found.put_back()
        self._found, self._by_hand, self._unused = [], [], []

    def clear(self, parameters: Sequence[nn.Parameter]) -> None:
        if self._is_open or any(_holds_something(group) for group in self._groups):
            _discard(self._states)
            self._is_open = False
        _reshard(self._groups)  # evaluated after the last backward, modules keep parameters that are out of date now
        for parameter in parameters:
            parameter.grad = None

    def stale(self, parameters: Sequence[nn.Parameter], *, in_window: bool = False) -> bool:
        return super().stale(parameters) or any(_holds_something(group) for group in self._groups)

    def partial(self, parameters: Sequence[nn.Parameter]) -> dict[str, Any]:
        everyone = [p for group in self._groups for p in group.fsdp_params]
        unused = {id(p) for p in self._unused}
        return {
            "gradients": gradients_of(parameters),
            "unsharded": [on_host(_unsharded_gradient(p), getattr(p, "_unsharded_param", None)) for p in everyone],
            "not yet over replicas": [on_host(group._partial_reduce_output, None) for group in self._groups],
            "places in it": [_layout(group).get(p) for group in self._groups for p in group.fsdp_params],
            "unused": [id(p) in unused for p in everyone],
        }

    def put_partial(self, parameters: Sequence[nn.Parameter], partial: dict[str, Any]) -> None:
        everyone = [p for group in self._groups for p in group.fsdp_params]
        put_gradients(parameters, partial["gradients"])
        if any(gradient is not None for gradient in partial["unsharded"]):
            self._gather_parameters()  # which makes the tensors that hold these
            for parameter, gradient in zip(everyone, partial["unsharded"], strict=True):
                _put_unsharded_gradient(parameter, gradient)
            if self._policy != "gathered":
                _reshard(self._groups)
        for group, kept in zip(self._groups, partial["not yet over replicas"], strict=True):
            group._partial_reduce_output = None if kept is None else kept.to(self._device)
        places = iter(partial["places in it"])
        for group in self._groups:
            of_group = {p: place for p, place in zip(group.fsdp_params, places, strict=False) if place is not None}
            _layout(group).update(of_group)
        self._unused = [p for p, is_unused in zip(everyone, partial["unused"], strict=True) if is_unused]

    def _gather_parameters(self) -> None:
        """All of them, on all ranks together."""
        for model in self.models:
            for module in model.modules():
                if self.wraps(module):
                    module.unshard()  # type: ignore[operator]  # fully_shard gave it

    def _shards(self, parameters: Sequence[nn.Parameter]) -> dict[tuple[dist.ProcessGroup, ...], list[Tensor]]:
        """Gradients here, by the groups over which they are cut."""
        by_groups: dict[tuple[dist.ProcessGroup, ...], list[Tensor]] = {}
        for parameter in parameters:
            if parameter.grad is not None:
                groups, shard = _shard_of(parameter.grad)
                by_groups.setdefault(groups, []).append(shard)
        return by_groups

    def norm(self, parameters: Sequence[nn.Parameter], kind: float = 2.0, over: Tensor | None = None) -> Tensor:
        """By hand: torch asks DTensor at each kernel, and fails at the largest element of a shard that has none."""
        norms = []
        for groups, shards in self._shards(parameters).items():
            norm = total_norm(shards, kind, over).to(self._device)
            if math.isinf(kind):
                for group in groups:
                    dist.all_reduce(norm, op=dist.ReduceOp.MAX, group=group)
            elif groups:
                norm = norm.pow(kind)
                for group in groups:
                    dist.all_reduce(norm, group=group)
                norm = norm.pow(1 / kind)
            norms.append(norm)
        if len(norms) == 1:
            return norms[0]
        wide = torch.float64 if any(norm.dtype == torch.float64 for norm in norms) else torch.float32
        return total_norm([torch.stack([norm.to(wide) for norm in norms])] if norms else [], kind)

    def part_of_square(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        parts = []
        for parameter_groups, shards in self._shards(parameters).items():
            copies = self.peers.num_ranks / math.prod(dist.get_world_size(group) for group in parameter_groups)
            parts.append(total_norm(shards, 2.0).to(self._device).square() / copies)
        return torch.stack([one.to(parts[0].dtype) for one in parts]).sum() if parts else torch.zeros(())

    def _divides_by(self) -> float:
        """One number for all groups: it goes into the share."""
        by_factor: dict[float, list[str]] = {}
        for state in self._states:
            for group in _groups(state):
                name = ", ".join(_name(p) for p in group.fsdp_params[:1])
                if getattr(group, "_all_reduce_hook", None) is not None:
                    raise DistaccumError(
                        f"set_all_reduce_hook on the module of {name}: what the hook divides by, and over which ranks, "
                        "cannot be known; use a hybrid mesh (replicate, shard) instead"
                    )
                if getattr(group, "reduce_scatter_reduce_op", None) is not None:  # torch 2.6 to 2.8
                    raise DistaccumError(
                        f"set_reduce_scatter_divide_factor on the module of {name}: this version of torch keeps an "
                        "operation from which the factor cannot be read; leave it out (shares cancel what FSDP2 "
                        "divides by)"
                    )
                factor = getattr(group, "gradient_divide_factor", None)
                by_factor.setdefault(float(factor or self.peers.num_ranks), []).append(name)
        if len(by_factor) > 1:
            seen = "; ".join(f"{factor:g} for the module of {listed(names)}" for factor, names in by_factor.items())
            raise DistaccumError(
                f"gradients are divided by different factors ({seen}): set_gradient_divide_factor is not recursive; "
                "call it on each module under fully_shard, or on none"
            )
        return next(iter(by_factor))

    def _reduce_what_is_left(self) -> None:
        """What no backward reduced (one that left a term or a module out), and None for what no rank used.

        Ranks agree on both, in one small collective on the host. Zeros were reduced for parameters that a rank did not
        use; where none did, None leaves them alone in weight decay and momentum, as it would without sharding.
        """
        if not self._stands_in:
            self._unused = [p for p in self._unused if _unsharded_gradient(p) is None]
        unused = {id(p) for p in self._unused}
        everyone = [p for group in self._groups for p in group.fsdp_params]
        left = [_holds_something(group) for group in self._groups]
        agreed = torch.tensor([*left, *(id(p) not in unused for p in everyone)], dtype=torch.uint8)
        dist.all_reduce(agreed, op=dist.ReduceOp.MAX, group=self.host_group)
        answers = agreed.tolist()
        for group, is_left in zip(self._groups, answers, strict=False):
            if is_left:
                _reduce_now(group)
                if _holds_something(group):
                    raise DistaccumError(
                        f"the module of {_name(group.fsdp_params[0])} was used in earlier micro-steps and not in the "
                        "last, and this version of torch cannot reduce what it kept; use sync='last', or every module "
                        "in the last micro-batch"
                    )
        for parameter, is_used in zip(everyone, answers[len(left) :], strict=True):
            if not is_used:
                parameter.sharded_param.grad = None


# What follows reads private fields of FSDP2 (torch 2.6 to 2.15): it has setters and no getters, so that what was found
# can be put back only like this; and its `reset_iter_state` discards an unreduced window in torch 2.15, not in 2.13
# (2.6 has none).
@dataclass
class _Flags:
    """A group's flags as they were before the window."""

    state: Any
    group: Any
    reduce_grads: bool
    all_reduce_grads: bool
    reshard_after_backward: bool
    unused: bool | None
    post_forward_mesh_info: Any
    is_initialised: bool

    @classmethod
    def of(cls, state: Any, group: Any) -> _Flags:
        return cls(
            state,
            group,
            group.reduce_grads,
            group.all_reduce_grads,
            group.reshard_after_backward,
            getattr(group, "reduce_scatter_unused_params", None),
            group.post_forward_mesh_info,
            state._is_root is not None,
        )

    def put_back(self) -> None:
        group = self.group
        group.reduce_grads, group.all_reduce_grads = self.reduce_grads, self.all_reduce_grads
        group.reshard_after_backward = self.reshard_after_backward
        if self.unused is not None:
            group.reduce_scatter_unused_params = self.unused
        became_root = not self.is_initialised and self.state._is_root
        if not (became_root and getattr(self.state, "_auto_reshard_after_forward", True)):
            group.post_forward_mesh_info = self.post_forward_mesh_info  # else FSDP2 set it, for the root


def _states(models: Sequence[nn.Module]) -> Iterator[Any]:
    seen = set()
    for model in models:
        for module in model.modules():
            if FullyShardEngine.wraps(module):
                state = module._get_fsdp_state()  # type: ignore[operator]  # fully_shard gave it
                if state not in seen:  # one may be of several modules
                    seen.add(state)
                    yield state


def _groups(state: Any) -> list[Any]:
    groups = getattr(state, "_fsdp_param_groups", None)  # several from torch 2.12 on
    if groups is None:
        groups = [] if state._fsdp_param_group is None else [state._fsdp_param_group]
    return list(groups)


def _shard_of(gradient: Any) -> tuple[tuple[dist.ProcessGroup, ...], Tensor]:
    """This rank's part, and the groups that hold the others, tensor-parallel ones included: none where it is whole."""
    mesh = getattr(gradient, "device_mesh", None)
    if mesh is None:
        return (), gradient
    if any(placement.is_partial() for placement in gradient.placements):
        return (), gradient.full_tensor()
    sharded = [i for i, placement in enumerate(gradient.placements) if not placement.is_replicate()]
    return tuple(mesh.get_group(i) for i in sharded), local(gradient)


def _is_sharded(group: Any) -> bool:
    return getattr(group.mesh_info, "shard_mesh_dim", None) is not None


def _is_hybrid(group: Any) -> bool:
    return getattr(group.mesh_info, "replicate_mesh_dim", None) is not None


def _data_parallel_group(groups: Sequence[Any]) -> dist.ProcessGroup:
    """The ranks that hold different samples: the mesh's shards and replicas, not its tensor-parallel dimension."""
    sets = {tuple(sorted(_ranks(group))): group for group in groups}
    if len(sets) > 1:
        seen = "; ".join(f"{_name(group.fsdp_params[0])} over ranks {list(ranks)}" for ranks, group in sets.items())
        raise ValueError(
            f"fully_shard was called with meshes over different ranks ({seen}), expected one data-parallel group; use "
            "an Accumulator each, or one mesh"
        )
    (ranks, group), *_ = sets.items()
    info = group.mesh_info
    if not (_is_sharded(group) and _is_hybrid(group)):
        made: Any = info.shard_process_group if _is_sharded(group) else info.replicate_process_group
    elif list(ranks) == list(range(dist.get_world_size())):
        made = dist.group.WORLD
    else:
        made = dist.new_group(list(ranks), use_local_synchronization=True)
    assert isinstance(made, dist.ProcessGroup)
    return made


def _ranks(group: Any) -> list[int]:
    info = group.mesh_info
    dimensions = {info.shard_mesh_dim, info.replicate_mesh_dim}
    here = info.mesh.get_coordinate()
    ranks: list[int] = (
        info.mesh.mesh[tuple(slice(None) if i in dimensions else c for i, c in enumerate(here))].flatten().tolist()
    )
    return ranks


def _name(parameter: Any) -> str:
    return str(getattr(parameter, "_param_fqn", None) or parameter._module_info.param_name)


def _adds_up_in(group: Any, parameter: Any, sync: Sync) -> torch.dtype:
    policy, shard = parameter.mp_policy, parameter.sharded_param
    if hasattr(group, "_fsdp_params_with_wider_grad_dtype"):  # torch 2.15: what backward computes is cast up
        kept = shard.grad_dtype or policy.param_dtype or shard.dtype
    else:
        kept = policy.param_dtype or shard.dtype
    if sync == "every":  # a shard's .grad, after it is reduced
        kept = getattr(shard, "grad_dtype", None) or shard.dtype
    elif policy.reduce_dtype:
        kept = policy.reduce_dtype
    assert isinstance(kept, torch.dtype)
    return kept


def _is_trained(parameter: Any) -> bool:
    return bool(parameter.sharded_param.requires_grad)


def _zeros_can_be_made(group: Any) -> bool:
    """Not where a gradient's dtype is whatever autograd gives (grad_dtype=None)."""
    return all(p.mp_policy.reduce_dtype or p.sharded_param.grad_dtype is not None for p in group.fsdp_params)


def _always_reduces(group: Any) -> bool:
    """Zeros too, where there is no gradient."""
    return bool(getattr(group, "reduce_scatter_unused_params", False))


def _unsharded_gradient(parameter: Any) -> Tensor | None:
    kept: Tensor | None = getattr(parameter, "unsharded_accumulated_grad", None)  # up to torch 2.13
    if kept is None:
        gathered = getattr(parameter, "_unsharded_param", None)
        kept = None if gathered is None else gathered.grad
    return kept


def _standing(parameter: Any) -> Tensor | None:
    """With what a backward has added and torch, to 2.13, has not moved yet to where it adds up in another dtype."""
    kept: Tensor | None = getattr(parameter, "unsharded_accumulated_grad", None)
    come: Tensor | None = parameter._unsharded_param.grad
    if kept is None or come is None or kept is come:
        return come if kept is None else kept
    return kept + come


def _put_unsharded_gradient(parameter: Any, gradient: Any) -> None:
    """In mid-window, where torch keeps it: to 2.13 beside the parameter if it adds up in another dtype."""
    if gradient is None:
        return
    gathered = parameter._unsharded_param
    made = from_host(gradient, gathered)
    if made.dtype != gathered.dtype and not hasattr(type(parameter), "unsharded_accumulated_grad"):
        parameter.unsharded_accumulated_grad = made
    else:
        gathered.grad = made


def _layout(group: Any) -> dict[Any, Any]:
    """Where parameters are in what waits for the all-reduce over replicas; before torch 2.15 it is not kept."""
    layout: dict[Any, Any] = getattr(group, "_partial_reduce_output_layout", {})
    return layout


def _when_used(parameter: Any, seen: set[int]) -> Any:
    return parameter._unsharded_param.register_post_accumulate_grad_hook(lambda _: seen.add(id(parameter)))


def _holds_something(group: Any) -> bool:
    return group._partial_reduce_output is not None or any(
        _unsharded_gradient(parameter) is not None for parameter in group.fsdp_params
    )


def _reshard(groups: Sequence[Any]) -> None:
    for group in groups:
        if group.is_unsharded and _is_sharded(group):
            group._to_sharded()


def _reduce_now(group: Any) -> None:
    """What its next backward would do at its end."""
    group.reduce_grads = group.all_reduce_grads = True
    group.post_backward()
    group._wait_for_post_backward()
    group._training_state = type(group._training_state).IDLE


def _discard(states: Sequence[Any]) -> None:
    for state in states:
        if state._is_root and hasattr(state, "_reset_iter_state"):
            state._reset_iter_state()  # public as reset_iter_state of the root; forgets a forward that did not end
        for group in _groups(state):
            group._partial_reduce_output = None
            for parameter in group.fsdp_params:
                if getattr(parameter, "unsharded_accumulated_grad", None) is not None:
                    parameter.unsharded_accumulated_grad = None
                if getattr(parameter, "_unsharded_param", None) is not None:
                    parameter._unsharded_param.grad = None
            if not hasattr(state, "_reset_iter_state"):
                group._training_state = type(group._training_state).IDLE
                group._post_forward_indices.clear()
                group.comm_ctx.post_forward_order.clear()
                group._to_sharded()
        if not hasattr(state, "_reset_iter_state"):
            state._training_state = type(state._training_state).IDLE
            state._state_ctx.iter_forward_root = None
            state._state_ctx.post_backward_final_callback_queued = False
