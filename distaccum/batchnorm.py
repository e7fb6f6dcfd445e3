"""Batch normalisation: freeze it, or replace it with GroupNorm."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import nn

from .text import Once, shorten

KINDS = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d | nn.SyncBatchNorm
Model = TypeVar("Model", bound=nn.Module)


def batchnorms(model: nn.Module) -> list[tuple[str, Any]]:
    """The layers that normalise by a batch's statistics, with their names."""
    return [(name, module) for name, module in model.named_modules() if isinstance(module, KINDS)]


def warn_of_batchnorm(layers: Sequence[tuple[str, Any]], once: Once) -> None:
    """Warns about layers that are trained on several micro-batches."""
    if "batchnorm" not in once.keys and (names := [name for name, module in layers if module.training]):
        once(
            "batchnorm",
            f"{shorten(names)} normalise each micro-batch by its own statistics, so the gradient is not that of "
            "the big batch; freeze them (distaccum.batchnorm.freeze), use GroupNorm (to_groupnorm, there) or "
            "LayerNorm, or accept it with batchnorm='ignore'",
        )


@contextmanager
def untouched_statistics(layers: Sequence[nn.Module]) -> Iterator[None]:
    """Restores running statistics after a stand-in, which updated them when it first ran."""
    statistics = [(b, b.clone()) for layer in layers if layer.training for b in layer.buffers(recurse=False)]
    try:
        yield
    finally:
        for buffer, value in statistics:
            buffer.copy_(value)


def freeze(model: nn.Module) -> list[str]:
    """Puts all batch normalisation layers of a `model` into eval mode, where they are exact; returns their names.

    `model.train()` undoes this, so call it afterwards. Weights and biases of these layers are trained as before.
    """
    named = batchnorms(model)
    for _, layer in named:
        layer.eval()
    return [name for name, _ in named]


def to_groupnorm(model: Model, per_group: int = 16) -> Model:
    """Replaces batch normalisation with GroupNorm, which looks at each sample alone, and returns the model.

    Make the optimizer afterwards. Weights and biases are kept, statistics are not.

    Args:
        model: Changed in place.
        per_group: The fewest channels in a group; the number of groups divides the layer's channels. The variance over
            few numbers, as in small images, magnifies rounding.

    Example:
        >>> to_groupnorm(nn.Sequential(nn.Conv2d(3, 48, 3), nn.BatchNorm2d(48)))[1].num_groups
        3
    """
    if isinstance(model, KINDS):
        raise TypeError(f"to_groupnorm() got a {type(model).__name__} itself, expected a model that holds some")
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, KINDS):
                setattr(module, name, _groupnorm_like(child, per_group))
    return model


def _groupnorm_like(layer: Any, per_group: int) -> nn.GroupNorm:
    channels = layer.num_features
    groups = math.gcd(channels, max(1, channels // per_group))
    made = nn.GroupNorm(groups, channels, eps=layer.eps, affine=layer.affine)
    if layer.affine:
        made.weight = layer.weight
        made.bias = layer.bias
    return made.train(layer.training)
