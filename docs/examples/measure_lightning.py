"""How far a LightningModule with an Accumulator is from one big batch per update.

    python docs/examples/measure_lightning.py       # one device
    python docs/examples/measure_lightning.py 2     # two CPU processes, strategy="ddp", ranks with 14 and 4 samples

It needs pytorch-lightning.
"""

from __future__ import annotations

import sys
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.plugins.environments import LightningEnvironment
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

from distaccum import Accumulator

RANKS = int(sys.argv[1]) if len(sys.argv) > 1 else 1
EPOCHS = 2


def made() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def batches(rank: int) -> list[tuple[Tensor, Tensor]]:
    """A rank's batches; the last one is short."""
    drawn = torch.Generator().manual_seed(rank)
    sizes = (14, 14, 12) if rank == 0 else (4, 4, 4)
    return [tuple(torch.randn(n, m, generator=drawn, dtype=torch.float64) for m in (3, 1)) for n in sizes]


class LitModel(pl.LightningModule):
    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__()
        self.net = made()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_fit_start(self) -> None:
        self.accumulator = Accumulator(self.trainer.strategy.model, self.optimizers(), micro_batch_size=5)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(batches(self.global_rank), batch_size=None)

    def loss(self, part: tuple[Tensor, Tensor]) -> Tensor:
        return mse_loss(self.net(part[0]), part[1])

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        self.accumulator.update(batch, self.loss)


def main() -> None:
    options = {"strategy": "ddp", "plugins": [LightningEnvironment()]} if RANKS > 1 else {}
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = pl.Trainer(
        max_epochs=EPOCHS, accelerator="cpu", devices=RANKS, use_distributed_sampler=False, **quiet, **options
    )
    module = LitModel()
    trainer.fit(module)

    net = made()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(EPOCHS):
        for parts in zip(*(batches(rank) for rank in range(RANKS)), strict=True):
            inputs, targets = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
            optimizer.zero_grad()
            mse_loss(net(inputs), targets).backward()
            optimizer.step()
    apart = max(float((a - b).detach().abs().max()) for a, b in zip(net.parameters(), module.parameters(), strict=True))
    print(f"rank {trainer.global_rank}: {trainer.global_step} updates, weights {apart:.0e} apart", flush=True)


if __name__ == "__main__":
    main()
