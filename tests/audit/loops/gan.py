import torch
from data import Pictures
from torch import nn
from torch.utils.data import DataLoader

torch.manual_seed(2)
maker, judge = nn.Linear(4, 12), nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 1))
of_maker, of_judge = (torch.optim.Adam(one.parameters(), lr=1e-3) for one in (maker, judge))
criterion, steps = nn.BCEWithLogitsLoss(), 2
batches = [x for x, _ in DataLoader(Pictures(48), batch_size=6)]
for first in range(0, len(batches), steps):
    window = batches[first : first + steps]
    judge.zero_grad()
    for x in window:
        fake = maker(torch.randn(len(x), 4))
        real = criterion(judge(x), torch.ones(len(x), 1))
        made = criterion(judge(fake.detach()), torch.zeros(len(x), 1))
        ((real + made) * 0.5 / len(window)).backward()
    of_judge.step()
    maker.zero_grad()
    for x in window:
        fake = maker(torch.randn(len(x), 4))
        (criterion(judge(fake), torch.ones(len(x), 1)) / len(window)).backward()
    of_maker.step()
