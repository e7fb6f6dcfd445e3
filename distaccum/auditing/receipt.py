"""Receipts of gradients: a few fixed random projections, which add up like the gradients and their shards."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import lru_cache, partial
from typing import Any, final

import torch
from torch import Tensor

from ..extension import Extension
from ..job import Job
from ..law import DistaccumError
from ..norms import local, names_of, widest
from ..text import shorten
from ..update import Update
from ..window import Window
from .private import Source, sources_of, starts_of

NUM = 8  # projections per gradient: as many equations for a fit of what was added up
LONGEST = 1 << 17  # numbers in a row; the directions of a longer one would take too much memory
PIECE = 1 << 20  # numbers that are cast at once
MOST = 16  # wrong parameters of which ranks exchange what each micro-batch gave
FINE, COARSE = 2e-5, 5e-2  # relative errors of rounding; in half precision
HOST: Any = {"dtype": torch.float64, "device": "cpu"}
Parts = Mapping[tuple[int, int], Tensor]  # receipts by rank and micro-batch


@lru_cache(maxsize=512)
def directions(length: int, side: int, device: torch.device) -> Tensor:
    """Fixed random numbers, alike in every process, from a generator of their own on the host."""
    generator = torch.Generator(device="cpu").manual_seed(0x5EED + 7 * length + side)
    drawn = torch.randn(length, NUM, generator=generator, **HOST)
    return widest(drawn.to(device, torch.float32 if device.type == "mps" else None))


def is_seen(parameter: Tensor) -> bool:
    """True for a floating-point parameter whose rows are not too long."""
    return parameter.is_floating_point() and math.prod(parameter.shape[parameter.ndim > 1 :]) <= LONGEST


def project(gradient: Any, is_fine: bool = True) -> Tensor:
    """`NUM` projections <r, gradient>; each r is the product of a column and a row, so it needs little memory.

    Those of a DTensor are of this rank's block of it. In float64, a piece at a time; autocast and settings of matrix
    products do not make it less precise. On the host, single precision is enough unless it `is_fine`.
    """
    if not gradient.ndim:
        gradient = gradient.reshape(1)
    whole, starts, gradient = gradient.shape, starts_of(gradient), local(gradient.detach())
    is_single = not is_fine and gradient.dtype == torch.float32 and gradient.device.type == "cpu"
    is_single &= torch.get_float32_matmul_precision() == "highest" and not torch.is_autocast_enabled("cpu")
    columns, rows = _sides(whole, starts, gradient.shape, gradient.device, torch.float32 if is_single else None)
    if gradient.is_sparse:
        gradient = gradient.coalesce()
        columns, gradient = columns[:, gradient.indices()[0]], gradient.values()
    matrix = gradient.reshape(len(gradient), rows.shape[1])
    # Each projection has a row of its own: one for all might see only the rounding of a gradient of low rank.
    along = torch.zeros_like(rows)
    num = max(1, PIECE // max(1, rows.shape[1]))
    for i in range(0, len(matrix), num):
        piece = matrix[i : i + num]
        along.addmm_(columns[:, i : i + num], piece if is_single else widest(piece))
    return widest(along.mul_(rows)).sum(1)


@lru_cache(maxsize=512)
def _sides(
    whole: tuple[int, ...],
    starts: tuple[int, ...],
    shape: tuple[int, ...],
    device: torch.device,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
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
        self._received: dict[tuple[int, int], Tensor] | None = None  # by micro-batch and source, if this is checked
        self._hooks: list[Any] = []
        self._error: float | None = None
        self._before: dict[int, Tensor] = {}  # the gradients' receipts of the last right update, by its index

    def join(self, job: Job) -> None:
        self._job, engine = job, job.engine
        why = engine.why_no_local_grad(job.stepped())
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
            for i, source in enumerate(self._sources):
                if source.leaf.requires_grad:
                    receive = partial(_receive, window, self._received, i)
                    self._hooks.append(source.leaf.register_hook(receive))

    def numbers(self, window: Window) -> None:
        """Compares final gradients, in reductions of its own, since the record's come only with the step."""
        if self._received is None:
            return
        divisor, peers, sources = self._job.engine.divisor, self._job.engine.peers, self._sources
        given = torch.zeros(window.num_done + 1, len(sources), NUM, **HOST)  # by micro-batch
        used = torch.zeros_like(given[0])
        for where, receipt in self._received.items():
            given[where] = receipt
        for i, source in enumerate(sources):
            if source.parameter.grad is not None:
                used[i] = divisor * project(source.parameter.grad)
        # Blocks of all ranks add up; a whole gradient is this rank's own copy.
        copies = torch.tensor([num_copies(source.parameter) for source in sources], **HOST)[:, None]
        sums = torch.cat([given.sum(0), used, given.norm(dim=2).sum(0)[:, None]], dim=1)
        peers.sum_parts(sums)
        closed = torch.where(copies > 0, sums[:, NUM:-1] / copies, used)
        off, size = (closed - sums[:, :NUM]).norm(dim=1), sums[:, -1]
        errors = off / size.clamp(min=1e-300)  # if autograd gave nothing, any gradient is infinitely off
        bounds, least = torch.tensor([_bounds(source) for source in sources], **HOST).view(-1, 2).T
        self._error = float(errors.max()) if len(errors) else 0.0
        wrong = torch.where((errors > bounds) & (off > least * divisor), errors, 0)
        if any(most for (most,) in peers.gather([float(wrong.sum())], everyone=True)):
            self._raise(window.index, wrong, given, closed)
        self._before = {window.index: closed}

    def _raise(self, index: int, wrong: Tensor, given: Tensor, closed: Tensor) -> None:
        """Finds the reason together with the other ranks, and raises on all of them."""
        peers, by_id = self._job.engine.peers, names_of(self._job.models)
        errors = torch.stack(peers.gather_objects(wrong)).amax(0)  # an error in a rank's own copy is seen by no other
        places = [i for i in errors.argsort(descending=True).tolist() if errors[i]]
        some = places[:MOST]
        of_ranks = peers.gather_objects((peers.global_rank, given[:, some].flatten(1)))
        parts = {(rank, step): row for rank, rows in of_ranks for step, row in enumerate(rows) if row.any()}
        before = self._before.get(index - 1)
        stale = None if before is None or len(before) != len(closed) else before[some].flatten()
        bound = max((_bounds(self._sources[i])[0] for i in some), default=0.0)
        said = explain(parts, closed[some].flatten(), stale, index, bound)
        names = shorten([by_id.get(id(self._sources[i].parameter), "a parameter") for i in places])
        # Each stage of a pipeline may have found something.
        every = peers.gather_objects((max(errors.tolist(), default=0.0), names, peers.global_rank, said), everyone=True)
        most, names, *_ = max(every)
        by_text: dict[str, list[str]] = {}
        for _, named, rank, said in every:
            if named == names:
                by_text.setdefault(said, []).append(str(rank))
        texts = [
            text if len(by_text) == 1 else f"on rank {', '.join(on)} {text}" for text, on in by_text.items() if text
        ]
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


def _receive(window: Window, received: dict[tuple[int, int], Tensor], place: int, gradient: Tensor) -> None:
    where = window.num_done, place
    received[where] = received.get(where, 0) + project(gradient)


def _bounds(source: Source) -> tuple[float, float]:
    """The relative error of rounding, and the absolute error of underflow."""
    kind = torch.finfo(source.dtype)
    return COARSE if kind.eps > 1e-5 else FINE, kind.tiny * kind.eps * 100 * math.sqrt(source.parameter.numel())


def fit(columns: Iterable[Tensor], target: Tensor) -> tuple[Tensor, float]:
    """The weights with which the columns add up to the target, as nearly as can be, and the norm of what is left."""
    basis = torch.stack([*columns], dim=1)
    weights = torch.linalg.lstsq(basis, target, driver="gelsd").solution
    return weights, float((basis @ weights - target).norm())


def explain(parts: Parts, closed: Tensor, before: Tensor | None, index: int, bound: float) -> str:
    """Says how a gradient differs from the sum of all its parts; "" if it does not."""
    whole = torch.stack([torch.zeros_like(closed), *parts.values()]).sum(0)
    rest, size = closed - whole, sum(float(part.norm()) for part in parts.values())
    if rest.norm() <= bound * size:
        return ""
    by_step = {f"micro-batch {step} of rank {rank}": part for (rank, step), part in parts.items()}
    by_rank = {f"rank {r}": torch.stack([part for (rank, _), part in parts.items() if rank == r]) for r, _ in parts}
    by_rank = {who: of_steps.sum(0) for who, of_steps in by_rank.items()}
    singles = {f"it is {float(closed @ whole / (whole @ whole)):.4g} times that": whole}
    singles |= {} if before is None else {f"it still holds that of update {index - 1}": before}
    alone = [{who: part} for who, part in (singles | by_rank | by_step).items()]
    for every, most in (alone, 0.1), ([by_rank], 0.05), ([by_step], 0.05):
        candidates = [columns for columns in every if 0 < len(columns) < len(rest) - 2]
        fits = [fit(columns.values(), rest) for columns in candidates]
        for columns, (weights, off) in zip(candidates, fits, strict=True):
            if off < most * rest.norm() and off <= 3 * min(other for _, other in fits) + 1e-6 * size:
                least = min(0.05, float(weights.abs().max()) / 2)
                more = zip(columns, weights.tolist(), strict=True)
                return shorten([_said(who, weight) for who, weight in more if abs(weight) > least])
    if rest.norm() < 0.02 * whole.norm():
        return "each part is in it, rounded as by sums or a reduction in lower precision"
    return "it is no sum of such parts, with whatever weights"


def _said(who: str, more: float) -> str:
    if who.startswith("it "):
        return who
    if abs(1 + more) < 0.05:
        return f"{who} is lost"
    return f"{who} counts twice" if abs(more - 1) < 0.05 else f"{who} counts {1 + more:.3g} times"
