"""Gradients of narrower parameters, added up in a wider dtype."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn

from ..extension import Extension
from ..job import Job
from ..update import Update
from ..window import Window


@final
class WideSums(Extension):
    """Adds up gradients of narrower parameters in `dtype`, and rounds the sum once, before the reduction.

    Equivalent to, after each backward of a window::

        wide[p] += p.grad
        p.grad = None

    and `p.grad = wide[p].to(p.dtype)` after the last. Hooks do it within backward, one parameter at a time, so that
    only one gradient exists twice. Under DDP no backward reduces then, and the library averages the rounded sums.

    FSDP and DeepSpeed add gradients up themselves, in the dtype that their policy or config sets; it is refused there.

    Args:
        dtype: `torch.float32` or `torch.float64`.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        if dtype not in (torch.float32, torch.float64):
            raise ValueError(f"WideSums({dtype!r}), expected torch.float32 or torch.float64")
        self._dtype = dtype
        self._sums: dict[int, tuple[nn.Parameter, Tensor]] = {}
        self._hooks = ExitStack()
        self._is_running = False

    def join(self, job: Job) -> None:
        engine = job.engine
        if engine.peers.stages or "sums" in engine.owns:
            what = "a pipeline's schedule" if engine.peers.stages else engine.name
            raise ValueError(
                f"WideSums with {what}, which adds gradients up by itself; leave it out, and set the dtype there: "
                "MixedPrecisionPolicy(reduce_dtype=torch.float32) of fully_shard, sync='every' with float32 parameters "
                'under FSDP1, or "data_types": {"grad_accum_dtype": "fp32"} in the config of DeepSpeed'
            )
        engine.read_grad = self._read_grad

    def begin(self, window: Window) -> None:
        for p in window.parameters:
            wide = self._dtype.to_complex() if p.is_complex() else self._dtype
            if p.requires_grad and torch.promote_types(p.dtype, wide) != p.dtype:
                register: Any = p.register_post_accumulate_grad_hook
                self._hooks.callback(register(partial(self._take, wide)).remove)

    def before_backward(self, window: Window, reduces: bool) -> None:
        # In a static graph's first backward, DDP must see gradients.
        self._is_running = not reduces

    def after_backward(self, window: Window) -> None:
        self._is_running = False

    @torch.no_grad()
    def _take(self, wide: torch.dtype, parameter: Any) -> None:
        gradient = parameter.grad
        if not self._is_running or gradient is None:
            return
        parameter.grad = None
        if id(parameter) in self._sums:
            self._sums[id(parameter)][1].add_(gradient)
        else:
            self._sums[id(parameter)] = parameter, gradient.to(wide)

    def finishing(self, window: Window) -> None:
        for parameter, wide in self._sums.values():
            parameter.grad = (wide.coalesce() if wide.is_sparse else wide).to(parameter.dtype)
        self._drop()

    def end(self, window: Window, update: Update | None) -> None:
        self._drop()

    def _read_grad(self, parameter: nn.Parameter) -> Tensor | None:
        return self._sums[id(parameter)][1] if id(parameter) in self._sums else parameter.grad

    def _drop(self) -> None:
        self._hooks.close()
        self._sums.clear()
        self._is_running = False
