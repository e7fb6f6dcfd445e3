"""A rank's micro-batches for a window: cut from a batch, given as a list, or fed from a loader; and its report."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, final

import torch
from torch import Tensor

from ..cutting import (
    Columns,
    Count,
    Names,
    count_samples,
    cut_batch,
    cut_entries,
    fingerprint,
    largest_sample,
    pick_rows,
    tensors_in,
)
from ..engines import Engine
from ..feeding.by_cost import ByCost, cost_of_group, costs_of_rows, group_by_cost
from ..law import Once, RankReport, cut_evenly
from ..sizes import MicroBatchSize
from ..window.source import Counts
from .config import Config

NUMBERS = {int, float}


@dataclass
class Batches:
    """This rank's micro-batches of one window."""

    micro_batches: list[Any]
    lengths: list[int] | None = None  # in samples, where a batch was cut
    costs: list[int] | None = None  # where it was cut by cost
    warnings: dict[str, str] = field(default_factory=dict)  # by what each is about
    steps: int = 0  # that were requested; 0: any number
    no_more_after: bool = False

    @property
    def largest(self) -> int:
        """Of the micro-batches that could be smaller, in samples or in cost."""
        if self.costs is None:
            return max(self.lengths or [0])
        return max((cost for cost, rows in zip(self.costs, self.lengths or [], strict=True) if rows > 1), default=1)


Group = Callable[[Sequence[int], int], list[list[int]]]  # costs of rows, the most -> the rows of each micro-batch
Drawing = Callable[[int], Batches]  # for the update of an index
Seen = dict[tuple[Any, ...], bool]  # by the place in a batch, whether it was cut or whole


def cut_up(
    batch: Any,
    config: Config,
    size: MicroBatchSize,
    seen: Seen,
    columns: Columns,
    parts: int = 1,
    *,
    group: Group = group_by_cost,
) -> Drawing:
    """A batch, in the fewest parts that fit, or in `steps` parts; by cost in what `group` makes of its rows."""

    def draw(index: int) -> Batches:
        total = columns.length_of(batch)
        if config.by_cost is not None:
            found = _by_cost(batch, total, config.by_cost, size, parts, columns.whole, group)
        else:
            steps = config.steps_at(index)
            largest = size.size or max(total, 1)
            sizes = cut_evenly(total, parts=max(steps or parts, -(-total // largest)))
            cut = cut_batch(batch, sizes, total, columns.whole)
            found = Batches(list(cut), lengths=sizes, steps=steps or 0)
        if len(found.micro_batches) > 1:
            found.warnings |= _changed(seen, cut_entries(batch, total, columns.whole), total)
        return found

    return draw


def _changed(seen: Seen, entries: Seen, total: int) -> dict[str, str]:
    """Warnings of entries that are cut and were whole before, or the reverse; what is new is noted in `seen`."""
    found = {}
    for place, is_cut in entries.items():
        if seen.setdefault(place, is_cut) != is_cut and place:
            here = ".".join(map(str, place))
            now, before = (
                ("is cut", "went whole to each micro-batch")
                if is_cut
                else ("goes whole to each micro-batch", "was cut")
            )
            can_be_named = len(place) == 1 or isinstance(place[-1], str)
            name = f"whole=({place[-1]!r},)" if can_be_named else "whole= (in a dict, under a name of its own)"
            found[f"cut {here}"] = (
                f"{here!r} {now} in a batch of {total} samples, and {before} in an earlier one: its length is that of "
                f"the batch by chance, now or then. Where its rows are no samples say {name}, in split(), update(), "
                "contrast() and check()"
            )
    return found


def _by_cost(
    batch: Any, total: int, by: ByCost, size: MicroBatchSize, parts: int, whole: Names, group: Group
) -> Batches:
    """`parts`: at least that many, where there are as many rows."""
    costs = costs_of_rows(by.cost, batch, total, whole)
    most = max(costs, default=0)
    at_once = len(costs) * most
    groups = group(costs, min(size.size or max(1, at_once), max(1, -(-at_once // parts))))
    micro_batches = list(pick_rows(batch, groups, total, whole)) if groups else []
    found = Batches(micro_batches, [len(rows) for rows in groups], [cost_of_group(costs, rows) for rows in groups])
    if by.trim is not None:
        found.micro_batches = list(map(by.trim, micro_batches))
    if by.most != "auto" and most > by.most:
        found.warnings["cost"] = f"a row costs {most}, more than the {by.most} of ByCost; such rows go alone"
    return found


@dataclass
class Candidate:
    """A window as this rank would have it, before it knows of the others."""

    report: RankReport
    batches: Batches
    counts: list[Counts]
    pieces: list[list[Counts]]  # of each micro-batch, those that it is run in
    counted: list[int]  # micro-batches with anything that counts
    full: list[int]  # those with a count for each name
    error: Exception | None  # of drawing or counting

    def raise_error(self) -> None:
        error, self.error = self.error, None
        if error is not None:
            self.batches = Batches([])
            try:
                raise error
            finally:
                del error  # or its traceback would keep itself


def candidate_of(
    draw: Drawing,
    index: int,
    counts_of: Mapping[str, Count] | None,
    *,
    engine: Engine,
    has_stand_in: bool,
    agrees: bool,
    reduces_afterwards: Callable[[Batches], bool] | None,
    may_wait: bool = True,
) -> Candidate:
    """This rank's micro-batches for window `index`; an error is kept until the other ranks have its report.

    `counts_of` None: a sum over samples. `has_stand_in`: it has a micro-batch of an earlier window. What counts nothing
    is left out, but not where other ranks have parts of it. Raises WouldWait for a device if it may not wait.
    """
    counts, pieces = list[Counts](), list[list[Counts]]()
    batches, error, peers = None, None, engine.peers
    compares = peers.shares_samples or peers.has_parts
    try:
        batches = draw(index)
        if counts_of is None:
            counts = [(float(n),) for n in batches.lengths or []]
        elif engine.pipeline is None:
            counts = count_all(counts_of, batches, may_wait=may_wait)
        else:
            pieces = count_pieces(counts_of, batches.micro_batches, engine.pieces, may_wait=may_wait)
            counts = [tuple(map(sum, zip(*of_pieces, strict=True))) for of_pieces in pieces]
        if compares and not may_wait:
            refuse_to_wait(batches.micro_batches[:1])
    except Exception as caught:
        if isinstance(caught, WouldWait):
            raise
        batches, error = batches or Batches([]), caught
        peers.tell(caught)
    counted = [i for i, numbers in enumerate(counts) if any(numbers) or peers.has_parts]
    has_several = counts_of is not None and len(counts_of) > 1
    full = [i for i in counted if all(counts[i]) or peers.has_parts] if has_several else counted
    report = RankReport(
        update=index,
        steps=batches.steps,
        num_drawn=len(batches.micro_batches),
        num_counted=len(counted),
        no_more_after=batches.no_more_after,
        all_terms=full == counted,
        all_terms_in_last=full[-1:] == counted[-1:],
        has_stand_in=has_stand_in,
        failed=error is not None,
        agrees=agrees,
        reduce_afterwards=reduces_afterwards is not None and reduces_afterwards(batches),
        largest=0 if batches.lengths is None else batches.largest,
        largest_sample=largest_sample(batches.micro_batches) if agrees else 0,
        fingerprint=fingerprint(batches.micro_batches[:1]) if compares else 0,
        totals=tuple(map(sum, zip(*counts, strict=True))) or (0.0,) * (1 if counts_of is None else len(counts_of)),
    )
    try:
        return Candidate(report, batches, counts, pieces, counted, full, error)
    finally:
        del error, batches  # or its traceback would keep this frame, and that itself and what was drawn


class WouldWait(Exception):  # noqa: N818  # it never leaves this library
    """Numbers are on a device, and nobody shall wait for it now."""


def refuse_to_wait(values: Any) -> None:
    """Raises WouldWait where a tensor is not on the host."""
    if any(not tensor.is_cpu for _, tensor in tensors_in(values)):
        raise WouldWait


def count_all(counts_of: Mapping[str, Count], batches: Batches, *, may_wait: bool = True) -> list[Counts]:
    """Each micro-batch's denominators by name. Counts that live on a device are read together, once."""
    values: list[Any] = []
    for count in counts_of.values():
        known = batches.lengths if count is count_samples else None  # split knows what it cut
        values += known or [count(micro_batch) for micro_batch in batches.micro_batches]
    rows = len(batches.micro_batches)
    numbers: list[float] = []
    for value in values if NUMBERS.issuperset(map(type, values)) else _read(values, may_wait):
        is_number = type(value) in (int, float) or isinstance(value, Real)
        if not is_number or not 0 <= (number := float(value)) < math.inf:
            name, place = divmod(len(numbers), rows)
            raise ValueError(
                f"count gave {value!r} for {list(counts_of)[name]!r} in micro-batch {place}, expected a finite number "
                "of at least 0"
            )
        numbers.append(number)
    return [tuple(numbers[i::rows]) for i in range(rows)]


def count_pieces(
    counts_of: Mapping[str, Count],
    micro_batches: Sequence[Any],
    pieces_of: Callable[[Sequence[Any]], list[list[Any]]],
    *,
    may_wait: bool,
) -> list[list[Counts]]:
    """The denominators of what each micro-batch is run in."""
    cut = pieces_of(micro_batches)
    counts = iter(count_all(counts_of, Batches([piece for pieces in cut for piece in pieces]), may_wait=may_wait))
    return [[next(counts) for _ in pieces] for pieces in cut]


def _read(values: list[Any], may_wait: bool) -> list[Any]:
    """The values with numbers in the place of one-element tensors: one read for all of them."""
    tensors = {i: value for i, value in enumerate(values) if isinstance(value, Tensor) and value.numel() == 1}
    if not tensors:
        return values
    if not may_wait:
        refuse_to_wait(list(tensors.values()))
    device = next(iter(tensors.values())).device
    wide = None if device.type == "mps" else torch.float64  # holds any whole number of another dtype
    stacked = torch.stack([tensor.detach().reshape(()).to(device, wide) for tensor in tensors.values()])
    numbers = dict(zip(tensors, stacked.tolist(), strict=True))
    return [numbers.get(i, value) for i, value in enumerate(values)]


@final
class Take:
    """How many items of a loader an update takes, and its micro-batches made of them."""

    def __init__(self, config: Config, size: MicroBatchSize, seen: Seen, ranks: int, once: Once) -> None:
        self._config, self._size, self._seen, self._ranks, self._once = config, size, seen, ranks, once

    def num(self, index: int) -> int:
        if self._config.by_cost is not None:
            return 1  # which is cut
        steps, warning = self._config.grouped_at(index, self._ranks)
        if warning is not None:
            self._once("batch_size", warning)
        return steps

    def batches(self, items: list[Any], index: int, *, is_last: bool, ahead: bool) -> Batches:
        """The micro-batches of update `index`; `is_last`: the loader has no more. As in `candidate_of`, not to wait."""
        if self._config.by_cost is None:
            return Batches(items, steps=self.num(index), no_more_after=is_last)
        if ahead:
            refuse_to_wait(items)  # costs are read
        batches = cut_up(items[0], self._config, self._size, self._seen, Columns())(index) if items else Batches([])
        batches.no_more_after = is_last
        return batches
