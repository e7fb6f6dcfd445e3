"""NaN and infinity: their origin and their treatment, the same on all ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .engines import Engine
from .law import DistaccumError, shorten
from .losses import Losses
from .norms import local, names_of, norm_on_host, read
from .options import OnNonfinite
from .record import Record

SHOWN = 3  # parameters that each rank names; of the others it gives the number


class Look(NamedTuple):
    finite: bool  # every element
    norm: Tensor | None
    read: float = math.inf  # the norm, where it was read


def look_at(engine: Engine, parameters: Sequence[nn.Parameter], norm: Tensor | None = None) -> Look:
    """Takes the norm, and tells whether every element is finite; reads one number, usually after one pass."""
    # On a CPU the largest element takes eighteen times as long as the norm.
    known = _read_norm(engine, parameters) if norm is None else read(norm)
    if math.isfinite(known):
        return Look(True, norm, known)
    largest = engine.norm(parameters, math.inf)  # a sum of squares can overflow, this cannot
    if not math.isfinite(largest.item()):
        return Look(False, norm)
    return Look(True, None if norm is None else largest * engine.norm(parameters, 2.0, largest))


def _read_norm(engine: Engine, parameters: Sequence[nn.Parameter]) -> float:
    known = None
    kind = type(engine)
    if kind.norm is Engine.norm and kind.shards is Engine.shards and engine.pipeline is None:  # each rank has all of it
        known = norm_on_host([p.grad for p in parameters if p.grad is not None])
    return read(engine.norm(parameters)) if known is None else known


class NonfiniteError(DistaccumError):
    """A window was given up, and nothing was stepped."""


def judge(
    engine: Engine, losses: Losses, parameters: Sequence[nn.Parameter], what: str, on_nonfinite: OnNonfinite
) -> str:
    """Raises on all ranks that `what` is not finite, with the place, or returns that as the reason of a skip."""
    # Ranks that share samples may hold different parameters, as stages do, and only one of them the losses.
    own = find_nonfinite(engine, losses, parameters)
    found = min(engine.peers.gather_objects(own, everyone=True), key=lambda one: one.vagueness)
    if on_nonfinite != "raise":
        return f"a {what} is not finite ({found.message})"
    raise NonfiniteError(
        f"the {what} of this window is not finite ({found.message}), on all ranks alike; nothing was stepped and the "
        f"window is discarded. {found.cure}; on_nonfinite='skip' skips such updates"
    )


def judge_loss(
    engine: Engine,
    losses: Losses,
    record: Record,
    parameters: Sequence[nn.Parameter],
    on_nonfinite: OnNonfinite,
) -> None:
    """Raises where an overflow is no scaler's business, since a loss was not finite before it was scaled."""
    if on_nonfinite == "raise" and not record.has_finite_losses():
        judge(engine, losses, parameters, "loss", "raise")


@dataclass(frozen=True)
class Found:
    message: str  # the same on all ranks
    is_placed: bool  # in a micro-batch; else every loss is finite
    names_some: bool = True  # parameters
    cure: str = "Look for it in the data or lower the learning rate"

    @property
    def vagueness(self) -> tuple[bool, bool]:
        return not self.is_placed, not self.names_some


def find_nonfinite(engine: Engine, losses: Losses, parameters: Sequence[nn.Parameter]) -> Found:
    """The finding of all ranks; each must call it. Reads every gradient, and costs a small collective."""
    names, of_pairs = names_of(engine.models), losses.of_pairs
    noun = "loss" if of_pairs is None else "largest representation"
    bad = [i for i, p in enumerate(parameters) if p.grad is not None and not _is_finite(p.grad)]
    # Nothing was stepped since, so these were not finite before the first backward.
    weights = [i for i, p in enumerate(parameters) if not _is_finite(p)]
    place, value = losses.first_nonfinite() or (-1, 0.0)
    rows = engine.peers.gather([float(place), value, *_listing(bad), *_listing(weights)])
    if first := _named([row[3 + SHOWN :] for row in rows], parameters, names):
        message = f"before its first backward there were weights that are not finite already, first in {first}"
        return Found(message, True, cure="Go back to a checkpoint, or look at how they were initialised or loaded")

    places = [
        f"the {noun} of micro-batch {place:g} on rank {rank} is {value}"
        for rank, (place, value, *_) in enumerate(rows)
        if place >= 0
    ]
    if not places and of_pairs is not None and not _is_finite(of_pairs[0]):
        places.append(f"the loss over all pairs is {float(of_pairs[0])}, of representations that are all finite")
    parts = [*places] or ["every loss is finite, so it came up in a backward or in the reduction"]
    if listing := _named([row[2 : 3 + SHOWN] for row in rows], parameters, names):
        parts.append(f"first in {listing}")
    return Found("; ".join(parts), bool(places), bool(listing))


def _listing(places: Sequence[int]) -> list[float]:
    """How many there are, and the first of them, as a row of fixed length."""
    shown = places[:SHOWN]
    return [float(len(places)), *map(float, shown), *[-1.0] * (SHOWN - len(shown))]


def _named(rows: Sequence[Sequence[float]], parameters: Sequence[nn.Parameter], names: Mapping[int, str]) -> str:
    """The parameters of all ranks' listings."""
    first = sorted({int(i) for row in rows for i in row[1:] if i >= 0})
    if not first:
        return ""
    more = max(int(row[0]) for row in rows) - len(first)
    listing = shorten([names.get(id(parameters[i]), f"parameter {i}") for i in first])
    return listing + (f" and {more} more" if more > 0 and "more" not in listing else "")


def _is_finite(gradient: Tensor) -> bool:
    here = local(gradient.detach())
    values = here.coalesce().values() if here.is_sparse else here
    return bool(torch.isfinite(values).all())
