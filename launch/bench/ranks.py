"""The cost of a plan by the number of ranks, beside the reduction of the gradients.

    python launch/bench/ranks.py --out launch/results/ranks

A plan is a row of each rank, gathered. The ranks are processes of this machine, on gloo, and take turns where they are
more than its cores, so read the ratios.
"""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist
from kit import CPU, Options, circumstances, header, in_ranks, in_turns, quartiles, table, write

from distaccum.ranks import Peers

ROW = [0.0] * 24  # as many numbers as a window's report has, or a few more


def measure(rounds: int, parameters: int) -> dict[str, list[float]]:
    peers = Peers(dist.group.WORLD)
    gradients = torch.zeros(parameters)
    loops = {"plan": lambda: peers.gather(ROW), "gradients": lambda: dist.all_reduce(gradients)}
    return in_turns(loops, rounds, CPU, clock=time.perf_counter)


def main() -> None:
    parser = Options(__doc__)
    parser.counts("--ranks", [2, 4, 8, 16, 32, 64])
    parser.counts("--rounds", 20)
    parser.counts("--parameters", 10**6)
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    rows = []
    for ranks in options.ranks:
        taken = in_ranks(ranks, measure, options.rounds, options.parameters, seconds=300)[0]
        rows.append({"ranks": ranks, **{name: quartiles(seconds) for name, seconds in taken.items()}})
    about = circumstances(CPU)
    lines = header(
        "A plan on many ranks",
        about,
        f"A plan gathers {len(ROW)} numbers of each rank; the gradients are {4 * options.parameters / 1e6:g} MB, in "
        f"one all-reduce. Milliseconds by the clock of the first rank, in turns: the median of {options.rounds}. More "
        "ranks than cores take turns.",
    )
    cells = []
    for row in rows:
        plan, gradients = row["plan"]["median"], row["gradients"]["median"]
        cells.append([row["ranks"], f"{1e3 * plan:.2f}", f"{1e3 * gradients:.1f}", f"{plan / gradients:.3f}"])
    lines += table(["ranks", "plan, ms", "gradients, ms", "plan / gradients"], cells)
    write(options.out, "\n".join(lines), {**about, "rows": rows})


if __name__ == "__main__":
    main()
