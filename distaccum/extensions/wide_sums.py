"""Gradients of narrower parameters, added up in a wider dtype."""

from __future__ import annotations

from typing import final

import torch

from ..extension import Extension
from ..job import Job


@final
class WideSums(Extension):
    """Adds up gradients of narrower parameters in `dtype`, and rounds them once, before the reduction.

    FSDP and DeepSpeed add up by themselves: there it raises if their policy or config does so in less.

    Args:
        dtype: `torch.float32` or `torch.float64`.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        if dtype not in (torch.float32, torch.float64):
            raise ValueError(f"WideSums({dtype!r}), expected torch.float32 or torch.float64")
        self._dtype = dtype

    def join(self, job: Job) -> None:
        if job.engine.pipeline is not None and not job.engine.pipeline.is_sharded:
            raise ValueError("WideSums with a pipeline's schedule needs stages under fully_shard; leave it out")
        job.engine.accumulate_in(self._dtype, job.parameters().every)
