"""Engine: what differs between the wrappers of a model, and nothing else.

An engine knows no window. It postpones the reduction of gradients, runs the backward that reduces, clears, and
steps when it is called.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..gradients.wide import Sums
from ..law import Plan
from ..meshes.pipeline import RunsStages
from ..norms import clip, total_norm
from ..ranks import Peers
from .private.autograd import run_backward

Sync = Literal["last", "every", "replicas", "gathered"]


class Leaf(NamedTuple):
    """A leaf of the graph, on which backward adds up a gradient of this rank's own."""

    tensor: Any
    standing: Callable[[], Tensor | None]  # its sum since the window began


class Engine(RunsStages, ABC):
    """What differs between the wrappers of a model. Abstract: write one final class for a wrapper, here or in your
    package.

    It is found by its `wraps` as soon as it is defined. `check`, `begin`, `backward`, `finish` and `release` must be
    written; every other method has a default that suits a wrapper which leaves whole gradients in `.grad`.

    Args:
        models: The modules as the Accumulator got them.
        sync: One of `policies`.
        peers: The ranks; by default this process alone.

    Attributes:
        name (str): The wrapper's name, as errors list it.
        policies (tuple[Sync, ...]): The values of `sync` that it has.
        divisor (float): What the reduction divides by: the number of ranks where it averages, 1 where it sums.
        lockstep (bool): Forwards, or the last backward, wait for all ranks, so a rank without data must stand in.
        gradients_stay (bool): Gradients stay in `.grad` of the parameters, from the last backward to `step`.
        judges_gradients (bool): `step` checks the gradient itself; its norm is known only afterwards.
        steps_nonfinite (str | None): Why it does not where it should, with the cure.
        scales_losses (bool): The wrapper scales losses, and skips steps that overflow.
        can_be_cast (bool): Parameters have no other form, so that they can be cast to float64 and put back.
        hides_parameters (bool): Outside forward, parameters are parts that cannot be computed with.
        owns_step (bool): The wrapper owns the optimizer, so that `step` needs none.
        models (tuple[nn.Module, ...]): The modules as they were given.
        sync (Sync): The policy that was chosen.
        run_backward (Callable): Runs autograd from losses and their seeds, for `backward`; Accelerate has its own.
        peers (Peers): The ranks of the data-parallel group: `rank`, `num_ranks`, `gather`.

    Raises:
        ValueError: `sync` is not in `policies`.
    """

    name: ClassVar[str] = ""
    policies: tuple[Sync, ...] = ("last", "every")

    divisor: float = 1
    lockstep: bool = False
    gradients_stay: bool = True
    judges_gradients: bool = False
    steps_nonfinite: str | None = None
    scales_losses: bool = False
    can_be_cast: bool = False
    hides_parameters: bool = False
    owns_step: bool = False

    @classmethod
    def wraps(cls, module: nn.Module) -> bool:
        """Whether `module` is the wrapper that this engine is for; imports nothing.

        Args:
            module: Each module in the models, the root and those inside it.
        """
        return False

    def __init__(self, models: Sequence[nn.Module], sync: Sync, peers: Peers | None = None) -> None:
        if sync not in self.policies:
            known = ", ".join(map(repr, self.policies))
            raise ValueError(f"{sync=}, expected one of {known} for {self.name}")
        self.models = tuple(models)
        self.sync = sync
        self.run_backward: Callable[[Sequence[Tensor], Sequence[Tensor]], Any] = run_backward
        self.peers = peers or Peers()
        self.sums: Sums | None = None  # where gradients add up in another dtype than they are computed in

    def parameters(self) -> list[nn.Parameter]:
        """The models' parameters, each once: the tensors that hold gradients when a window is complete."""
        return list({id(p): p for model in self.models for p in model.parameters()}.values())

    def guarded(self) -> list[Optimizer]:
        """The wrapper's own optimizers, which the caller must not step in mid-window."""
        return []

    def adopt_optimizers(self, optimizers: list[Optimizer]) -> list[Optimizer]:
        """The optimizers for `step`: all but the wrapper's own."""
        return optimizers

    def adopt_schedulers(self, schedulers: list[LRScheduler]) -> list[LRScheduler]:
        """The schedulers that the library steps: all but the wrapper's own."""
        return schedulers

    def adopt_max_norm(self, max_norm: float | None) -> float | None:
        """The norm for `clip`; raises if the wrapper clips at another.

        Args:
            max_norm: The Accumulator's argument.
        """
        return max_norm

    def accumulate_in(self, dtype: torch.dtype, parameters: Sequence[nn.Parameter]) -> None:
        """Makes gradients add up in `dtype` or a wider one; raises if the wrapper adds them up in a narrower one.

        Args:
            dtype: `torch.float32` or `torch.float64`.
            parameters: The models' and the optimizers', each once.
        """
        raise ValueError(f"{self.name} does not support WideSums; leave it out")

    # A window

    @abstractmethod
    def check(self, plan: Plan) -> None:
        """Raises, on all ranks, if this engine cannot run the plan.

        Args:
            plan: What all ranks know of the window: `counts`, and `num_counted`, micro-batches by rank.
        """

    def num_micro_steps(self, plan: Plan) -> int:
        """Micro-steps of this rank: more than its micro-batches where it must stand in for the others' sake."""
        return plan.num_counted[self.peers.rank]

    def num_early_reductions(self, plan: Plan) -> int:
        """The number of first micro-steps that reduce, besides the last."""
        return 0

    def will_reduce(self, reduce: bool) -> bool:
        """Whether a backward with this `reduce` communicates: a failure inside it cannot be undone."""
        return False

    @abstractmethod
    def begin(self, plan: Plan, parameters: Sequence[nn.Parameter]) -> None:
        """Begins a window: reductions are postponed.

        Args:
            plan: As in `check`.
            parameters: Those whose gradients make up the window.
        """

    @abstractmethod
    def backward(self, losses: Sequence[Tensor], seeds: Sequence[Tensor], reduce: bool) -> None:
        """One `run_backward` from `losses`, weighted by `seeds`; reduces the sum of all if `reduce`.

        Args:
            losses: Scalars with a graph, one for each named loss.
            seeds: Their factors, scalars too; a scaler's scale is in them.
            reduce: This backward reduces what it and the earlier ones have added up.
        """

    def with_earlier(
        self, losses: Sequence[Tensor], seeds: Sequence[Tensor]
    ) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Roots that reach, too, what earlier backwards of this micro-step reached.

        For the backward that reduces, on an engine that waits in it for every parameter with a gradient.
        """
        return losses, seeds

    def whole_loss(self, loss: Any) -> Tensor:
        """The plain tensor of a loss that is a DTensor, the same on each of its ranks."""
        whole: Tensor = loss.full_tensor()
        return whole

    def stand_in(self) -> None:
        """The rest of this rank's micro-steps only keep step with other ranks: what they use does not count."""
        return

    def skip(self) -> None:
        """Replaces a backward whose losses are all left out."""
        return

    def holders(self, parameters: Sequence[nn.Parameter]) -> Sequence[Any]:
        """The objects whose .grad holds gradients before they are reduced."""
        return parameters if self.sums is None else self.sums.holders(parameters)

    @abstractmethod
    def finish(self) -> None:
        """After the last backward: reduces the rest, so that gradients are final."""

    @abstractmethod
    def release(self) -> None:
        """Restores the wrappers as `begin` found them, whatever happened since. May be called twice."""

    def clear(self, parameters: Sequence[nn.Parameter]) -> None:
        """Removes each gradient, and whatever would count as one."""
        for parameter in parameters:
            parameter.grad = None
        if self.sums is not None:
            self.sums.clear()

    def stale(self, parameters: Sequence[nn.Parameter], *, in_window: bool = False) -> bool:
        """Whether there are gradients that `clear` did not leave; `in_window`: before its first backward.

        Args:
            parameters: As in `begin`.
            in_window: The window has begun and had no backward yet.
        """
        for parameter in parameters:  # noqa: SIM110  # any() of a generator costs three times as much
            if parameter.grad is not None:
                return True
        return False

    def show_parameters(self) -> None:
        """Makes modules show the parameters that the optimizers hold."""
        return

    def hides_own(self, parameters: Sequence[nn.Parameter]) -> str | None:
        """Why a rank's own gradient cannot be seen before it is reduced, and the cure; None if `leaves` show it.

        Args:
            parameters: The optimizers'.
        """
        return "whose engine does not say where a rank's own gradient is; give it hides_own() and leaves()"

    def hides_parts(self) -> str | None:
        """Where parameters look whole and are parts, so that no norm can be known; None: nowhere."""
        return None

    def leaves(self, parameters: Sequence[nn.Parameter]) -> list[Leaf]:
        """Where gradients of `parameters` add up on this rank, before they are reduced.

        Args:
            parameters: The optimizers'.
        """
        standing = self.sums.standing if self.sums is not None else attrgetter("grad")
        return [Leaf(p, partial(standing, p)) for p in parameters if p.requires_grad]

    # The update

    def norm(self, parameters: Sequence[nn.Parameter], kind: float = 2.0, over: Tensor | None = None) -> Tensor:
        """The norm of the whole gradient (divided by `over`), the same on all ranks; `kind` is 2 or infinity.

        Args:
            parameters: Those with a gradient.
            kind: 2 or infinity.
            over: A scalar that gradients are divided by first, so that squares do not overflow.
        """
        return total_norm([p.grad for p in parameters if p.grad is not None], kind, over)

    def part_of_square(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        """This rank's part of the norm's square, without communication: the sum over ranks is the whole."""
        return self.norm(parameters).square() / self.peers.num_ranks

    def clip(self, parameters: Sequence[nn.Parameter], max_norm: float, norm: Tensor) -> None:
        """Scales a gradient of norm `norm` to at most `max_norm`.

        Args:
            parameters: Those with a gradient.
            max_norm: The most.
            norm: What `norm` returned.
        """
        clip([p.grad for p in parameters if p.grad is not None], max_norm, norm)

    def step(self, optimizers: Sequence[Optimizer]) -> str | None:
        """Steps the optimizers; returns why not, if the wrapper decided against it.

        Args:
            optimizers: Those that `adopt_optimizers` returned.
        """
        for optimizer in optimizers:
            optimizer.step()
        return None
