import torch
from data import language_model, texts
from torch.nn.functional import cross_entropy

steps, model = 3, language_model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
for epoch in range(2):
    batches = list(texts(18, seed=epoch))
    for first in range(0, len(batches), steps):
        window = batches[first : first + steps]
        total = sum(int((labels != -100).sum()) for _, labels in window)
        for rows, labels in window:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                losses = cross_entropy(model(rows).flatten(0, 1).float(), labels.flatten(), reduction="none")
            scaler.scale(losses.sum() / total).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    scheduler.step()
