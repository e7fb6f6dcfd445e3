"""The order of the samples, which depends only on the seed: the same on any number of ranks, and after a resume."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset


@dataclass(frozen=True)
class Order:
    """Decides which samples an update takes: a permutation per epoch, in slices of `batch_size`.

    >>> order = Order(num_samples=5, batch_size=2, seed=0)
    >>> order.updates_per_epoch, [len(order.of_update(update)) for update in range(4)]
    (3, [2, 2, 1, 2])
    """

    num_samples: int
    batch_size: int
    seed: int

    @property
    def updates_per_epoch(self) -> int:
        return -(-self.num_samples // self.batch_size)

    def of_update(self, update: int) -> Tensor:
        epoch, place = divmod(update, self.updates_per_epoch)
        order = _permutation(self.num_samples, self.seed * 1_000_003 + epoch)
        # The key includes the epoch, so that random draws for a sample differ between epochs.
        return epoch * self.num_samples + order[place * self.batch_size : (place + 1) * self.batch_size]


@lru_cache(maxsize=1)  # one epoch's, for all of its updates
def _permutation(number: int, seed: int) -> Tensor:
    return torch.randperm(number, generator=torch.Generator().manual_seed(seed))


def micro_batches(order: Order, first: int, updates: int, steps: int, rank: int, ranks: int) -> list[list[int]]:
    """A rank's micro-batches from update `first` to the end of its epoch or of the run, as a `batch_sampler`.

    Every update but the last of an epoch gives each rank `steps` of them, as even as possible.

    >>> [[len(one) for one in micro_batches(Order(10, 8, 0), 0, 9, 2, rank, ranks=2)] for rank in range(2)]
    [[2, 2, 1], [2, 2, 1]]
    """
    largest = -(-order.batch_size // (ranks * steps))
    parts = []
    for update in range(first, min(updates, (first // order.updates_per_epoch + 1) * order.updates_per_epoch)):
        batch = order.of_update(update)
        mine = part(batch, rank, ranks)
        number = steps if len(batch) == order.batch_size else -(-len(mine) // largest)
        parts += [part(mine, i, number).tolist() for i in range(number)]
    return parts


def part(whole: Tensor, i: int, parts: int) -> Tensor:
    """The i-th of `parts` parts, in order; their sizes differ by at most one."""
    return whole[i * len(whole) // parts : (i + 1) * len(whole) // parts]


class Keyed(Dataset[Any]):
    """Indexes `dataset` by the keys of an `Order`; its random draws depend only on seed and key.

    So a sample does not depend on the rank, the worker or the number of samples loaded before it.
    """

    def __init__(self, dataset: Any, seed: int, draws: bool) -> None:
        self.dataset, self.seed, self.draws = dataset, seed, draws

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, key: int) -> Any:
        index = key % len(self.dataset)
        if not self.draws:
            return self.dataset[index]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed * 1_000_003 + key)
            return self.dataset[index]
