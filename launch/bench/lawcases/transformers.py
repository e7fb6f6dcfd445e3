"""transformers' Trainer: `gradient_accumulation_steps`, and `compute_loss_func` with the window's number of labels."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from .task import Library, Outcome, Seen, Task

TRANSFORMERS = Library("transformers Trainer", ("transformers", "accelerate"), lacks=frozenset({"aux"}))


class Model(nn.Module):
    """A model with the interface that transformers expects: inputs by name."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.net = task.net

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, Any]:
        return {"logits": self.net(x)}


class ModelWithRouter(Model):
    """A model with its own loss, like models with experts: it adds the router's loss unchanged."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None, **kwargs: Any) -> dict[str, Any]:
        logits, router = self.net(x)
        assert labels is not None
        return {"loss": sum_over_items(logits, labels, kwargs.get("num_items_in_batch")) + 0.1 * router.mean()}


def sum_over_items(logits: torch.Tensor, labels: torch.Tensor, num_items_in_batch: Any) -> torch.Tensor:
    loss = cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=-100, reduction="sum")
    return loss / num_items_in_batch


def loss_func(outputs: dict[str, Any], labels: torch.Tensor, num_items_in_batch: Any) -> torch.Tensor:
    return sum_over_items(outputs["logits"], labels, num_items_in_batch)


def trainer_of(task: Task, model: nn.Module, folder: str, **options: Any) -> tuple[Any, Seen]:
    from accelerate.state import AcceleratorState, GradientState
    from torch.optim.lr_scheduler import LambdaLR
    from transformers import PrinterCallback, Trainer, TrainingArguments
    from transformers.utils import logging

    class WithLoader(Trainer):
        def get_train_dataloader(self) -> Any:
            return self.accelerator.prepare(task.loader())

    logging.set_verbosity_error()
    AcceleratorState._reset_state(True)  # as in a fresh process
    GradientState._reset_state()
    optimizer = task.sgd()
    seen = Seen(task.net).after(optimizer)
    schedule = LambdaLR(optimizer, lambda _: 1.0)
    arguments = TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        num_train_epochs=1,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=max(task.case.lengths[0]),
        max_grad_norm=0.0,
        average_tokens_across_devices=True,
        accelerator_config={"even_batches": task.case.key != "uneven"},
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    rows = task.loader().dataset
    trainer = WithLoader(model, arguments, train_dataset=rows, optimizers=(optimizer, schedule), **options)
    trainer.remove_callback(PrinterCallback)
    return trainer, seen


@TRANSFORMERS.cell("tail", "short", "tokens", "tokens2", "zero", "uneven", "empty")
def train(task: Task) -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        trainer, seen = trainer_of(task, Model(task), folder, compute_loss_func=loss_func)
        trainer.train()
    return Outcome(seen.weights)


@TRANSFORMERS.cell("aux")
def with_router(task: Task) -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        trainer, seen = trainer_of(task, ModelWithRouter(task), folder)
        trainer.train()
    return Outcome(seen.weights)


TRANSFORMERS.absent |= {"scaler", "ramp", "clip"}
