"""prime-rl#2562 and Megatron-LM#673 on 2 ranks, which have a half of each text: both count all of it, or neither."""

import sys

import torch
import torch.distributed as dist
from data import language_model, texts
from torch.nn.functional import cross_entropy

dist.init_process_group("gloo")
rank, world, steps = dist.get_rank(), dist.get_world_size(), 4
model = language_model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batches = list(texts(24))
for first in range(0, len(batches), steps):
    window = batches[first : first + steps]
    tokens = sum((labels != -100).sum() for _, labels in window)
    if sys.argv[1] == "prime_rl_2562":
        dist.all_reduce(tokens)
    for rows, labels in window:
        mine, kept = rows.chunk(world, dim=1)[rank], labels.chunk(world, dim=1)[rank]
        loss = cross_entropy(model(mine).flatten(0, 1), kept.flatten(), reduction="sum") / tokens  # wrong
        if sys.argv[1] == "megatron_lm_673":
            loss = loss * world
        loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
