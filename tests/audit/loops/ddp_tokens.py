from contextlib import nullcontext

import torch
import torch.distributed as dist
from data import language_model, texts
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, world, steps = dist.get_rank(), dist.get_world_size(), 4
model = DistributedDataParallel(language_model())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batches = list(texts(24, seed=rank))
for first in range(0, len(batches), steps):
    window = batches[first : first + steps]
    total = sum((labels != -100).sum() for _, labels in window)
    dist.all_reduce(total)
    for i, (rows, labels) in enumerate(window):
        with nullcontext() if i + 1 == len(window) else model.no_sync():
            logits = model(rows)
            loss = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
            loss = loss * world / total
            loss.backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
