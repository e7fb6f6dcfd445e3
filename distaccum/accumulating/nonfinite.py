"""Where a NaN or an infinity came from: the rank, the micro-batch, and the first parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..engines import Engine
from ..gradients.norms import local
from ..law.shares import listed
from ..window.window import Window

SHOWN = 3  # parameters that each rank names, and then how many more


@dataclass(frozen=True)
class Found:
    told: str  # the same on all ranks
    is_placed: bool  # in a micro-batch; else every loss is finite and nobody looked between them
    cure: str = "Look for it in the data or lower the learning rate"


def find_nonfinite(window: Window, engine: Engine) -> Found:
    """What all ranks find together; all of them call it. Reads every gradient, and costs a small collective."""
    names = names_of(engine.models)
    bad = [i for i, p in enumerate(window._parameters) if p.grad is not None and not _is_finite(p.grad)]
    # Nothing has been stepped since, so these were so before the first backward.
    weights = [i for i, p in enumerate(window._parameters) if not _is_finite(p)]
    loss = window._first_nonfinite_loss()
    place, value = (-1, 0.0) if loss is None else loss
    looked = -1 if loss is not None else window._first_nonfinite_look()
    rows = engine.peers.gather([float(place), value, float(looked), *_listing(bad), *_listing(weights)])
    if first := _named([row[4 + SHOWN :] for row in rows], window, names):
        told = f"before its first backward already there were weights that are not finite, first in {first}"
        return Found(told, True, "Go back to a checkpoint, or look at how they were initialised or loaded")

    places = []
    for rank, (in_loss, value, in_look, *_) in enumerate(rows):
        if in_loss >= 0:
            what = "loss" if window._loss is None else "largest representation"
            places.append(f"the {what} of micro-batch {in_loss:g} on rank {rank} is {value}")
        elif in_look >= 0:
            places.append(f"it came up in the backward of micro-batch {in_look:g} on rank {rank}, whose loss is finite")
    if not places and window._loss is not None and not _is_finite(window._loss):
        places.append(f"the loss over all pairs is {float(window._loss)}, of representations that are all finite")
    looked_for = "update() finds out in which" if window._looks is None else "the one that reduces, or in the reduction"
    parts = [*places] or [f"every loss is finite, so it came up in a backward; {looked_for}"]
    if listing := _named([row[3 : 4 + SHOWN] for row in rows], window, names):
        parts.append(f"first in {listing}")
    return Found("; ".join(parts), bool(places))


def _listing(places: Sequence[int]) -> list[float]:
    """How many, and the first of them, as a row of fixed length."""
    shown = places[:SHOWN]
    return [float(len(places)), *map(float, shown), *[-1.0] * (SHOWN - len(shown))]


def _named(rows: Sequence[Sequence[float]], window: Window, names: Mapping[int, str]) -> str:
    """The parameters of all ranks' listings."""
    first = sorted({int(i) for row in rows for i in row[1:] if i >= 0})
    if not first:
        return ""
    more = max(int(row[0]) for row in rows) - len(first)
    listing = listed([names.get(id(window._parameters[i]), f"parameter {i}") for i in first])
    return listing + (f" and {more} more" if more > 0 and "more" not in listing else "")


def names_of(models: Sequence[nn.Module]) -> dict[int, str]:
    """Of parameters by identity; a second model's start with its place."""
    return {
        id(parameter): name.removeprefix("module.") if i == 0 else f"{i}.{name}"
        for i, model in reversed(list(enumerate(models)))
        for name, parameter in model.named_parameters()
    }


def _is_finite(gradient: Tensor) -> bool:
    here = local(gradient.detach())
    values = here.coalesce().values() if here.is_sparse else here
    return bool(torch.isfinite(values).all())
