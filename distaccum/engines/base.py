"""Engine: what differs between the wrappers of a model, and nothing else; it knows nothing of windows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any, ClassVar, Literal, NamedTuple, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ..adapter import Prepared
from ..law import DistaccumError, Plan
from ..norms import HALF, local, number_of, unique
from ..private import norms_of, run_backward
from ..ranks import Peers, norm_over

Sync = Literal["last", "every", "replicas", "gathered"]
Owned = Literal["step", "clip", "norm", "finite", "scale", "sums", "stages", "dtype", "parameters"]
Roots = tuple[Sequence[Tensor], Sequence[Tensor]]  # of a backward, and their seeds
Groups = tuple[dist.ProcessGroup, ...]  # over which a tensor is cut; empty: each rank has the whole
STANDING: Callable[[Any], Tensor | None] = attrgetter("grad")


class Source(NamedTuple):
    """A leaf that backwards reach, the parameter that gets its gradient, and the dtype in which it accumulates."""

    leaf: Any
    parameter: Any
    dtype: torch.dtype


class Engine:
    """Postpones and runs the reduction of one kind of wrapper. Abstract: subclass it for a wrapper, and `register` it.

    The defaults of all methods suit a wrapper that leaves whole gradients in `.grad` and reduces nothing; `hides_own`
    refuses until you override it. Made as `engine(models, sync)`: pass `group` from your own `__init__`.

    Args:
        models: The modules as the Accumulator got them.
        sync: One of `policies`.
        group: The data-parallel ranks; None: this process alone.

    Attributes:
        policies (tuple[Sync, ...]): The values of `sync` that it supports.
        lockstep (bool): Forwards, or the last backward, wait for all ranks, so a rank without data must stand in.
        owns (frozenset[str]): What the wrapper keeps to itself. Its step runs the optimizer ("step"), clips ("clip"),
            knows the norm, which is unknown before ("norm"), skips a gradient that is not finite ("finite"), scales
            losses ("scale"). It adds gradients up where an extension cannot ("sums"), cannot be a stage of a pipeline
            ("stages"), or has parameters that cannot be cast ("dtype") or used outside forward ("parameters").
        divisor (float): The number that the reduction divides by: that of ranks by default; set it to 1 if it sums.
        hides_norm (str | None): Why parameters look whole but are parts, so that the norm cannot be known.
        norm_in (tuple | None): Device and dtype of norms, if those of ranks' parts differ, and more groups to sum over.
        standing (Callable): Returns the gradient of one of `holders` since the window began. An extension that adds
            gradients up itself replaces it; then no backward may reduce.
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
        self.standing = STANDING
        self.peers = group if isinstance(group, Peers) else Peers(group)
        self.divisor: float = self.peers.num_ranks
        self.hides_norm: str | None = None
        self.norm_in: tuple[torch.device, torch.dtype, Groups] | None = None
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
        looks = max_norm is not None or on_nonfinite != "ignore" or given.scaler is not None
        if self.hides_norm is not None and looks:
            raise ValueError(
                f"{max_norm=}, {on_nonfinite=} or a scaler with {self.name} {self.hides_norm}: each rank would look at "
                "its own part of the gradient, and ranks would decide differently. Use fully_shard over the "
                "data-parallel mesh, or leave these out, with on_nonfinite='ignore'"
            )

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

    def averaged(self, uncovered: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        """Returns the parameters, of those that the wrapper does not reduce, that some rank may train."""
        # A parameter outside the models, such as a loss's own, may be frozen here and trained on another rank.
        inside = {id(p) for p in self.parameters()}
        return [p for p in uncovered if p.requires_grad or id(p) not in inside]

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

    def holders(self, parameters: Sequence[nn.Parameter]) -> Sequence[Any]:
        """The leaves on which backwards, and nothing else in a window, add up gradients of `parameters`."""
        return parameters

    def sources(self, parameters: Sequence[nn.Parameter]) -> Sequence[Source]:
        """Pairs `parameters` with the leaves that the coming window's backwards will reach; may communicate."""
        return [Source(one, one, one.dtype) for one in parameters]

    def hides_own(self, parameters: Sequence[nn.Parameter]) -> str | None:
        """The reason why a rank's own gradients of `parameters` are hidden, and a cure; None if `holders` show them."""
        return "whose engine does not say whether its holders have a rank's own gradient; give it hides_own()"

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

    def shards(self, parameters: Sequence[nn.Parameter]) -> dict[Groups, list[Tensor]]:
        """This rank's parts of gradients, by the groups over which they are cut; no groups: each rank has the whole.

        Groups of the same ranks share an entry: a job that makes a mesh twice may have parameters on either.
        """
        shards: dict[Groups, list[Tensor]] = {}
        first: dict[tuple[tuple[int, ...], ...], Groups] = {}  # by their ranks
        parameter: Any
        for parameter in parameters:
            gradient, groups = parameter.grad, Groups()
            if gradient is None:
                continue
            placements: Sequence[Any] = getattr(gradient, "placements", ())
            if any(one.is_partial() for one in placements):
                gradient = gradient.full_tensor()
            elif placements:
                # DTensor caches results of earlier calls, and may place a gradient on another, equal mesh.
                mesh = parameter.device_mesh
                groups = tuple(mesh.get_group(i) for i, one in enumerate(placements) if not one.is_replicate())
                gradient = local(gradient)
                if groups not in shards:
                    ranks = tuple(tuple(dist.get_process_group_ranks(group)) for group in groups)
                    groups = first.setdefault(ranks, groups)
            shards.setdefault(groups, []).append(gradient)
        return shards

    def norm(self, parameters: Sequence[nn.Parameter], kind: float = 2.0, over: Tensor | None = None) -> Tensor:
        """The norm of the whole gradient divided by `over`, the same on all ranks; `kind` is 2 or infinity."""
        # One reduction per group of ranks, even on a rank that has no part.
        here = parameters[0].device if parameters else torch.device("cpu")
        device, dtype, beside = self.norm_in or (here, None, ())
        norms = []
        for groups, parts in self.shards(parameters).items():
            norm = total_norm(parts, kind, over).to(device, dtype)
            norms.append(norm_over(groups, norm, kind) if groups or math.isinf(kind) else norm)
        norm = norms[0] if len(norms) == 1 else total_norm(norms, kind)
        return norm_over(beside, norm.to(device, dtype), kind) if beside else norm

    def step(self, optimizers: Sequence[Optimizer]) -> str | None:
        """Steps the optimizers that `adopt` left; returns why not, if the wrapper decided against it."""
        for optimizer in optimizers:
            optimizer.step()
        return None


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

    hides_own = staticmethod(why_tensor_parallel)


def total_norm(gradients: Sequence[Tensor], kind: float = 2.0, over: Tensor | None = None) -> Tensor:
    """The norm of all gradients, divided by `over`; in float32 at least."""
    by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}  # a kernel takes one of these kinds only
    for gradient in gradients:
        if gradient.is_sparse:
            gradient = gradient.coalesce().values()
        if over is not None:
            gradient = gradient / over.to(gradient.device)
        if kind != math.inf or gradient.numel():  # an empty tensor has no largest element
            by_kind.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    norms: list[Tensor] = []
    for (_, dtype), alike in by_kind.items():
        of_each = norms_of(alike, kind, dtype=torch.float32 if dtype in HALF else None)
        if kind == math.inf:
            # The larger of a number and NaN is either, depending on the device or the collective.
            finite = [gradient.isfinite().all() for gradient in alike]
            of_each = [norm.where(is_finite, math.inf) for norm, is_finite in zip(of_each, finite, strict=True)]
        norms += of_each
    if not norms:
        return torch.zeros((), device="cpu")
    if len(by_kind) > 1:
        norms = [norm.to(norms[0].device) for norm in norms]
    norm: Tensor = torch.linalg.vector_norm(torch.stack(norms), kind)
    return norm


def look_at(
    engine: Engine, parameters: Sequence[nn.Parameter], norm: Tensor | None = None
) -> tuple[bool, Tensor | None, float]:
    """Returns whether every element is finite, the norm, and it as a number; reads once, usually after one pass."""
    # On a CPU finding the largest element takes 18 times as long as the norm; adding up norms in a kernel is slow too.
    gradients = [p.grad for p in parameters if p.grad is not None] if norm is None else []
    is_own = type(engine).norm is Engine.norm and type(engine).shards is Engine.shards and engine.norm_in is None
    if norm is None and is_own and all(map(_is_plain, gradients)):
        read = math.hypot(*map(number_of, norms_of(gradients, 2.0)))
    else:
        read = number_of(engine.norm(parameters) if norm is None else norm)
    if math.isfinite(read):
        return True, norm, read
    largest = engine.norm(parameters, math.inf)  # unlike a sum of squares, this cannot overflow
    is_finite = math.isfinite(number_of(largest))
    return is_finite, largest * engine.norm(parameters, 2.0, largest) if is_finite else norm, math.inf


def _is_plain(one: Tensor) -> bool:
    return type(one) is Tensor and one.is_cpu and one.layout is torch.strided and one.dtype not in HALF


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
