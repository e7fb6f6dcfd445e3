"""Peak memory of each way to accumulate: by the micro-batch's size, and of a net whose parameters dominate.

    python launch/bench/memory.py --out launch/results/memory
    python launch/bench/memory.py --only DDP --sizes 1 32              # a minute

- A fixed batch per rank, cut into micro-batches of --sizes: a net whose activations dominate, SGD with momentum.
- Parameters of 128 MiB and small activations, SGD: the first and the fifth update, and memory held between updates.

Each row comes from fresh processes, one or two ranks on gloo: resident memory of rank 0 (Linux) beyond that of the
same process before the model was made. Needs accelerate, deepspeed and lightning-fabric.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import kit
import torch
import torch.distributed as dist
from contenders import Contender, Loop, Task, as_torchrun, be_quiet, named, some_of, versions
from torch import Tensor, nn
from torch.optim import SGD

MIB = 2**20
SECONDS = 240.0  # for one contender
LIBRARIES = ("Accelerate", "Lightning Fabric")
OWN = ("DeepSpeed", "distaccum")
CHOSEN = [
    *some_of("plain", "by hand", *LIBRARIES, "DeepSpeed 0", "distaccum"),
    *some_of("DDP", "by hand", *LIBRARIES, "distaccum", "distaccum on Accelerate"),
    *some_of("DDP, views", "by hand", "distaccum"),
    *(one for engine in ("ZeRO 0", "ZeRO 1", "ZeRO 2, last") for one in some_of(engine, *OWN)),
    *(one for sync in ("last", "gathered", "every") for one in some_of(f"FSDP2, {sync}", "by hand", "distaccum")),
]
STEPS, UPDATES, SAMPLES = 4, 5, 4  # for the net whose parameters dominate
WIDTH, DEPTH = 2048, 8  # 128 MiB of weights


# Two nets


def deep() -> nn.Sequential:
    """A net that is all parameters: the activations of a few samples are negligible."""
    layers = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH))
    return nn.Sequential(*(part for layer in layers for part in (layer, nn.Tanh())))


CHANNELS, PIXELS = 16, 64


def wide() -> nn.Sequential:
    """Convolutions that keep 2 MiB or more of each sample, followed by 4 MiB of parameters."""
    blocks = [part for i in range(8) for part in (nn.Conv2d(CHANNELS if i else 3, CHANNELS, 1), nn.Tanh())]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(8), nn.Flatten(), nn.Linear(64 * CHANNELS, 1024))


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def layers_of(net: nn.Sequential) -> tuple[nn.Module, ...]:
    return tuple(layer for layer in net if isinstance(layer, nn.Linear | nn.Conv2d))


def set_up(contender: Contender, net: nn.Sequential, steps: int, momentum: float = 0.0) -> Loop:
    optimizer = partial(SGD, lr=1e-3, momentum=momentum)
    return contender.set_up(Task(net, loss_of, optimizer, steps, layers=layers_of(net)))


# In a fresh process


def measure_here(name: str, samples: int, sizes: Sequence[int]) -> dict[str, Any]:
    """Measures a row on this rank; before each figure, leftovers are freed, and the memory still held is subtracted."""
    be_quiet()
    if dist.is_initialized():
        as_torchrun()
    contender = next(one for one in CHOSEN if str(one) == name)
    of_micro_batch(contender, 2, 1)  # makes libraries and kernels load everything
    peaks = {size: of_micro_batch(contender, samples, size) for size in sorted(sizes)}
    row = {"name": name, "engine": contender.engine, "peaks": peaks}
    return {**row, **of_parameters(contender)}


def without_a_model() -> int:
    gc.collect()
    return kit.resident("VmRSS")


def of_micro_batch(contender: Contender, samples: int, size: int) -> float:
    """MiB at the peak of the third update of `samples` samples in micro-batches of `size`."""
    batches = list(torch.randn(samples, 3, PIXELS, PIXELS).split(size))
    without = without_a_model()
    loop = set_up(contender, wide(), len(batches), momentum=0.9)
    for _ in range(2):  # DDP rebuilds its buckets in the second
        loop.run(batches)
    held = kit.resident("VmRSS") - without
    return (held + 1e6 * kit.peak_of(lambda: loop.run(batches), kit.CPU)) / MIB


def of_parameters(contender: Contender) -> dict[str, Any]:
    batches = [torch.randn(SAMPLES, WIDTH) for _ in range(STEPS)]
    without = without_a_model()
    loop = set_up(contender, deep(), STEPS)
    peaks = []
    for _ in range(UPDATES):
        held = kit.resident("VmRSS") - without
        peaks.append((held + 1e6 * kit.peak_of(lambda: loop.run(batches), kit.CPU)) / MIB)
    gc.collect()
    held = kit.resident("VmRSS") - without
    return {"first": peaks[0], "fifth": peaks[-1], "held": held / MIB}


# All of it


def measure(chosen: Sequence[Contender], options: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for contender in chosen:
        print(contender, file=sys.stderr)
        if contender.on_ranks:
            given = str(contender), options.batch_size, options.sizes
            row = kit.in_ranks(2, measure_here, *given, seconds=SECONDS, anew=True)[0]
        else:  # even in a group of one, Accelerate would wrap the model in DDP
            sizes = ["--sizes", *map(str, options.sizes)]
            row = kit.in_fresh_process("--here", str(contender), "--batch-size", str(options.batch_size), *sizes)
            row["peaks"] = {int(size): peak for size, peak in row["peaks"].items()}
        rows.append(row)
    return rows


def tables(rows: list[dict[str, Any]], options: argparse.Namespace) -> list[str]:
    peaks = [(row["name"], *(f"{peak:.0f}" for peak in row["peaks"].values())) for row in rows]
    large = [(row["name"], *(f"{row[name]:.0f}" for name in ("first", "fifth", "held"))) for row in rows]
    return [
        f"**A batch of {options.batch_size} samples per rank: peak MiB by the samples of a micro-batch**",
        "",
        *kit.table(["", *options.sizes], peaks),
        "**Parameters of 128 MiB: MiB**",
        "",
        *kit.table(["", "peak, 1st update", "peak, 5th", "held between updates"], large),
    ]


def notes(options: argparse.Namespace) -> list[str]:
    parameters = sum(p.numel() * p.element_size() for p in wide().parameters()) / MIB
    return [
        f"{kit.listed(versions())}. float32, two ranks on gloo (one process where it says plain). Each row is of fresh "
        "processes, on rank 0, beyond the same one before the model was made, its libraries loaded; resident memory, "
        "with a glibc that gives back at once what is freed. A figure repeats within some 4 MiB.",
        f"*First table*: {options.batch_size} images of {PIXELS} x {PIXELS} on each rank through convolutions, "
        f"{parameters:.1f} MiB of parameters, SGD with momentum; the third update.",
        f"*Second*: {DEPTH} layers of {WIDTH} x {WIDTH}, windows of {STEPS} micro-batches of {SAMPLES}, SGD.",
    ]


def main() -> int:
    parser = kit.Options(__doc__)
    parser.counts("--batch-size", 32, "samples of an update on each rank")
    parser.counts("--sizes", [1, 4, 16, 32])
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="parts of names, such as 'ZeRO 2' Fabric")
    parser.hidden("--here")
    options = parser.parse_args()
    for size in options.sizes:
        if options.batch_size % size:
            parser.error(f"--sizes {size} does not divide --batch-size {options.batch_size}")
    try:
        chosen = named(CHOSEN, options.only)
    except ValueError as error:
        parser.error(str(error))
    if not Path("/proc/self/clear_refs").exists():
        parser.error("the peak of a process is read from Linux's /proc, which is not here")
    os.environ.update({**kit.RETURNS, "OMP_NUM_THREADS": "1"})  # for processes started from here
    if options.here:
        with redirect_stdout(sys.stderr):  # output of the libraries
            row = measure_here(options.here, options.batch_size, options.sizes)
        print(json.dumps(row))
        return 0
    torch.set_num_threads(1)
    rows = measure(chosen, options)
    about = kit.circumstances(kit.CPU)
    lines = kit.header("Memory", about, *notes(options)) + tables(rows, options)
    kit.write(options.out, "\n".join(lines), {**about, **versions(), "rows": rows})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
