"""Loaders of many kinds: each micro-batch is used once, in order, and the epoch ends."""

from __future__ import annotations

from itertools import count, islice

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.utils.data import DataLoader, Dataset, IterableDataset

from distaccum import Accumulator

NUMBERS = [1.0, 2.0, 3.0, 4.0, 5.0]
WINDOWS = [[1.0, 2.0], [3.0, 4.0], [5.0]]


def batches():
    return [torch.tensor([[number]]) for number in NUMBERS]


class Restarting:
    """`iter()` restarts it and returns the loader itself, as with DeepSpeed's loader."""

    def __iter__(self):
        self.rest = iter(batches())
        return self

    def __next__(self):
        return next(self.rest)


class SizedRestarting(Restarting):
    def __len__(self):
        return len(NUMBERS)


class OneShot:
    """Is its own iterator, and exhausted after one epoch."""

    def __init__(self):
        self.rest = iter(batches())

    def __iter__(self):
        return self

    def __next__(self):
        return next(self.rest)


class Indexed:
    """Has only `__getitem__`."""

    def __getitem__(self, i):
        return batches()[i]


class SizedIndexed(Indexed):
    def __len__(self):
        return len(NUMBERS)


class Wrapping:
    """Returns another loader's iterator, as many wrappers do."""

    def __init__(self, loader):
        self.loader = loader

    def __iter__(self):
        return iter(self.loader)


class Samples(Dataset):
    def __len__(self):
        return len(NUMBERS)

    def __getitem__(self, i):
        return torch.tensor([NUMBERS[i]])


class Streamed(IterableDataset):
    def __iter__(self):
        return (torch.tensor([number]) for number in NUMBERS)


def generator():
    yield from batches()


def with_workers(dataset):
    return DataLoader(dataset, batch_size=1, num_workers=1, persistent_workers=True, multiprocessing_context="fork")


# How the loader is made, and whether it has a second epoch.
LOADERS = {
    "list": (batches, True),
    "restarting, returns itself": (Restarting, True),
    "the same with a length": (SizedRestarting, True),
    "around one that restarts": (lambda: Wrapping(Restarting()), True),
    "one-shot": (OneShot, False),
    "generator": (generator, False),
    "__getitem__ alone": (Indexed, True),
    "__getitem__ and a length": (SizedIndexed, True),
    "DataLoader": (lambda: DataLoader(Samples(), batch_size=1), True),
    "IterableDataset": (lambda: DataLoader(Streamed(), batch_size=1), True),
    "persistent workers": (lambda: with_workers(Samples()), True),
    "IterableDataset, persistent workers": (lambda: with_workers(Streamed()), True),
}


def accumulator_of(model, lookahead=True):
    return Accumulator(model, SGD(model.parameters(), lr=0.0), steps=2, lookahead=lookahead)


def seen_in(windows, model):
    """The micro-batches of each window; the gradient must be their mean."""
    epoch = []
    for window in windows:
        seen = []
        for micro_batch in window:
            seen.append(micro_batch.item())
            window.backward(model(micro_batch).mean())
        assert model.weight.grad.item() == pytest.approx(sum(seen) / len(seen), rel=1e-6)
        window.step()
        epoch.append(seen)
    return epoch


@pytest.mark.parametrize("lookahead", [True, False], ids=["planned", "streamed"])
@pytest.mark.parametrize("name", LOADERS)
def test_micro_batches_are_used_once_and_the_epoch_ends(name, lookahead):
    make, has_another_epoch = LOADERS[name]
    loader, model = make(), nn.Linear(1, 1, bias=False)
    accumulator = accumulator_of(model, lookahead)
    for expected in (WINDOWS, WINDOWS if has_another_epoch else []):
        # One window more than expected: the tested fault repeated windows forever.
        assert seen_in(islice(accumulator.windows(loader), len(WINDOWS) + 1), model) == expected


@pytest.mark.parametrize("lookahead", [True, False], ids=["planned", "streamed"])
def test_endless_loader_continues_until_the_caller_leaves(lookahead):
    class Endless(Restarting):
        def __iter__(self):
            self.rest = (torch.tensor([[float(number)]]) for number in count(1))
            return self

    model = nn.Linear(1, 1, bias=False)
    windows = accumulator_of(model, lookahead).windows(Endless())
    assert seen_in(islice(windows, 3), model) == [[1, 2], [3, 4], [5, 6]]
