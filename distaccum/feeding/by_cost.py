"""Micro-batches by the cost of rows, which differ in length, and without the padding that all their rows have."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from numbers import Real
from typing import Any, Literal, TypeVar

from torch import Tensor

from ..cutting import Count, Names, cut_batch, map_tensors, pick_rows
from ..law import whole_number

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
        self, batch: Any, length: int, limit: int | None, parts: int, whole: Names, *, in_order: bool
    ) -> tuple[list[Any], list[int], list[int], str | None]:
        """Cuts the `length` rows of a `batch`, but not its `whole` entries, into micro-batches within the `limit`.

        They are at least `parts` where there are as many rows, and `in_order` if that is asked for. Returns them, their
        numbers of rows, their costs, and a warning or None.
        """
        costs = _costs_of_rows(self.cost, batch, length, whole)
        largest = max(costs, default=0)
        at_once = len(costs) * largest
        group = group_in_order if in_order else group_by_cost
        groups = group(costs, min(limit or max(1, at_once), max(1, -(-at_once // parts))))
        found = list(pick_rows(batch, groups, length, whole)) if groups else []
        warning = None
        if self.most != "auto" and largest > self.most:
            warning = f"a row costs {largest}, more than the {self.most} of ByCost; such rows go alone"
        trimmed = found if self.trim is None else list(map(self.trim, found))
        return trimmed, list(map(len, groups)), [cost_of_group(costs, rows) for rows in groups], warning


def group_by_cost(costs: Sequence[int], limit: int) -> list[list[int]]:
    """Rows of alike cost together, in the fewest groups of at most `limit`; the costliest group last.

    A group costs what it computes when its rows are padded: its number of rows times its costliest. A row that costs
    more than `limit` is alone.

    >>> group_by_cost([3, 9, 2, 4], limit=9)
    [[2], [0, 3], [1]]
    """
    order = sorted(range(len(costs)), key=lambda row: -costs[row])
    groups, start = [], 0
    while start < len(order):
        longest = costs[order[start]]
        stop = start + max(1, limit // longest) if longest else len(order)
        groups.append(sorted(order[start:stop]))
        start = stop
    return sorted(groups, key=lambda rows: cost_of_group(costs, rows))


def group_in_order(costs: Sequence[int], limit: int) -> list[list[int]]:
    """Neighbouring rows together, in groups of at most `limit`: more of them than `group_by_cost` makes.

    >>> group_in_order([3, 9, 2, 4], limit=9)
    [[0], [1], [2, 3]]
    """
    groups: list[list[int]] = []
    for row in range(len(costs)):
        if groups and cost_of_group(costs, [*groups[-1], row]) <= limit:
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups


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
    return [_whole(one.item() if isinstance(one, Tensor) and one.numel() == 1 else one) for one in found]


def _whole(number: Any) -> int:
    is_number = not isinstance(number, bool) and isinstance(number, Real)
    if not is_number or number < 0 or number % 1:
        raise ValueError(f"cost gave {number!r} for a row, expected a whole number of at least 0, such as its tokens")
    return int(number)


Batch = TypeVar("Batch")


def trim_padding(mask: str = "attention_mask", *, multiple_of: int = 1, left: bool = False) -> Callable[[Batch], Batch]:
    """A function that cuts off the columns in which no row of a micro-batch has anything, for `ByCost(trim=)`.

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
