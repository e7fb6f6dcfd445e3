"""Lightning: an Accumulator in a LightningModule with manual optimisation, under the Trainer, on real ranks."""

import logging
import math
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.distributed as dist
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader

from distaccum import Accumulator
from tests.support.oracle import by_big_batches
from tests.support.problems import join, make_batch, make_net_without_router, sample_loss
from tests.support.ranks import launched, on_ranks
from tests.support.windows import error, weights

SIZES = [[7, 5, 6, 2, 8], [3, 4, 1, 5, 2]]  # of the batches of each rank
MAX_NORM = 0.2  # clips some


def batches_of(rank: int, dtype: torch.dtype = torch.float64) -> list[Any]:
    return [make_batch(size, seed=10 * rank + i, dtype=dtype) for i, size in enumerate(SIZES[rank])]


class Module(pl.LightningModule):
    """As docs/accelerate.md has it."""

    automatic_optimization = False

    def __init__(self, dtype: torch.dtype = torch.float64, **options: Any) -> None:
        super().__init__()
        self.net, self.options = make_net_without_router().to(dtype), options
        self.updates: list[Any] = []
        self.logged: list[float] = []

    def configure_optimizers(self) -> Any:
        optimizer = SGD(self.parameters(), lr=0.5)
        return [optimizer], [StepLR(optimizer, 1, 0.9)]

    def on_fit_start(self) -> None:
        model, schedule = self.trainer.strategy.model, self.lr_schedulers()
        options = {"micro_batch_size": 2, **self.options}
        self.accumulator = Accumulator(model, self.optimizers(), scheduler=schedule, **options)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["accumulator"] = self.accumulator.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.saved = checkpoint["accumulator"]

    def on_train_start(self) -> None:
        if hasattr(self, "saved"):
            self.accumulator.load_state_dict(self.saved)
            del self.saved

    def training_step(self, batch: Any, index: int) -> None:
        update = self.accumulator.update(batch, lambda part: sample_loss(self.net, part))
        self.log("loss", update.loss)
        self.logged.append(float(self.trainer.callback_metrics["loss"]))
        self.updates.append(update)


def fit(module: Any, batches: list[Any], *, path: str | None = None, **options: Any) -> Any:
    from pytorch_lightning.plugins.environments import LightningEnvironment

    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    world = dist.get_world_size() if dist.is_initialized() else 1
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary", "use_distributed_sampler")
    plugins = [*options.pop("plugins", ()), LightningEnvironment()]
    with launched():
        options = {**dict.fromkeys(quiet, False), "max_epochs": 1, "plugins": plugins, **options}
        trainer = pl.Trainer(accelerator="cpu", devices=world, strategy="ddp" if world > 1 else "auto", **options)
        trainer.fit(module, DataLoader(batches, batch_size=None), ckpt_path=path)
    return trainer


@pytest.mark.parametrize("world", [1, 2])
@on_ranks()
def test_trainer_equals_one_big_batch_per_update(world):
    module = Module(max_norm=MAX_NORM)
    trainer = fit(module, batches_of(dist.get_rank()))
    net, whole = make_net_without_router(), [join(parts) for parts in zip(*map(batches_of, range(world)), strict=True)]
    sgd = SGD(net.parameters(), lr=0.5)
    _, losses, norms, _ = zip(*by_big_batches(net, whole, sample_loss, sgd, StepLR(sgd, 1, 0.9), MAX_NORM), strict=True)
    assert min(norms) < MAX_NORM < max(norms)
    assert error(weights(module), weights(net)) <= 1e-12
    assert module.logged == pytest.approx(losses, abs=1e-6)  # Lightning logs in float32
    assert [update.grad_norm for update in module.updates] == pytest.approx(norms, abs=1e-12)
    assert trainer.global_step == len(SIZES[0])


@on_ranks(2)
def test_checkpoint_of_the_trainer_resumes_the_accumulator(tmp_path):
    batches, path = batches_of(dist.get_rank()), str(tmp_path / "model.ckpt")
    whole, first, later = Module(), Module(), Module()
    fit(whole, batches, max_epochs=2)
    trainer = fit(first, batches)
    with launched():
        trainer.save_checkpoint(path)
    trainer = fit(later, batches, path=path, max_epochs=2)
    assert error(weights(whole), weights(later)) <= 1e-12
    assert [update.index for update in later.updates] == [5, 6, 7, 8, 9] and trainer.global_step == 10


def test_scaler_of_the_trainer_scales_once_and_global_step_counts_updates():
    from pytorch_lightning.plugins.precision import MixedPrecision

    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)  # overflows in the first updates
    module = Module(torch.float32)
    batches = [make_batch(3, seed=i, dtype=torch.float32) for i in range(30)]
    trainer = fit(module, batches, plugins=[MixedPrecision("16-mixed", "cpu", scaler)])
    stepped = [update.stepped for update in module.updates]
    skipped = stepped.count(False)
    assert 5 <= skipped < len(batches) and stepped == [False] * skipped + [True] * (len(batches) - skipped)
    assert math.log2(scaler.get_scale()) == 40 - skipped
    assert trainer.global_step == len(batches) - skipped
