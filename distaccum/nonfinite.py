"""NaN and infinity: their origin and their treatment, the same on all ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .engines import Engine
from .law import DistaccumError, shorten
from .losses import Losses, Record
from .norms import local, names_of
from .options import OnNonfinite


class NonfiniteError(DistaccumError):
    """A window was given up, and nothing was stepped."""


class _View(NamedTuple):
    """The view of one rank."""

    number: int  # of the first micro-batch with a loss that is not finite; -1: none
    value: float
    gradients: list[str]  # parameters whose gradient is not finite
    weights: list[str]  # parameters that are not finite themselves


def judge(
    engine: Engine, losses: Losses, parameters: Sequence[nn.Parameter], what: str, on_nonfinite: OnNonfinite
) -> str:
    """Raises on all ranks that `what` is not finite, with the place, or returns that as the reason of a skip.

    Reads every gradient, and costs a small collective.
    """
    names = names_of(engine.models)
    named = [(names.get(id(p), f"parameter {i}"), p) for i, p in enumerate(parameters)]
    own = _View(
        *(losses.first_nonfinite() or (-1, 0.0)),
        [name for name, p in named if p.grad is not None and not _is_finite(p.grad)],
        [name for name, p in named if not _is_finite(p)],
    )
    seen: list[_View] = engine.peers.gather_objects(own, everyone=True)
    cure = "Look for it in the data or lower the learning rate"
    # Nothing was stepped since, so weights were not finite before the first backward.
    if weights := list(dict.fromkeys(name for one in seen for name in one.weights)):
        message = (
            f"before its first backward there were weights that are not finite already, first in {shorten(weights)}"
        )
        cure = "Go back to a checkpoint, or look at how they were initialised or loaded"
    else:
        gradients = list(dict.fromkeys(name for one in seen for name in one.gradients))
        message = _origin(engine, losses, seen) + (f"; first in {shorten(gradients)}" if gradients else "")
    if on_nonfinite != "raise":
        return f"a {what} is not finite ({message})"
    raise NonfiniteError(
        f"the {what} of this window is not finite ({message}), on all ranks alike; nothing was stepped and the "
        f"window is discarded. {cure}; on_nonfinite='skip' skips such updates"
    )


def _origin(engine: Engine, losses: Losses, seen: Sequence[_View]) -> str:
    noun = "loss" if losses.of_pairs is None else "largest representation"
    # Ranks that share samples may hold different stages, and only one of them the losses.
    by_rank = [max(shared, key=lambda one: one.number) for shared in engine.peers.by_samples(seen)]
    places = [
        f"the {noun} of micro-batch {one.number} on rank {rank} is {one.value}"
        for rank, one in enumerate(by_rank)
        if one.number >= 0
    ]
    if not places and losses.of_pairs is not None and not _is_finite(losses.of_pairs[0]):
        places = [f"the loss over all pairs is {float(losses.of_pairs[0])}, of representations that are all finite"]
    return "; ".join(places) or "every loss is finite, so it came up in a backward or in the reduction"


def judge_loss(
    engine: Engine, losses: Losses, record: Record, parameters: Sequence[nn.Parameter], on_nonfinite: OnNonfinite
) -> None:
    """Raises where an overflow is no scaler's business, since a loss was not finite before it was scaled."""
    if on_nonfinite == "raise" and not all(map(math.isfinite, record.losses())):
        judge(engine, losses, parameters, "loss", "raise")


def _is_finite(tensor: Tensor) -> bool:
    here = local(tensor.detach())
    return bool(torch.isfinite(here.coalesce().values() if here.is_sparse else here).all())
