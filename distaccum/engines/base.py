"""Engine: what differs between the wrappers of a model, and nothing else.

An engine knows no window. It postpones the reduction of gradients, runs the backward that reduces, clears, and
steps when it is called.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, ClassVar, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ..adapter import Prepared
from ..law import DistaccumError, Plan, ranks_where, shorten
from ..ranks import Peers
from .averaging import average_by_hand, unlike
from .private.autograd import run_backward
from .shards import Groups, norm_over_shards

Sync = Literal["last", "every", "replicas", "gathered"]
Owned = Literal["step", "clip", "norm", "finite", "scale"]


class Leaf(NamedTuple):
    """A leaf of the graph, on which backward adds up a gradient of this rank's own."""

    tensor: Any
    standing: Callable[[], Tensor | None]  # its sum since the window began


class Engine:
    """Postpones and runs the reduction of one kind of wrapper. Abstract: subclass it for a wrapper, and `register` it.

    Every method has a default that suits a wrapper which leaves whole gradients in `.grad` and reduces nothing.

    Args:
        models: The modules as the Accumulator got them.
        sync: One of `policies`.
        group: The data-parallel ranks; None: this process alone.
        sharing: For each of them, the ranks in the job that have its samples too (tensor parallelism); by default none.

    Attributes:
        policies (tuple[Sync, ...]): The values of `sync` that it has.
        divisor (float): What the reduction divides by: the number of ranks by default; set it to 1 where it sums.
        lockstep (bool): Forwards, or the last backward, wait for all ranks, so a rank without data must stand in.
        owns (frozenset[str]): What the wrapper's step does itself: "step" (it has the optimizer), "clip", "norm" (known
            only after the step), "finite" (it skips a gradient that is not), "scale" (it scales losses).
        can_be_cast (bool): Parameters have no other form, so that they can be cast to float64 and put back.
        hides_parameters (bool): Outside forward, parameters are parts that cannot be computed with.
        shows_gradients (bool): Each backward leaves its own gradient in `.grad`, which an extension may take away and
            put back before `finish`.
        by_hand (bool): No backward may reduce; an extension that adds up gradients itself sets it.
        standing (Callable): A parameter's gradient since the window began; such an extension replaces it.
        follows (bool): What it wraps may be a stage of a pipeline.
        pipeline: The schedule that runs the models; None: their forward is the caller's.
        run_backward (Callable): Runs autograd from losses and their seeds, for `backward`; Accelerate has its own.
        peers (Peers): The ranks of the data-parallel group: `rank`, `num_ranks`, `gather`.
        group (dist.ProcessGroup): The same, where there are several; `host_group` runs its collectives on the host.
    """

    name: ClassVar[str] = ""
    policies: tuple[Sync, ...] = ("last", "every")
    lockstep: bool = False
    owns: frozenset[Owned] = frozenset()
    can_be_cast: bool = False
    hides_parameters: bool = False
    shows_gradients: bool = False
    by_hand: bool = False
    follows: bool = False
    pipeline: Any = None

    @classmethod
    def wraps(cls, module: nn.Module) -> bool:
        """True if `module`, of the models or inside one, is the wrapper that this engine is for; imports nothing."""
        return False

    def __init__(
        self,
        models: Sequence[nn.Module],
        sync: Sync,
        group: dist.ProcessGroup | None = None,
        sharing: Sequence[Sequence[int]] | None = None,
    ) -> None:
        if sync not in self.policies:
            known = ", ".join(map(repr, self.policies))
            raise ValueError(f"{sync=}, expected one of {known} for {self.name}")
        self.models, self.sync = tuple(models), sync
        self.run_backward: Callable[[Sequence[Tensor], Sequence[Tensor]], Any] = run_backward
        self.standing: Callable[[nn.Parameter], Tensor | None] = attrgetter("grad")
        self.peers = Peers(group, sharing)
        self.group: Any = group
        self.host_group: Any = self.peers.host_group
        self.divisor: float = self.peers.num_ranks
        self.alike: set[int] = set()  # ids of parameters that the wrapper makes equal on all ranks
        self._num_compared = 0  # parameters in the largest `average` so far

    def parameters(self) -> list[nn.Parameter]:
        """The models' parameters, each once: the tensors that hold gradients when a window is complete."""
        return list({id(p): p for model in self.models for p in model.parameters()}.values())

    def guarded(self) -> list[Optimizer]:
        """The wrapper's own optimizers, which the caller must not step in mid-window."""
        return []

    def adopt(self, given: Prepared, max_norm: float | None, on_nonfinite: str) -> None:
        """Leaves in `given` what the library steps; raises for options that the wrapper cannot follow."""
        looks = {f"{max_norm=}": max_norm is not None, f"{on_nonfinite=}": on_nonfinite != "ignore"}
        looks["scaler"] = given.scaler is not None
        why = self.hides_parts()
        if why is not None and any(looks.values()):
            raise ValueError(
                f"{', '.join(look for look, is_wanted in looks.items() if is_wanted)} with {self.name} {why}: "
                "each rank would look at its own part of the gradient, and ranks would decide differently. Use "
                "fully_shard over the data-parallel mesh, or leave these out, with on_nonfinite='ignore'"
            )

    # A window

    def check(self, plan: Plan) -> None:
        """Raises, on all ranks, if this engine cannot run the plan."""
        if plan.uneven and any(
            isinstance(module, nn.SyncBatchNorm) and module.training for m in self.models for module in m.modules()
        ):
            raise DistaccumError(
                f"ranks have {list(plan.num_counted)} micro-batches, and SyncBatchNorm communicates in each forward: "
                "the ranks with more would wait for ever; give all ranks as many micro-batches, or freeze its "
                "statistics with eval()"
            )
        dry = [not (own or ready) for own, ready in zip(plan.num_counted, plan.has_stand_in, strict=True)]
        if self.lockstep and any(dry):
            raise DistaccumError(
                f"ranks have {list(plan.num_counted)} micro-batches; under {self.name} each rank must run forward for "
                f"the others to go on; rank {ranks_where(dry)} has none from an earlier window to stand in with. Give "
                "each rank a micro-batch in the first window"
            )

    def num_micro_steps(self, plan: Plan) -> int:
        """Micro-steps of this rank: more than its micro-batches where it must stand in for the others' sake."""
        return max(plan.num_counted) if self.lockstep else plan.num_counted[self.peers.rank]

    def num_early(self, plan: Plan) -> int:
        """The number of first micro-steps that reduce, besides the last."""
        return 0

    def will_reduce(self, reduce: bool) -> bool:
        """Returns whether a backward with this `reduce` communicates: a failure inside it cannot be undone."""
        return False

    def begin(self, plan: Plan, parameters: Sequence[nn.Parameter]) -> None:
        """Begins a window for the gradients of `parameters`: reductions are postponed."""

    def backward(self, losses: Sequence[Tensor], seeds: Sequence[Tensor], reduce: bool) -> None:
        """One `run_backward` from scalar `losses`, weighted by `seeds`; reduces the sum of all if `reduce`."""
        self.run_backward(losses, seeds)

    def with_earlier(
        self, losses: Sequence[Tensor], seeds: Sequence[Tensor]
    ) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Roots that also reach what earlier backwards of this micro-step did, if one that reduces waits for them."""
        return losses, seeds

    def run(self, inputs: Sequence[Any], options: dict[str, Any], weigh: Callable[..., Tensor | None]) -> Any:
        """Forwards and backwards of a micro-batch in one call, as a pipeline's schedule makes them."""
        if self.pipeline is None:
            raise DistaccumError(f"window.run() with {self.name}, whose forward is yours: window.backward(loss)")
        return self.pipeline.run(inputs, options, weigh)

    def refuse_closure(self, call: str) -> None:
        """Raises if `call`, which takes a function of the caller, cannot run it."""
        if self.pipeline is not None:
            self.pipeline.refuse_closure(call)
        if call != "update" and self.peers.has_parts:  # it needs no samples in whole
            raise DistaccumError(
                f"{call}() with a mesh whose ranks have parts of the same samples, which no rank has whole; call it "
                "on a model whose ranks have samples of their own"
            )

    def stand_in(self) -> None:
        """The rest of this rank's micro-steps only keep step with other ranks: what they use does not count."""

    def skip(self) -> None:
        """Replaces a backward whose losses are all left out."""

    def holders(self, parameters: Sequence[nn.Parameter]) -> Sequence[Any]:
        """The objects whose .grad changes in a window's backwards alone, `parameters` among them where theirs does."""
        return parameters

    def finish(self) -> None:
        """After the last backward: reduces the rest, so that gradients are final."""

    def release(self) -> None:
        """Restores the wrappers as `begin` found them, whatever happened since. May be called twice."""

    def clear(self, parameters: Sequence[nn.Parameter]) -> None:
        """Removes each gradient, and whatever would count as one."""
        for parameter in parameters:
            parameter.grad = None

    def stale(self, parameters: Sequence[nn.Parameter], *, in_window: bool = False) -> bool:
        """True if there are gradients that `clear` did not leave; `in_window`: before a window's first backward."""
        for parameter in parameters:  # noqa: SIM110  # any() of a generator costs three times as much
            if parameter.grad is not None:
                return True
        return False

    def show_parameters(self) -> None:
        """Makes modules show the parameters that the optimizers hold."""

    # A rank's own gradient, before it is reduced

    def hides_own(self, parameters: Sequence[nn.Parameter]) -> str | None:
        """Why a rank's own gradients of `parameters` cannot be seen, and the cure; None if `leaves` has them."""
        return "whose engine does not say where a rank's own gradient is; give it hides_own() and leaves()"

    def hides_parts(self) -> str | None:
        """Where parameters look whole and are parts, so that no norm can be known; None: nowhere."""
        return None

    def leaves(self, parameters: Sequence[nn.Parameter]) -> list[Leaf]:
        """Where gradients of `parameters` add up on this rank, before they are reduced."""
        return [Leaf(p, partial(self.standing, p)) for p in parameters if p.requires_grad]

    # The update

    def shards(self, parameters: Sequence[nn.Parameter]) -> dict[Groups, list[Tensor]]:
        """This rank's parts of gradients, by the groups over which they are cut; none: each rank has the whole."""
        return {(): [p.grad for p in parameters if p.grad is not None]}

    def norm(self, parameters: Sequence[nn.Parameter], kind: float = 2.0, over: Tensor | None = None) -> Tensor:
        """The norm of the whole gradient by the scalar `over`, the same on all ranks; `kind` is 2 or infinity."""
        device = parameters[0].device if parameters else torch.device("cpu")
        norm = norm_over_shards(self.shards(parameters), device, kind, over)
        if self.pipeline is None:
            return norm
        # One dtype and one device for all stages: one without a gradient has a norm in float32, on the host.
        return self.peers.over_stages(norm.to(self.pipeline.device, torch.float64), kind)

    def step(self, optimizers: Sequence[Optimizer]) -> str | None:
        """Steps the optimizers that `adopt` left; returns why not, if the wrapper decided against it."""
        for optimizer in optimizers:
            optimizer.step()
        return None

    # For engines of several ranks

    def average(
        self, parameters: Sequence[nn.Parameter], is_zeroed: Callable[[nn.Parameter], bool] = lambda _: False
    ) -> None:
        """Sums gradients over the ranks and divides by `divisor`; call it on all ranks, with the same parameters.

        `is_zeroed`: whether a parameter's gradient is zeros that stand for none, so that it may become None.
        """
        if len(parameters) > self._num_compared:
            # Values are looked at once. Parts that equal each other (biases of zeros) cannot be told from copies.
            outside = [p for p in parameters if id(p) not in self.alike and self.copies_of(p) is self.group]
            if differ := unlike(outside, self.host_group) if outside else []:
                raise DistaccumError(
                    f"{shorten(list(map(self.name_of, differ)))} differs between the data-parallel ranks, and "
                    f"{self.name} does not reduce it, so that its gradient would be averaged over different "
                    "parameters; if each rank has its own (experts), cut it over the ranks under fully_shard: "
                    "distribute_tensor(whole, mesh, [Shard(0)]); if it is one parameter, give it the same values on "
                    "all ranks"
                )
            self._num_compared = len(parameters)
        if parameters:
            average_by_hand(parameters, self.copies_of, self.host_group, self.divisor, is_zeroed)

    def copies_of(self, parameter: nn.Parameter) -> dist.ProcessGroup | None:
        """The group whose ranks hold this rank's part of `parameter` too; None if nobody else does."""
        group: dist.ProcessGroup = self.group
        return group

    def name_of(self, parameter: nn.Parameter) -> str:
        named = ((n, p) for model in self.models for n, p in model.named_parameters())
        return next((n for n, p in named if p is parameter), f"a parameter of shape {list(parameter.shape)}")

    def refuse_left_out_terms(self, plan: Plan, cure: str) -> None:
        """Where modules communicate in backward, each loss must take part in each backward."""
        if not plan.all_terms:
            raise DistaccumError(
                f"a micro-batch has a count of 0 for one of {list(plan.counts)}; its loss would be left out, and so "
                "would modules in this backward for which the other ranks wait; give each micro-batch a count above 0 "
                f"for each name{cure}"
            )
