import sys

import torch
import torch.distributed as dist
from data import language_model, texts
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

dist.init_process_group("gloo")
rank, world, steps = dist.get_rank(), dist.get_world_size(), 4
model = language_model()
torch.nn.init.zeros_(model[4].weight)
mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard")) if "hybrid" in sys.argv else None
fully_shard(model[2], mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batches = list(texts(24, seed=rank))
for first in range(0, len(batches), steps):
    window = batches[first : first + steps]
    total = sum((labels != -100).sum() for _, labels in window)
    dist.all_reduce(total)
    for i, (rows, labels) in enumerate(window):
        model.set_requires_gradient_sync(i + 1 == len(window))
        loss = cross_entropy(model(rows).flatten(0, 1), labels.flatten(), reduction="sum") * world / total
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
