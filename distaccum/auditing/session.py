"""audit(): watches the training that runs in its block, and judges it at the end."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..law import whole_number
from ..text import plural
from ..tools.terminal import fitted
from .judge import verdict
from .ledger import failures, quietly
from .reckoning import SOFT, UNJUDGED, WINDOW, Finding, Seen
from .share import exchanged, place_in_job
from .watch import Enough, Watch

_numbers = itertools.count()  # numbers the audits of this process, alike on all ranks


@dataclass
class Audit:
    """The result of `audit`, filled in when its block ends.

    Attributes:
        findings (list[Finding]): What is wrong: `kind`, `where`, `text`, `by_hand`.
        notes (list[str]): What is no mistake.
        unjudged (list[str]): What could not be judged.
        facts (list[str]): What the verdict is made of, each true by construction.
        updates (int): Updates that were seen.
        ranks (int): Ranks that told what they saw.
        status (int): 0 right, 1 something is wrong, 2 nothing could be judged, 3 nothing wrong was seen, but not
            everything was judged.
    """

    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    unjudged: list[str] = field(default_factory=list)
    facts: list[str] = field(default_factory=list)
    updates: int = 0
    ranks: int = 1
    status: int = 2
    error: str = ""  # that ended the script
    ended: bool = field(default=True, repr=False)  # False: it left with a status, and other ranks may still wait

    def assert_right(self) -> None:
        """Raises an AssertionError with the report unless everything was judged, and is right."""
        if self.status:
            raise AssertionError(str(self))

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        about = plural(self.updates, "update") + (f" of {self.ranks} ranks" if self.ranks > 1 else "")
        num = len(self.findings)
        heads = {
            0: f"right in {about}",
            1: f"{num} {'thing is' if num == 1 else 'things are'} wrong in {about}",
            2: "nothing could be judged: no optimizer of this process stepped what a backward gave",
            3: f"nothing wrong was seen in {about}, but not everything was judged",
        }
        lines = [f"audit: {heads[self.status]}"]
        if self.status == 2 and not (self.error or self.unjudged):
            lines.append("  what processes that it starts do is not seen; start ranks with torchrun")
        lines += [f"  the audited code raised {self.error}"] * bool(self.error)
        for fault in self.findings:
            lines += [f"  {fault.line}", f"    by hand: {fault.by_hand}"]
        lines += [f"  window: {WINDOW}"] * bool(self.findings)
        lines += [f"  note: {note}" for note in self.notes] + [f"  not judged: {text}" for text in self.unjudged]
        lines += [f"  fact: {fact}" for fact in self.facts]
        try:
            here = f"{Path.cwd()}{os.sep}"
        except OSError:  # the folder is gone
            return fitted(lines)
        return fitted(line.replace(here, "") for line in lines)

    def judge(self, seen: Seen) -> None:
        self.ranks = len(seen)
        self.updates = max(len(one["updates"]) for one in seen)
        folded = quietly(verdict)(seen)
        failed = (Finding(UNJUDGED, "", f"the audit itself failed, {error}") for error in failures)
        findings = [*(folded or ()), *failed]
        self.findings = [finding for finding in findings if finding.kind not in SOFT]
        self.notes, self.unjudged, self.facts = (
            [finding.line for finding in findings if finding.kind == kind] for kind in SOFT
        )
        self.status = 1 if self.findings else 3 if self.unjudged else 0
        if folded is None or not self.updates:
            self.status = 2


def audit(
    model: nn.Module | None = None, *, updates: int | None = None, folder: str | None = None
) -> AbstractContextManager[Audit]:
    """Watches the training that runs in its block, without changing it.

    Args:
        model: Gives receipts and names from the first update on, if the optimizer was made before the block.
        updates: Leaves the block after so many updates of each optimizer.
        folder: A folder that all nodes share, for what each rank saw; by default this machine's temporary folder.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(2, 1)
        >>> sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with audit(model) as report:
        ...     for size in (1, 3):
        ...         loss = torch.nn.functional.mse_loss(model(torch.ones(size, 2)), torch.zeros(size, 1))
        ...         (loss / 2).backward()
        ...     sgd.step()
        >>> report.status, report.findings[0].text.partition(" in ")[0]
        (1, 'elements of different micro-batches weigh 0.167 to 0.5 (3 to 1)')
    """
    if updates is not None:
        whole_number("updates", updates, "; leave it out to watch the whole block")
    return watched(model, updates, folder)


@contextmanager
def watched(
    model: nn.Module | None, updates: int | None, folder: str | None, tell: Callable[[Audit], object] | None = None
) -> Iterator[Audit]:
    """Yields a report, which is filled in and passed to `tell` at the end; all ranks wait for that."""
    report = Audit()
    watch = Watch(model, updates)
    failures.clear()
    try:
        with watch.listening():
            yield report
    except Enough:
        pass
    except Exception as error:
        report.error = f"{type(error).__name__}: {error}"
        raise
    finally:
        if watch.is_here():
            rank, world = place_in_job()
            ended = report.ended and not report.error and sys.exc_info()[0] is None
            mine = {"rank": rank, "world": world, "ended": ended, **watch.as_dict()}
            with exchanged(mine, folder, next(_numbers)) as seen:
                with torch.device("cpu"):  # whatever the script's default is
                    report.judge(seen)
                if tell is not None and rank == 0:
                    tell(report)
