"""Private names of torch.distributed.pipelining: a schedule exposes neither its stages nor the chunk of a loss.

Seen in torch 2.9 to 2.15.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..private import replaced, require

SCHEDULES = "torch.distributed.pipelining.schedules"
SINGLE, MULTI = f"{SCHEDULES}.PipelineScheduleSingle", f"{SCHEDULES}.PipelineScheduleMulti"
# Name, what for, in which versions it was seen to work, and what happens without it.
NAMES = (
    (f"{SINGLE}._stage", "the stage on this rank", "2.9", "refused"),
    (f"{MULTI}._stages", "the stages on this rank", "2.9", "refused, unless there is one _stage"),
    (f"{SCHEDULES}._PipelineSchedule._n_microbatches", "the number of chunks", "2.9", "refused"),
    (f"{SCHEDULES}._PipelineSchedule._loss_fn", "weighs each chunk's loss", "2.9", "refused"),
    (f"{SCHEDULES}._PipelineSchedule._maybe_compute_loss", "weighs each chunk's loss", "2.9", "refused"),
    (f"{SINGLE}._stage_backward_initialized", "a call fixed the shapes", "2.15", "windows are not compared"),
    (f"{MULTI}._stages_backward_initialized", "a call fixed the shapes", "2.15", "windows are not compared"),
    ("torch.distributed.DeviceMesh._get_root_mesh", "finds ranks that nobody claims", "2.11", "they go unseen"),
)
# From a chunk's number, and a function that computes its loss, to the weighted loss; None if nothing in it counts.
WeighChunk = Callable[[int, Callable[[], Any]], Tensor | None]


def stages_of(schedule: Any) -> list[Any]:
    """The stages on this rank."""
    if stages := getattr(schedule, "_stages", None):
        return list(stages)
    require("torch", schedule, "_stage")
    return [schedule._stage]


def chunks_and_loss(schedule: Any) -> tuple[int, Any]:
    """The number of chunks that the schedule cuts a micro-batch into, and its loss function or None."""
    require("torch", schedule, "_n_microbatches", "_loss_fn")
    return int(schedule._n_microbatches), schedule._loss_fn


def postpones_reduction(schedule: Any) -> bool:
    """Returns whether step() can leave the gradients of fully_shard unreduced, from torch 2.15 on."""
    return "finalize_gradients" in inspect.signature(schedule.step).parameters


def knows_shapes(schedule: Any) -> bool:
    """True if a call has fixed the shapes that stages exchange; changing between training and eval() resets them."""
    names = "_stage_backward_initialized", "_stages_backward_initialized"
    return any(getattr(schedule, name, False) for name in names)


def splits_backward(schedule: Any) -> bool:
    """Returns whether the schedule splits a stage's backward: for its inputs, later for its weights (zero bubble)."""
    rows = {**(getattr(schedule, "pipeline_order", None) or {}), **(getattr(schedule, "pipeline_order_with_comms", {}))}
    actions = [one for row in rows.values() for one in row if one is not None]
    return any(action.computation_type.value == "W" for action in actions)


@contextmanager
def weighing(schedule: Any, weigh: WeighChunk) -> Iterator[None]:
    """For the block, passes the schedule's losses through `weigh`, except in its trial run, which finds out shapes."""
    require("torch", schedule, "_loss_fn", "_maybe_compute_loss")
    loss_fn = schedule._loss_fn
    compute = schedule._maybe_compute_loss

    def whole(*args: Any, **options: Any) -> Any:
        loss = loss_fn(*args, **options)
        return sum(loss.values()) if isinstance(loss, Mapping) else loss

    def weighed(chunk: int, output: Any, *target: Any, **options: Any) -> Any:
        loss = weigh(chunk, lambda: loss_fn(output, *target, **options))
        return _nothing_of(output) if loss is None else loss

    def compute_at(stage: Any, output: Any, targets: Sequence[Any] | None, chunk: int, *others: Any) -> Any:
        with replaced(schedule, _loss_fn=partial(weighed, chunk)):
            return compute(stage, output, targets, chunk, *others)

    with replaced(schedule, _loss_fn=whole, _maybe_compute_loss=compute_at):
        yield


def _nothing_of(outputs: Any) -> Tensor:
    """A loss of 0 that reaches all of a chunk's graph if nothing in it counts: its criterion could give NaN."""
    tensors = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    return torch.stack([one.flatten()[:0].sum().float() for one in tensors if one.requires_grad]).sum()


def root_of(mesh: Any) -> Any:
    """The mesh that a mesh is a slice of, or itself, also where the name is missing: then no slice is refused."""
    return getattr(mesh, "_get_root_mesh", lambda: mesh)()
