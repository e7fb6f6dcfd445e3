"""Tamper: notices when somebody else clears or changes gradients in mid-window."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from ..engines import Engine
from ..private import is_view, version_of
from ..scaling import has_unscaled


@final
class Tamper:
    """Watches every gradient that is stepped, from the end of a backward to the next one, or to the loop's end.

    Two looks at each `.grad`, which tensor it is and how often it was written to, cost a quarter of a microsecond. How
    many writes a window's own backwards make cannot be told in advance: a micro-batch may leave a parameter out, and
    checkpoints add to one several times in one backward.
    """

    def __init__(
        self,
        engine: Engine,
        groups: Sequence[Sequence[nn.Parameter]],
        scaler: GradScaler | None,
        optimizers: Sequence[Optimizer],
    ) -> None:
        self._engine, self._groups = engine, groups
        self._scaler, self._optimizers = scaler, optimizers
        self._own = groups[0] if len(groups) == 1 else [one for group in groups for one in group]
        self._seen: list[tuple[Any, Tensor | None, int]] = []  # holder, its gradient, and that one's version
        self._final: list[Sequence[nn.Parameter]] = []  # groups that have a gradient after the loop

    def look(self) -> None:
        """Remembers what gradients look like after a backward."""
        holders: Sequence[Any] = self._engine.holders(self._own)
        if holders is not self._own and self._engine.gradients_stay:
            holders = [*holders, *self._own]
        self._seen = [
            (one, gradient, -1 if gradient is None else version_of(gradient))
            for one in holders
            for gradient in (one.grad,)
        ]

    def differs(self) -> bool:
        """Whether a gradient came, went or was written to since; forgets what was seen, which a backward may free."""
        seen, self._seen = self._seen, []
        if self._scaler is not None and has_unscaled(self._scaler, self._optimizers):  # which counts as no write
            return True
        for one, gradient, version in seen:
            now = one.grad
            if now is not gradient:
                if now is None or gradient is None or not is_view(now):
                    return True
                # Else a forward of DDP, which lays its buckets out anew after the first reduction, has moved it to one.
            elif now is not None and version_of(now) != version:
                return True
        return False

    def complete(self) -> None:
        """Remembers where there are gradients after the loop; the caller may change them there."""
        self._final = [group for group in self._groups if any(one.grad is not None for one in group)]

    def is_cleared(self) -> bool:
        """Whether an optimizer's gradients are all gone since then."""
        return any(all(one.grad is None for one in group) for group in self._final)

    def clear(self) -> None:
        self._seen, self._final = [], []
