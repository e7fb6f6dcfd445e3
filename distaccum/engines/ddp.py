"""DistributedDataParallel, as the model itself or anywhere inside it.

DDP decides in forward whether its next backward reduces. Here every forward of a window runs with the
reduction off, and it is armed right before the backward that shall reduce, with the call that DDP's own
forward makes. So it does not matter where the caller's forward stands, nor how many backwards follow it.

Four kinds of window do not leave the reduction to DDP's last backward, and are averaged by hand after it (same
result, no overlap): a rank has no micro-batch, a rank's last micro-batch leaves a loss term out, the first window of a
static graph (whose first backward DDP must see, pytorch#143580), and those of several DDPs of which one looks for
unused parameters.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..gradients.norms import leaves
from ..gradients.wide import Phase, Sums
from ..law.errors import DistaccumError
from ..law.plan import Plan
from ..law.shares import listed
from .averaging import average_by_hand
from .base import Sync, gradients_of, put_gradients, why_tensor_parallel
from .ranks import RanksEngine

Mark = tuple[Tensor | None, int]


@final
class DDPEngine(RanksEngine):
    name = "DistributedDataParallel"
    shows_partial = True

    @classmethod
    def wraps(cls, module: nn.Module) -> bool:
        return isinstance(module, DistributedDataParallel)

    def __init__(self, models: Sequence[nn.Module], sync: Sync) -> None:
        self.wrappers = list(_wrappers(models))
        for wrapper in self.wrappers:
            _refuse_what_cannot_accumulate(wrapper)
        group: dist.ProcessGroup = self.wrappers[0].process_group
        ranks = dist.get_process_group_ranks(group)
        for wrapper in self.wrappers:
            others = dist.get_process_group_ranks(wrapper.process_group)
            if others != ranks:
                raise ValueError(
                    f"the model holds DDP modules over ranks {ranks} and over ranks {others}, expected one "
                    "data-parallel group; wrap them with the same process_group, or use an Accumulator each"
                )
        super().__init__(models, sync, group)
        self._covered = {wrapper: _reduced_by(wrapper) for wrapper in self.wrappers}
        # Set to None, views of the buckets would lose the memory that they save. Where DDP looks for unused
        # parameters they are set to None all the same: a zero would pass for a gradient in the next window.
        self._zero_in_place = {
            id(parameter)
            for wrapper, reduced in self._covered.items()
            if wrapper.gradient_as_bucket_view and not wrapper.find_unused_parameters
            for parameter in reduced.values()
        }
        self._zeroed: dict[int, Mark] = {}
        self._unseen_graphs = [wrapper for wrapper in self.wrappers if wrapper.static_graph]
        self._graph_is_torn = False
        self._armed: list[DistributedDataParallel] = []
        self._by_hand: list[nn.Parameter] = []
        self._reduces = False
        self._searching = [w for w in self.wrappers if w.find_unused_parameters and not w.static_graph]
        # Where ranks may use different ones of several wrappers, their backwards would reduce them in different orders.
        self._may_part = len(self.wrappers) > 1 and bool(self._searching)
        self._unreduced: list[DistributedDataParallel] = []  # those of them that saw a backward and did not reduce
        self._strays: set[DistributedDataParallel] = set()  # armed by DDP in a forward that was none of a window's
        for wrapper in self.wrappers:
            weakref.finalize(self, wrapper.register_forward_pre_hook(_Noting(self)).remove)
        self._early = 0  # backwards to come in this window that reduce and are not the last

    def accumulate_in(self, dtype: torch.dtype, parameters: Sequence[nn.Parameter]) -> None:
        # A view of a bucket shall stay one; and where DDP looks for unused parameters, those are used that have a
        # gradient when its own hook runs, which is after this one.
        stays = [w for w in self.wrappers if w.gradient_as_bucket_view or w.find_unused_parameters]
        kept = {id(p) for wrapper in stays for p in self._covered[wrapper].values()}
        self.sums = Sums(parameters, dtype, kept)

    def check(self, plan: Plan) -> None:
        for wrapper, reduced in self._covered.items():
            if wrapper._join_config.enable:  # private, and where a Joinable keeps it
                raise DistaccumError(
                    "a window inside DDP's join(), whose collectives would meet the window's; remove join(): ranks may "
                    "have different numbers of micro-batches without it. It stays on after its block: "
                    "`with model.join(enable=False): pass` turns it off"
                )
            frozen = [name for name, parameter in reduced.items() if not parameter.requires_grad]
            if frozen and not wrapper.find_unused_parameters:
                raise DistaccumError(
                    f"{listed(frozen)} was frozen after DDP wrapped the model, which then waits for its "
                    "gradient and leaves ranks apart; freeze first and wrap then, or pass "
                    "find_unused_parameters=True to DDP"
                )
            if sum(p.requires_grad for p in wrapper.parameters()) > len(reduced) - len(frozen):
                known = {id(parameter) for parameter in reduced.values()}
                named = wrapper.module.named_parameters()
                left_out = [name for name, p in named if p.requires_grad and _is_ignored(wrapper, name)]
                if left_out:
                    raise DistaccumError(
                        f"{listed(left_out)} is trained and in _ddp_params_and_buffers_to_ignore, so DDP does not "
                        "reduce it and ranks may hold copies of it or parts; let DDP reduce it, keep it outside of the "
                        "wrapped module (it is then averaged over ranks), or freeze it"
                    )
                thawed = [n for n, p in wrapper.named_parameters() if p.requires_grad and id(p) not in known]
                raise DistaccumError(
                    f"{listed(thawed)} is trained but was frozen or absent when DDP wrapped the model, which "
                    "does not reduce it; wrap the model anew"
                )
        self.refuse_synchronised_norms(plan)
        if self._graph_is_torn:
            raise DistaccumError(
                "the first backward of a DDP with static_graph=True failed, and DDP keeps what it saw of it; wrap the "
                "model anew and make a new Accumulator"
            )
        if plan.some_rank_is_dry and self._unseen_graphs:
            raise DistaccumError(
                f"ranks have {list(plan.num_counted)} micro-batches, and DDP with static_graph=True must see a "
                "backward on every rank in its first window; give each rank a micro-batch there"
            )

    def num_early_reductions(self, plan: Plan) -> int:
        return min(plan.num_counted) - 1 if self.sync == "every" else 0  # as many on all ranks

    def begin(self, plan: Plan, parameters: Sequence[nn.Parameter]) -> None:
        for wrapper in self._strays:
            if wrapper not in self._unseen_graphs:
                _takers(wrapper).keeps_buckets |= wrapper._has_rebuilt_buckets
                _disarm(wrapper)  # or its next backward would reduce, on the ranks that have one
        self._strays.clear()
        if self.sums is not None:
            self.sums.watch(parameters)
        own = {id(parameter) for reduced in self._covered.values() for parameter in reduced.values()}
        self._by_hand = [p for p in parameters if id(p) not in own]
        if not all(p.requires_grad for p in self._by_hand):
            # What is not in the models, as a parameter of the loss, may be frozen here and trained on another rank.
            models = {id(parameter) for parameter in self.parameters()}
            self._by_hand = [p for p in self._by_hand if p.requires_grad or id(p) not in models]
        whole = plan.all_terms if self.sync == "every" else plan.all_terms_in_last
        self._early = self.num_early_reductions(plan)
        self._reduces = (
            whole
            and not plan.some_rank_is_dry
            and not plan.reduce_afterwards
            and not self._unseen_graphs
            and not self._may_part
        )
        if not self._reduces:
            self._by_hand += [p for reduced in self._covered.values() for p in reduced.values()]
            if self._zeroed:
                # Who takes part must show: a zeroed view of a bucket looks like a gradient.
                for parameter in self._by_hand:
                    parameter.grad = None
        for wrapper in self.wrappers:
            self._take(wrapper)
            # A rank may run fewer forwards than others, none, or not end its first. So none may communicate: neither
            # broadcast buffers nor agree on rebuilt buckets (once, after the first reduction). Private, as in Join.
            if wrapper.reducer._rebuild_buckets():
                wrapper._has_rebuilt_buckets = True
            if wrapper._check_sync_bufs_pre_fwd():  # type: ignore[no-untyped-call]  # torch's
                wrapper._sync_buffers()  # type: ignore[no-untyped-call]
            in_forward = wrapper._check_sync_bufs_post_fwd()  # type: ignore[no-untyped-call]  # by a hook of the user's
            wrapper.require_forward_param_sync = in_forward and not (plan.some_rank_is_dry or plan.agrees)

    def num_laid_out(self) -> int:
        # Private; where it is missing, no window is known to have done so.
        return sum(bool(getattr(wrapper, "_has_rebuilt_buckets", False)) for wrapper in self.wrappers)

    def will_reduce(self, reduce: bool) -> bool:
        return bool(self._unseen_graphs) or (reduce and self._reduces)

    def backward(self, losses: Sequence[Tensor], seeds: Sequence[Tensor], reduce: bool) -> None:
        if self.sums is None:
            self._backward(losses, seeds, reduce)
            return
        is_early = bool(self._unseen_graphs) or (reduce and self._early > 0)
        self._early -= reduce
        if not self.will_reduce(reduce):
            self.sums.phase = Phase.ADD
        elif is_early:
            self.sums.phase = Phase.PASS
        else:
            self._show_what_is_unreached(self.sums, losses)
            self.sums.phase = Phase.ROUND
        self._backward(losses, seeds, reduce)
        if self.sums.phase is Phase.PASS:
            self.sums.take_all(but=self._is_zeroed)

    def _show_what_is_unreached(self, sums: Sums, losses: Sequence[Tensor]) -> None:
        """DDP reduces the .grad of what this backward does not reach too."""
        earlier = [p for wrapper in self._searching for p in self._covered[wrapper].values() if sums.holds(p)]
        reached = leaves(losses) if earlier else {}
        sums.round(p for p in earlier if id(p) not in reached)

    def _backward(self, losses: Sequence[Tensor], seeds: Sequence[Tensor], reduce: bool) -> None:
        if self._unseen_graphs:
            before = [self._marks(wrapper) for wrapper in self._unseen_graphs]
            self._armed = self._unseen_graphs  # by DDP itself, in the forward
            self._graph_is_torn = True
            self.run_backward(losses, seeds)
            self._graph_is_torn = False
            unseen = []
            for wrapper, marks in zip(self._unseen_graphs, before, strict=True):
                if all(_same(mark, now) for mark, now in zip(marks, self._marks(wrapper), strict=True)):
                    unseen.append(wrapper)  # was not in this backward (of another part, or model)
                else:
                    wrapper.require_backward_grad_sync = False
                wrapper.require_forward_param_sync = False
            self._armed, self._unseen_graphs = [], unseen
        elif reduce and self._reduces:
            before = [self._marks(wrapper) for wrapper in self.wrappers]
            losses, seeds = self._arm(losses, seeds)
            self.run_backward(losses, seeds)
            self._settle(before)
        else:
            self._unreduced = self._searching
            self.run_backward(losses, seeds)

    def with_earlier(
        self, losses: Sequence[Tensor], seeds: Sequence[Tensor]
    ) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        if any(wrapper.static_graph for wrapper in self.wrappers):
            raise DistaccumError(
                "heads() with DDP's static_graph=True, which takes each backward for the whole graph; wrap the model "
                "without it, or add the losses up"
            )
        reached = leaves(losses)
        earlier = [
            parameter
            for reduced in self._covered.values()
            for parameter in reduced.values()
            if id(parameter) not in reached and self._holds(parameter)
        ]
        if not earlier:
            return losses, seeds
        if self.sums is not None:
            self.sums.round(earlier)
        root = _Reach.apply(*earlier)
        return [*losses, root], [*seeds, torch.zeros_like(root)]

    def _holds(self, parameter: nn.Parameter) -> bool:
        if self.sums is not None and self.sums.holds(parameter):
            return True
        return parameter.grad is not None and not self._is_zeroed(parameter)

    def _arm(self, losses: Sequence[Tensor], seeds: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Reductions start in the next backward, from the roots that this gives."""
        roots, seeds = list(losses), list(seeds)
        for wrapper in self._searching:
            # DDP starts with the first of its parameters that backward reaches, on each rank or the ranks part.
            # This reaches one, and gives it no gradient.
            for parameter in self._covered[wrapper].values():
                if parameter.requires_grad:
                    roots.append(_Reach.apply(parameter))
                    seeds.append(torch.zeros_like(roots[-1]))
                    break
        self._armed = [w for w in self.wrappers if any(p.requires_grad for p in self._covered[w].values())]
        for wrapper in self._armed:
            wrapper.require_backward_grad_sync = True
            wrapper.reducer.prepare_for_backward(roots if wrapper in self._searching else [])
        return roots, seeds

    def _settle(self, before: Sequence[list[Mark]]) -> None:
        for wrapper, marks in zip(self.wrappers, before, strict=True):
            if wrapper not in self._armed:
                continue  # all of it is frozen
            try:
                # Without this a missing gradient leaves ranks apart in silence, until the next window.
                wrapper._check_reducer_finalized()  # type: ignore[no-untyped-call]  # torch's
            except RuntimeError as error:
                raise DistaccumError(self._what_is_missing(wrapper, str(error))) from error
            wrapper.require_backward_grad_sync = False
            if _takers(wrapper).keeps_buckets:
                _disarm(wrapper)
            if wrapper not in self._searching and all(
                _same(mark, now) for mark, now in zip(marks, self._marks(wrapper), strict=True)
            ):
                # Not one of its parameters was in this backward (of another part, or model).
                _disarm(wrapper)
                self._by_hand += self._covered[wrapper].values()
        self._armed, self._unreduced = [], []

    def _marks(self, wrapper: DistributedDataParallel) -> list[Mark]:
        """What changes when DDP reduces: of one parameter where all must take part, else of all."""
        parameters = list(self._covered[wrapper].values())
        return [_mark(parameter) for parameter in (parameters if wrapper.static_graph else parameters[:1])]

    def _what_is_missing(self, wrapper: DistributedDataParallel, message: str) -> str:
        found = re.search(r"did not receive grad for rank \d+: ([\d ]+)", message)
        names = list(self._covered[wrapper])
        missing = [names[int(i)] for i in found[1].split()] if found else ["a parameter"]
        return (
            f"{listed(missing)} took no part in the last backward of the window (or an early one, under sync='every'), "
            "which is the one that reduces, so DDP did not reduce it; pass find_unused_parameters=True to DDP "
            "(parameters that a micro-batch leaves out are then exact), or use all of them in each micro-batch"
        )

    def finish(self) -> None:
        if self.sums is not None:
            self.sums.round()
        if self._by_hand:
            average_by_hand(self._by_hand, self.group, self.host_group, self.divisor, self._is_zeroed)

    def release(self) -> None:
        if self.sums is not None:
            self.sums.phase = Phase.OFF
        # Where DDP looks for unused parameters it remembers who took part until it reduces, and would take them
        # for used in the next window.
        for wrapper in {*self._armed, *self._unreduced}:
            _disarm(wrapper)
        for wrapper in self.wrappers:
            self._give_back(wrapper)
        self._armed, self._unreduced, self._by_hand = [], [], []

    def _take(self, wrapper: DistributedDataParallel) -> None:
        """Its forwards do not arm it any more."""
        takers = _takers(wrapper)
        if not takers:
            takers.found = wrapper.require_backward_grad_sync
        elif wrapper in self._searching:
            _disarm(wrapper)  # or what another accumulator's open window used would pass for used in this one
        takers.append(self)
        wrapper.require_backward_grad_sync = wrapper in self._unseen_graphs

    def _give_back(self, wrapper: DistributedDataParallel) -> None:
        takers = _takers(wrapper)
        if self in takers:
            takers.remove(self)
            if not takers:
                wrapper.require_backward_grad_sync = takers.found
                wrapper.require_forward_param_sync = True

    def partial(self, parameters: Sequence[nn.Parameter]) -> dict[str, Any]:
        holders = self.holders(parameters)
        gradients = gradients_of(holders)
        none = [None if self._is_zeroed(one) else g for one, g in zip(holders, gradients, strict=True)]
        return {"gradients": none}

    def put_partial(self, parameters: Sequence[nn.Parameter], partial: dict[str, Any]) -> None:
        put_gradients(self.holders(parameters), partial["gradients"])
        self._early = max(0, self._early - partial["done"])
        if self._searching and self._reduces:  # DDP does not know who took part before the state was taken
            self._reduces = False
            self._by_hand += [p for reduced in self._covered.values() for p in reduced.values()]

    def hides_own(self, parameters: Sequence[nn.Parameter]) -> str | None:
        return why_tensor_parallel(parameters)

    def hides_parts(self) -> str | None:
        # Private: how DDP notes what the plain tensor was cut from, when it is given a tensor-parallel module.
        if any(hasattr(p, "_st_info") for wrapper in self.wrappers for p in wrapper.parameters()):
            return "over tensor-parallel modules, whose parts it shows as plain tensors"
        return None

    def clear(self, parameters: Sequence[nn.Parameter]) -> None:
        if self.sums is not None:
            self.sums.clear()
        views: dict[int, Tensor] = {}
        for parameter in parameters:
            if id(parameter) not in self._zero_in_place:
                parameter.grad = None
            elif parameter.grad is not None:
                views[id(parameter)] = parameter.grad
        if views:
            torch._foreach_zero_(list(views.values()))  # as Optimizer.zero_grad does
        self._zeroed = {of: (view, view._version) for of, view in views.items()}

    def stale(self, parameters: Sequence[nn.Parameter], *, in_window: bool = False) -> bool:
        for parameter in parameters:
            if parameter.grad is not None and not self._is_zeroed(parameter):
                view, _ = self._zeroed.get(id(parameter), (None, 0))
                if not in_window or view is None or view is parameter.grad:
                    return True
                # A forward of the window has rebuilt the buckets: other views, and still zero. The old ones may go.
                self._zeroed[id(parameter)] = _mark(parameter)
        return False

    def _is_zeroed(self, parameter: Any) -> bool:
        return id(parameter) in self._zeroed and _same(self._zeroed[id(parameter)], _mark(parameter))


def _wrappers(models: Sequence[nn.Module]) -> Iterator[DistributedDataParallel]:
    seen = set()
    for model in models:
        for module in model.modules():
            if isinstance(module, DistributedDataParallel) and module not in seen:
                seen.add(module)
                yield module


def _refuse_what_cannot_accumulate(wrapper: DistributedDataParallel) -> None:
    if wrapper._delay_all_reduce_params:
        raise ValueError(
            "DDP with delay_all_reduce_named_params reduces them on each micro-step, also those that it has "
            "reduced already; wrap the model without it"
        )
    hooks = [getattr(hook, "__qualname__", "") for hook, _ in wrapper._comm_hooks]
    if any("hook_then_optimizer" in name for name in hooks) or any(
        hasattr(parameter, "_in_backward_optimizers") for parameter in wrapper.parameters()
    ):
        raise ValueError(
            "an optimizer that steps inside backward (_apply_optimizer_in_backward, _register_fused_optim) would "
            "step on each micro-step; give the Accumulator an ordinary optimizer"
        )


def _is_ignored(wrapper: DistributedDataParallel, name: str) -> bool:
    return (name if "." in name else f".{name}") in wrapper.parameters_to_ignore  # as DDP writes what no submodule has


def _reduced_by(wrapper: DistributedDataParallel) -> dict[str, nn.Parameter]:
    """The parameters that DDP reduces, in the order of its indices."""
    reduced = {
        name.replace("_orig_mod.", ""): parameter
        for name, parameter in wrapper.module.named_parameters()
        if parameter.requires_grad and not _is_ignored(wrapper, name)
    }
    # DDP fixed its list when it wrapped, and shows of it only how many there are (private; without it, what
    # is frozen late is still found when a reduction stays unfinished).
    logged: dict[str, int] = getattr(wrapper, "_get_ddp_logging_data", dict)()
    wrapped = logged.get("num_parameter_tensors", len(reduced))
    if wrapped != len(reduced):
        raise ValueError(
            f"DDP wrapped {wrapped} trainable parameters and the model has {len(reduced)} now, which leaves "
            "ranks apart; freeze and unfreeze parameters before DDP wraps the model"
        )
    return reduced


class _Takers(list[DDPEngine]):
    """The engines whose windows are open on a wrapper, of which windows may cross; kept on the wrapper itself.

    A copy of the wrapper, or one that is loaded, has none.
    """

    found = True  # the wrapper's flag before the first of them
    keeps_buckets = False  # as it has forgotten, on this rank alone, that it rebuilt them, and would ask the others

    def __reduce__(self) -> Any:
        return type(None), ()


def _takers(wrapper: DistributedDataParallel) -> _Takers:
    takers: _Takers | None = wrapper.__dict__.get("_distaccum_takers")
    if takers is None:
        takers = wrapper.__dict__["_distaccum_takers"] = _Takers()
    return takers


class _Noting:
    """A hook, since DDP does not tell whether it is armed. It goes with the engine."""

    def __init__(self, engine: DDPEngine) -> None:
        self._engine = weakref.ref(engine)

    def __call__(self, wrapper: DistributedDataParallel, _: Any) -> None:
        engine = self._engine()
        if engine is not None and wrapper.require_backward_grad_sync and torch.is_grad_enabled():
            engine._strays.add(wrapper)

    def __reduce__(self) -> Any:
        """Of a copy of the wrapper: a hook that gives its arguments back, and loads without this package."""
        engine = self._engine()
        found = [] if engine is None else [_takers(w).found for w in engine.wrappers if engine in _takers(w)]
        return (_Restoring, (found[0],)) if found else (getattr, ({}, "get"))


class _Restoring:
    """A hook of a copy that was made in a window, where the wrapper's forwards do not arm it: the copy's shall."""

    def __init__(self, found: bool) -> None:
        self._found: bool | None = found

    def __call__(self, wrapper: DistributedDataParallel, _: Any) -> None:
        if self._found is not None:
            wrapper.require_backward_grad_sync, self._found = self._found, None
            wrapper.require_forward_param_sync = True


class _Reach(torch.autograd.Function):
    """A root whose backward reaches parameters with no gradient for them; DDP's hooks run all the same."""

    @staticmethod
    def forward(ctx: Any, *parameters: Tensor) -> Tensor:
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, ...]:
        return (None,) * len(ctx.needs_input_grad)


def _disarm(wrapper: DistributedDataParallel) -> None:
    """DDP forgets the backwards that it did not reduce, and one that did not end."""
    wrapper.reducer._reset_state()  # private: what DDP._update_process_group does to start afresh
    wrapper._has_rebuilt_buckets = False


def _mark(parameter: nn.Parameter) -> Mark:
    gradient = parameter.grad
    return gradient, -1 if gradient is None else gradient._version


def _same(one: Mark, other: Mark) -> bool:
    return one[0] is other[0] and one[1] == other[1]
