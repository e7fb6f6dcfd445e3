"""Batches: the micro-batches of a window on this rank, as they are drawn or cut."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .batch import Columns, cut_batch, cut_entries
from .job import Job, Micro, Seen
from .law import cut_evenly


@dataclass
class Batches:
    """This rank's micro-batches of one window: as they were drawn or cut, and those in which anything counts."""

    micro_batches: list[Any]
    # In samples, if a batch was cut.
    lengths: list[int] | None = None
    # If it was cut by cost.
    costs: list[int] | None = None
    # As requested; 0: any number.
    steps: int = 0
    no_more_after: bool = False
    micros: list[Micro] = field(default_factory=list)
    # The last of them with a count for each name, or else the last, to stand in with.
    substitute: Micro | None = None
    # An error of drawing or counting, kept until the other ranks have the report.
    error: Exception | None = None

    def take_error(self) -> Exception | None:
        """Returns the error, and drops it together with the micro-batches, which its traceback would keep alive."""
        error = self.error
        self.error = None
        self.micros = []
        self.micro_batches = []
        return error


# Draws the micro-batches of an update, by its index.
DrawFn = Callable[[int], Batches]
# Draws part of the next window, given a micro-step and the number of them.
Pace = Callable[[int, int], None]


def cut_up(batch: Any, job: Job, columns: Columns, parts: int = 1, *, in_order: bool = False) -> DrawFn:
    """Cuts a batch into as few parts as fit, or `steps`, but at least `parts`; `in_order` even if cut by cost."""

    def draw(index: int) -> Batches:
        total = columns.length_of(batch)
        most = job.most
        by = job.config.by_cost
        if by is not None:
            batches = Batches(*by.cut(batch, total, most, parts, columns.whole, job.once, in_order=in_order))
        else:
            steps = job.config.steps_at(index)
            sizes = cut_evenly(total, parts=max(steps or parts, -(-total // (most or max(total, 1)))))
            batches = Batches(list(cut_batch(batch, sizes, total, columns.whole)), lengths=sizes, steps=steps or 0)
        if len(batches.micro_batches) > 1:
            _warn_of_changes(job, cut_entries(batch, total, columns.whole), total)
        return batches

    return draw


def _warn_of_changes(job: Job, entries: Seen, total: int) -> None:
    """Warns about entries that are cut now and went whole before, or the reverse; notes the new ones."""
    for path, is_cut in entries.items():
        if job.seen.setdefault(path, is_cut) != is_cut and path:
            here = ".".join(map(str, path))
            forms = "is cut", "went whole to each micro-batch", "goes whole to each micro-batch", "was cut"
            now, before = forms[:2] if is_cut else forms[2:]
            can_be_named = len(path) == 1 or isinstance(path[-1], str)
            name = f"whole=({path[-1]!r},)" if can_be_named else "whole= (in a dict, under a name of its own)"
            job.once(
                f"cut {here}",
                f"{here!r} {now} in a batch of {total} samples, and {before} in an earlier one: its length equals "
                f"the batch's by chance in one of them. If its rows are not samples, say {name} in split(), update(), "
                "contrast() and check()",
                on_each_rank=True,
            )
