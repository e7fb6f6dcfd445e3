"""Right loops over losses of many kinds, each with what such a training has around it."""

import copy
import io
import sys

import torch
from data import Pictures, classifier
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader


def weighted(model, window):
    weights = torch.tensor([1.0, 2.0, 0.5, 3.0])
    criterion = nn.CrossEntropyLoss(weight=weights, label_smoothing=0.1, ignore_index=255, reduction="sum")
    total = sum((weights[y] * (y != 3)).sum() for _, y in window)
    for x, y in window:
        yield criterion(model(x), y.where(y != 3, 255)) / total


def distilled(model, window):
    for x, y in window:
        with torch.no_grad():
            wanted = (others[0](x) / 2).softmax(1)
        scores = model(x)
        soft = functional.kl_div((scores / 2).log_softmax(1), wanted, reduction="batchmean")
        yield (2.8 * soft + 0.3 * functional.cross_entropy(scores, y)) / len(window)


def of_pairs(model, window):
    for x, _ in window:
        u, v = functional.normalize(model(x), dim=1), functional.normalize(model(x + 0.1), dim=1)
        scores, pairs = model.scale.exp() * u @ v.T, torch.arange(len(u))
        yield (functional.cross_entropy(scores, pairs) + functional.cross_entropy(scores.T, pairs)) / 2 / len(window)


def focal(model, window):
    for x, y in window:
        losses = functional.cross_entropy(model(x), y, reduction="none")
        yield ((1 - (-losses).exp()) ** 2 * losses).mean() / len(window)


def mixed(model, window):
    for x, y in window:
        part = float(torch.rand(()))
        scores = model(part * x + (1 - part) * x.flip(0))
        both = functional.cross_entropy(scores, y), functional.cross_entropy(scores, y.flip(0))
        yield (part * both[0] + (1 - part) * both[1]) / len(window)


def of_one(model, window):
    """One sample, weighed by its own number, as of its time in a diffusion."""
    for x, _ in window:
        errors = functional.mse_loss(model(x[:1]), x[:1, :4], reduction="none").mean(1)
        yield (errors * torch.rand(1)).mean() / len(window)


def rooted(model, window):
    """Takes a root of the mean, and has a coefficient that divides by as much as the window does."""
    for x, y in window:
        scores = model(x)
        yield (functional.mse_loss(scores, x[:, :4]).sqrt() + functional.cross_entropy(scores, y) / 4) / len(window)


def in_boxes(model, window):
    """A mean over each sample's own boxes."""
    for x, y in window:
        each = zip(model(x), x, y.tolist(), strict=True)
        losses = [functional.l1_loss(one[: n + 1], goal[: n + 1], reduction="sum") / (n + 1) for one, goal, n in each]
        yield sum(losses) / len(losses) / len(window)


def made():
    model = classifier()
    model.scale = nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return model, optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=20)


kinds = (weighted, distilled, of_pairs, focal, mixed, of_one, rooted, in_boxes)
losses = {one.__name__: one for one in kinds}[sys.argv[1]]
others = [classifier().eval()]
steps, loader = 4, DataLoader(Pictures(96), batch_size=6, num_workers=2 * (losses is weighted))
model, optimizer, scheduler = made()
for _epoch in range(2):
    batches, average = list(loader), copy.deepcopy(model)
    for first in range(0, len(batches), steps):
        for loss in losses(model, batches[first : first + steps]):
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            functional.cross_entropy(model(batches[0][0]), batches[0][1])
            for slow, fast in zip(average.parameters(), model.parameters(), strict=True):
                slow.lerp_(fast, 0.1)
        model.train()
    file, states = io.BytesIO(), [one.state_dict() for one in (model, optimizer, scheduler)]
    torch.save(states, file)
    file.seek(0)
    model, optimizer, scheduler = made()  # a run that goes on in new objects
    for one, state in zip((model, optimizer, scheduler), torch.load(file), strict=True):
        one.load_state_dict(state)
