"""Lightning's Trainer with exact updates: `accumulate_grad_batches` and its loop stay, losses get late weights."""

from __future__ import annotations

import copy
import math
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

AS_MANY = (
    "expected as many micro-batches on each rank, since Lightning ends the epoch of a rank when its loader ends; give "
    "each rank as many, or write the loop with an Accumulator"
)


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
        self._noted: tuple[Any, Tensor] | None = None  # of the training_step that ran last: its count, and its loss
        self._norm: Tensor | None = None  # before clipping
        self._is_complete = self._has_stepped = self._may_end_anywhere = False
        self._stack = ExitStack()

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Moves to the front, so that other callbacks see gradients that are divided."""
        if sum(isinstance(one, ExactAccumulation) for one in trainer.callbacks) > 1:
            raise ValueError("the Trainer has several ExactAccumulation, each of which weighs all losses; give it one")
        trainer.callbacks.remove(self)
        trainer.callbacks.insert(0, self)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        if not pl_module.automatic_optimization or trainer.strategy.handles_gradient_accumulation:
            seen = "automatic_optimization=False" if not pl_module.automatic_optimization else trainer.strategy
            raise ValueError(
                f"ExactAccumulation with {seen}, expected Lightning's own optimisation, and gradients that can be "
                "seen, as under DDP and FSDP; leave it out, and give the module an Accumulator"
            )
        self._stack.close()  # of a fit that failed where no callback hears of it
        self._late = LateWindow(self._reduction, self._count)  # of all ranks
        # Nothing is put on the module, which others may copy and save.
        strategy = trainer.strategy
        precision = trainer.precision_plugin
        step = partial(self._training_step, trainer, strategy.training_step)
        self._stack.enter_context(replaced(strategy, training_step=step))
        self._stack.enter_context(replaced(precision, backward=partial(self._backward, trainer, precision.backward)))
        if type(precision).clip_grad_by_norm.__qualname__ == "Precision.clip_grad_by_norm":  # no other returns the norm
            self._stack.enter_context(replaced(precision, clip_grad_by_norm=partial(self._clip, precision)))
        for optimizer in trainer.optimizers:
            self._stack.callback(optimizer.register_step_post_hook(self._note_step).remove)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        numbers = [row[0] for row in self._late.peers.gather([float(trainer.num_training_batches)])]
        if len(set(numbers)) > 1:
            raise DistaccumError(
                f"ranks have {', '.join(f'{number:g}' for number in numbers)} micro-batches in this epoch, {AS_MANY}"
            )
        # A limit in batches hides a stream's end.
        is_sized = isinstance(trainer.limit_train_batches, float) and math.isfinite(numbers[0])
        self._may_end_anywhere = not (is_sized or self._late.peers.is_alone)

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        self._agree(trainer, 1.0 if trainer.is_last_batch else 0.0)

    def on_train_epoch_end(self, trainer: Any, *_: Any) -> None:
        if not trainer.is_last_batch:
            # A rank without data, or all ranks where the loop stops in mid-epoch.
            self._agree(trainer, 2.0)

    def _agree(self, trainer: Any, end: float) -> None:
        """Raises on all ranks where the data of some end, if nobody knew their length."""
        if self._may_end_anywhere and len({row[0] for row in self._late.peers.gather([end])}) > 1:
            raise DistaccumError(
                f"the data of some ranks end at micro-batch {trainer.fit_loop.batch_idx + 1} of this epoch, and those "
                f"of others do not, {AS_MANY}"
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

    on_exception = teardown

    def _training_step(self, trainer: Any, run: Callable[..., Any], *args: Any) -> Any:
        """Notes the count and the loss as the module's training_step returns, which a strategy calls by its name."""
        module = trainer.lightning_module
        step = module.training_step

        @wraps(step)
        def noted(batch: Any, *args: Any, **kwargs: Any) -> Any:
            # With what the module takes out of it or puts in.
            seen = copy.copy(batch) if isinstance(batch, MutableMapping) else batch
            output = step(batch, *args, **kwargs)
            if isinstance(batch, MutableMapping):
                seen.update(batch)
            loss = output.get("loss") if isinstance(output, Mapping) else output
            self._noted = (self._late.count(seen), loss.detach()) if isinstance(loss, Tensor) else None
            return output

        with replaced(module, training_step=noted):
            return run(*args)

    def _backward(self, trainer: Any, backward: Callable[..., Any], loss: Tensor, *args: Any, **kwargs: Any) -> None:
        if self not in trainer.callbacks:
            # The Tuner trains with callbacks of its own, and who weighs must divide.
            trainer.callbacks.append(self)
        self._late.begin_micro_batch()
        loss = loss * trainer.accumulate_grad_batches  # by which Lightning has divided it
        count, value = self._noted or (None, None)
        backward(self._late.weigh(loss, [count], value), *args, **kwargs)

    def _clip(self, precision: Any, optimizer: Any, clip_val: float) -> None:
        self._norm = torch.nn.utils.clip_grad_norm_(precision.main_params(optimizer), clip_val)

    def _note_step(self, *_: Any) -> None:
        self._has_stepped = True
