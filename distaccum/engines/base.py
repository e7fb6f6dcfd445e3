"""Engine: what differs between the wrappers of a model, and nothing else.

An engine knows no window. It postpones the reduction of gradients, runs the backward that reduces, clears, and
steps; a window tells it when.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..gradients.norms import clip, local, scale, total_norm
from ..gradients.wide import Sum, Sums
from ..law.errors import DistaccumError
from ..law.plan import Plan
from .peers import Peers

Sync = Literal["last", "every", "replicas", "gathered"]
# Private, in torch 2.6 to 2.15; where it is missing the public call does the same.
_run_autograd: Callable[..., Any] | None = getattr(torch.autograd.graph, "_engine_run_backward", None)


def run_backward(roots: Sequence[Tensor], seeds: Sequence[Tensor]) -> None:
    """`torch.autograd.backward` without its looking at shapes, which takes an eighth of a tiny micro-step.

    Roots are scalars here, or outputs with their own gradients.
    """
    if _run_autograd is None:
        torch.autograd.backward(roots, seeds)
    else:
        _run_autograd(tuple(roots), tuple(seeds), False, False, (), allow_unreachable=True, accumulate_grad=True)


class Leaf(NamedTuple):
    """Where a backward adds a gradient of this rank's own."""

    tensor: Any  # a leaf of the graph
    standing: Callable[[], Tensor | None]  # what has added up on it since the window began


class Engine(ABC):
    """Abstract: one final class per kind of wrapper. A subclass is found by its `wraps`, wherever it is defined."""

    name: ClassVar[str] = ""  # of the wrapper, as errors list it
    policies: tuple[Sync, ...] = ("last", "every")

    divisor: float = 1  # what the reduction divides by
    lockstep: bool = False  # whether forwards, or the last backward, wait for all ranks: a dry rank then stands in
    gradients_stay: bool = True  # in .grad of the parameters, from the last backward to step
    judges_gradients: bool = False  # whether `step` looks at the gradient itself; its norm is known after that
    scales_losses: bool = False  # whether the wrapper scales losses, and skips what overflows
    shows_partial: bool = False  # whether it has `partial`
    can_be_cast: bool = False  # whether parameters keep no other form, so that they may be cast and put back
    gathers: bool = False  # parameters, inside of forward and backward
    hides_parameters: bool = False  # outside of forward, where they are parts that cannot be computed with
    owns_step: bool = False  # whether the wrapper owns the optimizer, so that `step` needs none

    @classmethod
    def wraps(cls, module: nn.Module) -> bool:
        """Whether `module` is the wrapper that this engine is for. Imports nothing."""
        return False

    def __init__(self, models: Sequence[nn.Module], sync: Sync, peers: Peers | None = None) -> None:
        if sync not in self.policies:
            known = ", ".join(map(repr, self.policies))
            raise ValueError(f"{sync=}, expected one of {known} for {self.name}")
        self.models = tuple(models)
        self.sync = sync
        self.run_backward: Callable[[Sequence[Tensor], Sequence[Tensor]], Any] = run_backward
        self.peers = peers or Peers()
        self.trace: Any = None
        self.sums: Sums | None = None  # where gradients add up in another dtype than they are computed in

    def parameters(self) -> list[nn.Parameter]:
        """The models', each once: the tensors that hold gradients when a window is complete."""
        return list({id(p): p for model in self.models for p in model.parameters()}.values())

    def guarded(self) -> list[Optimizer]:
        """Optimizers of the wrapper's own, which the caller shall not step in mid-window."""
        return []

    def adopt_optimizers(self, optimizers: list[Optimizer]) -> list[Optimizer]:
        """Those that `step` shall step: not the wrapper's own, where it has one."""
        return optimizers

    def adopt_schedulers(self, schedulers: list[LRScheduler]) -> list[LRScheduler]:
        """Those that the library shall step: not the wrapper's own, where it has one."""
        return schedulers

    def adopt_max_norm(self, max_norm: float | None) -> float | None:
        """What `clip` will be told; raises where the wrapper clips at something else."""
        return max_norm

    def accumulate_in(self, dtype: torch.dtype, parameters: Sequence[nn.Parameter]) -> None:
        """Gradients shall add up in `dtype` at least; raises where the wrapper adds them up in less."""
        raise ValueError(f"accumulate_dtype with {self.name}, which says nothing of it; leave it out")

    def num_laid_out(self) -> int:
        """Wrappers whose buckets have got their places, which makes one window longer than the others."""
        return 0

    # A window

    @abstractmethod
    def check(self, plan: Plan) -> None:
        """Raises, on all ranks, what this plan cannot be on this engine."""

    def num_micro_steps(self, plan: Plan) -> int:
        """Micro-steps of this rank: more than it has micro-batches where it must keep in step with others."""
        return plan.num_counted[self.peers.rank]

    def num_early_reductions(self, plan: Plan) -> int:
        """So many first micro-steps reduce, besides the last."""
        return 0

    def will_reduce(self, reduce: bool) -> bool:
        """Whether a backward that is given this `reduce` sends anything: what fails in it cannot be undone."""
        return False

    @abstractmethod
    def begin(self, plan: Plan, parameters: Sequence[nn.Parameter]) -> None:
        """Postpones reductions from here on."""

    @abstractmethod
    def backward(self, losses: Sequence[Tensor], seeds: Sequence[Tensor], reduce: bool) -> None:
        """One `run_backward` from `losses`, weighted by `seeds`; reduces what has added up if `reduce`."""

    def with_earlier(
        self, losses: Sequence[Tensor], seeds: Sequence[Tensor]
    ) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Roots that reach, besides, what backwards of other parts of this micro-step did.

        For the backward that reduces, on an engine that then waits for all that takes part.
        """
        return losses, seeds

    def whole_loss(self, loss: Any) -> Tensor:
        """A loss that is a DTensor, as the plain tensor that each of its ranks has of all of them."""
        whole: Tensor = loss.full_tensor()
        return whole

    def stand_in(self) -> None:
        """From here on this rank only keeps in step: what it uses is no part of the window."""
        return

    def skip(self) -> None:
        """In the place of a backward whose every loss is left out."""
        return

    def holders(self, parameters: Sequence[nn.Parameter]) -> Sequence[Any]:
        """In whose .grad gradients stand before they are reduced, where tampering with them shows."""
        return parameters if self.sums is None else self.sums.holders(parameters)

    @abstractmethod
    def finish(self) -> None:
        """After the last backward: reduces what is left, so that gradients are final."""

    @abstractmethod
    def release(self) -> None:
        """Puts the wrappers back as `begin` found them, whatever happened since. Twice is no harm."""

    @abstractmethod
    def clear(self, parameters: Sequence[nn.Parameter]) -> None:
        """No gradient remains, nor anything that would count as one."""

    def stale(self, parameters: Sequence[nn.Parameter], *, in_window: bool = False) -> bool:
        """Whether gradients stand that `clear` did not leave; `in_window`: that no backward of it made."""
        return any(parameter.grad is not None for parameter in parameters)

    def show_parameters(self) -> None:
        """Modules show the parameters that the optimizers have."""
        return

    def partial(self, parameters: Sequence[nn.Parameter]) -> dict[str, Any]:
        """What this rank's backwards have added up, between two micro-batches, on the host."""
        raise DistaccumError(
            f"state_dict() in mid-window with {self.name}, which does not show what it has added up; call it between "
            "two windows, after window.step()"
        )

    def put_partial(self, parameters: Sequence[nn.Parameter], partial: dict[str, Any]) -> None:
        """Goes on with it, after `begin` and in the place of the backwards that made it; all ranks together.

        `partial["done"]` is the number of this rank's micro-batches that went backward.
        """
        raise DistaccumError(f"{self.name} cannot go on in mid-window; load a state from between two windows")

    def hides_own(self, parameters: Sequence[nn.Parameter]) -> str | None:
        """Why a rank's own gradient cannot be seen before it is reduced, and the cure; None where `leaves` show it."""
        return "whose engine does not say where a rank's own gradient is; give it hides_own() and leaves()"

    def hides_parts(self) -> str | None:
        """Where parameters that look whole are this rank's parts, so that no norm can be known; None: nowhere."""
        return None

    def leaves(self, parameters: Sequence[nn.Parameter]) -> list[Leaf]:
        """Where gradients of `parameters` add up on this rank; also within a backward that reduces, when one comes."""
        standing = self.sums.standing if self.sums is not None else _gradient_of
        return [Leaf(p, partial(standing, p)) for p in parameters if p.requires_grad]

    # The update

    def scale(self, parameters: Sequence[nn.Parameter], factor: float) -> None:
        """Multiplies the gradient when it is final."""
        scale([p.grad for p in parameters if p.grad is not None], factor)

    def norm(self, parameters: Sequence[nn.Parameter], kind: float = 2.0, over: Tensor | None = None) -> Tensor:
        """Of the whole gradient (divided by `over`), the same on all ranks; `kind` is 2 or infinity."""
        return total_norm([p.grad for p in parameters if p.grad is not None], kind, over)

    def part_of_square(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        """This rank's part of the norm's square: ranks' parts add up to it. Asks no other rank."""
        return self.norm(parameters).square() / self.peers.num_ranks

    def clip(self, parameters: Sequence[nn.Parameter], max_norm: float, norm: Tensor) -> None:
        """Scales a gradient of norm `norm` to at most `max_norm`."""
        clip([p.grad for p in parameters if p.grad is not None], max_norm, norm)

    def step(self, optimizers: Sequence[Optimizer]) -> str | None:
        """Steps the optimizers; says why not, where the wrapper decided against it."""
        for optimizer in optimizers:
            optimizer.step()
        return None


def _gradient_of(parameter: nn.Parameter) -> Tensor | None:
    return parameter.grad


def why_tensor_parallel(parameters: Sequence[Any]) -> str | None:
    """A rank of such a group has a part of each gradient alone."""
    if any(hasattr(parameter, "to_local") for parameter in parameters):
        return (
            "which holds tensor-parallel parameters, of whose gradients a rank has a part; use data parallelism alone"
        )
    return None


def refuse_narrower(adds_up: Mapping[str, torch.dtype], dtype: torch.dtype, cure: str) -> None:
    """Where the wrapper adds up by itself: what it adds up in, by what it is called."""
    for name, seen in adds_up.items():
        if torch.promote_types(seen, dtype) != seen:
            raise ValueError(f"accumulate_dtype={dtype}, and gradients of {name} add up in {seen}; {cure}")


def refuse_narrower_outside(parameters: Sequence[nn.Parameter], own: set[int], dtype: torch.dtype) -> None:
    outside = [p for p in parameters if p.requires_grad and id(p) not in own]
    named = {f"a parameter of shape {list(p.shape)} outside of every shard": p.dtype for p in outside}
    refuse_narrower(named, dtype, "shard it too, or keep it in float32")


def on_host(gradient: Tensor | None, parameter: Any) -> Any:
    """A copy on the host, of a DTensor this rank's part; with its placements where its parameter has others."""
    if gradient is None:
        return None
    kept = local(gradient).detach().to("cpu", copy=True)
    placements = getattr(gradient, "placements", None)
    if placements is None or placements == parameter.placements:
        return kept
    return [kept, [_as_words(placement) for placement in placements]]


def from_host(kept: Any, parameter: Any) -> Tensor:
    """What `on_host` was given, on the device and the mesh of its parameter."""
    if isinstance(kept, Tensor):
        made = torch.empty_like(parameter, dtype=kept.dtype, memory_format=torch.preserve_format)
        if local(made).shape != kept.shape:
            raise ValueError(
                f"the state has a gradient of shape {list(kept.shape)} for a parameter of shape "
                f"{list(local(made).shape)}; give the same model and number of ranks"
            )
        local(made).copy_(kept)
        return made
    part, words = kept
    if not hasattr(parameter, "placements"):
        raise ValueError("the state has the gradient of a DTensor for a plain parameter; give the same model")
    kinds: Any = sys.modules["torch.distributed.tensor"]
    placements = [getattr(kinds, kind)(*arguments) for kind, *arguments in words]
    gradient: Tensor = kinds.DTensor.from_local(
        part.to(local(parameter).device),
        parameter.device_mesh,
        placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    return gradient


def _as_words(placement: Any) -> list[Any]:
    kind = type(placement).__name__
    if kind not in ("Shard", "Replicate", "Partial"):
        raise DistaccumError(
            f"state_dict() in mid-window with a gradient placed as {placement}, which cannot be kept; call it between "
            "two windows, after window.step()"
        )
    arguments = {"Shard": "dim", "Partial": "reduce_op"}
    return [kind, getattr(placement, arguments[kind])] if kind in arguments else [kind]


def gradients_of(holders: Sequence[Any]) -> list[Any]:
    """Copies on the host; of a DTensor this rank's part."""
    return [on_host(one.grad, one.parameter if isinstance(one, Sum) else one) for one in holders]


def put_gradients(holders: Sequence[Any], gradients: Sequence[Any]) -> None:
    """Of parameters, or of the sums of their gradients."""
    if len(gradients) != len(holders):
        raise ValueError(
            f"the state is of a model with {len(gradients)} parameters and this one has {len(holders)}; give the "
            "same model and optimizer"
        )
    for one, gradient in zip(holders, gradients, strict=True):
        parameter: Tensor = one.parameter if isinstance(one, Sum) else one
        wanted = getattr(one, "grad_dtype", None) or one.dtype
        seen = gradient[0] if isinstance(gradient, list) else gradient
        if seen is not None and seen.dtype != wanted:
            raise ValueError(
                f"the state has a gradient that adds up in {seen.dtype} and here it would in {wanted}; give the "
                "same accumulate_dtype"
            )
        if seen is None or seen.is_sparse:
            one.grad = None if seen is None else seen.to(parameter.device)
        else:
            one.grad = from_host(gradient, parameter)
