"""On a GPU: what a window costs beside the others' loops, in time and in memory.

    python launch/bench/gpu.py --out launch/results/gpu                               # some ten minutes
    python launch/bench/gpu.py --device cpu --small --rounds 1 --models transformer   # shows that it runs

ResNet-50 with GroupNorm at 224 pixels, and a decoder of 370 million parameters over 1,024 tokens; parameters in
float32, computing in bfloat16 by autocast, as each library's documentation has it; SGD with momentum, one process.

- rates:  images or tokens per second of each way to accumulate, by turns; on a GPU two of them under torch.compile
          too, and with CUDA graphs (mode="reduce-overhead").
- memory: the peak of an update beyond model and optimizer, by the size of its micro-batches.
- auto:   `micro_batch_size="auto"` against each fixed size, by `accumulator.update`.

Needs torchvision, accelerate, deepspeed and lightning-fabric.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from contenders import (
    Loop,
    Task,
    accelerate,
    be_quiet,
    deepspeed,
    lightning_fabric,
    plain_by_hand,
    plain_distaccum,
    versions,
)
from kit import (
    RETURNS,
    Options,
    circumstances,
    header,
    in_fresh_process,
    in_turns,
    peak_of,
    ratios,
    spelled,
    table,
    wrapped,
    write,
)
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD

from distaccum import Accumulator

Batch = tuple[Tensor, Tensor]
LossOf = Callable[[nn.Module, Batch], Tensor]
Make = Callable[[], Loop]
PARTS = ("rates", "memory", "auto")
AGAIN = "by hand, again"
sgd = partial(SGD, lr=1e-4, momentum=0.9)


@dataclass(frozen=True)
class Work:
    """What is trained, and by which sizes."""

    name: str
    unit: str
    net: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    units: int  # of a sample
    micro_batch: int  # where no other is said
    sizes: tuple[int, ...]
    batch_size: int  # of an update that is cut into `sizes`


class Decoder(nn.Module):
    """Each token sees those before it."""

    def __init__(self, tokens: int, width: int, layers: int, context: int) -> None:
        super().__init__()
        self.embedding, self.place = nn.Embedding(tokens, width), nn.Parameter(torch.zeros(context, width))
        layer = nn.TransformerEncoderLayer(
            width, width // 64, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, tokens)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        embedded = self.embedding(tokens) + self.place[:length]
        return self.head(self.layers(embedded, mask=mask, is_causal=True)).flatten(0, 1)


def is_out_of_memory(error: BaseException) -> bool:
    messages = ("out of memory", "can't allocate memory", "ALLOC_FAILED")  # of allocators and CUDA libraries
    return isinstance(error, MemoryError) or any(message in str(error) for message in messages)


def resnet(device: torch.device, small: bool) -> Work:
    from torchvision.models import resnet18, resnet50

    make, pixels = (resnet18, 64) if small else (resnet50, 224)

    def net() -> nn.Module:
        torch.manual_seed(0)
        return make(norm_layer=partial(nn.GroupNorm, 32)).to(device)

    def batch(size: int) -> Batch:
        return torch.randn(size, 3, pixels, pixels, device=device), torch.randint(0, 1000, (size,), device=device)

    sizes = (1, 4, 8) if small else (16, 32, 64, 128, 256)
    name = f"{make.__name__.replace('resnet', 'ResNet-')} with GroupNorm, {pixels} pixels"
    return Work(name, "images", net, batch, 1, 4 if small else 64, sizes, 8 if small else 1024)


def transformer(device: torch.device, small: bool) -> Work:
    vocabulary, width, layers, context = (512, 64, 2, 64) if small else (32768, 1024, 24, 1024)

    def net() -> nn.Module:
        torch.manual_seed(0)
        return Decoder(vocabulary, width, layers, context).to(device)

    def batch(size: int) -> Batch:
        tokens = torch.randint(0, vocabulary, (size, context + 1), device=device)
        return tokens[:, :-1], tokens[:, 1:]

    sizes = (1, 2, 4) if small else (1, 2, 4, 8, 16, 32)
    name = f"decoder of {layers} layers, width {width}, {context} tokens"
    return Work(name, "tokens", net, batch, context, 2 if small else 8, sizes, 4 if small else 64)


MODELS = {"resnet": resnet, "transformer": transformer}


# The loops


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    return cross_entropy(model(x).float(), y.flatten())


def under_autocast(model: nn.Module, batch: Batch) -> Tensor:
    with torch.autocast(batch[0].device.type, torch.bfloat16):
        return loss_of(model, batch)


def with_cuda_graphs(model: nn.Module, batch: Batch) -> Tensor:
    torch.compiler.cudagraph_mark_step_begin()  # the last micro-step's outputs may be written over
    return under_autocast(model, batch)


def makers(work: Work, steps: int, device: torch.device) -> dict[str, Make]:
    """Each of a fresh net; DeepSpeed last, since it makes a process group."""

    def task(loss: LossOf = under_autocast, **options: Any) -> Task:
        module: Any = torch.compile(work.net(), **options) if options else work.net()
        return Task(module, loss, sgd, steps)

    compiled, graphs = partial(task, mode="default"), partial(task, with_cuda_graphs, mode="reduce-overhead")
    found: dict[str, Make] = {
        "by hand": lambda: plain_by_hand(task()),
        AGAIN: lambda: plain_by_hand(task()),
        "distaccum": lambda: plain_distaccum(task()),
        "Accelerate": lambda: accelerate(task(loss_of), cpu=device.type == "cpu", mixed_precision="bf16"),
        "Lightning Fabric": lambda: lightning_fabric(task(loss_of), accelerator=device.type, precision="bf16-mixed"),
    }
    if device.type == "cuda":
        for how, make in {"compiled": compiled, "CUDA graphs": graphs}.items():
            found[f"by hand, {how}"] = lambda make=make: plain_by_hand(make())
            found[f"distaccum, {how}"] = lambda make=make: plain_distaccum(make())
    found["DeepSpeed 0"] = lambda: deepspeed(task(loss_of), 0, torch_autocast={"enabled": True, "dtype": "bfloat16"})
    return found


# What is measured


def rates(work: Work, options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Seconds of an update by turns; what a loop that fails says stands in its place."""
    made = makers(work, options.steps, device)
    batches = [work.batch(work.micro_batch) for _ in range(options.steps)]
    loops, rows = {}, {}
    for name, make in made.items():
        print(f"  {name}", file=sys.stderr)
        try:
            loop = make()
            loop.run(batches)
            loops[name] = partial(loop.run, batches)
        except Exception as error:  # of another library, or of a compiler, on hardware that nobody has tried
            if name == "by hand":
                raise
            rows[name] = {"failed": f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"}
    taken = in_turns(loops, options.rounds, device)
    units = options.steps * work.micro_batch * work.units
    for name, seconds in taken.items():
        rate = units / statistics.median(seconds)
        rows[name] = {"seconds": seconds, "rate": rate, "time": ratios(seconds, taken["by hand"])}
    return {name: rows[name] for name in made}


def memory(work: Work, device: torch.device) -> dict[str, dict[int, float | None]]:
    """MB at the peak of an update of the largest size, by the size of its micro-batches; None where it does not fit."""
    peaks: dict[str, dict[int, float | None]] = {}
    for size in work.sizes:
        batches = [work.batch(size) for _ in range(work.sizes[-1] // size)]
        for name, make in makers(work, len(batches), device).items():
            if name == AGAIN or "compiled" in name or "graphs" in name:
                continue
            print(f"  {name}, {size}", file=sys.stderr)
            loop = None
            try:
                loop = make()
                loop.run(batches)  # makes the optimizer's state
                peak: float | None = peak_of(partial(loop.run, batches), device)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                peak = None
            peaks.setdefault(name, {})[size] = peak
            del loop
            release(device)
    return peaks


def auto(work: Work, options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Seconds of an update of one batch, by turns, on a net that does not move: as `auto` cuts it, and by each size."""
    net, whole = work.net(), work.batch(work.batch_size)
    seen: list[int] = []

    def loss(batch: Batch) -> Tensor:
        seen.append(len(batch[0]))
        return under_autocast(net, batch)

    def update_of(size: Any) -> Callable[[], object]:
        optimizer = SGD(net.parameters(), lr=0.0)
        accumulator = Accumulator(net, optimizer, batch_size=work.batch_size, micro_batch_size=size)
        return lambda: accumulator.update(whole, loss)

    found = update_of("auto")
    found()
    updates: dict[str, Callable[[], object]] = {"auto": found}
    for size in work.sizes:
        try:
            fixed = update_of(size)
            fixed()
            updates[str(size)] = fixed
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            release(device)
    taken = in_turns(updates, options.rounds, device)
    best = min((name for name in taken if name != "auto"), key=lambda name: statistics.median(taken[name]))
    seen.clear()
    found()
    return {
        "batch_size": work.batch_size,
        "found": seen[-1],
        "best": int(best),
        "time": ratios(taken["auto"], taken[best]),
        "seconds": taken,
    }


def release(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def measure(model: str, options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    work = MODELS[model](device, options.small)
    found: dict[str, Any] = {"name": work.name, "unit": work.unit, "micro_batch": work.micro_batch}
    for part in options.parts:
        print(f"{work.name}: {part}", file=sys.stderr)
        if part == "rates":
            found[part] = rates(work, options, device)
        elif part == "memory":
            # A host's peak shows only where the allocator gives back what is freed.
            environment = RETURNS if device.type == "cpu" else None
            passed = ["--device", device.type, *(["--small"] if options.small else []), "--peaks", model]
            found[part] = in_fresh_process(*passed, environment=environment)
        else:
            found[part] = auto(work, options, device)
        release(device)
    return found


# The report


def lines_of(found: Mapping[str, Any], options: argparse.Namespace) -> list[str]:
    lines = ["", f"## {found['name']}", ""]
    if "rates" in found:
        lines += [f"**Rates**: windows of {options.steps} micro-batches of {found['micro_batch']}.", ""]
        rows = [
            (name, *(("failed", row["failed"]) if "failed" in row else (f"{row['rate']:,.0f}", spelled(row["time"]))))
            for name, row in found["rates"].items()
        ]
        lines += table(["", f"{found['unit']} per second", "time / by hand"], rows)
    if "memory" in found:
        sizes = list(next(iter(found["memory"].values())))
        lines += [f"**Memory**: peak MB of an update of {sizes[-1]} samples, by the samples of a micro-batch.", ""]
        shown = {
            name: ["-" if one is None else f"{one:,.0f}" for one in of.values()] for name, of in found["memory"].items()
        }
        lines += table(["", *sizes], [(name, *cells) for name, cells in shown.items()])
    if "auto" in found:
        row = found["auto"]
        lines += wrapped(
            f"**Auto**: of a batch of {row['batch_size']}, 'auto' takes micro-batches of {row['found']}; the fastest "
            f"of {', '.join(name for name in row['seconds'] if name != 'auto')} is {row['best']}; time of auto / of "
            f"that: {spelled(row['time'])}."
        )
    return lines


def notes(device: torch.device, small: bool, rounds: int) -> list[str]:
    others = ", ".join(f"{name} {version}" for name, version in versions().items())
    lines = [
        f"{others}. Parameters in float32, computing in bfloat16 by autocast, SGD with momentum, one process. Times "
        f"are ratios to the loop by hand of the same round; median of {rounds} rounds (least to most). *Again* is the "
        "same loop twice, so what it differs by is noise. Memory: beyond model, optimizer state and data; - where it "
        "does not fit.",
    ]
    if device.type == "cpu" or small:
        lines.insert(0, "**The figures of a GPU are to come.** These, of a small model, show that the program runs; "
                     "on a CPU memory is the process's.")  # fmt: skip
    return lines


def main() -> int:
    parser = Options(__doc__)
    parser.device()
    parser.add_argument("--small", action="store_true", help="small models and batches")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS), help="(both)")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="(all)")
    parser.counts("--steps", 8, "micro-steps of an update")
    parser.counts("--rounds", 10, "of turns")
    parser.hidden("--peaks", choices=list(MODELS))
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda, and torch sees no GPU; --device cpu --small shows that the program runs")
    if options.device == "cpu" and not options.small:
        parser.error("--device cpu takes hours with these models; add --small")
    device = torch.device(options.device)
    be_quiet()
    if options.peaks:
        with redirect_stdout(sys.stderr):  # what the libraries say
            peaks = memory(MODELS[options.peaks](device, options.small), device)
        print(json.dumps(peaks))
        return 0
    found = [measure(model, options, device) for model in options.models]
    about = circumstances(device)
    lines = header("On a GPU", about, *notes(device, options.small, options.rounds))[:-1]
    for one in found:
        lines += lines_of(one, options)
    is_gpu = device.type == "cuda" and not options.small
    result = {**about, **versions(), "figures_of_a_gpu": is_gpu or "to come", "models": found}
    write(options.out, "\n".join(lines), result)
    failed = [name for one in found for name, row in one.get("rates", {}).items() if "failed" in row]
    if failed:
        print(f"failed: {'; '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
