"""Step: unscale, judge, clip, step, and update the scaler, or skip for the same reason on all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import final

from torch import Tensor, nn

from .job import Job
from .losses import Losses
from .nonfinite import judge, judge_loss, look_at
from .norms import EPSILON, clip
from .record import Record
from .scaling import note_overflow, refuse_another_scale, unscale


@final
class Step:
    """The step of one window, whose gradients are final."""

    def __init__(
        self, job: Job, parameters: Sequence[nn.Parameter], stepped: Sequence[nn.Parameter], losses: Losses
    ) -> None:
        """`parameters` are all of the window's, `stepped` the optimizers'."""
        self._job, self._parameters, self._stepped, self._losses = job, parameters, stepped, losses
        self.record: Record | None = None
        self.norm: Tensor | None = None  # of the gradient before clipping, where it is wanted
        self.read = math.inf  # it, where the look for what is not finite has read it
        self.has_stepped = False

    def __call__(self, numbers: Mapping[str, Tensor], refusal: Callable[[], str | None]) -> str | None:
        """The reason not to step; `refusal` is that of extensions, whose numbers travel with the losses."""
        job, engine, scaler = self._job, self._job.engine, self._job.scaler
        if not job.steps:
            self.record = Record(self._losses, numbers, None if scaler is None else [], engine.peers)
            return None
        flags = None
        if scaler is not None:
            refuse_another_scale(scaler, self._losses.scale_stamp)
            flags = unscale(scaler, job.optimizers)
        stepped = [p for p in self._stepped if p.grad is not None]
        if job.config.max_norm is not None and "norm" not in engine.owns:
            self.norm = engine.norm(stepped)
        self.record = Record(self._losses, numbers, flags, engine.peers)
        reason = None
        if scaler is not None:
            overflows = self.record.overflows(engine.peers)
            note_overflow(scaler, job.optimizers, overflows)
            if bool(overflows):
                reason = "the scaled gradients overflowed"
                judge_loss(engine, self._losses, self.record, self._parameters, job.config.on_nonfinite)
        elif job.config.on_nonfinite != "ignore" and "norm" not in engine.owns:
            finite, self.norm, self.read = look_at(engine, stepped, self.norm)
            if not finite:
                reason = judge(engine, self._losses, self._parameters, "gradient", job.config.on_nonfinite)
        if reason is None:
            reason = refusal()
        if reason is None:
            most = None if "clip" in engine.owns else job.config.max_norm
            if self.norm is not None and most is not None and self.read + EPSILON > most and not math.isinf(most):
                clip([p.grad for p in stepped if p.grad is not None], most, self.norm)
            job.is_stepping = True
            try:
                reason = engine.step(job.optimizers)
                self.has_stepped = reason is None
            finally:
                job.is_stepping = False
            if "norm" in engine.owns:
                self._look_back(stepped, self.record, reason)
        if scaler is not None:
            scaler.update()
        return reason

    def _look_back(self, stepped: Sequence[nn.Parameter], record: Record, reason: str | None) -> None:
        """The engine judged the gradient as it stepped."""
        job, engine = self._job, self._job.engine
        self.norm = None if job.config.max_norm is None else engine.norm(stepped)
        if reason is not None:
            judge_loss(engine, self._losses, record, self._parameters, job.config.on_nonfinite)
            if job.config.on_nonfinite == "raise" and "scale" not in engine.owns:
                judge(engine, self._losses, self._parameters, "gradient", "raise")
