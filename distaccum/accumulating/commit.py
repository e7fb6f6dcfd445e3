"""The end of a window: unscale, judge, clip, step, update the scaler; or say why not, on all ranks alike."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from ..engines import Engine
from ..gradients.norms import EPSILON, Norm, look_at
from ..gradients.scaling import divide_in_step, divided, tell, unscale, unscales_in_step, update_without_gradients
from ..law.errors import DistaccumError
from ..law.update import Waitable
from ..window.window import Window
from .nonfinite import find_nonfinite

OnNonfinite = Literal["raise", "skip", "ignore"]
WATCHED_WINDOWS = 100  # after one whose gradient was not finite and nobody could say where


@dataclass
class _Gradient:
    """What is known of a complete window's before it is stepped."""

    parameters: list[nn.Parameter]  # that have one
    norm_of: Norm
    flags: list[Tensor] = field(default_factory=list)  # of overflow, on this rank
    norm: Tensor | None = None  # before clipping, where it is wanted
    read: float = math.inf  # the same, where it was read
    by: Tensor | None = None  # what the step divides it by


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
        self.steps = bool(optimizers) or engine.owns_step  # else the caller does
        self.is_stepping = False
        self.has_stepped = False  # the window that is committed
        self.watched_windows = 0  # to come

    def owned(self) -> list[nn.Parameter]:
        """What the optimizers step, each parameter once."""
        return list({id(p): p for one in self._optimizers for p in owned_by(one)}.values())

    def __call__(self, window: Window) -> tuple[str | None, Tensor, Waitable | None, Tensor | None]:
        """Why nothing was stepped (None: it was), the record's terms, their reduction, and the norm before clipping."""
        gradient = self._unscaled(window) if self.steps else None
        terms = window._terms()
        if window._noise is not None and window._compares:
            part = window._part_of_square
            if gradient is not None and not self._engine.judges_gradients:  # else it is known after the step
                part = window._noise.part(gradient.parameters, gradient.norm)
            terms = torch.cat([terms, window._noise.terms(window._small, part, terms)])
        if self._scaler is not None:  # ranks agree on an overflow by the record's own collective
            flags = [] if gradient is None else gradient.flags
            found = [flag.to(terms.device, terms.dtype).reshape(1) for flag in flags]
            terms = torch.cat([terms, torch.stack(found).sum(0) if found else terms.new_zeros(1)])
        reduction = self._engine.peers.sum(terms)
        reason = None if gradient is None else self._step(window, gradient, terms, reduction)
        self.watched_windows = max(0, self.watched_windows - 1)
        return reason, terms, reduction, None if gradient is None else gradient.norm

    def refuse_nonfinite_gradient(self, window: Window) -> None:
        """Before the caller steps."""
        if self.steps:
            return
        if window._noise is not None and window._compares:
            window._part_of_square = window._noise.part(window._parameters, is_scaled=True)
        looks = self._scaler is None and self._on_nonfinite == "raise"
        if looks and not look_at(partial(self._engine.norm, window._parameters), None).finite:
            self._judge(window, "gradient")

    def _unscaled(self, window: Window) -> _Gradient:
        """Unscales what the scaler scaled, or sees to it that the step does."""
        window._refuse_cleared_gradients()
        stepped = [parameter for parameter in self.owned() if parameter.grad is not None]
        gradient = _Gradient(stepped, partial(self._engine.norm, stepped))
        looks = self._on_nonfinite != "ignore" and self._scaler is None  # and will take a norm
        measures = (self._max_norm is not None or (window._compares and looks)) and not self._engine.judges_gradients
        if self._scaler is not None:
            self._refuse_another_window(window, self._scaler)
            if not len(window):
                scale_of_nothing = window._parameters[0].new_zeros(())
                self._scaler.scale(scale_of_nothing)  # makes its scale, which elsewhere the losses made
            if unscales_in_step(self._scaler, self._optimizers):
                # One pass. A norm that overflows in float32 is beyond what a scale should make of any gradient.
                # A rank whose shards have no gradient takes part: the norm is of all ranks.
                norm = gradient.norm_of(2.0)
                gradient.by = self._scaler.scale(norm.new_ones((), dtype=torch.float32))
                if stepped:
                    gradient.flags = [(~norm.isfinite()).to(torch.float32)]
                    tell(self._scaler, self._optimizers, gradient.flags[0])
                gradient.norm = norm / gradient.by if measures or window._compares else None
                return gradient
            gradient.flags = unscale(self._scaler, self._optimizers)
        gradient.norm = gradient.norm_of(2.0) if measures else None
        return gradient

    def _refuse_another_window(self, window: Window, scaler: GradScaler) -> None:
        if any(other is not window and other._is_open for other in windows_on(scaler)):
            raise DistaccumError(
                "another window is open on one GradScaler, whose update() would change the scale under it; finish "
                "one window before the next begins, or give each accumulator a GradScaler of its own"
            )

    def _step(self, window: Window, gradient: _Gradient, terms: Tensor, reduction: Waitable | None) -> str | None:
        judges = self._engine.judges_gradients
        reason = None
        if self._scaler is not None:
            if reduction is not None:
                reduction.wait()
            overflows = terms[-1]
            for flag in gradient.flags:  # what the scaler's step and update will read
                flag.copy_(overflows.clamp(max=1.0))
            if bool(overflows):
                reason = "the scaled gradients overflowed"
                if self._on_nonfinite == "raise":
                    self._refuse_nonfinite_loss(window, terms, reduction)
        elif self._on_nonfinite != "ignore" and not judges:
            finite, gradient.norm, gradient.read = look_at(gradient.norm_of, gradient.norm)
            if not finite:
                reason = self._judge(window, "gradient")

        if reason is None:
            self._clip(gradient)
            self.is_stepping = True
            try:
                with divided(self._optimizers, gradient.by):
                    reason = self._engine.step(self._optimizers)
                    self.has_stepped = reason is None
            except BaseException:
                window.discard()  # some weights may have changed: not to be stepped again
                raise
            finally:
                self.is_stepping = False
            if judges:
                wanted = self._max_norm is not None or window._compares
                gradient.norm = gradient.norm_of(2.0) if wanted else None
                if reason is not None and self._on_nonfinite == "raise":
                    self._refuse_nonfinite_loss(window, terms, reduction)
                    if not self._engine.scales_losses:
                        self._judge(window, "gradient")
        if self._scaler is not None:
            self._update_scaler(self._scaler, gradient, terms[-1])
        return reason

    def _clip(self, gradient: _Gradient) -> None:
        """In a pass of its own, in that of the step, or not at all: what is not above `max_norm` is left alone."""
        norm, most = gradient.norm, self._max_norm
        if norm is None or most is None or gradient.read + EPSILON <= most or math.isinf(most):
            return
        if divide_in_step(self._optimizers):
            over = ((norm + EPSILON) / most).clamp(min=1.0).to(torch.float32)
            gradient.by = over if gradient.by is None else gradient.by * over
        else:
            self._engine.clip(gradient.parameters, most, norm)

    def _update_scaler(self, scaler: GradScaler, gradient: _Gradient, overflows: Tensor) -> None:
        if gradient.flags:
            scaler.update()
        elif self._engine.peers.num_ranks > 1:
            # Other ranks had gradients to look at, this one has none in its shards; their scales stay alike.
            update_without_gradients(scaler, overflows)

    def _refuse_nonfinite_loss(self, window: Window, terms: Tensor, reduction: Waitable | None) -> None:
        if reduction is not None:
            reduction.wait()
        if not bool(terms[: len(window._names)].isfinite().all()):
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
            f"window is discarded. {found.cure}; on_nonfinite='skip' skips such updates",
            found.is_placed,
        )


def owned_by(optimizer: Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


class _Windows(weakref.WeakSet[Window]):
    """Of one scaler. A copy of the scaler, or one that is loaded, has none."""

    def __reduce__(self) -> Any:
        return type(None), ()


def windows_on(scaler: GradScaler) -> _Windows:
    """Kept on the scaler itself, which is what accumulators share."""
    windows: _Windows | None = scaler.__dict__.get("_distaccum_windows")
    if windows is None:
        windows = scaler.__dict__["_distaccum_windows"] = _Windows()
    return windows
