"""Padding that is cut off, where rows differ in length."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from torch import Tensor

from .law.batches import map_tensors

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
