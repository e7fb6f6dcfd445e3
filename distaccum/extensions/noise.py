"""The simple gradient noise scale, from gradients that exist anyway.

B = tr(S) / |G|^2, with the mean G and the covariance S of one sample's gradient, is the batch size at which noise
equals signal (McCandlish et al. 2018, arXiv 1812.06162, appendix A.1). The gradient g of n samples has

    E|g|^2 = |G|^2 + tr(S) / n

and a window measures it for two n: in the first micro-batch on each rank, before ranks are added up, and as a whole.
Two equations give |G|^2 and tr(S), without bias. They are averaged over updates, and B is the ratio of the averages.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, TypeVar, final

import torch
from torch import Tensor

from ..engines.base import total_norm
from ..extension import Extension
from ..job import Job
from ..law import share_of
from ..norms import widest
from ..update import Update
from ..window import Window

# An update keeps this part of the averages, so that about the last hundred updates count.
KEPT = 0.99
Number = TypeVar("Number", float, Tensor)


def split(small: Number, per_sample: Number, large: Number, total: float) -> tuple[Number, Number]:
    """|G|^2 and tr(S), from the |g|^2 of a micro-batch of `1 / per_sample` samples and of a window of `total`.

    >>> split(5.0, 1.0, 2.0, total=4)
    (1.0, 4.0)
    """
    trace = (small - large) / (per_sample - 1 / total)
    return large - trace / total, trace


@dataclass
class Estimate:
    """The averages up to an update, on the device: decaying sums of |G|^2, tr(S) and weights."""

    sums: Tensor
    # What the update brought, as `split` takes it.
    norms: tuple[Any, ...] = ()

    def after(self, row: Tensor, norm: Any, total: float) -> Estimate:
        """With an update: its sums of `numbers`, the norm of its mean gradient, and its count; reads nothing."""
        squares, inverses, num = row.unbind()
        small = squares / num
        per_sample = inverses / num
        norm = math.inf if norm is None else norm
        large = norm.to(row).square() if isinstance(norm, Tensor) else row.new_full((), norm**2)
        new = torch.stack([*split(small, per_sample, large, total), torch.ones_like(large)])
        # The two gradients may be the same one, and the sums may be on the host, as they were loaded.
        counts = new.isfinite().all() & (per_sample - 1 / total > 1e-9 * per_sample)
        before = self.sums.to(row.device, row.dtype, non_blocking=True)
        return Estimate(torch.where(counts, KEPT * before + new, before), (small, per_sample, large, total))

    def __reduce__(self) -> tuple[Any, ...]:
        return Estimate, (self.sums.cpu(),)

    def read(self) -> float | None:
        """The noise scale: the ratio of two sums with equal weights is that of the averages."""
        square, trace, weight = self.sums.tolist()
        if not weight:
            return None
        return float(max(trace, 0.0) / square) if square > 0 else math.inf


@final
class NoiseScale(Extension):
    """Gives each update its `noise_scale`, the gradient noise scale in the unit of the count; the same on all ranks."""

    key = "noise"
    in_contrast = False
    _last: Estimate

    def join(self, job: Job) -> None:
        engine, config = job.engine, job.config
        if len(set(config.reductions.values())) > 1 or len(set(map(id, config.counts.values()))) > 1:
            raise ValueError(
                f"NoiseScale() with several denominators ({', '.join(config.reductions)}), expected one: a noise scale "
                "is a number of samples, or of tokens; give all losses one count and reduction, or leave it out"
            )
        why = engine.why_no_local_grad(job.stepped())
        if engine.peers.has_parts or engine.peers.stages:
            why = "whose ranks have parts of the same samples; use data parallelism alone"
        if why is not None:
            raise ValueError(f"NoiseScale() with {engine.name}, {why}, or leave it out")
        self._engine = engine
        self._parameters = job.stepped
        self._scaler = job.scaler
        looks = job.steps and job.scaler is None and config.on_nonfinite != "ignore"
        # The step computes it for another purpose.
        self._norm_follows = looks or config.max_norm is not None
        self._reduction = next(iter(config.reductions.values()))
        self._hooks = ExitStack()
        self.load(None)

    def begin(self, window: Window) -> None:
        # On one rank with one micro-batch, the first gradient is the window's.
        self._is_early = len(window) > 1 or (len(window) == 1 and self._engine.peers.num_ranks > 1)
        # The norms of the first micro-batch by leaf, as taken within a backward that reduces.
        self._norms: dict[int, Tensor] | None = None
        self._small: Tensor | None = None
        self._norm: Tensor | float | None = None

    def before_backward(self, window: Window, reduces: bool) -> None:
        """Hooks the leaves of a reducing backward, to take each norm before the reduction overwrites the gradient."""
        if not self._is_early:
            return
        # A part's backward may have reduced the gradient before it was complete.
        self._is_early = self._norms is None
        if self._is_early and reduces:
            self._norms = {}
            for leaf in self._leaves():
                # This backward may not reach what earlier parts gave it.
                self._take(leaf)
                self._hooks.callback(leaf.register_post_accumulate_grad_hook(self._take).remove)

    def after_backward(self, window: Window) -> None:
        """Measures this rank's own gradient after its first micro-batch."""
        self._hooks.close()
        if not self._is_early or window.has_more_parts:
            return
        self._is_early = False
        gradients = map(self._engine.read_grad, self._leaves()) if self._norms is None else self._norms.values()
        own = total_norm([gradient for gradient in gradients if gradient is not None])
        count, *_ = window.micros[0].counts
        total, *_ = window.counts.values()
        # The loss was multiplied by its share.
        share = share_of(self._reduction, count, total, self._engine.divisor)
        norm = self._unscaled(own) / (share if self._reduction == "mean" else share * count)
        # Of the mean over the micro-batch. Tensors are filled, not copied from the host, which would wait.
        self._small = torch.stack([norm.square(), norm.new_full((), 1 / count), norm.new_ones(())])

    def numbers(self, window: Window) -> Tensor:
        """This rank's |g|^2 of a micro-batch, 1 / its count, and 1."""
        if not self._norm_follows:
            norm: Any = self._engine.gradient(self._parameters()).take()
            self._norm = None if norm is None else self._unscaled(norm)
        self._window: weakref.ref[Window] | None = weakref.ref(window)
        zeros = widest(torch.zeros(3, device=window.parameters[0].device))
        return zeros if self._small is None else self._small.to(zeros)

    def end(self, window: Window, update: Update | None) -> None:
        self._hooks.close()
        if update is None:
            return
        if update.stepped and self.key in window.numbers:
            self._last = self._after(update.summed(self.key), update.norm(), update.counts)
        else:
            self._last = Estimate(self._last.sums)
        update.notes[self.key] = self._last

    def state(self) -> list[float]:
        """The averages; in a hook of the step that moved the weights, those with its window."""
        window = None if self._window is None else self._window()
        last = self._last
        if window is not None and window.moved is not None:
            record, gradient = window.moved
            last = self._after(record.sums[self.key], gradient.known, window.counts)
        sums: list[float] = last.sums.tolist()
        return sums

    def _after(self, row: Any, norm: Any, counts: Mapping[str, float]) -> Estimate:
        (total, *_) = counts.values()
        norm = norm if self._norm is None else self._norm
        if self._reduction == "sum" and norm is not None:
            norm = norm / total
        return self._last.after(row, norm, total)

    def load(self, state: Any) -> None:
        sums = [0.0, 0.0, 0.0] if state is None else list(map(float, state))
        if len(sums) != 3:
            raise ValueError(f"the state has noise={state!r}, expected three numbers, as state_dict() gave them")
        self._last = Estimate(torch.tensor(sums, dtype=torch.float64))
        self._window = None

    def _leaves(self) -> list[Any]:
        return [leaf for leaf in self._engine.grad_leaves(self._parameters()) if leaf.requires_grad]

    def _take(self, leaf: Any) -> None:
        gradient = self._engine.read_grad(leaf)
        if gradient is not None and self._norms is not None:
            self._norms[id(leaf)] = total_norm([gradient.detach()])

    def _unscaled(self, norm: Tensor) -> Tensor:
        norm = widest(norm)
        if self._scaler is None:
            return norm
        scale: Tensor = self._scaler.scale(norm.new_ones((), dtype=torch.float32))
        return norm / scale
