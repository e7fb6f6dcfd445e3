"""What a window's plan costs by the number of ranks: rounds, messages, and time against gloo's ring.

    python launch/bench/ranks.py --out launch/results/ranks

Processes of this machine with gloo, which share its processors: so rounds and messages are counted too, and the time is
a ratio to gloo's own gathering in the same run. Ranks of one host leave their rows in memory that they share; for
several hosts, some at a time take themselves for one.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from kit import CPU, Options, circumstances, header, in_ranks, table, wrapped, write

from distaccum import plan
from distaccum.engines import board
from distaccum.engines.peers import GroupPeers
from distaccum.engines.rounds import gather_in_rounds
from distaccum.law.plan import RankReport, by_rank_of, plan_of

REPORT = RankReport(3, 8, 8, 8, False, True, True, True, False, False, False, 0, 0, 0, (800.0,))
FORECAST = (64, 512, 4096)


def ring(row: list[float]) -> torch.Tensor:
    mine = torch.tensor(row, dtype=torch.float64)
    rows = torch.empty(dist.get_world_size(), len(row), dtype=torch.float64)
    dist.all_gather(list(rows), mine)
    return rows


def times(repeats: int, rounds: int, per_host: int) -> dict[str, list[float]]:
    """Seconds of a gathering, in turns."""
    torch.set_num_threads(1)
    row, group = REPORT.to_row(), dist.group.WORLD
    assert group is not None
    ways: dict[str, Callable[[], Any]] = {
        "ring": lambda: ring(row).tolist(),
        "rounds": lambda: gather_in_rounds(row, group).tolist(),
        "one host": on_hosts_of(dist.get_world_size(), row),
    }
    if has_hosts(dist.get_world_size(), per_host):
        ways["hosts"] = on_hosts_of(per_host, row)
    assert all(gather() == ways["ring"]() for gather in ways.values())
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, gather in ways.items():
            dist.barrier()
            gather()
            began = time.perf_counter()
            for _ in range(repeats):
                gather()
            found[name].append((time.perf_counter() - began) / repeats)
    return found


def has_hosts(ranks: int, per_host: int) -> bool:
    return ranks > per_host > 1 and ranks % per_host == 0


def on_hosts_of(ranks: int, row: list[float]) -> Callable[[], Any]:
    """As windows gather, after the rows with which ranks find that they share a host."""
    assert dist.group.WORLD is not None
    peers, here = GroupPeers(dist.group.WORLD), dist.get_rank() // ranks
    true, board.host_number = board.host_number, lambda: here
    for _ in range(board.FIRST + 3):
        peers.gather(row)
    board.host_number = true
    return lambda: peers.gather(row)


def host_milliseconds(ranks: int) -> float:
    """Of one rank: reading the rows of all, and the plan of them."""
    rows, found = torch.tensor(REPORT.to_row(), dtype=torch.float64).repeat(ranks, 1), []
    for _ in range(20):
        began = time.process_time()
        plan_of(("samples",), by_rank_of(rows.T.tolist()))
        found.append(time.process_time() - began)
    return statistics.median(found) * 1e3


def forecast_milliseconds(ranks: int) -> float:
    """Of the network, beside NCCL, 8 ranks to a node of 100 Gbit/s; with the record's latency."""
    given = {"batch_size": ranks, "micro_batch_size": 1, "parameters": 1, "micro_step_seconds": 1.0, "bucket_mb": 1e9}
    found = plan(ranks=ranks, nodes=ranks // 8, link_gbit=100, node_gbit=1000, backend="nccl", **given)  # type: ignore[arg-type]
    (timing,) = (one["timing"] for one in found.policies if one["policy"] == "DDP, last")
    return float(timing["latency"]) * 1e3


def rows_of(numbers: Sequence[int], repeats: int, rounds: int, per_host: int) -> list[dict[str, Any]]:
    found = []
    for num in numbers:
        taken = in_ranks(num, times, repeats, rounds, per_host, seconds=300)[0]
        ring = taken.pop("ring")
        ratios = {way: [one / other for one, other in zip(these, ring, strict=True)] for way, these in taken.items()}
        messages = {"rounds": (num - 1).bit_length(), "one host": 0, "hosts": (num // per_host - 1).bit_length()}
        ways = {way: {"messages": messages[way], **spread(ratio)} for way, ratio in ratios.items()}
        ringed = {"messages": num - 1, "ms": statistics.median(ring) * 1e3}
        found.append({"ranks": num, "ring": ringed, **ways})
    return found


def spread(ratio: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(ratio), "least": min(ratio), "most": max(ratio)}


def cell(way: dict[str, Any] | None) -> str:
    if way is None:
        return "-"
    return f"{way['messages']}; {way['median']:.2g} ({way['least']:.2g} to {way['most']:.2g})"


def main() -> int:
    parser = Options(__doc__)
    parser.counts("--ranks", [2, 4, 8, 16, 32, 64], "numbers of ranks")
    parser.counts("--repeats", 20, "gatherings in a turn")
    parser.counts("--rounds", 9, "turns of each way")
    parser.counts("--per-host", 8, "ranks of one, where there are several")
    options = parser.parse_args()
    found = rows_of(options.ranks, options.repeats, options.rounds, options.per_host)
    cells = [
        [str(one["ranks"]), f"{one['ring']['messages']}; {one['ring']['ms']:.1f} ms"]
        + [cell(one.get(way)) for way in ("rounds", "hosts", "one host")]
        for one in found
    ]
    heads = ["ranks", "gloo's ring", "in rounds", f"hosts of {options.per_host}", "one host"]
    larger = [[str(num), f"{forecast_milliseconds(num):.2f}", f"{host_milliseconds(num):.2f}"] for num in FORECAST]
    notes = (
        "A row is 15 numbers of 8 bytes. In each cell the messages of a rank, one after the other, and the time in "
        "parts of the ring's: the median, the least and the most of all turns.",
        "*In rounds* is the way of ranks that share no memory (two of them keep gloo's own). *One host* is that of "
        "ranks that do, and *hosts* that of several such: one rank of each sends.",
    )
    about = circumstances(CPU)
    lines = [
        *header("The plan by the number of ranks", about, *notes),
        *table(heads, cells),
        "## By the forecast",
        "",
        *wrapped(
            "Milliseconds of the network (50 microseconds for a round between nodes, assumed, 8 ranks to a node with "
            "100 Gbit/s), with the record's latency on NCCL; and of each rank's processor, measured: reading all rows, "
            "making the plan."
        ),
        *table(["ranks", "network", "processor"], larger),
    ]
    write(options.out, "\n".join(lines), {**about, "ranks": found, "larger": larger})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
