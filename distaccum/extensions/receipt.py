"""Receipts of gradients: a few fixed random projections, as long for a gradient as for its shard or its sum."""

from __future__ import annotations

import math
from functools import lru_cache, partial
from typing import Any, final

import torch
from torch import Tensor, nn

from ..extension import Extension
from ..job import Job
from ..law import DistaccumError, shorten
from ..norms import names_of
from ..update import Update
from ..window import Window

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


def num_copies(shard: Any) -> int:
    """The number of ranks that have the same part of a DTensor."""
    sizes = (shard.device_mesh.size(dim) for dim, placement in enumerate(shard.placements) if placement.is_replicate())
    return math.prod(sizes)


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


@final
class Receipt(Extension):
    """Proves every `every`-th update: each gradient is the sum of what autograd gave in the window's backwards.

    An update whose gradient is another raises on all ranks, after its step. These windows cost some projections of each
    gradient per backward, and a host read at their end. `update.notes["receipt"]` is the largest relative error.
    """

    key = "receipt"
    in_contrast = False

    def __init__(self, every: int = 100) -> None:
        if every < 1:
            raise ValueError(f"Receipt(every={every}), expected 1 or more")
        self._every = every
        self._received: dict[int, Tensor] | None = None  # by the parameter's place, in a window that is checked
        self._sizes: dict[int, Tensor] = {}
        self._hooks: dict[int, Any] = {}

    def join(self, job: Job) -> None:
        engine = self._engine = job.engine
        self._stepped = job.stepped
        why = engine.hides_norm or engine.hides_own(job.stepped())
        if any(hasattr(one, "placements") and first_row(one) is None for one in job.stepped()):
            why = "with parameters that are not cut by rows alone"
        if why or "step" in engine.owns or engine.peers.has_parts or engine.pipeline is not None:
            raise ValueError(
                f"Receipt() with {engine.name}{'' if why is None else f', {why}'}: what autograd gives there, or the "
                "gradient that is used, cannot be seen; leave it out, or use a plain module, DDP or fully_shard over "
                "data-parallel ranks"
            )

    def begin(self, window: Window) -> None:
        self._received = None if window.index % self._every else {}

    def before_backward(self, window: Window, reduces: bool) -> None:
        for place, parameter in enumerate(self._stepped() if self._received is not None else ()):
            for leaf in self._engine.holders([parameter]):
                if id(leaf) not in self._hooks and is_seen(leaf) and not hasattr(leaf, "to_local"):
                    self._hooks[id(leaf)] = leaf.register_hook(partial(self._receive, place))
        self._engine.holders(self._stepped())  # which it shows to other extensions

    def _receive(self, place: int, gradient: Tensor) -> None:
        if self._received is not None and not gradient.is_sparse:
            receipt = project(gradient)
            self._received[place] = self._received.get(place, 0) + receipt
            self._sizes[place] = self._sizes.get(place, 0) + receipt.norm()

    def numbers(self, window: Window) -> Tensor | None:
        if self._received is None:
            return None
        rows = []
        for place, parameter in enumerate(self._stepped()):
            nothing = torch.zeros(NUM, dtype=torch.float64, device=parameter.device)
            receipt = self._received.get(place, nothing).to(nothing)
            size = self._sizes.get(place, nothing[0]).to(nothing)
            rows.append(torch.cat([receipt, self._closed(parameter, nothing), size.reshape(1)]))
        return torch.cat(rows)

    def _closed(self, parameter: nn.Parameter, nothing: Tensor) -> Tensor:
        """This rank's part of the receipts of a gradient as it is used."""
        gradient: Any = parameter.grad
        if gradient is None or gradient.is_sparse or not is_seen(parameter):
            return nothing
        if hasattr(gradient, "to_local"):
            part = project(gradient.to_local(), gradient.shape, first_row(gradient) or 0) / num_copies(gradient)
        else:
            part = project(gradient) / self._engine.peers.num_ranks
        return part.to(nothing)

    def end(self, window: Window, update: Update | None) -> None:
        while self._hooks:
            self._hooks.popitem()[1].remove()
        self._received, self._sizes = None, {}
        sums = None if update is None or not update.stepped else update.summed(self.key)
        if sums is None or update is None:
            return
        received, closed, size = torch.split(sums.reshape(-1, 2 * NUM + 1).cpu(), [NUM, NUM, 1], dim=1)
        # Of what autograd gave nothing for, any gradient is infinitely off.
        off = (closed * self._engine.divisor - received).norm(dim=1) / size[:, 0].clamp(min=1e-300)
        update.notes[self.key] = float(off.max()) if len(off) else 0.0
        parameters = self._stepped()
        bounds = [4e-4 if torch.finfo(one.dtype).eps < 1e-5 else 5e-2 for one in parameters]
        wrong = [one for one, error, bound in zip(parameters, off.tolist(), bounds, strict=True) if error > bound]
        if wrong:
            worst, by_id = update.notes[self.key], names_of(self._engine.models)
            names = shorten([by_id.get(id(one), "a parameter") for one in wrong])
            raise DistaccumError(
                f"the gradient of {names} in update {window.index} is not the sum of what its micro-batches gave (off "
                f"by {worst:.3g}), and the step used it; look for what else changes or reduces gradients, and go "
                "back to a checkpoint"
            )
