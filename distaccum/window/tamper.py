"""Tamper: notices when somebody else clears or changes gradients in mid-window."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from torch import nn

from ..engines import Engine
from ..engines.stamp import GradientStamp


@final
class Tamper:
    """Watches one parameter of each group that has a gradient: a group takes part as a whole."""

    def __init__(self, engine: Engine, groups: Sequence[Sequence[nn.Parameter]]) -> None:
        self._engine, self._groups = engine, groups
        self._stamps: list[GradientStamp] = []

    def stamp(self, reduced: bool) -> None:
        """Remembers what gradients look like now; `reduced`: they may have moved."""
        if reduced or not self._stamps:
            self._stamps = self._choose(reduced)  # which stamps them
        else:
            for one in self._stamps:
                one.take()

    def _choose(self, reduced: bool) -> list[GradientStamp]:
        found: list[GradientStamp] = []
        if reduced and not self._engine.gradients_stay:
            return found
        for group in self._groups:
            for one in group if reduced else self._engine.holders(group):
                if one.grad is not None:
                    found.append(GradientStamp(one))
                    break
        return found

    def differs(self) -> bool:
        """Whether a gradient was cleared or changed since."""
        for stamp in self._stamps:  # noqa: SIM110  # any() of a generator costs three times as much, in each micro-step
            if stamp.was_tampered_with():
                return True
        return False

    def forget_unused(self) -> None:
        """Those that the engine set to None, since no rank used them."""
        self._stamps = [stamp for stamp in self._stamps if stamp.holder.grad is not None]

    def is_cleared(self) -> bool:
        """Whether gradients are gone; after the loop the caller may change them."""
        for stamp in self._stamps:  # noqa: SIM110  # as above
            if stamp.holder.grad is None:
                return True
        return False

    def clear(self) -> None:
        self._stamps = []
