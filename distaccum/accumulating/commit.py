"""Commit: unscale, judge, clip, step, update the scaler, or skip for the same reason on all ranks; then record."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim.lr_scheduler import LRScheduler

from ..gradients.norms import EPSILON
from ..gradients.scaling import (
    divide_in_step,
    divided,
    note_overflow,
    stamp_of_scale,
    unscale,
    unscales_in_step,
    update_without_gradients,
)
from ..law.errors import DistaccumError
from ..law.update import Update, Waitable
from ..observers.noise import Noise
from ..window.observer import Complete
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
    divisor: Tensor | None = None  # that the step divides it by


@final
class Record:
    """The numbers that ranks add up at a step: losses by name, numbers of the noise scale, overflows."""

    values: Tensor  # of all, where losses are no numbers

    def __init__(
        self, losses: Tensor | list[float], noise: Tensor | None = None, overflows: Tensor | None = None
    ) -> None:
        self.losses, self.noise = losses, noise
        self.reduction: Waitable | None = None  # under way
        if isinstance(losses, Tensor):
            pieces = [one for one in (losses, noise, overflows) if one is not None]
            self.values = torch.cat(pieces) if len(pieces) > 1 else losses
            self.losses = self.values[: len(losses)]
            self.noise = None if noise is None else self.values[len(losses) :][: len(noise)]

    def wait(self) -> None:
        if self.reduction is not None:
            self.reduction.wait()

    @property
    def overflows(self) -> Tensor:
        return self.values[-1]


@final
class Committer:
    """Steps every optimizer of a complete window, or none."""

    def __init__(self, config: Config, setup: Setup, progress: Progress, noise: Noise | None) -> None:
        self._setup, self._progress, self._noise = setup, progress, noise
        self._engine, self._scaler, self._optimizers = setup.engine, setup.scaler, setup.optimizers
        self._max_norm, self._on_nonfinite = setup.max_norm, config.on_nonfinite
        self.is_stepping = False
        self._has_stepped = False  # the window that is committed
        self._adds_to_losses = noise is not None or setup.scaler is not None or not setup.engine.peers.is_alone

    def __call__(self, complete: Complete) -> Update:
        self._has_stepped, schedules = False, list(self._setup.schedulers)
        try:
            return self._commit(complete, schedules)
        except BaseException:
            if self._has_stepped:
                # Ctrl-C, or a rank that was lost: what counts the weights' steps goes with them.
                self._progress.index = complete.index + 1
                complete.close()
                if self._scaler is not None:
                    self._scaler.update(self._scaler.get_scale())  # it keeps to which optimizers it was shown
                _step_all(schedules)
            else:
                complete.undo()  # it may be half unscaled or clipped
            raise

    def _commit(self, complete: Complete, schedules: list[LRScheduler]) -> Update:
        progress = self._progress
        record, gradient = None, None
        if complete.plan.is_empty:
            reason: str | None = f"no {' and no '.join(complete.plan.counts)} in any micro-batch of any rank"
        else:
            reason, record, gradient = self._stepped(complete)
            if reason is None and self._engine.lockstep:
                progress.stand_in = complete.stand_in
            progress.skipped = 0 if reason is None else progress.skipped + 1
        complete.close()
        progress.index += 1
        for observer in complete.observers:
            observer.end("stepped" if reason is None else reason)
        self._setup.after_step(reason is None)
        if reason is None:
            _step_all(schedules)
        elif progress.skipped >= MOST_SKIPS:
            skipped, progress.skipped = progress.skipped, 0
            raise DistaccumError(
                f"{skipped} updates in a row were skipped, the last because {reason}; nothing is learned like this. "
                "Look at the data and at the weights, lower the learning rate, or go back to a checkpoint"
            )
        return self._update(complete, reason, record, None if gradient is None else gradient.norm)

    def _stepped(self, complete: Complete) -> tuple[str | None, Record, Gradient | None]:
        gradient = self._unscaled(complete) if self._setup.steps else None
        record = self._sent(complete, gradient)
        return None if gradient is None else self._step(complete, gradient, record), record, gradient

    def _update(self, complete: Complete, reason: str | None, record: Record | None, norm: Tensor | None) -> Update:
        reduction = None if record is None else record.reduction
        noise = None
        if self._noise is not None:
            is_measured = record is not None and reason is None and self._compares(complete)
            noise = self._noise.averages.add(
                record.noise if record is not None and is_measured else None,
                reduction,
                norm if self._engine.judges_gradients else None,
                next(iter(complete.counts.values())),
            )
        return Update(
            index=complete.index,
            counts=complete.counts,
            micro_batches=complete.num_micro_batches,
            stepped=reason is None,
            reason=reason,
            seconds=time.perf_counter() - complete.started,
            _terms=None if record is None else record.losses,
            _divisor=self._engine.divisor,
            _reduction=reduction,
            _norm=norm if self._max_norm is not None else None,
            _noise=noise,
        )

    def _compares(self, complete: Complete) -> bool:
        """Whether the noise scale is measured in this window."""
        return self._noise is not None and self._noise in complete.observers and self._noise.compares

    def _unscaled(self, complete: Complete) -> Gradient:
        """Unscales what the scaler scaled, or sees to it that the step does."""
        stepped = [parameter for parameter in self._setup.parameters().stepped if parameter.grad is not None]
        gradient = Gradient(stepped)
        compares = self._compares(complete)
        looks = self._on_nonfinite != "ignore" and self._scaler is None  # and will take a norm
        measures = (self._max_norm is not None or (compares and looks)) and not self._engine.judges_gradients
        if self._scaler is not None:
            self._refuse_another_scale(complete, self._scaler)
            if unscales_in_step(self._scaler, self._optimizers):
                # One pass. A norm that overflows in float32 means that the scale is too large.
                # A rank whose shards have no gradient takes part: the norm is of all ranks.
                norm = self._engine.whole_norm(stepped)
                gradient.divisor = self._scaler.scale(norm.new_ones((), dtype=torch.float32))
                if stepped:
                    gradient.flags = [(~norm.isfinite()).to(torch.float32)]
                    note_overflow(self._scaler, self._optimizers, gradient.flags[0])
                gradient.norm = norm / gradient.divisor if measures or compares else None
                return gradient
            gradient.flags = unscale(self._scaler, self._optimizers)
        gradient.norm = self._engine.whole_norm(stepped) if measures else None
        return gradient

    def _refuse_another_scale(self, complete: Complete, scaler: GradScaler) -> None:
        """The window's losses were multiplied by one scale, and its gradient is divided by that."""
        known = complete.ledger.scale_stamp
        if known is not None and known != stamp_of_scale(scaler):
            raise DistaccumError(
                "the GradScaler's scale was updated while this window was open (by another Accumulator's step(), or "
                "scaler.update()), so the gradient cannot be unscaled and the window is discarded; finish one window "
                "before the next begins, or give each Accumulator a GradScaler of its own"
            )

    def _sent(self, complete: Complete, gradient: Gradient | None) -> Record:
        """The record, on its way over the ranks; they agree on an overflow by the same collective."""
        numbers = None if self._adds_to_losses else complete.ledger.numbers()
        if numbers is not None:
            return Record(numbers)
        losses = complete.ledger.sums()
        noise = overflows = None
        if self._noise is not None and self._compares(complete):
            parameters = complete.parameters if gradient is None else gradient.parameters
            noise = self._noise.numbers(losses, None if gradient is None else gradient.norm, parameters)
        if self._scaler is not None:
            flags = [] if gradient is None else gradient.flags
            found = [flag.to(losses.device, losses.dtype).reshape(1) for flag in flags]
            overflows = torch.stack(found).sum(0) if found else losses.new_zeros(1)
        record = Record(losses, noise, overflows)
        record.reduction = self._engine.peers.sum(record.values)
        return record

    def _step(self, complete: Complete, gradient: Gradient, record: Record) -> str | None:
        reason = None
        if self._scaler is not None:
            record.wait()
            overflows = record.overflows
            if self._engine.peers.shares_samples:  # one rank's part of a gradient may overflow alone
                overflows.fill_(max(self._engine.peers.gather_largest([float(overflows)]))[0])
            for flag in gradient.flags:  # what the scaler's step and update will read
                flag.copy_(overflows.clamp(max=1.0))
            if bool(overflows):
                reason = "the scaled gradients overflowed"
                if self._on_nonfinite == "raise":
                    self._refuse_nonfinite_loss(complete, record)
        elif self._on_nonfinite != "ignore" and not self._engine.judges_gradients:
            finite, gradient.norm, gradient.read = look_at(self._engine, gradient.parameters, gradient.norm)
            if not finite:
                reason = judge(complete, self._engine, "gradient", self._on_nonfinite)
        if reason is None:
            self._clip(gradient)
            reason = self._step_optimizers(complete, gradient)
            if self._engine.judges_gradients:
                self._look_back(complete, gradient, record, reason)
        if self._scaler is not None:
            self._update_scaler(self._scaler, gradient, record.overflows)
        return reason

    def _step_optimizers(self, complete: Complete, gradient: Gradient) -> str | None:
        try:
            self.is_stepping = True
            if gradient.divisor is None:
                reason = self._engine.step(self._optimizers)
            else:
                with divided(self._optimizers, gradient.divisor):
                    reason = self._engine.step(self._optimizers)
                    self._has_stepped = reason is None
            self._has_stepped = reason is None
        finally:
            self.is_stepping = False
        return reason

    def _look_back(self, complete: Complete, gradient: Gradient, record: Record, reason: str | None) -> None:
        """The engine judged the gradient as it stepped."""
        wanted = self._max_norm is not None or self._compares(complete)
        gradient.norm = self._engine.whole_norm(gradient.parameters) if wanted else None
        if reason is not None and self._on_nonfinite == "raise":
            self._refuse_nonfinite_loss(complete, record)
            if not self._engine.scales_losses:
                judge(complete, self._engine, "gradient", self._on_nonfinite)

    def _clip(self, gradient: Gradient) -> None:
        """Clips in a separate pass, in the step's pass, or not at all if the norm is within `max_norm`."""
        norm, most = gradient.norm, self._max_norm
        if norm is None or most is None or gradient.read + EPSILON <= most or math.isinf(most):
            return
        if divide_in_step(self._optimizers):
            over = ((norm + EPSILON) / most).clamp(min=1.0).to(torch.float32)
            gradient.divisor = over if gradient.divisor is None else gradient.divisor * over
        else:
            self._engine.clip(gradient.parameters, most, norm)

    def _update_scaler(self, scaler: GradScaler, gradient: Gradient, overflows: Tensor) -> None:
        if gradient.flags:
            scaler.update()
        elif not self._engine.peers.is_alone:
            # This rank's shards, or its stage, have no gradients, but other ranks' do; the scales must stay equal.
            update_without_gradients(scaler, overflows)

    def _refuse_nonfinite_loss(self, complete: Complete, record: Record) -> None:
        record.wait()
        losses = record.losses.tolist() if isinstance(record.losses, Tensor) else record.losses
        if not all(map(math.isfinite, losses)):
            judge(complete, self._engine, "loss", self._on_nonfinite)


def _step_all(schedules: list[LRScheduler]) -> None:
    """Each once, also where Ctrl-C comes between two of them."""
    while schedules:
        schedules.pop(0).step()
