"""Two models, each on ranks of its own, as stages of a pipeline and experts are."""

import torch
import torch.distributed as dist
from data import Pictures, classifier
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

dist.init_process_group("gloo")
rank, world, steps = dist.get_rank(), dist.get_world_size(), 4
groups = [dist.new_group([*range(one, world, 2)]) for one in range(2)]
model = nn.Sequential(*classifier(), nn.Linear(4, 4)) if rank % 2 else classifier()
model = DistributedDataParallel(model, process_group=groups[rank % 2])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for i, (x, y) in enumerate(DataLoader(Pictures(64, seed=rank), batch_size=4)):
    model.require_backward_grad_sync = (i + 1) % steps == 0
    (cross_entropy(model(x), y) / steps).backward()
    if (i + 1) % steps == 0:
        optimizer.step()
        optimizer.zero_grad()
dist.destroy_process_group()
