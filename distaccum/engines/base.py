"""Engine: what differs between the wrappers of a model, and nothing else; it knows nothing of windows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any, ClassVar, Literal, final

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ..adapter import Prepared
from ..law import DistaccumError, Plan
from ..norms import Gradient, Groups, unique
from ..private import run_backward
from ..ranks import Peers

Sync = Literal["last", "every", "replicas", "gathered"]
Owned = Literal["step", "sums", "stages", "dtype", "parameters"]
# The roots of a backward, and their seeds.
Roots = tuple[Sequence[Tensor], Sequence[Tensor]]
# The reason of a skip that a loss scale expects.
OVERFLOW = "the scaled gradients overflowed"
GRAD: Callable[[Any], Tensor | None] = attrgetter("grad")


class Engine:
    """Postpones and runs the reduction of one kind of wrapper. Abstract: subclass it for a wrapper, and `register` it.

    The defaults of all methods suit a wrapper that leaves whole gradients in `.grad` and reduces nothing;
    `why_no_local_grad` refuses until you override it. Made as `engine(models, sync)`: pass `group` from your own
    `__init__`.

    Args:
        models: The modules as the Accumulator got them.
        sync: One of `policies`.
        group: The data-parallel ranks; None: this process alone.

    Attributes:
        policies (tuple[Sync, ...]): The values of `sync` that it supports.
        lockstep (bool): Forwards, or the last backward, wait for all ranks, so a rank without data must stand in.
        owns (frozenset[str]): What the wrapper keeps to itself. Its step runs the optimizer, and clips ("step"). It
            adds gradients up where an extension cannot ("sums"), cannot be a stage of a pipeline ("stages"), or has
            parameters that cannot be cast ("dtype") or used outside forward ("parameters").
        divisor (float): The number that the reduction divides by: that of ranks by default; set it to 1 if it sums.
        read_grad (Callable): Returns the gradient of one of `grad_leaves` since the window began. An extension that
            adds gradients up itself replaces it; then no backward may reduce.
        pipeline: The schedule that runs the models; None: the caller runs their forward.
        run_backward (Callable): Runs autograd from tuples of losses and their seeds; Accelerate has its own.
        peers (Peers): The ranks of the data-parallel group: `rank`, `num_ranks`, `gather`, `group`.
    """

    name: ClassVar[str] = ""
    policies: tuple[Sync, ...] = ("last", "every")
    lockstep: bool = False
    owns: frozenset[Owned] = frozenset(("sums", "stages", "dtype"))

    @classmethod
    def wraps(cls, module: nn.Module) -> bool:
        """True if `module`, a model or inside one, is the wrapper that this engine is for; must import nothing."""
        return False

    def __init__(self, models: Sequence[nn.Module], sync: Sync, group: dist.ProcessGroup | Peers | None = None) -> None:
        if sync not in self.policies:
            raise ValueError(f"{sync=}, expected one of {', '.join(map(repr, self.policies))} for {self.name}")
        self.models, self.sync = tuple(models), sync
        self.run_backward: Callable[..., Any] = run_backward
        self.read_grad = GRAD
        self.peers = group if isinstance(group, Peers) else Peers(group)
        self.divisor: float = self.peers.num_ranks
        self.pipeline: Any = None

    def parameters(self) -> list[nn.Parameter]:
        """The models' parameters, each once: the tensors that hold gradients when a window is complete."""
        return unique(p for model in self.models for p in model.parameters())

    def cut_over(self, parameters: Sequence[Any]) -> list[Groups]:
        """The groups over which each of `parameters` is cut; none: each data-parallel rank has the whole."""
        return [
            tuple(p.device_mesh.get_group(i) for i, one in enumerate(p.placements) if not one.is_replicate())
            if hasattr(p, "to_local") and p.device_mesh.get_coordinate() is not None
            else ()
            for p in parameters
        ]

    def adopt(self, given: Prepared, max_norm: float | None, on_nonfinite: str) -> None:
        """Removes from `given` what the wrapper steps itself; raises for options that the wrapper cannot follow."""

    # A window

    def check(self, plan: Plan) -> None:
        """Raises, on all ranks, if this engine cannot run the plan."""
        if plan.uneven and any(
            isinstance(module, nn.SyncBatchNorm) and module.training for m in self.models for module in m.modules()
        ):
            raise DistaccumError(
                f"ranks have {plan.fewest} to {plan.most} micro-batches, and SyncBatchNorm communicates in each "
                "forward: the ranks with more would wait for ever; give all ranks as many micro-batches, or freeze its "
                "statistics with eval()"
            )
        if self.lockstep and plan.stranded is not None:
            raise DistaccumError(
                f"ranks have {plan.fewest} to {plan.most} micro-batches; under {self.name} each rank must run forward "
                f"for the others to go on; rank {plan.stranded} has none from an earlier window to stand in with. Give "
                "each rank a micro-batch in the first window"
            )

    def num_micro_steps(self, plan: Plan) -> tuple[int, int]:
        """This rank's micro-steps, with stand-ins, and how many of the first reduce besides the last ("every")."""
        steps, common = (plan.most, plan.most) if self.lockstep else (plan.num_here, plan.fewest)
        return steps, common - 1 if self.sync == "every" else 0

    def will_reduce(self, reduce: bool) -> bool:
        """Returns whether a `backward` with this `reduce` communicates (then `update()` votes first)."""
        return False

    def begin(self, plan: Plan, parameters: Sequence[nn.Parameter]) -> None:
        """Begins a window for the gradients of `parameters`: from here on, reductions are postponed."""

    def backward(self, losses: Sequence[Tensor], seeds: Sequence[Tensor], reduce: bool) -> None:
        """Calls `run_backward` once, from scalar `losses`, weighted by `seeds`.

        `reduce`: it is this rank's last backward, or an early one, and may reduce the sum of all so far. It must not if
        another rank has none (`plan.some_rank_is_dry`) or it is unknown whether all succeed (`plan.reduce_afterwards`):
        then, or always, reduce in `finish`.
        """
        self.run_backward(tuple(losses), tuple(seeds))

    def with_earlier(self, losses: Sequence[Tensor], seeds: Sequence[Tensor]) -> Roots:
        """Roots and seeds of a trunk's reducing backward, with a root of gradient 0 for what only its heads used."""
        return losses, seeds

    def stand_in(self) -> None:
        """Called when the rest of this rank's micro-steps are stand-ins, which do not make parameters count as used."""

    def grad_leaves(self, parameters: Sequence[nn.Parameter]) -> Sequence[Any]:
        """The leaves on which backwards, and nothing else in a window, add up gradients of `parameters`."""
        return parameters

    def why_no_local_grad(self, parameters: Sequence[nn.Parameter]) -> str | None:
        """The reason why a rank's own gradients are hidden, and a cure; None if `grad_leaves` have them."""
        return "whose engine does not say if its grad_leaves have a rank's own gradient; give it why_no_local_grad()"

    def finish(self) -> None:
        """Called after the last backward: reduces the rest, so that gradients are final, and restores the wrappers."""

    def clear(self, parameters: Sequence[nn.Parameter]) -> None:
        """Removes each gradient, and restores the wrappers to what `begin` found, whatever has happened since."""
        for parameter in parameters:
            parameter.grad = None

    def stale(self, parameters: Sequence[nn.Parameter]) -> bool:
        """True if there are gradients other than any that `clear` leaves."""
        for parameter in parameters:  # noqa: SIM110  # any() of a generator costs three times as much
            if parameter.grad is not None:
                return True
        return False

    def show_parameters(self, *, in_loop: bool = False) -> None:
        """Makes modules show the parameters that the optimizers hold; `in_loop`: a backward had no losses."""

    # The update

    def gradient(self, parameters: Sequence[nn.Parameter]) -> Gradient:
        """The whole gradient of a window that is complete, from those of `parameters`; computes nothing yet."""
        return Gradient(parameters, stages=self.peers.stages)

    def step(self, optimizers: Sequence[Optimizer], gradient: Gradient, max_norm: float | None) -> str | None:
        """Clips, and steps the optimizers that `adopt` left; returns why not, if the wrapper decided against it."""
        if max_norm is not None:
            gradient.clip(max_norm)
        for optimizer in optimizers:
            optimizer.step()
        return None


def refuse_to_look(engine: Engine, why: str, given: Prepared, max_norm: float | None, on_nonfinite: str) -> None:
    """Raises for options that look at the gradient where parameters look whole but are parts."""
    if max_norm is not None or on_nonfinite != "ignore" or given.scaler is not None:
        raise ValueError(
            f"{max_norm=}, {on_nonfinite=} or a scaler with {engine.name} {why}: each rank would look at its own part "
            "of the gradient, and ranks would decide differently. Use fully_shard over the data-parallel mesh, or "
            "leave these out, with on_nonfinite='ignore'"
        )


def why_tensor_parallel(parameters: Sequence[Any]) -> str | None:
    """The reason why a rank's own gradients are hidden, if one of `parameters` is a DTensor; else None."""
    if any(hasattr(parameter, "to_local") for parameter in parameters):
        return "which holds tensor-parallel parameters: a rank has a part of each gradient; use data parallelism alone"
    return None


@final
class PlainEngine(Engine):
    """Modules of a single process, without a wrapper."""

    name = "a plain module"
    owns = frozenset()

    why_no_local_grad = staticmethod(why_tensor_parallel)


def refuse_left_out_terms(plan: Plan, cure: str) -> None:
    """Raises if a loss is left out of a backward in which modules communicate."""
    if not plan.all_terms:
        raise DistaccumError(
            f"a micro-batch has a count of 0 for one of {list(plan.counts)}; its loss would be left out, and so "
            "would modules in this backward for which the other ranks wait; give each micro-batch a count above 0 "
            f"for each name{cure}"
        )


def sparse_embeddings(models: Iterable[nn.Module]) -> dict[str, Tensor]:
    """The weights of sparse embeddings, whose gradients hold only the rows that were looked up, by module name."""
    named = [(name, one) for model in models for name, one in model.named_modules()]
    return {name: one.weight for name, one in named if isinstance(one, nn.Embedding | nn.EmbeddingBag) and one.sparse}
