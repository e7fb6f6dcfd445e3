"""DistributedDataParallel, as the model itself or anywhere inside it.

DDP decides in forward whether its next backward reduces. Here every forward of a window runs with the reduction off,
and right before the backward that must reduce, DDP is armed with the call that its own forward makes. So it does not
matter where the caller runs forward, nor how many backwards follow it.

In some windows the library averages the gradients after the last backward (same result, no overlap): if the plan says
so (an `update()` whose size is not proven yet, `contrast()`, a pipeline); if a rank has no micro-batch; if its last one
(with `sync="every"`, any) leaves a loss term out; if one of several DDPs looks for unused parameters; if an extension
adds gradients up by itself; and in the first window of a static graph, whose first backward DDP must see and reduces
(pytorch#143580): averaging gradients that are equal already changes nothing.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..adapter import Prepared
from ..law import DistaccumError, Plan
from ..meshes.sharing import lies_over
from ..norms import names_of
from ..private import version_of, zero_all
from ..ranks import in_contact
from ..text import shorten
from .averaging import average, averaged
from .base import GRAD, Engine, Roots, Sync, refuse_to_look, why_tensor_parallel
from .private import ddp as private

PARTS = "over tensor-parallel modules, whose parts it shows as plain tensors"
# A gradient, and how often it was written to.
Stamp = tuple[Tensor | None, int]


@final
class DDPEngine(Engine):
    name = "DistributedDataParallel"
    owns = frozenset(("dtype",))

    @classmethod
    def wraps(cls, module: nn.Module) -> bool:
        return isinstance(module, DistributedDataParallel)

    def __init__(self, models: Sequence[nn.Module], sync: Sync) -> None:
        modules = [module for model in models for module in model.modules()]
        self.wrappers = list(dict.fromkeys(m for m in modules if isinstance(m, DistributedDataParallel)))
        self._shared = {wrapper: _SHARED.setdefault(wrapper, _Shared()) for wrapper in self.wrappers}
        for wrapper in self.wrappers:
            private.refuse_what_cannot_accumulate(wrapper)
        group: dist.ProcessGroup = self.wrappers[0].process_group
        seen = {str(dist.get_process_group_ranks(wrapper.process_group)): wrapper for wrapper in self.wrappers}
        if len(seen) > 1:
            raise ValueError(
                f"the model holds DDP modules over ranks {' and over ranks '.join(seen)}, expected "
                "one data-parallel group; wrap them with the same process_group, or use an Accumulator each"
            )
        super().__init__(models, sync, group)
        self._covered = {wrapper: private.reduced_by(wrapper) for wrapper in self.wrappers}
        self._own = [parameter for covered in self._covered.values() for parameter in covered.values()]
        self._replicated_ids = {id(parameter) for parameter in self._own}
        named = [pair for wrapper in self.wrappers for pair in wrapper.named_parameters()]
        self._left_out = [(name, parameter) for name, parameter in named if id(parameter) not in self._replicated_ids]
        self._shows_parts = any(map(private.was_tensor_parallel, (parameter for _, parameter in named)))
        self._refuse_dtensors()
        # Their gradients are cleared in place: set to None, bucket views would no longer save memory. If DDP looks for
        # unused parameters, a zero would count as a gradient in the next window.
        self._as_views = [w for w in self.wrappers if w.gradient_as_bucket_view and not w.find_unused_parameters]
        # The gradients that were cleared in place, which count as None, by the ids of their parameters.
        self._zeroed: dict[int, Stamp] = {}
        self._unseen_graphs = [wrapper for wrapper in self.wrappers if wrapper.static_graph]
        self._graph_is_torn = False
        self._searching = [w for w in self.wrappers if w.find_unused_parameters and not w.static_graph]
        self._armed: list[DistributedDataParallel] = []
        # Averaged after the last backward.
        self._by_hand: list[nn.Parameter] = []
        self._reduces = False

    def _refuse_dtensors(self) -> None:
        sharded: list[Any] = [p for p in self.parameters() if hasattr(p, "to_local")]
        for parameter in sharded:
            is_inside = id(parameter) in self._replicated_ids
            if is_inside or lies_over(parameter, self.peers.here)[0]:
                where = "inside" if is_inside else "over data-parallel ranks, outside"
                raise ValueError(
                    f"{names_of(self.models)[id(parameter)]} is a DTensor {where} of DDP, whose buckets hold plain "
                    "tensors and whose forwards do not wait for each other; use fully_shard (for experts, on a mesh "
                    "of their own or with ignored_params)"
                )

    def adopt(self, given: Prepared, max_norm: float | None, on_nonfinite: str) -> None:
        if self._shows_parts:
            refuse_to_look(self, PARTS, given, max_norm, on_nonfinite)

    def num_micro_steps(self, plan: Plan) -> tuple[int, int]:
        # If DDP saw the graph under another Accumulator, its next forward after a reduction would lay the buckets out
        # together with all ranks, and a rank may have no next forward.
        self._unseen_graphs = [wrapper for wrapper in self._unseen_graphs if not self._shared[wrapper].has_seen_graph]
        not_searching = [covered for wrapper, covered in self._covered.items() if not wrapper.find_unused_parameters]
        if frozen := [name for covered in not_searching for name, p in covered.items() if not p.requires_grad]:
            raise DistaccumError(
                f"{shorten(frozen)} was frozen after DDP wrapped the model, which then waits for its gradient and "
                "leaves ranks apart; freeze first and wrap then, or pass find_unused_parameters=True to DDP"
            )
        if trained := [name for name, parameter in self._left_out if parameter.requires_grad]:
            raise DistaccumError(
                f"{shorten(trained)} is trained but was frozen or absent when DDP wrapped the model, or is in "
                "_ddp_params_and_buffers_to_ignore, so DDP does not reduce it; wrap the model anew, or keep it outside "
                "of the wrapped module (it is then averaged over ranks)"
            )
        steps = super().num_micro_steps(plan)
        if self._graph_is_torn:
            raise DistaccumError(
                "the first backward of a DDP with static_graph=True failed, and DDP keeps the part that it saw; wrap "
                "the model anew and make a new Accumulator"
            )
        if plan.some_rank_is_dry and self._unseen_graphs:
            raise DistaccumError(
                f"ranks have {plan.fewest} to {plan.most} micro-batches, and DDP with static_graph=True must see a "
                "backward on every rank in its first window; give each rank a micro-batch there"
            )
        return steps

    def begin(self, plan: Plan, parameters: Sequence[nn.Parameter]) -> None:
        others = [p for p in parameters if id(p) not in self._replicated_ids]
        self._by_hand = averaged(self, others) if others else []
        whole = plan.all_terms if self.sync == "every" else plan.all_terms_in_last
        # If ranks may use different wrappers of several, their backwards would reduce them in different orders.
        may_part = len(self.wrappers) > 1 and self._searching
        not_here = plan.reduce_afterwards or self._unseen_graphs or may_part or self.read_grad is not GRAD
        self._reduces = whole and not plan.some_rank_is_dry and not not_here
        if not self._reduces:
            self._by_hand += self._own
            if self._zeroed:
                # A zeroed view of a bucket would look like the gradient of a parameter that took part.
                super().clear(self._by_hand)
        for wrapper in self.wrappers:
            shared = self._shared[wrapper]
            if not shared.takers:
                shared.flags = wrapper.require_backward_grad_sync, wrapper.require_forward_param_sync
            shared.takers.append(self)
            # Armed, its next backward would reduce on a rank where a forward outside windows armed it, and parameters
            # used in another Accumulator's open window would count as used in this one. A rank may run fewer forwards
            # than others, or none, or fail in its first, so no forward may communicate.
            at_end = private.communicate_before_forward(wrapper, disarms=wrapper not in self._unseen_graphs)
            _switch(wrapper, wrapper in self._unseen_graphs, at_end and not (plan.some_rank_is_dry or plan.agrees))

    def will_reduce(self, reduce: bool) -> bool:
        return bool(self._unseen_graphs) or (reduce and self._reduces)

    def backward(self, losses: Sequence[Tensor], seeds: Sequence[Tensor], reduce: bool) -> None:
        if self._unseen_graphs:
            # DDP has armed these itself, in forward, and learns their graphs from this backward.
            self._armed, self._graph_is_torn = self._unseen_graphs, True
        elif reduce and self._reduces:
            losses, seeds = self._arm(losses, seeds)
        else:
            self.run_backward(tuple(losses), tuple(seeds))
            return
        stamps_of = [list(map(_stamp, self._watched(wrapper))) for wrapper in self._armed]
        self.run_backward(tuple(losses), tuple(seeds))
        for wrapper, stamps in zip(self._armed, stamps_of, strict=True):
            # If it has not, then this backward was another part's, or another model's.
            pairs = zip(stamps, map(_stamp, self._watched(wrapper)), strict=True)
            has_reduced = any(before is not now or old != new for (before, old), (now, new) in pairs)
            if self._graph_is_torn:
                _switch(wrapper, not has_reduced, False)
                self._shared[wrapper].has_seen_graph = has_reduced
            else:
                self._settle(wrapper, has_reduced or wrapper in self._searching)
        self._armed, self._graph_is_torn = [], False
        self._unseen_graphs = [wrapper for wrapper in self._unseen_graphs if not self._shared[wrapper].has_seen_graph]

    def with_earlier(self, losses: Sequence[Tensor], seeds: Sequence[Tensor]) -> Roots:
        if any(wrapper.static_graph for wrapper in self.wrappers):
            raise DistaccumError(
                "heads() with DDP's static_graph=True, which takes each backward for the whole graph; wrap the model "
                "without it, or add the losses up"
            )
        earlier = [p for p in self._own if p.grad is not None and not self._is_zeroed(p)]
        root = [_Reach.apply(*earlier)] if earlier else []
        return [*losses, *root], [*seeds, *map(torch.zeros_like, root)]

    def _arm(self, losses: Sequence[Tensor], seeds: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Makes the next backward reduce; returns the roots and seeds that it must run from."""
        roots, seeds = list(losses), list(seeds)
        for wrapper in self._searching:
            # DDP starts at the first of its parameters that backward reaches, which must happen on every rank.
            # This root reaches one, and gives it no gradient.
            first = next((p for p in self._covered[wrapper].values() if p.requires_grad), None)
            if first is not None:
                roots.append(_Reach.apply(first))
                seeds.append(torch.zeros_like(roots[-1]))
        self._armed = [w for w in self.wrappers if any(p.requires_grad for p in self._covered[w].values())]
        for wrapper in self._armed:
            wrapper.reducer.prepare_for_backward(roots if wrapper in self._searching else [])
        return roots, seeds

    def _settle(self, wrapper: DistributedDataParallel, has_reduced: bool) -> None:
        try:
            # Otherwise a missing gradient would let ranks diverge silently until the next window.
            private.refuse_unfinished_reduction(wrapper)
        except RuntimeError as error:
            indices = re.search(r"did not receive grad for rank \d+: ([\d ]+)", str(error))
            names = list(self._covered[wrapper])
            missing = [names[int(i)] for i in indices[1].split()] if indices else ["a parameter"]
            raise DistaccumError(
                f"{shorten(missing)} took no part in the last backward of the window (or an early one, sync='every'), "
                "which is the one that reduces, so DDP did not reduce it; pass find_unused_parameters=True to DDP "
                "(parameters that a micro-batch leaves out are then exact), or use all of them in each micro-batch"
            ) from error
        shared = self._shared[wrapper]
        if not has_reduced or shared.is_laid_out:
            # Otherwise it would lay its buckets out again.
            private.disarm(wrapper)
        elif wrapper not in self._searching:
            # A searching one keeps the buckets that it began with.
            shared.is_laid_out = False
        if not has_reduced:
            self._by_hand += self._covered[wrapper].values()

    def _watched(self, wrapper: DistributedDataParallel) -> list[nn.Parameter]:
        """The parameters some of whose gradients change when DDP reduces."""
        parameters = list(self._covered[wrapper].values())
        return parameters if wrapper.static_graph else parameters[:1]

    def finish(self) -> None:
        if self._by_hand:
            average(self, self._by_hand, self._is_zeroed)
        self._release()

    def _release(self) -> None:
        # Until it reduces, a DDP that looks for unused parameters remembers the used ones, even after the window.
        for wrapper in {*self._armed, *self._searching}:
            private.disarm(wrapper)
        for wrapper in self.wrappers:
            shared = self._shared[wrapper]
            if self in shared.takers:
                shared.takers.remove(self)
                if not shared.takers:
                    _switch(wrapper, *shared.flags)
        self._armed, self._by_hand = [], []

    def why_no_local_grad(self, parameters: Sequence[nn.Parameter]) -> str | None:
        return f"{PARTS}; use fully_shard" if self._shows_parts else why_tensor_parallel(parameters)

    def clear(self, parameters: Sequence[nn.Parameter]) -> None:
        self._release()
        for wrapper in self.wrappers:
            shared = self._shared[wrapper]
            if shared.is_laid_out is False:
                # All ranks are here now, and may not be when the next window begins.
                views = self._covered[wrapper].values() if wrapper in self._as_views else ()
                with in_contact():
                    shared.is_laid_out = private.rebuild_buckets(wrapper, views)
        zeroed = [p for wrapper in self._as_views for p in self._covered[wrapper].values() if p.grad is not None]
        if zeroed:
            zero_all([p.grad for p in zeroed if p.grad is not None])
        self._zeroed = {id(parameter): _stamp(parameter) for parameter in zeroed}
        for parameter in parameters:
            if id(parameter) not in self._zeroed:
                parameter.grad = None

    def _is_zeroed(self, parameter: nn.Parameter) -> bool:
        gradient, version = self._zeroed.get(id(parameter), (None, 0))
        return gradient is not None and gradient is parameter.grad and version == version_of(gradient)

    def stale(self, parameters: Sequence[nn.Parameter]) -> bool:
        for p in parameters:  # noqa: SIM110  # as in Engine
            if p.grad is not None and not self._is_zeroed(p):
                return True
        return False


@dataclass
class _Shared:
    """State that all Accumulators of a wrapper share while its forwards do not arm the reduction.

    `takers` are the engines with an open window on it, and `flags` its own before the first of these. `is_laid_out`:
    its buckets have their final layout (None: it has not reduced yet). `has_seen_graph`: DDP knows its static graph.
    """

    takers: list[DDPEngine] = field(default_factory=list)
    flags: tuple[bool, bool] = (True, True)
    is_laid_out: bool | None = None
    has_seen_graph: bool = False


_SHARED: weakref.WeakKeyDictionary[DistributedDataParallel, _Shared] = weakref.WeakKeyDictionary()


def _switch(wrapper: DistributedDataParallel, backward: bool, forward: bool) -> None:
    """Sets whether a backward reduces and a forward sends buffers; a module's own setting of both takes 12 us."""
    vars(wrapper).update(require_backward_grad_sync=backward, require_forward_param_sync=forward)


def _stamp(parameter: nn.Parameter) -> Stamp:
    gradient = parameter.grad
    return gradient, -1 if gradient is None else version_of(gradient)


class _Reach(torch.autograd.Function):
    """A root whose backward reaches parameters but gives them no gradient; DDP's hooks run all the same."""

    @staticmethod
    def forward(ctx: Any, *parameters: Tensor) -> Tensor:
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, ...]:
        return (None,) * len(ctx.needs_input_grad)
