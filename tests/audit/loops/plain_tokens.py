import torch
from data import language_model, texts
from torch.nn.functional import cross_entropy

steps, model = 4, language_model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
for _epoch in range(2):
    batches = list(texts(20))
    for first in range(0, len(batches), steps):
        window = batches[first : first + steps]
        total = sum((labels != -100).sum() for _, labels in window)
        for rows, labels in window:
            logits = model(rows)
            loss = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / total
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
