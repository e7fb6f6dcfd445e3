"""openWakeWord#316: micro-batches that are too small wait for others, but only the last one goes backward."""

import torch
from data import Pictures
from torch import nn
from torch.utils.data import DataLoader

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 1), nn.Sigmoid())
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
accumulation_steps, accumulated = 1, 0
model.train()
for x, y in DataLoader(Pictures(240), batch_size=10, shuffle=True):
    optimizer.zero_grad()
    predictions, y = model(x), (y == 0).float()[:, None]
    hard = ((predictions >= 0.45) | (y == 1)).squeeze(1)  # those of high loss
    predictions, y = predictions[hard], y[hard]
    if len(predictions):
        loss = nn.functional.binary_cross_entropy(predictions, y)  # wrong
        loss = loss / accumulation_steps
        accumulated += len(predictions)
        if accumulated < 16:
            accumulation_steps += 1
        else:
            loss.backward()
            optimizer.step()
            accumulation_steps, accumulated = 1, 0
