"""Hooks: what extensions hear of a window, looked up once for all windows of an accumulator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor


class Hooks(NamedTuple):
    """By event, the bound methods of the extensions that override it; the first argument is the window."""

    begin: tuple[Callable[[Any], None], ...] = ()
    before_backward: tuple[Callable[[Any, bool], None], ...] = ()
    after_backward: tuple[Callable[[Any], None], ...] = ()
    finishing: tuple[Callable[[Any], None], ...] = ()
    numbers: tuple[Callable[[Any], Tensor | None], ...] = ()
    judge: tuple[Callable[[Any], str | None], ...] = ()
    end: tuple[Callable[[Any, Any], None], ...] = ()
