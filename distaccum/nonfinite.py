"""Where a NaN or an infinity came from: the rank, the micro-batch, and the first parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .engines import Engine
from .precision import local
from .shares import listed
from .window import Window

SHOWN = 3  # parameters that each rank names, and then how many more


@dataclass(frozen=True)
class Found:
    told: str  # the same on all ranks
    is_placed: bool  # in a micro-batch; else every loss is finite and nobody looked between them


def find_nonfinite(window: Window, engine: Engine) -> Found:
    """What all ranks find together; all of them call it. Reads every gradient, and costs a small collective."""
    names = names_of(engine.models)
    bad = [i for i, p in enumerate(window._parameters) if p.grad is not None and not _is_finite(p.grad)]
    loss = window._first_nonfinite_loss()
    place, value = (-1, 0.0) if loss is None else loss
    looked = -1 if loss is not None else window._first_nonfinite_look()
    shown = [float(i) for i in bad[:SHOWN]] + [-1.0] * (SHOWN - len(bad[:SHOWN]))
    rows = engine.gather([float(place), value, float(looked), float(len(bad)), *shown])

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
    told = [*places] or [f"every loss is finite, so it came up in a backward; {looked_for}"]
    first = sorted({int(i) for row in rows for i in row[4:] if i >= 0})
    if first:
        more = max(int(row[3]) for row in rows) - len(first)
        listing = listed([names.get(id(window._parameters[i]), f"parameter {i}") for i in first])
        told.append(f"first in {listing}" + (f" and {more} more" if more > 0 and "more" not in listing else ""))
    return Found("; ".join(told), bool(places))


def names_of(models: Sequence[nn.Module]) -> dict[int, str]:
    """Of parameters by identity; a second model's start with its place."""
    return {
        id(parameter): name.removeprefix("module.") if i == 0 else f"{i}.{name}"
        for i, model in reversed(list(enumerate(models)))
        for name, parameter in model.named_parameters()
    }


def _is_finite(gradient: Tensor) -> bool:
    here = local(gradient)
    values = here.coalesce().values() if here.is_sparse else here
    return bool(torch.isfinite(values).all())
