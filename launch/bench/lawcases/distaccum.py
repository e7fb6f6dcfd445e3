"""This library: on a plain module, and under DDP on two ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import cross_entropy

from distaccum import Accumulator, count_samples, count_tokens

from .byhand import wrapped
from .cases import SCALE, clip_loss
from .task import Library, Outcome, Seen, Task

DISTACCUM = Library("distaccum (plain, DDP)")


def accumulating(task: Task, **options: Any) -> tuple[Any, Accumulator, Seen]:
    model, _ = wrapped(task)
    optimizer = task.sgd()
    seen = Seen(task.net).after(optimizer)
    steps = options.pop("steps", max(task.case.lengths[0]))
    if task.case.kind == "tokens":
        options["count"] = count_tokens("labels")
    return model, Accumulator(model, optimizer, steps=steps, **options), seen


def epoch(task: Task, model: Any, accumulator: Accumulator) -> None:
    for window in accumulator.windows(task.mine):
        for batch in window:
            window.backward(task.loss(model, batch))
        window.step()


@DISTACCUM.cell("tail", "short", "uneven", "empty", "tokens", "tokens2", "zero")
def loop(task: Task) -> Outcome:
    model, accumulator, seen = accumulating(task)
    epoch(task, model, accumulator)
    return Outcome(seen.weights)


@DISTACCUM.cell("ramp")
def ramp(task: Task) -> Outcome:
    model, accumulator, seen = accumulating(task, steps=task.case.steps)
    epoch(task, model, accumulator)
    return Outcome(seen.weights)


@DISTACCUM.cell("aux")
def two_denominators(task: Task) -> Outcome:
    count = {"tokens": count_tokens("labels"), "router": count_samples}
    model, accumulator, seen = accumulating(task, count=count, reduction={"tokens": "mean", "router": "mean"})
    for window in accumulator.windows(task.mine):
        for batch in window:
            logits, router = model(batch["x"])
            tokens = cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)
            window.backward(tokens=tokens, router=0.1 * router.mean())
        window.step()
    return Outcome(seen.weights)


@DISTACCUM.cell("scaler")
def scaled(task: Task) -> Outcome:
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    optimizers = [task.sgd([task.net.first]), task.sgd([task.net.second])]
    accumulator = Accumulator(task.net, optimizers, steps=2, scaler=scaler)
    seen = Seen(task.net)
    for window in accumulator.windows(task.mine):
        for batch in window:
            window.backward(task.loss(task.net, batch))
        window.step()
        seen.take()
    return Outcome(seen.weights, scaler.get_scale())


@DISTACCUM.cell("clip")
def pairs(task: Task) -> Outcome:
    model, _ = wrapped(task)
    optimizer = task.sgd()
    seen = Seen(task.net).after(optimizer)
    accumulator = Accumulator(model, optimizer, micro_batch_size=4)
    batch = {name: torch.cat([one[name] for one in task.mine]) for name in ("x", "y")}
    scale = task.net.logit_scale  # not a representation of samples
    accumulator.contrast(batch, lambda part: model(part)[:2], lambda *both: clip_loss(*both, scale.exp()))
    return Outcome(seen.weights)
