"""Receipts of gradients: a few fixed random projections, which add up like the gradients and their shards."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..norms import local, widest
from .private import starts_of

NUM = 8  # projections per gradient: as many equations for a fit of what was added up
LONGEST = 1 << 17  # numbers in a row; the directions of a longer one would take too much memory
PIECE = 1 << 20  # numbers that are cast at once
Shape = tuple[int, ...]
HOST: Any = {"dtype": torch.float64, "device": "cpu"}


@lru_cache(maxsize=512)
def directions(length: int, side: int, device: torch.device) -> Tensor:
    """Fixed random numbers, alike in every process, from a generator of their own on the host."""
    generator = torch.Generator(device="cpu").manual_seed(0x5EED + 7 * length + side)
    drawn = torch.randn(length, NUM, generator=generator, **HOST)
    return widest(drawn.to(device, torch.float32 if device.type == "mps" else None))


def is_seen(parameter: Tensor) -> bool:
    """True for a floating-point parameter whose rows are not too long."""
    return parameter.is_floating_point() and math.prod(parameter.shape[parameter.ndim > 1 :]) <= LONGEST


def project(gradient: Any) -> Tensor:
    """`NUM` projections <r, gradient>; each r is the product of a column and a row, so it needs little memory.

    Those of a DTensor are of this rank's block of it. In float64, a piece at a time; autocast and settings of matrix
    products do not make it less precise. On the host, single precision is enough.
    """
    if not gradient.ndim:
        gradient = gradient.reshape(1)
    whole = gradient.shape
    starts = starts_of(gradient)
    gradient = local(gradient.detach())
    is_single = gradient.dtype == torch.float32 and gradient.device.type == "cpu"
    is_single &= torch.get_float32_matmul_precision() == "highest" and not torch.is_autocast_enabled("cpu")
    columns, rows = _sides(whole, starts, gradient.shape, gradient.device, torch.float32 if is_single else None)
    matrix = gradient.reshape(len(gradient), rows.shape[1])
    # Each projection has a row of its own: one for all might see only the rounding of a gradient of low rank.
    if is_single:
        return widest(columns @ matrix * rows).sum(1)
    along = torch.zeros_like(rows)
    num = max(1, PIECE // max(1, rows.shape[1]))
    for i in range(0, len(matrix), num):
        along.addmm_(columns[:, i : i + num], widest(matrix[i : i + num]))
    return along.mul_(rows).sum(1)


@lru_cache(maxsize=512)
def _sides(whole: Shape, starts: Shape, shape: Shape, device: torch.device, dtype: Any) -> tuple[Tensor, Tensor]:
    """The columns and rows of all r, cut to a block."""
    here = [slice(start, start + num) for start, num in zip(starts, shape, strict=True)]
    columns = directions(whole[0], 0, device)[here[0]]
    rows = directions(math.prod(whole[1:]), 1, device).view(*whole[1:], NUM)[tuple(here[1:])].reshape(-1, NUM)
    return columns.T.to(dtype or columns.dtype), rows.T.to(dtype or rows.dtype)


def num_copies(tensor: Any) -> int:
    """The number of ranks that hold each block of a DTensor; 0 for a tensor that is whole on each rank."""
    if not hasattr(tensor, "to_local"):
        return 0
    sizes = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
    return math.prod(size for size, placement in sizes if placement.is_replicate())
