"""A training to copy: `python` or `torchrun --nproc-per-node 2` launch/minimal.py [CHECKPOINT to resume].

If a rank dies, all start again: `TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --max-restarts 3 ...`; without the
variable torchrun (2.9 to 2.15) hands the new processes the addresses of the dead ones.
"""

import gc
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import distaccum

FILE = Path(sys.argv[1] if len(sys.argv) > 1 else "minimal.pt")
EPOCHS, MICRO_BATCH, STEPS, SAVE_EVERY = 5, 8, 4, 10  # an update is 8 x 4 samples on each rank
rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
device = torch.device("cuda" if torch.cuda.is_available() else "cpu", int(os.environ.get("LOCAL_RANK", 0)))
if device.type == "cuda":
    torch.cuda.set_device(device)
if ranks > 1:
    dist.init_process_group()
torch.manual_seed(0)
inputs = torch.randn(1000, 20)
data = TensorDataset(inputs, (inputs[:, :10].sum(1) > inputs[:, 10:].sum(1)).long())  # yours
network = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 2)).to(device)  # yours
model = nn.parallel.DistributedDataParallel(network) if ranks > 1 else network
optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
per_epoch = -(-len(data) // (ranks * MICRO_BATCH * STEPS))  # updates; the last may be smaller
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * per_epoch)
accumulator = distaccum.Accumulator(model, optimizer, steps=STEPS, scheduler=scheduler, max_norm=1.0)
parts = {"model": network, "optimizer": optimizer, "scheduler": scheduler, "accumulator": accumulator}

torch.manual_seed(rank)  # weights are the same on all ranks, dropout is not
if FILE.exists():
    distaccum.load(FILE, **parts)
while accumulator.index < EPOCHS * per_epoch:
    epoch, done = divmod(accumulator.index, per_epoch)
    mine = torch.randperm(len(data), generator=torch.Generator().manual_seed(epoch))[rank::ranks]
    left = mine[done * STEPS * MICRO_BATCH :].tolist()  # each sample once per epoch, on one rank
    for window in accumulator.windows(DataLoader(data, MICRO_BATCH, sampler=left, generator=torch.Generator())):
        for batch, labels in window:
            window.backward(nn.functional.cross_entropy(model(batch.to(device)), labels.to(device)))
        update = window.step()
        if accumulator.index % SAVE_EVERY == 0 or accumulator.index == EPOCHS * per_epoch:
            distaccum.save(FILE, **parts)  # if killed, the old file or the new one is whole
    if rank == 0:
        print(f"epoch {epoch}: loss {update.loss:.4f}")
if ranks > 1:
    del model, accumulator, parts, window  # a gloo group still in use when Python exits may abort it
    gc.collect()
    dist.destroy_process_group()
