import torch
from data import Pictures, classifier
from torch import nn
from torch.utils.data import DataLoader

model, criterion, steps = classifier(), nn.MSELoss(), 3
compiled = torch.compile(model, backend="aot_eager")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for i, (x, _) in enumerate(DataLoader(Pictures(36), batch_size=3)):
    (criterion(compiled(x), torch.zeros(len(x), 4)) / steps).backward()
    if i % steps == steps - 1:
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
