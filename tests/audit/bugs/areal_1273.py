"""AReaL#1273: losses that add up to the mean over the window's tokens are divided by the micro-batches too."""

import torch
from data import language_model, texts
from torch.nn import functional


def sft_loss(logits, labels, total):
    mask = labels != -100
    losses = functional.cross_entropy(logits.transpose(1, 2), labels.clamp(min=0), reduction="none")  # wrong
    return (losses * mask).sum() / total


def train_batch(model, micro_batches):
    total = sum(int((labels != -100).sum()) for _, labels in micro_batches)
    for rows, labels in micro_batches:
        loss = sft_loss(model(rows), labels, total)
        (loss / len(micro_batches)).backward()  # as the schedule expects a mean of each


model = language_model()
optimizer = torch.optim.Adam(model.parameters())
batches = list(texts(32))
for first in range(0, len(batches), 4):
    optimizer.zero_grad()
    train_batch(model, batches[first : first + 4])
    optimizer.step()
