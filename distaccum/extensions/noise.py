"""The simple gradient noise scale, from gradients that are there anyway.

B = tr(S) / |G|^2, of the mean G and the covariance S of one sample's gradient: the batch at which noise and signal are
alike (McCandlish et al. 2018, arXiv 1812.06162, appendix A.1). The gradient g of n samples has

    E|g|^2 = |G|^2 + tr(S) / n

and a window has it for two n: the first micro-batch's on each rank, before ranks are added up, and its own. Two
equations give |G|^2 and tr(S), each without bias. They are averaged over updates, and B is the ratio of the averages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from ..accumulating.setup import Setup
from ..engines import Engine
from ..engines.base import Leaf
from ..extension import Extension
from ..law import Reduction, share_of
from ..norms import HALF, total_norm, widest
from ..update import Update
from ..window.window import Window

KEPT = 0.99  # of the averages, at each update: about the last hundred count
MOST_PENDING = 16  # updates whose numbers stay on the device; all are read together


class Early:
    """The norm of this rank's own gradient when a window's first micro-batch has gone backward."""

    def __init__(self, engine: Engine, parameters: Callable[[], Sequence[nn.Parameter]]) -> None:
        self._engine, self._parameters = engine, parameters
        self._hooks: list[Any] = []
        self._norms: dict[int, Tensor] | None = None  # by leaf, taken within a backward that reduces
        self._has_begun = False
        self.is_lost = False  # a part of it was reduced before all was there

    def before_backward(self, reduces: bool) -> None:
        """A reduction overwrites this rank's gradient, so each parameter's norm is taken when its gradient arrives."""
        self.is_lost = self.is_lost or self._norms is not None
        if reduces and not self.is_lost:
            leaves = self._engine.leaves(self._parameters())
            before = leaves if self._has_begun else []  # of other parts, which this backward need not reach
            standing = ((id(leaf.tensor), leaf.standing()) for leaf in before)
            self._norms = {of: _norm(gradient) for of, gradient in standing if gradient is not None}
            for leaf in leaves:
                self._hooks.append(leaf.tensor.register_post_accumulate_grad_hook(partial(self._take, leaf)))
        self._has_begun = True

    def _take(self, leaf: Leaf, _: Tensor) -> None:
        gradient = leaf.standing()
        if gradient is not None and self._norms is not None:
            self._norms[id(leaf.tensor)] = _norm(gradient)

    def remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def norm(self) -> Tensor:
        if self._norms is not None:
            return total_norm(list(self._norms.values()), 2.0)
        standing = [leaf.standing() for leaf in self._engine.leaves(self._parameters())]
        return total_norm([gradient for gradient in standing if gradient is not None], 2.0)


def _norm(gradient: Tensor) -> Tensor:
    values = gradient.detach()
    values = values.coalesce().values() if values.is_sparse else values
    norm: Tensor = torch.linalg.vector_norm(values, dtype=torch.float32 if values.dtype in HALF else None)
    return norm


class Small(NamedTuple):
    """The norms of a rank's first micro-batch."""

    square: Tensor  # |g|^2, of the mean over its samples
    per_sample: float  # 1 / its count


class Norms(NamedTuple):
    """A window's two gradients."""

    small: float  # |g|^2 of a rank's first micro-batch, the mean over ranks
    per_sample: float  # 1 / its count, the mean over ranks
    large: float  # |g|^2 of the window
    total: float  # the window's count

    def split(self) -> tuple[float, float] | None:
        """|G|^2 and tr(S); None where both gradients are one, or not finite.

        >>> Norms(small=5.0, per_sample=1.0, large=2.0, total=4).split()
        (1.0, 4.0)
        """
        apart = self.per_sample - 1 / self.total
        if not (math.isfinite(self.small) and math.isfinite(self.large) and apart > 1e-9 * self.per_sample):
            return None
        trace = (self.small - self.large) / apart
        return self.large - trace / self.total, trace


@dataclass
class NoiseRecord:
    """One update's norms, and the noise scale up to that update."""

    of: Averages | None  # None once it is read
    numbers: Callable[[], Tensor | None] | None = None  # of all ranks, when they are added up
    norm: Tensor | None = None  # of the window, where the numbers do not have it
    count: float = 0.0
    norms: Norms | None = None
    scale: float | None = None

    def read(self) -> float | None:
        if self.of is not None:
            self.of.fold(self)
        return self.scale


class Averages:
    """Of updates' |G|^2 and tr(S), from their records. They know of no model: an `Update` may keep them."""

    def __init__(self, reduction: Reduction) -> None:
        self._reduction = reduction
        self._pending: list[NoiseRecord] = []
        self._square, self._trace, self._weight = 0.0, 0.0, 0.0  # sums over updates, older ones counting less

    def add(
        self,
        numbers: Callable[[], Tensor | None] | None = None,
        norm: Tensor | None = None,
        count: float = 0.0,
    ) -> NoiseRecord:
        """An update's record; without numbers it leaves the noise scale as it is."""
        record = NoiseRecord(self, numbers, norm, count)
        self._pending.append(record)
        if len(self._pending) > MOST_PENDING:
            self.fold()
        return record

    def fold(self, last: NoiseRecord | None = None) -> None:
        """Takes what is pending into the averages, up to a record or all, in one wait for the device."""
        end = len(self._pending) if last is None else 1 + next(i for i, one in enumerate(self._pending) if one is last)
        pending, self._pending = self._pending[:end], self._pending[end:]
        rows = iter(_read_rows([one for one in pending if one.numbers is not None]))
        for record in pending:
            if record.numbers is not None:
                record.norms = self._norms(next(rows), record.count)
                self._average(record.norms)
            record.scale = self.scale
            record.of = record.numbers = record.norm = None

    def _norms(self, row: Sequence[float], count: float) -> Norms | None:
        squares, per_sample, num, large = row
        if not num:
            return None
        divisor = count * count if self._reduction == "sum" else 1.0
        return Norms(squares / num, per_sample / num, large / divisor, count)

    def _average(self, norms: Norms | None) -> None:
        found = None if norms is None else norms.split()
        if found is not None:
            square, trace = found
            self._square = KEPT * self._square + square
            self._trace = KEPT * self._trace + trace
            self._weight = KEPT * self._weight + 1

    @property
    def scale(self) -> float | None:
        """Of the averages as they are: sums of the same weights, so that their ratio is that of unbiased averages."""
        if not self._weight:
            return None
        return max(self._trace, 0.0) / self._square if self._square > 0 else math.inf

    def state(self) -> list[float]:
        self.fold()
        return [self._square, self._trace, self._weight]

    def load(self, state: Sequence[float]) -> None:
        self.fold()
        self._square, self._trace, self._weight = state


def averages_in(state: Any) -> Sequence[float]:
    """What an average's state holds, or an error that says what stands there."""
    if state is None:
        return (0.0, 0.0, 0.0)
    try:
        square, trace, weight = map(float, state)
    except (TypeError, ValueError):
        raise ValueError(
            f"the state has noise={state!r}, expected three numbers; give what state_dict() gave, of this version"
        ) from None
    return square, trace, weight


@final
class NoiseScale(Extension):
    """Gives each update its `noise_scale`, the gradient noise scale in the unit of the count; the same on all ranks."""

    key = "noise"
    in_contrast = False

    _engine: Engine
    averages: Averages

    def join(self, job: Setup) -> None:
        engine, config = job.engine, job.config
        if len(set(config.reductions.values())) > 1 or len(set(map(id, config.counts.values()))) > 1:
            raise ValueError(
                f"NoiseScale() with several denominators ({', '.join(config.reductions)}), expected one: a noise scale "
                "is a number of samples, or of tokens; give all losses one count and reduction, or leave it out"
            )
        if engine.peers.has_parts:
            raise ValueError(
                "NoiseScale() with a mesh whose ranks have parts of the same samples, which is for ranks with samples "
                "of their own; leave it out"
            )
        if engine.pipeline is not None:
            raise ValueError(
                "NoiseScale() with a pipeline's schedule, which runs forward and backward of its chunks itself; leave "
                "it out"
            )
        hidden = engine.hides_parts()
        if hidden is not None:
            raise ValueError(
                f"NoiseScale() with {engine.name} {hidden}: each rank would look at its own part of the gradient; use "
                "fully_shard over the data-parallel mesh, or leave it out"
            )
        why = engine.hides_own(job.stepped())
        if why is not None:
            raise ValueError(f"NoiseScale() with {engine.name}, {why}, or leave NoiseScale out")
        self._engine, self._parameters, self._scaler, self._once = engine, job.stepped, job.scaler, job.once
        (self._reduction, *_) = config.reductions.values()
        self.averages = Averages(self._reduction)
        self._early: Early | None = None  # to the end of the first micro-batch
        self._small: Small | None = None

    def begin(self, window: Window) -> None:
        # Alone, and in one micro-batch, the first gradient is the window's.
        is_alone = self._engine.peers.num_ranks == 1 and len(window) == 1
        self._early = Early(self._engine, self._parameters) if len(window) and not is_alone else None
        self._small = None

    def before_backward(self, window: Window, reduces: bool) -> None:
        if self._early is not None:
            self._early.before_backward(reduces)

    def after_backward(self, window: Window) -> None:
        """Measures this rank's own gradient after its first micro-batch."""
        early, at = self._early, window.status
        if early is not None:
            early.remove_hooks()
        if early is None or at.has_more_parts:
            return
        self._early = None
        if early.is_lost:
            self._once(
                "noise",
                "NoiseScale sees nothing of a first micro-batch whose parts are reduced one by one, so noise_scale "
                "stays as it was; add the parts' losses up, or use sync='last'",
            )
            return
        (count, *_), (total, *_) = at.source.counts[0], at.plan.counts.values()
        self._small = self.small(early, share_of(self._reduction, count, total, self._engine.divisor), count)

    def small(self, early: Early, share: float, count: float) -> Small:
        """`share` is what the micro-loss was multiplied by, besides a scaler's scale."""
        norm = self._unscaled(widest(early.norm()))
        factor = share if self._reduction == "mean" else share * count
        return Small((norm / factor).square(), 1 / count)

    def numbers(self, window: Window) -> Tensor | None:
        """Squares, 1 / counts, how many ranks have them, and the window's |g|^2 in parts."""
        small = self._small
        if self._engine.peers.num_ranks == 1 and small is None:
            return None  # nothing to compare
        # Filled, and not copied from the host, which would wait for the device.
        if self._engine.judges_gradients:  # it is known after the step
            part = widest(torch.zeros((), device=window.status.parameters[0].device))
        else:
            square = widest(self._engine.part_of_square(self._parameters()))
            part = self._unscaled(self._unscaled(square))
        of_small = [part.new_zeros(())] * 3
        if small is not None:
            of_small = [small.square.to(part), part.new_full((), small.per_sample), part.new_ones(())]
        return torch.stack([*of_small, part])

    def end(self, window: Window, update: Update | None) -> None:
        if self._early is not None:
            self._early.remove_hooks()
        self._early = None
        if update is not None:
            is_measured = update.stepped and self.key in window.numbers
            after = is_measured and self._engine.judges_gradients
            update.notes[self.key] = self.averages.add(
                partial(update.summed, self.key) if is_measured else None,
                self._engine.whole_norm(self._parameters()) if after else None,
                next(iter(update.counts.values())),
            )

    def state(self) -> list[float]:
        return self.averages.state()

    def load(self, state: Any) -> None:
        self.averages.load(averages_in(state))

    def _unscaled(self, number: Tensor) -> Tensor:
        if self._scaler is None:
            return number
        scale: Tensor = self._scaler.scale(number.new_ones((), dtype=torch.float32))
        return number / scale


def _read_rows(records: Sequence[NoiseRecord]) -> list[list[float]]:
    rows = []
    for record in records:
        assert record.numbers is not None
        row = record.numbers()
        assert row is not None
        if record.norm is not None:
            row = torch.cat([row[:3], record.norm.to(row).square().reshape(1)])
        rows.append(row)
    read: list[list[float]] = torch.stack(rows).tolist() if rows else []
    return read
