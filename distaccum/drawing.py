"""Drawing: this rank's part of a window, cut or taken, counted, and reported."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from .cutting import (
    Columns,
    Count,
    count_samples,
    cut_batch,
    cut_entries,
    fingerprint,
    largest_sample,
    tensors_in,
)
from .job import Counts, Hooks, Job, Micro, Seen
from .law import RankReport, cut_evenly


@dataclass(frozen=True)
class Manner:
    """How a window is run."""

    hooks: Hooks | None = None  # None: those of the accumulator's extensions
    agrees: bool = False  # ranks agree before they reduce
    is_sum: bool = False  # its loss is a sum over samples, whatever the accumulator's reductions say
    by_hand: bool = False  # no backward reduces


LOOP = Manner()


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
        """The size of the largest micro-batch that could be smaller, in samples or in cost."""
        if self.costs is None:
            return max(self.lengths or [0])
        return max((cost for cost, rows in zip(self.costs, self.lengths or [], strict=True) if rows > 1), default=1)


Make = Callable[[int], Batches]  # for the update of an index


def cut_up(batch: Any, job: Job, columns: Columns, parts: int = 1, *, in_order: bool = False) -> Make:
    """A batch, in the fewest parts that fit, or in `steps` parts; `in_order`: also where rows are cut by their cost.

    `parts`: at least that many, where there are as many rows.
    """

    def make(index: int) -> Batches:
        total, most, by = columns.length_of(batch), job.size.size, job.config.by_cost
        if by is not None:
            parted, lengths, costs, warning = by.cut(batch, total, most, parts, columns.whole, in_order=in_order)
            found = Batches(parted, lengths, costs, {} if warning is None else {"cost": warning})
        else:
            steps = job.config.steps_at(index)
            sizes = cut_evenly(total, parts=max(steps or parts, -(-total // (most or max(total, 1)))))
            found = Batches(list(cut_batch(batch, sizes, total, columns.whole)), lengths=sizes, steps=steps or 0)
        if len(found.micro_batches) > 1:
            found.warnings |= _changed(job.seen, cut_entries(batch, total, columns.whole), total)
        return found

    return make


def _changed(seen: Seen, entries: Seen, total: int) -> dict[str, str]:
    """Warnings of entries that are cut and were whole before, or the reverse; what is new is noted in `seen`."""
    found = {}
    for place, is_cut in entries.items():
        if seen.setdefault(place, is_cut) != is_cut and place:
            here = ".".join(map(str, place))
            forms = "is cut", "went whole to each micro-batch", "goes whole to each micro-batch", "was cut"
            now, before = forms[:2] if is_cut else forms[2:]
            can_be_named = len(place) == 1 or isinstance(place[-1], str)
            name = f"whole=({place[-1]!r},)" if can_be_named else "whole= (in a dict, under a name of its own)"
            found[f"cut {here}"] = (
                f"{here!r} {now} in a batch of {total} samples, and {before} in an earlier one: its length is that of "
                f"the batch by chance, now or then. Where its rows are no samples say {name}, in split(), update(), "
                "contrast() and check()"
            )
    return found


def group_items(job: Job, items: list[Any], num: int, index: int, *, is_last: bool, ahead: bool) -> Batches:
    """The micro-batches of update `index`, of up to `num` items of a loader; `is_last`: it has no more."""
    if job.config.by_cost is None:
        return Batches(items, steps=num, no_more_after=is_last)
    if ahead:
        refuse_to_wait(items)  # costs are read
    batches = cut_up(items[0], job, Columns())(index) if items else Batches([])
    batches.no_more_after = is_last
    return batches


def num_items(job: Job, index: int) -> int:
    """The items of a loader that update `index` takes."""
    if job.config.by_cost is not None:
        return 1  # which is cut
    steps, warning = job.config.grouped_at(index, len(job.engine.peers.parts))
    if warning is not None:
        job.once("batch_size", warning)
    return steps


@dataclass
class Draw:
    """This rank's part of a window, before it knows of the others."""

    report: RankReport
    micros: list[Micro]  # those in which anything counts
    spare: Micro | None  # the last of them with a count for each name: what this rank can stand in with
    warnings: dict[str, str]
    error: Exception | None  # of drawing or counting, until the other ranks have the report

    def raise_error(self) -> None:
        error, self.error = self.error, None
        if error is not None:
            self.micros = []
            try:
                raise error
            finally:
                del error  # or its traceback would keep itself

    def warn(self, job: Job) -> None:
        for about, warning in self.warnings.items():
            job.once.on_each_rank(about, warning)


class WouldWait(Exception):  # noqa: N818  # it never leaves this library
    """Numbers are on a device, and nobody shall wait for it now."""


def draw(job: Job, make: Make, index: int, manner: Manner = LOOP, *, ahead: bool = False) -> Draw:
    """Counts what `make` gives for update `index`; keeps an error until the other ranks have the report.

    What counts nothing is left out, but not where other ranks have parts of it. Raises WouldWait if it is `ahead` of
    its time and would have to wait for a device.
    """
    engine, peers = job.engine, job.engine.peers
    batches, counts, pieces, error = Batches([]), list[Counts](), list[list[Counts]](), None
    compares = peers.shares_samples or peers.has_parts
    try:
        batches = make(index)
        if manner.is_sum:
            counts = [(float(n),) for n in batches.lengths or []]
        elif engine.pipeline is None:
            counts = _counts_of(job.config.counts, batches, ahead)
        else:
            pieces = _count_pieces(job, batches.micro_batches, ahead)
            counts = [tuple(map(sum, zip(*of_pieces, strict=True))) for of_pieces in pieces]
        if compares and ahead:
            refuse_to_wait(batches.micro_batches[:1])
    except WouldWait:
        raise
    except Exception as caught:
        error = caught
        peers.tell(caught)
    keeps = peers.has_parts
    micros = [
        Micro(batch, own, number, pieces[number] if pieces else ())
        for number, (batch, own) in enumerate(zip(batches.micro_batches, counts, strict=False))
        if keeps or any(own)
    ]
    has_several = not manner.is_sum and len(job.config.counts) > 1
    full = [one for one in micros if all(one.counts) or keeps] if has_several else micros
    report = RankReport(
        update=index,
        steps=batches.steps,
        num_drawn=len(batches.micro_batches),
        num_counted=len(micros),
        no_more_after=batches.no_more_after,
        all_terms=len(full) == len(micros),
        all_terms_in_last=not micros or (bool(full) and full[-1] is micros[-1]),
        has_stand_in=job.spare is not None or (ahead and engine.lockstep),  # the window at work will leave one
        failed=error is not None,
        agrees=manner.agrees,
        reduce_afterwards=_reduces_by_hand(job, manner, batches),
        largest=0 if batches.lengths is None else batches.largest,
        largest_sample=largest_sample(batches.micro_batches) if manner.agrees else 0,
        fingerprint=fingerprint(batches.micro_batches[:1]) if compares else 0,
        totals=tuple(map(sum, zip(*counts, strict=True))) or (0.0,) * (1 if manner.is_sum else len(job.config.counts)),
    )
    try:
        spare = replace((full or micros)[-1]) if micros and engine.lockstep else None  # which keeps its batch
        return Draw(report, micros, spare, batches.warnings, error)
    finally:
        del error, batches  # or its traceback would keep this frame, and that itself and what was drawn


def _reduces_by_hand(job: Job, manner: Manner, batches: Batches) -> bool:
    """Returns whether no backward may reduce: in update(), until it is known that micro-batches like these fit.

    Where ranks are in step a failure on one cannot be undone either way, and the requested size is believed.
    """
    if manner.by_hand or job.engine.pipeline is not None:
        return True
    is_auto = job.config.most == "auto" and "gathered" in job.engine.policies
    if not manner.agrees or (job.forwards_communicate and not is_auto):
        return False
    return not job.size.is_proven(batches.largest, largest_sample(batches.micro_batches))


def refuse_to_wait(values: Any) -> None:
    """Raises WouldWait where a tensor is not on the host."""
    if any(not tensor.is_cpu for _, tensor in tensors_in(values)):
        raise WouldWait


def _counts_of(counts_of: Mapping[str, Count], batches: Batches, ahead: bool) -> list[Counts]:
    """Each micro-batch's denominators by name. Counts that live on a device are read together, once."""
    values: list[Any] = []
    for count in counts_of.values():
        known = batches.lengths if count is count_samples else None  # split knows what it cut
        values += known or [count(micro_batch) for micro_batch in batches.micro_batches]
    rows = len(batches.micro_batches)
    numbers: list[float] = []
    are_numbers = {int, float}.issuperset(map(type, values))
    for value in values if are_numbers else _read(values, ahead):
        if not (are_numbers or isinstance(value, Real)) or not 0 <= (number := float(value)) < math.inf:
            name, place = divmod(len(numbers), rows)
            raise ValueError(
                f"count gave {value!r} for {list(counts_of)[name]!r} in micro-batch {place}, expected a finite number "
                "of at least 0"
            )
        numbers.append(number)
    return [tuple(numbers[i::rows]) for i in range(rows)]


def _count_pieces(job: Job, micro_batches: Sequence[Any], ahead: bool) -> list[list[Counts]]:
    """The denominators of what a pipeline runs each micro-batch in."""
    cut = job.engine.pipeline.pieces(micro_batches)
    counts = iter(_counts_of(job.config.counts, Batches([piece for pieces in cut for piece in pieces]), ahead))
    return [[next(counts) for _ in pieces] for pieces in cut]


def _read(values: list[Any], ahead: bool) -> list[Any]:
    """The values with numbers in the place of one-element tensors: one read for all of them."""
    tensors = {i: value for i, value in enumerate(values) if isinstance(value, Tensor) and value.numel() == 1}
    if not tensors:
        return values
    if ahead:
        refuse_to_wait(list(tensors.values()))
    device = next(iter(tensors.values())).device
    wide = None if device.type == "mps" else torch.float64  # holds any whole number of another dtype
    stacked = torch.stack([tensor.detach().reshape(()).to(device, wide) for tensor in tensors.values()])
    numbers = dict(zip(tensors, stacked.tolist(), strict=True))
    return [numbers.get(i, value) for i, value in enumerate(values)]
