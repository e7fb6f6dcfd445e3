"""Lightning: its own loop with a callback, and an Accumulator in manual optimisation, on real ranks."""

import copy
import io
import logging
import math
import pickle
from importlib import import_module
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.distributed as dist
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader

from distaccum import Accumulator, DistaccumError, count_samples, count_tokens
from distaccum.lightning import ExactAccumulation
from tests.support.oracle import by_big_batches
from tests.support.problems import IGNORED, Stream, join, make_batch, make_net_without_router, sample_loss, token_loss
from tests.support.ranks import launched, on_ranks
from tests.support.windows import error, gradient, gradient_of, weights

SIZES = [[7, 5, 6, 2, 8], [3, 4, 1, 5, 2]]  # of the batches of each rank
MAX_NORM = 0.2  # clips some
QUIET = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary", "use_distributed_sampler")


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


def fit(module: Any, batches: list[Any], *, path: str | None = None, library: Any = pl, **options: Any) -> Any:
    logging.getLogger(library.__name__).setLevel(logging.ERROR)
    world = dist.get_world_size() if dist.is_initialized() else 1
    environments = import_module(f"{library.__name__}.plugins.environments")
    plugins = [*options.pop("plugins", ()), environments.LightningEnvironment()]
    with launched():
        options = {**dict.fromkeys(QUIET, False), "max_epochs": 1, "plugins": plugins, **options}
        options = {"strategy": "ddp" if world > 1 else "auto", **options}
        trainer = library.Trainer(accelerator="cpu", devices=world, **options)
        loader = DataLoader(batches, batch_size=None) if isinstance(batches, list) else batches
        trainer.fit(module, loader, ckpt_path=path)
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


# Lightning's own loop


class Own:
    """A module as anybody's, whose training_step takes the labels out of its batch."""

    def __init__(self, dtype: torch.dtype = torch.float64, loss: Any = sample_loss) -> None:
        super().__init__()
        self.net, self.loss = make_net_without_router().to(dtype), loss

    def configure_optimizers(self) -> Any:
        optimizer = SGD(self.parameters(), lr=0.5, momentum=0.5)
        return [optimizer], [{"scheduler": StepLR(optimizer, 1, 0.9), "interval": "step"}]

    def training_step(self, batch: Any, index: int) -> Any:
        batch = {**batch, "labels": batch.pop("labels")} if self.loss is token_loss else batch
        loss = self.loss(self.net, batch)
        self.log("loss", loss)
        return {"loss": loss, "size": len(batch["x"])}


class Automatic(Own, pl.LightningModule):
    """Trained by Lightning's own loop."""


class Looks(pl.Callback):
    """Comes before the callback under test, and keeps what Lightning shows."""

    def __init__(self) -> None:
        self.gradients: list[Any] = []
        self.outputs: list[float] = []
        self.updates: list[Any] = []

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self.gradients.append(gradient(module).clone())

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        self.outputs.append(float(outputs["loss"]) if outputs else math.nan)
        (exact,) = (callback for callback in trainer.callbacks if isinstance(callback, ExactAccumulation))
        if exact.update is not None and exact.update not in self.updates:
            self.updates.append(exact.update)


def windows_of(steps: list[int], parts: list[list[Any]]) -> list[Any]:
    """The big batch of each update, of one epoch for each number of steps."""
    starts = [(start, num) for num in steps for start in range(0, len(parts[0]), num)]
    return [join([batch for part in parts for batch in part[start : start + num]]) for start, num in starts]


def expected(batches: list[Any], loss: Any = sample_loss) -> Any:
    """The net after an update by each of the big batches, and their losses and norms."""
    net = make_net_without_router()
    sgd = SGD(net.parameters(), lr=0.5, momentum=0.5)
    updates = list(by_big_batches(net, batches, loss, sgd, StepLR(sgd, 1, 0.9), MAX_NORM))
    return net, [loss for _, loss, *_ in updates], [norm for *_, norm, _ in updates]


def off(module: Any, batches: list[Any]) -> float:
    net, _, _ = expected(batches)
    return error(weights(module), weights(net))


CLIPPED = {"accumulate_grad_batches": 2, "gradient_clip_val": MAX_NORM}


@pytest.mark.parametrize("world", [1, 2])
@on_ranks()
def test_callback_makes_lightnings_updates_those_of_the_big_batch(world):
    from pytorch_lightning.callbacks import GradientAccumulationScheduler

    for loss, count in {sample_loss: count_samples, token_loss: count_tokens("labels")}.items():
        module, looks, exact = Automatic(loss=loss), Looks(), ExactAccumulation(count)
        callbacks = [looks, GradientAccumulationScheduler({0: 2, 1: 3}), exact]
        options = {"max_epochs": 2, "gradient_clip_val": MAX_NORM, "callbacks": callbacks}
        own = [dict(batch) for batch in batches_of(dist.get_rank() if world > 1 else 0)]
        trainer = fit(module, DataLoader(own, batch_size=None, collate_fn=dict), **options)
        whole = windows_of([2, 3], [batches_of(rank) for rank in range(world)])
        net, losses, norms = expected(whole, loss)
        assert error(weights(module), weights(net)) <= 1e-12
        updates = looks.updates
        assert [update.loss for update in updates] == pytest.approx(losses, rel=1e-12)
        assert [update.grad_norm for update in updates] == pytest.approx(norms, rel=1e-10)
        assert [float(seen.norm()) for seen in looks.gradients] == pytest.approx(norms, rel=1e-10)  # divided already
        assert [list(update.counts.values()) for update in updates] == [[float(count(batch))] for batch in whole]
        assert [update.index for update in updates] == list(range(5)) and trainer.global_step == 5
        first = loss(make_net_without_router(), batches_of(dist.get_rank() if world > 1 else 0)[0])
        assert looks.outputs[0] == pytest.approx(float(first.detach()) / 2)  # as without the callback
        assert not {"training_step", "backward"} & vars(module).keys()


def test_callback_with_a_scaler_leaves_out_what_counts_nothing_and_records_overflows():
    from pytorch_lightning.plugins.precision import MixedPrecision

    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
    batches = [make_batch(3, seed=i, dtype=torch.float32) for i in range(30)]
    for i in (0, 4, 5):  # one of a window, and all of a window
        batches[i]["labels"].fill_(IGNORED)
    module, looks = Automatic(torch.float32, token_loss), Looks()
    exact = ExactAccumulation({"tokens": count_tokens("labels")})
    plugins = [MixedPrecision("16-mixed", "cpu", scaler)]
    loader = DataLoader(batches, batch_size=None, collate_fn=dict)
    fit(module, loader, plugins=plugins, accumulate_grad_batches=2, callbacks=[looks, exact])
    stepped = [update.stepped for update in looks.updates]
    reasons = {update.reason for update in looks.updates if not update.stepped}
    assert reasons == {"no tokens in any micro-batch of any rank", "the scaled gradients overflowed"}
    assert stepped[-5:] == [True] * 5 and all(math.isfinite(update.loss) for update in looks.updates)
    assert [update.micro_batches for update in looks.updates[:4]] == [1, 2, 0, 2]
    assert all(torch.isfinite(seen).all() for seen in looks.gradients[-5:]) and torch.isfinite(weights(module)).all()


THEIRS = pytest.mark.filterwarnings("ignore")  # warnings of libraries with this torch


@THEIRS
def test_callback_resumes_in_mid_epoch_and_a_step_may_return_none(tmp_path):
    from torchdata.stateful_dataloader import StatefulDataLoader

    class Skips(Automatic):
        def training_step(self, batch: Any, index: int) -> Any:
            return None if index == 1 else super().training_step(batch, index)

    class Saves(pl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
            if index == 3 and not (tmp_path / "middle.ckpt").exists():
                trainer.save_checkpoint(tmp_path / "middle.ckpt")

    batches, modules, indices = batches_of(0), [Skips(), Skips()], []
    for module, path in zip(modules, (None, str(tmp_path / "middle.ckpt")), strict=True):
        loader, exact = StatefulDataLoader(batches, batch_size=None), ExactAccumulation(count_samples)
        fit(module, loader, path=path, callbacks=[exact, Saves()], **CLIPPED)
        indices.append(exact.update.index)
    assert indices == [2, 2]
    assert max(off(module, [batches[0], join(batches[2:4]), batches[4]]) for module in modules) <= 1e-12


class Manual(Automatic):
    automatic_optimization = False


def test_callback_refuses_manual_optimisation_and_strategies_that_accumulate():
    from pytorch_lightning.strategies import SingleDeviceStrategy

    class Hides(SingleDeviceStrategy):
        handles_gradient_accumulation = True

    exact = ExactAccumulation(count=count_samples, reduction="sum_to_mean")
    with pytest.raises(ValueError, match="ExactAccumulation with automatic_optimization=False"):
        fit(Manual(), batches_of(0), callbacks=[exact])
    with pytest.raises(ValueError, match=r"ExactAccumulation with .*Hides.*give the module an Accumulator"):
        fit(Automatic(), batches_of(0), callbacks=[exact], strategy=Hides("cpu"))
    with pytest.raises(TypeError, match="count"):
        ExactAccumulation()
    with pytest.raises(ValueError, match="several ExactAccumulation"):
        fit(Automatic(), batches_of(0), callbacks=[exact, ExactAccumulation(count_samples)])


@on_ranks(2)
def test_callback_refuses_ranks_with_unequal_loaders_on_all_of_them():
    with pytest.raises(DistaccumError, match="ranks have 3, 4 micro-batches in this epoch"):
        fit(Automatic(), batches_of(0)[: 3 + dist.get_rank()], callbacks=[ExactAccumulation(count_samples)])


@pytest.mark.parametrize("sizes", [[4, 2], [3, 2], [2, 0], [3, 3]], ids=str)
@on_ranks(2)
def test_callback_takes_streams_that_end_together_and_refuses_others_on_all_ranks(sizes):
    module, rank = Automatic(), dist.get_rank()
    loader = DataLoader(Stream(batches_of(rank)[: sizes[rank]]), batch_size=None)
    options = {"callbacks": [ExactAccumulation(count_samples)], **CLIPPED}
    if sizes[0] != sizes[1]:
        with pytest.raises(DistaccumError, match="the data of some ranks end at micro-batch"):
            fit(module, loader, **options)
        return
    fit(module, loader, **options)
    assert off(module, windows_of([2], [batches_of(r)[: sizes[r]] for r in range(2)])) <= 1e-12


@THEIRS
def test_gradients_are_divided_in_the_search_for_a_learning_rate_too(monkeypatch, tmp_path):
    from pytorch_lightning.callbacks import LearningRateFinder

    monkeypatch.chdir(tmp_path)
    seen: list[Any] = []

    class Searched(Automatic):
        lr = 0.5

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            seen.append(gradient(self).clone())

    batches = batches_of(0)[:2]
    finder = LearningRateFinder(min_lr=1e-3, max_lr=1e-2, num_training_steps=2, update_attr=False)
    fit(Searched(), batches, accumulate_grad_batches=2, callbacks=[finder, ExactAccumulation(count_samples)])
    exact = gradient_of(make_net_without_router(), join(batches), sample_loss)
    assert len(seen) >= 2 and error(seen[0], exact) <= 1e-12


def test_module_may_be_copied_and_saved_while_it_trains():
    class Copies(pl.Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            self.copied = copy.deepcopy(module)
            torch.save(module, io.BytesIO())

    copies, exact, module = Copies(), ExactAccumulation(count_samples), Automatic()
    fit(module, batches_of(0), accumulate_grad_batches=2, callbacks=[copies, exact])
    first = weights(module)
    assert not torch.equal(weights(copies.copied), first)
    again = pickle.loads(pickle.dumps(ExactAccumulation(count_samples)))
    fit(copies.copied, batches_of(0), accumulate_grad_batches=2, callbacks=[again])
    assert torch.equal(weights(copies.copied), first)


@THEIRS
def test_loss_of_shape_1_is_a_number_and_a_second_fit_weighs_once():
    class Fails(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            self.trainer = trainer
            trainer.callbacks = []
            raise KeyError("a fit that fails where no callback hears of it")

    loss = lambda net, batch: sample_loss(net, batch)[None]  # noqa: E731
    exact, fails, module = ExactAccumulation(count_samples), Fails(), Automatic(loss=loss)
    with pytest.raises(KeyError):
        fit(Automatic(loss=loss), batches_of(0), callbacks=[exact, fails], **CLIPPED)
    fails.trainer.callbacks = [exact]
    fails.trainer.fit(module, DataLoader(batches_of(0), batch_size=None))
    assert off(module, windows_of([2], [batches_of(0)])) <= 1e-12


@THEIRS
def test_callback_works_with_lightning_by_its_other_name():
    other = pytest.importorskip("lightning.pytorch")

    class Other(Own, other.LightningModule):  # type: ignore[misc]
        """Of the other package."""

    module, exact = Other(), ExactAccumulation(count_samples)
    options = {"accumulate_grad_batches": 5, "gradient_clip_val": MAX_NORM}
    fit(module, batches_of(0), library=other, callbacks=[exact], **options)
    net, losses, _ = expected([join(batches_of(0))])
    assert error(weights(module), weights(net)) <= 1e-12 and exact.update.loss == pytest.approx(losses[0])
