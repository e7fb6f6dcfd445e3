"""The loop that people write, with torch's own tools: DDP's `no_sync` and `Join`, `torch.amp.GradScaler`.

The scaler's loop is from torch's page *Automatic Mixed Precision examples*, for several optimizers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .cases import SCALE, Batch
from .task import Library, Outcome, Seen, Task

HAND = Library("by hand (plain, DDP)")
JOIN = Library("torch (DDP, `Join`)")


def usual(
    task: Task,
    model: Any,
    optimizer: Any,
    batches: Iterable[Batch],
    *,
    backward: Callable[[Tensor], object] = Tensor.backward,
    apart: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> None:
    """Runs the usual loop; `apart` is a context in which nothing is reduced."""
    batches = list(batches)
    update = 0
    for i, batch in enumerate(batches):
        steps = task.case.steps(update) if task.case.key == "ramp" else max(task.case.lengths[0])
        last = (i + 1) % steps == 0 or i + 1 == len(batches)
        with nullcontext() if last else apart():
            backward(task.loss(model, batch) / steps)
        if last:
            optimizer.step()
            optimizer.zero_grad()
            update += 1


def wrapped(task: Task) -> tuple[nn.Module, Callable[[], AbstractContextManager[Any]]]:
    if task.world == 1:
        return task.net, nullcontext
    model = DistributedDataParallel(task.net)
    return model, model.no_sync


@HAND.cell("tail", "short", "tokens", "tokens2", "uneven", "empty", "zero", "aux", "ramp", "clip")
def loop(task: Task) -> Outcome:
    model, apart = wrapped(task)
    optimizer = task.sgd()
    seen = Seen(task.net).after(optimizer)
    usual(task, model, optimizer, task.mine, apart=apart)
    return Outcome(seen.weights)


@HAND.cell("scaler")
def scaled(task: Task) -> Outcome:
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    optimizers = [task.sgd([task.net.first]), task.sgd([task.net.second])]
    seen = Seen(task.net)
    for i, batch in enumerate(task.mine):
        scaler.scale(task.loss(task.net, batch) / 2).backward()
        if i % 2:
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
            seen.take()
            for optimizer in optimizers:
                optimizer.zero_grad()
    return Outcome(seen.weights, scaler.get_scale())


@JOIN.cell("uneven", "empty")
def joined(task: Task) -> Outcome:
    model = DistributedDataParallel(task.net)
    optimizer = task.sgd()
    seen = Seen(task.net).after(optimizer)
    with model.join():
        usual(task, model, optimizer, task.mine)
    seen.take()  # a rank that ended first got the others' weights
    return Outcome(seen.weights)
