"""A library's cells: the documented way through each case."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from .cases import CASES
from .task import Outcome, Task

Way = Callable[[Task], Outcome]
WEIGHTS = frozenset({"tokens", "tokens2", "zero", "aux"})  # denominators of one's own
GIVING_UP = frozenset({"abandoned"})  # of a window that is not over


@dataclass
class Library:
    """`packages` must be there; `dtype` is what it computes in where the case does not say.

    It has no feature for the cases in `lacks`: what its ordinary use gives is shown, and is no fault of it.
    """

    name: str
    packages: tuple[str, ...] = ()
    dtype: torch.dtype = torch.float64
    cells: dict[str, Way] = field(default_factory=dict)
    absent: set[str] = field(default_factory=set)  # no feature and no recipe; else the case is not what it is for
    lacks: frozenset[str] = frozenset()

    def cell(self, *keys: str) -> Callable[[Any], Any]:
        """Registers a function for these cases."""

        def register(way: Way) -> Way:
            for key in keys:
                assert key in CASES and key not in self.cells
                self.cells[key] = way
            return way

        return register
