"""Receipts of gradients: a few fixed random projections, as long for a gradient as for its shard or its sum."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

NUM = 8  # projections per gradient: as many equations to find out what was added up
LONGEST = 1 << 17  # elements of a vector, whose projections would otherwise take more memory than it


@lru_cache(maxsize=512)
def directions(length: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Fixed random numbers, the same in every process; drawn from a generator of their own, on the host."""
    generator = torch.Generator(device="cpu").manual_seed(0x5EED + 7 * length + columns)
    drawn = torch.randn(length, columns, generator=generator, dtype=torch.float64, device="cpu")
    return drawn.to(device, dtype)


def is_seen(parameter: Tensor) -> bool:
    """True for a floating-point parameter whose projections are small beside it."""
    return parameter.is_floating_point() and (parameter.ndim > 1 or parameter.numel() <= LONGEST)


@torch.no_grad()
def project(gradient: Any, whole: torch.Size | None = None, start: int = 0) -> Tensor:
    """`NUM` projections <r, gradient>; each r is the product of a column and a row, so that none is as large.

    Of some rows of a gradient, the first of which is `start`, `whole` is the shape of all.
    """
    shape, kind = gradient.shape if whole is None else whole, (gradient.dtype, gradient.device)
    if torch.is_autocast_enabled(gradient.device.type):
        with torch.autocast(gradient.device.type, enabled=False):
            return project(gradient, whole, start)
    if len(shape) < 2:
        own = directions(max(1, shape.numel()), NUM, *kind)[start : start + gradient.numel()]
        return torch.mv(own.T, gradient.reshape(-1))
    matrix = gradient.flatten(1)
    left = directions(shape[0], 1, *kind)[start : start + len(matrix), 0]
    return torch.mv((matrix @ directions(shape[1:].numel(), NUM, *kind)).T, left)


def first_row(shard: Any) -> int | None:
    """The first row that this rank has of a DTensor which one dimension of its mesh cuts by rows; None: otherwise."""
    cut = [dim for dim, placement in enumerate(shard.placements) if not placement.is_replicate()]
    if not cut:
        return 0
    placement, mesh = shard.placements[cut[0]], shard.device_mesh
    if len(cut) > 1 or type(placement).__name__ != "Shard" or placement.dim != 0:
        return None
    rows = -(-shard.shape[0] // mesh.size(cut[0]))
    return min(int(shard.shape[0]), int(rows * mesh.get_coordinate()[cut[0]]))
