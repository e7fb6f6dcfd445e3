"""The cost of a plan by the number of ranks, beside a ring of all ranks, and a model of both for more ranks.

    python launch/bench/ranks.py --out launch/results/ranks

The ranks are processes of this machine, on gloo. With few cores they take turns, so read the processor's time.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from kit import CPU, Options, circumstances, header, in_ranks, table, write

from distaccum.law import NOBODY, NUM_COLUMNS, NUM_LARGEST, Plan, Reports, Span
from distaccum.ranks import FLAT, Peers

REPORT = Reports(*[Span(n, n) for n in (0, 2, 0, 2)], NOBODY, *[False] * 6, 2, 0, 0, 2, totals=(4.0,))
BYTES = 8 * (NUM_COLUMNS + 1)  # of a row with one denominator
MODELLED = [128, 512, 1024, 4096, 16384]


def sockets() -> int:
    return sum(path.is_socket() for path in Path("/proc/self/fd").iterdir())


def measure(rounds: int) -> list[float]:
    """Of this rank: seconds and sockets of making the tree; seconds, and the processor's, of a plan and of a ring."""
    dist.barrier()
    before, begun = sockets(), time.perf_counter()
    peers = Peers(dist.group.WORLD)
    peers.plan(REPORT)
    made, added = time.perf_counter() - begun, sockets() - before
    rows = torch.empty(dist.get_world_size(), BYTES // 8, dtype=torch.float64)

    def ring() -> list[Reports]:
        dist.all_gather(list(rows), torch.tensor(REPORT.to_row(), dtype=torch.float64))
        return [Reports.from_row(row) for row in rows.tolist()]

    return [made, added, *timed(lambda: peers.plan(REPORT), rounds), *timed(ring, rounds)]


def timed(exchange: Callable[[], Any], rounds: int) -> tuple[float, float]:
    exchange()
    dist.barrier()
    begun, used = time.perf_counter(), time.process_time()
    for _ in range(rounds):
        exchange()
    return (time.perf_counter() - begun) / rounds, (time.process_time() - used) / rounds


def measured(ranks: int, rounds: int) -> dict[str, float]:
    made, added, plan, own, ring, own_ring = zip(*in_ranks(ranks, measure, rounds, seconds=300), strict=True)
    milliseconds = {"plan": max(plan), "all": sum(own), "most": max(own), "ring": max(ring), "ring_all": sum(own_ring)}
    return {"made": max(made), "sockets": max(added), **{name: 1e3 * value for name, value in milliseconds.items()}}


def modelled(ranks: int) -> dict[str, int]:
    """Of a plan: hops one after the other, messages of all, and of the busiest rank messages, bytes and sockets."""
    size = 1 if ranks <= FLAT else math.isqrt(ranks - 1) + 1
    below = size - 1 + -(-ranks // size) - 1  # ranks that the first of all hears, and answers
    return {"hops": 4, "messages": 2 * (ranks - 1), "busiest": 2 * below, "bytes": below * BYTES, "sockets": 2 * below}


def seconds_of_a_plan() -> float:
    """Of the Python that follows an exchange of 4,096 ranks."""
    rows = torch.tensor([REPORT.to_row()] * 4096, dtype=torch.float64)
    row = [*rows[:, :NUM_LARGEST].amax(0).tolist(), *rows[:, NUM_LARGEST:].sum(0).tolist()]
    taken = []
    for _ in range(200):
        begun = time.perf_counter()
        Plan(["samples"], Reports.from_row(row), 2)
        taken.append(time.perf_counter() - begun)
    return sorted(taken)[len(taken) // 2]


def main() -> None:
    parser = Options(__doc__)
    parser.counts("--ranks", [2, 8, 16, 32, 64, 128])
    parser.counts("--rounds", 20)
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    found = {ranks: measured(ranks, options.rounds) for ranks in options.ranks}
    about, plan = circumstances(CPU), seconds_of_a_plan()
    lines = header(
        "A plan on many ranks",
        about,
        "Reports are merged on the way up a tree of blocks of about the square root of the ranks, and one row comes "
        f"down; up to {FLAT} ranks send theirs to each other. The ring gathers all rows on every rank, and reads them.",
        f"Measured: milliseconds of a plan, {options.rounds} in a row: elapsed, of the processor on all ranks, and "
        "on the busiest one. More ranks than cores take turns.",
    )
    heads = ["ranks", "made, s", "more sockets on a rank", "plan", "processor, all", "at most on a rank"]
    lines += table(
        [*heads, "ring", "ring: processor, all"],
        [
            [ranks, f"{row['made']:.2f}", int(row["sockets"])]
            + [f"{row[name]:.1f}" for name in ("plan", "all", "most", "ring", "ring_all")]
            for ranks, row in found.items()
        ],
    )
    lines += [f"Making the `Plan` from the merged reports of 4,096 ranks takes {1e6 * plan:.0f} us.", ""]
    lines += [f"Modelled: a plan whose rows have {BYTES} bytes. The first rank of all is the busiest.", ""]
    heads = ["ranks", "hops", "messages", "at the busiest", "bytes it sends", "its sockets", "ring: hops", "messages"]
    rows = []
    for ranks in MODELLED:
        ring = [ranks - 1, ranks * (ranks - 1), (ranks - 1) * BYTES, 2 * (ranks - 1)]
        rows.append([f"{number:,}" for number in (ranks, *modelled(ranks).values(), *ring)])
    lines += table([*heads, "bytes a rank sends", "its sockets"], rows)
    write(options.out, "\n".join(lines).rstrip(), {**about, "measured": found, "plan_of_4096": plan})


if __name__ == "__main__":
    main()
