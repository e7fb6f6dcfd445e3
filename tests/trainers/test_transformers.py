"""transformers' Trainer with windows: against one big batch in float64, and beside the Trainer where that is exact."""

import itertools
import math
import tempfile
from collections.abc import Sequence
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from distaccum import DistaccumError, count_tokens
from tests.support.counting import Counting
from tests.support.oracle import by_big_batches
from tests.support.problems import Stream, seeded
from tests.support.ranks import on_ranks
from tests.support.windows import error, gradient, refused, says, warned, weights
from tests.wrappers.test_accelerate import accelerators

VOCABULARY, IGNORED = 11, -100
STEPS, MAX_NORM = 3, 0.3  # which clips some


class Net(nn.Module):
    """A causal model in float64, with a loss as those of the library have it."""

    constant: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("constant", torch.ones(1))  # which DDP broadcasts, as positions of rotary embeddings
        self.embedding = nn.Embedding(VOCABULARY, 6)
        self.mix = nn.Linear(6, 6)
        self.head = nn.Linear(6, VOCABULARY)

    def forward(
        self, input_ids: Tensor, labels: Tensor | None = None, num_items_in_batch: Any = None, **_: Any
    ) -> dict[str, Tensor]:
        features = self.embedding(input_ids) * self.constant
        logits = self.head(torch.tanh(self.mix(features.cumsum(1))))
        if labels is None:
            return {"logits": logits}
        how = "mean" if num_items_in_batch is None else "sum"
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction=how)
        return {"loss": loss if num_items_in_batch is None else loss / num_items_in_batch, "logits": logits}


make_net = partial(seeded, Net)


Row = dict[str, Tensor]


def make_rows(lengths: list[int]) -> list[Row]:
    """A length below 0: a row without a label."""
    generator = torch.Generator().manual_seed(5)
    rows = []
    for length in lengths:
        ids = torch.randint(1, VOCABULARY, (abs(length),), generator=generator)
        labels = torch.randint(1, VOCABULARY, (abs(length),), generator=generator)
        rows.append({"input_ids": ids, "labels": labels if length > 0 else torch.full_like(labels, IGNORED)})
    return rows


def collate(rows: Sequence[Row]) -> Row:
    """Pads texts, and stacks numbers."""
    batch = {}
    for name, first in rows[0].items():
        column = [row[name] for row in rows]
        fill = IGNORED if name == "labels" else 0
        pad = partial(torch.nn.utils.rnn.pad_sequence, batch_first=True, padding_value=fill)
        batch[name] = pad(column) if first.dim() else torch.stack(column)
    return batch


def make_trainer(kind: Any, model: nn.Module, rows: Any, folder: str, lr: float = 0.5, **options: Any) -> Any:
    from transformers import PrinterCallback, TrainingArguments
    from transformers.utils import logging

    logging.set_verbosity_error()
    if issubclass(kind, kinds()[1]):
        options.setdefault("count", count_tokens("labels"))
    names = ("callbacks", "count", "reduction", "compute_loss_func", "steps", "max_norm", "data_collator")
    others = {"data_collator": collate} | {name: options.pop(name) for name in names if name in options}
    quiet = {"output_dir": folder, "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "logging_steps": 1}
    loop = {"num_train_epochs": 2, "per_device_train_batch_size": 1, "gradient_accumulation_steps": STEPS}
    rates = {"max_grad_norm": MAX_NORM, "weight_decay": 0.1, "lr_scheduler_type": "linear"}
    rest = {"use_cpu": True, "remove_unused_columns": False}
    arguments = TrainingArguments(**{**quiet, **loop, **rates, **rest, **options})

    class InOrder(kind):  # type: ignore[misc]
        def _get_train_sampler(self, *_: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    optimizers = (torch.optim.SGD(model.parameters(), lr=lr, weight_decay=arguments.weight_decay), None)
    trainer = InOrder(model, arguments, train_dataset=rows, optimizers=optimizers, **others)
    trainer.remove_callback(PrinterCallback)
    return trainer


def windows_of(parts: list[list[Row]], epochs: int = 2) -> list[list[Row]]:
    """The rows of each update, of all ranks; Accelerate deals them out in turn."""
    starts = range(0, max(map(len, parts)), STEPS)
    return [[row for part in parts for row in part[start : start + STEPS]] for start in starts] * epochs


class Expected:
    """The updates by one call of the model on all rows of each; an update without labels is none."""

    def __init__(self, model: Net, windows: list[list[Row]]) -> None:
        sgd = torch.optim.SGD(model.parameters(), lr=0.5, weight_decay=0.1)
        schedule = torch.optim.lr_scheduler.LambdaLR(sgd, lambda update: 1 - update / len(windows))
        loss_of = lambda model, rows: model(**collate(rows))["loss"]  # noqa: E731
        updates = list(by_big_batches(model, windows, loss_of, sgd, schedule, MAX_NORM))
        self.weights = [after for after, *_ in updates]
        self.logged = [logged for _, *logged in updates]  # loss, norm, learning rate


def trained(kind: Any, model: nn.Module, rows: Any, resume: Any = None, **options: Any) -> Any:
    """The trainer, after its training in a folder of its own."""
    with accelerators(), tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(kind, model, rows, options.pop("folder", folder), **options)
        trainer.train(resume_from_checkpoint=resume)
    return trainer


def fit(kind: Any, model: nn.Module, rows: Any, **options: Any) -> Any:
    """The model's weights after each update, and what was logged of each."""
    from transformers import TrainerCallback

    seen: list[Tensor] = []

    class Looks(TrainerCallback):
        def on_step_end(self, *_: Any, model: Any, **__: Any) -> None:
            seen.append(weights(model))

    with warned():  # their own
        trainer = trained(kind, model, rows, callbacks=[Looks()], **options)
    logged = [
        (log["loss"], log["grad_norm"], log["learning_rate"]) for log in trainer.state.log_history if "loss" in log
    ]
    return seen, logged


def kinds() -> tuple[Any, Any]:
    from transformers import Trainer

    from distaccum.transformers import AccumulatingTrainer

    return Trainer, AccumulatingTrainer


def worst(seen: list[Tensor], expected: list[Tensor]) -> float:
    assert len(seen) == len(expected)
    return max(error(one, other) for one, other in zip(seen, expected, strict=True))


EVEN = {"even_batches": False}
LENGTHS = {"short-tail": [3, 5, 2, 7, 1, 4, 6, 2, 9, 3], "window-without-labels": [3, 5, 2, -7, -1, -4, 6, 2]}


@pytest.mark.parametrize(("world", "case"), [(1, "short-tail"), *((2, case) for case in LENGTHS)])
@on_ranks()
def test_updates_are_those_of_the_big_batch(world, case):
    rows = make_rows(LENGTHS[case])
    expected = Expected(make_net(), windows_of([rows[rank::world] for rank in range(world)]))
    seen, logged = fit(kinds()[1], make_net(), rows, accelerator_config=EVEN)
    assert worst(seen, expected.weights) <= 1e-10
    for (loss, norm, rate), (wanted, wanted_norm, wanted_rate) in zip(logged, expected.logged, strict=True):
        assert rate == pytest.approx(wanted_rate)
        assert norm == pytest.approx(wanted_norm, abs=1e-10)
        assert math.isnan(wanted) or loss == pytest.approx(wanted, rel=1e-6)  # the Trainer keeps it in float32


SIZES = [
    *itertools.product(([7, 2], [0, 4]), ("num_train_epochs", "max_steps")),
    *((sizes, "streams") for sizes in ([0, 5], [5, 2], [4, 4])),
]


@pytest.mark.parametrize(("sizes", "ends"), SIZES, ids=str)
@on_ranks(2)
def test_ranks_may_have_loaders_of_any_length(sizes, ends):
    rows, starts = make_rows([3, 5, 2, -7, 1, 4, 6, 2, 3][: sum(sizes)]), [0, sizes[0]]
    parts = [rows[start:][:size] for start, size in zip(starts, sizes, strict=True)]

    class Own(kinds()[1]):  # type: ignore[misc]
        def get_train_dataloader(self) -> Any:
            mine = parts[dist.get_rank()]
            return torch.utils.data.DataLoader(
                Stream(mine) if ends == "streams" else mine, batch_size=1, collate_fn=collate
            )

    windows = windows_of(parts)
    options = {} if ends == "num_train_epochs" else {"max_steps": len(windows)}
    seen, _ = fit(Own, make_net(), rows, **options)
    assert worst(seen, Expected(make_net(), windows).weights) <= 1e-10


def test_dataset_without_a_length_that_ends_in_mid_window_is_exact():
    """The Trainer leaves the gradient of such a window to the first of the next epoch."""
    rows = make_rows([3, 5, 2, 7, 1])
    expected = Expected(make_net(), windows_of([rows], epochs=3)[:5])
    seen, _ = fit(kinds()[1], make_net(), Stream(rows), max_steps=5, num_train_epochs=3)
    assert worst(seen, expected.weights) <= 1e-10


def sparse_labels(batch: Row) -> Row:
    """A new batch without the small labels, so that micro-batches count otherwise than those that were drawn."""
    labels = {"labels": batch["labels"].masked_fill(batch["labels"] < 6, IGNORED)} if "labels" in batch else {}
    return {**batch, **labels}


def overrides(kind: Any) -> dict[str, Any]:
    """Subclasses that change their inputs, each at one place."""

    class Drawn(kind):  # type: ignore[misc]
        def get_batch_samples(self, *args: Any) -> Any:
            batches, _ = super().get_batch_samples(*args)
            return [sparse_labels(batch) for batch in batches], None

    class Step(kind):  # type: ignore[misc]
        def training_step(self, model: Any, inputs: Any, number: Any = None) -> Tensor:
            return super().training_step(model, sparse_labels(inputs), number)

    class Loss(kind):  # type: ignore[misc]
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **named: Any) -> Any:
            return super().compute_loss(model, sparse_labels(inputs), *args, **named)

    class Prepared(kind):  # type: ignore[misc]
        def _prepare_inputs(self, inputs: Any) -> Any:
            return sparse_labels(super()._prepare_inputs(inputs))

    class Whole(kind):  # type: ignore[misc]
        """As transformers had it before 4.46."""

        def training_step(self, model: Any, inputs: Any, number: Any = None) -> Tensor:
            model.train()
            loss = self.compute_loss(model, self._prepare_inputs(sparse_labels(inputs)))
            loss = loss / self.args.gradient_accumulation_steps
            self.accelerator.backward(loss)
            return loss.detach()

    class Divides(kind):  # type: ignore[misc]
        def compute_loss(self, model: Any, inputs: Any, *_: Any, num_items_in_batch: Any = None) -> Any:
            return super().compute_loss(model, sparse_labels(inputs), num_items_in_batch=num_items_in_batch)

    return {made.__name__: made for made in (Drawn, Step, Loss, Prepared, Whole, Divides)}


def test_inputs_that_an_override_changes_are_what_is_trained_and_counted():
    rows = make_rows([13, 15, 12, 17, 11, 14, 16])
    expected = Expected(make_net(), windows_of([[sparse_labels(row) for row in rows]], epochs=1))
    theirs, ours = kinds()
    below = {f"{name} below": type(name, (ours, made), {}) for name, made in overrides(theirs).items()}
    for name, kind in {**overrides(ours), **below}.items():
        assert worst(fit(kind, make_net(), rows, num_train_epochs=1)[0], expected.weights) <= 1e-10, name


def test_patched_instances_are_counted_too_and_draw_as_the_trainer_does():
    rows, drawn = make_rows([3, 5, 2, 7, 1]), []
    expected = Expected(make_net(), windows_of([rows], epochs=1))

    def collate_in_time(batch: list[Row]) -> Row:
        drawn.append(trainer.state.global_step)
        return collate(batch)

    def compute_loss(model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Tensor:
        logits = model(inputs["input_ids"])["logits"].flatten(0, 1)
        labels = inputs.pop("labels").flatten()
        loss = nn.functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
        return loss / num_items_in_batch

    with accelerators(), tempfile.TemporaryDirectory() as folder:
        net = make_net()
        trainer = make_trainer(kinds()[1], net, rows, folder, data_collator=collate_in_time, num_train_epochs=1)
        trainer.compute_loss = compute_loss
        trainer.train()
        assert trainer.compute_loss is compute_loss and "backward" not in vars(trainer.accelerator)
    assert error(weights(net), expected.weights[-1]) <= 1e-10
    assert drawn[:4] == [0, 0, 0, 0]  # a window at once, as the Trainer does, and one ahead, to know the last


def test_count_belongs_to_the_inputs_that_the_loss_was_made_from():
    def mean(model: Any, inputs: Any, items: Any = None) -> Tensor:
        logits = model(inputs["input_ids"])["logits"].flatten(0, 1)
        total = nn.functional.cross_entropy(logits, inputs["labels"].flatten(), ignore_index=IGNORED, reduction="sum")
        return total / ((inputs["labels"] != IGNORED).sum() if items is None else items)

    class Rebinds(kinds()[1]):  # type: ignore[misc]
        def compute_loss(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
            inputs["labels"] = sparse_labels(inputs)["labels"]
            return mean(model, inputs)

    class Probes(kinds()[1]):  # type: ignore[misc]
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **named: Any) -> Any:
            loss = super().compute_loss(model, sparse_labels(inputs), *args, **named)
            with torch.no_grad():
                super().compute_loss(model, collate(rows[:1]))
            super().compute_loss(model, collate(rows[:1]))
            return loss

    class InPlace(kinds()[1]):  # type: ignore[misc]
        """Divides by the count from before: a sum over the window, of all that was counted."""

        def compute_loss(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
            inputs["labels"].copy_(sparse_labels(inputs)["labels"])
            return mean(model, inputs, num_items_in_batch)

    class Adds(kinds()[1]):  # type: ignore[misc]
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **named: Any) -> Any:
            return super().compute_loss(model, inputs) + super().compute_loss(model, sparse_labels(inputs))

    rows = make_rows([13, 15, 12, 17, 11, 14])
    masked = [sparse_labels(row) for row in rows]
    expected = Expected(make_net(), windows_of([masked], epochs=1)).weights
    for kind in (Rebinds, Probes):
        assert worst(fit(kind, make_net(), rows, num_train_epochs=1)[0], expected) <= 1e-10, kind
    options = {"num_train_epochs": 1, "max_grad_norm": 0.0, "weight_decay": 0.0, "max_steps": 1}
    start, net, exact = weights(make_net()), make_net(), make_net()
    fit(InPlace, net, rows[:3], **options)
    (mean(exact, collate(masked[:3]), 13 + 15 + 12)).backward()
    assert error(start - weights(net), 0.5 * gradient(exact)) <= 1e-10
    with pytest.raises(DistaccumError, match=r"losses with counts of .* and .*, expected one count"):
        fit(Adds, make_net(), rows, **options)


def test_logged_loss_is_the_mean_over_updates_that_count():
    rows = make_rows([3, 5, 2, -7, -1, -4, 6, 2, 9])
    for order in (rows, rows[3:6] + rows[:3] + rows[6:]):
        losses = [log["loss"] for log in _logs(order, logging_steps=3) if "loss" in log]
        single = [log["loss"] for log in _logs([*rows[:3], *rows[6:]], logging_steps=2, lr=0.0) if "loss" in log]
        assert losses == pytest.approx(single, rel=1e-5)


def _logs(rows: list[Row], **options: Any) -> list[dict[str, float]]:
    trainer = trained(kinds()[1], make_net(), rows, num_train_epochs=1, **{"lr": 0.0, **options})
    return trainer.state.log_history


def test_step_keeps_the_number_of_micro_batches_and_divides_no_loss_by_it():
    numbers: list[Any] = []

    class Looks(kinds()[1]):  # type: ignore[misc]
        def training_step(self, *args: Any) -> Tensor:
            numbers.append((self.args.gradient_accumulation_steps, 4 % self.current_gradient_accumulation_steps))
            return super().training_step(*args)

        def compute_loss(self, model: Any, inputs: Any, *args: Any, **named: Any) -> Any:
            loss = super().compute_loss(model, inputs, *args, **named)
            return loss / self.current_gradient_accumulation_steps * (1 / self.args.gradient_accumulation_steps)

    rows = make_rows([3, 5, 2, 7])
    expected = Expected(make_net(), windows_of([rows], epochs=1))
    assert worst(fit(Looks, make_net(), rows, num_train_epochs=1)[0], expected.weights) <= 1e-10
    assert numbers == [(3, 1)] * 3 + [(3, 0)]


def test_two_backwards_of_a_micro_batch_add_up_as_in_the_trainer():
    class Adversarial(kinds()[1]):  # type: ignore[misc]
        def training_step(self, *args: Any) -> Tensor:
            super().training_step(*args)
            return super().training_step(*args)

    class Halves(kinds()[1]):  # type: ignore[misc]
        def training_step(self, model: Any, inputs: Any, number: Any = None) -> Tensor:
            super().training_step(model, {name: column[:, :1] for name, column in inputs.items()})
            return super().training_step(model, {name: column[:, 1:] for name, column in inputs.items()})

    rows, options = make_rows([3, 5, 4]), {"max_grad_norm": 0.0, "max_steps": 1, "weight_decay": 0.0}
    start, nets = weights(make_net()), [make_net(), make_net()]
    for kind, net in zip((Adversarial, kinds()[1]), nets, strict=True):
        fit(kind, net, rows, **options)
    assert error(weights(nets[0]) - start, 2 * (weights(nets[1]) - start)) <= 1e-10
    with pytest.raises(DistaccumError, match="losses with counts of 1 and 2, expected one count"):
        fit(Halves, make_net(), rows, **options)


def test_loss_without_a_count_is_asked_for_one_before_a_weight_changes():
    class Bare(kinds()[1]):  # type: ignore[misc]
        def training_step(self, model: Any, inputs: Any, number: Any = None) -> Tensor:
            loss = model(**inputs)["loss"]
            loss.backward()
            return loss.detach()

    class Own(kinds()[1]):  # type: ignore[misc]
        def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Tensor:
            return model(**inputs)["loss"]

    rows, ours, net = make_rows([3, 5, 2, 7]), kinds()[1], make_net()
    for kind, words in {ours: "the loss of Net is not", Own: "the loss of compute_loss is not"}.items():
        with pytest.raises(ValueError, match=f"{words}.*give count="):
            fit(kind, net, rows, count=None)
    with pytest.raises(ValueError, match="the loss of compute_loss_func is not"):
        fit(ours, net, rows, count=None, compute_loss_func=lambda outputs, labels, **_: outputs["logits"].sum())
    with pytest.raises(ValueError, match="reduction='sum' without count="):
        fit(ours, net, rows, count=None, reduction="sum")
    with pytest.raises(DistaccumError, match=r"training_step ran no self.accelerator.backward\(loss\)"):
        fit(Bare, net, rows)
    assert torch.equal(weights(net), weights(make_net()))


def test_window_that_the_trainer_leaves_in_its_middle_leaves_nothing_to_the_next_run():
    from transformers import TrainerCallback

    class Stops(TrainerCallback):
        def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = state.global_step == 1

    rows = make_rows([3, 5, 2, 7, 1, 4])
    with accelerators(), tempfile.TemporaryDirectory() as folder:
        net, stops = make_net(), Stops()
        trainer = make_trainer(kinds()[1], net, rows, folder, callbacks=[stops], num_train_epochs=1)
        trainer.train()
        trainer.remove_callback(stops)
        net.load_state_dict(make_net().state_dict())
        trainer.train()
    expected = Expected(make_net(), windows_of([rows], epochs=1))
    assert error(weights(net), expected.weights[-1]) <= 1e-10 and trainer.update.index == 1


@pytest.mark.parametrize("lengths", [[3, -5, 2, 7, 1, -4, 6, -2], [3, 5, 2, 7, 1, 4, 6]], ids=["left-out", "empty"])
@on_ranks(2)
def test_loss_that_gathers_meets_all_ranks_in_each_turn(lengths):
    """As TRL's SFTTrainer: metrics are gathered over ranks in each `compute_loss`."""
    gathered: list[int] = []
    counted: list[int] = []

    class Gathers(kinds()[1]):  # type: ignore[misc]
        def compute_loss(self, model: Any, inputs: Any, *_: Any, num_items_in_batch: Any = None) -> Any:
            loss = model(**inputs, num_items_in_batch=num_items_in_batch)["loss"]
            tokens = inputs["labels"].ne(IGNORED).sum()
            gathered.append(len(self.accelerator.gather(tokens.reshape(1))))
            counted.append(int(self.accelerator.gather_for_metrics(tokens).sum()))
            return loss

    rows = make_rows(lengths)
    expected = Expected(make_net(), windows_of([rows[::2], rows[1::2]], epochs=1))
    seen, _ = fit(Gathers, make_net(), rows, num_train_epochs=1, accelerator_config=EVEN)
    assert worst(seen, expected.weights) <= 1e-10
    assert gathered == [2] * (len(rows) + 1 >> 1)
    # In the other turns Accelerate itself leaves rows out, on the rank whose loader has ended.
    assert counted[-1] == 6


@pytest.mark.parametrize("world", [1, 2])
@on_ranks()
def test_resumed_run_has_the_bits_of_the_uninterrupted_one(world, tmp_path):
    rows = make_rows([3, 5, 2, -7, 1, 4, 6, 2, 9, 3, 4][: 8 if world == 1 else 13])
    expected = Expected(make_net(), windows_of([rows[rank::world] for rank in range(world)]))
    folder = str(tmp_path)
    options = {"accelerator_config": EVEN, "save_strategy": "steps", "save_steps": 1, "folder": folder}
    whole, _ = fit(kinds()[1], make_net(), rows, **options)
    assert worst(whole, expected.weights) <= 1e-10
    resumed, _ = fit(kinds()[1], make_net(), rows, resume=f"{folder}/checkpoint-2", **options)
    assert all(map(torch.equal, whole[2:], resumed)) and len(resumed) == len(whole) - 2


def test_callbacks_see_the_gradient_before_and_the_record_after_the_step():
    from transformers import TrainerCallback

    heard: list[Any] = []
    gradients: list[Tensor] = []

    class Listens(TrainerCallback):
        def on_pre_optimizer_step(self, *_: Any, model: Any, **__: Any) -> None:
            gradients.append(gradient(model).clone())

        def on_substep_end(self, *_: Any, **__: Any) -> None:
            heard.append("sub")

        def on_optimizer_step(self, *_: Any, **__: Any) -> None:
            heard.append(f"step after {len(gradients)}")

        def on_step_end(self, *_: Any, **__: Any) -> None:
            heard.append(trainer.update.index)

    rows = make_rows([3, 5, 2, 7])
    with accelerators(), tempfile.TemporaryDirectory() as folder:
        options = {"num_train_epochs": 1, "max_grad_norm": 0.0, "callbacks": [Listens()]}
        trainer = make_trainer(kinds()[1], make_net(), rows, folder, **options)
        trainer.train()
    assert heard == ["sub", "sub", "step after 1", 0, "step after 2", 1]
    net = make_net()
    net(**collate(rows[:3]))["loss"].backward()
    assert error(gradients[0], gradient(net)) <= 1e-12
    assert (trainer.update.counts, trainer.update.index) == ({"tokens": 7}, 1)


@on_ranks(2)
def test_gradient_is_reduced_once_per_update():
    rows = make_rows([3, 5, 2, 7, 1, 4, 6, 2, 4, 3, 2, 1])
    with Counting() as counting:
        fit(kinds()[1], make_net(), rows, num_train_epochs=1, logging_steps=100)
    size = sum(parameter.numel() for parameter in make_net().parameters())
    seen = counting.take()
    assert sum(elements for name, elements in seen if "allreduce" in name and elements >= 66) == 2 * size


REFUSED = {
    "steps": ({"steps": 8}, "TypeError: ...got steps=8, expected TrainingArguments(gradient_accumulation_steps=8)"),
    "max_norm": ({"max_norm": 1.0}, "TypeError: ...got max_norm=1.0, expected TrainingArguments(max_grad_norm=1.0)"),
    "count": ({"count": "tokens"}, "TypeError: count='tokens'..., expected a callable: batch -> number..."),
    "lomo": ({"optim": "adalomo"}, "ValueError: ...optim=...steps in backward..."),
    "DataParallel": ({}, "ValueError: ...DataParallel..."),
}


@pytest.mark.parametrize("what", REFUSED)
def test_options_that_are_elsewhere_or_cannot_be_exact_are_refused_before_training(what):
    from transformers import TrainingArguments

    options, sentence = REFUSED[what]
    with patch.object(TrainingArguments, "n_gpu", 1 + (what == "DataParallel")):
        assert says(sentence, said := refused(trained, kinds()[1], make_net(), make_rows([3, 4]), **options)), said
