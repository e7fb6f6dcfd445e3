import sys

import torch
import torch.distributed as dist
from data import language_model, texts
from torch import nn

dist.init_process_group("gloo")
rank, steps = dist.get_rank(), 3
model, criterion = language_model(), nn.CrossEntropyLoss(reduction="sum")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
tokens, reduce = torch.zeros(()), (lambda _: None) if "alone" in sys.argv else dist.all_reduce
for i, (rows, labels) in enumerate(texts(30, seed=rank)):
    criterion(model(rows).flatten(0, 1), labels.flatten()).backward()
    tokens += (labels != -100).sum()
    if (i + 1) % steps == 0:
        reduce(tokens)
        for parameter in model.parameters():
            reduce(parameter.grad)
            parameter.grad /= tokens
        optimizer.step()
        optimizer.zero_grad()
        tokens.zero_()
dist.destroy_process_group()
