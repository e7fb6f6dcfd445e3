"""Trials of a small model on any device and in each precision: gradients against float64, and waits of the host."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from typing import Any

import kit
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.functional import cross_entropy
from torch.optim import SGD
from wrappers import fully_sharded

from distaccum import Accumulator, DistaccumError, count_tokens
from distaccum.extensions import NoiseScale, WideSums

# The dtype of the parameters, that of autocast, and the largest relative error of a gradient.
PRECISIONS = {
    "float64": (torch.float64, None, 1e-12),
    "float32": (torch.float32, None, 1e-6),
    "bfloat16": (torch.float32, torch.bfloat16, 3e-2),
    "float16, scaler": (torch.float32, torch.float16, 4e-3),
}
TOKENS: dict[str, Any] = {"count": count_tokens("labels")}
EXTENSIONS = (NoiseScale, partial(WideSums, torch.float64))


def within(value: float, bound: float) -> str:
    return f"{value:.0e}" if value <= bound else f"**{value:.0e}**"


def flat(tensors: Any) -> Tensor:
    return torch.cat([getattr(one, "full_tensor", lambda one=one: one)().detach().flatten() for one in tensors])


class Trial:
    """A small model in one precision with an Accumulator; `gradient` is what the optimizer's last step was given."""

    def __init__(
        self,
        device: torch.device,
        precision: str,
        *,
        dropout: float = 0.0,
        lr: float = 0.0,
        scale: float = 64.0,
        is_sharded: bool = False,
        extensions: Sequence[Callable[[], Any]] = (),
        **options: Any,
    ) -> None:
        self.device, self.options = device, options
        self.is_in_pairs = False
        dtype, self.half, self.bound = PRECISIONS[precision]
        torch.manual_seed(0)
        layers = nn.Linear(32, 64), nn.Tanh(), nn.Dropout(dropout), nn.Linear(64, 64)
        self.net = nn.Sequential(nn.Embedding(64, 32), *layers).to(device, dtype)
        if is_sharded:
            fully_sharded(self.net, [self.net[1]])
        self.batch = self.rows(0)
        backoff = {"init_scale": scale, "backoff_factor": min(0.5, 64 / scale)}
        self.scaler = GradScaler(device.type, **backoff, enabled=self.half is torch.float16)
        self.optimizer = SGD(self.net.parameters(), lr=lr, momentum=0.9)
        self.optimizer.register_step_pre_hook(self._keep)
        size = {} if "micro_batch_size" in options else {"steps": 3}
        more = {"extensions": [make() for make in extensions], "scaler": self.scaler, **size, **options}
        self.accumulator = Accumulator(self.net, self.optimizer, **more)

    def _keep(self, *_: Any) -> None:
        self.gradient = flat(p.grad for p in self.net.parameters())

    def rows(self, seed: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        tokens, labels = torch.randint(0, 64, (2, 16, 8), generator=generator)
        if "count" in self.options:  # of tokens: the later rows are the shorter ones
            labels[torch.rand(16, 8, generator=generator) < torch.arange(16)[:, None] / 16] = -100
        return {"tokens": tokens.to(self.device), "labels": labels.to(self.device)}

    def cut(self, seed: int = 0, sizes: Sequence[int] = (5, 3, 8)) -> list[dict[str, Tensor]]:
        parts = [value.split(sizes) for value in self.rows(seed).values()]
        return [{"tokens": tokens, "labels": labels} for tokens, labels in zip(*parts, strict=True)]

    def scores(self, batch: Mapping[str, Tensor]) -> Tensor:
        with torch.autocast(self.device.type, self.half, enabled=self.half is not None):
            scores: Tensor = self.net(batch["tokens"])
        return scores if self.half is None else scores.float()

    def loss(self, batch: Mapping[str, Tensor]) -> Tensor:
        reduction = "mean" if self.options.get("reduction", "mean") == "mean" else "sum"
        return cross_entropy(self.scores(batch).flatten(0, 1), batch["labels"].flatten(), reduction=reduction)

    def run(self, window: Any, poison: float = 1.0) -> Any:
        for i, batch in enumerate(window):
            window.backward(self.loss(batch) * (poison if i == 1 else 1.0))
        return window.step()

    def window(self, poison: float = 1.0) -> Any:
        return self.run(self.accumulator.window(self.cut()), poison)

    def windows(self) -> Any:
        """A window of three micro-batches, and a short last one of the rows that `window` has."""
        return [self.run(one) for one in self.accumulator.windows([*self.cut(1), *self.cut(0, (14, 2))])]

    def update(self) -> Any:
        return self.accumulator.update(self.batch, self.loss)

    def contrast(self) -> Any:
        self.is_in_pairs = True
        return self.accumulator.contrast(self.batch, self.scores, loss_of_pairs)

    def by_hand(self) -> None:
        self.gradient = flat(torch.autograd.grad(self.loss(self.batch), self.net.parameters()))


def loss_of_pairs(scores: Tensor) -> Tensor:
    rows = scores.mean(1)
    return cross_entropy(rows @ rows.roll(1, 0).T, torch.arange(len(rows), device=rows.device))


def error_of(trial: Trial) -> str:
    """The last gradient's error against that of the whole batch at once, in float64."""
    most = trial.options.get("max_norm")
    options = {**trial.options, "max_norm": None, "sync": "last"}
    other = Trial(trial.device, "float64", **options)
    loss = loss_of_pairs(other.scores(other.batch)) if trial.is_in_pairs else other.loss(other.batch)
    if options.get("reduction") == "sum_to_mean":
        loss = loss / other.batch["labels"].ne(-100).sum()
    expected = flat(torch.autograd.grad(loss, list(other.net.parameters())))
    expected *= 1.0 if most is None else most / (expected.norm() + 1e-6)
    return within(kit.relative_difference(trial.gradient.double(), expected), trial.bound)


def obeys(call: Callable[[Trial], Any], device: torch.device, precision: str, **options: Any) -> str:
    trial = Trial(device, precision, **options)
    update = call(trial)
    assert "extensions" not in options or update.noise_scale is not None
    return error_of(trial)


def checks(device: torch.device, precision: str) -> str:
    trial = Trial(device, precision, micro_batch_size=3, **TOKENS)
    report = trial.accumulator.check(trial.batch, trial.loss)
    assert report.equivalent, f"{report.worst:.0e}, {report.causes}"
    return f"{report.worst:.0e}"


def recovers(device: torch.device, precision: str, *, poison: float = 1.0, scale: float = 64.0, **options: Any) -> str:
    """The error of the window that follows one that must not step."""
    trial = Trial(device, precision, lr=0.1, scale=scale, **options)
    if poison == 1.0 and not trial.scaler.is_enabled():
        return "-"
    before = flat(trial.net.parameters())
    has_raised = False
    try:
        assert not trial.window(poison).stepped, "it stepped"
    except DistaccumError:
        has_raised = True
    assert has_raised == (poison != 1.0 and not options), "it raised" if has_raised else "it did not raise"
    assert flat(trial.net.parameters()).equal(before), "weights moved"
    assert trial.window().stepped and not flat(trial.net.parameters()).equal(before), "the next one did not step"
    return error_of(trial)


def resumes(device: torch.device, precision: str) -> str:
    """Leaves a job with dropout in its second window, after one micro-step, and lets another go on from there."""
    trial, other = (Trial(device, precision, dropout=0.5, lr=0.1) for _ in range(2))
    for seed in range(3):
        window = trial.accumulator.window(trial.cut(seed))
        for i, batch in enumerate(window):
            window.backward(trial.loss(batch))
            if seed == i == 1:
                for name in ("net", "optimizer", "accumulator"):
                    getattr(other, name).load_state_dict(deepcopy(getattr(trial, name).state_dict()))
        window.step()
    torch.manual_seed(1234)
    for seed in (1, 2):
        other.run(other.accumulator.window(other.cut(seed)))
    return "yes" if flat(trial.net.parameters()).equal(flat(other.net.parameters())) else "**no**"


EXACT: dict[str, Callable[[torch.device, str], str]] = {
    "one big batch, by hand": partial(obeys, Trial.by_hand),
    "window, mean of samples": partial(obeys, Trial.window),
    "window, sum": partial(obeys, Trial.window, reduction="sum"),
    "window, mean of tokens": partial(obeys, Trial.window, **TOKENS),
    "window, sum to mean of tokens": partial(obeys, Trial.window, reduction="sum_to_mean", **TOKENS),
    "window, max_norm": partial(obeys, Trial.window, max_norm=0.01),
    "window, NoiseScale and WideSums": partial(obeys, Trial.window, extensions=EXTENSIONS),
    "windows, the last one short": partial(obeys, Trial.windows, **TOKENS),
    "update": partial(obeys, Trial.update, micro_batch_size=3, **TOKENS),
    "contrast": partial(obeys, Trial.contrast, micro_batch_size=3),
    "check": checks,
    "after a NaN that raises": partial(recovers, poison=math.nan),
    "after a NaN that is skipped": partial(recovers, poison=math.nan, on_nonfinite="skip"),
    "after an overflow": partial(recovers, scale=2.0**26),
    "resumed in mid-window, with dropout: bit-identical": resumes,
}


# Waits

HALF, SCALER = "bfloat16", "float16, scaler"
WAITS: dict[str, tuple[int, str, dict[str, Any]]] = {  # at most so many at a window's edges
    "float32": (1, "float32", {}),
    "bfloat16": (1, HALF, {}),
    "float16, scaler": (1, SCALER, {}),
    "max_norm": (1, HALF, {"max_norm": 1.0}),
    "scaler, max_norm": (1, SCALER, {"max_norm": 1.0}),
    "on_nonfinite='skip'": (1, HALF, {"on_nonfinite": "skip"}),
    "on_nonfinite='ignore'": (0, HALF, {"on_nonfinite": "ignore"}),
    "on_nonfinite='ignore', max_norm": (0, HALF, {"on_nonfinite": "ignore", "max_norm": 1.0}),
    "tokens counted on the device": (2, HALF, TOKENS),
    "tokens counted on the host, in pinned memory": (1, HALF, TOKENS),
}


def most_waits(device: torch.device, name: str) -> str:
    most, precision, options = WAITS[name]
    is_cuda = device.type == "cuda"
    trial = Trial(device, precision, lr=0.1, **options)
    batches = [batch for seed in range(5) for batch in trial.cut(seed)]
    if "pinned" in name and is_cuda:
        batches = [{key: value.cpu().pin_memory() for key, value in batch.items()} for batch in batches]
    debug = torch.cuda.set_sync_debug_mode if is_cuda else lambda _: None
    counts = []
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        try:
            debug("warn")
            for window in trial.accumulator.windows(batches):
                debug("error")
                for batch in window:
                    moved = {key: value.to(device, non_blocking=True) for key, value in batch.items()}
                    window.backward(trial.loss(moved))
                debug("warn")
                window.step()
                counts.append(sum("called a synchronizing" in str(warning.message) for warning in seen))
        finally:
            debug("default")
    worst = max(late - early for early, late in itertools.pairwise(counts))
    return f"{worst}" if worst <= most else f"**{worst}**"
