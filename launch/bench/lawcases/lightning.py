"""Lightning's Trainer: `accumulate_grad_batches`, alone and with distaccum's callback."""

from __future__ import annotations

import logging
from typing import Any

import torch

from .cases import SCALE
from .task import WEIGHTS, Library, Outcome, Seen, Task

LIGHTNING = Library("Lightning Trainer", ("pytorch_lightning",), lacks=WEIGHTS)
EXACT = Library("Lightning Trainer, ExactAccumulation", ("pytorch_lightning",))


def trainer_of(task: Task, **options: Any) -> Any:
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    from pytorch_lightning import Trainer
    from pytorch_lightning.plugins.environments import LightningEnvironment

    if task.world > 1:
        options |= {"strategy": "ddp", "plugins": [LightningEnvironment()]}
    quiet = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary", "use_distributed_sampler"),
        False,
    )
    return Trainer(**{"max_epochs": 1, "accelerator": "cpu", "devices": task.world, **quiet, **options})


def module_of(task: Task) -> tuple[Any, Seen]:
    from pytorch_lightning import LightningModule

    optimizer = task.sgd()
    seen = Seen(task.net).after(optimizer)

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = task.net

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return task.loss(self.net, batch)

        def configure_optimizers(self) -> Any:
            return optimizer

    return Module(), seen


@LIGHTNING.cell("tail", "short", "tokens", "tokens2", "zero", "aux", "uneven", "empty")
def accumulate(task: Task) -> Outcome:
    module, seen = module_of(task)
    trainer_of(task, accumulate_grad_batches=max(task.case.lengths[0])).fit(module, task.my_loader())
    return Outcome(seen.weights)


def exact_of(task: Task) -> Any:
    from distaccum import count_samples, count_tokens
    from distaccum.lightning import ExactAccumulation

    return ExactAccumulation(count_tokens("labels") if task.case.key in WEIGHTS else count_samples)


@EXACT.cell("tail", "short", "tokens", "tokens2", "zero")
def accumulate_exactly(task: Task) -> Outcome:
    module, seen = module_of(task)
    steps = max(task.case.lengths[0])
    trainer_of(task, accumulate_grad_batches=steps, callbacks=[exact_of(task)]).fit(module, task.my_loader())
    return Outcome(seen.weights)


@EXACT.cell("ramp")
def ramp_exactly(task: Task) -> Outcome:
    return ramp(task, exact_of(task))


@LIGHTNING.cell("ramp")
def ramp(task: Task, *callbacks: Any) -> Outcome:
    from pytorch_lightning.callbacks import GradientAccumulationScheduler

    module, seen = module_of(task)
    trainer = trainer_of(
        task,
        max_epochs=2,
        reload_dataloaders_every_n_epochs=1,
        callbacks=[GradientAccumulationScheduler({0: 2, 1: 4}), *callbacks],
    )
    parts = [task.mine[:6], task.mine[6:]]
    module.train_dataloader = lambda: torch.utils.data.DataLoader(parts[trainer.current_epoch], batch_size=None)
    trainer.fit(module)
    return Outcome(seen.weights)


@LIGHTNING.cell("scaler")
def scaled(task: Task) -> Outcome:
    from pytorch_lightning import LightningModule
    from pytorch_lightning.plugins.precision import MixedPrecision

    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    seen = Seen(task.net)

    class Module(LightningModule):
        automatic_optimization = False

        def __init__(self) -> None:
            super().__init__()
            self.net = task.net

        def training_step(self, batch: Any, index: int) -> None:
            self.manual_backward(task.loss(self.net, batch) / 2)
            if index % 2:
                for optimizer in self.optimizers():
                    optimizer.step()
                seen.take()
                for optimizer in self.optimizers():
                    optimizer.zero_grad()

        def configure_optimizers(self) -> Any:
            return task.sgd([self.net.first]), task.sgd([self.net.second])

    trainer_of(task, plugins=[MixedPrecision("16-mixed", "cpu", scaler)]).fit(Module(), task.my_loader())
    return Outcome(seen.weights, scaler.get_scale())


LIGHTNING.absent |= {"clip"}
EXACT.absent |= {"aux", "clip", "empty", "scaler", "uneven"}
