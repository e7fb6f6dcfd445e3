"""A sampler that repeats samples on 2 ranks, so that these count twice."""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from data import Pictures, classifier
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

dist.init_process_group("gloo")
data, steps, criterion = Pictures(61), 2, nn.CrossEntropyLoss(reduction="sum")
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=8, sampler=sampler)
model = DistributedDataParallel(classifier())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    sampler.set_epoch(epoch)
    batches = list(loader)  # wrong
    for first in range(0, len(batches), steps):
        window = batches[first : first + steps]
        total = sum(len(y) for _, y in window)
        for i, (x, y) in enumerate(window):
            with nullcontext() if i + 1 == len(window) else model.no_sync():
                loss = criterion(model(x), y) / total
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
dist.destroy_process_group()
