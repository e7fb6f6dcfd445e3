"""Two typical scripts, ported to this library: new code in the form of DeepSpeed's and Accelerate's examples."""

from __future__ import annotations

import copy
import math
import warnings
from functools import partialmethod
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from engines import import_deepspeed, zero_weights
from problems import error, gradient
from test_accelerate import accelerators
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, max_pool2d, relu
from torch.utils.data import DataLoader, Dataset

from distaccum import Accumulator


def of_all_ranks(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


# Images, with an engine that makes the loader


class Pictures(Dataset):
    """Of CIFAR-10's size; each class has its own colour. A sample includes its index."""

    def __init__(self, number: int) -> None:
        generator = torch.Generator().manual_seed(3)
        self.labels = torch.arange(number) % 10
        colours = torch.rand(10, 3, 1, 1, generator=generator)
        self.images = colours[self.labels] + 0.1 * torch.randn(number, 3, 32, 32, generator=generator)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        return self.images[index], self.labels[index], index


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 5), nn.Conv2d(4, 8, 5)
        self.hidden, self.last = nn.Linear(8 * 5 * 5, 16), nn.Linear(16, 10)

    def forward(self, images: Tensor) -> Tensor:
        features = max_pool2d(relu(self.first(images)), 2)
        features = max_pool2d(relu(self.second(features)), 2)
        return self.last(relu(self.hidden(features.flatten(1))))


def train_pictures(stage: int, epochs: int, steps: int) -> dict[str, Any]:
    torch.manual_seed(0)
    pictures, net = Pictures(38), ConvNet()
    reference = copy.deepcopy(net).double()
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.2, "momentum": 0.5}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0.2, "warmup_max_lr": 0.2}},
        "zero_optimization": {"stage": stage, "overlap_comm": False, "reduce_bucket_size": 10**5},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }
    deepspeed = import_deepspeed()
    warnings.filterwarnings("ignore", message="'pin_memory' argument")  # DeepSpeed's loader always sets it
    # Ranks of tests are daemons, and daemons may have no loader workers.
    alone = partialmethod(deepspeed.DeepSpeedEngine.deepspeed_io, num_local_io_workers=0)
    with patch.object(deepspeed.DeepSpeedEngine, "deepspeed_io", alone):
        engine, _, loader, _ = deepspeed.initialize(
            model=net, model_parameters=list(net.parameters()), training_data=pictures, config=config
        )
    accumulator = Accumulator(engine, steps=steps)
    losses, counts, seen, wrong = [], [], [], 0.0
    for epoch in range(epochs):
        drawn: list[int] = []
        for i, window in enumerate(accumulator.windows(loader)):
            assert i < 2 * math.ceil(len(loader) / steps), "the loader has no end"
            before, rate, first = zero_weights(engine), engine.get_lr()[0], len(drawn)
            for images, labels, indices in window:
                window.backward(cross_entropy(engine(images), labels))
                drawn += indices.tolist()
            update = window.step()
            losses.append(update.loss)
            counts.append(update.counts["samples"])
            if epoch == i == 0:
                together = [index for of_rank in of_all_ranks(drawn[first:]) for index in of_rank]
                cross_entropy(reference(pictures.images[together].double()), pictures.labels[together]).backward()
                wrong = error((before.double() - zero_weights(engine).double()) / rate, gradient(reference))
        seen.append(sorted(index for of_rank in of_all_ranks(drawn) for index in of_rank))
    engine.eval()
    right = 0
    with torch.no_grad():
        for images, labels, _ in DataLoader(pictures, batch_size=8):
            right += int((engine(images).argmax(1) == labels).sum())
    return {"losses": losses, "counts": counts, "seen": seen, "wrong": wrong, "steps": engine.global_steps, "n": right}


@pytest.mark.parametrize("stage", [0, 2])
def test_script_on_deepspeeds_own_loader_runs_to_its_end(ranks, stage):
    one, two = ranks(2).run(train_pictures, stage, 2, 2)
    assert one == two
    # 38 images: 19 per rank, in micro-batches of 4, 4, 4, 4 and 3.
    assert one["counts"] == [16, 16, 6] * 2
    assert one["steps"] == len(one["losses"]) == 6
    assert one["seen"] == [list(range(38))] * 2, "each image once per epoch"
    assert all(map(math.isfinite, one["losses"]))
    assert one["wrong"] <= 1e-5


# Pairs of sentences, with all objects prepared by Accelerate


class Pairs(Dataset):
    """Two sentences of a few words; the label says whether they begin with the same word."""

    def __init__(self, number: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.items = []
        for i in range(number):
            first, second = (
                torch.randint(3, 30, (int(torch.randint(2, 6, (1,), generator=generator)),), generator=generator)
                for _ in range(2)
            )
            second[0] = first[0] if i % 2 else (first[0] - 2) % 27 + 3
            words = torch.cat([torch.tensor([1]), first, torch.tensor([2]), second, torch.tensor([2])])
            kinds = torch.tensor([0] * (len(first) + 2) + [1] * (len(second) + 1))
            self.items.append({"input_ids": words, "token_type_ids": kinds, "labels": torch.tensor(i % 2)})

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.items[index]


def padded(items: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    pad = nn.utils.rnn.pad_sequence
    batch = {key: pad([one[key] for one in items], batch_first=True) for key in ("input_ids", "token_type_ids")}
    mask = pad([torch.ones_like(one["input_ids"]) for one in items], batch_first=True)
    return {**batch, "attention_mask": mask, "labels": torch.stack([one["labels"] for one in items])}


def train_pairs(epochs: int, steps: int) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup

    with accelerators() as make:
        accelerator = make(step_scheduler_with_optimizer=False)  # the schedule's lengths count updates
        torch.manual_seed(1)
        net = BertForSequenceClassification(
            BertConfig(
                vocab_size=30, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16,
                max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
            )
        ).double()  # fmt: skip
        reference = copy.deepcopy(net).train()
        train = DataLoader(Pairs(22, seed=1), batch_size=4, shuffle=True, collate_fn=padded)
        held_out = DataLoader(Pairs(10, seed=2), batch_size=4, collate_fn=padded)
        optimizer = torch.optim.AdamW(net.parameters(), lr=5e-3)
        net, optimizer, train, held_out = accelerator.prepare(net, optimizer, train, held_out)
        updates = epochs * math.ceil(len(train) / steps)
        schedule = get_linear_schedule_with_warmup(optimizer, num_warmup_steps=2, num_training_steps=updates)
        schedule = accelerator.prepare(schedule)
        accumulator = Accumulator(net, optimizer, scheduler=schedule, steps=steps, accelerator=accelerator)
        losses, counts, judged, wrong = [], [], [], 0.0
        for epoch in range(epochs):
            net.train()
            for i, window in enumerate(accumulator.windows(train)):
                assert i < 2 * math.ceil(len(train) / steps), "the loader has no end"
                mine = []
                for batch in window:
                    window.backward(net(**batch).loss)
                    mine += rows_of(batch)
                if epoch == i == 0:
                    everything = [row for of_rank in of_all_ranks(mine) for row in of_rank]
                    reference(**padded(everything)).loss.backward()
                    wrong = error(gradient(accelerator.unwrap_model(net)), gradient(reference))
                update = window.step()
                losses.append(update.loss)
                counts.append(update.counts["samples"])
            net.eval()
            found, labels = [], []
            for batch in held_out:
                with torch.no_grad():
                    predicted = net(**batch).logits.argmax(-1)
                predicted, right = accelerator.gather_for_metrics((predicted, batch["labels"]))
                found.append(predicted)
                labels.append(right)
            judged.append((len(torch.cat(found)), torch.cat(labels).tolist()))
        rate = schedule.get_last_lr()[0]
    return {"losses": losses, "counts": counts, "judged": judged, "wrong": wrong, "rate": rate, "updates": updates}


def rows_of(batch: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """The samples without padding."""
    lengths = batch["attention_mask"].sum(1).tolist()
    return [
        {key: value[i, :length] if value.ndim > 1 else value[i] for key, value in batch.items()}
        for i, length in enumerate(lengths)
    ]


def test_script_of_accelerate_with_schedule_and_metrics_runs_to_its_end(ranks):
    one, two = ranks(2).run(train_pairs, 3, 2)
    assert one == two
    # 22 pairs: 6 batches, 3 per rank; Accelerate fills up the last one.
    assert one["counts"] == [16, 8] * 3
    assert one["updates"] == len(one["losses"]) == 6
    assert one["judged"] == [(10, [0, 1] * 5)] * 3, "each held-out pair once"
    assert one["rate"] == 0.0, "one step of the schedule per update"
    assert all(map(math.isfinite, one["losses"]))
    assert one["wrong"] <= 1e-10
