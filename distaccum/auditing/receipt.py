"""Receipts of gradients: a few fixed random projections, which add up like the gradients and their shards."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple, final

import torch
import torch.distributed as dist
from torch import Tensor

from ..extension import Extension
from ..job import Job
from ..law import DistaccumError
from ..norms import local, names_of, widest
from ..ranks import in_contact
from ..text import shorten
from ..update import Update
from ..window import Window
from .private import Source, sources_of

NUM = 8  # projections per gradient: as many equations for a fit of what was added up
LONGEST = 1 << 17  # numbers in a row; the directions of a longer one would take too much memory
PIECE = 1 << 20  # numbers that are cast at once
MOST = 16  # wrong parameters of which ranks exchange what each micro-batch gave
FINE, COARSE = 2e-5, 5e-2  # relative errors of rounding; in half precision
HOST: Any = {"dtype": torch.float64, "device": "cpu"}
Given = dict[tuple[int, int], Tensor]  # receipts by two of rank, micro-batch and parameter


@lru_cache(maxsize=512)
def directions(length: int, side: int, device: torch.device) -> Tensor:
    """Fixed random numbers, alike in every process, from a generator of their own on the host."""
    generator = torch.Generator(device="cpu").manual_seed(0x5EED + 7 * length + side)
    drawn = torch.randn(length, NUM, generator=generator, **HOST)
    return widest(drawn.to(device, torch.float32 if device.type == "mps" else None))


def is_seen(parameter: Tensor) -> bool:
    """True for a floating-point parameter whose rows are not too long."""
    return parameter.is_floating_point() and math.prod(parameter.shape[parameter.ndim > 1 :]) <= LONGEST


def project(gradient: Any, whole: Sequence[int] | None = None, starts: Sequence[int] = ()) -> Tensor:
    """`NUM` projections <r, gradient>; each r is the product of a column and a row, so it needs little memory.

    For a block of a gradient, `whole` is the shape of the whole, and `starts` says where the block begins in it. In
    float64, a piece at a time; autocast and settings of matrix products do not make it less precise.
    """
    gradient = gradient.detach()
    whole = tuple(whole or gradient.shape)
    starts = tuple(starts) or (0,) * len(whole)
    if len(whole) < 2:  # a vector is a column
        gradient, whole, starts = gradient.reshape(-1, 1), (math.prod(whole), 1), (sum(starts), 0)
    columns, rows = _sides(whole, starts, tuple(gradient.shape), gradient.device)
    if gradient.is_sparse:
        gradient = gradient.coalesce()
        columns, gradient = columns[:, gradient.indices()[0]], gradient.values()
    matrix = gradient.flatten(1)
    num = max(1, PIECE // max(1, matrix.shape[1]))
    # Each projection has a row of its own: one for all might see only the rounding of a gradient of low rank.
    along = rows.new_zeros(rows.shape)
    for i in range(0, len(matrix), num):
        along.addmm_(columns[:, i : i + num], widest(matrix[i : i + num]))
    return along.mul_(rows).sum(1)


@lru_cache(maxsize=512)
def _sides(
    whole: tuple[int, ...], starts: tuple[int, ...], shape: tuple[int, ...], device: torch.device
) -> tuple[Tensor, Tensor]:
    """The columns and rows of all r, cut to a block."""
    here = [slice(start, start + num) for start, num in zip(starts, shape, strict=True)]
    columns = directions(whole[0], 0, device)[here[0]]
    rows = directions(math.prod(whole[1:]), 1, device).view(*whole[1:], NUM)[tuple(here[1:])].reshape(-1, NUM)
    return columns.T, rows.T


class Block(NamedTuple):
    """This rank's block of a DTensor: where it begins, and to which of several equal copies it belongs."""

    starts: list[int]
    copy: tuple[int, ...]
    num_copies: int


def block_of(tensor: Any) -> Block | None:
    """This rank's block; None if it cannot be known, or for a tensor that is no DTensor."""
    if not hasattr(tensor, "to_local"):
        return None
    mesh, starts, shape = tensor.device_mesh, [0] * tensor.ndim, list(tensor.shape)
    copy, num_copies = [], 1
    for size, place, placement in zip(mesh.shape, mesh.get_coordinate(), tensor.placements, strict=True):
        if placement.is_replicate():
            copy.append(place)
            num_copies *= size
        elif type(placement).__name__ == "Shard":  # not a strided shard
            most = -(-shape[placement.dim] // size)
            begin = min(shape[placement.dim], most * place)
            starts[placement.dim] += begin
            shape[placement.dim] = min(most, shape[placement.dim] - begin)
        else:
            return None
    return Block(starts, tuple(copy), num_copies) if [*local(tensor).shape] == shape else None


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
        self._sources: list[Source] = []
        self._received: Given | None = None  # by micro-batch and source; None: this window is not checked
        self._hooks: list[Any] = []
        self._error: float | None = None
        self._before: dict[int, Tensor] = {}  # the gradients' receipts of the last right update, by its index

    def join(self, job: Job) -> None:
        self._job, engine = job, job.engine
        why = engine.why_no_local_grad(job.stepped())
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
        if window.index % self._every == 0:
            self._received = {}
            sources = sources_of(self._job.engine.models, self._job.stepped())
            self._sources = [source for source in sources if is_seen(source.leaf)]
            for i, one in enumerate(self._sources):
                if one.leaf.requires_grad:
                    self._hooks.append(one.leaf.register_hook(partial(_receive, window, self._received, i)))

    def numbers(self, window: Window) -> None:
        """Compares final gradients, in reductions of its own, since the record's come only with the step."""
        if self._received is None:
            return
        divisor, peers, sources = self._job.engine.divisor, self._job.engine.peers, self._sources
        used = torch.zeros(len(sources), NUM, **HOST)
        given = torch.stack([used] * (window.num_done + 1))  # by micro-batch
        for where, receipt in self._received.items():
            given[where] = receipt
        # Blocks of all ranks add up; a whole gradient is this rank's own copy.
        blocks = [block_of(one.parameter) or Block([], (peers.rank,), 0) for one in sources]
        share = torch.tensor([one.num_copies and 1 / one.num_copies for one in blocks], **HOST)[:, None]
        for i, one in enumerate(sources):
            if one.parameter.grad is not None:
                used[i] = divisor * project(local(one.parameter.grad), one.parameter.shape, blocks[i].starts)
        sums = torch.cat([given.sum(0), used * share, given.norm(dim=2).sum(0)[:, None]], dim=1)
        if peers.host_group is not None:
            with in_contact():
                dist.all_reduce(sums, group=peers.host_group)
        closed = torch.where(share > 0, sums[:, NUM:-1], used)
        off, size = (closed - sums[:, :NUM]).norm(dim=1), sums[:, -1]
        errors = off / size.clamp(min=1e-300)  # if autograd gave nothing, any gradient is infinitely off
        bounds, least = torch.tensor([_bounds(one) for one in sources], **HOST).view(-1, 2).T
        self._error = float(errors.max()) if len(errors) else 0.0
        wrong = torch.where((errors > bounds) & (off > least * divisor), errors, 0)
        if any(most for (most,) in peers.gather([float(wrong.sum())], everyone=True)):
            self._raise(window.index, wrong, given, used, [one.copy for one in blocks])
        self._before = {window.index: closed}

    def _raise(self, index: int, wrong: Tensor, given: Tensor, used: Tensor, copies: list[Any]) -> None:
        """Finds the reason together with the other ranks, and raises on all of them."""
        peers, by_id = self._job.engine.peers, names_of(self._job.models)
        errors = torch.stack(peers.gather_objects(wrong)).amax(0)  # an error in a rank's own copy is seen by no other
        found = [i for i in errors.argsort(descending=True).tolist() if errors[i]]
        some = [i for i in found[:MOST] if copies[i] == copies[found[0]]]  # only those that are cut in the same way
        mine = peers.global_rank, [copies[i] for i in some[:1]], given[:, some].flatten(1), used[some].flatten()
        seen, said = peers.gather_objects(mine), ""
        if some:
            parts = {(rank, step): row for rank, _, rows, _ in seen for step, row in enumerate(rows) if row.any()}
            closed = torch.stack([one for _, copy, _, one in seen if copy == mine[1]]).sum(0)
            before = self._before.get(index - 1)
            stale = None if before is None or len(before) != len(used) else before[some].flatten()
            said = explain(parts, closed, stale, index, max(_bounds(self._sources[i])[0] for i in some))
        names = shorten([by_id.get(id(self._sources[i].parameter), "a parameter") for i in found])
        # Each stage of a pipeline may have found something.
        every = peers.gather_objects((max(errors.tolist(), default=0.0), names, peers.global_rank, said), everyone=True)
        most, names, *_ = max(every)
        by_text: dict[str, list[str]] = {}
        for _, named, rank, said in every:
            if named == names:
                by_text.setdefault(said, []).append(str(rank))
        texts = [one if len(by_text) == 1 else f"on rank {', '.join(on)} {one}" for one, on in by_text.items() if one]
        raise DistaccumError(
            f"the gradient of {names} in update {index} is not the sum of what its micro-batches gave (off by "
            f"{most:.3g}): {'; '.join(texts)}; nothing was stepped and the window is discarded. Look for what else "
            "changes or reduces gradients; updates that were not checked may have used such ones"
        )

    def end(self, window: Window, update: Update | None) -> None:
        while self._hooks:
            self._hooks.pop().remove()
        if update is not None and self._error is not None:
            update.notes[self.key] = self._error
        self._sources, self._received, self._error = [], None, None


def _receive(window: Window, received: Given, place: int, gradient: Tensor) -> None:
    where, receipt = (window.num_done, place), project(gradient)
    received[where] = received[where] + receipt if where in received else receipt


def _bounds(source: Source) -> tuple[float, float]:
    """The relative error of rounding, and the absolute error of underflow."""
    kind = torch.finfo(source.dtype)
    return COARSE if kind.eps > 1e-5 else FINE, kind.tiny * kind.eps * 100 * math.sqrt(source.parameter.numel())


def explain(given: Given, closed: Tensor, before: Tensor | None, index: int, bound: float) -> str:
    """Says how a gradient differs from the sum of all that was given, by rank and micro-batch; "" if it does not."""
    whole = torch.stack([torch.zeros_like(closed), *given.values()]).sum(0)
    rest, size = closed - whole, sum(float(one.norm()) for one in given.values())
    if rest.norm() <= bound * size:
        return ""
    by_step = {f"micro-batch {step} of rank {rank}": one for (rank, step), one in given.items()}
    by_rank: dict[str, Any] = {f"rank {r}": sum(row for (one, _), row in given.items() if one == r) for r, _ in given}
    stale = {} if before is None else {f"it still holds that of update {index - 1}": before}
    times = {f"it is {float(closed @ whole / (whole @ whole)):.4g} times that": whole}
    singles = [{who: one} for who, one in (times | stale | by_rank | by_step).items()]
    for several, most in (singles, 0.1), ([by_rank], 0.05), ([by_step], 0.05):
        fits = []
        for columns in several:
            if 0 < len(columns) < len(rest) - 2:
                basis = torch.stack(list(columns.values()), dim=1)
                more = torch.linalg.lstsq(basis, rest, driver="gelsd").solution
                weights = dict(zip(columns, more.tolist(), strict=True))
                fits.append((float((basis @ more - rest).norm()), weights))
        for off, weights in fits:
            if off < most * rest.norm() and off <= 3 * min(one for one, _ in fits) + 1e-6 * size:
                least = min(0.05, max(map(abs, weights.values())) / 2)
                return shorten([_said(*one) for one in weights.items() if len(weights) == 1 or abs(one[1]) > least])
    if rest.norm() < 0.02 * whole.norm():
        return "each part is in it, rounded as by sums or a reduction in lower precision"
    return "it is no sum of such parts, with whatever weights"


def _said(who: str, more: float) -> str:
    if who.startswith("it "):
        return who
    if abs(1 + more) < 0.05:
        return f"{who} is lost"
    return f"{who} counts twice" if abs(more - 1) < 0.05 else f"{who} counts {1 + more:.3g} times"
