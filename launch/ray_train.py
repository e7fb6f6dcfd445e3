"""minimal.py's training under Ray Train: `python launch/ray_train.py [FOLDER]`; goes on if workers die."""

import sys
import tempfile
from pathlib import Path
from typing import Any

import ray.train
import torch
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, get_device, prepare_model
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import distaccum

EPOCHS, MICRO_BATCH, STEPS, SAVE_EVERY = 5, 8, 4, 10  # an update is 8 x 4 samples on each worker


def train(_: dict[str, Any]) -> None:
    context, device = ray.train.get_context(), get_device()
    rank, ranks = context.get_world_rank(), context.get_world_size()
    torch.manual_seed(0)
    inputs = torch.randn(1000, 20)
    data = TensorDataset(inputs, (inputs[:, :10].sum(1) > inputs[:, 10:].sum(1)).long())  # yours
    network = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 2))  # yours
    model = prepare_model(network)  # DDP, on this worker's device
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    per_epoch = -(-len(data) // (ranks * MICRO_BATCH * STEPS))  # updates; the last may be smaller
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * per_epoch)
    accumulator = distaccum.Accumulator(model, optimizer, steps=STEPS, scheduler=scheduler, max_norm=1.0)
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "accumulator": accumulator}

    torch.manual_seed(rank)  # weights are the same on all workers, dropout is not
    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as folder:
            distaccum.load(Path(folder, "run.pt"), **parts)
    while accumulator.index < EPOCHS * per_epoch:
        epoch, done = divmod(accumulator.index, per_epoch)
        mine = torch.randperm(len(data), generator=torch.Generator().manual_seed(epoch))[rank::ranks]
        left = mine[done * STEPS * MICRO_BATCH :].tolist()  # each sample once per epoch, on one worker
        for window in accumulator.windows(DataLoader(data, MICRO_BATCH, sampler=left, generator=torch.Generator())):
            for batch, labels in window:
                window.backward(nn.functional.cross_entropy(model(batch.to(device)), labels.to(device)))
            update = window.step()
            if accumulator.index % SAVE_EVERY == 0 or accumulator.index == EPOCHS * per_epoch:
                with tempfile.TemporaryDirectory() as folder:
                    distaccum.save(Path(folder, "run.pt"), **parts)  # on all workers; the first writes
                    checkpoint = Checkpoint.from_directory(folder) if rank == 0 else None
                    ray.train.report({"index": update.index, "loss": update.loss}, checkpoint=checkpoint)


if __name__ == "__main__":
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "runs").resolve()
    run = RunConfig(name="ray", storage_path=str(folder), failure_config=FailureConfig(max_failures=3))
    workers = ScalingConfig(num_workers=2, use_gpu=torch.cuda.is_available())
    result = TorchTrainer(train, train_loop_config={}, run_config=run, scaling_config=workers).fit()
    print(f"{result.metrics}: {result.checkpoint}")
