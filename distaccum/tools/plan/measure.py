"""The micro-step of a model, measured on this machine: its parameters, the size that fits, and seconds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from ...gradients.memory import free, is_out_of_memory
from ...gradients.snapshot import Snapshot
from ...law.batches import batch_length, cut_batch
from .cuts import number_of


class MicroStepCost(NamedTuple):
    parameters: int
    gradient_bytes: int
    micro_batch_size: int
    seconds: float
    summary: str


def measure_micro_step(
    model: Any, batch: Any, loss_fn: Callable[[Any], Any], micro_batch_size: int | None = None, rounds: int = 5
) -> MicroStepCost:
    """Parameters, and the median seconds of a forward and backward; gradients, buffers and random state are restored.

    A micro-batch that runs out of memory is halved until it fits; none is larger than the batch.
    """
    models = list(model) if isinstance(model, list | tuple) else [model]
    trained = [p for one in models for p in one.parameters() if p.requires_grad]
    if not trained:
        raise ValueError("the model has no parameter that requires a gradient, expected one to train")
    length = batch_length(batch)
    size = asked = length if micro_batch_size is None else micro_batch_size
    if size > length:
        raise ValueError(f"micro_batch_size={size} and the model's batch has {length}; give a batch as long")
    device, before = trained[0].device, Snapshot(models)
    before.take()
    kept = [p.grad for p in trained]
    try:
        while True:
            _clear(trained)
            part = next(iter(cut_batch(batch, [size], length))) if size < length else batch
            try:
                times = [_seconds_of(trained, part, loss_fn, device) for _ in range(rounds + 2)][2:]
                break
            except Exception as error:
                if not is_out_of_memory(error) or size == 1:
                    raise
                size //= 2
            _clear(trained)
            free()
    finally:
        before.restore()
        for parameter, gradient in zip(trained, kept, strict=True):
            parameter.grad = gradient
    fits = "halved until it fitted" if size < asked else f"it fits; more than {size} was not probed"
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} CPU threads"
    seconds = statistics.median(times)
    summary = (
        f"measured here ({name}, one rank alone): {seconds:.4g} s per micro-step of {number_of(size, 'sample')} "
        f"(median of {rounds}; {min(times):.4g} to {max(times):.4g}); {fits}"
    )
    num_bytes = sum(p.numel() * p.element_size() for p in trained)
    return MicroStepCost(sum(p.numel() for p in trained), num_bytes, size, seconds, summary)


def _seconds_of(
    trained: Sequence[nn.Parameter], part: Any, loss_fn: Callable[[Any], Any], device: torch.device
) -> float:
    began = time.perf_counter()
    loss = loss_fn(part)
    total: Any = sum(loss.values()) if isinstance(loss, Mapping) else loss
    total.backward()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    seconds = time.perf_counter() - began
    _clear(trained)
    return seconds


def _clear(trained: Sequence[nn.Parameter]) -> None:
    for parameter in trained:
        parameter.grad = None
