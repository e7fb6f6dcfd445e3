"""Lightning: an Accumulator in a LightningModule with manual optimisation, under the Trainer, on real ranks."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader

from distaccum import Accumulator, count_tokens
from tests.support.engines import full_weights, layers, wrappers
from tests.support.problems import (
    error,
    gradient,
    join,
    make_batch,
    make_net_without_router,
    sample_loss,
    token_loss,
    weights,
)
from tests.support.ranks import launched

SIZES = [[7, 5, 6, 2, 8], [3, 4, 1, 5, 2]]  # of the batches of each rank
MAX_NORM = 0.2  # clips some


def batches_of(rank: int, dtype: torch.dtype = torch.float64) -> list[Any]:
    return [make_batch(size, seed=10 * rank + i, dtype=dtype) for i, size in enumerate(SIZES[rank])]


class Module(pl.LightningModule):
    """As docs/lightning.md has it."""

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
        self.accumulator = Accumulator(
            self.trainer.strategy.model,
            self.optimizers(),
            scheduler=self.lr_schedulers(),
            **{"micro_batch_size": 2, **self.options},
        )

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


def fit(module: Any, batches: list[Any], *, strategy: Any = None, path: str | None = None, **options: Any) -> Any:
    from pytorch_lightning.plugins.environments import LightningEnvironment

    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    world = dist.get_world_size() if dist.is_initialized() else 1
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary", "use_distributed_sampler")
    with launched():
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=world,
            strategy=strategy or ("ddp" if world > 1 else "auto"),
            plugins=[*options.pop("plugins", ()), LightningEnvironment()],
            **{"max_epochs": 1, **dict.fromkeys(quiet, False), **options},
        )
        trainer.fit(module, DataLoader(batches, batch_size=None), ckpt_path=path)
    return trainer


def one_big_batch(joined: list[Any]) -> tuple[Tensor, list[float], list[float]]:
    """The weights at the end, and by update the loss and the norm, with clipping and a schedule."""
    net, losses, norms = make_net_without_router(), [], []
    optimizer = SGD(net.parameters(), lr=0.5)
    schedule = StepLR(optimizer, 1, 0.9)
    for batch in joined:
        optimizer.zero_grad()
        loss = sample_loss(net, batch)
        loss.backward()
        losses.append(loss.item())
        norms.append(float(nn.utils.clip_grad_norm_(net.parameters(), MAX_NORM)))
        optimizer.step()
        schedule.step()
    return weights(net), losses, norms


def trained() -> Any:
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    module = Module(max_norm=MAX_NORM)
    trainer = fit(module, batches_of(rank))
    expected, losses, norms = one_big_batch([join(parts) for parts in zip(*map(batches_of, range(world)), strict=True)])
    assert min(norms) < MAX_NORM < max(norms)
    return (
        error(weights(module), expected),
        max(abs(seen - loss) for seen, loss in zip(module.logged, losses, strict=True)),
        max(abs(update.grad_norm - norm) for update, norm in zip(module.updates, norms, strict=True)),
        trainer.global_step,
    )


@pytest.mark.parametrize("world", [1, 2])
def test_trainer_equals_one_big_batch_per_update(ranks, world):
    for weight, loss, norm, steps in ranks(2).run(trained) if world == 2 else [trained()]:
        assert max(weight, norm) <= 1e-12
        assert loss <= 1e-6  # Lightning logs in float32
        assert steps == len(SIZES[0])


def resumed(folder: str) -> Any:
    batches, path = batches_of(dist.get_rank()), f"{folder}/model.ckpt"
    whole, first, later = Module(), Module(), Module()
    fit(whole, batches, max_epochs=2)
    trainer = fit(first, batches)
    with launched():
        trainer.save_checkpoint(path)
    trainer = fit(later, batches, path=path, max_epochs=2)
    return error(weights(whole), weights(later)), [update.index for update in later.updates], trainer.global_step


def test_checkpoint_of_the_trainer_resumes_the_accumulator(ranks, tmp_path):
    for wrong, indices, steps in ranks(2).run(resumed, str(tmp_path)):
        assert wrong <= 1e-12 and indices == [5, 6, 7, 8, 9] and steps == 10


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


class Tokens(Module):
    """A batch is a list of micro-batches; the module is cut up by FSDP2."""

    def configure_model(self) -> None:
        wrappers.fully_sharded(self.net, layers(self.net), mesh=self.device_mesh["data_parallel"])

    def configure_optimizers(self) -> Any:
        return [SGD(self.parameters(), lr=1.0)], []

    def training_step(self, batch: Any, index: int) -> None:
        window = self.accumulator.window(batch)
        for part in window:
            window.backward(token_loss(self.net, part))
        self.updates.append(window.step())


def sharded() -> Any:
    from pytorch_lightning.strategies import ModelParallelStrategy

    rank = dist.get_rank()
    mine = [[make_batch(size, seed=10 * r + i) for i, size in enumerate(sizes)] for r, sizes in enumerate(SIZES)]
    module = Tokens(count=count_tokens("labels"), micro_batch_size=None)
    module.lr_schedulers = lambda: None
    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    fit(module, [mine[rank][: len(mine[rank]) - 2 * rank]], strategy=strategy)  # 5 micro-batches, and 3
    exact = make_net_without_router()
    before = weights(exact)
    token_loss(exact, join([*mine[0], *mine[1][:3]])).backward()
    return error(before - full_weights(module), gradient(exact))


def test_window_of_a_list_of_micro_batches_is_exact_under_model_parallel_strategy(ranks):
    assert max(ranks(2).run(sharded)) <= 1e-10


def given_the_module_itself() -> str:
    module = Module()
    module.on_fit_start = lambda: Accumulator(module, module.optimizers())
    with pytest.raises(ValueError, match="Lightning keeps its wrapper beside the LightningModule") as raised:
        fit(module, batches_of(dist.get_rank()))
    return str(raised.value)


def test_module_in_the_place_of_its_wrapper_is_refused(ranks):
    for message in ranks(2).run(given_the_module_itself):
        assert "give the Accumulator trainer.strategy.model" in message
