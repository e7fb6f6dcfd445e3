"""Right loops that do more with gradients than to add them up, or that clear, skip and schedule as they mean to."""

import copy
import sys

import torch
from data import Pictures, classifier
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

who, steps, model, criterion = sys.argv[1], 4, classifier(), nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
parameters = list(model.parameters())


def backward(x, y, divisor=1):
    (criterion(model(x), y) / divisor).backward()


def perturbs(x, y):
    """Steps with the gradient where the first one leads (SAM)."""
    backward(x, y)
    before = copy.deepcopy(model.state_dict())
    for parameter in parameters:
        parameter.data.add_(parameter.grad, alpha=0.05)
    optimizer.zero_grad()
    backward(x, y)
    model.load_state_dict(before)
    optimizer.step()


def attacks(x, y):
    """Goes backward for inputs, and clears by hand what parameters got."""
    for _ in range(3):
        x = x.detach().requires_grad_()
        criterion(model(x), y).backward()
        x = x + 0.1 * x.grad.sign()
        for parameter in parameters:
            parameter.grad = None
    backward(x.detach(), y)
    optimizer.step()


def projects(x, y):
    """Takes from each task's gradient what another's is against (PCGrad)."""
    given = []
    for loss in (criterion(model(x), y), functional.mse_loss(model(x).sum(1), x.sum(1))):
        optimizer.zero_grad()
        loss.backward()
        given.append(torch.cat([parameter.grad.flatten() for parameter in parameters]))
    one, other = given
    merged = one + other - min(0, float(one @ other)) * (one / one.norm() ** 2 + other / other.norm() ** 2)
    sizes = [parameter.numel() for parameter in parameters]
    for parameter, part in zip(parameters, merged.split(sizes), strict=True):
        parameter.grad = part.view_as(parameter)
    optimizer.step()


def searches(x, y):
    def closure():
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        return loss

    optimizer.step(closure)


def plays(x, y):
    """Goes backward for real samples and for fake ones by the same line (a GAN's judge)."""
    for target in (torch.ones(len(x)), torch.zeros(len(x))):
        functional.binary_cross_entropy_with_logits(model(x + target[0])[:, 0], target).backward()
    optimizer.step()


def alternates(x, y):
    """Steps another optimizer each time, and clears both."""
    for one in halves:
        one.zero_grad()
    backward(x, y)
    halves[0].step()
    halves.reverse()


def hides(x, y):
    """Clips the gradient of each sample, and steps with their noisy mean (DP-SGD)."""
    given = [torch.zeros_like(parameter) for parameter in parameters]
    for one, target in zip(x, y, strict=True):
        optimizer.zero_grad()
        backward(one[None], target[None])
        nn.utils.clip_grad_norm_(parameters, 0.1)
        given = [more + parameter.grad for more, parameter in zip(given, parameters, strict=True)]
    for parameter, whole in zip(parameters, given, strict=True):
        parameter.grad = (whole + 0.01 * torch.randn_like(whole)) / len(x)
    optimizer.step()


def evens(x, y):
    """Scales the gradient of a short window, of which the first comes after the first sixteen."""
    lengths.append(2 if len(lengths) == 18 else 4)
    for _ in range(lengths[-1]):
        backward(x, y, 4)
    for parameter in parameters:
        parameter.grad *= 4 / lengths[-1]
    optimizer.step()


def unrolls(x, _):
    """Goes backward after each piece of a row, one after the other in time."""
    state = None
    for piece in x.split(3, dim=1):
        state = cell(piece, state)
        criterion(state, (4 * piece[:, 0]).long().clamp(max=3)).backward()
        state = state.detach()
    its.step()
    its.zero_grad()


cell = nn.GRUCell(3, 4)
its = torch.optim.SGD(cell.parameters(), lr=0.1)
lengths, halves = [], [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model[0], model[2])]
loader = DataLoader(Pictures(80 if who == "carries" else 96), batch_size=4)
schedules = [torch.optim.lr_scheduler.StepLR(optimizer, num) for num in (2, 3)]
if callable(globals().get(who)):
    optimizer = torch.optim.LBFGS(parameters, max_iter=3) if who == "searches" else optimizer
    for x, y in loader:
        optimizer.zero_grad()
        globals()[who](x, y)
else:
    for x, y in list(loader)[:2]:  # to warm up
        backward(x, y, steps)
        optimizer.zero_grad()
    micro_step = 0
    for _epoch in range(2):
        for i, (x, y) in enumerate(loader):
            if who == "skips" and i == 9:
                micro_step += 1
                continue
            backward(x, y, steps)
            micro_step += 1
            if micro_step % steps == 0:
                optimizer.step()
                optimizer.zero_grad()
                for schedule in schedules if who == "schedules" else []:
                    schedule.step()
        if who == "carries":
            schedules[0].step()
