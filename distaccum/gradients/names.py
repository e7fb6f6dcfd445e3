"""The names of parameters."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn


def names_of(models: Sequence[nn.Module]) -> dict[int, str]:
    """By the parameters' identity; names of a second model start with its position."""
    return {
        id(parameter): name.removeprefix("module.") if i == 0 else f"{i}.{name}"
        for i, model in reversed(list(enumerate(models)))
        for name, parameter in model.named_parameters()
    }
