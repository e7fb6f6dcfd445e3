"""Batches: the micro-batches of a window, and how a batch is cut into them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .cutting import Columns, cut_batch, cut_entries
from .job import Job, Seen
from .law import cut_evenly


@dataclass
class Batches:
    """This rank's micro-batches of one window."""

    micro_batches: list[Any]
    lengths: list[int] | None = None  # in samples, where a batch was cut
    costs: list[int] | None = None  # where it was cut by cost
    steps: int = 0  # that were requested; 0: any number
    no_more_after: bool = False


Make = Callable[[int], Batches]  # for the update of an index


def cut_up(batch: Any, job: Job, columns: Columns, parts: int = 1, *, in_order: bool = False) -> Make:
    """A batch, in the fewest parts that fit, or in `steps` parts; `in_order`: also where rows are cut by their cost.

    `parts`: at least that many, where there are as many rows.
    """

    def make(index: int) -> Batches:
        total, most, by = columns.length_of(batch), job.most, job.config.by_cost
        if by is not None:
            parted, lengths, costs, warning = by.cut(batch, total, most, parts, columns.whole, in_order=in_order)
            found = Batches(parted, lengths, costs)
            if warning is not None:
                job.once("cost", warning, on_each_rank=True)
        else:
            steps = job.config.steps_at(index)
            sizes = cut_evenly(total, parts=max(steps or parts, -(-total // (most or max(total, 1)))))
            found = Batches(list(cut_batch(batch, sizes, total, columns.whole)), lengths=sizes, steps=steps or 0)
        if len(found.micro_batches) > 1:
            _warn_of_changes(job, cut_entries(batch, total, columns.whole), total)
        return found

    return make


def _warn_of_changes(job: Job, entries: Seen, total: int) -> None:
    """Warns of entries that are cut and were whole before, or the reverse; notes the new ones."""
    for path, is_cut in entries.items():
        if job.seen.setdefault(path, is_cut) != is_cut and path:
            here = ".".join(map(str, path))
            forms = "is cut", "went whole to each micro-batch", "goes whole to each micro-batch", "was cut"
            now, before = forms[:2] if is_cut else forms[2:]
            can_be_named = len(path) == 1 or isinstance(path[-1], str)
            name = f"whole=({path[-1]!r},)" if can_be_named else "whole= (in a dict, under a name of its own)"
            job.once(
                f"cut {here}",
                f"{here!r} {now} in a batch of {total} samples, and {before} in an earlier one: its length is that of "
                f"the batch by chance, now or then. Where its rows are no samples say {name}, in split(), update(), "
                "contrast() and check()",
                on_each_rank=True,
            )
