"""A model's micro-step, measured on this machine: parameters, what fits, and seconds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from ..gradients.memory import free, is_out_of_memory
from ..gradients.snapshot import Snapshot
from ..law.batches import batch_length, cut_batch


class Measured(NamedTuple):
    parameters: int
    gradient_bytes: int
    micro_batch_size: int
    seconds: float
    told: str


def measure(
    model: Any, batch: Any, loss_fn: Callable[[Any], Any], micro_batch_size: int | None = None, rounds: int = 5
) -> Measured:
    """Parameters, and the median seconds of a forward and backward, of which buffers and random numbers are put back.

    What runs out of memory is halved until it fits; nothing larger than the batch is tried.
    """
    models = list(model) if isinstance(model, list | tuple) else [model]
    trained = [p for one in models for p in one.parameters() if p.requires_grad]
    if not trained:
        raise ValueError("the model has no parameter that requires a gradient, expected one to train")
    length = batch_length(batch)
    size = length if micro_batch_size is None else micro_batch_size
    if size > length:
        raise ValueError(f"micro_batch_size={size} and the model's batch has {length}; give a batch as long")
    device, before = trained[0].device, Snapshot(models)
    before.take()
    kept = [p.grad for p in trained]
    halved = False
    try:
        _clear(trained)
        while True:
            part = next(iter(cut_batch(batch, [size], length))) if size < length else batch
            try:
                taken = [_micro_step(trained, part, loss_fn, device) for _ in range(rounds + 2)][2:]
                break
            except Exception as error:
                if not is_out_of_memory(error) or size == 1:
                    raise
                size, halved = size // 2, True
            _clear(trained)
            free()
    finally:
        before.restore()
        for parameter, gradient in zip(trained, kept, strict=True):
            parameter.grad = gradient
    fits = "halved until it fitted" if halved else f"it fits; more than {size} was not probed"
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} CPU threads"
    seconds = statistics.median(taken)
    told = (
        f"measured here ({name}, one rank alone): {seconds:.4g} s per micro-step of "
        f"{size:,} sample{'' if size == 1 else 's'} (median of {rounds}; {min(taken):.4g} to {max(taken):.4g}); {fits}"
    )
    size_of_all = sum(p.numel() * p.element_size() for p in trained)
    return Measured(sum(p.numel() for p in trained), size_of_all, size, seconds, told)


def _micro_step(
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
