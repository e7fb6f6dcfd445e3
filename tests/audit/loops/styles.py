"""Five more ways to accumulate tokens rightly by hand."""

import sys

import torch
from data import language_model, texts
from torch import nn
from torch.nn.functional import cross_entropy

style, model = sys.argv[1], language_model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
batches, steps = list(texts(44)), 4
for first in range(0, len(batches), steps):
    window = batches[first : first + steps]
    total = sum((labels != -100).sum() for _, labels in window)
    for rows, labels in window:
        logits, tokens = model(rows).transpose(1, 2), (labels != -100).sum()
        if style == "divides at the step":
            cross_entropy(logits, labels, reduction="sum").backward()
        elif style == "times its tokens":
            (cross_entropy(logits, labels) * tokens / total).backward()
        elif style == "masks":
            losses = cross_entropy(logits, labels.clamp(min=0), reduction="none")
            ((losses * (labels != -100)).sum() / total).backward()
        elif style == "scales gradients":
            (nn.CrossEntropyLoss()(logits, labels) * tokens).backward()
        else:
            nn.NLLLoss(reduction="sum")(logits.log_softmax(1), labels).div(total).backward()
    if style in ("divides at the step", "scales gradients"):
        for parameter in model.parameters():
            parameter.grad /= total
    optimizer.step()
    optimizer.zero_grad()
