"""Late weights: make a framework's own loop exact without looking ahead in it.

A window knows its counts before its first backward; a framework's loop does not. So each loss is weighed when it is
there, by the count of its own micro-batch, and the gradients are divided once, when the window ends:

    for each micro-batch:  (loss * count / unit).backward()
    once per window:       gradient *= unit * ranks / count_of_all_micro_batches_on_all_ranks

The unit keeps the weights near 1. It is a power of two, the same on all ranks: with another one, as after a resume,
each weight and gradient has the same bits.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from typing import Any, final

import torch
from torch import Tensor, nn

from ..batch import Count
from ..engines.private.ddp import before_sink
from ..law import DistaccumError, Reduction, as_int_if_whole, share_of
from ..norms import HALF, multiply, nodes_of, unique, widest
from ..options import by_name
from ..ranks import whole_job
from ..update import Update


@final
class LateWindow:
    """Weighs the losses of one window after the other, and makes the gradients of each those of one big batch."""

    def __init__(self, reduction: Reduction, count: Count) -> None:
        reductions, counts = by_name(reduction, count)
        if len(reductions) > 1:
            raise ValueError(f"losses {list(reductions)}, expected one; several need a loop with an Accumulator")
        ((self._name, self._reduction),) = reductions.items()
        (self.count,) = counts.values()
        self.peers = whole_job()
        self._unit = 0.0
        self.clear()

    def clear(self) -> None:
        """Forgets the losses so far; call it where their gradients are cleared."""
        self._count = 0.0
        self._num_counted = 0
        self._begun = time.perf_counter()
        self._loss: Any = 0.0  # weighed, on the loss's device
        self.begin_micro_batch()

    def begin_micro_batch(self) -> None:
        self.weighed: list[float] = []  # the count of the micro-batch at work, once a loss of it is weighed

    def weigh(self, loss: Tensor, counts: Sequence[Any], value: Tensor | None = None) -> Tensor:
        """The loss that shall run backward in place of `loss`; without a count, one whose gradients are zeros.

        `counts` are those of the losses that it was made from, all equal. `value` is the loss for the record, if `loss`
        has other factors. A micro-batch may have several backwards, which add up: it counts once.
        """
        numbers = sorted({*map(_number, counts), *self.weighed})
        if len(numbers) > 1:
            several = " and ".join(f"{number:g}" for number in numbers)
            raise DistaccumError(
                f"a training step ran backward from losses with counts of {several}, expected one count for the "
                "micro-batch that it was given; give each part a step of its own"
            )
        number = numbers[0]
        if not self._unit:
            most = max(row[0] for row in self.peers.gather([number]))
            self._unit = 2.0 ** math.frexp(most)[1] if most else 0.0
        weight = share_of(self._reduction, number, self._unit or 1.0, 1.0)
        if not self.weighed:
            if number:
                # A loss of shape [1] is a number too.
                self._loss = self._loss + widest((loss if value is None else value).detach()).sum() * weight
                self._num_counted += 1
            self._count += number
            self.weighed = [number]
        return (loss.float() if loss.dtype in HALF else loss) * weight if number else _silenced(loss)

    def divide(self, parameters: Iterable[nn.Parameter]) -> float | None:
        """Makes the gradients of all parameters those of the window; returns its loss, over all ranks.

        If nothing counts it returns None and removes the gradients, so that no optimizer moves a weight.
        """
        rows = self.peers.gather([self._count, float(self._loss)])
        total, loss = map(sum, zip(*rows, strict=True))
        factor = 0.0
        own = [parameter for parameter in unique(parameters) if parameter.grad is not None]
        if total:
            factor = share_of("sum" if self._reduction == "sum" else "mean", self._unit, total, self.peers.num_ranks)
            multiply([parameter.grad for parameter in own], factor)
        else:
            for parameter in own:
                parameter.grad = None
        self._ended = total, loss * factor / self.peers.num_ranks, self._num_counted, self._begun
        self.clear()
        return self._ended[1] if total else None

    def record(self, index: int, norm: Any, *, stepped: bool) -> Update:
        """The record of the window that `divide` ended; call it after the step, for the time that it took."""
        total, loss, num_counted, begun = self._ended
        reason = None if stepped else "the scaled gradients overflowed"
        if not total:
            stepped = False
            reason = f"no {self._name} in any micro-batch of any rank"
            norm = None
        seconds = time.perf_counter() - begun
        update = Update(index, {self._name: as_int_if_whole(total)}, num_counted, stepped, reason, seconds)
        vars(update).update(losses={self._name: loss}, grad_norm=None if norm is None else float(norm))  # known already
        return update


def _number(count: Any) -> float:
    read: Any = count.item() if isinstance(count, Tensor) and count.numel() == 1 else count
    if not isinstance(read, Real) or not 0 <= float(read) < math.inf:
        raise ValueError(f"count gave {count!r} for a micro-batch, expected a finite number of at least 0")
    return float(read)


def reached(loss: Tensor, noted: Mapping[Any, Sequence[Any]]) -> list[Any]:
    """The counts noted at the places in the graph that a loss was made from: of each path, the nearest."""
    values: list[Any] = []
    seen: set[Any] = set()
    waiting: list[Any] = [before_sink(loss)]
    while waiting:
        place = waiting.pop()
        if place in noted:
            values += noted[place]
        elif place[0] is not None and place[0] not in seen:
            seen.add(place[0])
            waiting += place[0].next_functions
    return values


def _silenced(loss: Tensor) -> Tensor:
    """A loss whose backward gives zeros to all of its leaves from now on: 0 times NaN would be NaN."""
    for node in nodes_of(loss):
        if not hasattr(node, "variable"):  # a leaf's outlives the graph
            node.register_hook(lambda passed_on, _: tuple(g if g is None else torch.zeros_like(g) for g in passed_on))
    return loss
