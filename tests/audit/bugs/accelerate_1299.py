"""accelerate#1299: gradients are cleared before the last micro-step of a window, in which alone `zero_grad` acts."""

import torch
from accelerate import Accelerator
from data import Pictures, classifier
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
model = classifier()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(Pictures(64), batch_size=4, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for _epoch in range(2):
    model.train()
    for x, y in loader:
        with accelerator.accumulate(model):
            optimizer.zero_grad()  # wrong
            loss = cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
