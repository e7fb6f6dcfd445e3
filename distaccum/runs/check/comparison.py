"""Computes a batch's gradient at once and accumulated, on one model, and the error between the two."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ...batch import (
    Columns,
    KeyPath,
    Names,
    count_samples,
    cut_batch,
    cut_entries,
    entries_of,
    fresh,
    goes_whole,
    is_array,
    is_list,
    map_tensors,
    rebuilt,
)
from ...batches import Batches, DrawFn, cut_up
from ...batchnorm import KINDS
from ...law import DistaccumError
from ...norms import local
from ...planning import Planner
from ...window import LOOP
from ..update import SUM_OF_SAMPLES, LossFn, Snapshot, run_all

# The largest error that rounding explains, by dtype; others are half precision, and have 5e-2.
BOUNDS = {torch.float64: 1e-8, torch.float32: 1e-4}


@dataclass(frozen=True)
class Measured:
    """This rank's part of a gradient, by parameter (a scalar 0 if it has none), and the loss."""

    gradients: list[Tensor]
    loss: float
    num_micro_batches: int = 1


class Comparison:
    """Compares the accumulated gradient with the big batch's, in the model's current modes and dtype.

    Attributes:
        batch: The batch of all ranks, with its `length`.
        narrowest: The narrowest dtype in backward: many models take a softmax or a norm in float32.
        is_finite: The accumulated loss is finite, as the whole batch's is.
        micro_batches: Their number, by rank.
    """

    def __init__(self, trial: Planner, batch: Any, columns: Columns, loss_fn: LossFn, before: Snapshot) -> None:
        job = trial.job
        self.engine, self.models = job.engine, job.models
        self.reductions = job.config.reductions
        self.parameters: list[nn.Parameter] = [p for p in job.parameters() if p.requires_grad]
        self.before = before
        self.whole = columns.whole
        self._trial, self._loss_fn, self._columns = trial, loss_fn, columns
        self._own = batch
        self.batch, self.length = self._of_all_ranks()
        self.micro_batches: tuple[int, ...] = ()
        self.is_finite = True
        self.notes: list[str] = []
        self.dtype = self.narrowest = min({p.dtype for p in self.parameters}, key=_bits)
        self._cast: Callable[[Any], Any] = fresh
        # Tensors that are cast, with their data before that.
        self._narrow: list[tuple[Tensor, Tensor]] = []
        self.modules = list({id(m): (n, m) for model in self.models for n, m in model.named_modules()}.values())

    def _of_all_ranks(self) -> tuple[Any, int]:
        """The batch of all ranks, joined on each of them, and its length."""
        if not self.parameters:
            raise ValueError(
                "no parameter of the model requires a gradient, so nothing can be compared; unfreeze what is to be "
                "trained (requires_grad_(True))"
            )
        # Raises on all ranks what one of them cannot cut.
        self._trial.plan(cut_up(self._own, self._trial.job, self._columns), SUM_OF_SAMPLES).discard()
        peers = self.engine.peers
        length = self._columns.length_of(self._own)
        own = self._own if peers.num_ranks == 1 else map_tensors(self._own, Tensor.cpu)
        everyone = peers.gather_objects((own, length))
        lengths = [length for _, length in everyone if length]
        if sum(lengths) < 2:
            raise ValueError(f"check() got {sum(lengths)} samples, expected at least two, to cut between them")
        if peers.num_ranks == 1:
            return own, length
        joined = join_batches([batch for batch, length in everyone if length], lengths, self.whole)
        return map_tensors(joined, lambda t: t.to(self.parameters[0].device)), sum(lengths)

    def count(self, name: str, batch: Any, length: int) -> float:
        count = self._trial.job.config.counts[name]
        # The caller may have given the length.
        return length if count is count_samples else float(count(batch))

    def bound(self) -> float:
        return BOUNDS.get(self.narrowest, 5e-2)

    def agrees(self, errors: Sequence[tuple[float, float]]) -> bool:
        """Tells whether rounding explains the errors that `compare` returned."""
        return max(error for _, error in errors) <= self.bound() and self.is_finite

    def differ(self, measured: Measured, other: Measured) -> bool:
        return max(error for _, error in self._errors(measured, other)) > self.bound()

    def compare(self) -> list[tuple[float, float]]:
        """Computes, by parameter, the norm of the big batch's gradient and the accumulated one's relative error."""
        counts = {name: self.count(name, self.batch, self.length) for name in self.reductions}
        if not any(counts.values()):
            raise ValueError(f"count gave 0 {' and 0 '.join(counts)} for the whole batch; check with another")
        divisors = {name: n if self.reductions[name] == "sum_to_mean" else 1 for name, n in counts.items() if n}
        exact = weighted_sum([(self.bare(name, self.batch), 1 / divisor) for name, divisor in divisors.items()])
        is_bad = not math.isfinite(exact.loss + sum(_square(gradient) for gradient in exact.gradients))
        if any(self.engine.peers.largest([is_bad])):
            raise DistaccumError(
                f"the loss of the whole batch is {exact.loss:g}, and it or its gradient is not finite, so there is "
                "nothing to compare with; look for it in the batch and the model, or lower the scaler's scale"
            )
        # Uneven parts show a wrong count; one sample is too few for batch normalisation.
        normalises = any(isinstance(module, KINDS) and module.training for _, module in self.modules)
        length = self._columns.length_of(self._own)
        sizes = uneven_sizes(length, least=2 if normalises else 1)
        parts = list(cut_batch(self._own, sizes, length, self.whole)) if sizes else []
        as_cut = self._measured(cut_up(self._own, self._trial.job, self._columns, parts=2))
        uneven = self._measured(lambda _: Batches(parts, sizes))
        self.micro_batches = tuple(int(num) for (num,) in self.engine.peers.gather([as_cut.num_micro_batches]))
        self.is_finite = math.isfinite(as_cut.loss + uneven.loss)
        errors = zip(self._errors(as_cut, exact), self._errors(uneven, exact), strict=True)
        return [(norm, max(error, other)) for (norm, error), (_, other) in errors]

    def bare(self, name: str, batch: Any, *, restore: bool = True) -> Measured:
        """The unweighted gradient of one call of the criterion of this name, on the same batch on all ranks."""
        return self._measured(lambda _: Batches([batch], [1]), name, restore=restore)

    def _loss_of(self, batch: Any, name: str | None) -> Any:
        with saved_tensors_hooks(self._note_dtype, lambda tensor: tensor):
            losses = self._loss_fn(self._cast(batch))
        if name is None or not isinstance(losses, Mapping):
            return losses
        loss = losses.get(name, losses.get("loss") if len(self.reductions) == 1 else None)
        if loss is None:
            raise ValueError(f"loss_fn gave losses {list(losses)}, expected one for each of {list(self.reductions)}")
        return loss

    def _note_dtype(self, tensor: Tensor) -> Tensor:
        if tensor.is_floating_point():
            self.narrowest = min(self.narrowest, tensor.dtype, key=_bits)
        return tensor

    def _measured(self, draw: DrawFn, name: str | None = None, *, restore: bool = True) -> Measured:
        """The gradient and loss of a window that is not stepped; with a `name`, of that loss alone, unweighted."""
        if restore:
            self.before.restore()
        is_bare = name is not None
        mode = SUM_OF_SAMPLES if is_bare else LOOP
        window = self._trial.plan(draw, replace(mode, measure=lambda _: (is_bare, (0, 0))))
        try:
            run_all(window, lambda batch: self._loss_of(batch, name))
            sums = window.losses.sums()
            self.engine.peers.sum(sums)
            once = 1 / self.engine.peers.num_ranks if is_bare else 1.0
            scaler = self._trial.job.scaler
            scale = once if scaler is None else once / scaler.get_scale()
            gradients = [
                torch.zeros(()) if p.grad is None else local(p.grad).to_dense() * scale for p in self.parameters
            ]
            return Measured(gradients, float(sums.sum()) / self.engine.divisor * once, window.plan.num_here)
        finally:
            window.discard()

    def _errors(self, seen: Measured, exact: Measured) -> list[tuple[float, float]]:
        """For each parameter, the norm, and the error relative to it, or to sqrt(eps) times the whole gradient's norm
        if that is larger: below it rounding dominates.
        """
        pairs = zip(seen.gradients, exact.gradients, strict=True)
        squares = [_square(tensor) for gradient, other in pairs for tensor in (gradient - other, other)]
        sums = [math.sqrt(sum(column)) for column in zip(*self.engine.peers.gather(squares), strict=True)]
        norms = sums[1::2]
        floor = math.sqrt(torch.finfo(self.narrowest).eps) * math.hypot(*norms)
        # Shards add up; a gradient that every rank has whole was counted once per rank.
        copies = 1.0 if self.engine.lockstep else math.sqrt(self.engine.peers.num_ranks)
        errors = [apart and apart / max(norm, floor) for apart, norm in zip(sums[::2], norms, strict=True)]
        return [(n / copies, e if math.isfinite(e) else math.inf) for n, e in zip(norms, errors, strict=True)]

    def widened(self) -> Comparison | None:
        """This comparison with the model cast in place, until `cast_back`; None if its wrapper owns the dtype."""
        if "dtype" in self.engine.owns or self.dtype == torch.float64:
            return None
        self.before.restore()
        of_models = [t for model in self.models for t in (*model.parameters(), *model.buffers())]
        for tensor in {id(tensor): tensor for tensor in (*of_models, *self.parameters)}.values():
            self._narrow.append((tensor, tensor.data))
            tensor.data = _widened(tensor.data)
        wide = copy.copy(self)
        wide._cast = partial(map_tensors, change=_widened)
        wide.dtype = wide.narrowest = torch.float64
        wide.before = Snapshot(self.models)
        return wide

    def cast_back(self) -> None:
        """Gives the model its own bits again, except for buffers that it has replaced."""
        for tensor, data in self._narrow:
            tensor.data = data


def join_batches(batches: Sequence[Any], lengths: Sequence[int], whole: Names = ()) -> Any:
    """One batch of all samples; cutting it at `lengths` gives the batches again."""
    cuts = [cut_entries(batch, length, whole) for batch, length in zip(batches, lengths, strict=True)]

    def join(parts: Sequence[Any], path: KeyPath) -> Any:
        first = parts[0]
        are_cut = [cut.get(path) for cut in cuts]
        if is_array(first) and all(are_cut):
            return torch.cat([torch.as_tensor(part, device="cpu") for part in parts])
        # On a rank with one sample, the list may have been taken for columns.
        are_lists = is_list(first) and any(are_cut)
        if are_lists and all(len(part) == length for part, length in zip(parts, lengths, strict=True)):
            return type(first)(itertools.chain.from_iterable(parts))
        if False in are_cut or goes_whole(path, whole):
            return first
        by_key = [entries_of(part) for part in parts]
        return rebuilt(first, lambda _, key: join([entries[key] for entries in by_key], (*path, key)))

    return join(batches, ())


def uneven_sizes(length: int, least: int = 1) -> list[int]:
    """Sizes of parts, growing by one from `least`, so that hardly any wrong count is proportional to them.

    >>> uneven_sizes(9)
    [1, 2, 3, 3]
    """
    sizes: list[int] = []
    while length:
        size = least + len(sizes)
        sizes.append(size if length >= 2 * size else length)
        length -= sizes[-1]
    return sizes


def weighted_sum(terms: Sequence[tuple[Measured, float]]) -> Measured:
    """The sum of what was measured, each multiplied by its weight."""
    weights = [weight for _, weight in terms]
    columns = zip(*(part.gradients for part, _ in terms), strict=True)
    gradients = [reduce(torch.add, map(torch.mul, column, weights)) for column in columns]
    return Measured(gradients, sum(part.loss * weight for part, weight in terms))


def _bits(dtype: torch.dtype) -> int:
    return torch.finfo(dtype).bits


def _widened(tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.double() if tensor.is_floating_point() else tensor


def _square(gradient: Tensor) -> float:
    return float(gradient.abs().double().square().sum())
