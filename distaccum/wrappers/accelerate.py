"""Accelerate: unwraps the objects that its `prepare` returned, and uses its own backward and scaler.

It wraps the model in one of the other engines' wrappers, so that engine does the work. Optimizers are unwrapped because
their wrapper steps or not by a singleton's flag, and updates the scaler once per optimizer; schedulers, because their
wrapper steps once per process. Its `clip_grad_norm_` is not called: it unscales every optimizer ever prepared, even
those of another window.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from operator import add, mul
from typing import Any, final

import torch.distributed as dist
from accelerate.data_loader import DataLoaderAdapter, DataLoaderDispatcher
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.state import GradientState
from accelerate.utils.deepspeed import DeepSpeedSchedulerWrapper
from torch import Tensor

from ..adapter import Adapter, Prepared, RunBackward
from ..law import DistaccumError
from ..private import replaced
from ..text import warn
from .private import NOWHERE, note_step


@final
class Accelerated(Adapter):
    """Unwraps the optimizers, schedulers and scaler that Accelerate's `prepare` returned."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator

    def unwrap(self, given: Prepared) -> None:
        accelerator = self._accelerator
        self._wrappers = [one for one in given.optimizers if isinstance(one, AcceleratedOptimizer)]
        given.optimizers = [one.optimizer if one in self._wrappers else one for one in given.optimizers]
        prepared = [one for one in given.schedulers if isinstance(one, AcceleratedScheduler)]
        given.schedulers = [one.scheduler if one in prepared else one for one in given.schedulers]
        _warn_of_steps_by_process(prepared)
        theirs = [one.scaler for one in (*self._wrappers, accelerator) if getattr(one, "scaler", None) is not None]
        if accelerator is not None:
            # Under DeepSpeed its backward would also step the engine.
            self.scales_losses = accelerator.distributed_type not in ("DEEPSPEED", "MEGATRON_LM")
        if given.scaler is not None and any(given.scaler is not one for one in theirs):
            raise ValueError("scaler= beside the Accelerator's own, which scales the loss too; leave scaler= out")
        given.scaler = theirs[0] if theirs else given.scaler
        self.begin()

    def around(self, run_backward: RunBackward) -> RunBackward:
        return self._run_backward if self.scales_losses else run_backward

    def begin(self) -> None:
        # The state of all Accelerators, wrappers and loaders in this process.
        steps = GradientState().num_steps if self._wrappers or self._accelerator is not None else 1
        if steps > 1:
            raise DistaccumError(
                f"Accelerate accumulates over {steps} steps by itself (gradient_accumulation_steps), which would "
                "divide the loss a second time; leave it at 1, and do not enter accelerator.accumulate()"
            )

    def after_step(self, stepped: bool) -> None:
        for wrapper in self._wrappers:
            note_step(wrapper, stepped)

    def communicates(self, loader: Any) -> bool:
        return isinstance(loader, DataLoaderDispatcher)

    @contextmanager
    def reading(self, loader: Any, is_last: Callable[[], bool]) -> Iterator[None]:
        """Shows Accelerate the loader as it was when the micro-batch at work was drawn, for `gather_for_metrics`."""
        if not isinstance(loader, DataLoaderAdapter):
            yield
            return
        state = GradientState()
        shown = _AtWork(loader, is_last)
        with replaced(loader, gradient_state=NOWHERE):
            state.dataloader_references = [*state.dataloader_references, shown]
            try:
                yield
            finally:
                state.dataloader_references = [one for one in state.dataloader_references if one is not shown]

    def tells_state(self, loader: Any) -> bool:
        return not isinstance(loader, DataLoaderAdapter) or bool(loader.use_stateful_dataloader)

    def _run_backward(self, losses: Sequence[Tensor], seeds: Sequence[Tensor]) -> None:
        if len(losses) == 1:
            self._accelerator.backward(losses[0], gradient=seeds[0])
        else:
            self._accelerator.backward(reduce(add, map(mul, losses, seeds)))


@final
class _AtWork:
    """The loader, not at its end before its last micro-batch is at work."""

    def __init__(self, loader: Any, is_last: Callable[[], bool]) -> None:
        self._loader, self._is_last = loader, is_last

    @property
    def end_of_dataloader(self) -> bool:
        return self._loader.end_of_dataloader and self._is_last()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def _warn_of_steps_by_process(prepared: Sequence[Any]) -> None:
    processes = dist.get_world_size() if dist.is_initialized() else 1
    # DeepSpeed's engine steps its own once per update.
    theirs = [schedule for schedule in prepared if not isinstance(schedule, DeepSpeedSchedulerWrapper)]
    by_process = any(schedule.step_with_optimizer and not schedule.split_batches for schedule in theirs)
    if by_process and processes > 1 and dist.get_rank() == 0:
        warn(
            f"Accelerate steps a prepared schedule {processes} times per update, once per process, and window.step() "
            f"steps it once: divide the lengths that were meant for Accelerate (warm-up, total) by {processes}, or, if "
            "they are in updates already, leave the schedule out of prepare"
        )
