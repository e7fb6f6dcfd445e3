"""Everything that only a GPU can show, in one page: exactness, host waits, memory, "auto", the pace, FSDP2, and time.

    python launch/bench/gpu.py --out launch/results/gpu                # about six minutes, at most --seconds
    python launch/bench/gpu.py --device cpu --small --parts exact auto # only to see that it runs

Needs torch alone; without accelerate, lightning or torchvision their cells say so. Each part runs in a process of its
own, within a time of its own. A part that fails or is stopped says so on the page, and the others go on.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import statistics
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, redirect_stdout
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from typing import Any

import torch
import torch.distributed as dist
from contenders import (
    Loop,
    Task,
    accelerate,
    be_quiet,
    fsdp2_by_hand,
    fsdp2_distaccum,
    lightning_fabric,
    plain_by_hand,
    plain_distaccum,
)
from kit import (
    Options,
    circumstances,
    header,
    in_turns,
    peak_of,
    ratios,
    relative_difference,
    spelled,
    table,
    wait_for,
    wrapped,
    write,
)
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.functional import cross_entropy
from torch.optim import SGD
from torch.utils.data import DataLoader, Dataset
from training.gpt import GPT
from wrappers import fully_sharded

from distaccum import Accumulator, DistaccumError, count_tokens
from distaccum.extensions import NoiseScale, WideSums

Row = Sequence[str]
OTHERS = ("accelerate", "lightning", "lightning-fabric", "torchvision")
HAND, AGAIN = "by hand", "by hand, again"
sgd = partial(SGD, lr=1e-4, momentum=0.9)


@dataclass(frozen=True)
class Work:
    """The device, and the sizes of what runs there."""

    device: torch.device
    is_small: bool

    def gpt(self) -> GPT:
        """124 million parameters over 1,024 tokens, as GPT-2's; input and output embeddings are one."""
        torch.manual_seed(0)
        with self.device:
            net = GPT(64, 2, 16, 128) if self.is_small else GPT(768, 12, 1024, 50304)
        assert net.tokens is not None and net.scores is not None
        nn.init.normal_(net.tokens.weight, std=0.02)
        net.scores.weight = net.tokens.weight
        return net

    def tokens(self, size: int) -> Tensor:
        return torch.randint(0, *((128, (size, 17)) if self.is_small else (50304, (size, 1025))))

    def resnet(self) -> nn.Module:
        import torchvision

        torch.manual_seed(0)
        with self.device:
            net: nn.Module = (torchvision.models.resnet18 if self.is_small else torchvision.models.resnet50)()
        return net

    def images(self, size: int) -> tuple[Tensor, Tensor]:
        side = 32 if self.is_small else 224
        return torch.randn(size, 3, side, side, device=self.device), torch.arange(size, device=self.device)

    def tiny(self) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)).to(self.device)

    def autocast(self, dtype: torch.dtype | None = torch.bfloat16) -> torch.autocast:
        return torch.autocast(self.device.type, dtype, enabled=dtype is not None)


def loss_of_text(model: nn.Module, tokens: Tensor) -> Tensor:
    return cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())


def loss_of_images(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    images, labels = batch
    return cross_entropy(model(images).float(), labels)


def loss_of_rows(model: nn.Module, rows: Tensor) -> Tensor:
    return model(rows).float().square().mean()


def in_words(error: BaseException) -> str:
    """The error in one short line for a cell."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:150]}".replace("|", "/")


def attempt(call: Callable[[], str]) -> str:
    """The cell that `call` gives; in bold, its error."""
    try:
        return call()
    except ImportError as error:
        return f"not installed ({error.name})"
    except Exception as error:  # from an untried device, or another library
        traceback.print_exc()
        return f"**{in_words(error)}**"


def within(value: float, bound: float) -> str:
    """The value as a cell, in bold if it is above the bound."""
    return f"{value:.0e}" if value <= bound else f"**{value:.0e}**"


# Exactness

# By name: the dtype of the parameters, that of autocast, and the largest relative error of a gradient.
PRECISIONS = {
    "float64": (torch.float64, None, 1e-12),
    "float32": (torch.float32, None, 1e-6),
    "bfloat16": (torch.float32, torch.bfloat16, 3e-2),
    "float16, scaler": (torch.float32, torch.float16, 4e-3),
}


class Trial:
    """A small model in one precision; `gradients` are those that the optimizer's steps were given."""

    def __init__(self, work: Work, precision: str, *, dropout: float = 0.0, lr: float = 0.0, scale: float = 64.0):
        self.device, (dtype, self.half, self.bound) = work.device, PRECISIONS[precision]
        torch.manual_seed(0)
        layers = nn.Linear(32, 64), nn.Tanh(), nn.Dropout(dropout), nn.Linear(64, 64)
        self.net = nn.Sequential(nn.Embedding(64, 32), *layers).to(self.device, dtype)
        is_scaled = self.half is torch.float16
        self.scaler = GradScaler(self.device.type, init_scale=scale, backoff_factor=2**-20) if is_scaled else None
        self.optimizer = SGD(self.net.parameters(), lr=lr, momentum=0.9)
        self.gradients: list[Tensor] = []
        self.optimizer.register_step_pre_hook(lambda *_: self.gradients.append(flat(p.grad for p in self.weights())))

    def accumulator(self, **options: Any) -> Accumulator:
        return Accumulator(self.net, self.optimizer, scaler=self.scaler, **options)

    def weights(self) -> list[nn.Parameter]:
        return list(self.net.parameters())

    def batch(self, size: int, *, padded: bool = False, seed: int = 0) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        tokens, labels = torch.randint(0, 64, (2, size, 8), generator=generator)
        if padded:
            labels[torch.rand(size, 8, generator=generator) < torch.arange(size)[:, None] / size] = -100
        return {"tokens": tokens.to(self.device), "labels": labels.to(self.device)}

    def loss(self, batch: Mapping[str, Tensor], reduction: str = "mean") -> Tensor:
        with torch.autocast(self.device.type, self.half, enabled=self.half is not None):
            scores = self.net(batch["tokens"]).flatten(0, 1)
        return cross_entropy(wide(scores), batch["labels"].flatten(), reduction=reduction)

    def encode(self, batch: Mapping[str, Tensor]) -> Tensor:
        with torch.autocast(self.device.type, self.half, enabled=self.half is not None):
            return wide(self.net(batch["tokens"]).mean(1))

    def expected(self, of: Callable[[Trial], Tensor]) -> Tensor:
        """The gradient of the whole batch at once, in float64."""
        other = Trial.__new__(Trial)
        other.device, other.half, other.net = self.device, None, deepcopy(self.net).double()
        return flat(torch.autograd.grad(of(other), other.weights()))

    def run(self, window: Any, reduction: str = "mean") -> Any:
        for batch in window:
            window.backward(self.loss(batch, reduction))
        return window.step()


def wide(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def flat(tensors: Any) -> Tensor:
    return torch.cat([getattr(one, "full_tensor", lambda one=one: one)().detach().flatten() for one in tensors]).clone()


def pairs_loss(rows: Tensor) -> Tensor:
    return cross_entropy(rows @ rows.roll(1, 0).T, torch.arange(len(rows), device=rows.device))


def cut(batch: Mapping[str, Tensor], sizes: Sequence[int]) -> list[dict[str, Tensor]]:
    parts = [value.split(sizes) for value in batch.values()]
    return [dict(zip(batch, part, strict=True)) for part in zip(*parts, strict=True)]


TOKENS: dict[str, Any] = {"count": count_tokens("labels")}
# The options, and the reduction of the criterion.
LAW: dict[str, tuple[dict[str, Any], str]] = {
    "window, mean of samples": ({}, "mean"),
    "window, sum": ({"reduction": "sum"}, "sum"),
    "window, mean of tokens": (TOKENS, "mean"),
    "window, sum to mean of tokens": ({"reduction": "sum_to_mean", **TOKENS}, "sum"),
    "windows, short last one": (TOKENS, "mean"),
    "windows, max_norm": ({"max_norm": 0.01, **TOKENS}, "mean"),
    "update": (TOKENS, "mean"),
    "contrast": ({}, "mean"),
    "one big batch, by hand": ({}, "mean"),
}


def error_of(work: Work, name: str, precision: str) -> str:
    trial, (options, reduction) = Trial(work, precision), LAW[name]
    size = 5 if "short" in name else 16  # of the last window
    batch = trial.batch(size, padded="count" in options)
    whole = "sum" if options.get("reduction") == "sum" else "mean"
    expected = trial.expected(lambda other: other.loss(batch, whole))
    if name.startswith("windows"):
        micro_batches = [*cut(trial.batch(16, seed=1), [5, 3, 8]), *cut(batch, [2, size - 2])]
        for window in trial.accumulator(steps=3, **options).windows(micro_batches):
            trial.run(window)
    elif name == "update":
        trial.accumulator(micro_batch_size=3, **options).update(batch, trial.loss)
    elif name == "contrast":
        expected = trial.expected(lambda other: pairs_loss(other.encode(batch)))
        trial.accumulator(micro_batch_size=3).contrast(batch, trial.encode, pairs_loss)
    elif "by hand" in name:
        trial.gradients = [flat(torch.autograd.grad(trial.loss(batch), trial.weights()))]
    else:
        trial.run(trial.accumulator(steps=3, **options).window(cut(batch, [5, 3, 8])), reduction)
    if "max_norm" in options:
        expected *= options["max_norm"] / (expected.norm() + 1e-6)
    return within(relative_difference(trial.gradients[-1].double(), expected), trial.bound)


def check(work: Work, precision: str) -> str:
    trial = Trial(work, precision)
    report = trial.accumulator(micro_batch_size=3, **TOKENS).check(trial.batch(16, padded=True), trial.loss)
    return f"{report.worst:.0e}" if report.equivalent else f"**{report.worst:.0e}, {report.causes}**"


def skips(work: Work, precision: str, **options: Any) -> str:
    """A window with a NaN, and the next one."""
    trial = Trial(work, precision, lr=0.1)
    accumulator, before = trial.accumulator(steps=3, **options), flat(trial.weights())
    window = accumulator.window(cut(trial.batch(16), [5, 3, 8]))
    is_raised = False
    try:
        for i, batch in enumerate(window):
            window.backward(trial.loss(batch) * (math.nan if i == 1 else 1.0))
        assert not window.step().stepped
    except DistaccumError:
        is_raised = True
    assert is_raised == (not options), "raised" if is_raised else "not raised"
    assert flat(trial.weights()).equal(before), "weights moved"
    assert trial.run(accumulator.window(cut(trial.batch(16), [5, 3, 8]))).stepped, "the next window did not step"
    assert not flat(trial.weights()).equal(before) and flat(trial.weights()).isfinite().all()
    return "yes"


def overflows(work: Work, precision: str) -> str:
    trial = Trial(work, precision, lr=0.1, scale=2.0**26)
    if trial.scaler is None:
        return "-"
    accumulator, before = trial.accumulator(steps=3), flat(trial.weights())
    update = trial.run(accumulator.window(cut(trial.batch(16), [5, 3, 8])))
    assert not update.stepped and flat(trial.weights()).equal(before), "not skipped"
    expected = trial.expected(lambda other: other.loss(trial.batch(16)))
    assert trial.run(accumulator.window(cut(trial.batch(16), [5, 3, 8]))).stepped, "the next window did not step"
    return within(relative_difference(trial.gradients[-1].double(), expected), trial.bound)


def resumes(work: Work, precision: str) -> str:
    """A job with dropout that is left in its second window, after one micro-step, against one that goes on."""
    trial, other = (Trial(work, precision, dropout=0.5, lr=0.1) for _ in range(2))
    micro_batches = [cut(trial.batch(16, seed=seed), [5, 3, 8]) for seed in range(3)]
    accumulator, state = trial.accumulator(steps=3), None
    for index, given in enumerate(micro_batches):
        window = accumulator.window(given)
        for i, batch in enumerate(window):
            window.backward(trial.loss(batch))
            if index == i == 1:
                state = accumulator.state_dict(), deepcopy((trial.net.state_dict(), trial.optimizer.state_dict()))
        window.step()
    assert state is not None
    of_accumulator, (of_net, of_optimizer) = state
    other.net.load_state_dict(of_net)
    other.optimizer.load_state_dict(of_optimizer)
    accumulator = other.accumulator(steps=3)
    accumulator.load_state_dict(of_accumulator)
    torch.manual_seed(1234)
    for given in micro_batches[1:]:
        other.run(accumulator.window(given))
    return "yes" if flat(trial.weights()).equal(flat(other.weights())) else "**no**"


def noise(work: Work, precision: str) -> str:
    trial = Trial(work, precision)
    accumulator = trial.accumulator(steps=3, extensions=[NoiseScale()])
    for seed in range(8):
        update = trial.run(accumulator.window(cut(trial.batch(16, seed=seed), [5, 3, 8])))
    return f"{update.noise_scale:.3g}"


def wide_sums(work: Work, precision: str) -> str:
    """The error of parameters in bfloat16 over 32 micro-batches, and how many times that is without the extension."""
    if precision != "bfloat16":
        return "-"
    errors = []
    for extensions in [WideSums(torch.float32)], []:
        trial = Trial(work, precision)
        trial.net.bfloat16()
        batch = trial.batch(64)
        expected = trial.expected(lambda other, batch=batch: other.loss(batch))
        trial.run(trial.accumulator(steps=32, extensions=extensions).window(cut(batch, [2] * 32)))
        errors.append(relative_difference(trial.gradients[-1].double(), expected))
    assert errors[0] < errors[1], f"{errors[0]:.1e}, without it {errors[1]:.1e}"
    return f"{errors[0]:.1e}, without {errors[1]:.1e}"


BEHAVIOURS: dict[str, Callable[[Work, str], str]] = {
    "check: its worst parameter": check,
    "a NaN raises, and the next window steps": skips,
    "a NaN is skipped (on_nonfinite='skip')": partial(skips, on_nonfinite="skip"),
    "an overflow is skipped; error of the next window": overflows,
    "a job resumed in mid-window, with dropout, ends bit-identical": resumes,
    "NoiseScale": noise,
    "WideSums, of parameters in bfloat16": wide_sums,
}


def exact(work: Work) -> Iterator[Row]:
    for name in LAW:
        yield name, *(attempt(partial(error_of, work, name, precision)) for precision in PRECISIONS)
    for name, shows in BEHAVIOURS.items():
        yield name, *(attempt(partial(shows, work, precision)) for precision in PRECISIONS)


# Waits

# The precision, the options, and the most waits at a window's edges.
WAITS: dict[str, tuple[str, dict[str, Any], int]] = {
    "float32": ("float32", {}, 1),
    "bfloat16": ("bfloat16", {}, 1),
    "float16, scaler": ("float16, scaler", {}, 1),
    "max_norm": ("bfloat16", {"max_norm": 1.0}, 1),
    "scaler, max_norm": ("float16, scaler", {"max_norm": 1.0}, 1),
    "on_nonfinite='skip'": ("bfloat16", {"on_nonfinite": "skip"}, 1),
    "on_nonfinite='ignore'": ("bfloat16", {"on_nonfinite": "ignore"}, 0),
    "on_nonfinite='ignore', max_norm": ("bfloat16", {"on_nonfinite": "ignore", "max_norm": 1.0}, 0),
    "labels on the device, counted": ("bfloat16", TOKENS, 2),
    "labels on the host, counted; pinned": ("bfloat16", TOKENS, 1),
}


def count_waits(work: Work, name: str) -> list[int]:
    """Waits at the edges of each window; raises at a wait in its loop."""
    precision, options, _ = WAITS[name]
    trial, counts, is_cuda = Trial(work, precision, lr=0.1), [], work.device.type == "cuda"
    mode = torch.cuda.set_sync_debug_mode if is_cuda else (lambda _: None)
    batches = [part for seed in range(5) for part in cut(trial.batch(16, seed=seed), [5, 3, 8])]
    if "pinned" in name:
        pin = Tensor.pin_memory if is_cuda else (lambda tensor: tensor)
        batches = [{key: pin(value.cpu()) for key, value in batch.items()} for batch in batches]
    trial.optimizer.register_step_pre_hook(lambda *_: trial.gradients.clear())
    accumulator = trial.accumulator(steps=3, **options)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        try:
            mode("warn")
            for window in accumulator.windows(batches):
                mode("error")
                for batch in window:
                    here = {key: value.to(work.device, non_blocking=True) for key, value in batch.items()}
                    window.backward(trial.loss(here))
                mode("warn")
                window.step()
                counts.append(sum("called a synchronizing" in str(warning.message) for warning in seen))
        finally:
            mode("default")
    return [later - earlier for earlier, later in zip(counts, counts[1:], strict=False)]


def waits(work: Work) -> Iterator[Row]:
    for name, (_, _, most) in WAITS.items():

        def cell(name: str = name, most: int = most) -> str:
            worst = max(count_waits(work, name))
            return f"{worst}" if worst <= most else f"**{worst}**"

        yield name, attempt(cell), f"{most}"


# Time and memory, beside the loop by hand


def ways(work: Work, make: Callable[[], Any], loss: Any, steps: int) -> dict[str, Callable[[], Loop]]:
    """Loops in bfloat16 by autocast, each with a fresh model, as their documentation has them."""
    kind = work.device.type

    def cast(model: nn.Module, batch: Any) -> Tensor:
        with work.autocast():
            value: Tensor = loss(model, batch)
        return value

    def task(loss: Any = cast) -> Task:
        return Task(make(), loss, sgd, steps)

    plain: dict[str, Any] = {"batchnorm": "ignore"}
    return {
        HAND: lambda: plain_by_hand(task()),
        AGAIN: lambda: plain_by_hand(task()),
        "distaccum": lambda: plain_distaccum(task(), **plain),
        "distaccum, 'ignore'": lambda: plain_distaccum(task(), on_nonfinite="ignore", **plain),
        "Accelerate": lambda: accelerate(task(loss), cpu=kind == "cpu", mixed_precision="bf16"),
        "Fabric": lambda: lightning_fabric(task(loss), accelerator=kind, precision="bf16-mixed"),
    }


def compared(
    work: Work, made: Mapping[str, Callable[[], Loop]], batches: Sequence[Any], windows: int, seconds: float
) -> list[str]:
    """Milliseconds of a window by hand, then of each other loop its ratio to that, or why there is none."""
    turns: dict[str, Callable[[], object]] = {}
    cells: dict[str, str] = {}
    cost = 0.0
    for name, make in made.items():

        def set_up(name: str = name, make: Callable[[], Loop] = make) -> str:
            nonlocal cost
            run = make().run
            run(batches)
            turns[name] = lambda: [run(batches) for _ in range(windows)]
            wait_for(work.device)
            began = time.perf_counter()
            run(batches)
            wait_for(work.device)
            cost += windows * (time.perf_counter() - began)
            return ""

        cells[name] = attempt(set_up)
    rounds = 1 if work.is_small else max(3, min(10, int(seconds / cost) - 2))
    taken = in_turns({name: turn for name, turn in turns.items() if not cells[name]}, rounds, work.device)
    for name, values in taken.items():
        cells[name] = spelled(ratios(values, taken[HAND])) if HAND in taken else "-"
    if HAND in taken:
        cells[HAND] = f"{1000 * statistics.median(taken[HAND]) / windows:.2f}"
    return list(cells.values())


def rates(work: Work) -> Iterator[Row]:
    micro, images = (2, 2) if work.is_small else (4, 32)
    models: dict[str, tuple[Any, Any, Callable[[], Any]]] = {
        "GPT": (work.gpt, loss_of_text, lambda: work.tokens(micro).to(work.device)),
        "ResNet": (work.resnet, loss_of_images, lambda: work.images(images)),
        "tiny": (work.tiny, loss_of_rows, lambda: torch.randn(8, 64, device=work.device)),
    }
    for name, (make, loss, batch) in models.items():
        for steps in (1, 2) if work.is_small else (1, 8, 32):
            batches = [batch() for _ in range(steps)]
            made = ways(work, make, loss, steps)
            yield f"{name}, {steps}", *compared(work, made, batches, max(1, 8 // steps), 12)
    if not work.is_small:
        batches = [work.tokens(micro).to(work.device) for _ in range(8)]
        made = ways(work, lambda: torch.compile(work.gpt()), loss_of_text, 8)
        chosen = {name: made[name] for name in (HAND, "distaccum")}
        hand, ratio = compared(work, chosen, batches, 1, 12)
        yield "GPT under torch.compile, 8", hand, "-", ratio, "-", "-", "-"


def memory(work: Work) -> Iterator[Row]:
    batches = [work.tokens(2 if work.is_small else 4).to(work.device) for _ in range(4)]
    hand = math.nan
    for name, make in ways(work, work.gpt, loss_of_text, len(batches)).items():

        def cells(name: str = name, make: Callable[[], Loop] = make) -> str:
            nonlocal hand
            loop = make()
            loop.run(batches)  # makes the optimizer's state
            peak = peak_of(partial(loop.run, batches), work.device)
            hand = peak if name == HAND else hand
            return f"{peak:,.0f} | {peak / hand if hand else math.nan:.3f}"

        cell = attempt(cells)
        yield name, *(cell.split(" | ") if " | " in cell else (cell, "-"))


# The size that fits


def auto(work: Work) -> Iterator[Row]:
    """Memory is capped, so that few rows fill it; on a CPU a loss of more than 4 rows is said not to fit."""
    net, is_cuda = work.gpt(), work.device.type == "cuda"
    whole, sizes = work.tokens(16).to(work.device), [1, 2, 4, 8, 16]
    if is_cuda:
        total = torch.cuda.get_device_properties(work.device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, 10e9 / total), work.device)
    seen: list[int] = []

    def loss(tokens: Tensor) -> Tensor:
        seen.append(len(tokens))
        if not is_cuda and len(tokens) > 4:
            raise torch.OutOfMemoryError("out of memory, as if")
        with work.autocast():
            return loss_of_text(net, tokens)

    def by_hand(size: int) -> Tensor | None:
        try:
            for tokens in whole.split(size):
                (loss(tokens) * len(tokens) / len(whole)).backward()
            return flat(p.grad for p in net.parameters())
        except torch.OutOfMemoryError:
            return None
        finally:
            net.zero_grad()

    fitting = [size for size in sizes if by_hand(size) is not None]
    if is_cuda:
        torch.cuda.empty_cache()
    optimizer, gradients = SGD(net.parameters(), lr=0.0), list[Tensor]()
    optimizer.register_step_pre_hook(lambda *_: gradients.append(flat(p.grad for p in net.parameters())))
    accumulator = Accumulator(net, optimizer, micro_batch_size="auto")
    first = len(seen)
    accumulator.update(whole, loss)
    tries = len(set(seen[first:]))
    accumulator.update(whole, loss)
    expected = by_hand(seen[-1])
    assert expected is not None
    error = relative_difference(gradients[-1], expected)
    taken = seen[-1] if seen[-1] == fitting[-1] else f"**{seen[-1]}**"
    yield f"{taken}", f"{fitting[-1]}", f"{tries}", within(error, 1e-3), "-"


# The pace of a loader


@dataclass
class Slow(Dataset[Tensor]):
    items: list[Tensor]
    num: int
    seconds: float

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, place: int) -> Tensor:
        time.sleep(self.seconds)
        return self.items[place % len(self.items)].clone()


def seconds_of(work: Work, net: nn.Module, way: str, loader: Any, steps: int) -> float:
    """Seconds of a window, leaving out the first, in which workers start."""
    optimizer, ends = sgd(net.parameters()), list[float]()

    def loss(tokens: Tensor) -> Tensor:
        with work.autocast():
            return loss_of_text(net, tokens.to(work.device, non_blocking=True))

    if way.startswith("by hand"):
        for i, tokens in enumerate(loader):
            (loss(tokens) / steps).backward()
            if (i + 1) % steps == 0:
                optimizer.step()
                optimizer.zero_grad()
                ends.append(time.perf_counter())
    else:
        ahead = "ahead" not in way
        for window in Accumulator(net, optimizer, steps=steps).windows(loader, ahead=ahead):
            for tokens in window:
                window.backward(loss(tokens))
            window.step()
            ends.append(time.perf_counter())
    wait_for(work.device)
    ends[-1] = time.perf_counter()
    return (ends[-1] - ends[0]) / (len(ends) - 1)


def pace(work: Work) -> Iterator[Row]:
    net, rows = work.gpt(), 2
    items = [work.tokens(rows) for _ in range(8)]
    micro_steps, workers = (8, 1) if work.is_small else (64, 4)
    resident = [items[0].to(work.device)] * micro_steps
    for _ in range(2):  # the first warms up
        step = seconds_of(work, net, HAND, resident, micro_steps // 4) / (micro_steps // 4)
    for steps, part in [(2, 0.8)] if work.is_small else [(1, 0.8), (8, 0.8), (32, 0.8), (32, 1.2)]:
        # All workers together give an item in this part of a micro-step.
        data = Slow(items, max(micro_steps, 3 * steps), part * step * workers)
        taken: dict[str, list[float]] = {}
        for _ in range(1 if work.is_small else 3):
            for way in (HAND, AGAIN, "windows", "windows, ahead=False"):
                pin = work.device.type == "cuda"
                loader = DataLoader(data, batch_size=None, num_workers=workers, pin_memory=pin)
                taken.setdefault(way, []).append(seconds_of(work, net, way, loader, steps))
        of_others = [spelled(ratios(values, taken[HAND])) for way, values in taken.items() if way != HAND]
        yield f"{steps}, {part}", f"{1000 * statistics.median(taken[HAND]):.1f}", *of_others


# FSDP2


def fsdp2(work: Work) -> Iterator[Row]:
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):  # a name of this machine may not resolve
        os.environ.setdefault(name, "lo")
    backend = "nccl" if work.device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    batches = [work.tokens(2 if work.is_small else 4).to(work.device) for _ in range(8)]

    def task() -> Task:
        net = work.gpt()

        def loss(model: nn.Module, batch: Tensor) -> Tensor:
            with work.autocast():
                return loss_of_text(model, batch)

        return Task(net, loss, sgd, len(batches), tuple(net.layers.values()))

    def error(policy: str) -> str:
        trial = Trial(work, "float32")
        batch = trial.batch(16, padded=True)
        expected = trial.expected(lambda other: other.loss(batch))
        fully_sharded(trial.net, [trial.net[1]])
        trial.optimizer = SGD(trial.net.parameters(), lr=0.0)
        trial.optimizer.register_step_pre_hook(lambda *_: trial.gradients.append(flat(p.grad for p in trial.weights())))
        trial.run(trial.accumulator(steps=3, sync=policy, **TOKENS).window(cut(batch, [5, 3, 8])))
        return within(relative_difference(trial.gradients[-1].double(), expected), 1e-5)

    for policy in ("last", "every"):
        made = {HAND: fsdp2_by_hand, AGAIN: fsdp2_by_hand, "distaccum": fsdp2_distaccum}
        loops = {name: (lambda loop=loop: loop(task(), policy)) for name, loop in made.items()}  # noqa: B023
        yield policy, attempt(partial(error, policy)), *compared(work, loops, batches, 1, 12)
    dist.destroy_process_group()


# Parts, each in a process of its own


@dataclass(frozen=True)
class Part:
    run: Callable[[Work], Iterator[Row]]
    seconds: int  # at most
    heads: tuple[str, ...]
    about: str


OF_LOOPS = (AGAIN, "distaccum", "distaccum, 'ignore'", "Accelerate", "Fabric")
PARTS = {
    "exact": Part(
        exact,
        60,
        ("", *PRECISIONS),
        "Relative error of the gradient that the step gets, against one big batch in float64; windows of 5, 3 and 8 "
        "rows, labels on the device, autocast in half precision.",
    ),
    "waits": Part(
        waits,
        40,
        ("", "at a window's edges", "allowed"),
        "Waits of the host for the device, by torch.cuda.set_sync_debug_mode: an error in a window's loop, counted at "
        "its edges (the plan and the step); the most of four windows.",
    ),
    "memory": Part(
        memory,
        60,
        ("", "MB", "/ by hand"),
        "Peak memory of an update of 4 micro-batches beyond model, optimizer and data; GPT.",
    ),
    "auto": Part(
        auto,
        50,
        ("found", "largest that fits", "sizes tried", "error", ""),
        "`update` with micro_batch_size='auto' on a batch of 16, GPT, memory capped at 10 GB: against the largest "
        "power of two that fits by hand, and the gradient against the loop by hand with that size.",
    ),
    "pace": Part(
        pace,
        80,
        ("steps, load / compute", "by hand, ms", AGAIN, "windows", "windows, ahead=False"),
        "Time of a window with a DataLoader whose workers sleep, pinned memory, copied non_blocking; GPT, the first "
        "window left out. All workers together give a micro-batch in this part of a micro-step's time.",
    ),
    "fsdp2": Part(
        fsdp2,
        60,
        ("sync", "error", "by hand, ms", AGAIN, "distaccum"),
        "fully_shard on one rank: the gradient's error in float32, and the time of a window of 8 micro-steps; GPT.",
    ),
    "rates": Part(
        rates,
        240,
        ("model, micro-steps", "by hand, ms", *OF_LOOPS),
        "Time of a window: GPT with 4 rows of 1,024 tokens, ResNet-50 with 32 images of 224 x 224, and two layers of "
        "64 x 64, where the host is all that counts; 'ignore' is on_nonfinite='ignore', which reads nothing.",
    ),
}


@dataclass
class Outcome:
    rows: list[Row] = field(default_factory=list)
    error: str = ""
    seconds: float = 0.0


def child(name: str, work: Work, pipe: Any) -> None:
    """Sends the rows of a part as they come, then None, or an error."""
    be_quiet()
    try:
        with redirect_stdout(sys.stderr):  # output of the libraries
            for row in PARTS[name].run(work):
                pipe.send(tuple(row))
        pipe.send(None)
    except BaseException as error:
        traceback.print_exc()
        pipe.send(in_words(error))


def outcome_of(name: str, work: Work, seconds: float) -> Outcome:
    """Runs a part in a fresh process, which a broken device or a hang takes no further than that."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch"])
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=child, args=(name, work, sender))
    began, outcome = time.monotonic(), Outcome()
    process.start()
    sender.close()
    try:
        while receiver.poll(max(0.0, began + seconds - time.monotonic())):
            message = receiver.recv()
            if isinstance(message, str):
                outcome.error = message
            if not isinstance(message, tuple):
                break
            print(f"{name}: {' | '.join(message)}", file=sys.stderr, flush=True)
            outcome.rows.append(message)
        else:
            outcome.error = f"stopped after {seconds:.0f} s"
    except EOFError:
        process.join(5)
        outcome.error = f"its process ended with status {process.exitcode}"
    finally:
        process.kill()
        process.join()
    outcome.seconds = time.monotonic() - began
    return outcome


def installed() -> dict[str, str]:
    """The versions of the other libraries that there are."""
    versions = {}
    for name in OTHERS:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def page(outcomes: Mapping[str, Outcome], about: Mapping[str, str], work: Work) -> str:
    others = ", ".join(f"{name} {version}" for name, version in installed().items())
    notes = [
        f"{others}. GPT: 12 layers, width 768, 124 million parameters. Computing in bfloat16 by autocast, SGD with "
        "momentum, one process. Times are ratios to the loop by hand of the same round: median (least to most); "
        "*again* is the same loop twice, so what it differs by is noise. **Bold**: failed, or above its bound.",
    ]
    if work.device.type == "cpu" or work.is_small:
        notes.insert(0, "**Not the figures of a GPU**: small models, only to show that the program runs.")
    lines = header("On a GPU", about, *notes)
    for name, outcome in outcomes.items():
        part = PARTS[name]
        lines += [f"## {name}", "", *wrapped(part.about), *table(part.heads, outcome.rows)]
        lines += wrapped(f"**Failed**: {outcome.error}" if outcome.error else f"{outcome.seconds:.0f} s.")
    return "\n".join(lines)


def main() -> int:
    parser = Options(__doc__)
    parser.device()
    parser.add_argument("--small", action="store_true", help="small models, of which no figure counts")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="(all)")
    parser.counts("--seconds", 420, "for all parts; each has its own bound, too")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda, and torch sees no GPU; --device cpu --small shows that the program runs")
    if options.device == "cpu" and not options.small:
        parser.error("--device cpu takes hours with these models; add --small")
    work, until = Work(torch.device(options.device), options.small), time.monotonic() + options.seconds
    about, outcomes = circumstances(work.device), dict[str, Outcome]()
    for name in options.parts:
        outcomes[name] = outcome_of(name, work, min(PARTS[name].seconds, max(1.0, until - time.monotonic())))
        result = {**about, **installed(), **{name: vars(outcome) for name, outcome in outcomes.items()}}
        with redirect_stdout(None) if name != options.parts[-1] else nullcontext():
            write(options.out, page(outcomes, about, work), result)
    has_failed = any(one.error or "**" in str(one.rows) for one in outcomes.values())
    return 1 if has_failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
