"""Modes of the modules that are trained: training or eval, and what normalises."""

from __future__ import annotations

from collections.abc import Iterable
from typing import final

from torch import nn

from ..batchnorm import batchnorms


@final
class Modes:
    """The mode of each model at each line of a backward.

    Attributes:
        norms (dict[str, None]): Names of batch normalisation in training mode.
        recurs (bool): A model goes through steps in time.
    """

    def __init__(self, notes: dict[str, None]) -> None:
        self.norms = dict[str, None]()
        self.recurs = False
        self._notes = notes
        self._was_training: dict[tuple[str, int], bool] = {}

    def have_left_training(self, line: str, roots: Iterable[nn.Module]) -> bool:
        """True if a model is in eval mode now, and was not at the line's first backward."""
        has_left = False
        for root in roots:
            if (key := (line, id(root))) in self._was_training:
                has_left |= self._was_training[key] and not root.training
                continue
            self._was_training[key] = root.training
            self.recurs |= any(isinstance(module, nn.RNNBase | nn.RNNCellBase) for module in root.modules())
            self.norms |= {name or type(norm).__name__: None for name, norm in batchnorms(root) if norm.training}
            if not root.training and any(isinstance(module, nn.Dropout) and module.p for module in root.modules()):
                self._notes[f"{line}: trains a model in eval mode, without its dropout"] = None
        return has_left
