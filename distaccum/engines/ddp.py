"""DistributedDataParallel, as the model itself or anywhere inside it.

DDP decides in forward whether its next backward reduces. Here every forward of a window runs with the reduction off,
and right before the backward that must reduce, DDP is armed with the call that its own forward makes. So it does not
matter where the caller runs forward, nor how many backwards follow it.

Where DDP would have to know more than that, the library averages the gradients after the last backward (same result,
no overlap): if it has `find_unused_parameters` or `static_graph`; if the plan says so (an `update()` whose size is not
proven yet, `contrast()`, a pipeline); if a rank has no micro-batch; if its last one (with `sync="every"`, any) leaves a
loss term out; and if an extension adds gradients up by itself.
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

from ..law import DistaccumError, Plan
from ..private import version_of, zero_all
from ..ranks import in_contact
from ..text import shorten
from .averaging import average, averaged
from .base import GRAD, Engine, Roots, Sync, refuse_parts
from .private import ddp as private

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
        seen = {str(_ranks_of(wrapper)): wrapper for wrapper in self.wrappers}
        if len(seen) > 1:
            raise ValueError(
                f"the model holds DDP modules over ranks {' and over ranks '.join(seen)}, expected "
                "one data-parallel group; wrap them with the same process_group, or use an Accumulator each"
            )
        super().__init__(models, sync, self.wrappers[0].process_group)
        self._covered = {wrapper: private.reduced_by(wrapper) for wrapper in self.wrappers}
        self._own = [parameter for covered in self._covered.values() for parameter in covered.values()]
        self._replicated_ids = {id(parameter) for parameter in self._own}
        named = [pair for wrapper in self.wrappers for pair in wrapper.named_parameters()]
        self._left_out = [(name, parameter) for name, parameter in named if id(parameter) not in self._replicated_ids]
        refuse_parts(self, list(filter(private.is_part, self.parameters())))
        # Those that reduce by themselves, and those whose gradients the library averages.
        self._plain = [w for w in self.wrappers if not (w.find_unused_parameters or w.static_graph)]
        self._apart = [wrapper for wrapper in self.wrappers if wrapper not in self._plain]
        # Their gradients are cleared in place: set to None, bucket views would no longer save memory.
        self._as_views = [wrapper for wrapper in self._plain if wrapper.gradient_as_bucket_view]
        # The gradients that were cleared in place, which count as None, by the ids of their parameters.
        self._zeroed: dict[int, Stamp] = {}
        self._armed: list[DistributedDataParallel] = []
        # Averaged after the last backward.
        self._by_hand: list[nn.Parameter] = []
        self._reduces = False

    def num_micro_steps(self, plan: Plan) -> tuple[int, int]:
        frozen = [n for wrapper in self._plain for n, p in self._covered[wrapper].items() if not p.requires_grad]
        trained = [name for name, parameter in self._left_out if parameter.requires_grad]
        if frozen or trained:
            raise DistaccumError(
                f"{shorten([*frozen, *trained])} is not {'frozen' if trained else 'trained'} as it was when DDP "
                "wrapped the model, or is in _ddp_params_and_buffers_to_ignore, which leaves ranks apart; wrap the "
                "model anew, keep it outside of the wrapped module (it is then averaged over ranks), or pass "
                "find_unused_parameters=True to DDP if it is frozen"
            )
        return super().num_micro_steps(plan)

    def begin(self, plan: Plan, parameters: Sequence[nn.Parameter]) -> None:
        others = [p for p in parameters if id(p) not in self._replicated_ids]
        self._by_hand = averaged(self, others) if others else []
        lacks = plan.lacks_terms_in_last if self.sync == "last" else plan.lacks_terms
        not_here = plan.reduce_afterwards or not plan.fewest or self.read_grad is not GRAD
        self._reduces = bool(self._plain) and not (lacks or not_here)
        apart = self._apart if self._reduces else self.wrappers
        self._by_hand += [p for wrapper in apart for p in self._covered[wrapper].values()]
        if self._zeroed and not self._reduces:
            # A zeroed view of a bucket would look like the gradient of a parameter that took part.
            super().clear(self._by_hand)
        for wrapper in self.wrappers:
            shared = self._shared[wrapper]
            if not shared.takers:
                shared.flags = {name: vars(wrapper)[name] for name in private.FLAGS if name in vars(wrapper)}
            shared.takers.append(self)
            # Armed, its next backward would reduce on a rank where a forward outside windows armed it, and parameters
            # used in another Accumulator's open window would count as used in this one. A rank may run fewer forwards
            # than others, or none, or fail in its first, so no forward may communicate.
            private.hold_back(wrapper, sends_at_end=plan.fewest > 0 and not plan.agrees)

    def will_reduce(self, reduce: bool) -> bool:
        return reduce and self._reduces

    def backward(self, losses: Sequence[Tensor], seeds: Sequence[Tensor], reduce: bool) -> None:
        if reduce and self._reduces:
            self._armed = [w for w in self._plain if any(p.requires_grad for p in self._covered[w].values())]
        for wrapper in self._armed:
            wrapper.reducer.prepare_for_backward([])
        firsts = [next(iter(self._covered[wrapper].values())) for wrapper in self._armed]
        before = list(map(_stamp, firsts))
        self.run_backward(tuple(losses), tuple(seeds))
        for wrapper, (gradient, version), (now, new) in zip(self._armed, before, map(_stamp, firsts), strict=True):
            # If it has not changed, then this backward was another part's, or another model's.
            self._settle(wrapper, gradient is not now or version != new)
        self._armed = []

    def with_earlier(self, losses: Sequence[Tensor], seeds: Sequence[Tensor]) -> Roots:
        earlier = [p for p in self._own if p.grad is not None and not self._is_zeroed(p)]
        root = [_Reach.apply(*earlier)] if earlier else []
        return [*losses, *root], [*seeds, *map(torch.zeros_like, root)]

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
        else:
            shared.is_laid_out = False
        if not has_reduced:
            self._by_hand += self._covered[wrapper].values()

    def finish(self) -> None:
        if self._by_hand:
            average(self, self._by_hand, self._is_zeroed)
        self._release()

    def _release(self) -> None:
        # Until it reduces, a DDP that looks for unused parameters remembers the used ones, even after the window.
        for wrapper in (*self._armed, *(w for w in self._apart if not w.static_graph)):
            private.disarm(wrapper)
        for wrapper in self.wrappers:
            shared = self._shared[wrapper]
            if self in shared.takers:
                shared.takers.remove(self)
                if not shared.takers:
                    vars(wrapper).update(shared.flags)
        self._armed = []
        self._by_hand = []

    def why_no_local_grad(self, parameters: Sequence[nn.Parameter]) -> str | None:
        return None

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
        return not all(map(self._is_zeroed, [p for p in parameters if p.grad is not None]))


@dataclass
class _Shared:
    """State that all Accumulators of a wrapper share while its forwards do not arm the reduction.

    `takers` are the engines with an open window on it, and `flags` its own before the first of these. `is_laid_out`:
    its buckets have their final layout (None: it has not reduced yet).
    """

    takers: list[DDPEngine] = field(default_factory=list)
    flags: dict[str, bool] = field(default_factory=dict)
    is_laid_out: bool | None = None


_SHARED: weakref.WeakKeyDictionary[DistributedDataParallel, _Shared] = weakref.WeakKeyDictionary()


def _ranks_of(wrapper: DistributedDataParallel) -> list[int]:
    try:
        return dist.get_process_group_ranks(wrapper.process_group)
    except (KeyError, ValueError):
        raise ValueError(
            f"DDP reduces over a {type(wrapper.process_group).__name__}, which torch.distributed does not know, as in "
            "torchft, and counts need ranks that stay: give DDP a group of torch.distributed, and restart lost ranks"
        ) from None


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
