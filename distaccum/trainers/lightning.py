"""Lightning's Trainer with exact updates: `accumulate_grad_batches` and its loop stay, losses get late weights."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import ExitStack
from functools import partial, wraps
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from ..batch import Count
from ..law import DistaccumError, Reduction
from ..private import replaced
from ..update import Update
from .late import LateWindow


def _callback() -> Any:
    """The Callback of the package that the caller has imported, or else of one that is installed."""
    names = {"lightning": "lightning.pytorch", "pytorch_lightning": "pytorch_lightning"}  # one library, two packages
    for package in sorted(names, key=lambda name: name not in sys.modules):
        if find_spec(package) is not None:
            return import_module(names[package]).Callback
    raise ImportError("no Lightning is installed; pip install lightning")


class ExactAccumulation(_callback()):  # type: ignore[misc]  # has no types
    """A callback that makes each update of `Trainer(accumulate_grad_batches=...)` that of one big batch.

    Args:
        count: What the loss of a micro-batch is a mean over: a callable that takes the batch of `training_step` and
            returns a number, such as `count_samples` or `count_tokens("labels")`.
        reduction: How the loss reduces a micro-batch, as for the Accumulator: `"mean"`, `"sum"` or `"sum_to_mean"`.

    Attributes:
        update (Update | None): The record of the last update.

    Raises:
        ValueError: In `fit()`: manual optimisation, or a strategy that accumulates by itself, such as DeepSpeed's.
    """

    def __init__(self, count: Count, reduction: Reduction = "mean") -> None:
        super().__init__()
        self._late = LateWindow(reduction, count)  # refuses what it does not know
        self._count, self._reduction = count, reduction
        self.update: Update | None = None
        self._batch: Any = None  # as training_step got it
        self._loss: Tensor | None = None  # as it returned it
        self._norm: Tensor | None = None  # before clipping
        self._is_complete = self._has_stepped = False
        self._stack = ExitStack()

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Moves to the front, so that other callbacks see gradients that are divided."""
        trainer.callbacks.remove(self)
        trainer.callbacks.insert(0, self)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        if not pl_module.automatic_optimization or trainer.strategy.handles_gradient_accumulation:
            seen = "automatic_optimization=False" if not pl_module.automatic_optimization else trainer.strategy
            raise ValueError(
                f"ExactAccumulation with {seen}, expected Lightning's own optimisation, and gradients that can be "
                "seen, as under DDP and FSDP; leave it out, and give the module an Accumulator"
            )
        self._late = LateWindow(self._reduction, self._count)  # of all ranks
        step, backward, precision = pl_module.training_step, pl_module.backward, trainer.precision_plugin
        noted, weighed = partial(self._training_step, step), partial(self._backward, trainer, backward)
        self._stack.enter_context(replaced(pl_module, training_step=wraps(step)(noted), backward=weighed))
        if type(precision).clip_grad_by_norm.__qualname__ == "Precision.clip_grad_by_norm":  # no other returns the norm
            self._stack.enter_context(replaced(precision, clip_grad_by_norm=partial(self._clip, precision)))
        for optimizer in trainer.optimizers:
            self._stack.callback(optimizer.register_step_post_hook(self._note_step).remove)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        numbers = [row[0] for row in self._late.peers.gather([float(trainer.num_training_batches)])]
        if len(set(numbers)) > 1:
            raise DistaccumError(
                f"ranks have {', '.join(f'{number:g}' for number in numbers)} micro-batches in this epoch, expected as "
                "many on each, since Lightning ends the epoch of a rank when its loader ends; give each rank as many, "
                "or write the loop with an Accumulator"
            )

    def on_before_zero_grad(self, *_: Any) -> None:
        self._late.clear()

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self._late.divide(parameter for group in optimizer.param_groups for parameter in group["params"])
        self._is_complete, self._has_stepped, self._norm = True, False, None

    def on_train_batch_end(self, trainer: Any, *_: Any, **__: Any) -> None:
        if self._is_complete:
            self.update = self._late.record(trainer.global_step - 1, self._norm, stepped=self._has_stepped)
            self._is_complete = False

    def teardown(self, *_: Any, **__: Any) -> None:
        self._stack.close()
        self._batch = self._loss = None

    def on_exception(self, *_: Any) -> None:
        self.teardown()

    def _training_step(self, training_step: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Notes the batch, with what the module takes out of it or puts in, and the loss."""
        self._batch = copy.copy(batch) if isinstance(batch, MutableMapping) else batch
        output = training_step(batch, *args, **kwargs)
        if isinstance(batch, MutableMapping):
            self._batch.update(batch)
        loss = output.get("loss") if isinstance(output, Mapping) else output
        self._loss = loss.detach() if isinstance(loss, Tensor) else None
        return output

    def _backward(self, trainer: Any, backward: Callable[..., Any], loss: Tensor, *args: Any, **kwargs: Any) -> None:
        self._late.begin_micro_batch()
        loss = loss * trainer.accumulate_grad_batches  # by which Lightning has divided it
        backward(self._late.weigh(loss, self._count(self._batch), self._loss), *args, **kwargs)

    def _clip(self, precision: Any, optimizer: Any, clip_val: float) -> None:
        self._norm = torch.nn.utils.clip_grad_norm_(precision.main_params(optimizer), clip_val)

    def _note_step(self, *_: Any) -> None:
        self._has_stepped = True
