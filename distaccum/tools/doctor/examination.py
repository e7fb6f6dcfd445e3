"""The examination of this process and, under a launcher, of the whole job."""

from __future__ import annotations

import dataclasses
import os
from itertools import groupby
from typing import Any

from ... import __version__
from ..table import width, wrapped
from .findings import Finding
from .job import Launch, joined
from .machine import backends, devices, packages, software
from .trials import try_engines


@dataclasses.dataclass(frozen=True)
class Examination:
    findings: tuple[Finding, ...]
    hosts: tuple[str, ...]  # of the ranks
    rank: int  # of this process

    @property
    def healthy(self) -> bool:
        return all(one.state != "wrong" for one in self.findings)

    def as_dict(self) -> dict[str, Any]:
        return {"healthy": self.healthy, **dataclasses.asdict(self)}

    def __str__(self) -> str:
        lines = [f"distaccum {__version__} on {self.hosts[self.rank]}"]
        for about, group in groupby(self.findings, key=lambda one: one.about):
            lines += ["", about, *(str(one).rstrip() for one in group)]
        wrong = sum(one.state == "wrong" for one in self.findings)
        lines += ["", "all is well" if not wrong else f"{wrong} {'is' if wrong == 1 else 'are'} WRONG, see above"]
        return "\n".join(wrapped(lines, width(), indent=6))


def examine(*, timeout: float = 60.0, all_engines: bool = False) -> Examination:
    """Examines this process and, under a launcher, the job; every rank calls it."""
    launch = Launch.from_environment(os.environ)
    findings = [*software(), *devices(), *backends(), *packages(), *launch.findings]
    with joined(launch, timeout) as job:
        findings += job.differences()
        findings += try_engines(job, all_engines)
        wrong = [one for one in findings if one.state == "wrong"]
        of_ranks = job.gather([dataclasses.asdict(one) for one in wrong]) if job.whole else []
        for rank, of_rank in enumerate(of_ranks):
            others = [one for one in (Finding(**one) for one in of_rank) if one not in wrong]
            findings += [dataclasses.replace(one, name=f"{one.name}, rank {rank}") for one in others]
        abouts = list(dict.fromkeys(one.about for one in findings))
        findings.sort(key=lambda one: abouts.index(one.about))
        return Examination(tuple(findings), tuple(one["host"] for one in job.ranks), job.rank)
