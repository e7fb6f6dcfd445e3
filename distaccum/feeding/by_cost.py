"""Micro-batches by the cost of rows of different lengths, without the padding that all their rows share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal, TypeVar

from torch import Tensor

from ..batch import Count, Names, cut_batch, map_tensors, pick_rows
from ..law import whole_number
from ..text import Once, a

# Maps a batch to one number, or to one for each row.
Cost = Count | Callable[[Any], Sequence[float]]


@dataclass(frozen=True)
class ByCost:
    """A `micro_batch_size` by cost, for rows of different lengths: rows of similar cost go together.

    In `windows()` each batch of the loader is an update, and is cut.

    Args:
        most: The most that one forward on one rank may cost. A micro-batch costs its number of rows times the cost of
            the costliest, because padding is computed too. `"auto"` works as for `micro_batch_size`.
        cost: The cost of each row: `count_tokens`, or a callable that maps a batch to one number per row, or to one
            number, in which case it is called with each row.
        trim: A callable that takes each micro-batch and returns it without the padding that all its rows share.
    """

    most: int | Literal["auto"]
    _: KW_ONLY
    cost: Cost
    trim: Callable[[Any], Any] | None = None

    def __post_init__(self) -> None:
        if self.most != "auto":
            object.__setattr__(self, "most", whole_number("most", self.most, ", or 'auto'"))
        for name, value in (("cost", self.cost), ("trim", self.trim)):
            if not callable(value) and (name, value) != ("trim", None):
                raise TypeError(f"{name}={value!r} is {a(type(value).__name__)}, expected a callable of a batch")

    def cut(
        self, batch: Any, length: int, limit: int | None, parts: int, whole: Names, once: Once, *, in_order: bool
    ) -> tuple[list[Any], list[int], list[int]]:
        """Cuts the `length` rows of a `batch`, but not its `whole` entries, into micro-batches within the `limit`.

        Makes at least `parts` of them if there are as many rows; `in_order` keeps the rows in order. Returns the
        micro-batches, their numbers of rows and their costs.
        """
        costs = _costs_of_rows(self.cost, batch, length, whole)
        largest = max(costs, default=0)
        at_once = len(costs) * largest
        groups = group_by_cost(costs, min(limit or max(1, at_once), max(1, -(-at_once // parts))), in_order=in_order)
        micro_batches = list(pick_rows(batch, groups, length, whole)) if groups else []
        if self.most != "auto" and largest > self.most:
            message = f"a row costs {largest}, more than the {self.most} of ByCost; such rows go alone"
            once("cost", message, on_each_rank=True)
        if self.trim is not None:
            micro_batches = list(map(self.trim, micro_batches))
        return micro_batches, list(map(len, groups)), [cost_of_group(costs, rows) for rows in groups]


def group_by_cost(costs: Sequence[int], limit: int, *, in_order: bool = False) -> list[list[int]]:
    """Groups rows up to a cost of `limit`; a row that costs more is alone.

    Rows of similar cost go together, in the fewest groups, the costliest last; with `in_order`, neighbours go together,
    in more groups. A group costs what it computes with its rows padded: its number of rows times the costliest.

    >>> group_by_cost([3, 9, 2, 4], limit=9), group_by_cost([3, 9, 2, 4], limit=9, in_order=True)
    ([[2], [0, 3], [1]], [[0], [1], [2, 3]])
    """
    groups: list[list[int]] = []
    most = 0
    for row in range(len(costs)) if in_order else sorted(range(len(costs)), key=lambda row: -costs[row]):
        most = max(most, costs[row])
        if groups and (len(groups[-1]) + 1) * most <= limit:
            groups[-1].append(row)
        else:
            groups.append([row])
            most = costs[row]
    return groups if in_order else sorted(map(sorted, groups), key=lambda rows: cost_of_group(costs, rows))


def cost_of_group(costs: Sequence[int], rows: Sequence[int]) -> int:
    return len(rows) * max(costs[row] for row in rows)


def _costs_of_rows(cost: Cost, batch: Any, length: int, whole: Names = ()) -> list[int]:
    """The cost of each of `length` rows, as whole numbers."""
    costs: Any = getattr(cost, "of_rows", cost)(batch)
    if isinstance(costs, Tensor):
        costs = costs.tolist()
    if not isinstance(costs, Sequence):
        costs = [cost(row) for row in cut_batch(batch, [1] * length, length, whole)]
    if len(costs) != length:
        raise ValueError(f"cost gave {len(costs)} numbers for a batch of {length} rows, expected one for each, or one")
    wrong = [of_row for of_row in costs if of_row < 0 or of_row % 1]
    if wrong:
        raise ValueError(f"cost gave {wrong[0]!r} for a row, expected a whole number of at least 0, such as its tokens")
    return list(map(int, costs))


Batch = TypeVar("Batch")


def trim_padding(mask: str = "attention_mask", *, multiple_of: int = 1) -> Callable[[Batch], Batch]:
    """Makes a function for `ByCost(trim=)` that cuts off the last columns if they are padding in all rows.

    Every tensor of two or more dimensions whose first two are the mask's is cut, as a view: `input_ids`,
    `attention_mask`, `labels` and any other. Columns on the left stay, since models number positions from there.

    Args:
        mask: The key or attribute of the tensor that is 0 where there is padding, of shape (rows, columns).
        multiple_of: Rounds the number of columns up to a multiple of this, which suits some kernels.

    Example:
        >>> import torch
        >>> batch = {"input_ids": torch.tensor([[5, 6, 0, 0]]), "attention_mask": torch.tensor([[1, 1, 0, 0]])}
        >>> trim_padding()(batch)["input_ids"].tolist()
        [[5, 6]]
    """

    def trim(batch: Batch) -> Batch:
        kept = batch.get(mask) if isinstance(batch, Mapping) else getattr(batch, mask, None)
        if not isinstance(kept, Tensor) or kept.ndim != 2:
            raise TypeError(
                f"trim_padding({mask!r}) found {type(kept).__name__} in a {type(batch).__name__}, expected a tensor "
                "of shape (rows, columns) that is 0 where there is padding; name it"
            )
        used = kept.ne(0).any(0).nonzero()
        width = -(-(int(used[-1]) + 1 if len(used) else 1) // multiple_of) * multiple_of

        def cut(tensor: Tensor) -> Tensor:
            has_columns = tensor.ndim > 1 and tensor.shape[:2] == kept.shape
            return tensor[:, :width] if has_columns else tensor

        trimmed: Batch = map_tensors(batch, cut)
        return trimmed

    return trim
