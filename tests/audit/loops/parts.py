"""Tied weights, frozen parameters, checkpointing, two losses, a moving average, evaluation within a window."""

import copy

import torch
from data import language_model, texts
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.checkpoint import checkpoint

steps, trunk = 2, language_model()
head = nn.Linear(8, 12, bias=False)
head.weight = trunk[0].weight
trunk[2].requires_grad_(False)
model = nn.ModuleDict({"trunk": trunk, "head": head})
average = copy.deepcopy(model)
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
batches = list(texts(16))
for first in range(0, len(batches), steps):
    window = batches[first : first + steps]
    total = sum((labels != -100).sum() for _, labels in window)
    for rows, labels in window:
        logits = checkpoint(trunk, rows, use_reentrant=False)
        words = cross_entropy(logits.transpose(1, 2), labels, reduction="sum", label_smoothing=0.1) / total
        shape = mse_loss(head(trunk[0](rows)), torch.zeros(*rows.shape, 12)) * 0.01 / len(window)
        (words + shape).backward()
        with torch.no_grad():
            cross_entropy(trunk(rows).transpose(1, 2), labels)
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        for slow, fast in zip(average.parameters(), model.parameters(), strict=True):
            slow.lerp_(fast, 0.1)
