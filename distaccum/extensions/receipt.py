"""Receipts of gradients: a few fixed random projections, as long for a gradient as for its shard or its sum."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple, final

import torch
import torch.distributed as dist
from torch import Tensor

from ..engines.base import Source
from ..extension import Extension
from ..job import Job
from ..law import DistaccumError, shorten
from ..norms import local, names_of, widest
from ..update import Update
from ..window import Window

NUM = 8  # projections per gradient: as many equations to find out what was added up
LONGEST = 1 << 17  # numbers in a row, whose directions would otherwise take more memory than it
PIECE = 1 << 20  # numbers that are cast at once
MOST = 16  # parameters of which ranks tell each other what each micro-batch gave
FINE, COARSE = 2e-5, 5e-2  # relative errors that are none; where gradients add up in half precision


@lru_cache(maxsize=512)
def directions(length: int, side: int, device: torch.device) -> Tensor:
    """Fixed random numbers, the same in every process; drawn from a generator of their own, on the host."""
    generator = torch.Generator(device="cpu").manual_seed(0x5EED + 7 * length + side)
    drawn = torch.randn(length, NUM, generator=generator, dtype=torch.float64, device="cpu")
    return widest(drawn.to(device, torch.float32 if device.type == "mps" else None))


def is_seen(parameter: Tensor) -> bool:
    """True for a floating-point parameter whose directions are small beside it."""
    row = parameter.shape[1:].numel() if parameter.ndim > 1 else parameter.numel()
    return parameter.is_floating_point() and row <= LONGEST


@torch.no_grad()
def project(gradient: Any, whole: torch.Size | None = None, starts: Sequence[int] = ()) -> Tensor:
    """`NUM` projections <r, gradient>; each r is the product of a column and a row, so that none is as large.

    Of a block of a gradient, `whole` is the shape of all, and `starts` are where it begins along each dimension. In
    float64, a piece at a time: neither autocast nor a setting of matrix products makes it less precise.
    """
    whole, shape, kind = whole or gradient.shape, gradient.shape, gradient.device
    starts = starts or [0] * len(whole)
    if len(whole) < 2:
        right = directions(max(1, whole.numel()), 1, kind)[sum(starts) : sum(starts) + gradient.numel()]
        return torch.mv(right.T, widest(gradient.reshape(-1)))
    left = directions(whole[0], 0, kind)[starts[0] : starts[0] + shape[0]]
    right = directions(whole[1:].numel(), 1, kind)
    if shape[1:] != whole[1:]:
        right = right.view(*whole[1:], NUM)
        for dim, (start, length) in enumerate(zip(starts[1:], shape[1:], strict=True)):
            right = right.narrow(dim, start, length)
        right = right.reshape(-1, NUM)
    matrix = gradient.flatten(1)
    rows = max(1, PIECE // max(1, matrix.shape[1]))
    # A factor of its own for each: of a gradient of low rank, one for all might see nothing but its rounding.
    along = torch.zeros(NUM, matrix.shape[1], dtype=right.dtype, device=kind)
    for i in range(0, len(matrix), rows):
        along.addmm_(left[i : i + rows].T, widest(matrix[i : i + rows]))
    return (along * right.T).sum(1)


class Block(NamedTuple):
    """This rank's block of a DTensor: where it begins, and which of the equal copies over other ranks it is part of."""

    starts: list[int]
    copy: tuple[int, ...]
    num_copies: int


def block_of(tensor: Any) -> Block | None:
    """None where it cannot be told."""
    mesh, starts, shape = tensor.device_mesh, [0] * tensor.ndim, list(tensor.shape)
    copy, num_copies = [], 1
    for size, place, placement in zip(mesh.shape, mesh.get_coordinate(), tensor.placements, strict=True):
        if placement.is_replicate():
            copy.append(place)
            num_copies *= size
        elif type(placement).__name__ == "Shard":  # no strided one
            most = -(-shape[placement.dim] // size)
            begin = min(shape[placement.dim], most * place)
            starts[placement.dim] += begin
            shape[placement.dim] = min(most, shape[placement.dim] - begin)
        else:
            return None
    return Block(starts, tuple(copy), num_copies) if [*local(tensor).shape] == shape else None


class Part(NamedTuple):
    """A rank's receipts of one parameter: by micro-batch, and of its own copy or block of the gradient."""

    received: dict[int, Tensor]
    closed: Tensor
    copy: tuple[int, ...]


@final
class Receipt(Extension):
    """Proves every `every`-th update: each gradient is the sum of what autograd gave in the window's backwards.

    Otherwise all ranks raise at the end of the window's loop, before anything is stepped, and say which parameter it is
    and which rank's part is lost or counts twice, where a fit tells. These windows cost a projection of each gradient
    per backward and a small reduction; the others nothing. `update.notes["receipt"]` is the largest relative error.
    """

    key = "receipt"
    in_contrast = False

    def __init__(self, every: int = 100) -> None:
        if every < 1:
            raise ValueError(f"Receipt(every={every}), expected 1 or more")
        self._every = every
        self._window: Window | None = None  # that is checked
        self._sources: list[Source] = []
        self._received: list[dict[int, Tensor]] = []  # of each source, by micro-batch
        self._hooks: list[Any] = []
        self._error: float | None = None
        self._before: tuple[int, Tensor] = (-2, torch.zeros(0, device="cpu"))  # an update, and its closed receipts

    def join(self, job: Job) -> None:
        engine = self._engine = job.engine
        self._stepped = job.stepped
        why = engine.hides_norm or engine.hides_own(job.stepped())
        if engine.pipeline is not None and engine.pipeline.splits_backward:
            why = "whose schedule runs backward for weights apart"
        if why is None and any(hasattr(one, "placements") and block_of(one) is None for one in job.stepped()):
            why = "with strided shards"
        if why or "step" in engine.owns:
            raise ValueError(
                f"Receipt() with {engine.name}{'' if why is None else f', {why}'}: what autograd gives there, or the "
                "gradient that is used, cannot be seen; leave it out, or use a plain module, DDP or fully_shard over "
                "data-parallel ranks"
            )

    def begin(self, window: Window) -> None:
        self._error = None
        if window.index % self._every:
            return
        self._window = window
        self._sources = [one for one in self._engine.sources(self._stepped()) if is_seen(one.leaf)]
        self._received = [{} for _ in self._sources]
        for place, one in enumerate(self._sources):
            if one.leaf.requires_grad:
                self._hooks.append(one.leaf.register_hook(partial(self._receive, place)))

    def _receive(self, place: int, gradient: Tensor) -> None:
        if self._window is not None:
            of_place, step = self._received[place], self._window.num_done
            # No error is larger than a bound of NaN: what is sparse is not seen.
            receipt = project(gradient) if not gradient.is_sparse else torch.full((NUM,), math.nan).double()
            of_place[step] = of_place[step] + receipt if step in of_place else receipt

    def numbers(self, window: Window) -> None:
        """Compares, when gradients are final, in reductions of its own: those of the record come after a step."""
        if self._window is None:
            return
        parts, engine = list(map(self._part, range(len(self._sources)))), self._engine
        received = torch.stack([_sum(list(one.received.values())) for one in parts])
        size = torch.stack([_sum([x.norm().expand(NUM) for x in one.received.values()]) for one in parts])
        own = torch.stack([one.closed for one in parts])
        is_cut = torch.tensor([hasattr(one.parameter, "to_local") for one in self._sources])[:, None]
        shares = torch.tensor([1 / num_copies(one.parameter) for one in self._sources])[:, None]
        sums = torch.stack([received, size, own * is_cut * shares])
        if engine.peers.host_group is not None:
            dist.all_reduce(sums, group=engine.peers.host_group)
        received, size, closed = sums[0], sums[1][:, 0], torch.where(is_cut, sums[2], own)
        off = (closed * engine.divisor - received).norm(dim=1)
        least = torch.tensor([_least(one) for one in self._sources]) * engine.divisor
        bounds = torch.tensor([_bound(one) for one in self._sources])
        errors = off / size.clamp(min=1e-300)  # of what autograd gave nothing for, any gradient is infinitely off
        self._error = float(errors.max()) if len(errors) else 0.0
        wrong = ((errors > bounds) & (off > least)).nonzero().flatten().tolist()
        wrong.sort(key=lambda place: -float(errors[place]))
        before, self._before = self._before, (window.index, closed)
        if any(num for (num,) in engine.peers.gather([float(len(wrong))], everyone=True)):
            stale = before[1] if before[0] == window.index - 1 and len(before[1]) == len(closed) else None
            self._raise(window, parts, wrong, float(errors[wrong[0]]) if wrong else 0.0, stale)

    def _part(self, place: int) -> Part:
        """Takes this rank's, on the host."""
        one: Any = self._sources[place]
        gradient, closed, copy = one.parameter.grad, torch.zeros(NUM), (self._engine.peers.rank,)
        block = block_of(one.parameter) if hasattr(one.parameter, "to_local") else None
        if gradient is not None and gradient.is_sparse:
            closed = closed + math.nan
        elif gradient is not None and block is not None:
            closed = project(local(gradient), gradient.shape, block.starts)
        elif gradient is not None:
            closed = project(gradient)
        received = {step: receipt.cpu().double() for step, receipt in self._received[place].items()}
        return Part(received, closed.cpu().double(), copy if block is None else block.copy)

    def _raise(
        self, window: Window, parts: Sequence[Part], wrong: Sequence[int], worst: float, stale: Tensor | None
    ) -> None:
        """Finds out with the other ranks what it is, and raises on all."""
        peers, by_id = self._engine.peers, names_of(self._engine.models)
        # Ranks may see errors in other parameters each: in their own copies.
        union = {place: None for found in peers.gather_objects(wrong) for place in found}
        places = list(union)[:MOST]
        places = [one for one in places if parts[one].copy == parts[places[0]].copy]  # cut in the same way
        mine = (peers.global_rank, [parts[place] for place in places])
        seen: list[tuple[int, list[Part]]] = peers.gather_objects(mine)
        text = ""
        if places:
            before = None if stale is None else stale[places].flatten()
            bound = max(_bound(self._sources[place]) for place in places)
            names = shorten([by_id.get(id(self._sources[place].parameter), "a parameter") for place in union])
            text = (
                f"the gradient of {names} in update {window.index} is not the sum of what its micro-batches gave (off "
                f"by {worst:.3g}): {explain(seen, self._engine.divisor, before, window.index, bound)}"
            )
        every = list(dict.fromkeys(filter(None, peers.gather_objects((worst, text), everyone=True))))
        raise DistaccumError(
            f"{max(every)[1]}; nothing was stepped and the window is discarded. Look for what else changes or reduces "
            "gradients; updates that were not checked may have used such ones"
        )

    def end(self, window: Window, update: Update | None) -> None:
        while self._hooks:
            self._hooks.pop().remove()
        self._window, self._sources, self._received = None, [], []
        if update is not None and self._error is not None:
            update.notes[self.key] = self._error


def _sum(receipts: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(receipts)).sum(0) if receipts else torch.zeros(NUM, dtype=torch.float64, device="cpu")


def num_copies(parameter: Any) -> int:
    """The number of ranks that hold the same part of it, where it is a DTensor."""
    block = block_of(parameter) if hasattr(parameter, "to_local") else None
    return 1 if block is None else block.num_copies


def _bound(source: Source) -> float:
    return COARSE if torch.finfo(source.dtype).eps > 1e-5 else FINE


def _least(source: Source) -> float:
    """An error that underflow makes."""
    kind = torch.finfo(source.dtype)
    return kind.tiny * kind.eps * 100 * math.sqrt(max(1, source.parameter.numel()))


Given = dict[tuple[int, int], Tensor]  # receipts by rank and micro-batch


def explain(
    seen: Sequence[tuple[int, Sequence[Part]]], divisor: float, before: Tensor | None, index: int, bound: float
) -> str:
    """Says what the gradients of some parameters are instead, from all ranks' parts of them."""
    given: Given = {}
    for rank, parts in seen:
        for step in sorted({step for part in parts for step in part.received}):
            given[rank, step] = torch.cat([part.received.get(step, torch.zeros(NUM)) for part in parts])
    copies: dict[tuple[int, ...], list[tuple[int, Tensor]]] = {}
    for rank, parts in seen:
        copies.setdefault(parts[0].copy, []).append((rank, torch.cat([part.closed for part in parts])))
    found: dict[str, list[int]] = {}
    for blocks in copies.values():
        closed = torch.stack([closed for _, closed in blocks]).sum(0) * divisor
        what = _fitted(given, closed, None if before is None else before * divisor, index, bound)
        found.setdefault(what, []).extend(rank for rank, _ in blocks)
    return "; ".join(
        what if len(ranks) == len(seen) else f"on rank {', '.join(map(str, sorted(ranks)))} {what}"
        for what, ranks in found.items()
        if what
    )


def _fitted(given: Given, closed: Tensor, before: Tensor | None, index: int, bound: float) -> str:
    """Says what one copy of the gradient is instead of the sum of all that was given; "" if it is that."""
    parts = {key: one for key, one in given.items() if one.any()}
    whole = _sum(list(parts.values())) if parts else torch.zeros_like(closed)
    rest, size = closed - whole, sum(float(one.norm()) for one in parts.values())
    if rest.norm() <= bound * size:
        return ""
    of_ranks = {rank: _sum([one for (r, _), one in parts.items() if r == rank]) for rank, _ in parts}
    singles: list[tuple[Tensor, Callable[[float], str]]] = [
        (whole, lambda weight: f"it is {weight:.4g} times that"),
        *([] if before is None else [(before, lambda _: f"it still holds that of update {index - 1}")]),
        *((one, partial(_said, f"rank {rank}")) for rank, one in of_ranks.items()),
        *((one, partial(_said, f"micro-batch {step} of rank {rank}")) for (rank, step), one in parts.items()),
    ]
    factors = [float(one @ rest) / max(float(one @ one), 1e-300) for one, _ in singles]
    left = [float((rest - factor * one).norm()) for factor, (one, _) in zip(factors, singles, strict=True)]
    for (_, say), factor, off in zip(singles, factors, left, strict=True):
        if off < 0.1 * rest.norm() and off <= 3 * min(left) + 1e-6 * size:
            return say(1 + factor)
    for columns in (
        {f"rank {rank}": one for rank, one in of_ranks.items()},
        {f"micro-batch {step} of rank {rank}": one for (rank, step), one in parts.items()},
    ):
        if 0 < len(columns) < len(rest) - 2:
            basis = torch.stack(list(columns.values()), dim=1)
            weights = torch.linalg.lstsq(basis, closed, driver="gelsd").solution
            if (basis @ weights - closed).norm() < 0.05 * rest.norm():
                named = zip(columns, weights.tolist(), strict=True)
                return shorten([_said(who, weight) for who, weight in named if abs(weight - 1) > 0.05])
    if rest.norm() < 0.02 * whole.norm():
        return "each part is in it, rounded as by sums or a reduction in lower precision"
    return "it is no sum of such parts, with whatever weights"


def _said(who: str, weight: float) -> str:
    if abs(weight) < 0.05:
        return f"{who} is lost"
    return f"{who} counts twice" if abs(weight - 2) < 0.05 else f"{who} counts {weight:.3g} times"
