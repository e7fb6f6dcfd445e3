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
from functools import cached_property, partial
from typing import Any, NamedTuple, TypeVar, final

import torch
from torch import Tensor, nn

from ..engines import Engine
from ..engines.base import Leaf
from ..engines.shards import part_of_square
from ..extension import Extension
from ..job import Job
from ..law import share_of
from ..norms import total_norm, widest
from ..update import Update
from ..window import Window

KEPT = 0.99  # of the averages, at each update: about the last hundred count
Number = TypeVar("Number", float, Tensor)


class Meaning(NamedTuple):
    """The result of `meaning`."""

    verdict: str  # "larger helps", "enough" or "wasteful"
    updates: float  # to the same loss, as a multiple of the fewest, those of a very large batch
    samples: float  # to the same loss, as a multiple of the fewest, those of a very small batch

    def __str__(self) -> str:
        return f"{self.updates:.2f} x the fewest updates, {self.samples:.2f} x the fewest samples: {self.verdict}"


def meaning(noise_scale: float, batch: float) -> Meaning:
    """Tells whether a larger batch would help, and what training with this one costs.

    To the same loss it takes `1 + B / batch` times the fewest updates and `1 + batch / B` times the fewest samples.
    Below a third of B a batch twice as large saves more than 37% of the updates for less than 25% more samples ("larger
    helps"); above three times B it saves less than 13% for more than 75% ("wasteful").

    Args:
        noise_scale: B, as in `Update.noise_scale`.
        batch: Samples (or tokens) per update over all ranks, in the unit of `noise_scale`; above 0.

    Example:
        >>> meaning(noise_scale=800, batch=100)
        Meaning(verdict='larger helps', updates=9.0, samples=1.125)
    """
    verdict = "larger helps" if batch * 3 < noise_scale else "wasteful" if batch > noise_scale * 3 else "enough"
    return Meaning(verdict, 1 + noise_scale / batch, 1 + batch / noise_scale if noise_scale else math.inf)


def split(small: Number, per_sample: Number, large: Number, total: float) -> tuple[Number, Number]:
    """|G|^2 and tr(S), of |g|^2 of a micro-batch of `1 / per_sample` samples and of a window of `total`.

    >>> split(5.0, 1.0, 2.0, total=4)
    (1.0, 4.0)
    """
    trace = (small - large) / (per_sample - 1 / total)
    return large - trace / total, trace


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
            self._norms = {}
            for leaf in self._engine.leaves(self._parameters()):
                if self._has_begun:  # of other parts, which this backward need not reach
                    self._take(leaf)
                self._hooks.append(leaf.tensor.register_post_accumulate_grad_hook(partial(self._take, leaf)))
        self._has_begun = True

    def _take(self, leaf: Leaf, _: Any = None) -> None:
        gradient = leaf.standing()
        if gradient is not None and self._norms is not None:
            self._norms[id(leaf.tensor)] = total_norm([gradient.detach()], 2.0)

    def remove_hooks(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    def norm(self) -> Tensor:
        if self._norms is not None:
            return total_norm(list(self._norms.values()), 2.0)
        standing = [leaf.standing() for leaf in self._engine.leaves(self._parameters())]
        return total_norm([gradient for gradient in standing if gradient is not None], 2.0)


class Estimate:
    """The averages up to an update. They are computed on the device when somebody asks, or at the next update.

    An `Update` keeps it, so it knows of no model.
    """

    def __init__(self, before: Tensor, numbers: Callable[[], Tensor | None] | None = None) -> None:
        self._before = before  # sums of |G|^2, tr(S) and weights, in which older updates count less
        self._numbers = numbers  # of all ranks, when they are added up; None leaves the averages as they are
        self.norm: Tensor | float | None = None  # of the window, where the numbers do not have it
        self.total, self.divisor = 0.0, 1.0  # the window's count, and that of its gradient
        self.norms: list[Tensor] = []  # small, per_sample and large, as in `split`

    @cached_property
    def sums(self) -> Tensor:
        row = self._numbers() if self._numbers is not None else None
        self._numbers = None  # which holds the update
        if row is None:
            return self._before
        squares, per_sample, num, large = row.unbind()
        if self.norm is not None:
            large = self.norm.to(row).square() if isinstance(self.norm, Tensor) else row.new_full((), self.norm**2)
        small, per_sample, large = self.norms = [squares / num, per_sample / num, large / self.divisor**2]
        new = torch.stack([*split(small, per_sample, large, self.total), torch.ones_like(small)])
        counts = new.isfinite().all() & (per_sample - 1 / self.total > 1e-9 * per_sample)  # else both gradients are one
        before = self._before.to(row.device, row.dtype, non_blocking=True)  # of the host, where it was loaded
        return torch.where(counts, KEPT * before + new, before)

    def __reduce__(self) -> tuple[Any, ...]:
        return Estimate, (self.sums.cpu(),)

    def read(self) -> float | None:
        """The ratio of sums of the same weights, which is that of the averages."""
        square, trace, weight = self.sums.tolist()
        if not weight:
            return None
        return float(max(trace, 0.0) / square) if square > 0 else math.inf


@final
class NoiseScale(Extension):
    """Gives each update its `noise_scale`, the gradient noise scale in the unit of the count; the same on all ranks."""

    key = "noise"
    in_contrast = False
    _last: Estimate  # of the update before

    def join(self, job: Job) -> None:
        engine, config = job.engine, job.config
        if len(set(config.reductions.values())) > 1 or len(set(map(id, config.counts.values()))) > 1:
            raise ValueError(
                f"NoiseScale() with several denominators ({', '.join(config.reductions)}), expected one: a noise scale "
                "is a number of samples, or of tokens; give all losses one count and reduction, or leave it out"
            )
        if engine.peers.has_parts or engine.pipeline is not None:
            kind = (
                "a mesh whose ranks have parts of the same samples"
                if engine.peers.has_parts
                else "a pipeline's schedule"
            )
            raise ValueError(f"NoiseScale() with {kind}, where no rank shows a gradient of its own; leave it out")
        if (why := engine.hides_parts()) is not None:
            raise ValueError(
                f"NoiseScale() with {engine.name} {why}: each rank would look at its own part of the gradient; use "
                "fully_shard over the data-parallel mesh, or leave it out"
            )
        if (why := engine.hides_own(job.stepped())) is not None:
            raise ValueError(f"NoiseScale() with {engine.name}, {why}, or leave NoiseScale out")
        self._engine, self._parameters, self._scaler, self._once = engine, job.stepped, job.scaler, job.once
        looks = job.steps and job.scaler is None and config.on_nonfinite != "ignore"
        self._norm_follows = looks or "norm" in engine.owns or job.config.max_norm is not None  # the step gives it
        self._reduction = next(iter(config.reductions.values()))
        self._early: Early | None = None  # to the end of the first micro-batch
        self._small: Tensor | None = None
        self.load(None)

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
        early = self._early
        if early is not None:
            early.remove_hooks()
        if early is None or window.has_more_parts:
            return
        self._early = None
        if early.is_lost:
            self._once(
                "noise",
                "NoiseScale sees nothing of a first micro-batch whose parts are reduced one by one, so noise_scale "
                "stays as it was; add the parts' losses up, or use sync='last'",
            )
            return
        (count, *_), (total, *_) = window.micros[0].counts, window.counts.values()
        share = share_of(self._reduction, count, total, self._engine.divisor)  # which multiplied the loss
        norm = self._unscaled(widest(early.norm())) / (share if self._reduction == "mean" else share * count)
        # Of the mean over the micro-batch; filled, and not copied from the host, which would wait for the device.
        self._small = torch.stack([norm.square(), norm.new_full((), 1 / count), norm.new_ones(())])

    def numbers(self, window: Window) -> Tensor | None:
        """The rank's |g|^2 of a micro-batch, 1 / its count, and 1, to be summed; and the window's |g|^2 in parts."""
        if self._engine.peers.num_ranks == 1 and self._small is None:
            return None  # nothing to compare
        part = widest(torch.zeros((), device=window.parameters[0].device))
        if not self._norm_follows:
            square = part_of_square(self._engine.shards(self._parameters()), self._engine.peers.num_ranks)
            part = self._unscaled(self._unscaled(widest(square)))
        small = part.new_zeros(3) if self._small is None else self._small.to(part)
        return torch.cat([small, part.reshape(1)])

    def end(self, window: Window, update: Update | None) -> None:
        if self._early is not None:
            self._early.remove_hooks()
        self._early = None
        if update is None:
            return
        is_measured = update.stepped and self.key in window.numbers
        self._last = last = Estimate(self._last.sums, partial(update.summed, self.key) if is_measured else None)
        if is_measured:
            last.total = next(iter(update.counts.values()))
            last.divisor = last.total if self._reduction == "sum" else 1.0
            if self._norm_follows:
                norm = self._engine.norm(self._parameters()) if "norm" in self._engine.owns else update.norm()
                last.norm = math.inf if norm is None else norm
        update.notes[self.key] = last

    def state(self) -> list[float]:
        sums: list[float] = self._last.sums.tolist()
        return sums

    def load(self, state: Any) -> None:
        try:
            square, trace, weight = (0.0, 0.0, 0.0) if state is None else map(float, state)
        except (TypeError, ValueError):
            raise ValueError(
                f"the state has noise={state!r}, expected three numbers; give what state_dict() gave, of this version"
            ) from None
        self._last = Estimate(torch.tensor([square, trace, weight], dtype=torch.float64))

    def _unscaled(self, number: Tensor) -> Tensor:
        if self._scaler is None:
            return number
        scale: Tensor = self._scaler.scale(number.new_ones((), dtype=torch.float32))
        return number / scale
