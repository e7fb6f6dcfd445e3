"""Fast-LLM#550: gradients are kept in shards of their own, which each micro-batch overwrites."""

import torch
from data import language_model, texts
from torch.nn.functional import cross_entropy


class Shards:
    def __init__(self, parameters, world=1):
        self.parameters, self.world = list(parameters), world
        self.kept = [torch.zeros_like(p) for p in self.parameters]

    def reduce(self, accumulate):
        for shard, parameter in zip(self.kept, self.parameters, strict=True):
            if accumulate and self.world > 1:
                shard.add_(parameter.grad)
            else:
                shard.copy_(parameter.grad)
            parameter.grad = None

    def restore(self):
        for shard, parameter in zip(self.kept, self.parameters, strict=True):
            parameter.grad = shard


steps, model = 4, language_model()
optimizer, shards = torch.optim.SGD(model.parameters(), lr=0.1), Shards(model.parameters())
batches = list(texts(32))
for first in range(0, len(batches), steps):
    window = batches[first : first + steps]
    total = sum((labels != -100).sum() for _, labels in window)
    for i, (rows, labels) in enumerate(window):
        loss = cross_entropy(model(rows).flatten(0, 1), labels.flatten(), reduction="sum") / total
        loss.backward()  # wrong
        shards.reduce(accumulate=i > 0)
    shards.restore()
    optimizer.step()
