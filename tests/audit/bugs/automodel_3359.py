"""Automodel#3359: the router's loss is added whole in each micro-batch, beside one that is a mean over the window."""

import torch
from data import language_model, texts
from torch import nn
from torch.nn import functional

steps, coefficient = 4, 0.01
model, router = language_model(), nn.Linear(8, 3)
optimizer = torch.optim.AdamW([*model.parameters(), *router.parameters()], lr=1e-3)
for _epoch in range(2):
    batches = list(texts(20))
    for first in range(0, len(batches), steps):
        window = batches[first : first + steps]
        num_tokens = sum((labels != -100).sum() for _, labels in window)
        for rows, labels in window:
            hidden = model[0](rows)
            load = router(hidden).softmax(-1).mean((0, 1))
            auxiliary = functional.mse_loss(load, torch.full((3,), 1 / 3))  # wrong
            loss = functional.cross_entropy(model(rows).flatten(0, 1), labels.flatten(), reduction="sum") / num_tokens
            loss = loss + coefficient * auxiliary
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
