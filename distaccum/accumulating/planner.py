"""What a rank has for a window, before the others know of it: drawn, counted, and told to them as an offer."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from ..law.batches import Count, count_samples, widest_sample
from ..law.plan import RankReport
from ..law.shares import Reduction
from ..runs.update import Guard
from .drawing import Feed, Stream

Counts = list[tuple[float, ...]]  # of each micro-batch, by name


@dataclass(frozen=True)
class Drawn:
    micro_batches: list[Any]
    lengths: list[int] | None = None  # in samples, where they were cut
    stream: Stream | None = None  # that draws the others
    steps: int = 0  # that were wanted; 0: as many as there are
    exhausted: bool = False
    ahead: bool = False  # whether the next may be drawn before this window is over


Draw = Callable[[int], Drawn]  # for the update of an index


@dataclass
class Offered:
    """What a rank has for a window, beside what it tells the others of it."""

    offer: RankReport
    drawn: Drawn
    counts: Counts
    kept: list[int]  # micro-batches with anything that counts
    whole: list[int]  # those with all that counts
    reductions: Mapping[str, Reduction]
    guard: Guard | None
    error: Exception | None  # in drawing or counting

    def raise_error(self) -> None:
        error, self.error = self.error, None
        if error is not None:
            self.drawn = Drawn([])
            try:
                raise error
            finally:
                del error  # or its traceback would keep itself

    def again(self, _: int) -> Drawn:
        """What was drawn, for a plan made anew."""
        self.raise_error()
        return self.drawn


@dataclass
class Ahead:
    """The next window of a `windows()`, when it was drawn while the one before was at work."""

    feed: Feed
    draw: Draw
    has_failed: bool = False  # the step before it, on this rank
    offered: Offered | None = None
    rows: Callable[[], list[list[float]]] | None = None  # waits for all ranks'; None: they do not hold any more

    def drop_rows(self) -> None:
        """They do not hold any more, and their collective is not left under way: other ranks have entered it too."""
        rows, self.rows = self.rows, None
        if rows is not None:
            with suppress(RuntimeError):  # a rank is gone, which the next collective says
                rows()


def look_up(
    draw: Draw,
    index: int,
    reductions: Mapping[str, Reduction],
    counts_of: Mapping[str, Count] | None,
    guard: Guard | None,
    *,
    ready: bool,
    by_hand: Callable[[Drawn], bool],
) -> Offered:
    """What this rank has for window `index`; an error in drawing or counting is kept, for the others to hear of it.

    `counts_of` None: a sum over samples. `ready`: it could stand in with an earlier micro-batch.
    """
    drawn, counts, error = Drawn([]), Counts(), None
    try:
        drawn = draw(index)
        counts = [(float(n),) for n in drawn.lengths or []] if counts_of is None else count_all(counts_of, drawn)
    except Exception as caught:
        error = caught
    kept = [i for i, numbers in enumerate(counts) if any(numbers)]
    whole = [i for i in kept if all(counts[i])]
    offer = RankReport(
        update=index,
        steps=drawn.steps,
        num_drawn=len(drawn.micro_batches) if drawn.stream is None else drawn.stream.drawn,
        num_counted=len(kept),
        no_more_after=drawn.exhausted,
        all_terms=whole == kept,
        all_terms_in_last=whole[-1:] == kept[-1:],
        has_stand_in=ready,
        failed=error is not None,
        agrees=guard is not None,
        reduce_afterwards=by_hand(drawn),
        largest=max(drawn.lengths or [0]),
        largest_sample=0 if guard is None else widest_sample(drawn.micro_batches),
        totals=tuple(sum(numbers[j] for numbers in counts) for j in range(len(reductions))),
    )
    try:
        return Offered(offer, drawn, counts, kept, whole, reductions, guard, error)
    finally:
        del error, drawn  # or its traceback would keep this frame, and that itself and what was drawn


def count_all(counts_of: Mapping[str, Count], drawn: Drawn) -> Counts:
    """Each micro-batch's denominators by name. Counts that live on a device are read together, once."""
    values: list[Any] = []
    for count in counts_of.values():
        known = drawn.lengths if count is count_samples else None  # split knows what it cut
        values += known or [count(micro_batch) for micro_batch in drawn.micro_batches]
    if any(isinstance(value, Tensor) for value in values):
        values = read(values)
    rows = len(drawn.micro_batches)
    for i, value in enumerate(values):
        if not (type(value) in (int, float) or isinstance(value, Real)) or not 0 <= float(value) < math.inf:
            raise ValueError(
                f"count gave {value!r} for {list(counts_of)[i // rows]!r} in micro-batch {i % rows}, expected a "
                "finite number of at least 0"
            )
    numbers = [float(value) for value in values]
    return list(zip(*(numbers[i : i + rows] for i in range(0, len(numbers), rows or 1)), strict=True))


def read(values: list[Any]) -> list[Any]:
    """The values with numbers in the place of one-element tensors: one read for all of them."""
    tensors = {i: value for i, value in enumerate(values) if isinstance(value, Tensor) and value.numel() == 1}
    if not tensors:
        return values
    device = next(iter(tensors.values())).device
    wide = None if device.type == "mps" else torch.float64  # holds any whole number of another dtype
    stacked = torch.stack([tensor.detach().reshape(()).to(device, wide) for tensor in tensors.values()])
    read = dict(zip(tensors, stacked.tolist(), strict=True))
    return [read.get(i, value) for i, value in enumerate(values)]
