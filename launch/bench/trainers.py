"""Training by Fabric, Lightning and transformers' Trainer: with their own accumulation, and moved to distaccum.

    python launch/bench/trainers.py --out launch/results/trainers

One process on the CPU. Each turn is a whole training of some updates, the making of the trainer included. The weights
at its end are compared: all windows are full, so that each trainer's own accumulation is exact too.
"""

from __future__ import annotations

import logging
import tempfile
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from kit import CPU, Options, circumstances, header, in_turns, ratios, spelled, table, write
from torch import Tensor, nn

from distaccum import Accumulator

STEPS, ROWS, LENGTH, TOKENS = 8, 4, 64, 512


class Language(nn.Module):
    """A small transformer over tokens; its loss is a mean over them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(width, TOKENS)

    def forward(self, input_ids: Tensor, labels: Tensor, num_items_in_batch: Any = None, **_: Any) -> dict[str, Tensor]:
        logits = self.head(self.layers(self.embedding(input_ids))).flatten(0, 1)
        if num_items_in_batch is None:
            return {"loss": nn.functional.cross_entropy(logits, labels.flatten())}
        return {"loss": nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum") / num_items_in_batch}


class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __init__(self, updates: int) -> None:
        self.ids = torch.randint(
            0, TOKENS, (updates * STEPS * ROWS, LENGTH), generator=torch.Generator().manual_seed(0)
        )

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index].roll(-1)}


def made(width: int) -> Language:
    torch.manual_seed(0)
    return Language(width)


def weights(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01)


def by_fabric(width: int, rows: Rows, *, is_moved: bool) -> Tensor:
    from lightning_fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
    plain = made(width)
    model, optimizer = fabric.setup(plain, sgd(plain))
    loader = fabric.setup_dataloaders(torch.utils.data.DataLoader(rows, batch_size=ROWS))
    if is_moved:
        accumulator = Accumulator(model, optimizer, steps=STEPS)
        for window in accumulator.windows(loader):
            for batch in window:
                window.backward(model(**batch)["loss"])
            window.step()
        return weights(plain)
    for number, batch in enumerate(loader):
        accumulates = (number + 1) % STEPS != 0
        with fabric.no_backward_sync(model, enabled=accumulates):
            fabric.backward(model(**batch)["loss"] / STEPS)
        if not accumulates:
            optimizer.step()
            optimizer.zero_grad()
    return weights(plain)


def by_lightning(width: int, rows: Rows, *, is_moved: bool) -> Tensor:
    import pytorch_lightning as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = made(width)
            self.automatic_optimization = not is_moved

        def configure_optimizers(self) -> Any:
            return sgd(self)

        def on_fit_start(self) -> None:
            if is_moved:
                self.accumulator = Accumulator(self.trainer.strategy.model, self.optimizers(), micro_batch_size=ROWS)

        def training_step(self, batch: Any, index: int) -> Any:
            if is_moved:
                self.accumulator.update(batch, lambda part: self.net(**part)["loss"])
                return None
            return self.net(**batch)["loss"]

    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    module = Module()
    size = ROWS * STEPS if is_moved else ROWS
    trainer = pl.Trainer(
        max_epochs=1, accelerator="cpu", devices=1, accumulate_grad_batches=1 if is_moved else STEPS, **quiet
    )
    trainer.fit(module, torch.utils.data.DataLoader(rows, batch_size=size))
    return weights(module.net)


def by_trainer(width: int, rows: Rows, *, is_moved: bool) -> Tensor:
    from transformers import PrinterCallback, Trainer, TrainingArguments

    from distaccum.transformers import AccumulatingTrainer

    model = made(width)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            num_train_epochs=1,
            per_device_train_batch_size=ROWS,
            gradient_accumulation_steps=STEPS,
            max_grad_norm=0.0,
            lr_scheduler_type="constant",
            train_sampling_strategy="sequential",
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        kind = AccumulatingTrainer if is_moved else Trainer
        trainer = kind(model, arguments, train_dataset=rows, optimizers=(sgd(model), None))
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return weights(model)


TRAINERS: Mapping[str, Callable[..., Tensor]] = {
    "Fabric": by_fabric,
    "Lightning": by_lightning,
    "transformers' Trainer": by_trainer,
}


def measure(width: int, updates: int, rounds: int) -> dict[str, dict[str, Any]]:
    rows, found = Rows(updates), {}
    for name, train in TRAINERS.items():
        own, moved = (partial(train, width, rows, is_moved=is_moved) for is_moved in (False, True))
        difference = float((own() - moved()).abs().max())
        assert difference < 1e-4, f"{name}: weights differ by {difference}"
        taken = in_turns({"own": own, "again": own, "moved": moved}, rounds, CPU)
        found[name] = {
            "again": ratios(taken["again"], taken["own"]),
            "moved": ratios(taken["moved"], taken["own"]),
            "difference": difference,
            "milliseconds": sorted(taken["own"])[rounds // 2] * 1e3 / updates,
        }
    return found


def main() -> int:
    warnings.simplefilter("ignore")  # theirs
    for name in ("pytorch_lightning", "lightning_fabric", "lightning.fabric", "lightning.pytorch"):
        logging.getLogger(name).setLevel(logging.ERROR)
    parser = Options(__doc__)
    parser.counts("--rounds", 7, "rounds of all ways by turns")
    parser.counts("--updates", 40, "in each turn")
    parser.counts("--width", 160, "of the larger model")
    options = parser.parse_args()
    torch.set_num_threads(1)
    sizes = {"tiny": 16, "small": options.width}
    result = {name: measure(width, options.updates, options.rounds) for name, width in sizes.items()}
    heads = ["", "ms per update, theirs", "theirs again", "moved", "weights differ by"]
    lines = []
    for name, of_trainers in result.items():
        numel = sum(parameter.numel() for parameter in made(sizes[name]).parameters())
        cells = [
            [
                one,
                f"{row['milliseconds']:.1f}",
                spelled(row["again"]),
                spelled(row["moved"]),
                f"{row['difference']:.0e}",
            ]
            for one, row in of_trainers.items()
        ]
        lines += [f"## {numel / 1e6:.2g} million parameters", "", *table(heads, cells)]
    notes = (
        f"{options.updates} updates of {STEPS} micro-batches of {ROWS} x {LENGTH} tokens, by the processor's time; the "
        "ratio to the trainer's own accumulation in the same round: the median, the least and the most of "
        f"{options.rounds}. The making of the trainer is part of each turn.",
    )
    about = circumstances(CPU)
    page = [*header("Trainers with their own accumulation, and with windows", about, *notes), *lines]
    write(options.out, "\n".join(page), {**about, "trainers": result})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
