"""The two gradients of a batch, at once and accumulated, on one model; and the error between them."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import reduce
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ...batchnorm import KINDS
from ...cutting import Columns, count_samples, cut_batch, join_batches, map_tensors, tensors_in
from ...engines import Engine
from ...law import DistaccumError, Reduction, all_or_none, in_short, shorten
from ...norms import names_of
from ...snapshot import Snapshot, random_devices, random_state, same_random, set_seed
from .rows import all_ignored, kept_by_row, uneven_sizes

LossFn = Callable[[Any], Tensor | Mapping[str, Tensor]]
# The largest error that rounding explains, by dtype; any other is half precision.
BOUNDS = {torch.float64: 1e-8, torch.float32: 1e-4}
BOUND_OF_HALF = 5e-2


@dataclass(frozen=True)
class Measured:
    """A gradient by parameter, of which this has the rank's part; and the loss."""

    gradients: list[Tensor | None]
    loss: float
    kept: tuple[int, ...]  # micro-batches, by rank
    left_out: int = 0  # micro-batches of this rank that had nothing that counts

    def scaled(self, factor: float) -> Measured:
        return weighted_sum([self], [factor])


class Measure(Protocol):
    """Runs a window, and gives its gradient instead of stepping."""

    def __call__(
        self, micro_batches: Sequence[Any] | None, loss_fn: LossFn, lengths: Sequence[int] = (), *, as_sum: bool
    ) -> Measured:
        """The window of these on this rank (None: the batch as it is cut), of `lengths` samples.

        `as_sum`: bare losses, summed over ranks.
        """


@dataclass
class Subject:
    """What is checked: the parts of the accumulator that a check needs."""

    models: Sequence[nn.Module]
    parameters: Sequence[nn.Parameter]  # that are trained
    everything: Sequence[nn.Parameter]  # frozen ones too
    engine: Engine
    reductions: Mapping[str, Reduction]
    counts: Mapping[str, Callable[[Any], Any]]
    measure: Measure


class Comparison:
    """Compares the accumulated gradient with the big batch's, in the model's current modes and dtype."""

    def __init__(self, subject: Subject, batch: Any, columns: Columns, loss_fn: LossFn, before: Snapshot) -> None:
        self.subject, self.engine, self.before = subject, subject.engine, before
        self._loss_fn, self._columns, self.whole = loss_fn, columns, columns.whole
        self._own, self._own_length = batch, -1  # this rank's
        self.batch, self.length = batch, 0  # of all ranks
        self.kept: tuple[int, ...] = ()  # micro-batches, by rank
        self.unlike: set[str] = set()  # why a micro-batch's loss is not finite where the whole batch's is
        self.is_random = False  # whether random numbers are drawn
        self.left_out = 0  # micro-batches of all ranks that had nothing that counts
        self.notes: list[str] = []
        self.dtype = min({p.dtype for p in subject.parameters} or {torch.float32}, key=_bits)
        self.narrowest = self.dtype  # of what backward computes with; many models take a softmax or a norm in float32
        self._cast: Callable[[Any], Any] = lambda batch: batch
        self.modules = list({id(m): (n, m) for model in subject.models for n, m in model.named_modules()}.values())

    def join(self) -> None:
        """Makes the batch of all ranks, on each of them."""
        failed: Exception | None = None
        try:
            if not self.subject.parameters:
                raise ValueError(
                    "no parameter of the model requires a gradient, so nothing can be compared; unfreeze what is to be "
                    "trained (requires_grad_(True))"
                )
            self._own_length = self._columns.length_of(self._own)
        except Exception as error:  # the others wait in the gathering below, and hear of it there
            failed = error
            self.engine.peers.tell(error)
        batches = [(self._own, self._own_length, failed and in_short(failed))]
        if self.engine.peers.num_ranks > 1:
            own, length, why = batches[0]
            batches = self.engine.peers.gather_objects((map_tensors(own, Tensor.cpu), length, why))
        all_or_none([why for *_, why in batches], failed, "rank {ranks} could not begin the check ({why})")
        self.length = sum(length for _, length, _ in batches)
        if self.length < 2:
            raise ValueError(f"check() got {self.length} samples, expected at least two, to cut between them")
        if self.engine.peers.num_ranks == 1:
            return
        full = [(batch, length) for batch, length, _ in batches if length]
        try:
            joined = join_batches([batch for batch, _ in full], [length for _, length in full], self.whole)
        except Exception as error:
            raise DistaccumError(
                f"the batches of the ranks cannot be joined into one ({in_short(error)}), which the check needs; pad "
                "them to one length"
            ) from error
        self.batch = map_tensors(joined, lambda t: t.to(self.subject.parameters[0].device))

    def loss(self, batch: Any) -> Any:
        """What the caller's function gives for a batch, cast to the current dtype."""
        return self._loss_fn(self._cast(batch))

    def count(self, name: str, batch: Any, length: int) -> float:
        count = self.subject.counts[name]
        return length if count is count_samples else float(count(batch))  # the length may be one that was given

    def uncertain_counts(self) -> list[str]:
        """The names whose count leaves ignored labels in, where no part would show that the criterion does not."""
        kept = kept_by_row(self.batch, self.length, self.whole)
        if not kept or min(kept) < max(kept):
            return []
        without, length = all_ignored(self.batch), self.length
        names = self.subject.reductions
        return [name for name in names if self.count(name, without, length) == self.count(name, self.batch, length)]

    def bound(self) -> float:
        return BOUNDS.get(self.narrowest, BOUND_OF_HALF)

    def agrees(self, errors: Sequence[tuple[float, float]]) -> bool:
        """Whether rounding explains what `compare` gave."""
        return max(error for _, error in errors) <= self.bound() and not self.unlike

    def differ(self, one: Measured, other: Measured) -> bool:
        return max(error for _, error in self._errors(one, other)) > self.bound()

    def compare(self) -> list[tuple[float, float]]:
        """By parameter, the norm of the big batch's gradient and the relative error of the accumulated one."""
        exact = self._big_batch()
        self._refuse_nonfinite(exact)
        drawn = not same_random(random_state(random_devices(self.subject.models)), self.before.random)
        self.unlike = set()
        as_cut = self._accumulated(None)
        self.kept = as_cut.kept
        rows = self.engine.peers.gather([float(drawn), float(as_cut.left_out)])
        self.is_random, self.left_out = any(one for one, _ in rows), int(sum(number for _, number in rows))
        length = self._own_length
        least = 2 if any(isinstance(m, KINDS) and m.training for _, m in self.modules) else 1  # it fails with one
        sizes = uneven_sizes(self._own, length, [max(1, length // 3)], self.whole, least=least)
        parts = list(cut_batch(self._own, sizes, length, self.whole)) if length else []
        uneven = self._accumulated(parts, sizes)  # which shows a wrong count
        errors = zip(self._errors(as_cut, exact), self._errors(uneven, exact), strict=True)
        return [(norm, max(error, other)) for (norm, error), (_, other) in errors]

    def _accumulated(self, micro_batches: Sequence[Any] | None, lengths: Sequence[int] = ()) -> Measured:
        self.before.restore()
        seen: set[str] = set()

        def loss_fn(batch: Any) -> Any:
            loss = self.loss(batch)
            losses = loss.values() if isinstance(loss, Mapping) else [loss]
            if any(isinstance(one, Tensor) and not bool(one.isfinite().all()) for one in losses):
                seen.add(without_labels(batch))
            return loss

        found = self.subject.measure(micro_batches, loss_fn, lengths, as_sum=False)
        if not math.isfinite(found.loss):  # on all ranks alike
            self.unlike |= {why for of_rank in self.engine.peers.gather_objects(sorted(seen)) for why in of_rank}
        return found

    def _refuse_nonfinite(self, exact: Measured) -> None:
        names = names_of(self.subject.models)
        bad = [
            names.get(id(p), "a parameter")
            for p, g in zip(self.subject.parameters, exact.gradients, strict=True)
            if g is not None and not bool(g.isfinite().all())
        ]
        if any(bad for (bad,) in self.engine.peers.gather([float(bool(bad) or not math.isfinite(exact.loss))])):
            where = f", its gradient not finite in {shorten(bad)}" if bad else ""
            why = without_labels(self.batch)
            raise DistaccumError(
                f"the loss of the whole batch is {exact.loss:g}{f': {why}' if why else ''}{where}, so there is nothing "
                "to compare with; look for it in the batch and the model, or lower the scaler's scale"
            )

    def _big_batch(self) -> Measured:
        found = []
        for name, reduction in self.subject.reductions.items():
            if count := self.count(name, self.batch, self.length):
                one = self.bare(name, self.batch)
                found.append(one.scaled(1 / count) if reduction == "sum_to_mean" else one)
        if not found:
            raise ValueError(
                f"count gave 0 {' and 0 '.join(self.subject.reductions)} for the whole batch; check with another"
            )
        return reduce(lambda one, other: weighted_sum([one, other], [1.0, 1.0]), found)

    def bare(self, name: str, batch: Any, *, seed: int | None = None, restore: bool = True) -> Measured:
        """The gradient of one call of the criterion of this name, unweighted."""

        def loss_fn(batch: Any) -> Any:
            with saved_tensors_hooks(self._note_dtype, lambda tensor: tensor):
                loss = self.loss(batch)
            if not isinstance(loss, Mapping):
                return loss
            found = loss.get(name, loss.get("loss") if len(self.subject.reductions) == 1 else None)
            if found is None:
                raise ValueError(
                    f"loss_fn gave losses {list(loss)}, expected one for each of {list(self.subject.reductions)}"
                )
            return found

        if restore:
            self.before.restore()
        if seed is not None:
            set_seed(seed)
        return self.subject.measure([batch], loss_fn, as_sum=True).scaled(1 / self.engine.peers.num_ranks)

    def _note_dtype(self, tensor: Tensor) -> Tensor:
        if tensor.is_floating_point():
            self.narrowest = min(self.narrowest, tensor.dtype, key=_bits)
        return tensor

    def _errors(self, seen: Measured, exact: Measured) -> list[tuple[float, float]]:
        """By parameter, the norm and the error relative to it, or to sqrt(eps) of the whole gradient's norm if that is
        larger: below it rounding dominates.
        """
        squares = []
        for one, other in zip(seen.gradients, exact.gradients, strict=True):
            difference = one - other if one is not None and other is not None else one if other is None else other
            squares += [_square(difference), _square(other)]
        rows = self.engine.peers.gather(squares)
        sums = [math.sqrt(sum(column)) for column in zip(*rows, strict=True)]
        floor = math.sqrt(torch.finfo(self.narrowest).eps) * math.hypot(*sums[1::2])
        # Shards add up; a gradient that each rank has whole was added up once per rank.
        copies = 1.0 if self.engine.lockstep else math.sqrt(self.engine.peers.num_ranks)
        found = []
        for apart, norm in zip(sums[0::2], sums[1::2], strict=True):
            error = apart / max(norm, floor) if apart or not math.isfinite(apart) else 0.0
            found.append((norm / copies, error if math.isfinite(error) else math.inf))
        return found

    @contextmanager
    def in_float64(self) -> Iterator[Comparison]:
        """This comparison with the model cast in place, if it is plain and the loss runs in float64; else itself.

        The model is put back bit for bit.
        """
        if not self.engine.can_be_cast or self.dtype == torch.float64:
            yield self
            return
        tensors = {id(t): t for model in self.subject.models for t in (*model.parameters(), *model.buffers())}
        tensors |= {id(p): p for p in self.subject.parameters}
        wide = copy.copy(self)
        wide._cast = lambda batch: map_tensors(batch, _widened)
        wide.dtype = wide.narrowest = torch.float64
        self.before.restore()
        with ExitStack() as stack:
            stack.callback(self.before.restore)
            for tensor in tensors.values():
                stack.callback(setattr, tensor, "data", tensor.data)
                tensor.data = _widened(tensor.data)
            wide.before = Snapshot(self.subject.models).take()
            try:
                wide.bare(next(iter(self.subject.reductions)), self.batch)
            except Exception as error:
                self.notes.append(f"not in float64: {in_short(error)}")
            else:
                yield wide
                return
        yield self


def without_labels(batch: Any) -> str:
    """Why a mean over the labels of `batch` would be 0 / 0, and what to count; "" where it would not.

    >>> without_labels({"y": torch.tensor([[-100, -100]])})
    "its labels in 'y' are all -100, and a mean over none is 0 / 0; count=count_tokens('y')"
    """
    for where, tensor in tensors_in(batch):
        if tensor.is_floating_point() or tensor.is_complex() or not tensor.numel():
            continue
        why = "and a mean over none is 0 / 0"
        if tensor.ndim and bool(tensor.eq(-100).all()):
            return f"its labels in {where} are all -100, {why}; count=count_tokens({where})"
        if tensor.ndim > 1 and tensor.shape[1] > 1 and bool(tensor[:, 1:].eq(-100).all()):
            return (
                f"its labels in {where} are all -100 but the first of each row, {why}; "
                f"count=count_tokens({where}, shift=True)"
            )
    return ""


def weighted_sum(parts: Sequence[Measured], weights: Sequence[float]) -> Measured:
    gradients: list[Tensor | None] = []
    for column in zip(*(part.gradients for part in parts), strict=True):
        there = [g * weight for g, weight in zip(column, weights, strict=True) if g is not None]
        gradients.append(sum(there[1:], there[0]) if there else None)
    loss = sum(part.loss * weight for part, weight in zip(parts, weights, strict=True))
    return Measured(gradients, loss, parts[0].kept)


def _bits(dtype: torch.dtype) -> int:
    return torch.finfo(dtype).bits


def _widened(tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.double() if tensor.is_floating_point() else tensor


def _square(gradient: Tensor | None) -> float:
    return 0.0 if gradient is None else float(gradient.abs().double().square().sum())
