"""cosmos-framework#162 on 2 ranks: the context that defers knows DDP alone, so that replicas reduce each time."""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from data import Pictures, classifier
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
model, steps, data = classifier(), 4, Pictures(64)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for i, (x, y) in enumerate(DataLoader(data, batch_size=4, sampler=DistributedSampler(data))):
    is_last = (i + 1) % steps == 0
    is_ddp = isinstance(model, DistributedDataParallel)
    with model.no_sync() if is_ddp and not is_last else nullcontext():
        loss = cross_entropy(model(x), y) / steps
        loss.backward()  # wrong
    if is_last:
        optimizer.step()
        optimizer.zero_grad()
dist.destroy_process_group()
