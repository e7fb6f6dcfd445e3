import torch
from data import Pictures, classifier
from torch import nn
from torch.utils.data import DataLoader

steps, model, criterion = 4, classifier(), nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
loader = DataLoader(Pictures(60), batch_size=6)
for _epoch in range(2):
    model.train()
    for i, (x, y) in enumerate(loader):
        length = min(steps, len(loader) - i // steps * steps)
        loss = criterion(model(x), y) / length
        loss.backward()
        if (i + 1) % steps == 0 or i + 1 == len(loader):
            optimizer.step()
            optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        print(float(criterion(model(x), y)))
