"""The examination of this process and, under a launcher, of the whole job."""

from __future__ import annotations

import dataclasses
import os
from itertools import groupby
from typing import Any

from ... import __version__
from ...law.table import width, wrapped
from ..plan.network import BACKENDS
from .findings import Finding
from .job import Launch, joined
from .link import Link, measure_link
from .machine import backends, devices, packages, software
from .trials import try_engines


@dataclasses.dataclass(frozen=True)
class Examination:
    findings: tuple[Finding, ...]
    hosts: tuple[str, ...]  # of the ranks
    link: Link | None  # between them
    rank: int  # of this process
    backend: str = "gloo"  # as `distaccum plan` names it

    @property
    def healthy(self) -> bool:
        return all(one.state != "wrong" for one in self.findings)

    @property
    def plan(self) -> str:
        """Options for `distaccum plan` that reproduce the measured link.

        Its rates are nominal, of which its backend reaches a fraction; its latency is that of one hop of a ring.
        """
        if self.link is None:
            return ""
        reached, hops = BACKENDS[self.backend].reduce, 2 * (len(self.hosts) - 1)
        pairs = self.link.pairs
        apart = [one for one in pairs if len({self.hosts[rank] for rank in one.ranks}) > 1]
        within = [one for one in pairs if one not in apart]
        words = f"--link-gbit {min(one.slower for one in apart or pairs) / reached:.3g}"
        if apart and within:
            words += f" --node-gbit {min(one.slower for one in within) / reached:.3g}"
        return f"{words} --latency-us {self.link.all_reduce_microseconds / hops:.3g} --backend {self.backend}"

    def as_dict(self) -> dict[str, Any]:
        return {"healthy": self.healthy, **dataclasses.asdict(self), "plan": self.plan}

    def __str__(self) -> str:
        lines = [f"distaccum {__version__} on {self.hosts[self.rank]}"]
        for about, group in groupby(self.findings, key=lambda one: one.about):
            lines += ["", about, *(str(one).rstrip() for one in group)]
        if self.link is not None:
            lines += ["", *self._of_link(self.link)]
        wrong = sum(one.state == "wrong" for one in self.findings)
        lines += ["", "all is well" if not wrong else f"{wrong} {'is' if wrong == 1 else 'are'} WRONG, see above"]
        return "\n".join(wrapped(lines, width(), indent=6))

    def _of_link(self, link: Link) -> list[str]:
        lines = ["link between neighbours (one way after the other, the other way alone)"]
        slowest = min(link.pairs, key=lambda one: one.slower)
        for one in link.pairs if len(link.pairs) <= 16 else [slowest]:
            (a, b), (there, back) = one.ranks, one.gbit
            to = f" to {self.hosts[b]}" if self.hosts[a] != self.hosts[b] else ""
            ends = f"ranks {a} and {b}, {self.hosts[a]}{to}"
            mark = "  (the slowest)" if one is slowest and len(link.pairs) > 1 else ""
            lines.append(f"  {ends:34} {there:.3g} Gbit/s there, {back:.3g} back, {one.microseconds:.0f} us{mark}")
        rates = [f"{rate:.3g} of {size // 2**20} MiB" for size, rate in link.all_reduce_gbit.items()]
        sent = f"; sent per rank, in Gbit/s: {', '.join(rates)}" if rates else ""
        lines.append(f"  all-reduce of {len(self.hosts)} ranks: {link.all_reduce_microseconds:.0f} us of 4 bytes{sent}")
        return [*lines, f"  distaccum plan ... {self.plan}"]


def examine(*, timeout: float = 60.0, all_engines: bool = False) -> Examination:
    """Examines this process and, under a launcher, the job; every rank calls it."""
    launch = Launch.from_environment(os.environ)
    findings = [*software(), *devices(), *backends(), *packages(), *launch.findings]
    with joined(launch, timeout) as job:
        findings += job.differences()
        link = measure_link(job.gather, job.device) if job.world > 1 else None
        findings += try_engines(job, all_engines)
        wrong = [one for one in findings if one.state == "wrong"]
        of_ranks = job.gather([dataclasses.asdict(one) for one in wrong]) if job.whole else []
        for rank, of_rank in enumerate(of_ranks):
            others = [one for one in (Finding(**one) for one in of_rank) if one not in wrong]
            findings += [dataclasses.replace(one, name=f"{one.name}, rank {rank}") for one in others]
        abouts = list(dict.fromkeys(one.about for one in findings))
        findings.sort(key=lambda one: abouts.index(one.about))
        backend = "gloo" if job.kind == "cpu" else "nccl"  # the nearest to xccl, too
        return Examination(tuple(findings), tuple(one["host"] for one in job.ranks), link, job.rank, backend)
