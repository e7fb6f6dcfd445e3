"""Predictions of `distaccum plan` against measured updates, on links, ranks and windows that it was not fitted on.

    sudo python launch/bench/forecast.py --out launch/results/forecast --plot launch/results/forecast.png
    sudo python launch/bench/forecast.py --settings 2x1@1gbit --rounds 2  # in half a minute

Network namespaces of this machine are the nodes (NODESxRANKS@RATE: as many ranks on each node, each node sending at
that rate). Latency and efficiency are fitted on single collectives at the first setting. Everywhere the seconds of a
micro-step are measured with all ranks at work, and `distaccum.plan` says what an update takes; real updates by this
library take turns with that. Then 8 to 4,096 ranks are predicted, which nothing here can check. Needs root and
iproute2.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from kit import CPU, Options, circumstances, header, pyplot, save, write
from nodes import on_each, some_nodes
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import distaccum
from distaccum import Accumulator

LAYERS, WIDTH, SAMPLES = 8, 512, 160
PARAMETERS = LAYERS * WIDTH * WIDTH
BUCKET_MB = WIDTH * WIDTH * 4 / 1e6  # a layer each
SETTINGS = ["2x1@1gbit", "2x1@250mbit", "2x1@500mbit", "2x1@2500mbit", "2x2@1gbit", "4x1@500mbit"]
LENGTHS = {
    "DDP, last": (1, 2, 8, 32),
    "DDP, every": (2, 8),
    "FSDP2, gathered": (2, 8),
    "FSDP2, last": (2,),
}
SIZES = [2**10, 2**14, 2**18, 2**20, 2**22]  # numbers of a collective that is fitted
TIMES, AT_ONCE = 8, 8  # timings, each of AT_ONCE in a row: a single one fits in the burst that `tbf` lets pass
ENGINES = ("DDP", "FSDP2")
ALONE = 3  # micro-steps of it in a turn
SECONDS = 400.0
EXAMPLE: dict[str, Any] = {
    "batch_size": 4096,
    "micro_batch_size": 1,
    "parameters": "1.3B",
    "dtype_bytes": 2,
    "link_gbit": 400,
    "node_gbit": 3600,
    "micro_step_seconds": 0.1,
    "backend": "nccl",
    "bucket_mb": 100,
}
PER_NODE = 8
MANY = [2**power for power in range(3, 13)]


class Setting(NamedTuple):
    nodes: int
    per_node: int
    rate: str

    def __str__(self) -> str:
        return f"{self.nodes}x{self.per_node}@{self.rate}"

    @property
    def ranks(self) -> int:
        return self.nodes * self.per_node

    @property
    def gbit(self) -> float:
        return float(self.rate[:-4]) * {"m": 1e-3, "g": 1.0}[self.rate[-4]]


def setting(text: str) -> Setting:
    found = re.fullmatch(r"([2-9])x([1-9])@(\d+(?:\.\d+)?[mg]bit)", text)
    if found is None:
        raise ValueError(f"--settings {text}, expected such as 2x1@1gbit: nodes, ranks on each, and a rate")
    return Setting(int(found[1]), int(found[2]), found[3])


# On a rank


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


def updates(policy: str) -> Callable[[int], None]:
    """A function that makes an update of the given number of micro-steps."""
    engine, sync = policy.split(", ")
    net: Any = network()
    if engine == "DDP":
        net = DistributedDataParallel(net, bucket_cap_mb=WIDTH * WIDTH * 4 / 2**20)
    else:
        for layer in net:
            fully_shard(layer)
        fully_shard(net)
    sgd = torch.optim.SGD(net.parameters(), lr=1e-3)
    made: dict[int, Accumulator] = {}

    def update(steps: int) -> None:
        if steps not in made:
            made[steps] = Accumulator(net, sgd, steps=steps, sync=sync)
        window = made[steps].window([SAMPLE] * steps)
        for inputs in window:
            window.backward(net(inputs).square().mean())
        window.step()

    return update


SAMPLE = torch.randn(SAMPLES, WIDTH)


def computing(engine: str) -> Callable[[int], None]:
    """Micro-steps and a step without another rank."""
    net: Any = network()
    if engine == "FSDP2":
        mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("replicas", "one"))["one"]
        for layer in net:
            fully_shard(layer, mesh=mesh)
        fully_shard(net, mesh=mesh)
    sgd = torch.optim.SGD(net.parameters(), lr=1e-3)

    def run(steps: int) -> None:
        for _ in range(steps):
            net(SAMPLE).square().mean().backward(torch.tensor(1 / steps))
        sgd.step()
        sgd.zero_grad()

    return run


def measure_here(rounds: int, fit: bool) -> dict[str, Any] | None:
    """On rank 0 what was measured; seconds are of the slowest rank."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    collectives = collectives_here() if fit else []
    loops: dict[str, Callable[[int], None]] = {alone_of(one): computing(one) for one in ENGINES}
    loops |= {policy: updates(policy) for policy in LENGTHS}
    turns = [(policy, steps) for policy, lengths in LENGTHS.items() for steps in lengths]
    turns = [one for turn in turns for one in ((alone_of(turn[0]), ALONE), turn)]
    mine: dict[str, list[float]] = {f"{policy} {steps}": [] for policy, steps in turns}
    for turn in range(-1, rounds):
        for policy, steps in turns if turn % 2 else reversed(turns):
            dist.barrier()
            began = time.perf_counter()
            loops[policy](steps)
            if turn >= 0:
                mine[f"{policy} {steps}"].append(time.perf_counter() - began)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    if dist.get_rank():
        return None
    seconds = {name: [max(of) for of in zip(*(one[name] for one in everyone), strict=True)] for name in mine}
    alone = {}
    for engine in ENGINES:  # a rank's own: the slowest of each turn would add up the noise of all
        name = f"{alone_of(engine)} {ALONE}"
        alone[engine] = statistics.median(one for of_rank in everyone for one in of_rank[name]) / ALONE
        seconds.pop(name)
    return {"collectives": collectives, "micro_step": alone, "seconds": seconds}


def alone_of(policy: str) -> str:
    return f"{policy.split(', ')[0]} alone"


def collectives_here() -> list[tuple[str, int, float, float]]:
    """Kind, bytes of the whole, median seconds, and those of a rank's processor."""
    found = []
    num = dist.get_world_size()
    for size in SIZES:
        whole, part = torch.zeros(size // num * num), torch.zeros(size // num)
        calls: dict[str, Callable[[], object]] = {
            "all-reduce": lambda whole=whole: dist.all_reduce(whole),
            "reduce-scatter": lambda whole=whole, part=part: dist.reduce_scatter_tensor(part, whole),
            "all-gather": lambda whole=whole, part=part: dist.all_gather_into_tensor(whole, part),
        }
        for kind, call in calls.items():
            taken = []
            for _ in range(TIMES + 1):
                dist.barrier()
                began, worked = time.perf_counter(), time.process_time()
                for _ in range(AT_ONCE):
                    call()
                taken.append([(time.perf_counter() - began) / AT_ONCE, (time.process_time() - worked) / AT_ONCE])
            slowest = torch.tensor(taken[1:])
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            found.append((kind, 4 * size, *slowest.median(0).values.tolist()))
    return found


# All of it


def fitted(collectives: Sequence[tuple[str, int, float, float]], where: Setting) -> dict[str, float]:
    """Latency, efficiencies, and the processor's seconds, by least squares of relative deviations."""
    rate, num = where.gbit * 1e9 / 8, where.ranks
    rows, seconds, worked = [], [], []
    for kind, size, taken, of_processor in collectives:
        rounds = 1 if kind == "all-gather" else 2
        hops, sent = rounds * (num - 1), rounds * (num - 1) / num * size
        rows.append([hops, *((0.0, sent / rate) if kind == "all-gather" else (sent / rate, 0.0)), sent])
        seconds.append(taken)
        worked.append(of_processor)
    of_rows = torch.tensor(rows, dtype=torch.float64)
    latency, reduce, gather = least(of_rows[:, :3], seconds)
    _, per_byte = least(of_rows[:, ::3], worked)
    return {
        "latency_us": max(0.0, 1e6 * latency),
        "efficiency": min(1.0, 1 / reduce),
        "gather_efficiency": min(1.0, 1 / gather),
        "cpu_seconds_per_gb": max(0.0, 1e9 * per_byte),
    }


def least(rows: torch.Tensor, values: Sequence[float]) -> list[float]:
    weights = 1 / torch.tensor(values, dtype=torch.float64)
    found: list[float] = torch.linalg.lstsq(rows * weights[:, None], torch.ones_like(weights)[:, None]).solution[:, 0]
    return [float(one) for one in found]


def compared(where: Setting, found: Mapping[str, Any], link: Mapping[str, float]) -> list[dict[str, Any]]:
    rows = []
    for name, seconds in found["seconds"].items():
        policy, steps = name.rsplit(" ", 1)
        micro_step = found["micro_step"][policy.split(", ")[0]]
        forecast = distaccum.plan(
            batch_size=int(steps) * where.ranks,
            micro_batch_size=1,
            ranks=where.ranks,
            nodes=where.nodes,
            parameters=PARAMETERS,
            link_gbit=where.gbit,
            micro_step_seconds=micro_step,
            backend="gloo",
            bucket_mb=BUCKET_MB,
            **link,
        )
        predicted = next(row for row in forecast.policies if row["policy"] == policy)["timing"]
        measured = statistics.median(seconds)
        rows.append(
            {
                "setting": str(where),
                "policy": policy,
                "steps": int(steps),
                "micro_step": micro_step,
                "predicted": predicted,
                "seconds": seconds,
                "measured": measured,
                "error": predicted["update"] / measured - 1,
            }
        )
    return rows


OF_TWO_NODES = {  # its names
    "DDP, distaccum": "DDP, last",
    "DDP, every micro-step, by hand": "DDP, every",
    "ZeRO 0, distaccum": "ZeRO 0, last",
    "ZeRO 1, distaccum": "ZeRO 1 and 2, last",
    "ZeRO 2, last, distaccum": "ZeRO 1 and 2, last",
    "ZeRO 2, every, DeepSpeed": "ZeRO 2, every",
    "ZeRO 3, last, distaccum": "ZeRO 3, last",
    "ZeRO 3, every, DeepSpeed": "ZeRO 3, every",
    "FSDP2, gathered, distaccum": "FSDP2, gathered",
    "FSDP2, last, distaccum": "FSDP2, last",
    "FSDP2, every, distaccum": "FSDP2, every",
}
TWO_NODES = Path(__file__).parents[1] / "results/two_nodes.json"


def of_two_nodes(link: Mapping[str, float]) -> list[dict[str, Any]]:
    """What two_nodes.py measured: ResNet-18 on 2 ranks at 1 Gbit/s, K = 8, on all engines."""
    found = json.loads(TWO_NODES.read_text())
    forecast = distaccum.plan(
        batch_size=16,
        micro_batch_size=1,
        ranks=2,
        nodes=2,
        parameters=11_689_512,
        link_gbit=1,
        micro_step_seconds=found["limits"]["compute"] / 8,
        backend="gloo",
        **link,
    )
    predicted = {row["policy"]: row for row in forecast.policies}
    rows = []
    for row in found["rows"]:
        if row["name"] in OF_TWO_NODES:
            said, seconds = predicted[OF_TWO_NODES[row["name"]]], statistics.median(row["seconds"])
            rows.append(
                {
                    "name": row["name"],
                    "predicted_bytes": said["bytes_per_update"],
                    "bytes": row["bytes"],
                    "predicted": said["seconds_per_update"],
                    "measured": seconds,
                    "error": said["seconds_per_update"] / seconds - 1,
                }
            )
    return rows


def table_of_two_nodes(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = [
        "",
        "**Another model, all engines**: [two_nodes.md](two_nodes.md) (measured earlier, 1 Gbit/s, ResNet-18, K = 8) "
        "by these constants and its seconds of computing alone; buckets of 25 MB",
        "",
        "| | predicted, MB | sent, MB | predicted, s | measured, s | error |",
        "| --- | --: | --: | --: | --: | --: |",
    ]
    for row in rows:
        lines.append(
            f"| {row['name']} | {row['predicted_bytes'] / 1e6:.1f} | {row['bytes'] / 1e6:.1f} | {row['predicted']:.3f} "
            f"| {row['measured']:.3f} | {row['error']:+.1%} |"
        )
    return lines


def scaled() -> list[dict[str, Any]]:
    """The example on more and more ranks, the batch as it is."""
    return [
        {"ranks": num, "steps": forecast.steps, "policies": {row["policy"]: row for row in forecast.policies}}
        for num in MANY
        for forecast in [distaccum.plan(ranks=num, nodes=num // PER_NODE, **EXAMPLE)]
    ]


def tables(rows: Sequence[Mapping[str, Any]], link: Mapping[str, float], first: Setting) -> list[str]:
    lines = [
        f"Fitted at {first}: {link['latency_us']:.0f} microseconds per hop, {link['efficiency']:.1%} of the nominal "
        f"rate for reductions, {link['gather_efficiency']:.1%} for gathers; {link['cpu_seconds_per_gb']:.1f} s of a "
        "rank's processor per GB that it sends, which are taken from computing where the two overlap.",
        "",
        "| setting | policy | K | micro-step, ms | predicted, s | measured, s | least to most | error |",
        "| --- | --- | --: | --: | --: | --: | --: | --: |",
    ]
    for row in rows:
        seconds = row["seconds"]
        lines.append(
            f"| {row['setting']} | {row['policy']} | {row['steps']} | {1e3 * row['micro_step']:.1f} "
            f"| {row['predicted']['update']:.3f} | {row['measured']:.3f} | {min(seconds):.3f} to {max(seconds):.3f} "
            f"| {row['error']:+.1%} |"
        )
    lines += [
        "",
        "| policy | updates | error: median | least to most | within 10% |",
        "| --- | --: | --: | --: | --: |",
    ]
    for policy in (*LENGTHS, "all"):
        off = [row["error"] for row in rows if policy in (row["policy"], "all")]
        within = sum(abs(one) < 0.1 for one in off)
        lines.append(
            f"| {policy} | {len(off)} | {statistics.median(off):+.1%} | {min(off):+.1%} to {max(off):+.1%} "
            f"| {within} of {len(off)} |"
        )
    return lines


def table_of_many(many: Sequence[Mapping[str, Any]]) -> list[str]:
    names = list(many[-1]["policies"])
    words = ", ".join(f"{name} {value}" for name, value in EXAMPLE.items())
    lines = [
        "",
        f"**8 to 4,096 ranks: a prediction that no machine here can check** ({words}; {PER_NODE} ranks per node; "
        "seconds per update; the batch stays, so windows get shorter)",
        "",
        f"| ranks | K | {' | '.join(names)} |",
        f"| --: | --: | {' | '.join('--:' for _ in names)} |",
    ]
    for one in many:
        cells = [one["policies"].get(name) for name in names]
        shown = ["-" if cell is None else f"{cell['seconds_per_update']:.3f}" for cell in cells]
        lines.append(f"| {one['ranks']:,} | {one['steps']} | {' | '.join(shown)} |")
    return lines


NOTES = [
    "Nodes are network namespaces (`tbf`, burst 128k; two by a cable, more by a bridge). *Setting*: nodes x ranks on "
    f"each @ rate. {LAYERS} linear layers of {WIDTH} x {WIDTH} without bias ({4 * PARAMETERS / 1e6:.1f} MB of "
    f"gradients), micro-batches of {SAMPLES}, SGD, buckets of a layer, gloo.",
    "*Micro-step*: median in the same run with all ranks at work, of the wrapper (FSDP2's on a mesh of one rank). "
    "*Measured*: an update by this library, of the slowest rank, median over the rounds. *Error*: predicted / measured "
    "- 1; below 0 the plan promises too much. Only single collectives of the first setting were fitted, no update. All "
    "ranks share two cores: with 3 and 4 ranks they also take turns on them while they communicate, which the plan "
    "does not know.",
]


# The picture

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#000000")
MARKERS = {"DDP, last": "o", "DDP, every": "s", "FSDP2, gathered": "^", "FSDP2, last": "D"}
DRAWN = {
    "DDP, every": ("#D55E00", "--"),
    "DDP, last": ("#0072B2", "-"),
    "ZeRO 1 and 2, last": ("#56B4E9", "-."),
    "FSDP2, every": ("#E69F00", "--"),
    "FSDP2, last": ("#E69F00", "-"),
    "FSDP2, gathered": ("#009E73", "--"),
    "FSDP2 hybrid, replicas": ("#CC79A7", ":"),
}


def plot(path: Path, rows: Sequence[Mapping[str, Any]], many: Sequence[Mapping[str, Any]]) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.ticker import LogLocator

    figure, (left, right) = pyplot().subplots(1, 2, figsize=(12, 5.4), layout="constrained")
    settings = list(dict.fromkeys(row["setting"] for row in rows))
    colours = dict(zip(settings, COLOURS, strict=False))
    for row in rows:
        left.plot(row["measured"], row["predicted"]["update"], MARKERS[row["policy"]], color=colours[row["setting"]])
    ends = [0.8 * min(row["measured"] for row in rows), 1.25 * max(row["measured"] for row in rows)]
    left.plot(ends, ends, color="black", linewidth=1)
    left.fill_between(ends, [0.9 * x for x in ends], [1.1 * x for x in ends], color="#888888", alpha=0.3)
    left.set_xscale("log")
    left.set_yscale("log")
    left.set_xlabel("measured, seconds per update")
    left.set_ylabel("predicted, seconds per update")
    left.set_title("Two to four nodes here; grey: 10% off", fontsize=10, loc="left")
    signs = [Line2D([], [], marker="o", linestyle="", color=c, label=name) for name, c in colours.items()]
    signs += [Line2D([], [], marker=m, linestyle="", color="#888888", label=name) for name, m in MARKERS.items()]
    left.legend(handles=signs, fontsize=8)
    for name, (colour, dashes) in DRAWN.items():
        known = [(one["ranks"], one["policies"][name]["seconds_per_update"]) for one in many if name in one["policies"]]
        right.plot(*zip(*known, strict=True), dashes, color=colour, label=name, linewidth=1.8)
    alone = [one["steps"] * EXAMPLE["micro_step_seconds"] for one in many]
    right.plot(MANY, alone, color="black", linewidth=1, linestyle=(0, (1, 1)), label="computing alone")
    right.set_xscale("log", base=2)
    right.set_yscale("log")
    right.set_xticks(MANY[::3], [f"{num:,}" for num in MANY[::3]])
    right.set_xlabel("ranks, 8 on each node; a batch of 4,096 for all")
    right.set_ylabel("predicted, seconds per update")
    right.set_title("1.3 billion parameters on nccl, 400 Gbit/s: predicted alone", fontsize=10, loc="left")
    right.grid(alpha=0.3)
    for axis in (left.xaxis, left.yaxis, right.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter("")
    right.legend(fontsize=8)
    save(figure, path, 120)


def main() -> int:
    parser = Options(__doc__, picture=True)
    parser.add_argument("--settings", nargs="+", default=SETTINGS, metavar="S", help=f"({' '.join(SETTINGS)})")
    parser.counts("--rounds", 3, "of turns")
    parser.hidden("--here", choices=["fit", "no-fit"])
    options = parser.parse_args()
    if options.here:
        found = measure_here(options.rounds, options.here == "fit")
        if found is not None:
            print(json.dumps(found), flush=True)
        dist.barrier()
        dist.destroy_process_group()
        return 0
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    link: dict[str, float] = {}
    collectives: list[Any] = []
    try:
        settings = [setting(text) for text in options.settings]
        for where in settings:
            print(f"{where}, {options.rounds} rounds", file=sys.stderr)
            with some_nodes(where.nodes, where.rate) as nodes:
                passed = ["--rounds", str(options.rounds), "--here", "no-fit" if link else "fit"]
                found = json.loads(on_each(nodes, passed, SECONDS, where.per_node).splitlines()[-1])
            collectives += found["collectives"]
            link = link or fitted(collectives, where)
            rows += compared(where, found, link)
    except (RuntimeError, ValueError) as error:
        parser.error(str(error))
    earlier, many, about = of_two_nodes(link), scaled(), circumstances(CPU)
    lines = header("Predicted and measured", about, *NOTES, f"{options.rounds} rounds.")
    lines += tables(rows, link, settings[0])
    lines += table_of_two_nodes(earlier) + table_of_many(many)
    write(
        options.out,
        "\n".join(lines),
        {**about, "link": link, "collectives": collectives, "rows": rows, "two_nodes": earlier, "many": many},
    )
    if options.plot is not None:
        plot(options.plot, rows, many)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
