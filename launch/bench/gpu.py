"""What only a GPU can show, on one page: exactness, host waits, memory, "auto", FSDP2, and time.

    python launch/bench/gpu.py --out launch/results/gpu   # about six minutes
    python launch/bench/gpu.py --device cpu --small       # only to see that it runs

Needs torch; what needs accelerate, lightning or torchvision says so if it is missing. Each part runs in a process of
its own, for a time of its own; one that fails or is stopped says so on the page, and the others go on.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from typing import Any

import kit
import torch
import torch.distributed as dist
from contenders import Loop, Task, be_quiet, fsdp2_by_hand, fsdp2_distaccum, one_of
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD
from training.gpt import GPT
from trials import EXACT, PRECISIONS, TOKENS, WAITS, Trial, flat, most_waits, obeys, within

from distaccum import Accumulator

Row = Sequence[str]
OTHERS = ("accelerate", "lightning", "lightning-fabric", "torchvision")
IGNORE = "distaccum, on_nonfinite='ignore'"
WAYS = ("by hand", "by hand, again", "distaccum", IGNORE, "Accelerate", "Lightning Fabric")
PARTS: dict[str, Part] = {}
sgd = partial(SGD, lr=1e-4, momentum=0.9)


@dataclass(frozen=True)
class Part:
    run: Callable[[Work], Iterator[Row]]  # its docstring stands on the page
    seconds: int  # at most
    heads: Sequence[str]


def part(seconds: int, *heads: str) -> Callable[[Any], Any]:
    def add(run: Callable[[Work], Iterator[Row]]) -> Any:
        PARTS[run.__name__] = Part(run, seconds, heads)
        return run

    return add


@dataclass(frozen=True)
class Work:
    """The device, and the models that run there."""

    device: torch.device
    is_small: bool

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    def gpt(self) -> GPT:
        torch.manual_seed(0)
        with self.device:
            net = GPT(64, 2, 16, 128) if self.is_small else GPT(768, 12, 1024, 50304)
        nn.init.normal_(net.tokens.weight, std=0.02)
        net.scores.weight = net.tokens.weight
        return net

    def text(self, rows: int) -> Tensor:
        return torch.randint(0, *((128, (rows, 17)) if self.is_small else (50304, (rows, 1025))), device=self.device)

    def resnet(self) -> nn.Module:
        from torchvision import models

        with self.device:
            net: nn.Module = (models.resnet18 if self.is_small else models.resnet50)()
        return net

    def tiny(self) -> nn.Module:
        return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)).to(self.device)

    def under_autocast(self, loss: Any) -> Any:
        def cast(model: nn.Module, batch: Tensor) -> Tensor:
            with torch.autocast(self.device.type, torch.bfloat16):
                value: Tensor = loss(model, batch)
            return value

        return cast


def loss_of_text(model: nn.Module, text: Tensor) -> Tensor:
    return cross_entropy(model(text[:, :-1]).flatten(0, 1).float(), text[:, 1:].flatten())


def mean_square(model: nn.Module, rows: Tensor) -> Tensor:
    return model(rows).float().square().mean()


def attempt(call: Callable[..., str], *given: Any) -> str:
    """The cell that `call` gives or, in bold, its error."""
    try:
        return call(*given)
    except ImportError as error:
        return f"not installed: {error.name}"
    except Exception as error:  # of an untried device, or another library
        traceback.print_exc()
        return f"**{in_words(error)}**"


def in_words(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:150]}".replace("|", "/")


@part(60, "", *PRECISIONS)
def exact(work: Work) -> Iterator[Row]:
    """The relative error of the gradient that the optimizer gets, against one big batch in float64. Windows of 5, 3 and
    8 rows; labels on the device; half precision by autocast.
    """
    for name, shows in EXACT.items():
        yield name, *(attempt(shows, work.device, precision) for precision in PRECISIONS)


@part(40, "", "at a window's edges", "allowed")
def waits(work: Work) -> Iterator[Row]:
    """Waits of the host for the device, by `torch.cuda.set_sync_debug_mode`: in a window's loop one is an error; at its
    edges (plan and step) they are counted, and this is the most in four windows.
    """
    for name, (most, *_) in WAITS.items():
        yield name, attempt(most_waits, work.device, name), str(most)


# Memory and time


def ways(work: Work, make: Callable[[], Any], loss: Any, steps: int) -> dict[str, Callable[[], Loop]]:
    """Makers of loops, each with a fresh model."""
    more: dict[str, dict[str, Any]] = {
        "distaccum": {"batchnorm": "ignore"},
        IGNORE: {"batchnorm": "ignore"},
        "Accelerate": {"cpu": not work.is_cuda, "mixed_precision": "bf16"},
        "Lightning Fabric": {"accelerator": work.device.type, "precision": "bf16-mixed"},
    }

    def set_up(name: str) -> Loop:
        casts = "precision" in str(more.get(name))  # otherwise the loss does
        task = Task(make(), loss if casts else work.under_autocast(loss), sgd, steps)
        call: Any = one_of("plain", name).set_up
        loop: Loop = call(task, **more.get(name, {}))
        return loop

    return {name: partial(set_up, name) for name in WAYS}


def compared(work: Work, made: Mapping[str, Callable[[], Loop]], batches: Sequence[Any]) -> list[str]:
    """Milliseconds of a window of the first loop, and of each other loop its ratio to that, or why there is none."""
    windows = max(1, 8 // len(batches))
    turns: dict[str, Callable[[], object]] = {}

    def set_up(make: Callable[[], Loop], name: str) -> str:
        run = make().run
        run(batches)  # may fail
        turns[name] = lambda: [run(batches) for _ in range(windows)]
        return ""

    cells = {name: attempt(set_up, make, name) for name, make in made.items()}
    if not turns:
        return list(cells.values())
    rounds = 1 if work.is_small else 7 if len(batches) <= 8 else 3
    (_, first), *others = kit.in_turns(turns, rounds, work.device).items()
    cells |= {name: kit.spelled(kit.ratios(values, first)) for name, values in others}
    return [f"{1000 * statistics.median(first) / windows:.2f}", *list(cells.values())[1:]]


@part(60, "", "MB", "/ by hand")
def memory(work: Work) -> Iterator[Row]:
    """Peak memory of an update of 4 micro-batches, beyond model, optimizer and data; GPT."""
    batches = [work.text(4) for _ in range(4)]
    hand = math.nan
    for name, make in ways(work, work.gpt, loss_of_text, len(batches)).items():
        peak = math.nan

        def cell(make: Callable[[], Loop] = make) -> str:
            nonlocal peak
            loop = make()
            loop.run(batches)  # makes the optimizer's state
            peak = kit.peak_of(partial(loop.run, batches), work.device)
            return f"{peak:,.0f}"

        shown = attempt(cell)
        hand = peak if name == WAYS[0] else hand
        yield name, shown, "-" if math.isnan(peak) or not hand else f"{peak / hand:.3f}"


# What update() finds, and FSDP2


@part(50, "found", "most that fits", "sizes tried", "error")
def auto(work: Work) -> Iterator[Row]:
    """`update` with micro_batch_size='auto' on 16 rows, GPT, memory capped at 1.2 times what 4 rows by hand take:
    beside the largest power of two that fits by hand, and the gradient beside that of the loop by hand with that size,
    with torch's deterministic algorithms: cuDNN's attention differs from itself by 1e-03 without them.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch asks for it before the first product
    torch.use_deterministic_algorithms(True)
    net = work.gpt()
    whole = work.text(16)
    seen: list[int] = []
    gradients: list[Tensor] = []
    cast = work.under_autocast(loss_of_text)

    def loss(text: Tensor) -> Tensor:
        seen.append(len(text))
        if not work.is_cuda and len(text) > 4:
            raise torch.OutOfMemoryError("as if")
        return cast(net, text)

    def by_hand(size: int) -> Tensor | None:
        try:
            for text in whole.split(size):
                (loss(text) * len(text) / len(whole)).backward()
            return flat(p.grad for p in net.parameters())
        except torch.OutOfMemoryError:
            return None
        finally:
            net.zero_grad()

    if work.is_cuda:
        by_hand(4)
        most = 1.2 * torch.cuda.max_memory_reserved() / torch.cuda.get_device_properties(0).total_memory
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(most)
    fitting = max(size for size in (1, 2, 4, 8, 16) if by_hand(size) is not None)
    optimizer = SGD(net.parameters(), lr=0.0)
    optimizer.register_step_pre_hook(lambda *_: gradients.append(flat(p.grad for p in net.parameters()).cpu()))
    accumulator = Accumulator(net, optimizer, micro_batch_size="auto")
    seen.clear()
    accumulator.update(whole, loss)
    tried = sorted(set(seen), reverse=True)
    size = seen[-1]
    expected = by_hand(size)
    assert expected is not None
    error = within(kit.relative_difference(gradients[0], expected.cpu()), 1e-3)
    yield f"{size}" if size == fitting else f"**{size}**", str(fitting), ", ".join(map(str, tried)), error


@part(60, "sync", "error", "by hand, ms", "by hand, again", "distaccum")
def fsdp2(work: Work) -> Iterator[Row]:
    """`fully_shard` on one rank: the gradient's error in float32, and the time of a window of 8 micro-steps; GPT."""
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):  # the machine's own name may not resolve
        os.environ.setdefault(name, "lo")
    dist.init_process_group("nccl" if work.is_cuda else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    batches = [work.text(4) for _ in range(8)]

    def loop(of: Callable[[Task, str], Loop], sync: str) -> Loop:
        net = work.gpt()
        return of(Task(net, work.under_autocast(loss_of_text), sgd, len(batches), tuple(net.layers.values())), sync)

    for sync in ("last", "every"):
        error = attempt(partial(obeys, is_sharded=True, sync=sync, **TOKENS), Trial.window, work.device, "float32")
        made = {"by hand": fsdp2_by_hand, "again": fsdp2_by_hand, "distaccum": fsdp2_distaccum}
        loops = {name: partial(loop, of, sync) for name, of in made.items()}
        yield sync, error, *compared(work, loops, batches)
    dist.destroy_process_group()


@part(240, "model, micro-steps", "by hand, ms", *WAYS[1:])
def rates(work: Work) -> Iterator[Row]:
    """Time of a window: GPT with 4 rows of 1,024 tokens, ResNet-50 with 32 images of 224 x 224, and two layers of
    64 x 64, where only the host's work counts. on_nonfinite='ignore' reads nothing of the device.
    """
    (rows, images, side), all_steps = ((2, 2, 32), (2,)) if work.is_small else ((4, 32, 224), (1, 8, 32))
    models: dict[str, tuple[Any, Any, Callable[[], Any]]] = {
        "GPT": (work.gpt, loss_of_text, lambda: work.text(rows)),
        "ResNet": (work.resnet, mean_square, lambda: torch.randn(images, 3, side, side, device=work.device)),
        "tiny": (work.tiny, mean_square, lambda: torch.randn(8, 64, device=work.device)),
    }
    for name, (make, loss, batch) in models.items():
        for steps in all_steps:
            batches = [batch() for _ in range(steps)]
            yield f"{name}, {steps}", *compared(work, ways(work, make, loss, steps), batches)
    if work.is_cuda:
        made = ways(work, lambda: torch.compile(work.gpt()), loss_of_text, 8)
        hand, ratio = compared(work, {name: made[name] for name in ("by hand", "distaccum")}, [work.text(rows)] * 8)
        yield "GPT under torch.compile, 8", hand, "-", ratio, "-", "-", "-"


# Each part in a process of its own


def print_rows(name: str, work: Work) -> None:
    """Prints a part's rows as they come, a line of JSON each, and at last an error as a text."""
    be_quiet()
    torch.set_float32_matmul_precision("highest")  # some images of NVIDIA allow less
    out = sys.stdout
    try:
        with redirect_stdout(sys.stderr):  # output of the libraries
            for row in PARTS[name].run(work):
                print(json.dumps(row), file=out, flush=True)
    except Exception as error:
        traceback.print_exc()
        print(json.dumps(in_words(error)), file=out)


def rows_of(name: str, options: Sequence[str], seconds: float) -> tuple[list[Any], str]:
    """The rows that a part gave within this time, and its error, if any."""
    command = [sys.executable, sys.argv[0], "--here", name, *options]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, timeout=seconds)
        printed = done.stdout
        error = f"its process ended with status {done.returncode}" if done.returncode else ""
    except subprocess.TimeoutExpired as late:
        printed = late.stdout or b""
        error = f"stopped after {seconds:.0f} s"
    rows = [json.loads(line) for line in printed.decode().splitlines() if line.endswith(("]", '"'))]  # not half a line
    if rows and isinstance(rows[-1], str):
        error = rows.pop()
    return rows, error


def page(done: Mapping[str, Any], about: Mapping[str, str], versions: Mapping[str, str], work: Work) -> str:
    lines = kit.header(
        "On a GPU",
        about,
        "" if work.is_cuda and not work.is_small else "**No figures of a GPU**: small models show that it runs.",
        f"{kit.listed(versions)}. GPT: 12 layers, width 768, 124 "
        "million parameters. Parameters in float32, computing in bfloat16 by autocast, SGD with momentum, one process. "
        "Times are ratios to the loop by hand of the same round: median (least to most); *again* is the same loop "
        "twice, so what it differs by is noise. **Bold**: failed, or beyond its bound.",
    )
    for name, outcome in done.items():
        part = PARTS[name]
        lines += [f"## {name}", "", *kit.wrapped(" ".join((part.run.__doc__ or "").split()))]
        lines += kit.table(part.heads, outcome["rows"])
        lines += kit.wrapped(f"{'**Failed**: ' * bool(outcome['error'])}{outcome['error']} {outcome['seconds']:.0f} s.")
    return "\n".join(lines)


def main() -> int:
    parser = kit.Options(__doc__)
    parser.device()
    parser.add_argument("--small", action="store_true", help="small models, of which no figure counts")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="(all)")
    parser.counts("--seconds", 420, "for all parts; each has its own bound, too")
    parser.hidden("--here", choices=PARTS)
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda, and torch sees no GPU; --device cpu --small shows that the program runs")
    if options.device == "cpu" and not options.small:
        parser.error("--device cpu takes hours with these models; add --small")
    work = Work(torch.device(options.device), options.small)
    if options.here:
        print_rows(options.here, work)
        return 0
    patience = 1 if work.is_cuda else 10
    until = time.monotonic() + options.seconds * patience
    about = kit.circumstances(work.device)
    passed = ["--device", options.device, *["--small"] * options.small]
    done: dict[str, Any] = {}
    versions = {one.name: one.version for one in metadata.distributions() if one.name in OTHERS}
    for name in options.parts:
        began = time.monotonic()
        rows, error = rows_of(name, passed, min(PARTS[name].seconds * patience, max(1.0, until - began)))
        done[name] = {"rows": rows, "error": error, "seconds": time.monotonic() - began}
        with redirect_stdout(None) if name != options.parts[-1] else nullcontext():
            kit.write(options.out, page(done, about, versions, work), {**about, **versions, **done})
    return 1 if any(one["error"] or "**" in str(one["rows"]) for one in done.values()) else 0


if __name__ == "__main__":
    raise SystemExit(main())
