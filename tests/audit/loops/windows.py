import sys

import torch
import torch.distributed as dist
from data import language_model, texts
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from distaccum import Accumulator, count_tokens

model, rank = language_model(), 0
if sys.argv[1] != "plain":
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DistributedDataParallel(model) if sys.argv[1] == "ddp" else fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batches = [{"rows": rows, "labels": labels} for rows, labels in texts(22 + 6 * rank, seed=rank)]
accumulator = Accumulator(model, optimizer, steps=4, count=count_tokens("labels"), max_norm=1.0)
for window in accumulator.windows(batches):
    for batch in window:
        loss = cross_entropy(model(batch["rows"]).flatten(0, 1), batch["labels"].flatten())
        window.backward(loss)
    window.step()
if dist.is_initialized():
    dist.destroy_process_group()
