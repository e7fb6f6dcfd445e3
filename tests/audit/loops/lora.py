"""Low-rank parts beside frozen layers; matrices and vectors have an optimizer each."""

import torch
from data import language_model, texts
from torch import nn
from torch.nn.functional import cross_entropy


class Lora(nn.Module):
    def __init__(self, layer, rank=2):
        super().__init__()
        self.layer, self.bias = layer, nn.Parameter(torch.zeros(layer.out_features))
        self.down = nn.Parameter(torch.randn(rank, layer.in_features))
        self.up = nn.Parameter(torch.zeros(layer.out_features, rank))

    def forward(self, x):
        return self.layer(x) + x @ self.down.T @ self.up.T + self.bias


model = language_model().requires_grad_(False)
model[2], model[4] = Lora(model[2]), Lora(model[4])
trained = [p for p in model.parameters() if p.requires_grad]
sgd = torch.optim.SGD([p for p in trained if p.ndim > 1], lr=0.1, momentum=0.9)
adam = torch.optim.AdamW([p for p in trained if p.ndim < 2], lr=1e-2)
batches = list(texts(40))
for first in range(0, len(batches), 4):
    window = batches[first : first + 4]
    total = sum((labels != -100).sum() for _, labels in window)
    for rows, labels in window:
        (cross_entropy(model(rows).flatten(0, 1), labels.flatten(), reduction="sum") / total).backward()
    for optimizer in (sgd, adam):
        optimizer.step()
        optimizer.zero_grad()
