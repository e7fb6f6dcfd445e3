"""As Accelerate's guide says for tokens."""

from contextlib import nullcontext

import torch
from accelerate import Accelerator
from data import Texts, language_model
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

steps = 4
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps)
model = language_model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
loader = DataLoader(Texts(32), batch_size=2)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
batches = list(loader)
for first in range(0, len(batches), steps):
    window = batches[first : first + steps]
    total = accelerator.gather(torch.tensor([sum(int((labels != -100).sum()) for _, labels in window)])).sum().item()
    for i, (rows, labels) in enumerate(window):
        with nullcontext() if i + 1 == len(window) else accelerator.no_sync(model):
            accelerator.gradient_state._set_sync_gradients(i + 1 == len(window))
            loss = cross_entropy(model(rows).flatten(0, 1), labels.flatten(), reduction="sum")
            loss = loss * steps * accelerator.num_processes / total
            accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
accelerator.end_training()
