"""Commit: unscale, judge, clip, step, update the scaler, or skip for the same reason on all ranks; then record."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import final

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim.lr_scheduler import LRScheduler

from ..law import DistaccumError
from ..norms import EPSILON
from ..scaling import note_overflow, stamp_of_scale, unscale
from ..update import Update, Waitable
from ..window.window import Window, close_window, end_window, refusal_of
from .config import Config
from .nonfinite import judge, look_at
from .progress import Progress
from .setup import Setup

MOST_SKIPS = 50  # in a row


@dataclass
class Gradient:
    """The facts about a complete window's gradient before its step."""

    parameters: list[nn.Parameter]  # that have one
    flags: list[Tensor] = field(default_factory=list)  # of overflow, on this rank
    norm: Tensor | None = None  # before clipping, where it is wanted
    read: float = math.inf  # the same, where it was read


@final
class Record:
    """The numbers that ranks add up at a step: losses by name, those of extensions, overflows."""

    values: Tensor  # of all, where losses are no numbers

    def __init__(
        self, losses: Tensor | list[float], given: Mapping[str, Tensor] = MappingProxyType({}), *more: Tensor
    ) -> None:
        self.losses, self.numbers = losses, dict[str, Tensor]()
        self.reduction: Waitable | None = None  # under way
        if isinstance(losses, Tensor):
            pieces = [losses, *(one.to(losses) for one in given.values()), *more]
            self.values = torch.cat(pieces) if len(pieces) > 1 else losses
            self.losses, *others = torch.split(self.values, [len(one) for one in pieces])
            self.numbers = dict(zip(given, others, strict=False))

    def wait(self) -> None:
        if self.reduction is not None:
            self.reduction.wait()

    @property
    def overflows(self) -> Tensor:
        return self.values[-1]


@final
class Committer:
    """Steps every optimizer of a complete window, or none."""

    def __init__(self, config: Config, setup: Setup, progress: Progress) -> None:
        self._setup, self._progress = setup, progress
        self._engine, self._scaler, self._optimizers = setup.engine, setup.scaler, setup.optimizers
        self._max_norm, self._on_nonfinite = setup.max_norm, config.on_nonfinite
        self.is_stepping = False
        self._has_stepped = False  # the window that is committed
        self._adds_to_losses = setup.scaler is not None or not setup.engine.peers.is_alone

    def __call__(self, window: Window) -> Update:
        self._has_stepped, schedules = False, list(self._setup.schedulers)
        try:
            update = self._commit(window, schedules)
        except BaseException:
            if self._has_stepped:
                # Ctrl-C, or a rank that was lost: what counts the weights' steps goes with them.
                self._progress.index = window.index + 1
                close_window(window)
                if self._scaler is not None:
                    self._scaler.update(self._scaler.get_scale())  # it keeps to which optimizers it was shown
                _step_all(schedules)
            else:
                window.discard()  # it may be half unscaled or clipped
            raise
        end_window(window, update)
        self._refuse_to_skip_on(update)
        return update

    def _refuse_to_skip_on(self, update: Update) -> None:
        if self._progress.skipped >= MOST_SKIPS:
            skipped, self._progress.skipped = self._progress.skipped, 0
            raise DistaccumError(
                f"{skipped} updates in a row were skipped, the last because {update.reason}; nothing is learned like "
                "this. Look at the data and at the weights, lower the learning rate, or go back to a checkpoint"
            )

    def _commit(self, window: Window, schedules: list[LRScheduler]) -> Update:
        progress = self._progress
        record, gradient = None, None
        if window.status.plan.is_empty:
            reason: str | None = f"no {' and no '.join(window.status.plan.counts)} in any micro-batch of any rank"
        else:
            reason, record, gradient = self._stepped(window)
            if reason is None and self._engine.lockstep:
                progress.stand_in = window.status.source.stand_in
            progress.skipped = 0 if reason is None else progress.skipped + 1
        close_window(window)
        progress.index += 1
        self._setup.after_step(reason is None)
        if reason is None:
            _step_all(schedules)
        return self._update(window, reason, record, None if gradient is None else gradient.norm)

    def _stepped(self, window: Window) -> tuple[str | None, Record, Gradient | None]:
        gradient = self._unscaled(window) if self._setup.steps else None
        record = self._sent(window, gradient)
        return None if gradient is None else self._step(window, gradient, record), record, gradient

    def _update(self, window: Window, reason: str | None, record: Record | None, norm: Tensor | None) -> Update:
        return Update(
            index=window.index,
            counts=window.counts,
            micro_batches=len(window),
            stepped=reason is None,
            reason=reason,
            seconds=time.perf_counter() - window.started,
            _terms=None if record is None else record.losses,
            _divisor=self._engine.divisor,
            _reduction=None if record is None else record.reduction,
            _norm=norm if self._max_norm is not None else None,
            _numbers={} if record is None else record.numbers,
        )

    def _unscaled(self, window: Window) -> Gradient:
        gradient = Gradient([p for p in self._setup.parameters().stepped if p.grad is not None])
        if self._scaler is not None:
            self._refuse_another_scale(window, self._scaler)
            gradient.flags = unscale(self._scaler, self._optimizers)
        if self._max_norm is not None and not self._engine.judges_gradients:
            gradient.norm = self._engine.whole_norm(gradient.parameters)
        return gradient

    def _refuse_another_scale(self, window: Window, scaler: GradScaler) -> None:
        """The window's losses were multiplied by one scale, and its gradient is divided by that."""
        known = window.status.ledger.scale_stamp
        if known is not None and known != stamp_of_scale(scaler):
            raise DistaccumError(
                "the GradScaler's scale was updated while this window was open (by another Accumulator's step(), or "
                "scaler.update()), so the gradient cannot be unscaled and the window is discarded; finish one window "
                "before the next begins, or give each Accumulator a GradScaler of its own"
            )

    def _sent(self, window: Window, gradient: Gradient | None) -> Record:
        """The record, on its way over the ranks; they agree on an overflow by the same collective."""
        numbers = None if self._adds_to_losses or window.numbers else window.status.ledger.numbers()
        if numbers is not None:
            return Record(numbers)
        losses, overflows = window.status.ledger.sums(), list[Tensor]()
        if self._scaler is not None:
            flags = [] if gradient is None else gradient.flags
            found = [flag.to(losses.device, losses.dtype).reshape(1) for flag in flags]
            overflows = [torch.stack(found).sum(0) if found else losses.new_zeros(1)]
        record = Record(losses, window.numbers, *overflows)
        record.reduction = self._engine.peers.sum(record.values)
        return record

    def _step(self, window: Window, gradient: Gradient, record: Record) -> str | None:
        reason = None
        if self._scaler is not None:
            record.wait()
            overflows = record.overflows
            if self._engine.peers.shares_samples:  # one rank's part of a gradient may overflow alone
                overflows.fill_(max(self._engine.peers.gather_largest([float(overflows)]))[0])
            note_overflow(self._scaler, self._optimizers, overflows)
            if bool(overflows):
                reason = "the scaled gradients overflowed"
                if self._on_nonfinite == "raise":
                    self._refuse_nonfinite_loss(window, record)
        elif self._on_nonfinite != "ignore" and not self._engine.judges_gradients:
            finite, gradient.norm, gradient.read = look_at(self._engine, gradient.parameters, gradient.norm)
            if not finite:
                reason = judge(window, self._engine, "gradient", self._on_nonfinite)
        if reason is None:
            reason = refusal_of(window)
        if reason is None:
            self._clip(gradient)
            reason = self._step_optimizers()
            if self._engine.judges_gradients:
                self._look_back(window, gradient, record, reason)
        if self._scaler is not None:
            self._scaler.update()
        return reason

    def _step_optimizers(self) -> str | None:
        try:
            self.is_stepping = True
            reason = self._engine.step(self._optimizers)
            self._has_stepped = reason is None
        finally:
            self.is_stepping = False
        return reason

    def _look_back(self, window: Window, gradient: Gradient, record: Record, reason: str | None) -> None:
        """The engine judged the gradient as it stepped."""
        gradient.norm = None if self._max_norm is None else self._engine.whole_norm(gradient.parameters)
        if reason is not None and self._on_nonfinite == "raise":
            self._refuse_nonfinite_loss(window, record)
            if not self._engine.scales_losses:
                judge(window, self._engine, "gradient", self._on_nonfinite)

    def _clip(self, gradient: Gradient) -> None:
        """Clips, but not where the norm that was read is within `max_norm`."""
        norm, most = gradient.norm, self._max_norm
        if norm is not None and most is not None and gradient.read + EPSILON > most and not math.isinf(most):
            self._engine.clip(gradient.parameters, most, norm)

    def _refuse_nonfinite_loss(self, window: Window, record: Record) -> None:
        record.wait()
        losses = record.losses.tolist() if isinstance(record.losses, Tensor) else record.losses
        if not all(map(math.isfinite, losses)):
            judge(window, self._engine, "loss", self._on_nonfinite)


def _step_all(schedules: list[LRScheduler]) -> None:
    """Each once, also where Ctrl-C comes between two of them."""
    while schedules:
        schedules.pop(0).step()
