"""DeepSpeed: `engine.backward` and `engine.step` in each micro-step, as on its page *Getting Started*."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import wrappers

from .cases import Batch
from .task import WEIGHTS, Library, Outcome, Seen, Task


def engine_of(task: Task, stage: int) -> Any:
    steps = max(task.case.lengths[0])
    config = wrappers.zero_config(stage, train_micro_batch_size_per_gpu=4, gradient_accumulation_steps=steps)
    return wrappers.deepspeed(task.net, task.sgd(), config)[0]


def epoch(task: Task, engine: Any, batches: list[Batch]) -> Seen:
    seen = Seen(engine.module)
    for batch in batches:
        engine.backward(task.loss(engine, batch))
        engine.step()
        seen.take()
    return seen


def single(batch: Batch) -> Batch:
    return {k: v.float() if v.is_floating_point() else v for k, v in batch.items()}


def inputs(task: Task) -> list[Batch]:
    """The micro-batches in float32, the widest dtype that DeepSpeed computes in."""
    task.net.float()
    return [single(batch) for batch in task.mine]


def loop(task: Task, stage: int) -> Outcome:
    batches = inputs(task)
    return Outcome(epoch(task, engine_of(task, stage), batches).weights)


def ramp(task: Task, stage: int) -> Outcome:
    batches = inputs(task)
    engine = engine_of(task, stage)
    seen = Seen(engine.module)
    for batch in batches:
        engine.set_train_batch_size(4 * task.case.steps(engine.global_steps))
        engine.backward(task.loss(engine, batch))
        engine.step()
        seen.take()
    return Outcome(seen.weights)


WAYS = {"ramp": ramp}
WAYS |= dict.fromkeys(("tail", "short", "tokens", "tokens2", "uneven", "empty", "zero", "aux"), loop)


def library(stage: int) -> Library:
    made = Library(f"DeepSpeed, ZeRO {stage}", ("deepspeed",), torch.float32, lacks=WEIGHTS)
    made.cells.update({key: partial(way, stage=stage) for key, way in WAYS.items()})
    made.absent |= {"scaler", "clip"}
    return made
