"""Ledger: the factor of each loss, and the losses for the record. The only place that scales a loss."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from ..engines import Engine
from ..law import Reduction, share_of
from ..norms import number_of
from .seeds import Seeds
from .source import Counts

Loss = Tensor | float  # as the record has it: a number where it is on the host, which nobody waits for
Entry = Sequence[tuple[str, float, Loss]]  # name, share, loss
Weighed = tuple[Sequence[Tensor], Sequence[Tensor], Entry]  # losses, seeds, entry


class Ledger(ABC):
    """Abstract. Each loss goes backward with its share as the seed, so that no factor enters the graph."""

    noun: ClassVar[str]  # what `first_nonfinite` looks at

    def __init__(
        self,
        engine: Engine,
        reductions: Mapping[str, Reduction],
        totals: Mapping[str, float],
        device: torch.device,
        seeds: Seeds,
    ) -> None:
        self._names, self._reductions, self._totals = tuple(reductions), reductions, totals
        self.has_several = len(self._names) > 1
        self._engine, self._device, self.seeds = engine, device, seeds
        self.scale_stamp: object = None  # of the scale that the seeds have
        self._wide = torch.float32 if device.type == "mps" else torch.float64  # which Apple's GPUs lack
        self._record: list[tuple[int, str, float, Loss]] = []  # number of the micro-batch, name, share, loss
        self._given: set[str] = set()  # names that this micro-batch's backwards were given

    def begin(self) -> None:
        self.scale_stamp = self.seeds.scale_stamp(self._device)

    def _shares_of(self, counts: Counts) -> Sequence[float | None]:
        """The factor of each named loss of a micro-batch; None: the term is left out."""
        has_parts, divisor = self._engine.peers.has_parts, self._engine.divisor
        found: list[float | None] = []
        for name, n in zip(self._names, counts, strict=True):
            total = self._totals[name]
            # Ranks that have parts of the same samples run each backward together, also where nothing counts.
            runs = n or (has_parts and total)
            found.append(share_of(self._reductions[name], n, total, divisor) if runs else None)
        return found

    def weigh(
        self, counts: Counts, is_stand_in: bool, loss: Tensor | None, named: Mapping[str, Tensor | None]
    ) -> Weighed:
        """Losses and seeds for a backward, and what `note` is given once it ended."""
        shares = self._shares_of(counts)
        if is_stand_in:
            shares = [None if share is None else 0.0 for share in shares]
        if not named and not self.has_several:
            share = shares[0] or 0.0
            one, seed = self.seeds.weigh(loss, share)
            return (one,), (seed,), ((self._names[0], share, _recorded(one)),) if share else ()
        given = self._by_name(loss, named)
        # What has no count is left out, not multiplied by 0: the mean over nothing is NaN, and 0 times NaN is too.
        terms = [
            (name, share, *self.seeds.weigh(given[name], share))
            for name, share in zip(self._names, shares, strict=True)
            if name in given and share is not None
        ]
        self._given.update(given)
        entry = [(name, share, _recorded(one)) for name, share, one, _ in terms if share]
        return [one for *_, one, _ in terms], [seed for *_, seed in terms], entry

    def _by_name(self, loss: Tensor | None, named: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
        if loss is not None:  # positional, or a name that happens to be "loss"
            if "loss" not in self._names and (self.has_several or named):
                raise ValueError(
                    f"backward() got a loss without a name, expected one for each of {list(self._names)}: "
                    f"window.backward({', '.join(f'{name}=...' for name in self._names)})"
                )
            named = {"loss" if "loss" in self._names else self._names[0]: loss, **named}
        given = {name: value for name, value in named.items() if value is not None}
        unknown = sorted(given.keys() - set(self._names))
        if unknown or not given:
            raise ValueError(f"backward() got {unknown or 'no loss'}, expected losses by name, of {list(self._names)}")
        return given

    def note(self, entry: Entry, number: int) -> None:
        """Keeps the losses of micro-batch `number` for the record."""
        for name, share, loss in entry:
            self._record.append((number, name, share, loss))

    def expect_none(self) -> None:
        """The losses of this micro-batch are another rank's."""
        self._given.update(self._names)

    def missing(self, counts: Counts) -> list[str]:
        """Names with a count in the micro-batch that ended, of which no backward got a loss."""
        given, self._given = self._given, set()
        return [name for name, n in zip(self._names, counts, strict=True) if n and name not in given]

    @abstractmethod
    def sums(self) -> Tensor:
        """The losses by name, weighted, on the device: what the ranks add up for the record."""

    def numbers(self) -> list[float] | None:
        """The same, where all losses are on the host."""
        return None

    @abstractmethod
    def first_nonfinite(self) -> tuple[int, float] | None:
        """The number of the first micro-batch with one that is not finite, and its value."""

    def clear(self) -> None:
        """Frees the losses."""
        self._record = []

    def _first_nonfinite(self, values: Sequence[tuple[int, Loss]]) -> tuple[int, float] | None:
        """In one wait for the device."""
        if not values:
            return None
        read = torch.stack([self._on_device(value) for _, value in values]).tolist()
        found = [(number, value) for (number, _), value in zip(values, read, strict=True) if not math.isfinite(value)]
        return min(found, key=lambda one: one[0], default=None)

    def _on_device(self, loss: Loss) -> Tensor:
        if isinstance(loss, Tensor):
            return loss.detach().to(self._device, self._wide)
        return torch.full((), loss, dtype=self._wide, device=self._device)


@final
class WeightedLedger(Ledger):
    """Losses that add up to the window's."""

    noun = "loss"

    def numbers(self) -> list[float] | None:
        totals = dict.fromkeys(self._names, 0.0)
        for _, name, share, loss in self._record:
            if isinstance(loss, Tensor):
                return None
            totals[name] += share * loss
        return list(totals.values())

    def sums(self) -> Tensor:
        numbers = self.numbers()
        if numbers is not None:
            return torch.stack([self._on_device(number) for number in numbers])
        return torch.stack([self._sum_of(name) for name in self._names])

    def _sum_of(self, name: str) -> Tensor:
        found = [(share, loss) for _, of, share, loss in self._record if of == name]
        if not found:
            return self._on_device(0.0)
        losses = [one if isinstance(one, Tensor) else self._on_device(one) for _, one in found]
        first = found[0][0]
        if all(share == first for share, _ in found):
            total = torch.stack(losses).sum(dtype=self._wide) * first
        else:  # a kernel each, and no shares that are sent to the device
            total = torch.stack([one * share for one, (share, _) in zip(losses, found, strict=True)]).sum(
                dtype=self._wide
            )
        return total.to(self._device)

    def first_nonfinite(self) -> tuple[int, float] | None:
        return self._first_nonfinite([(number, loss) for number, _, _, loss in self._record])


@final
class PairsLedger(Ledger):
    """One loss over all pairs of a window; what goes backward is each micro-batch's part of its gradient."""

    noun = "largest representation"
    loss: Tensor | None = None  # the same on all ranks
    part = 1.0  # of it that this rank adds to the record

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.largest: list[tuple[int, Tensor]] = []  # the number of a micro-batch, its largest representation

    def sums(self) -> Tensor:
        assert self.loss is not None
        return self.loss.to(self._device, self._wide).reshape(1) * self.part

    def first_nonfinite(self) -> tuple[int, float] | None:
        return self._first_nonfinite(self.largest)


def _recorded(loss: Tensor) -> Loss:
    """The record has its own numbers: what the caller does to the loss in place, also in a hook, is no part of it."""
    if type(loss) is not Tensor or not loss.is_cpu:
        return loss.detach().clone()
    number: float = number_of(loss)
    return number
