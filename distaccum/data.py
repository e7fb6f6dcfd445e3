"""What data of very different lengths need: padding that is cut off, and updates dealt out to ranks by cost."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Sampler

from .law.batches import map_tensors

Batch = TypeVar("Batch")


def trim_padding(mask: str = "attention_mask", *, multiple_of: int = 1, left: bool = False) -> Callable[[Batch], Batch]:
    """A function that cuts off the columns in which no row of a micro-batch has anything, for `trim=`.

    Every tensor of two or more dimensions whose first two are the mask's is cut, as a view: `input_ids`,
    `attention_mask`, `labels` and what else there is. Columns on the left are cut where the batch has `position_ids` of
    that shape: without them a model numbers the columns from the first, and would compute something else.

    Args:
        mask: The key or attribute of the tensor that is 0 where there is padding, of shape (rows, columns).
        multiple_of: Leaves as many columns as make a multiple of this, which some kernels like.
        left: Cuts on the left too where there are no `position_ids`, for a model that makes them of the mask, or whose
            positions are relative.

    Example:
        >>> import torch
        >>> batch = {"input_ids": torch.tensor([[5, 6, 0, 0]]), "attention_mask": torch.tensor([[1, 1, 0, 0]])}
        >>> trim_padding()(batch)["input_ids"].tolist()
        [[5, 6]]
    """

    def trim(batch: Batch) -> Batch:
        found, positions = (
            batch.get(name) if isinstance(batch, Mapping) else getattr(batch, name, None)
            for name in (mask, "position_ids")
        )
        if not isinstance(found, Tensor) or found.ndim != 2:
            raise TypeError(
                f"trim_padding({mask!r}) found {type(found).__name__} in a {type(batch).__name__}, expected a tensor "
                "of shape (rows, columns) that is 0 where there is padding; name it"
            )
        used = found.ne(0).any(0).nonzero().flatten()
        first, last = (int(used[0]), int(used[-1]) + 1) if len(used) else (0, 1)
        if not left and not (isinstance(positions, Tensor) and positions.shape == found.shape):
            first = 0
        wanted = min(-(-(last - first) // multiple_of) * multiple_of, found.shape[1])
        first = min(first, found.shape[1] - wanted)

        def cut(tensor: Tensor) -> Tensor:
            has_columns = tensor.ndim > 1 and tensor.shape[:2] == found.shape
            return tensor[:, first : first + wanted] if has_columns else tensor

        trimmed: Batch = map_tensors(batch, cut)
        return trimmed

    return trim


class DealtSampler(Sampler[list[int]]):
    """Deals the samples of each update out to the ranks so that these cost alike; for a DataLoader's `batch_sampler`.

    Each list holds this rank's samples of one update. Ranks may get different numbers of them, which windows weigh by
    their counts. The order within a list is the data's. A last update of fewer samples than ranks joins the one before.

    Args:
        costs: What each sample of the dataset costs, such as its tokens.
        batch_size: Samples per update over all ranks.
        rank: Of this process among those that have samples of their own; by default its rank in the job.
        ranks: Their number; by default the job's.
        shuffle: Draws another order in each epoch; call `set_epoch`.
        seed: Of that order, the same on all ranks.
        drop_last: Leaves out a last update that is not full.

    Raises:
        ValueError: Fewer samples than ranks, or a rank that is not one of them.

    Example:
        >>> list(DealtSampler([9, 1, 2, 3, 3, 1], batch_size=6, rank=0, ranks=2, shuffle=False))
        [[0, 5]]
        >>> list(DealtSampler([9, 1, 2, 3, 3, 1], batch_size=6, rank=1, ranks=2, shuffle=False))
        [[1, 2, 3, 4]]
    """

    def __init__(
        self,
        costs: Sequence[float],
        batch_size: int,
        *,
        rank: int | None = None,
        ranks: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        is_job = dist.is_available() and dist.is_initialized()
        self.ranks = ranks if ranks is not None else dist.get_world_size() if is_job else 1
        self.rank = rank if rank is not None else dist.get_rank() if is_job else 0
        self.costs, self.batch_size = [float(cost) for cost in costs], operator.index(batch_size)
        self.shuffle, self.seed, self.drop_last = shuffle, seed, drop_last
        self.epoch = self._done = self._begin = 0
        if not 0 <= self.rank < self.ranks:
            raise ValueError(f"rank={self.rank} of ranks={self.ranks}, expected one from 0 to {self.ranks - 1}")
        if self.batch_size < self.ranks or len(self.costs) < self.ranks:
            raise ValueError(
                f"batch_size={self.batch_size} and {len(self.costs)} samples for {self.ranks} ranks, expected at least "
                "one sample for each rank in an update"
            )

    def _updates(self) -> list[range]:
        """The places of each update in the epoch's order."""
        total, size = len(self.costs), self.batch_size
        starts = list(range(0, total, size))
        if total % size and (self.drop_last or total % size < self.ranks) and len(starts) > 1:
            starts.pop()
            return [range(at, at + size) for at in starts[:-1]] + [
                range(starts[-1], starts[-1] + size if self.drop_last else total)
            ]
        return [range(at, min(at + size, total)) for at in starts]

    def __len__(self) -> int:
        return len(self._updates())

    def __iter__(self) -> Iterator[list[int]]:
        order = list(range(len(self.costs)))
        if self.shuffle:
            order = torch.randperm(len(order), generator=torch.Generator().manual_seed(self.seed + self.epoch)).tolist()
        begin, self._begin = self._begin, 0
        self._done = begin
        for places in self._updates()[begin:]:
            self._done += 1
            yield self._own([order[place] for place in places])
        self._done = 0

    def _own(self, samples: list[int]) -> list[int]:
        """The costliest first, each to the rank with the least so far, and one to each rank at least."""
        loads = [(0.0, 0, rank) for rank in range(self.ranks)]
        mine = []
        for sample in sorted(samples, key=lambda one: (-self.costs[one], one)):
            load, number, rank = min(loads, key=lambda one: (one[0], one[1], one[2]))
            loads[rank] = load + self.costs[sample], number + 1, rank
            if rank == self.rank:
                mine.append(sample)
        return sorted(mine)

    def set_epoch(self, epoch: int) -> None:
        """Chooses the order of this epoch; the same on all ranks.

        Args:
            epoch: Its number, from 0.
        """
        self.epoch = epoch

    def state_dict(self) -> dict[str, int]:
        """Where the epoch stands, in updates that were drawn. Workers of a DataLoader draw ahead: save between epochs
        then, or with a loader that has a state of its own.
        """
        return {"epoch": self.epoch, "done": self._done, "seed": self.seed}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """The next iteration goes on from there.

        Args:
            state: What `state_dict` gave.
        """
        self.epoch, self._begin, self.seed = state["epoch"], state["done"], state["seed"]
