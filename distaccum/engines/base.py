"""Engine: what differs between the wrappers of a model, and nothing else; it knows nothing of windows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from operator import attrgetter, is_
from typing import Any, ClassVar, Literal, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.linalg import vector_norm
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from ..adapter import Prepared
from ..law import NOBODY, DistaccumError, Plan
from ..norms import HALF, multiply, names_of, number_of, unique, widest
from ..options import Sync as Sync
from ..private import run_backward
from ..ranks import Groups, Peers
from ..text import shorten

Owned = Literal["step", "sums", "stages", "dtype", "parameters"]
# The roots of a backward, and their seeds.
Roots = tuple[Sequence[Tensor], Sequence[Tensor]]
# The reason of a skip that a loss scale expects.
OVERFLOW = "the scaled gradients overflowed"
# Added to the norm in clipping, as in torch.
EPSILON = 1e-6
GRAD: Callable[[Any], Tensor | None] = attrgetter("grad")


@final
class Gradient:
    """The gradient of a window over all ranks, before it is clipped: its L2 `norm`, and whether all of it is `finite`.

    Nothing is computed before one of them is read, and nothing twice. Ranks with shards add up their parts then, so
    read it on all ranks or on none.

    Args:
        parameters: The parameters whose `.grad` it is; None: the wrapper takes the norm as it steps.
        cuts: The groups over which the gradient of each is cut; None: only DTensors are, as they say themselves.
        stages: Groups of ranks with other parameters.
        device: On which norms are added up; None: that of the first parameter.

    Attributes:
        known (Tensor | float | None): The norm, if it was taken; a number if it was read.
    """

    def __init__(
        self,
        parameters: Sequence[Any] | None,
        cuts: Sequence[Groups] | None = None,
        stages: Groups = (),
        device: torch.device | None = None,
    ) -> None:
        self.parameters = parameters
        self._cuts = cuts
        self._stages = stages
        self.known: Tensor | float | None = None
        self._device = device or (parameters[0].device if parameters else torch.device("cpu"))

    @property
    def cuts(self) -> Sequence[Groups]:
        """The groups over which each of the parameters is cut; none: each data-parallel rank has the whole."""
        return self._cuts or [_cut_of(parameter, parameter) for parameter in self.parameters or ()]

    def take(self) -> Tensor | float | None:
        """Takes the norm without reading it; returns None if that is up to the wrapper."""
        if self.known is None and self.parameters is not None:
            self.known = self._take()
        return self.known

    @property
    def norm(self) -> float:
        """The L2 norm, the same on all ranks; NaN or infinity if some element is."""
        norm = self.take()
        if norm is None:
            raise DistaccumError(
                "the norm of a window's gradient was read where it cannot be taken; read it in judge(), before the "
                "step. DeepSpeed's own optimizers take it within the step: read update.grad_norm (with max_norm)"
            )
        self.known = number_of(norm) if isinstance(norm, Tensor) else norm
        return self.known

    @property
    def finite(self) -> bool:
        """True if every element is finite, or if the wrapper has yet to judge that."""
        return (self.parameters is None and self.known is None) or math.isfinite(self.norm)

    def clip(self, max_norm: float) -> None:
        """Scales the gradient to at most `max_norm`; reads nothing."""
        norm: Any = self.take()
        factor = max_norm / (norm + EPSILON)
        if isinstance(norm, Tensor):
            factor = factor.clamp(max=1.0)
        if not math.isinf(max_norm) and (isinstance(norm, Tensor) or not factor >= 1.0):
            multiply(self._gradients(), factor)

    def _gradients(self) -> list[Any]:
        return [parameter.grad for parameter in self.parameters or () if parameter.grad is not None]

    def _take(self) -> Tensor:
        """The norm over all ranks."""
        parts: dict[Groups, list[Tensor]] = {groups: [] for groups in self._cuts or ()}
        for i, parameter in enumerate(self.parameters or ()):
            if parameter.grad is not None:
                gradient, groups = _local_part(parameter)
                parts.setdefault(self._cuts[i] if self._cuts else groups, []).append(gradient)
        # A rank adds up each group's parts, even if it has none.
        norms = [_norm_over(groups, total_norm(part).to(self._device)) for groups, part in parts.items()]
        return _norm_over(self._stages, norms[0] if len(norms) == 1 else total_norm(norms).to(self._device))


def _local_part(parameter: Any) -> tuple[Tensor, Groups]:
    """This rank's part of a gradient, and the groups over which it is cut."""
    gradient = parameter.grad
    if not hasattr(gradient, "placements"):
        return gradient, ()
    return gradient.to_local(), _cut_of(gradient, parameter)


def _cut_of(tensor: Any, parameter: Any) -> Groups:
    """The groups over which a parameter, or its gradient, is cut."""
    placements: Sequence[Any] = getattr(tensor, "placements", ())
    if not placements or parameter.device_mesh.get_coordinate() is None:
        return ()
    # DTensor caches results of earlier calls, and may place a gradient on another, equal mesh.
    cut = [i for i, placement in enumerate(placements) if not placement.is_replicate()]
    return tuple(map(parameter.device_mesh.get_group, cut))


def _norm_over(groups: Groups, norm: Tensor) -> Tensor:
    """The norm of a whole, from the norm of this rank's part; the ranks of `groups` have the other parts."""
    if not groups:
        return norm
    square = widest(norm).square()
    for group in groups:
        dist.all_reduce(square, group=group)
    return square.sqrt()


def total_norm(gradients: Sequence[Tensor]) -> Tensor:
    """The norm of all gradients, in float32 at least."""
    dense = [gradient.coalesce().values() if gradient.is_sparse else gradient for gradient in gradients]
    # The norm of a number is its size.
    return get_total_norm([vector_norm(one, dtype=torch.float32) if one.dtype in HALF else one for one in dense])


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
        run_backward (Callable): Runs autograd from tuples of losses and their seeds; Accelerate has its own.
        peers (Peers): The ranks of the data-parallel group: `rank`, `num_ranks`, `gather`, `largest`, `group`.
        recount (Callable | None): Counts micro-batches, given these and what else would (a pipeline: by chunks).
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
        self.models = tuple(models)
        self.sync = sync
        self.run_backward: Callable[..., Any] = run_backward
        self.read_grad = GRAD
        self.recount: Callable[[Sequence[Any], Callable[..., Any]], Any] | None = None
        self.peers = group if isinstance(group, Peers) else Peers(group)
        self.peers.device = next((p.device for model in models for p in model.parameters()), None)
        self.divisor: float = self.peers.num_ranks

    def parameters(self) -> list[nn.Parameter]:
        """The models' parameters, each once: the tensors that hold gradients when a window is complete."""
        return unique(p for model in self.models for p in model.parameters())

    def adopt(self, given: Prepared, max_norm: float | None, on_nonfinite: str) -> None:
        """Removes from `given` what the wrapper steps itself; raises for options that the wrapper cannot follow."""

    # A window

    def num_micro_steps(self, plan: Plan) -> tuple[int, int]:
        """This rank's micro-steps, with stand-ins, and how many of the first reduce besides the last ("every").

        Raises, on all ranks, if this engine cannot run the plan.
        """
        fewest, most = plan.fewest, plan.most
        if fewest != most and any(
            isinstance(module, nn.SyncBatchNorm) and module.training for m in self.models for module in m.modules()
        ):
            raise DistaccumError(
                f"ranks have {fewest} to {most} micro-batches, and SyncBatchNorm communicates in each "
                "forward: the ranks with more would wait for ever; give all ranks as many micro-batches, or freeze its "
                "statistics with eval()"
            )
        if self.lockstep and plan.stranded != NOBODY:
            raise DistaccumError(
                f"ranks have {fewest} to {most} micro-batches; under {self.name} each rank must run forward "
                f"for the others to go on; rank {plan.stranded} has none from an earlier window to stand in "
                "with. Give each rank a micro-batch in the first window"
            )
        common = most if self.lockstep else fewest
        return most if self.lockstep else plan.num_here, common - 1 if self.sync == "every" else 0

    def will_reduce(self, reduce: bool) -> bool:
        """Returns whether a `backward` with this `reduce` communicates (then `update()` votes first)."""
        return False

    def begin(self, plan: Plan, parameters: Sequence[nn.Parameter]) -> None:
        """Begins a window for gradients of `parameters`, frozen ones too: from here on, reductions are postponed."""

    def backward(self, losses: Sequence[Tensor], seeds: Sequence[Tensor], reduce: bool) -> None:
        """Calls `run_backward` once, from scalar `losses`, weighted by `seeds`.

        `reduce`: it is this rank's last backward, or an early one, and may reduce the sum of all so far. It must not if
        another rank has none (`plan.fewest == 0`), or it is not known whether all succeed
        (`plan.reduce_afterwards`): then, or always, reduce in `finish`.
        """
        self.run_backward(tuple(losses), tuple(seeds))

    def run(self, micro: Any, weigh: Callable[..., Roots], inputs: Sequence[Any], options: dict[str, Any]) -> Any:
        """Runs forward and backward of a micro-batch (None: of a stand-in), if the wrapper does both in one call.

        `weigh`: gives losses and their seeds, as `Losses.weigh`.
        """
        raise DistaccumError(f"run() with {self.name}, whose forward is yours: window.backward(loss)")

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
        """Called after the last backward, on all ranks: reduces the rest, so that gradients are final."""

    def clear(self, parameters: Sequence[nn.Parameter]) -> None:
        """Removes each gradient, and restores the wrappers to what `begin` found, whatever has happened since.

        Called when a window ends, stepped or left, on this rank alone if need be, and before one that finds gradients.
        """
        for parameter in parameters:
            parameter.grad = None

    def stale(self, parameters: Sequence[nn.Parameter]) -> bool:
        """True if there are gradients other than any that `clear` leaves."""
        # A generator would cost three times as much.
        return not all(map(is_, map(GRAD, parameters), repeat(None)))

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


def refuse_parts(engine: Engine, parts: Sequence[Any]) -> None:
    """Raises if there are parameters of which a rank has a part that the wrapper takes for a whole."""
    if parts:
        names = names_of(engine.models)
        raise ValueError(
            f"{shorten([names.get(id(part), 'a parameter') for part in parts])} is a DTensor or a part of one, and "
            f"{engine.name} takes parts for whole parameters; use fully_shard over the data-parallel mesh (for "
            "experts, on a mesh of their own or with ignored_params)"
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
    if plan.lacks_terms:
        raise DistaccumError(
            f"a micro-batch has a count of 0 for one of {list(plan.names)}; its loss would be left out, and so "
            "would modules in this backward for which the other ranks wait; give each micro-batch a count above 0 "
            f"for each name{cure}"
        )


def sparse_embeddings(models: Iterable[nn.Module]) -> dict[str, Tensor]:
    """The weights of sparse embeddings, whose gradients hold only the rows that were looked up, by module name."""
    named = [(name, one) for model in models for name, one in model.named_modules()]
    return {name: one.weight for name, one in named if isinstance(one, nn.Embedding | nn.EmbeddingBag) and one.sparse}
