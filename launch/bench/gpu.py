"""The cost of a window on a GPU in time and memory, compared with the other loops.

    python launch/bench/gpu.py --out launch/results/gpu                    # about ten minutes
    python launch/bench/gpu.py --device cpu --small --rounds 1             # only to see that it runs

A decoder of 370 million parameters over 1,024 tokens; parameters in float32, computing in bfloat16 by autocast, as in
each library's documentation; SGD with momentum, one process.

- rates:  tokens per second of each way to accumulate, in turns; on a GPU two of them also under torch.compile, and with
          CUDA graphs (mode="reduce-overhead").
- memory: the peak of an update beyond model and optimizer, by micro-batch size.
- auto:   `micro_batch_size="auto"` against each fixed size, with `accumulator.update`.

Needs accelerate, deepspeed and lightning-fabric.
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
from training.gpt import GPT

from distaccum import Accumulator

Batch = tuple[Tensor, Tensor]
Make = Callable[[], Loop]
PARTS = ("rates", "memory", "auto")
AGAIN = "by hand, again"
sgd = partial(SGD, lr=1e-4, momentum=0.9)


@dataclass(frozen=True)
class Work:
    """A decoder, and the sizes of its batches."""

    device: torch.device
    vocabulary: int = 32768
    width: int = 1024
    layers: int = 24
    context: int = 1024
    micro_batch: int = 8  # default
    sizes: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    batch_size: int = 64  # of an update that is cut to `sizes`

    def net(self) -> nn.Module:
        torch.manual_seed(0)
        return GPT(self.width, self.layers, self.context, self.vocabulary).to(self.device)

    def batch(self, size: int) -> Batch:
        tokens = torch.randint(0, self.vocabulary, (size, self.context + 1), device=self.device)
        return tokens[:, :-1], tokens[:, 1:]


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    tokens, labels = batch
    return cross_entropy(model(tokens).flatten(0, 1).float(), labels.flatten())


def under_autocast(model: nn.Module, batch: Batch) -> Tensor:
    with torch.autocast(batch[0].device.type, torch.bfloat16):
        return loss_of(model, batch)


def with_cuda_graphs(model: nn.Module, batch: Batch) -> Tensor:
    torch.compiler.cudagraph_mark_step_begin()  # the last micro-step's outputs may be overwritten
    return under_autocast(model, batch)


def makers(work: Work, steps: int) -> dict[str, Make]:
    """Makers of loops, each with a fresh net; DeepSpeed comes last, since it makes a process group."""

    def task(loss: Callable[[nn.Module, Batch], Tensor] = under_autocast, **options: Any) -> Task:
        module: Any = torch.compile(work.net(), **options) if options else work.net()
        return Task(module, loss, sgd, steps)

    kind = work.device.type
    found: dict[str, Make] = {
        "by hand": lambda: plain_by_hand(task()),
        AGAIN: lambda: plain_by_hand(task()),
        "distaccum": lambda: plain_distaccum(task()),
        "Accelerate": lambda: accelerate(task(loss_of), cpu=kind == "cpu", mixed_precision="bf16"),
        "Lightning Fabric": lambda: lightning_fabric(task(loss_of), accelerator=kind, precision="bf16-mixed"),
    }
    if kind == "cuda":
        compiled, graphs = partial(task, mode="default"), partial(task, with_cuda_graphs, mode="reduce-overhead")
        for how, make in {"compiled": compiled, "CUDA graphs": graphs}.items():
            found[f"by hand, {how}"] = lambda make=make: plain_by_hand(make())
            found[f"distaccum, {how}"] = lambda make=make: plain_distaccum(make())
    found["DeepSpeed 0"] = lambda: deepspeed(task(loss_of), 0, torch_autocast={"enabled": True, "dtype": "bfloat16"})
    return found


def rates(work: Work, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of an update, in turns; for a loop that fails, its error."""
    made = makers(work, options.steps)
    batches = [work.batch(work.micro_batch) for _ in range(options.steps)]
    loops, rows = {}, {}
    for name, make in made.items():
        print(f"  {name}", file=sys.stderr)
        try:
            loop = make()
            loop.run(batches)
            loops[name] = partial(loop.run, batches)
        except Exception as error:  # from another library or a compiler, on untried hardware
            if name == "by hand":
                raise
            rows[name] = {"failed": f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"}
    taken = in_turns(loops, options.rounds, work.device)
    for name, seconds in taken.items():
        rate = options.steps * work.micro_batch * work.context / statistics.median(seconds)
        rows[name] = {"seconds": seconds, "rate": rate, "time": ratios(seconds, taken["by hand"])}
    return {name: rows[name] for name in made}


def fits(work: Work, run: Callable[[], object]) -> bool:
    try:
        run()
    except RuntimeError as error:
        messages = ("out of memory", "can't allocate memory", "ALLOC_FAILED")  # of allocators and CUDA libraries
        if not any(message in str(error) for message in messages):
            raise
        release(work.device)
        return False
    return True


def memory(work: Work) -> dict[str, dict[int, float | None]]:
    """MB at the peak of an update of the largest size, by micro-batch size; None if it does not fit."""
    peaks: dict[str, dict[int, float | None]] = {}
    for size in work.sizes:
        batches = [work.batch(size) for _ in range(work.sizes[-1] // size)]
        for name, make in makers(work, len(batches)).items():
            if name == AGAIN or "compiled" in name or "graphs" in name:
                continue
            print(f"  {name}, {size}", file=sys.stderr)
            loop = make()
            update = partial(loop.run, batches)  # the first makes the optimizer's state
            peaks.setdefault(name, {})[size] = peak_of(update, work.device) if fits(work, update) else None
            del loop, update
            release(work.device)
    return peaks


def auto(work: Work, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of an update of one batch, in turns, with constant weights: as `auto` cuts it, and cut to each size."""
    net, whole = work.net(), work.batch(work.batch_size)
    seen: list[int] = []

    def loss(batch: Batch) -> Tensor:
        seen.append(len(batch[0]))
        return under_autocast(net, batch)

    def update_of(size: Any) -> Callable[[], object]:
        optimizer = SGD(net.parameters(), lr=0.0)
        accumulator = Accumulator(net, optimizer, batch_size=work.batch_size, micro_batch_size=size)
        return lambda: accumulator.update(whole, loss)

    updates = {str(size): update_of(size) for size in ("auto", *work.sizes)}
    taken = in_turns({name: one for name, one in updates.items() if fits(work, one)}, options.rounds, work.device)
    best = min((name for name in taken if name != "auto"), key=lambda name: statistics.median(taken[name]))
    seen.clear()
    updates["auto"]()
    return {"found": seen[-1], "best": int(best), "time": ratios(taken["auto"], taken[best]), "seconds": taken}


def release(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def lines_of(found: Mapping[str, Any], work: Work, steps: int) -> list[str]:
    lines = []
    if "rates" in found:
        lines += [f"**Rates**: windows of {steps} micro-batches of {work.micro_batch}.", ""]
        rows = [
            (name, *(("failed", row["failed"]) if "failed" in row else (f"{row['rate']:,.0f}", spelled(row["time"]))))
            for name, row in found["rates"].items()
        ]
        lines += table(["", "tokens per second", "time / by hand"], rows)
    if "memory" in found:
        lines += [f"**Memory**: peak MB of an update of {work.sizes[-1]} rows, by the rows of a micro-batch.", ""]
        peaks = [
            (name, *("-" if peak is None else f"{peak:,.0f}" for peak in of_sizes.values()))
            for name, of_sizes in found["memory"].items()
        ]
        lines += table(["", *work.sizes], peaks)
    if "auto" in found:
        row = found["auto"]
        lines += wrapped(
            f"**Auto**: of a batch of {work.batch_size}, 'auto' takes micro-batches of {row['found']}; the fastest "
            f"of {', '.join(name for name in row['seconds'] if name != 'auto')} is {row['best']}; time of auto / of "
            f"that: {spelled(row['time'])}."
        )
    return lines


def notes(work: Work, small: bool, rounds: int) -> list[str]:
    others = ", ".join(f"{name} {version}" for name, version in versions().items())
    lines = [
        f"{others}. A decoder of {work.layers} layers, width {work.width}, {work.context} tokens; parameters in "
        "float32, computing in bfloat16 by autocast, SGD with momentum, one process. Times are ratios to the loop by "
        f"hand of the same round; median of {rounds} rounds (least to most). *Again* is the same loop twice, so what "
        "it differs by is noise. Memory: beyond model, optimizer state and data; - where it does not fit.",
    ]
    if work.device.type == "cpu" or small:
        to_come = "**The figures of a GPU are to come.** These, of a small model, show that the program runs"
        lines.insert(0, f"{to_come}; on a CPU memory is the process's.")
    return lines


def main() -> int:
    parser = Options(__doc__)
    parser.device()
    parser.add_argument("--small", action="store_true", help="a small model and small batches")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="(all)")
    parser.counts("--steps", 8, "micro-steps of an update")
    parser.counts("--rounds", 10, "of turns")
    parser.hidden("--peaks", action="store_true")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda, and torch sees no GPU; --device cpu --small shows that the program runs")
    if options.device == "cpu" and not options.small:
        parser.error("--device cpu takes hours with this model; add --small")
    device = torch.device(options.device)
    work = Work(device, 512, 64, 2, 64, 2, (1, 2, 4), 4) if options.small else Work(device)
    be_quiet()
    if options.peaks:
        with redirect_stdout(sys.stderr):  # output of the libraries
            peaks = memory(work)
        print(json.dumps(peaks))
        return 0
    found: dict[str, Any] = {}
    for part in options.parts:
        print(part, file=sys.stderr)
        if part == "memory":  # a host's peak shows only if the allocator returns freed memory
            passed = ["--device", device.type, *(["--small"] if options.small else []), "--peaks"]
            found[part] = in_fresh_process(*passed, environment=RETURNS if device.type == "cpu" else None)
        else:
            found[part] = {"rates": rates, "auto": auto}[part](work, options)
        release(device)
    about = circumstances(device)
    lines = header("On a GPU", about, *notes(work, options.small, options.rounds))
    is_gpu = device.type == "cuda" and not options.small
    result = {**about, **versions(), "figures_of_a_gpu": is_gpu or "to come", **found}
    write(options.out, "\n".join([*lines, *lines_of(found, work, options.steps)]), result)
    failed = [name for name, row in found.get("rates", {}).items() if "failed" in row]
    if failed:
        print(f"failed: {'; '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
