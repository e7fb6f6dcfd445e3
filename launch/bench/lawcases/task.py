"""Tasks, outcomes, and a library's cells: its documented solution of each case."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from .cases import CASES, Batch, Case, criterion, inputs, micro_batches, net_of


class Listed(BatchSampler):
    """A loader's micro-batches, of sizes known in advance."""

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__(SequentialSampler(range(sum(sizes))), max(sizes), drop_last=False)
        self._sizes = sizes

    def __iter__(self) -> Iterator[list[int]]:
        start = 0
        for size in self._sizes:
            yield list(range(start, start + size))
            start += size

    def __len__(self) -> int:
        return len(self._sizes)


class Task:
    """The net and the data that a library gets on one rank."""

    def __init__(self, case: Case, rank: int) -> None:
        self.case, self.rank, self.world = case, rank, case.world
        self.net = net_of(case)
        self._all = micro_batches(case)
        self.mine = [batch for batch, (_, owner) in zip(self._all, case.owners(), strict=True) if owner == rank]

    def loader(self) -> DataLoader[Batch]:
        """A loader for all ranks together; the library gives each rank its part."""
        rows = [{name: batch[name][i] for name in batch} for batch in self._all for i in range(len(batch["x"]))]
        return DataLoader(rows, batch_sampler=Listed([len(batch["x"]) for batch in self._all]))

    def my_loader(self) -> DataLoader[Batch]:
        """A loader of this rank's micro-batches, unchanged."""
        return DataLoader(self.mine, batch_size=None)

    def loss(self, model: Any, batch: Batch) -> Tensor:
        return criterion(self.case.kind, model(inputs(self.case.kind, batch)), batch)

    def sgd(self, parameters: Any = None) -> SGD:
        """SGD whose change of the weights is the gradient; with momentum even a second step by zeros shows."""
        momentum = 0.9 if self.case.key == "zero" else 0.0
        return SGD(self.net.parameters() if parameters is None else parameters, lr=1.0, momentum=momentum)


@dataclass
class Seen:
    """Records all weights at the start and after each step."""

    module: nn.Module
    weights: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.take()

    def after(self, *optimizers: Optimizer) -> Seen:
        """Records after each step of the last of these optimizers."""
        optimizers[-1].register_step_post_hook(self.take)
        return self

    def take(self, *_: Any) -> None:
        self.weights.append(torch.cat([p.detach().flatten() for p in self.module.parameters()]).clone())


@dataclass
class Outcome:
    weights: list[Tensor]
    also: float | bool | None = None


Way = Callable[[Task], Outcome]
WEIGHTS = frozenset({"tokens", "tokens2", "zero", "aux"})  # cases with their own denominators


@dataclass
class Library:
    """A library that needs `packages`, and computes in `dtype` if the case does not say.

    It has no feature for the cases in `lacks`: the result of its ordinary use is shown, but does not count as wrong.
    """

    name: str
    packages: tuple[str, ...] = ()
    dtype: torch.dtype = torch.float64
    cells: dict[str, Way] = field(default_factory=dict)
    absent: set[str] = field(default_factory=set)  # no feature and no recipe; other cases are outside its purpose
    lacks: frozenset[str] = frozenset()

    def cell(self, *keys: str) -> Callable[[Any], Any]:
        """Registers a function for these cases."""

        def register(way: Way) -> Way:
            for key in keys:
                assert key in CASES and key not in self.cells
                self.cells[key] = way
            return way

        return register
