"""AccumulatingTrainer with families of models: each is exact, or refused with the count that makes it exact."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distaccum import count_samples, count_tokens
from tests.support.ranks import on_ranks
from tests.support.windows import error, flat, refused, warned
from tests.trainers.test_transformers import IGNORED, collate, kinds, trained

EXACT = 2e-6  # of losses that transformers takes in float32
LENGTHS = (9, 2, 4, 3, 7, 5, 2)  # in micro-batches of two rows; the last has one
TEXT = {"vocab_size": 40, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
WITHOUT_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
LLAMA = {**TEXT, **SMALL, "num_key_value_heads": 2}

Rows = list[dict[str, Any]]


@dataclass
class Family:
    """A model with rows for it; `cure`: what it is asked for and makes it exact."""

    model: Callable[[], nn.Module]
    rows: Callable[[], Rows]
    cure: dict[str, Any] | None = None  # None: exact without
    options: dict[str, Any] = field(default_factory=dict)
    big: Callable[[nn.Module, dict[str, Any]], Tensor] = lambda model, batch: model(**batch)["loss"]


def of(name: str, config: str, **options: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import transformers

        return getattr(transformers, name)(getattr(transformers, config)(**options))

    return make


def texts() -> Rows:
    """Of several lengths; a column of texts has a mask and is padded."""
    return [{"input_ids": torch.randint(3, 40, (n,)), "attention_mask": torch.ones(n).long()} for n in LENGTHS]


def causal() -> Rows:
    return [{**row, "labels": row["input_ids"]} for row in texts()]


def masked() -> Rows:
    found = causal()
    for row in found:
        keep = torch.rand(len(row["labels"])) < 0.6
        keep[0] = True
        row["labels"] = row["labels"].where(keep, IGNORED)
    return found


def classes() -> Rows:
    return [{**row, "labels": torch.randint(0, 2, ())} for row in texts()]


BERT = ("BertConfig", {**TEXT, **SMALL, **WITHOUT_DROPOUT, "max_position_embeddings": 32})
llama = of("LlamaForCausalLM", "LlamaConfig", **LLAMA)


def summed(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    logits, labels = outputs["logits"][:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    loss = nn.functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
    return loss / (labels.ne(IGNORED).sum() if num_items_in_batch is None else num_items_in_batch)


def smoothed(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    from transformers.trainer_pt_utils import LabelSmoother

    return LabelSmoother(epsilon=0.1)(model(**batch), batch["labels"], shift_labels=True)


tokens = of("LlamaForTokenClassification", "LlamaConfig", **LLAMA, num_labels=40, classifier_dropout=0.0)
LABELS, SHIFTED = ({"count": count_tokens("labels", shift=shift)} for shift in (False, True))

FAMILIES = {
    "Llama": Family(llama, causal),
    "BERT, masked tokens": Family(of("BertForMaskedLM", BERT[0], **BERT[1]), masked, LABELS),
    "BERT, classes": Family(of("BertForSequenceClassification", BERT[0], **BERT[1]), classes, {"count": count_samples}),
    "Llama, tokens": Family(tokens, masked),
    "Llama, label smoothing": Family(llama, causal, SHIFTED, {"label_smoothing_factor": 0.1}, smoothed),
    "Llama, compute_loss_func": Family(llama, causal, SHIFTED, {"compute_loss_func": summed}),
}


def train(family: Family, model: nn.Module, rows: Rows, **options: Any) -> None:
    batches = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "max_steps": 1}
    rates = {"lr": 1.0, "lr_scheduler_type": "constant", "max_grad_norm": 0.0}
    even = {"count": None, "accelerator_config": {"even_batches": False}}
    options = {**batches, **rates, **even, **family.options, **options}
    with warned():
        trained(kinds()[1], model, rows, weight_decay=0.0, **options)


@contextmanager
def in_double() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("name", FAMILIES)
@on_ranks(2)
@in_double()
def test_family_is_exact_or_asks_for_the_count_that_makes_it_exact(name):
    family = FAMILIES[name]
    torch.manual_seed(0)
    start = family.model().double().train()
    rows, model = family.rows(), copy.deepcopy(start)
    if family.cure is not None:
        said = refused(train, family, model, rows)
        assert "is not the value of a loss function of transformers" in said and "give count=" in said
        assert all(map(torch.equal, start.state_dict().values(), model.state_dict().values()))
    train(family, model, rows, **(family.cure or {}))
    family.big(start, collate(rows)).backward()
    moved = [(p - q, p.grad) for p, q in zip(start.parameters(), model.parameters(), strict=True)]
    exact = [gradient for _, gradient in moved if gradient is not None]
    assert error(flat(step for step, gradient in moved if gradient is not None), flat(exact)) <= EXACT
