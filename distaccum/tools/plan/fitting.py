"""The micro-batch of a model that fits on this machine, tried."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ...cutting import count_samples, cut_batch
from ...runs.memory import free, is_out_of_memory
from ...runs.snapshot import Snapshot
from .report import number_of


class Fit(NamedTuple):
    parameters: int
    gradient_bytes: int
    micro_batch_size: int
    summary: str


def fit(model: Any, batch: Any, loss_fn: Callable[[Any], Any], micro_batch_size: int | None = None) -> Fit:
    """The number of trained parameters, and the micro-batch that goes through forward and backward here.

    A micro-batch that runs out of memory is halved until it fits; none is larger than the batch. Gradients, buffers and
    random state are put back.
    """
    models = list(model) if isinstance(model, list | tuple) else [model]
    trained = [p for one in models for p in one.parameters() if p.requires_grad]
    if not trained:
        raise ValueError("the model has no parameter that requires a gradient, expected one to train")
    length = count_samples(batch)
    size = asked = length if micro_batch_size is None else micro_batch_size
    if size > length:
        raise ValueError(f"micro_batch_size={size} and the model's batch has {length}; give a batch as long")
    device, before, kept = trained[0].device, Snapshot(models), [p.grad for p in trained]
    try:
        while True:
            for parameter in trained:
                parameter.grad = None
            try:
                loss = loss_fn(next(iter(cut_batch(batch, [size], length))) if size < length else batch)
                total: Any = sum(loss.values()) if isinstance(loss, Mapping) else loss
                total.backward()
                break
            except Exception as error:
                if not is_out_of_memory(error) or size == 1:
                    raise
            size //= 2
            free()
    finally:
        before.restore()
        for parameter, gradient in zip(trained, kept, strict=True):
            parameter.grad = gradient
    seen = "halved until it fitted" if size < asked else f"more than {size} was not tried"
    summary = f"a micro-batch of {number_of(size, 'sample')} fits on {device} (one rank alone; {seen})"
    num_bytes = sum(p.numel() * p.element_size() for p in trained)
    return Fit(sum(p.numel() for p in trained), num_bytes, size, summary)
