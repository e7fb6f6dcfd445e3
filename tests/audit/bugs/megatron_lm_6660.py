"""Megatron-LM#6660: a buffer whose group has one rank is added to itself, so that it doubles in each micro-batch."""

import torch
from data import language_model, texts
from torch.nn.functional import cross_entropy


def reduce_scatter(buffer, world=1):
    return buffer if world == 1 else buffer.clone()


def finish_micro_batch(parameters):
    for parameter in parameters:
        shard = reduce_scatter(parameter.grad)
        parameter.grad += shard  # the same memory


steps, model = 4, language_model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
batches = list(texts(32))
for first in range(0, len(batches), steps):
    window = batches[first : first + steps]
    total = sum((labels != -100).sum() for _, labels in window)
    for rows, labels in window:
        loss = cross_entropy(model(rows).flatten(0, 1), labels.flatten(), reduction="sum") / total
        loss.backward()  # wrong
        finish_micro_batch(model.parameters())
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
