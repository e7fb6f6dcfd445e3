"""A batch at once and accumulated, on one model: the two gradients, and how far they are apart."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ...engines import Engine
from ...gradients.names import names_of
from ...gradients.snapshot import Snapshot, random_devices, random_state, same_random, set_seed
from ...law.batches import batch_length, cut_batch, join_batches, map_tensors, tensors_in
from ...law.errors import DistaccumError
from ...law.shares import Reduction, listed

LossFn = Callable[[Any], Tensor | Mapping[str, Tensor]]
# The largest error that rounding explains, by dtype; any other is half precision.
BOUNDS = {torch.float64: 1e-8, torch.float32: 1e-4}
BOUND_OF_HALF = 5e-2


@dataclass(frozen=True)
class Measured:
    """A gradient: this rank's part of it, by parameter; and the loss."""

    gradients: list[Tensor | None]
    loss: float
    kept: tuple[int, ...]  # micro-batches, by rank
    left_out: int = 0  # of this rank's, which had nothing that counts

    def scaled(self, factor: float) -> Measured:
        scaled = [None if g is None else g * factor for g in self.gradients]
        return Measured(scaled, self.loss * factor, self.kept)


class Measure(Protocol):
    """Runs a window, and gives its gradient in the place of a step."""

    def __call__(self, micro_batches: Sequence[Any] | None, loss_fn: LossFn, *, as_sum: bool) -> Measured:
        """Of these on this rank (None: of the batch as it is cut); `as_sum`: the sum over ranks of bare losses."""


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
    """What is accumulated against the big batch, as often as asked, in one mode and dtype after another."""

    def __init__(self, subject: Subject, batch: Any, loss_fn: LossFn) -> None:
        self.subject, self.engine = subject, subject.engine
        self._loss_fn = loss_fn
        self._own, self._own_length = batch, -1  # this rank's
        self.batch, self.length = batch, 0  # of all ranks
        self.kept: tuple[int, ...] = ()  # micro-batches, by rank
        self.unlike: set[str] = set()  # why a micro-batch's loss is not finite where the whole batch's is
        self.is_random = False  # whether random numbers are drawn
        self.left_out = 0  # micro-batches of all ranks that had nothing that counts
        self.notes: list[str] = []
        self.before = Snapshot(subject.models)
        self.before.take()
        dtypes = {p.dtype for p in subject.parameters} or {torch.float32}
        self.dtype = min(dtypes, key=lambda d: torch.finfo(d).bits)
        self.narrowest = self.dtype  # of what backward computes with; many models take a softmax or a norm in float32
        self._cast: Callable[[Any], Any] = lambda batch: batch
        self.modules = list({id(m): (n, m) for model in subject.models for n, m in model.named_modules()}.values())

    def loss(self, batch: Any) -> Any:
        """What the caller's function gives, of a batch in the dtype at hand."""
        return self._loss_fn(self._cast(batch))

    def join(self) -> None:
        """The batch of all ranks, on each of them."""
        if self.engine.peers.num_ranks == 1:
            self._refuse_nothing_trained()
            self.length = self._own_length = batch_length(self._own)
            if self.length < 2:
                raise ValueError(f"check() got {self.length} samples, expected at least two, to cut between them")
            return
        try:
            self._refuse_nothing_trained()
            self._own_length = batch_length(self._own)
            failed = None
        except Exception as error:  # the others wait in the gathering below; tell them first
            failed = error
        batches = self.engine.peers.gather_objects((map_tensors(self._own, lambda t: t.cpu()), self._own_length))
        if failed is not None:
            raise failed
        if lost := [str(rank) for rank, (_, length) in enumerate(batches) if length < 0]:
            raise DistaccumError(
                f"rank {', '.join(lost)} has a batch whose length cannot be seen, or nothing to train (its own error "
                "says which)"
            )
        full = [(batch, length) for batch, length in batches if length]
        try:
            joined = join_batches([batch for batch, _ in full], [length for _, length in full])
        except Exception as error:
            raise DistaccumError(
                f"the batches of the ranks cannot be joined into one ({type(error).__name__}: "
                f"{' '.join(str(error).split())[:160]}), which the check needs; pad them to one length"
            ) from error
        device = next(iter(self.subject.parameters)).device
        self.batch, self.length = map_tensors(joined, lambda t: t.to(device)), sum(length for _, length in full)

    def _refuse_nothing_trained(self) -> None:
        if not self.subject.parameters:
            raise ValueError(
                "no parameter of the model requires a gradient, so nothing can be compared; unfreeze what is to be "
                "trained (requires_grad_(True))"
            )

    # In one mode and dtype

    def compare(self) -> list[tuple[float, float]]:
        """By parameter, the big batch's norm and the relative error of what is accumulated."""
        exact = self._big_batch()
        self._refuse_nonfinite(exact)
        drawn = not same_random(random_state(random_devices(self.subject.models)), self.before.random)
        self.unlike = set()
        as_cut = self._accumulated(None)
        self.kept = as_cut.kept
        rows = self.engine.peers.gather([float(drawn), float(as_cut.left_out)])
        self.is_random, self.left_out = any(one for one, _ in rows), int(sum(number for _, number in rows))
        # And uneven parts, where a wrong count shows; of one sample batch normalisation would fail.
        length = self._own_length
        sizes = [length // 3, length - length // 3] if length > 5 else [length]
        uneven = self._accumulated(list(cut_batch(self._own, sizes, length)) if length else [])
        errors = zip(self._errors(as_cut, exact), self._errors(uneven, exact), strict=True)
        return [(norm, max(error, other)) for (norm, error), (_, other) in errors]

    def _accumulated(self, micro_batches: Sequence[Any] | None) -> Measured:
        self.before.restore()
        seen: set[str] = set()

        def loss_fn(batch: Any) -> Any:
            loss = self.loss(batch)
            losses = loss.values() if isinstance(loss, Mapping) else [loss]
            if any(isinstance(one, Tensor) and not bool(one.isfinite().all()) for one in losses):
                seen.add(without_labels(batch))
            return loss

        found = self.subject.measure(micro_batches, loss_fn, as_sum=False)
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
            where = f", its gradient not finite in {listed(bad)}" if bad else ""
            why = without_labels(self.batch)
            raise DistaccumError(
                f"the loss of the whole batch is {exact.loss:g}{f': {why}' if why else ''}{where}, so there is nothing "
                "to compare with; look for it in the batch and the model, or lower the scaler's scale"
            )

    def _big_batch(self) -> Measured:
        total: Measured | None = None
        for name, reduction in self.subject.reductions.items():
            count = self.count(name, self.batch)
            if not count:
                continue
            one = self.bare(name, self.batch)
            one = one.scaled(1 / count) if reduction == "sum_to_mean" else one
            total = one if total is None else weighted_sum([total, one], [1.0, 1.0])
        if total is None:
            raise ValueError(
                f"count gave 0 {' and 0 '.join(self.subject.reductions)} for the whole batch; check with another"
            )
        return total

    def bare(self, name: str, batch: Any, *, seed: int | None = None, put_back: bool = True) -> Measured:
        """The gradient of one call of the criterion, of one name, unweighted."""

        def loss_fn(batch: Any) -> Any:
            with saved_tensors_hooks(self._look, lambda tensor: tensor):
                loss = self.loss(batch)
            if not isinstance(loss, Mapping):
                return loss
            found = loss.get(name, loss.get("loss") if len(self.subject.reductions) == 1 else None)
            if found is None:
                raise ValueError(
                    f"loss_fn gave losses {list(loss)}, expected one for each of {list(self.subject.reductions)}"
                )
            return found

        if put_back:
            self.before.restore()
        if seed is not None:
            set_seed(seed)
        return self.subject.measure([batch], loss_fn, as_sum=True).scaled(1 / self.engine.peers.num_ranks)

    def _look(self, tensor: Tensor) -> Tensor:
        if tensor.is_floating_point():
            self.narrowest = min(self.narrowest, tensor.dtype, key=lambda d: torch.finfo(d).bits)
        return tensor

    def count(self, name: str, batch: Any) -> float:
        return float(self.subject.counts[name](batch))

    def bound(self) -> float:
        return BOUNDS.get(self.narrowest, BOUND_OF_HALF)

    def _errors(self, seen: Measured, exact: Measured) -> list[tuple[float, float]]:
        """What is small beside the whole gradient is measured beside a part of the whole: rounding does not shrink."""
        squares = []
        for one, other in zip(seen.gradients, exact.gradients, strict=True):
            difference = one - other if one is not None and other is not None else one if other is None else other
            squares += [_square(difference), _square(other)]
        rows = self.engine.peers.gather(squares)
        sums = [math.sqrt(sum(column)) for column in zip(*rows, strict=True)]
        pairs = list(zip(sums[0::2], sums[1::2], strict=True))
        floor = math.sqrt(torch.finfo(self.narrowest).eps) * math.sqrt(sum(norm**2 for _, norm in pairs))
        # Shards add up; what each rank has whole is counted so often.
        copies = 1.0 if self.engine.lockstep else math.sqrt(self.engine.peers.num_ranks)
        found = []
        for apart, norm in pairs:
            error = apart / max(norm, floor) if apart or not math.isfinite(apart) else 0.0
            found.append((norm / copies, error if math.isfinite(error) else math.inf))
        return found

    def differ(self, one: Measured, other: Measured) -> bool:
        return max(error for _, error in self._errors(one, other)) > self.bound()

    @contextmanager
    def in_float64(self) -> Iterator[bool]:
        """The model cast in place, where it is plain and the loss runs; then put back, bit for bit."""
        if not self.engine.can_be_cast or self.dtype == torch.float64:
            yield False
            return
        tensors = {id(t): t for model in self.subject.models for t in (*model.parameters(), *model.buffers())}
        tensors |= {id(p): p for p in self.subject.parameters}
        kept = [(t, t.data) for t in tensors.values() if _widened(t.data) is not t.data]
        dtype, narrowest, before = self.dtype, self.narrowest, self.before
        is_wide = True
        before.restore()
        try:
            for tensor, _ in kept:
                tensor.data = _widened(tensor.data)
            self._cast = lambda batch: map_tensors(batch, _widened)
            self.dtype = self.narrowest = torch.float64
            self.before = Snapshot(self.subject.models)
            self.before.take()
            try:
                self.bare(next(iter(self.subject.reductions)), self.batch)
            except Exception as error:
                is_wide = False
                self.notes.append(f"not in float64: {type(error).__name__}: {' '.join(str(error).split())[:120]}")
            if is_wide:
                yield True
        finally:
            for tensor, data in kept:
                tensor.data = data
            self._cast, self.dtype, self.before = (lambda batch: batch), dtype, before
            self.narrowest = narrowest
            before.restore()
        if not is_wide:
            yield False


def without_labels(batch: Any) -> str:
    """Why a mean over its labels would be 0 / 0, and what to count; "" where it would not.

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


def _widened(tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.double() if tensor.is_floating_point() else tensor


def _square(gradient: Tensor | None) -> float:
    return 0.0 if gradient is None else float(gradient.abs().double().square().sum())


def weighted_sum(parts: Sequence[Measured], weights: Sequence[float]) -> Measured:
    gradients: list[Tensor | None] = []
    for column in zip(*(part.gradients for part in parts), strict=True):
        there = [g * weight for g, weight in zip(column, weights, strict=True) if g is not None]
        gradients.append(torch.stack(there).sum(0) if there else None)
    loss = sum(part.loss * weight for part, weight in zip(parts, weights, strict=True))
    return Measured(gradients, loss, parts[0].kept)
