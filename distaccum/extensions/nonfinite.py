"""A look at the gradient before the caller steps it."""

from __future__ import annotations

from typing import final

from ..accumulating.nonfinite import judge, look_at
from ..engines import Engine
from ..extension import Extension
from ..window.window import Window


@final
class LookAtEnd(Extension):
    """Raises for a gradient that is not finite."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def numbers(self, window: Window) -> None:
        if not look_at(self._engine, window.status.parameters).finite:
            judge(window, self._engine, "gradient", "raise")
