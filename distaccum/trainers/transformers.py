"""transformers' Trainer with windows: its loop, logging, callbacks, clipping, schedule and checkpoints stay.

For each update, the Trainer's loop reaches three places where this module steps in, in this order:

1. `get_batch_samples` draws the window, which all ranks plan;
2. `training_step` runs one micro-batch of it, or idles if the loop has more turns than this rank has micro-batches;
3. the Trainer clips, steps and calls `on_step_end`, where the window is recorded.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, final

import torch
import transformers
from accelerate.data_loader import DataLoaderDispatcher
from accelerate.utils import gather_object
from packaging.version import Version
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer, TrainerCallback
from transformers.loss.loss_utils import ForCausalLMLoss

from ..accumulator import Accumulator
from ..cutting import Count
from ..law import Reduction, share_of
from ..planner import Windows
from ..private import replaced
from ..runs.snapshot import kept
from ..scaling import forget
from ..update import Update
from ..window import Window
from ..wrappers.private.accelerate import leave_out_step, note_step
from .questions import Questions

IGNORED = -100
ELSEWHERE = {  # options of an Accumulator, and the Trainer's arguments for them
    "steps": "gradient_accumulation_steps",
    "micro_batch_size": "per_device_train_batch_size",
    "max_norm": "max_grad_norm",
}
OLDEST = "5.4"  # the first whose loop takes its length from set_initial_training_values


class AccumulatingTrainer(Trainer):  # type: ignore[misc]  # has no types
    """A `Trainer` whose updates are exact. To extend a subclass: `class Mine(AccumulatingTrainer, SFTTrainer)`.

    Args:
        *args: As for the Trainer.
        count: What the loss of a micro-batch is a mean over: a callable that takes a micro-batch and returns a number,
            such as `count_tokens("labels", shift=True)`. None counts the labels that the Trainer would count, or
            samples if a sample has one label or none; `train()` then tests the model, and refuses one whose loss is
            not a mean over them.
        reduction: How the loss reduces a micro-batch, as for the Accumulator: `"mean"`, `"sum"` or `"sum_to_mean"`.
        **kwargs: As for the Trainer.

    Attributes:
        update (Update | None): The record of the last update.

    Raises:
        ValueError: In `train()`: DeepSpeed, DataParallel, a mesh with more than data-parallel ranks, an optimizer that
            steps in backward, or a loss that is not a mean over what the default count counts.
    """

    def __init__(self, *args: Any, count: Count | None = None, reduction: Reduction = "mean", **kwargs: Any) -> None:
        if Version(transformers.__version__) < Version(OLDEST):
            raise ImportError(
                f"transformers {transformers.__version__}, expected {OLDEST} or newer, whose Trainer can be given "
                "windows; upgrade it, or write the loop with an Accumulator"
            )
        if count is not None and not callable(count):
            raise TypeError(
                f"count={count!r}, expected a callable: micro-batch -> number, such as count_samples or "
                "count_tokens('labels', shift=True); leave it out to count what the Trainer counts"
            )
        try:
            super().__init__(*args, **kwargs)
        except TypeError as error:
            named = (name for name in ELSEWHERE if f"unexpected keyword argument '{name}'" in str(error))
            if (name := next(named, None)) is None or name not in kwargs:
                raise
            theirs = f"TrainingArguments({ELSEWHERE[name]}={kwargs[name]!r})"
            raise TypeError(f"AccumulatingTrainer got {name}={kwargs[name]!r}, expected {theirs}") from error
        self.update: Update | None = None
        self._own_count, self._reduction = count, reduction
        self._wrapped: nn.Module | None = None  # the next two are made for it:
        self._accumulator: Accumulator
        self._questions: Questions
        self._iterator: Any = None  # of a pass over the data
        self._windows: Windows | None = None  # of that pass
        self._window: Window
        self._micro_batches: Iterator[Any]  # of the window
        self._most: int | None = None  # micro-batches of an epoch that the loop may use
        self._turns = 0  # of the Trainer's loop, left in this update
        self._last: Any = None  # the last micro-batch that this rank drew
        self._syncs_each = bool(self.accelerator.gradient_state.plugin_kwargs.get("sync_each_batch"))
        self.callback_handler.callbacks.insert(0, _Ends(self))  # so that others find the record of this update

    def train(self, *args: Any, **kwargs: Any) -> Any:
        self._refuse()
        # With this the loop leaves no_sync alone: its flags belong to the engine.
        state = self.accelerator.gradient_state
        with replaced(state, plugin_kwargs={**state.plugin_kwargs, "sync_each_batch": True}):
            try:
                return super().train(*args, **kwargs)
            finally:
                self._leave()

    # What the loop calls

    def set_initial_training_values(self, *args: Any, **kwargs: Any) -> Any:
        """The steps of the longest loader, so that all ranks' loops make equally many updates."""
        own, error = None, None
        try:
            own = super().set_initial_training_values(*args, **kwargs)
        except ValueError as caught:  # this rank's loader is empty; others may not be
            error = caught
        found = [values for values in gather_object([own]) if values is not None]
        if error is not None and not found:
            raise error
        longest = max(found, key=lambda values: values[5])  # its micro-batches per epoch; a short one has more epochs
        self._most = longest[5]
        return longest

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, *args: Any) -> tuple[list[Any], Any]:
        """This rank's micro-batches of the next window, padded to the number of turns that the loop must make."""
        if self._windows is None or self._iterator is not epoch_iterator:
            self._leave()
            self._make(self.model_wrapped)
            self._iterator, micro_batches = epoch_iterator, self._noted(itertools.islice(epoch_iterator, self._most))
            # If one rank deals out batches to all, drawing waits for ranks that may be at another micro-step.
            deals = isinstance(self.callback_handler.train_dataloader, DataLoaderDispatcher)
            self._windows = self._accumulator.windows(micro_batches, ahead=self.args.world_size == 1 or not deals)
        window = next(self._windows, None)
        if window is None:  # no rank has any left
            return [], None
        own = [one.batch for one in window.micros]
        self._questions.ask(own, window.index)
        window.begin()  # on all ranks together, before some idle
        self._window, self._micro_batches, self._turns = window, iter(window), num_batches
        name = getattr(self.model, "main_input_name", "input_ids")
        nothing = {name: torch.empty(0, dtype=torch.long, device=self.args.device)}  # the loop counts its tokens
        return own + [nothing] * (num_batches - len(own)), None

    def _noted(self, micro_batches: Iterable[Any]) -> Iterator[Any]:
        for micro_batch in micro_batches:
            self._last = micro_batch
            yield micro_batch

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Runs one micro-batch; the window decides which of this update's `inputs` comes in which turn."""
        window, loss = self._window, torch.zeros((), device=self.args.device)
        if self._turns > window.num_micro_steps:  # idle first, so that the reducing backward comes last on each rank
            self._keep_pace(self._last)
        else:
            loss += self._run(model, window, next(self._micro_batches))
        self._turns -= 1
        if not self._turns:
            next(self._micro_batches, None)  # ends the window's loop
            if any(window.counts.values()):
                note_step(self.optimizer, True)
            else:
                leave_out_step(self.optimizer)
        return loss

    def _run(self, model: nn.Module, window: Window, micro_batch: Any) -> Any:
        """Runs one micro-batch; returns its part of the window's loss times the ranks, since the Trainer averages."""
        questions = self._questions
        with self._alone(), replaced(self.accelerator, backward=lambda loss, **_: window.backward(loss)):
            loss: Tensor = super().training_step(model, micro_batch, questions.number(micro_batch))
        if window.stand_in:
            return 0.0
        (total,) = window.counts.values()
        return loss * share_of(self._reduction, questions.weight(micro_batch), total, self.accelerator.num_processes)

    def _keep_pace(self, batch: Any) -> None:
        """Runs a subclass's `compute_loss` without labels or backward, since ranks may wait for each other in it."""
        if batch is None or type(self).compute_loss is Trainer.compute_loss:
            return
        if isinstance(batch, Mapping):
            labels = {name: batch[name] for name in ("labels", "shift_labels") if name in batch}
            batch = {**batch, **{name: torch.full_like(one, IGNORED) for name, one in labels.items()}}
        self.model_wrapped.train()
        self._loss_of(batch, torch.ones((), device=self.args.device))

    def end_window(self) -> None:
        """Records the update that the Trainer made."""
        self.update = self._window.step()
        if not self.update.stepped and self.accelerator.scaler is not None:
            forget(self.accelerator.scaler, [self.optimizer.optimizer])  # the Trainer's clipping unscaled it

    def _leave(self) -> None:
        if self._windows is not None:
            self._windows.close()  # discards what is open
            self._windows = None

    # The Accumulator, and what it counts

    def _make(self, model: nn.Module) -> None:
        """Makes the Accumulator for the model that the Trainer has now wrapped, unless it is the same as before."""
        if self._wrapped is model:
            return
        is_overridden = type(self).compute_loss is not Trainer.compute_loss
        dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
        dtypes |= {torch.bfloat16} if self.args.bf16 or self.args.fp16 or self.args.tf32 else set()
        loss = type(self._bare_model()).__name__ if self.compute_loss_func is None else "compute_loss_func"
        self._questions = Questions(
            name=f"{type(self).__name__}.compute_loss" if is_overridden else loss,
            loss=self._loss_in_eval,
            precision=max(torch.finfo(dtype).eps for dtype in dtypes),
            items=self._items,
            count=self._own_count,
            reduction=self._reduction,
            is_models=not is_overridden and self.compute_loss_func is None,
            is_overridden=is_overridden,
        )
        self._accumulator = Accumulator(
            model,
            steps=lambda _: self.args.gradient_accumulation_steps,
            reduction=self._reduction,
            count=self._questions.weight,
            scaler=self.accelerator.scaler,
            sync="every" if self._syncs_each else "last",
            on_nonfinite="ignore",  # as in the Trainer
        )
        self._wrapped = model

    def _bare_model(self) -> Any:
        own = self.accelerator.unwrap_model(self.model)
        return own.get_base_model() if hasattr(own, "get_base_model") else own  # of PEFT

    def _items(self, micro_batch: Any) -> Any:
        """The items in this micro-batch alone, as the Trainer counts them, so that its loss is a mean."""
        with self._alone():
            found = super().get_batch_samples(iter([micro_batch]), 1, self.args.device)[1]
        own = self._bare_model()
        is_causal = getattr(own, "loss_function", None) is ForCausalLMLoss and not own.config.is_encoder_decoder
        if not is_causal or found is None or "shift_labels" in micro_batch or micro_batch["labels"].dim() < 2:
            return found
        # The Trainer recognises this loss by the model's name, and does not shift GPT-2's labels.
        return micro_batch["labels"][..., 1:].ne(IGNORED).sum()

    def _loss_in_eval(self, micro_batch: Any, number: Any) -> Tensor:
        # TRL's compute_loss writes metrics to dicts of the trainer, which the next evaluation would log.
        mine = ((name, own) for name, own in vars(self).items() if name.endswith("metrics") and isinstance(own, dict))
        with kept([self.model_wrapped]), replaced(self, **{name: copy.deepcopy(own) for name, own in mine}):
            self.model_wrapped.eval()
            return self._loss_of({**micro_batch}, number)

    def _loss_of(self, batch: Any, number: Any) -> Tensor:
        """The loss without a graph, computed by this rank alone."""
        model = self.model_wrapped
        inner = model.module if isinstance(model, DistributedDataParallel) else model  # DDP's forward may communicate
        with torch.no_grad(), self._alone(), self.compute_loss_context_manager():
            loss: Tensor = self.compute_loss(inner, self._prepare_inputs(batch), num_items_in_batch=number)
        return loss

    def _alone(self) -> Any:
        """A context for counts and losses of a single micro-batch on this rank; the window weighs them."""
        self.current_gradient_accumulation_steps = 1
        return replaced(self.args, average_tokens_across_devices=False)

    def _refuse(self) -> None:
        args = self.args
        sizes = {"tensor": self.get_tp_size(), "context": self.get_cp_size(), "sequence": self.get_sp_size()}
        refused = [f"{name} parallelism over {size} ranks" for name, size in sizes.items() if size > 1]
        if any(word in str(args.optim).lower() for word in ("lomo", "layerwise")):
            refused.append(f"optim={args.optim}, which steps in backward,")
        refused += ["DeepSpeed"] * self.is_deepspeed_enabled + ["DataParallel"] * (args.n_gpu > 1)
        if refused:
            raise ValueError(
                f"AccumulatingTrainer with {refused[0]} is not supported; use one process per device with DDP or FSDP, "
                "or write the loop with Accelerate and an Accumulator"
            )


@final
class _Ends(TrainerCallback):  # type: ignore[misc]  # has no types
    """Ends the window after the Trainer has stepped and cleared gradients."""

    def __init__(self, trainer: AccumulatingTrainer) -> None:
        self._trainer = trainer

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._trainer.end_window()
