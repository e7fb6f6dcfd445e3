"""transformers' Trainer with windows: against one big batch in float64, and beside the Trainer where that is exact."""

import math
import re
import tempfile
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from distaccum import count_samples, count_tokens
from tests.support.counting import Counting
from tests.support.oracle import by_big_batches
from tests.support.ranks import on_ranks
from tests.support.windows import error, gradient, weights
from tests.wrappers.test_accelerate import accelerators

VOCABULARY, PAD, IGNORED = 11, 0, -100
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


class WithoutKeywords(Net):
    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        return super().forward(input_ids, labels)


def make_net(kind: type[Net] = Net) -> Net:
    torch.manual_seed(3)
    return kind().double()


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


def collate(rows: list[Row]) -> Row:
    pad = torch.nn.utils.rnn.pad_sequence
    fills = {"input_ids": PAD, "labels": IGNORED, "attention_mask": 0}
    return {name: pad([row[name] for row in rows], batch_first=True, padding_value=fills[name]) for name in rows[0]}


def make_trainer(
    kind: Any,
    model: nn.Module,
    rows: Any,
    folder: str,
    collator: Any = collate,
    lr: float = 0.5,
    weight_decay: float = 0.1,
    **options: Any,
) -> Any:
    from transformers import PrinterCallback, TrainingArguments
    from transformers.utils import logging

    logging.set_verbosity_error()
    names = ("callbacks", "count", "reduction", "compute_loss_func")
    others = {name: options.pop(name) for name in names if name in options}
    quiet = {"output_dir": folder, "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "logging_steps": 1}
    loop = {"num_train_epochs": 2, "per_device_train_batch_size": 1, "gradient_accumulation_steps": STEPS}
    rest = {"use_cpu": True, "max_grad_norm": MAX_NORM, "lr_scheduler_type": "linear", "remove_unused_columns": False}
    arguments = TrainingArguments(**{**quiet, **loop, **rest, **options})

    class InOrder(kind):  # type: ignore[misc]
        def _get_train_sampler(self, *_: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    optimizers = (torch.optim.SGD(model.parameters(), lr=lr, weight_decay=weight_decay), None)
    trainer = InOrder(model, arguments, train_dataset=rows, data_collator=collator, optimizers=optimizers, **others)
    trainer.remove_callback(PrinterCallback)
    return trainer


def windows_of(parts: list[list[Row]], epochs: int = 2) -> list[list[Row]]:
    """The rows of each update, of all ranks; Accelerate deals them out in turn."""
    found = []
    for _ in range(epochs):
        for start in range(0, max(map(len, parts)), STEPS):
            found.append([row for part in parts for row in part[start : start + STEPS]])
    return found


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

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # their own
        trainer = trained(kind, model, rows, callbacks=[Looks()], **options)
    logged = [
        (log["loss"], log["grad_norm"], log["learning_rate"]) for log in trainer.state.log_history if "loss" in log
    ]
    return seen, logged


def kinds() -> tuple[Any, Any]:
    from transformers import Trainer

    from distaccum.transformers import AccumulatingTrainer

    return Trainer, AccumulatingTrainer


def with_loss(compute: Callable[[Any, Any], Tensor], kind: Any = None) -> Any:
    """A trainer with a loss of its own, of the model and the inputs."""

    class Own(kind or kinds()[1]):  # type: ignore[misc]
        def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
            return compute(model, inputs)

    return Own


def worst(seen: list[Tensor], expected: list[Tensor]) -> float:
    assert len(seen) == len(expected)
    return max(error(one, other) for one, other in zip(seen, expected, strict=True))


EVEN = {"even_batches": False}
LENGTHS = {
    "short-tail": [3, 5, 2, 7, 1, 4, 6, 2, 9, 3],
    "window-without-labels": [3, 5, 2, -7, -1, -4, 6, 2],
    "micro-batch-without-labels": [3, -5, 2, 7, 1, -4, 6, -2],
    "empty-rank": [3, 5, 2, 7, 1, 4, 6],
}


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


@pytest.mark.parametrize("ends", ["num_train_epochs", "max_steps"])
@pytest.mark.parametrize("sizes", [[7, 2], [0, 4]], ids=str)
@on_ranks(2)
def test_ranks_may_have_loaders_of_any_length(sizes, ends):
    rows, starts = make_rows([3, 5, 2, -7, 1, 4, 6, 2, 3][: sum(sizes)]), [0, sizes[0]]
    parts = [rows[start:][:size] for start, size in zip(starts, sizes, strict=True)]

    class Own(kinds()[1]):  # type: ignore[misc]
        def get_train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(parts[dist.get_rank()], batch_size=1, collate_fn=collate)

    windows = windows_of(parts)
    seen, _ = fit(Own, make_net(), rows, **{"num_train_epochs": 2, ends: {"max_steps": len(windows)}.get(ends, 2)})
    assert worst(seen, Expected(make_net(), windows).weights) <= 1e-10


class Stream(IterableDataset):  # type: ignore[type-arg]
    def __init__(self, rows: list[Row]) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)


def test_dataset_without_a_length_that_ends_in_mid_window_is_exact():
    """The Trainer leaves the gradient of such a window to the first of the next epoch."""
    rows = make_rows([3, 5, 2, 7, 1])
    expected = Expected(make_net(), windows_of([rows], epochs=3)[:5])
    seen, _ = fit(kinds()[1], make_net(), Stream(rows), max_steps=5, num_train_epochs=3)
    assert worst(seen, expected.weights) <= 1e-10


def test_micro_batches_of_one_row_cannot_be_asked_about_a_mean_of_ones_own():
    # Texts of several lengths without a mask, which padding would change.
    with pytest.raises(ValueError, match="micro-batches of one row cannot be put together; give count="):
        fit(with_loss(lambda model, inputs: model(**inputs)["loss"]), make_net(), make_rows([3, 5, 2]))


def test_mean_of_ones_own_is_exact_where_the_trainer_adds_means_up():
    # The mask lets micro-batches of one row be put together, as the loss is asked what it is a mean over.
    rows = [{**row, "attention_mask": torch.ones_like(row["labels"])} for row in make_rows(LENGTHS["short-tail"])]
    expected = Expected(make_net(), windows_of([rows]))
    own = [with_loss(lambda model, inputs: model(**inputs)["loss"], kind) for kind in kinds()]
    theirs, ours = (worst(fit(kind, make_net(), rows)[0], expected.weights) for kind in own)
    assert ours <= 1e-10
    assert theirs > 1e-2


@pytest.mark.parametrize("lengths", [[3, -5, 2, 7, 1, -4, 6, -2], [3, 5, 2, 7, 1, 4, 6]], ids=["left-out", "empty"])
@on_ranks(2)
def test_loss_that_gathers_meets_all_ranks_in_each_turn(lengths):
    """As TRL's SFTTrainer: metrics are gathered over ranks in each `compute_loss`."""
    gathered: list[float] = []

    class Gathers(kinds()[1]):  # type: ignore[misc]
        def compute_loss(self, model: Any, inputs: Any, *_: Any, num_items_in_batch: Any = None) -> Any:
            loss = model(**inputs, num_items_in_batch=num_items_in_batch)["loss"]
            everywhere = self.accelerator.gather(inputs["labels"].ne(IGNORED).sum()).sum().item()
            if model.training:  # not where the loss is asked over what it is a mean
                gathered.append(everywhere)
            return loss

    rows = make_rows(lengths)
    expected = Expected(make_net(), windows_of([rows[::2], rows[1::2]], epochs=1))
    seen, _ = fit(Gathers, make_net(), rows, num_train_epochs=1, accelerator_config=EVEN)
    assert worst(seen, expected.weights) <= 1e-10
    assert sum(gathered) == sum(length for length in lengths if length > 0)


@pytest.mark.parametrize("world", [1, 2])
@on_ranks()
def test_resumed_run_equals_the_uninterrupted_one(world, tmp_path):
    rows = make_rows([3, 5, 2, -7, 1, 4, 6, 2, 9, 3, 4][: 8 if world == 1 else 13])
    expected = Expected(make_net(), windows_of([rows[rank::world] for rank in range(world)]))
    folder = str(tmp_path)
    options = {"accelerator_config": EVEN, "save_strategy": "steps", "save_steps": 1, "folder": folder}
    fit(kinds()[1], make_net(), rows, **options)
    seen, _ = fit(kinds()[1], make_net(), rows, resume=f"{folder}/checkpoint-2", **options)
    assert worst(seen, expected.weights[2:]) <= 1e-10


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
    assert (trainer.update.counts, trainer.update.index) == ({"count": 7}, 1)


@on_ranks(2)
def test_gradient_is_reduced_once_per_update():
    rows = make_rows([3, 5, 2, 7, 1, 4, 6, 2, 4, 3, 2, 1])
    with Counting() as counting:
        fit(kinds()[1], make_net(), rows, num_train_epochs=1, logging_steps=100)
    size = sum(parameter.numel() for parameter in make_net().parameters())
    seen = counting.take()
    assert sum(elements for name, elements in seen if "allreduce" in name and elements >= 66) == 2 * size


def test_loss_of_ones_own_without_labels_is_weighed_by_samples_with_a_warning():
    own = with_loss(lambda model, inputs: model(inputs["input_ids"], inputs["targets"])["loss"])
    renamed = lambda rows: {{"labels": "targets"}.get(name, name): one for name, one in collate(rows).items()}  # noqa: E731
    with pytest.warns(UserWarning, match="compute_loss is weighed by samples.*several loss types"):
        trainer = trained(own, make_net(WithoutKeywords), make_rows([3, 3, 3]), collator=renamed, max_steps=1)
    assert trainer.update.counts == {"count": 3}


def test_loss_of_ones_own_with_labels_that_is_no_mean_over_them_is_refused():
    def mean_of_rows(model: Any, inputs: Any) -> Tensor:
        rows = zip(inputs["input_ids"].split(1), inputs["labels"].split(1), strict=True)
        return torch.stack([model(*row)["loss"] for row in rows]).mean()

    with pytest.raises(ValueError, match=r"compute_loss is not a mean.*count=count_samples fits here"):
        fit(with_loss(mean_of_rows), make_net(), make_rows([3, 5, 2, 7]), per_device_train_batch_size=2)


def test_sum_of_ones_own_is_refused_with_the_reduction_that_makes_it_exact():
    # Its parts fit any count, so the refusal names none.
    own = with_loss(lambda model, inputs: model(**inputs, num_items_in_batch=1)["loss"])
    rows = [{**row, "attention_mask": torch.ones_like(row["labels"])} for row in make_rows(LENGTHS["short-tail"])]
    with pytest.raises(ValueError, match=r": reduction='sum_to_mean' fits here, and makes it a mean over the labels"):
        fit(own, make_net(), rows)
    seen, _ = fit(own, make_net(), rows, reduction="sum_to_mean")
    assert worst(seen, Expected(make_net(), windows_of([rows])).weights) <= 1e-10
    with pytest.raises(ValueError, match="the loss of compute_loss_func is not a mean"):
        fit(kinds()[1], make_net(), rows, compute_loss_func=lambda outputs, labels, **_: outputs["logits"].sum())


def heard(own: Any, collator: Any = collate, **options: Any) -> str:
    """The warnings of this library in one update of two micro-batches of two rows, of 10 and 6 labels."""
    rows = [{**row, "attention_mask": torch.ones_like(row["labels"])} for row in make_rows([7, 3, 5, 1])]
    sizes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 1}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trained(own, make_net(), rows, collator=collator, **{**sizes, **options})
    return " ".join(str(one.message) for one in caught if "the loss of" in str(one.message))


@pytest.mark.parametrize("size", [1, 2])
def test_wrong_count_for_the_models_loss_is_warned_of(size):
    said = heard(kinds()[1], count=count_samples, per_device_train_batch_size=size)
    assert re.search(r"loss of Net is not a mean over what count= counts.*tokens\('labels'\) fits", said)


def test_wrong_count_for_a_compute_loss_is_warned_of():
    class Divides(kinds()[1]):  # type: ignore[misc]  # as TRL's SFTTrainer
        def compute_loss(self, model: Any, inputs: Any, *_: Any, num_items_in_batch: Any = None) -> Any:
            return model(**inputs, num_items_in_batch=num_items_in_batch)["loss"]

    averages = with_loss(lambda model, inputs: model(**inputs)["loss"])
    adds = with_loss(lambda model, inputs: model(**inputs, num_items_in_batch=1)["loss"])
    right = count_tokens("labels")
    divides = "compute_loss is not a mean over what count= counts.*10 and 6 in micro-batches where count= gives 2 and 2"
    assert re.search(f"{divides}.*: count=None fits here", heard(Divides, count=count_samples))
    assert "count=count_tokens('labels') fits here" in heard(averages, count=count_samples)
    assert "reduction='sum_to_mean' fits here, and makes it a mean over what count= counts" in heard(adds, count=right)
    assert heard(Divides, count=right) == heard(averages, count=right) == ""
    assert heard(adds, count=count_samples, reduction="sum_to_mean") == ""


def test_count_that_parts_of_a_micro_batch_cannot_tell_is_believed():
    def with_total(rows: list[Row]) -> Row:
        batch = collate(rows)
        return {**batch, "total": batch["labels"].ne(IGNORED).sum()}

    def of_pairs(model: Any, inputs: Any) -> Tensor:
        rows = zip(inputs["input_ids"].split(1), inputs["labels"].split(1), strict=True)
        scores = torch.stack([model(*row)["loss"] for row in rows])
        half = len(scores) // 2
        return (scores[:half] - scores[half:]).square().mean()

    averages = with_loss(lambda model, inputs: model(inputs["input_ids"], inputs["labels"])["loss"])
    assert heard(averages, with_total, count=lambda batch: batch["total"]) == ""
    assert heard(with_loss(of_pairs), count=lambda batch: len(batch["labels"]) // 2) == ""


def test_questions_leave_no_metrics_in_the_next_evaluation():
    class Notes(kinds()[1]):  # type: ignore[misc]  # as TRL's trainers
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._metrics: dict[str, list[float]] = {"train": [], "eval": []}

        def compute_loss(self, model: Any, inputs: Any, *_: Any, num_items_in_batch: Any = None) -> Any:
            loss = model(**inputs, num_items_in_batch=num_items_in_batch)["loss"]
            self._metrics["train" if model.training else "eval"].append(loss.item())
            return loss

    trainer = trained(Notes, make_net(), make_rows([3, 5]), max_steps=1)
    assert [len(trainer._metrics[mode]) for mode in ("train", "eval")] == [2, 0]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"steps": 8}, r"got steps=8, expected TrainingArguments\(gradient_accumulation_steps=8\)"),
        ({"max_norm": 1.0}, r"got max_norm=1.0, expected TrainingArguments\(max_grad_norm=1.0\)"),
        ({"count": "tokens"}, "count='tokens', expected a callable: micro-batch -> number"),
    ],
    ids=["steps", "max_norm", "count"],
)
def test_options_of_an_accumulator_are_refused_with_their_place(options, words, tmp_path):
    from transformers import TrainingArguments

    with accelerators(), pytest.raises(TypeError, match=words):
        kinds()[1](make_net(), TrainingArguments(output_dir=str(tmp_path), use_cpu=True), **options)


class Drawing(Net):
    """Draws random numbers and changes a buffer in each forward, and keeps to its mode."""

    def forward(self, input_ids: Tensor, *args: Any, **named: Any) -> Any:
        self.constant += self.training
        found = super().forward(input_ids, *args, **named)
        self.constant.fill_(1) if not self.training else None
        return found | {"loss": found["loss"] * (1 + nn.functional.dropout(torch.ones(()), 0.5, self.training))}


def test_questions_change_no_random_number_buffer_or_mode():
    rows = make_rows([3, 5, 2, 7])
    (theirs, _), (ours, _) = (fit(kind, make_net(Drawing), rows, gradient_accumulation_steps=1) for kind in kinds())
    assert worst(ours, theirs) <= 1e-12


CANNOT = {"lomo": ({"optim": "adalomo"}, "optim=.*steps in backward"), "DataParallel": ({}, "DataParallel")}


@pytest.mark.parametrize(("options", "words"), CANNOT.values(), ids=CANNOT)
def test_options_that_cannot_be_exact_are_refused_before_training(options, words, tmp_path):
    with accelerators():
        trainer = make_trainer(kinds()[1], make_net(), make_rows([3, 4]), str(tmp_path))
        for name, value in options.items():
            setattr(trainer.args, name, value)
        if not options:
            trainer.args._n_gpu = 2
        with pytest.raises(ValueError, match=words):
            trainer.train()
