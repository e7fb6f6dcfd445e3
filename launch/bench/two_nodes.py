"""Seconds and bytes of an update over a slow link: each way to accumulate, and the limits of link and processor.

    sudo python launch/bench/two_nodes.py --out launch/results/two_nodes
    sudo python launch/bench/two_nodes.py --only DDP --rounds 2  # two minutes

Two network namespaces on this machine have a rank each and a link of --rate between them. ResNet-18 with GroupNorm
(11.7 million parameters, float32), micro-batches of 4 images of 64 x 64, SGD. All ways run in the same two processes
and take turns, one update each: A B C, C B A. Needs root, iproute2, torchvision, accelerate, deepspeed and
lightning-fabric.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from contenders import Contender, Loop, Task, be_quiet, full_weights, named, one_of, some_of, versions
from kit import CPU, Options, circumstances, header, listed, ratios, relative_difference, spelled, table, write
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD
from torchvision.models import resnet18

DEVICE = "veth0"
PAYLOAD = 1448 / 1514  # of a full Ethernet frame with IPv4, TCP and its timestamps
SENT = Path(f"/sys/class/net/{DEVICE}/statistics/tx_bytes")
IMAGES, PIXELS = 4, 64  # of a micro-batch
COMPUTE = "compute alone"
UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
SECONDS = 1800.0
BOUND = 1e-4  # float32
LR = 0.1
ZERO = ("DeepSpeed", "distaccum")
CHOSEN = [
    *some_of("DDP", "by hand", "by hand, again", "Accelerate", "Lightning Fabric", "distaccum"),
    *some_of("DDP", "distaccum on Accelerate"),
    *some_of("DDP, views", "by hand", "distaccum"),
    *(one for engine in ("ZeRO 0", "ZeRO 1", "ZeRO 2, last") for one in some_of(engine, *ZERO)),
    *some_of("FSDP2, gathered", "by hand", "distaccum"),
    # The rest gather or reduce in each micro-step.
    *some_of("DDP, every micro-step", "by hand"),
    *(one for engine in ("ZeRO 2, every", "ZeRO 3, every") for one in some_of(engine, "DeepSpeed")),
    *some_of("ZeRO 3, last", *ZERO),
    *(one for sync in ("last", "every") for one in some_of(f"FSDP2, {sync}", "by hand", "distaccum")),
]
BY_HAND = one_of("DDP", "by hand")
Batch = tuple[Tensor, Tensor]


def task(steps: int) -> Task:
    net: Any = network()
    blocks = [block for layer in (net.layer1, net.layer2, net.layer3, net.layer4) for block in layer]
    return Task(net, loss_of, partial(SGD, lr=LR), steps, layers=tuple(blocks))


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    images, labels = batch
    return cross_entropy(model(images), labels)


def network() -> nn.Module:
    torch.manual_seed(0)
    return resnet18(norm_layer=partial(nn.GroupNorm, 32))


def gradient_bytes() -> int:
    return sum(p.numel() * p.element_size() for p in network().parameters())


def micro_batches(rank: int, steps: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(rank)
    images = torch.randn(steps * IMAGES, 3, PIXELS, PIXELS, generator=generator)
    labels = torch.randint(0, 1000, (steps * IMAGES,), generator=generator)
    return list(zip(images.split(IMAGES), labels.split(IMAGES), strict=True))


# Two nodes


@contextmanager
def two_nodes(rate: str) -> Iterator[tuple[str, str]]:
    """Makes two namespaces joined by a link of `rate` (in tc's format) each way; removes both at the end.

    Needs root and iproute2. Processes that still run in them at the end are killed.
    """
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise RuntimeError(f"{tool} is not here; install iproute2")
    if os.geteuid():
        raise RuntimeError("network namespaces need root; run it with sudo")
    number = os.getpid()  # keeps several of these programs apart
    nodes, ends = (f"distaccum{number}-0", f"distaccum{number}-1"), (f"da{number}", f"db{number}")
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the cleanup below still runs
    try:
        for node in nodes:
            run(f"ip netns add {node}", cure="in a container it needs --privileged")
        run(f"ip link add {ends[0]} type veth peer name {ends[1]}")
        for i, (node, end) in enumerate(zip(nodes, ends, strict=True)):
            run(f"ip link set {end} netns {node} name {DEVICE}")
            run(f"ip -n {node} addr add {address(i)}/24 dev {DEVICE}")
            run(f"ip -n {node} link set lo up")
            run(f"ip -n {node} link set {DEVICE} up")
            shape = f"tc -n {node} qdisc add dev {DEVICE} root tbf rate {rate} burst 128k latency 50ms"
            run(shape, cure="expected a rate such as 1gbit, and a kernel that has sch_tbf")
        yield nodes
    finally:
        for node in nodes:
            left = subprocess.run(["ip", "netns", "pids", node], capture_output=True, text=True).stdout.split()
            for process in left:
                os.kill(int(process), signal.SIGKILL)
            subprocess.run(["ip", "netns", "del", node], capture_output=True)
        subprocess.run(["ip", "link", "del", ends[0]], capture_output=True)  # if it was not moved yet
        signal.signal(signal.SIGTERM, before)


def address(node: int) -> str:
    return f"10.77.1.{node + 1}"


def run(command: str, cure: str = "") -> None:
    done = subprocess.run(shlex.split(command), capture_output=True, text=True)
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["no reason given"]
        raise RuntimeError(f"'{command}' failed: {said[-1]}{'; ' + cure if cure else ''}")


def on_each(nodes: Sequence[str], options: list[str], seconds: float) -> str:
    """Runs this program with these options, a rank on each node; returns the output of rank 0, which is short."""
    started = []
    try:
        for rank, node in enumerate(nodes):
            variables = {
                "MASTER_ADDR": address(0),
                "MASTER_PORT": "29577",
                "WORLD_SIZE": str(len(nodes)),
                "RANK": str(rank),
                "NODE_RANK": str(rank),
                "LOCAL_RANK": "0",
                "LOCAL_WORLD_SIZE": "1",
                "GLOO_SOCKET_IFNAME": DEVICE,
                "OMP_NUM_THREADS": "1",
            }
            command = ["ip", "netns", "exec", node, sys.executable, sys.argv[0], *options]
            out = subprocess.PIPE if rank == 0 else sys.stderr
            started.append(subprocess.Popen(command, env={**os.environ, **variables}, stdout=out, text=True))
        until = time.monotonic() + seconds
        while any(process.poll() is None for process in started):
            if any(process.poll() for process in started):
                break  # a rank failed, and the others wait for it
            if time.monotonic() > until:
                raise RuntimeError(f"the ranks did not end within {seconds:.0f} seconds")
            time.sleep(0.2)
        if any(process.poll() for process in started):
            raise RuntimeError("a rank failed; its own error stands above")
        assert started[0].stdout is not None
        return started[0].stdout.read()
    finally:
        for process in started:
            process.kill()
            process.wait()


# On a node


def measure_here(names: Sequence[str], steps: int, rounds: int) -> dict[str, Any] | None:
    """Measures on both ranks; returns the result on rank 0, None on the other."""
    be_quiet()
    dist.init_process_group("gloo")
    batches = micro_batches(dist.get_rank(), steps)
    expected = big_batch_gradient(steps)
    backwards: list[float] = []
    loops, off = {COMPUTE: computing(steps, backwards)}, {}
    for one in (one for one in CHOSEN if str(one) in names):
        loop = loops[str(one)] = one.set_up(task(steps))
        off[str(one)] = relative_difference(first_gradient(loop, batches), expected)
    mine = take_turns(loops, batches, rounds)
    both: list[Any] = [None, None]
    dist.all_gather_object(both, mine)
    if dist.get_rank():
        return None
    pairs = {name: list(zip(*(turns[name] for turns in both), strict=True)) for name in loops}
    return {
        "seconds": {name: [max(a.seconds, b.seconds) for a, b in turns] for name, turns in pairs.items()},
        "sent": {name: statistics.fmean((a.sent + b.sent) / 2 for a, b in turns) for name, turns in pairs.items()},
        "off": off,
        "backward": statistics.median(backwards),
    }


def big_batch_gradient(steps: int) -> Tensor:
    """The gradient of one call of the criterion on all samples of both ranks."""
    images, labels = zip(*(batch for rank in range(2) for batch in micro_batches(rank, steps)), strict=True)
    net = network()
    loss_of(net, (torch.cat(images), torch.cat(labels))).backward()
    return torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])


def first_gradient(loop: Loop, batches: list[Batch]) -> Tensor:
    """The gradient of one update, from the change of the weights."""
    before = loop.weights()
    loop.run(batches)
    return (before - loop.weights()) / LR


def computing(steps: int, backwards: list[float]) -> Loop:
    """Runs micro-steps and a step on this rank alone; adds the seconds of each backward to `backwards`."""
    net = network()
    optimizer = SGD(net.parameters(), lr=LR)

    def run(batches: Sequence[Batch]) -> None:
        for batch in batches:
            loss = loss_of(net, batch) / steps
            began = time.perf_counter()
            loss.backward()
            backwards.append(time.perf_counter() - began)
        optimizer.step()
        optimizer.zero_grad()

    return Loop(run, lambda: full_weights(net))


class Turn(NamedTuple):
    seconds: float
    sent: int  # bytes


def take_turns(loops: dict[str, Loop], batches: list[Batch], rounds: int) -> dict[str, list[Turn]]:
    """Times each loop's update in each round, on this rank; every other round is in reverse order, after a warm-up."""
    taken: dict[str, list[Turn]] = {name: [] for name in loops}
    order = list(loops.items())
    for turn in range(-1, rounds):
        for name, loop in order if turn % 2 else reversed(order):
            dist.barrier()
            sent, began = int(SENT.read_text()), time.perf_counter()
            loop.run(batches)
            seconds = time.perf_counter() - began
            dist.barrier()  # by now, all bytes that the other rank received have left this one's queue
            if turn >= 0:
                taken[name].append(Turn(seconds, int(SENT.read_text()) - sent))
    return taken


# All of it


def measure(chosen: Sequence[Contender], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measures a row for each contender, and one for the micro-steps alone."""
    names = list(dict.fromkeys([COMPUTE, str(BY_HAND), *map(str, chosen)]))
    with two_nodes(options.rate) as nodes:
        passed = ["--steps", str(options.steps), "--rounds", str(options.rounds), "--here", *names]
        found = json.loads(on_each(nodes, passed, SECONDS))
    seconds, rows = found["seconds"], []
    for name in names:
        reference = reference_of(name)
        rows.append(
            {
                "name": name,
                "seconds": seconds[name],
                "bytes": found["sent"][name],
                "of_engine": None if reference in (None, name) else ratios(seconds[name], seconds[reference]),
                "of_ddp": ratios(seconds[name], seconds[str(BY_HAND)]),
                "gradient_off": found["off"].get(name),
                "backward": found["backward"] if name == COMPUTE else None,
            }
        )
    return rows


def reference_of(name: str) -> str | None:
    """The name of the loop on the same wrapper without an extra library."""
    one = next((one for one in CHOSEN if str(one) == name), None)
    return None if one is None else f"{one.engine}, {one.reference}"


def limits(rows: list[dict[str, Any]], rate: str) -> dict[str, float]:
    """Lower bounds, in seconds, of an update with one all-reduce of the gradients, from measured parts."""
    alone = next(row for row in rows if row["name"] == COMPUTE)
    compute, wire = statistics.median(alone["seconds"]), 8 * gradient_bytes() / (bits(rate) * PAYLOAD)
    overlapped = compute + wire - min(alone["backward"], wire)
    return {
        "compute": compute,
        "backward": alone["backward"],
        "wire": wire,
        "in_turn": compute + wire,
        "overlapped": overlapped,
    }


def bits(rate: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", rate)
    if not found or float(found[1]) == 0:
        raise ValueError(f"--rate {rate}, expected one such as 1gbit or 200mbit")
    return float(found[1]) * UNITS[found[2]]


def tables(rows: list[dict[str, Any]], least: dict[str, float], options: argparse.Namespace) -> list[str]:
    limits = [
        (f"compute alone: {options.steps} micro-steps and a step, both ranks at work", f"{least['compute']:.3f}"),
        (f"wire: {gradient_bytes() / 1e6:.1f} MB at {PAYLOAD:.1%} of {options.rate}", f"{least['wire']:.3f}"),
        ("nothing overlapped: compute + wire", f"{least['in_turn']:.3f}"),
        (f"overlapped: compute + wire - one backward ({least['backward']:.3f})", f"{least['overlapped']:.3f}"),
    ]
    heads = ["", "s per update", "/ loop on the same wrapper", "/ DDP by hand", "MB sent per rank", "gradient off by"]
    cells = [
        (
            row["name"],
            f"{statistics.median(row['seconds']):.3f}",
            *(spelled(row[name]) for name in ("of_engine", "of_ddp")),
            f"{row['bytes'] / 1e6:.1f}",
            "-" if row["gradient_off"] is None else f"{row['gradient_off']:.0e}",
        )
        for row in rows
    ]
    return [*table(["limits of an update that reduces the gradients once", "s"], limits), *table(heads, cells)]


def notes(options: argparse.Namespace) -> list[str]:
    return [
        f"{listed(versions())}. Two ranks on gloo, each in a network namespace, {options.rate} each way between them "
        "(`tbf`, burst 128k).",
        f"An update: {options.steps} micro-steps of {IMAGES} images of {PIXELS} x {PIXELS} on each rank through "
        f"ResNet-18 with GroupNorm in float32 ({gradient_bytes() / 1e6:.1f} MB of gradients), and a step of SGD.",
        "*s per update*: of the slower rank, wall clock; median over the rounds. Ratios are of one round: median "
        "(least to most). *Loop on the same wrapper*: by hand, or DeepSpeed's own. *Again* is the same loop twice, so "
        "what it differs by is noise. *MB sent*: by the rank's device, acknowledgements too; mean of both. *Off by*: "
        "of an update's gradient, as the weights have moved by it, against one big batch of both ranks, in float32. "
        "(gloo's reduce-scatter sends as much as its all-reduce.)",
    ]


def chosen_by(parts: Sequence[str]) -> list[Contender]:
    """Contenders whose name contains one of the parts, and the loops that they are compared with."""
    asked = named(CHOSEN, parts)
    return [one for one in CHOSEN if one in asked or str(one) in map(reference_of, map(str, asked))]


def main() -> int:
    parser = Options(__doc__)
    parser.add_argument("--rate", default="1gbit", help="of the link, as tc takes it (%(default)s)")
    parser.counts("--steps", 8, "micro-steps of an update")
    parser.counts("--rounds", 4, "of turns")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="parts of names, such as 'ZeRO 2' Fabric")
    parser.hidden("--here", nargs="+")
    options = parser.parse_args()
    if options.here:
        with redirect_stdout(sys.stderr):  # output of DeepSpeed
            found = measure_here(options.here, options.steps, options.rounds)
        if found is not None:
            print(json.dumps(found), flush=True)
        return 0
    torch.set_num_threads(1)
    try:
        bits(options.rate)
        chosen = chosen_by(options.only)
        rows = measure(chosen, options)
    except (RuntimeError, ValueError) as error:
        parser.error(str(error))
    least, about = limits(rows, options.rate), circumstances(CPU)
    lines = header("Two nodes", about, *notes(options)) + tables(rows, least, options)
    write(options.out, "\n".join(lines), {**about, **versions(), "limits": least, "rows": rows})
    wrong = [row["name"] for row in rows if row["gradient_off"] is not None and not row["gradient_off"] < BOUND]
    if wrong:
        print(f"the gradient is not the big batch's: {'; '.join(wrong)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
