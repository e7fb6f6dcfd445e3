"""Micro-batches by the cost of rows, which differ in length, and without the padding that all their rows have."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal, TypeVar

from torch import Tensor

from ..cutting import Count, Names, cut_batch, map_tensors, pick_rows
from ..law import Once, whole_number

Cost = Count | Callable[[Any], Sequence[float]]  # batch -> a number, or one for each of its rows


@dataclass(frozen=True)
class ByCost:
    """A `micro_batch_size` in what rows cost, where they differ in length: rows of alike cost go together.

    In `windows()` each batch of the loader is an update, and is cut.

    Args:
        most: The most that one forward on one rank may cost: a micro-batch costs its number of rows times the
            costliest, which is what is computed with the padding. `"auto"` as for `micro_batch_size`.
        cost: The cost of each row: `count_tokens`, or a callable that maps a batch to a number per row, or to one
            number, and is then called with each row.
        trim: A callable that gets each micro-batch and returns it without the padding that all its rows have.
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
                raise TypeError(f"{name}={value!r} is a {type(value).__name__}, expected a callable of a batch")

    def cut(
        self, batch: Any, length: int, limit: int | None, parts: int, whole: Names, once: Once, *, in_order: bool
    ) -> tuple[list[Any], list[int], list[int]]:
        """Cuts the `length` rows of a `batch`, but not its `whole` entries, into micro-batches within the `limit`.

        They are at least `parts` where there are as many rows, and `in_order` if that is asked for. Returns them, their
        numbers of rows and their costs.
        """
        costs = _costs_of_rows(self.cost, batch, length, whole)
        largest = max(costs, default=0)
        at_once = len(costs) * largest
        groups = group_by_cost(costs, min(limit or max(1, at_once), max(1, -(-at_once // parts))), in_order=in_order)
        found = list(pick_rows(batch, groups, length, whole)) if groups else []
        if self.most != "auto" and largest > self.most:
            message = f"a row costs {largest}, more than the {self.most} of ByCost; such rows go alone"
            once("cost", message, on_each_rank=True)
        trimmed = found if self.trim is None else list(map(self.trim, found))
        return trimmed, list(map(len, groups)), [cost_of_group(costs, rows) for rows in groups]


def group_by_cost(costs: Sequence[int], limit: int, *, in_order: bool = False) -> list[list[int]]:
    """Rows in groups of at most `limit`; a row that costs more is alone.

    Rows of alike cost go together, in the fewest groups, the costliest last; `in_order`, neighbours do, in more groups.
    A group costs what it computes when its rows are padded: its number of rows times its costliest.

    >>> group_by_cost([3, 9, 2, 4], limit=9), group_by_cost([3, 9, 2, 4], limit=9, in_order=True)
    ([[2], [0, 3], [1]], [[0], [1], [2, 3]])
    """
    groups: list[list[int]] = []
    most = 0  # of the last group's rows
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
    """The cost of each of `length` rows, in whole numbers."""
    found: Any = getattr(cost, "of_rows", cost)(batch)
    if isinstance(found, Tensor):
        found = found.tolist()
    if not isinstance(found, Sequence):  # of the whole batch
        found = [cost(row) for row in cut_batch(batch, [1] * length, length, whole)]
    if len(found) != length:
        raise ValueError(f"cost gave {len(found)} numbers for a batch of {length} rows, expected one for each, or one")
    wrong = next((one for one in found if one < 0 or one % 1), None)
    if wrong is not None:
        raise ValueError(f"cost gave {wrong!r} for a row, expected a whole number of at least 0, such as its tokens")
    return list(map(int, found))


Batch = TypeVar("Batch")


def trim_padding(mask: str = "attention_mask", *, multiple_of: int = 1) -> Callable[[Batch], Batch]:
    """A function that cuts off the last columns, in which no row of a micro-batch has anything, for `ByCost(trim=)`.

    Every tensor of two or more dimensions whose first two are the mask's is cut, as a view: `input_ids`,
    `attention_mask`, `labels` and what else there is. Columns on the left stay, since models number them from there.

    Args:
        mask: The key or attribute of the tensor that is 0 where there is padding, of shape (rows, columns).
        multiple_of: Leaves as many columns as make a multiple of this, which some kernels like.

    Example:
        >>> import torch
        >>> batch = {"input_ids": torch.tensor([[5, 6, 0, 0]]), "attention_mask": torch.tensor([[1, 1, 0, 0]])}
        >>> trim_padding()(batch)["input_ids"].tolist()
        [[5, 6]]
    """

    def trim(batch: Batch) -> Batch:
        found = batch.get(mask) if isinstance(batch, Mapping) else getattr(batch, mask, None)
        if not isinstance(found, Tensor) or found.ndim != 2:
            raise TypeError(
                f"trim_padding({mask!r}) found {type(found).__name__} in a {type(batch).__name__}, expected a tensor "
                "of shape (rows, columns) that is 0 where there is padding; name it"
            )
        used = found.ne(0).any(0).nonzero()
        width = -(-(int(used[-1]) + 1 if len(used) else 1) // multiple_of) * multiple_of

        def cut(tensor: Tensor) -> Tensor:
            has_columns = tensor.ndim > 1 and tensor.shape[:2] == found.shape
            return tensor[:, :width] if has_columns else tensor

        trimmed: Batch = map_tensors(batch, cut)
        return trimmed

    return trim
