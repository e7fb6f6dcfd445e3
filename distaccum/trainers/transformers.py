"""transformers' Trainer with exact updates: it draws, calls, clips, steps and logs as always; losses have late weights.

Whatever overrides there are, above or below this class or on the instance, a loss meets its weight in
`accelerator.backward`. Its count is that of the `compute_loss` which made its graph, the innermost if several did. The
call of `training_step` that ends the window divides the gradients, before the Trainer looks at them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager, suppress
from functools import partial
from itertools import chain
from typing import Any, final

import torch
from accelerate.utils import broadcast_object_list, gather_object, recursively_apply
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback
from transformers.loss import loss_utils

from ..batch import Count
from ..engines.private.ddp import before_sink
from ..law import DistaccumError, Reduction
from ..norms import widest
from ..private import replaced
from ..scaling import forget
from ..update import Update
from ..wrappers.private import leave_out_step, note_step
from .late import LateWindow, reached

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
            cure = f"TrainingArguments({ELSEWHERE[name]}={kwargs[name]!r})"
            raise TypeError(f"AccumulatingTrainer got {name}={kwargs[name]!r}, expected {cure}")
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
        self._accumulation.begin()
        compute = partial(super().set_initial_training_values, *args, **kwargs)
        own = None
        # It raises for an empty loader; those of other ranks may have something.
        with suppress(ValueError):
            own = compute()
        values = list(filter(None, gather_object([own])))
        # The sixth value is the number of micro-batches per epoch.
        return max(values, key=lambda of_rank: of_rank[5]) if values else compute()

    def _get_grad_norm(self, *args: Any, **kwargs: Any) -> Any:
        self._accumulation.norm = super()._get_grad_norm(*args, **kwargs)
        return self._accumulation.norm


class _Steps(int):
    """A number of micro-batches which divides no loss: what is divided by it stays as it is."""

    def __rtruediv__(self, other: Any) -> Any:
        return other

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*(1 if isinstance(value, cls) else value for value in args), **(kwargs or {}))


@final
class _Accumulation(TrainerCallback):  # type: ignore[misc]  # has no types
    """Late weights for a Trainer's losses; holds all of their state, so that no name of a subclass is taken."""

    def __init__(self, trainer: Any, count: Count | None, reduction: Reduction) -> None:
        if count is None and reduction != "mean":
            raise ValueError(f"{reduction=} without count=, expected what its mean is over, as count=count_samples")
        self._trainer = trainer
        self._late = LateWindow(reduction, count or len)  # which only gives it a name
        self._given_count = count and self._late.count
        self.norm: Any = None
        # In a training step, counts by the place in the graph of what they count: of a loss that compute_loss returned,
        # and of the items that it divided by; without count=, of each loss that transformers' own cross entropy
        # returned. Its loss functions that take num_items_in_batch call it. One that something was added to has another
        # place.
        self._noted: Any = None

    def begin(self) -> None:
        """Begins a loop; what one that failed has left is gone."""
        self._last = self._noted = None
        self._late.clear()
        self._begin_log()

    def _begin_log(self) -> None:
        # Of the updates since the last log: their number, that of those with a loss, and the sum of these losses.
        self._num_updates = self._num_losses = 0
        self._sum = 0.0

    def on_log(self, *_: Any, logs: Any = None, **__: Any) -> None:
        if logs and "loss" in logs:
            self._begin_log()

    def _for_the_log(self, loss: float | None) -> float:
        """The number to add to the Trainer's sum so that its mean over updates is that of those with a loss."""
        before = self._sum * self._num_updates / max(self._num_losses, 1)
        self._num_updates += 1
        if loss is not None:
            self._num_losses += 1
            self._sum += loss
        return self._sum * self._num_updates / max(self._num_losses, 1) - before

    def _draw(self, get_batch_samples: Callable[..., Any], *args: Any) -> tuple[list[Any], Any]:
        """The window's micro-batches as the Trainer draws them, after turns without any if another rank has more.

        The last turn of each rank then has a backward, which reduces. A window that a data set without a length ends
        in begins with turns for nobody.
        """
        trainer = self._trainer
        peers = self._late.peers
        # Ranks without a micro-batch would not take part in a sum of items.
        with replaced(trainer.args, average_tokens_across_devices=False):
            batches, items = get_batch_samples(*args)
        if batches and not peers.is_alone:
            self._last = batches[0]
        rows = peers.gather([len(batches), self._last is not None])
        self._lengths = [int(length) for length, _ in rows]
        most = max(self._lengths)
        if not peers.is_alone and most and not all(can_lend for _, can_lend in rows):
            lender = self._lengths.index(most)
            (given,) = broadcast_object_list([batches[0] if batches else None], from_process=lender)
            self._last = given if self._last is None else self._last
        self._left = max(most, args[1]) if most else 0
        # The Trainer counts the tokens of each turn.
        name = getattr(trainer.model, "main_input_name", "input_ids")
        nothing = {name: torch.empty(0, dtype=torch.long, device=args[2])}
        return [*[nothing] * (self._left - len(batches)), *batches], items

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

        step = partial(self._run, trainer.training_step)
        compute_outer = partial(self._compute_loss, outer)
        draw = partial(self._draw, trainer.get_batch_samples)
        with (
            replaced(trainer, training_step=step, compute_loss=compute_outer, get_batch_samples=draw),
            # The one place that sees what an override below AccumulatingTrainer has made of its inputs.
            replaced(Trainer, compute_loss=compute_inner),
            replaced(loss_utils, fixed_cross_entropy=partial(self._cross_entropy, loss_utils.fixed_cross_entropy)),
        ):
            yield

    def _run(self, training_step: Callable[..., Tensor], model: nn.Module, inputs: Any, *_: Any, **__: Any) -> Tensor:
        """Runs a micro-batch; returns the window's loss if it is the last, else 0, for the Trainer to add up."""
        trainer = self._trainer
        loss = None
        is_last = trainer.accelerator.sync_gradients
        if self._left <= max(self._lengths):
            self._run_batch(training_step, model, inputs)
        self._left -= 1
        if is_last:
            groups = (group["params"] for group in trainer.optimizer.param_groups)
            loss = self._late.divide(chain(model.parameters(), *groups))
            leave_out_step(trainer.optimizer) if loss is None else note_step(trainer.optimizer, True)
            loss = self._for_the_log(loss)
        return torch.tensor(loss or 0.0, device=trainer.args.device)

    def _run_batch(self, training_step: Callable[..., Tensor], model: nn.Module, inputs: Any) -> None:
        trainer = self._trainer
        accelerator = trainer.accelerator
        is_lent = self._left > self._lengths[self._late.peers.rank]
        # Its own turn may come, and may change it in place.
        inputs = copy.deepcopy(self._last) if is_lent else inputs
        weigh = partial(self._weigh, copy.copy(inputs), inputs, is_lent)
        self._late.begin_micro_batch()
        self._noted = {}
        # No loss is divided by these, nor by what all ranks have.
        steps = {"gradient_accumulation_steps": _Steps(trainer.args.gradient_accumulation_steps)}
        own = {
            "current_gradient_accumulation_steps": _Steps(trainer.current_gradient_accumulation_steps),
            "loss_is_scaled_for_ga": True,
        }
        backward = accelerator.backward
        hooks: dict[str, Any] = {"backward": lambda loss, **kwargs: backward(weigh(loss), **kwargs)}
        if min(self._lengths) < self._left <= max(self._lengths):
            hooks["gather_for_metrics"] = partial(self._gather_for_metrics, accelerator.gather_for_metrics)
        everything = {**steps, "average_tokens_across_devices": False}
        with replaced(trainer.args, **everything), replaced(trainer, **own), replaced(accelerator, **hooks):
            training_step(model, inputs, None)
        self._noted = None
        if not self._late.weighed:
            raise DistaccumError(
                f"{type(trainer).__name__}.training_step ran no self.accelerator.backward(loss), expected one for each "
                "micro-batch, where the loss gets its weight; call it in place of loss.backward()"
            )

    def _gather_for_metrics(self, own: Callable[..., Any], values: Any, *args: Any, **kwargs: Any) -> Any:
        """Gathers from the ranks that have a micro-batch of their own in this turn."""
        here = [rank for rank, length in enumerate(self._lengths) if length >= self._left]
        if args or kwargs:
            return own(values, *args, **kwargs)
        rows = self._trainer.accelerator.gather(values)
        return recursively_apply(lambda row: row.unflatten(0, (len(self._lengths), -1))[here].flatten(0, 1), rows)

    def _compute_loss(self, compute: Callable[..., Any], model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Notes the count of the loss that a compute_loss returns, by its place in the graph."""
        # Not in an evaluation, nor for a look at other inputs.
        if self._noted is None or not torch.is_grad_enabled():
            return compute(model, inputs, *args, **kwargs)
        seen = copy.copy(inputs)
        if "num_items_in_batch" in kwargs or len(args) > 1:
            items = self._items(seen) if self._whose is not None else None
            args = args[:1]
            kwargs = {**kwargs, "num_items_in_batch": items}
        result = compute(model, inputs, *args, **kwargs)
        loss = result[0] if isinstance(result, tuple) else result
        if self._given_count is not None and isinstance(loss, Tensor) and loss.requires_grad:
            self._noted[before_sink(loss)] = self._counts_of(loss, seen, inputs)
        return result

    def _items(self, inputs: Any) -> Tensor:
        """The items in this micro-batch alone: a loss that divides by them is a mean over them.

        They are in the graph of such a loss, which tells that they are its count, whatever becomes of the inputs.
        """
        device = self._trainer.args.device
        # Without count=, a loss is weighed only if it is known, and then it is not asked what to divide by.
        if self._given_count is None:
            return torch.ones((), device=device)
        count = self._given_count(inputs)
        items = widest(torch.as_tensor(count, device=device)).requires_grad_().clone()
        self._noted[before_sink(items)] = [count]
        return items

    def _counts_of(self, loss: Tensor, seen: Any, inputs: Any) -> list[Any]:
        """The counts of what a loss was made from, or that of the inputs as they were seen and have become.

        Without count=, that of a loss of transformers' own, and none for any other.
        """
        if self._given_count is None:
            return list(self._noted.get(before_sink(loss), ()))
        counts = reached(loss, self._noted)
        if counts:
            return counts
        if isinstance(seen, MutableMapping):
            seen.update(inputs)
        return [self._given_count(seen)]

    def _cross_entropy(
        self, own: Any, source: Tensor, target: Tensor, num_items_in_batch: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        """transformers' own cross entropy; in a training step a mean, whatever it shall divide by."""
        if self._noted is None or self._given_count is not None or target.is_floating_point():
            return own(source, target, num_items_in_batch, *args, **kwargs)
        loss = own(source, target, None, *args, **kwargs)
        ignored = kwargs.get("ignore_index", args[0] if args else -100)
        self._noted[before_sink(loss)] = [target.ne(ignored).sum()]
        return loss

    def _weigh(self, seen: Any, inputs: Any, is_lent: bool, loss: Tensor) -> Tensor:
        """The loss that shall run backward in place of `loss`; another rank's batch, which is lent, counts nothing."""
        counts = self._counts_of(loss, seen, inputs)
        if not counts:
            trainer = self._trainer
            model = type(trainer.accelerator.unwrap_model(trainer.model)).__name__
            raise ValueError(
                f"the loss of {self._whose or model} is not the value of a loss function of transformers, so nothing "
                "tells what it is a mean over; give count=count_tokens('labels'), count=count_tokens('labels', "
                "shift=True) if it predicts next tokens, count=count_samples or a function of your own, and "
                "reduction='sum_to_mean' if it is a sum"
            )
        return self._late.weigh(loss, [0] if is_lent else counts)

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Records the update that the Trainer made."""
        trainer = self._trainer
        accelerator = trainer.accelerator
        stepped = not accelerator.optimizer_step_was_skipped
        trainer.update = self._late.record(trainer.state.global_step - 1, self.norm, stepped=stepped)
        # Otherwise it would refuse the next clipping if that of this update was followed by no step.
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
