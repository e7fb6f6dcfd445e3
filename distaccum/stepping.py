"""The end of a window: unscale, judge, clip, step, update the scaler; or say why not, on all ranks alike."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from .engines import Engine
from .nonfinite import find_nonfinite
from .precision import look_at, unscale, update_without_gradients
from .shares import DistaccumError
from .update import Waitable
from .window import Window

OnNonfinite = Literal["raise", "skip", "ignore"]
WATCHED_WINDOWS = 100  # after one whose gradient was not finite and nobody could say where


class NonfiniteError(DistaccumError):
    def __init__(self, message: str, is_placed: bool) -> None:
        super().__init__(message)
        self.is_placed = is_placed


class Stepper:
    """Steps every optimizer of a complete window, or none."""

    def __init__(
        self,
        engine: Engine,
        optimizers: Sequence[Optimizer],
        scaler: GradScaler | None,
        *,
        max_norm: float | None,
        on_nonfinite: OnNonfinite,
    ) -> None:
        self._engine, self._optimizers, self._scaler = engine, optimizers, scaler
        self._max_norm, self._on_nonfinite = max_norm, on_nonfinite
        self.steps = bool(optimizers) or engine.steps  # else the caller does
        self.is_stepping = False
        self.watched_windows = 0  # to come

    def owned(self) -> list[nn.Parameter]:
        """What the optimizers step, each parameter once."""
        return list({id(p): p for one in self._optimizers for p in owned_by(one)}.values())

    def __call__(self, window: Window) -> tuple[str | None, Tensor, Waitable | None, Tensor | None]:
        """Why nothing was stepped (None: it was), the record's terms, their reduction, and the norm before clipping."""
        flags = self._unscale(window)
        terms = window._terms()
        if self._scaler is not None:  # ranks agree on an overflow by the record's own collective
            found = [flag.to(terms.device, terms.dtype).reshape(1) for flag in flags]
            terms = torch.cat([terms, torch.stack(found).sum(0) if found else terms.new_zeros(1)])
        reduction = self._engine.sum_over_ranks(terms)
        reason, norm = self._step(window, terms, reduction, flags)
        self.watched_windows = max(0, self.watched_windows - 1)
        return reason, terms, reduction, norm

    def refuse_nonfinite_gradient(self, window: Window) -> None:
        """Before the caller steps."""
        if not self.steps and self._scaler is None and self._on_nonfinite == "raise":
            finite, _ = look_at(partial(self._engine.norm, window._parameters), None)
            if not finite:
                self._judge(window, "gradient")

    def _unscale(self, window: Window) -> list[Tensor]:
        """Unscales what the scaler scaled; gives this rank's flags of overflow."""
        if not self.steps:
            return []
        window._refuse_cleared_gradients()
        if self._scaler is None:
            return []
        others = [other for other in windows_on(self._scaler) if other is not window and other._is_open]
        if others:
            raise DistaccumError(
                "another window is open on one GradScaler, whose update() would change the scale under it; finish "
                "one window before the next begins, or give each accumulator a GradScaler of its own"
            )
        if not len(window):
            scale_of_nothing = window._parameters[0].new_zeros(())
            self._scaler.scale(scale_of_nothing)  # makes its scale, which elsewhere the losses made
        return unscale(self._scaler, self._optimizers)

    def _step(
        self, window: Window, terms: Tensor, reduction: Waitable | None, flags: list[Tensor]
    ) -> tuple[str | None, Tensor | None]:
        if not self.steps:
            return None, None
        stepped = [parameter for parameter in self.owned() if parameter.grad is not None]
        norm_of = partial(self._engine.norm, stepped)
        judges = self._engine.judges
        norm = norm_of(2.0) if self._max_norm is not None and not judges else None

        reason = None
        if self._scaler is not None:
            if reduction is not None:
                reduction.wait()
            overflows = terms[-1]
            for flag in flags:  # what the scaler's step and update will read
                flag.copy_(overflows.clamp(max=1.0))
            if bool(overflows):
                reason = "the scaled gradients overflowed"
                if self._on_nonfinite == "raise":
                    self._refuse_nonfinite_loss(window, terms, reduction)
        elif self._on_nonfinite != "ignore" and not judges:
            finite, norm = look_at(norm_of, norm)
            if not finite:
                reason = self._judge(window, "gradient")

        if reason is None:
            if norm is not None and self._max_norm is not None and self._max_norm < math.inf:
                self._engine.clip(stepped, self._max_norm, norm)
            self.is_stepping = True
            try:
                reason = self._engine.step(self._optimizers)
            except BaseException:
                window.discard()  # some weights may have changed: not to be stepped again
                raise
            finally:
                self.is_stepping = False
            if judges:
                norm = norm_of(2.0) if self._max_norm is not None else None
                if reason is not None and self._on_nonfinite == "raise":
                    self._refuse_nonfinite_loss(window, terms, reduction)
                    if not self._engine.scales:
                        self._judge(window, "gradient")
        if self._scaler is not None:
            self._update_scaler(self._scaler, flags, terms[-1])
        return reason, norm

    def _update_scaler(self, scaler: GradScaler, flags: list[Tensor], overflows: Tensor) -> None:
        if flags:
            scaler.update()
        elif self._engine.num_ranks > 1:
            # Other ranks had gradients to look at, this one has none in its shards; their scales stay alike.
            update_without_gradients(scaler, overflows)

    def _refuse_nonfinite_loss(self, window: Window, terms: Tensor, reduction: Waitable | None) -> None:
        if reduction is not None:
            reduction.wait()
        if not bool(terms.isfinite().all()):
            self._judge(window, "loss")

    def _judge(self, window: Window, what: str) -> str:
        """Names what is not finite, on all ranks alike; raises it, or gives the reason for a skip."""
        found = find_nonfinite(window, self._engine)
        if not found.is_placed:
            self.watched_windows = WATCHED_WINDOWS
        if self._on_nonfinite != "raise":
            return f"a {what} is not finite ({found.told})"
        window.discard()
        raise NonfiniteError(
            f"the {what} of this window is not finite ({found.told}), on all ranks alike; nothing was stepped and the "
            "window is discarded. Look for it in the data or lower the learning rate; on_nonfinite='skip' skips such "
            "updates",
            found.is_placed,
        )


def owned_by(optimizer: Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def windows_on(scaler: GradScaler) -> weakref.WeakSet[Window]:
    """Kept on the scaler itself, which is what accumulators share."""
    windows: weakref.WeakSet[Window] = scaler.__dict__.setdefault("_distaccum_windows", weakref.WeakSet())
    return windows
