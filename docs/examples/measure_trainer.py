"""Measures how far transformers' Trainer and AccumulatingTrainer are from one big batch, by the form of the loss.

    python docs/examples/measure_trainer.py

One update of four micro-batches with 20, 3, 7 and 18 labels, in float64 on a CPU. The optimizer is SGD with a learning
rate of 1, so the change of the weights is the gradient. Needs distaccum[accelerate,transformers].
"""

from __future__ import annotations

import copy
import tempfile
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, PrinterCallback, Trainer, TrainingArguments
from transformers.utils import logging

from distaccum import count_tokens
from distaccum.transformers import AccumulatingTrainer

LABELS = (20, 3, 7, 18)


class WithoutKeywords(nn.Module):
    """A model whose forward takes no other keywords, so the Trainer cannot pass it the number of labels."""

    def __init__(self, gpt: GPT2LMHeadModel) -> None:
        super().__init__()
        self.gpt = gpt

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        return self.gpt(input_ids=input_ids, labels=labels)


class OwnLoss(Trainer):
    """A Trainer whose `compute_loss` ignores `num_items_in_batch`."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(**inputs)
        return (outputs.loss, outputs) if return_outputs else outputs.loss


def made(is_first_ignored: bool) -> tuple[GPT2LMHeadModel, list[dict[str, Tensor]]]:
    """Makes the model and rows. A row's first label is no target, since the model's loss shifts labels by one."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=50, n_positions=24, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    rows = []
    for kept in LABELS:
        ids = torch.randint(1, 50, (21,))
        labels = ids.clone()
        labels[kept + 1 :] = -100
        if is_first_ignored:
            labels[0] = -100
        rows.append({"input_ids": ids, "labels": labels})
    return GPT2LMHeadModel(config).double(), rows


def gradient(before: nn.Module, after: nn.Module) -> Tensor:
    both = zip(before.parameters(), after.parameters(), strict=True)
    return torch.cat([(old - new).detach().flatten() for old, new in both])


def train(kind: type[Trainer], model: nn.Module, rows: list[dict[str, Tensor]], **options: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            max_steps=1,
            per_device_train_batch_size=1,
            gradient_accumulation_steps=len(rows),
            max_grad_norm=0.0,
            lr_scheduler_type="constant",
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        sgd = torch.optim.SGD(model.parameters(), lr=1.0)
        trainer = kind(model, arguments, train_dataset=rows, optimizers=(sgd, None), **options)
        trainer.remove_callback(PrinterCallback)
        trainer.train()


class OwnLossAccumulating(AccumulatingTrainer, OwnLoss):
    """AccumulatingTrainer comes first among the bases."""


def main() -> None:
    logging.set_verbosity_error()
    count = {"count": count_tokens("labels", shift=True)}
    ways: dict[str, tuple[type[Trainer], Any, dict[str, Any]]] = {
        "Trainer": (Trainer, None, {}),
        "Trainer, forward without **kwargs": (Trainer, WithoutKeywords, {}),
        "Trainer, compute_loss without the count": (OwnLoss, None, {}),
        "AccumulatingTrainer": (AccumulatingTrainer, None, {}),
        "AccumulatingTrainer, forward without **kwargs": (AccumulatingTrainer, WithoutKeywords, count),
        "AccumulatingTrainer, compute_loss without the count": (OwnLossAccumulating, None, {}),
    }
    for is_first_ignored in (True, False):
        print(f"the first label of each row is {'-100' if is_first_ignored else 'a token'}:")
        start, rows = made(is_first_ignored)
        whole = copy.deepcopy(start)
        whole(**{key: torch.stack([row[key] for row in rows]) for key in rows[0]}).loss.backward()
        exact = torch.cat([parameter.grad.flatten() for parameter in whole.parameters()])
        for name, (kind, wrapper, options) in ways.items():
            model = copy.deepcopy(start)
            train(kind, model if wrapper is None else wrapper(model), rows, **options)
            error = (gradient(start, model) - exact).norm() / exact.norm()
            print(f"  {name:52} relative error of the gradient {error:.1e}")


if __name__ == "__main__":
    main()
