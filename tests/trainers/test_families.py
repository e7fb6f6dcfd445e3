"""AccumulatingTrainer with families of models: each is exact, or refused with the count that makes it exact."""

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distaccum import count_samples, count_tokens
from tests.support.ranks import on_ranks
from tests.support.windows import error, flat, refused
from tests.trainers.test_transformers import kinds, trained

IGNORED = -100
EXACT = 2e-6  # of losses that transformers takes in float32
LENGTHS = (9, 2, 4, 3, 7, 5, 2)  # in micro-batches of two rows; the last has one
TEXT = {"vocab_size": 40, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
LLAMA = {**TEXT, **SMALL, "num_key_value_heads": 2}

Rows = list[dict[str, Any]]


@dataclass
class Family:
    """A model with rows for it; `cure`: what it is asked for and makes it exact, `{}` where nothing does."""

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


def images() -> Rows:
    return [{"pixel_values": image} for image in torch.randn(len(LENGTHS), 3, 16, 16)]


def matches() -> Rows:
    return [{**image, **text, "return_loss": True} for image, text in zip(images(), texts(), strict=True)]


def collate(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    batch: dict[str, Any] = {}
    for name, first in rows[0].items():
        column = [row[name] for row in rows]
        if not isinstance(first, Tensor):
            batch[name] = first
        elif first.dim() and name != "pixel_values":
            fill = IGNORED if name == "labels" else 0
            batch[name] = torch.nn.utils.rnn.pad_sequence(column, batch_first=True, padding_value=fill)
        else:
            batch[name] = torch.stack(column)
        if isinstance(batch[name], Tensor) and batch[name].is_floating_point():
            batch[name] = batch[name].double()
    return batch


def without_dropout(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)
    return model


VISION = {**SMALL, "image_size": 16, "patch_size": 8}
BERT = ("BertConfig", {**TEXT, **SMALL, "max_position_embeddings": 32})
llama = of("LlamaForCausalLM", "LlamaConfig", **LLAMA)
text_and_vision = {"text_config": {**TEXT, **SMALL, "max_position_embeddings": 32}, "vision_config": VISION}


def summed(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    logits, labels = outputs["logits"][:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    loss = nn.functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
    return loss / (labels.ne(IGNORED).sum() if num_items_in_batch is None else num_items_in_batch)


def smoothed(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    from transformers.trainer_pt_utils import LabelSmoother

    return LabelSmoother(epsilon=0.1)(model(**batch), batch["labels"], shift_labels=True)


tokens = of("LlamaForTokenClassification", "LlamaConfig", **LLAMA, num_labels=40)
LABELS, SHIFTED = ({"count": count_tokens("labels", shift=shift)} for shift in (False, True))

FAMILIES = {
    "Llama": Family(llama, causal),
    "BERT, masked tokens": Family(of("BertForMaskedLM", BERT[0], **BERT[1]), masked, LABELS),
    "BERT, classes": Family(of("BertForSequenceClassification", BERT[0], **BERT[1]), classes, {"count": count_samples}),
    "Llama, tokens": Family(tokens, masked),
    "CLIP": Family(of("CLIPModel", "CLIPConfig", **text_and_vision, projection_dim=8), matches, {}),
    "Llama, label smoothing": Family(llama, causal, SHIFTED, {"label_smoothing_factor": 0.1}, smoothed),
    "Llama, compute_loss_func": Family(llama, causal, SHIFTED, {"compute_loss_func": summed}),
}


def train(family: Family, model: nn.Module, rows: Rows, **options: Any) -> None:
    batches = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "max_steps": 1}
    rates = {"lr": 1.0, "lr_scheduler_type": "constant", "max_grad_norm": 0.0}
    even = {"count": None, "accelerator_config": {"even_batches": False}}
    options = {**batches, **rates, **even, **family.options, **options}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trained(kinds()[1], model, rows, collator=collate, weight_decay=0.0, **options)


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
    start = without_dropout(family.model()).double().train()
    rows, model = family.rows(), copy.deepcopy(start)
    if family.cure is not None:
        said = refused(train, family, model, rows)
        assert "is not the value of a loss function of transformers" in said and "give count=" in said
        assert all(map(torch.equal, start.state_dict().values(), model.state_dict().values()))
    if family.cure != {}:
        train(family, model, rows, **(family.cure or {}))
        family.big(start, collate(rows)).backward()
        moved = [(p - q, p.grad) for p, q in zip(start.parameters(), model.parameters(), strict=True)]
        exact = [gradient for _, gradient in moved if gradient is not None]
        assert error(flat(step for step, gradient in moved if gradient is not None), flat(exact)) <= EXACT
