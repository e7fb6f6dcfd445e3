"""How a criterion weighs the parts of a batch, where that is not what the caller declared."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...cutting import cut_batch, tensors_in
from ...law import as_int_if_whole
from .compare import Comparison, Measured, weighted_sum, without_labels
from .rows import uneven_sizes


def cause_in_the_loss(comparison: Comparison, name: str) -> str | None:
    """Why the loss of this name is not the declared sum of its parts' losses; None where it is."""
    at_once = comparison.count(name, comparison.batch, comparison.length)
    if not at_once:
        return None
    if why := min(filter(None, comparison.unlike), default=""):
        return f"count: the loss of a micro-batch is nan: {why}"
    parts = _Parts(comparison, name)
    if not all(math.isfinite(one.loss) for one in parts.measured):
        if why := parts.without_labels():
            return f"count: the loss of a micro-batch is nan: {why}"
        return f"count: it gave {parts}, and the loss of one of them is not finite: the criterion counts something else"
    if comparison.unlike:
        return "loss: a micro-batch's loss is not finite, and the whole batch's is"
    if sum(parts.counts) != at_once and parts.reduction != "sum":
        whole = f"{as_int_if_whole(at_once)}{parts.of_name} for the whole batch"
        return f"count: it gave {whole} and {parts}, which should add up to it"
    if parts.fit(parts.declared):
        return None
    return parts.cause_in_weights() or (
        f"loss: the loss{parts.of_name} is no sum or mean over samples: no weights of its parts' losses make it up, so "
        "samples depend on each other in it or in the model"
    )


class _Parts:
    """Uneven parts of a batch, with their gradients, losses and counts. As a text, what count gave."""

    def __init__(self, comparison: Comparison, name: str) -> None:
        self._of = comparison
        self.reduction = comparison.subject.reductions[name]
        self.of_name = f" of {name!r}" if len(comparison.subject.reductions) > 1 else ""
        length, whole = comparison.length, comparison.whole
        self._sizes = uneven_sizes(comparison.batch, length, [max(1, length // 6), max(2, length // 2)], whole)
        self._batches = list(cut_batch(comparison.batch, self._sizes, length, whole))
        self.counts = [comparison.count(name, one, size) for one, size in zip(self._batches, self._sizes, strict=True)]
        self.measured = [comparison.bare(name, one) for one in self._counted(self._batches)]
        self._whole = comparison.bare(name, comparison.batch)

    def __str__(self) -> str:
        return f"{[as_int_if_whole(count) for count in self.counts]} for parts of {self._sizes} samples"

    def without_labels(self) -> str:
        return next(filter(None, map(without_labels, self._counted(self._batches))), "")

    def _counted(self, values: Sequence[Any]) -> list[Any]:
        """The values of the parts whose count is not 0."""
        return [value for value, count in zip(values, self.counts, strict=True) if count]

    @property
    def declared(self) -> list[float]:
        """The weights that the caller's reduction and count give."""
        counted = self._counted(self.counts)
        return [count / sum(counted) for count in counted] if self.reduction == "mean" else [1.0] * len(counted)

    def fit(self, weights: Sequence[float]) -> bool:
        """Whether the whole is the sum of its parts by these weights."""
        made = weighted_sum(self.measured, weights)
        size = sum(abs(weight * part.loss) for weight, part in zip(weights, self.measured, strict=True))
        is_same_loss = abs(made.loss - self._whole.loss) <= self._of.bound() * max(size, 1e-9)
        return is_same_loss and not self._of.differ(made, self._whole)

    def cause_in_weights(self) -> str | None:
        """Which other weights fit, and how to declare them; None where none do."""
        if self.reduction == "mean" and self.fit([1.0] * len(self.measured)):
            return (
                f"reduction: the criterion{self.of_name} sums over its batch and reduction='mean' says that it "
                "averages; say 'sum' or 'sum_to_mean', or let it average"
            )
        for one in denominators(self._batches, self._sizes):
            counted = self._counted(one.numbers)
            if sum(counted) and self.fit([number / sum(counted) for number in counted]):
                averages = f"the criterion{self.of_name} averages over {one.what}"
                if self.reduction == "mean":
                    return f"count: {averages}, and count gave {self}; {one.cure}"
                return (
                    f"reduction: {averages} and reduction={self.reduction!r} says that it sums; say 'mean', or let it "
                    "sum"
                )
        free = self._free_weights()
        is_mean = abs(sum(free) - 1) <= min(100 * self._of.bound(), 1e-3)  # else it grows with the number of samples
        if is_mean and self.fit(free):
            kind = "count" if self.reduction == "mean" else "reduction"
            shown = " : ".join(f"{weight:.3f}" for weight in free)
            return (
                f"{kind}: the criterion{self.of_name} weighs parts of {self._sizes} samples as {shown}, and count gave "
                f"{self} with reduction={self.reduction!r}; let count give the criterion's own denominator"
            )
        return None

    def _free_weights(self) -> list[float]:
        """The weights with the smallest squared error of gradient and loss; nan where there are none."""
        products = [_dot(one, other) for one in self.measured for other in (*self.measured, self._whole)]
        rows = self._of.engine.peers.gather(products)
        summed = torch.tensor([sum(column) for column in zip(*rows, strict=True)], dtype=torch.float64, device="cpu")
        matrix = summed.reshape(len(self.measured), -1)
        scale = matrix[:, :-1].diagonal().mean().clamp(min=1e-300)
        losses = torch.tensor([one.loss for one in self.measured], dtype=torch.float64, device="cpu")
        size = losses.square().mean().clamp(min=1e-300)
        left = matrix[:, :-1] / scale + torch.outer(losses, losses) / size
        right = matrix[:, -1] / scale + losses * self._whole.loss / size
        found: list[float] = torch.linalg.lstsq(left, right[:, None], driver="gelsd").solution[:, 0].tolist()
        return found


class Denominator(NamedTuple):
    """What a criterion may average over."""

    what: str
    cure: str
    numbers: list[float]  # of each part


def denominators(parts: Sequence[Any], sizes: Sequence[int]) -> list[Denominator]:
    """The denominators that a batch offers, the likely ones first."""
    found = [Denominator("samples", "leave count at count_samples", [float(size) for size in sizes])]
    not_zero = []  # after all labels: padding is often 0 where a label is -100
    columns = [[tensor for _, tensor in tensors_in(part)] for part in parts]
    for i, (where, first) in enumerate(tensors_in(parts[0])):
        if first.is_floating_point() or first.is_complex() or first.ndim == 0:
            continue
        column = [tensors[i] for tensors in columns]
        labels, others = f"the labels in {where} that are not -100", f"what is not 0 in {where}"
        if first.ndim > 1:
            rows, without_first = [one[:, 1:] for one in column], ", without the first of each row"
            cure = f"count=count_tokens({where}, shift=True)"
            found.append(Denominator(labels + without_first, cure, _number(rows, -100)))
            not_zero.append(Denominator(others, "let count give that", _number(column, 0)))
            not_zero.append(Denominator(others + without_first, "let count give that", _number(rows, 0)))
        found.append(Denominator(labels, f"count=count_tokens({where})", _number(column, -100)))
    alike = Denominator("its parts, each alike (a mean of means)", "let it average over samples", [1.0] * len(parts))
    return [*found, *not_zero, alike]


def _number(column: Sequence[Tensor], ignored: int) -> list[float]:
    return [float(one.ne(ignored).sum()) for one in column]


def _dot(one: Measured, other: Measured) -> float:
    pairs = zip(one.gradients, other.gradients, strict=True)
    return sum(float((a.double() * b.double()).sum()) for a, b in pairs if a is not None and b is not None)
