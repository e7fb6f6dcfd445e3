"""transformers' Trainer with exact updates: it draws, calls, clips, steps and logs as always; losses have late weights.

Whatever overrides there are, above or below this class or on the instance, a loss meets its weight in
`accelerator.backward`, and is counted by the inputs of the innermost `compute_loss`. The call of `training_step` that
ends the window divides the gradients, before the Trainer looks at them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain, islice
from typing import Any, final

import torch
from accelerate.utils import broadcast_object_list, gather_object
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback
from transformers.loss import loss_utils
from transformers.trainer_utils import has_length

from ..batch import Count
from ..engines.private.ddp import before_sink
from ..law import DistaccumError, Reduction
from ..private import replaced
from ..scaling import forget
from ..update import Update
from ..wrappers.private import leave_out_step, note_step
from .late import LateWindow

# Options of an Accumulator, and the Trainer's arguments for them.
ELSEWHERE = {
    "steps": "gradient_accumulation_steps",
    "micro_batch_size": "per_device_train_batch_size",
    "max_norm": "max_grad_norm",
}


class AccumulatingTrainer(Trainer):  # type: ignore[misc]  # has no types
    """A `Trainer` whose updates are exact. To extend a subclass: `class Mine(AccumulatingTrainer, SFTTrainer)`.

    Args:
        *args, **kwargs: As for the Trainer.
        count: What the loss of a micro-batch is a mean over: a callable that takes the inputs of `compute_loss` and
            returns a number, such as `count_tokens("labels", shift=True)`. It may be left out where the loss is the
            value of a loss function of transformers, which knows how many labels it kept.
        reduction: How the loss reduces a micro-batch, as for the Accumulator: `"mean"`, `"sum"` or `"sum_to_mean"`.

    Attributes:
        update (Update | None): The record of the last update.

    Raises:
        ValueError: In `train()`: DeepSpeed, DataParallel, a mesh with more than data-parallel ranks, an optimizer that
            steps in backward; in the first step: another loss, without `count`.
    """

    def __init__(self, *args: Any, count: Count | None = None, reduction: Reduction = "mean", **kwargs: Any) -> None:
        for name in ELSEWHERE.keys() & kwargs.keys():
            value = kwargs[name]
            cure = f"TrainingArguments({ELSEWHERE[name]}={value!r})"
            raise TypeError(f"AccumulatingTrainer got {name}={value!r}, expected {cure}")
        super().__init__(*args, **kwargs)
        self.update: Update | None = None
        self._accumulation = _Accumulation(self, count, reduction)
        # Other callbacks find the record of this update.
        self.callback_handler.callbacks.insert(0, self._accumulation)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        with self._accumulation.installed():
            return super().train(*args, **kwargs)

    def set_initial_training_values(self, *args: Any, **kwargs: Any) -> Any:
        """The steps of the longest loader, so that all ranks' loops make equally many updates."""
        own = error = None
        try:
            own = super().set_initial_training_values(*args, **kwargs)
        except ValueError as caught:
            # This rank's loader is empty; others may not be.
            error = caught
        values = gather_object([own])
        if error is not None and not any(values):
            raise error
        # The sixth value is the number of micro-batches per epoch.
        lengths = [0 if of_rank is None else of_rank[5] for of_rank in values]
        longest = lengths.index(max(lengths))
        self._accumulation.begin(lender=longest if 0 in lengths else None)
        return values[longest]

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> tuple[Any, None]:
        """The next window's micro-batches, drawn one by one as the loop comes to them, and turns without any."""
        methods = type(self).get_batch_samples, super().get_batch_samples.__func__
        is_plain = methods == (AccumulatingTrainer.get_batch_samples, Trainer.get_batch_samples)
        nothing = {getattr(self.model, "main_input_name", "input_ids"): torch.empty(0, dtype=torch.long, device=device)}
        if is_plain and "get_batch_samples" not in vars(self):
            first = list(islice(epoch_iterator, 1))
            drawn: Any = _Turns([nothing] * num_batches)
            drawn.micro_batches = chain(first, epoch_iterator)
        else:
            # An override may look at the whole window.
            first = super().get_batch_samples(epoch_iterator, num_batches, device)[0]
            drawn = [*first, *[nothing] * (num_batches - len(first))]
        return (drawn if self._accumulation.goes_on(first) else []), None

    def _get_grad_norm(self, *args: Any, **kwargs: Any) -> Any:
        self._accumulation.norm = super()._get_grad_norm(*args, **kwargs)
        return self._accumulation.norm


class _Turns(list[Any]):
    """A window's turns; the Trainer's loop draws each micro-batch when it comes to it, and then the list's items."""

    micro_batches: Iterator[Any]

    def __iter__(self) -> Iterator[Any]:
        return islice(chain(self.micro_batches, super().__iter__()), len(self))


@final
class _Accumulation(TrainerCallback):  # type: ignore[misc]  # has no types
    """Late weights for a Trainer's losses; holds all of their state, so that no name of a subclass is taken."""

    def __init__(self, trainer: Any, count: Count | None, reduction: Reduction) -> None:
        if count is None and reduction != "mean":
            raise ValueError(f"{reduction=} without count=, expected what its mean is over, as count=count_samples")
        self._trainer, self._given_count = trainer, count
        self._late = LateWindow(reduction, count or self._known_count)
        self.norm: Any = None
        # In a training step: the inputs that the loss is computed from, and labels kept, by the place of the loss in
        # the graph, for each that transformers' own cross entropy returned. Its loss functions that take
        # num_items_in_batch call it. One that something was added to has another place.
        self._inputs: Any = None
        self._kept: dict[Any, Tensor] | None = None

    def begin(self, lender: int | None) -> None:
        """Begins a loop; `lender` has micro-batches, if another rank has none."""
        self._lender, self._last, self._inputs, self._kept = lender, None, None, None
        self._late.clear()

    def goes_on(self, first: Sequence[Any]) -> bool:
        """True if any rank has a micro-batch in this window; `first`: what this rank begins with."""
        trainer, peers = self._trainer, self._late.peers
        if self._lender is not None:
            (self._last,) = broadcast_object_list([first[0] if first else None], from_process=self._lender)
            self._lender = None
        if not peers.is_alone and has_length(trainer.callback_handler.train_dataloader):
            # The longest rank has some left.
            return True
        return any(row[0] for row in peers.gather([bool(first)]))

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Puts itself where losses are computed, counted and run backward."""
        trainer = self._trainer
        _refuse(trainer)
        outer, inner = trainer.compute_loss, Trainer.compute_loss
        is_own = getattr(outer, "__func__", None) is inner and trainer.compute_loss_func is None
        self._whose = None if is_own else "compute_loss_func" if trainer.compute_loss_func else "compute_loss"

        def compute_inner(any_trainer: Any, *args: Any, **kwargs: Any) -> Any:
            run = partial(inner, any_trainer)
            return self._compute_loss(run, *args, **kwargs) if any_trainer is trainer else run(*args, **kwargs)

        step, compute_outer = partial(self._run, trainer.training_step), partial(self._compute_loss, outer)
        with (
            replaced(trainer, training_step=step, compute_loss=compute_outer),
            # The one place that sees what an override below AccumulatingTrainer has made of its inputs.
            replaced(Trainer, compute_loss=compute_inner),
            replaced(loss_utils, fixed_cross_entropy=partial(self._cross_entropy, loss_utils.fixed_cross_entropy)),
        ):
            yield

    def _run(self, training_step: Callable[..., Tensor], model: nn.Module, inputs: Any, *_: Any, **__: Any) -> Tensor:
        """Runs a micro-batch; returns the window's loss if it is the last, else 0, for the Trainer to add up."""
        trainer, loss = self._trainer, None
        is_last = trainer.accelerator.sync_gradients
        entries = inputs.values() if isinstance(inputs, dict) else [inputs]
        self._is_idle = all(isinstance(entry, Tensor) and not entry.numel() for entry in entries)
        if not (self._is_idle and self._late.peers.is_alone):
            self._run_batch(training_step, model, copy.copy(self._last) if self._is_idle else inputs, is_last)
        if is_last:
            groups = (group["params"] for group in trainer.optimizer.param_groups)
            loss = self._late.divide(chain(model.parameters(), *groups))
            leave_out_step(trainer.optimizer) if loss is None else note_step(trainer.optimizer, True)
        return torch.tensor(loss or 0.0, device=trainer.args.device)

    def _run_batch(self, training_step: Callable[..., Tensor], model: nn.Module, inputs: Any, is_last: bool) -> None:
        trainer = self._trainer
        self._late.begin_micro_batch()
        self._inputs = copy.copy(inputs)
        self._last = None if self._late.peers.is_alone else copy.copy(inputs)
        self._kept = {} if self._given_count is None else None
        # Whatever divides by these would divide once more.
        ones = {"gradient_accumulation_steps": 1, "average_tokens_across_devices": False}
        own = {"current_gradient_accumulation_steps": 1, "loss_is_scaled_for_ga": True}
        backward = partial(self._backward, trainer.accelerator.backward, is_last)
        with replaced(trainer.args, **ones), replaced(trainer, **own), replaced(trainer.accelerator, backward=backward):
            training_step(model, inputs, None)
        self._inputs = self._kept = None
        if self._late.weighed is None:
            raise DistaccumError(
                f"{type(trainer).__name__}.training_step ran no self.accelerator.backward(loss), expected one for each "
                "micro-batch, where the loss gets its weight; call it in place of loss.backward()"
            )

    def _compute_loss(self, compute: Callable[..., Any], model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Notes what a compute_loss is given, in a copy, since it may pop the labels."""
        # Not in an evaluation.
        if self._inputs is not None:
            self._inputs = copy.copy(inputs)
            if "num_items_in_batch" in kwargs or len(args) > 1:
                items = self._items() if self._whose is not None else None
                args, kwargs = args[:1], {**kwargs, "num_items_in_batch": items}
        return compute(model, inputs, *args, **kwargs)

    def _items(self) -> Tensor:
        """The items in this micro-batch alone: a loss that divides by them is a mean over them."""
        # Without count=, a loss is weighed only if it is known, and then it is not asked what to divide by.
        number = 1.0 if self._given_count is None or self._is_idle else self._given_count(self._inputs)
        return torch.as_tensor(number, device=self._trainer.args.device)

    def _cross_entropy(
        self, own: Any, source: Tensor, target: Tensor, num_items_in_batch: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        """transformers' own cross entropy; in a training step a mean, whatever it shall divide by."""
        if self._kept is None or target.is_floating_point():
            return own(source, target, num_items_in_batch, *args, **kwargs)
        loss = own(source, target, None, *args, **kwargs)
        self._kept[loss.grad_fn, loss.output_nr] = target.ne(kwargs.get("ignore_index", args[0] if args else -100))
        return loss

    def _known_count(self, loss: Tensor) -> Tensor | None:
        kept = None if self._kept is None else self._kept.get(before_sink(loss))
        return None if kept is None else kept.sum()

    def _backward(self, backward: Callable[..., None], is_last: bool, loss: Tensor, **kwargs: Any) -> None:
        count = self._known_count(loss) if self._given_count is None else self._items()
        if count is None:
            trainer = self._trainer
            model = type(trainer.accelerator.unwrap_model(trainer.model)).__name__
            raise ValueError(
                f"the loss of {self._whose or model} is not the value of a loss function of transformers, so nothing "
                "tells what it is a mean over; give count=count_tokens('labels'), count=count_tokens('labels', "
                "shift=True) if it predicts next tokens, count=count_samples or a function of your own, and "
                "reduction='sum_to_mean' if it is a sum"
            )
        backward(self._late.weigh(loss, 0 if self._is_idle else count, is_last=is_last), **kwargs)

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Records the update that the Trainer made."""
        trainer, accelerator = self._trainer, self._trainer.accelerator
        stepped = not accelerator.optimizer_step_was_skipped
        trainer.update = update = self._late.record(trainer.state.global_step - 1, self.norm, stepped=stepped)
        if accelerator.scaler is not None and not any(update.counts.values()):
            # The Trainer's clipping unscaled it.
            forget(accelerator.scaler, [trainer.optimizer.optimizer])


def _refuse(trainer: Any) -> None:
    sizes = {"tensor": trainer.get_tp_size(), "context": trainer.get_cp_size(), "sequence": trainer.get_sp_size()}
    refused = [f"{name} parallelism over {size} ranks" for name, size in sizes.items() if size > 1]
    if any(word in str(trainer.args.optim).lower() for word in ("lomo", "layerwise")):
        refused.append(f"optim={trainer.args.optim}, which steps in backward,")
    refused += ["DeepSpeed"] * trainer.is_deepspeed_enabled + ["DataParallel"] * (trainer.args.n_gpu > 1)
    if refused:
        raise ValueError(
            f"AccumulatingTrainer with {refused[0]} is not supported; use one process per device with DDP or FSDP, or "
            "write the loop with Accelerate and an Accumulator"
        )
