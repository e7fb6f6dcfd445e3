"""How a batch and an epoch are cut, in exact whole numbers, by the arithmetic of `windows` and `split`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...law import even_cut


def number_of(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


@dataclass(frozen=True)
class Alike:
    """Ranks with the same micro-batches, each entry as (number, samples in each)."""

    ranks: int
    samples: int
    micro_batches: tuple[tuple[int, int], ...]

    def __str__(self) -> str:
        parts = " + ".join(f"{times:,} x {size:,}" for times, size in self.micro_batches)
        return f"{number_of(self.ranks, 'rank')}: {self.samples:,}{f' = {parts}' if parts else ', dry'}"


@dataclass(frozen=True)
class Cut:
    """The samples of one update."""

    samples: int
    ranks: tuple[Alike, ...]

    def __str__(self) -> str:
        return f"{number_of(self.samples, 'sample')} ({'; '.join(map(str, self.ranks))})"


@dataclass(frozen=True)
class Tail:
    """The end of an epoch."""

    updates: int
    last: Cut
    share: float  # of a whole window's samples
    ranks_with_fewer_micro_batches: int
    dry_ranks: int


def windows_cut(steps: int, micro: int, ranks: int) -> Cut:
    return Cut(steps * micro * ranks, (Alike(ranks, steps * micro, ((steps, micro),)),))


def split_cut(batch: int, micro: int, ranks: int) -> Cut:
    alike = [Alike(times, size, tuple(even_cut(size, largest=micro))) for times, size in even_cut(batch, parts=ranks)]
    dry = ranks - sum(one.ranks for one in alike)
    return Cut(batch, (*([Alike(dry, 0, ())] if dry else []), *alike))


def tail_of_windows(epoch: int, steps: int, micro: int, ranks: int) -> Tail:
    """Rank r has samples[r::ranks], in micro-batches of which the last may be short."""
    least, with_more = divmod(epoch, ranks)
    updates = -(-(least + (with_more > 0)) // (steps * micro))
    done = (updates - 1) * steps * micro
    alike = []
    for num, of_rank in ((ranks - with_more, least - done), (with_more, least + 1 - done)):
        whole, rest = divmod(of_rank, micro)
        parts = tuple((times, size) for times, size in ((whole, micro), (1, rest)) if times and size)
        if num:
            alike.append(Alike(num, of_rank, parts))
    return _tail(updates, alike, steps * micro * ranks)


def tail_of_split(epoch: int, batch: int, micro: int, ranks: int) -> Tail:
    updates = -(-epoch // batch)
    return _tail(updates, split_cut(epoch - (updates - 1) * batch, micro, ranks).ranks, batch)


def _tail(updates: int, alike: Sequence[Alike], whole: int) -> Tail:
    nums = [sum(times for times, _ in one.micro_batches) for one in alike]
    samples = sum(one.ranks * one.samples for one in alike)
    fewer = sum(one.ranks for one, num in zip(alike, nums, strict=True) if num < max(nums))
    dry = sum(one.ranks for one in alike if not one.samples)
    return Tail(updates, Cut(samples, tuple(alike)), samples / whole, fewer, dry)
