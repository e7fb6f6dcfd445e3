import sys

import torch
import torch.distributed as dist
from data import Pictures, classifier
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group("gloo")
steps, data = 4, Pictures(64)
model = classifier() if "averages" in sys.argv else DistributedDataParallel(classifier())
criterion = nn.CrossEntropyLoss()
if "compresses" in sys.argv:
    model.register_comm_hook(None, bf16_compress_hook)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))
for _epoch in range(2):
    for i, (x, y) in enumerate(loader):
        model.require_backward_grad_sync = (i + 1) % steps == 0
        loss = criterion(model(x), y) / steps
        loss.backward()
        if (i + 1) % steps == 0:
            optimizer.step()
            optimizer.zero_grad()
            for parameter in model.parameters() if "averages" in sys.argv and i % (2 * steps) > steps else ():
                dist.all_reduce(parameter.data.div_(2))
dist.destroy_process_group()
