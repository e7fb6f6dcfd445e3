"""Which dimension of a nested batch holds its samples, and which of its lists hold one entry per sample."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from numbers import Number
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

Names = Collection[str | int]  # of entries: keys and fields at any depth, positions in the batch itself


def batch_length(batch: Any, whole: Names = ()) -> int:
    """The length of the first dimension that most entries of `batch` share; a list of samples is one entry.

    A list of alike entries may also be a container of columns, as `[view, other_view]` is. It then votes for both of
    its lengths, and the other entries decide; where they don't, it is a tie.

    >>> boxes = [{"boxes": torch.zeros(n, 4), "label": torch.zeros(n)} for n in (7, 2, 7)]
    >>> batch_length({"image": torch.zeros(3, 3, 8, 8), "boxes": boxes})
    3
    """
    if isinstance(batch, Tensor) and batch.ndim:
        return batch.shape[0]
    if not whole and type(batch) in (tuple, list, dict):  # the usual one, which each micro-step of a loader counts
        columns = batch.values() if type(batch) is dict else batch
        alike = {one.shape[0] if isinstance(one, Tensor) and one.ndim else None for one in columns}
        if len(alike) == 1 and (length := alike.pop()) is not None:
            return length
    votes: Counter[int] = Counter()
    firm: Counter[int] = Counter()  # of entries that have this length rather than another
    for lengths, rather in _votes(batch, whole, is_root=True):
        votes.update(lengths)
        firm.update(rather)
    ranked = sorted(votes, key=lambda one: (votes[one], firm[one]), reverse=True)
    if not ranked:
        raise TypeError(
            f"a {type(batch).__name__} without tensors or lists of samples has no batch dimension that can be seen; "
            "pass count= to the Accumulator, and length= where a batch is cut"
        )
    if len(ranked) > 1:
        first, second = ranked[:2]
        # What one list is rather, is no evidence without another entry of that length.
        if votes[first] == votes[second] and (firm[first] == firm[second] or votes[first] == 1):
            tied = sorted(one for one in ranked if votes[one] == votes[first])
            raise ValueError(
                f"the entries of the batch have lengths {tied}, a tie; say which is the batch's: split(batch, "
                "length=n), or count= for the Accumulator"
            )
    return ranked[0]


def is_column(item: Any, length: int, *, is_root: bool = False) -> bool:
    """Whether this has one value per sample: an array, or a list or tuple of alike entries, of that length."""
    if is_array(item):
        return len(item.shape) > 0 and item.shape[0] == length
    columns = columns_in(item, is_root=is_root)
    if columns is None or len(item) != length or (length == 1 and columns == {1}):  # a row of one, or one entry
        return False
    if columns == {length}:
        raise ValueError(
            f"the batch of {length} samples has a {type(item).__name__} of {length} entries, each with a first "
            f"dimension of {length}: samples may be its entries or their rows; stack it to one tensor where they are "
            "its entries, and give a dict where they are rows"
        )
    return True


def columns_in(item: Any, *, is_root: bool) -> set[int] | None:
    """The lengths of a list's entries, if these may be columns and not samples; none of them: they are samples.

    None: it is no list of alike entries, or the batch itself and a tuple of columns, as loaders make them.
    """
    if not is_list(item) or not item or len({_nature(entry) for entry in item} - {None}) > 1:
        return None
    of_entries = [set(_first_dimensions(entry)) for entry in item if entry is not None]
    are_columns = all(len(lengths) == 1 and None not in lengths for lengths in of_entries)
    columns = {length for lengths in of_entries for length in lengths if length is not None} if are_columns else set()
    return None if is_root and len(columns) == 1 and all(map(is_array, item)) else columns


def _votes(item: Any, whole: Names, *, is_root: bool) -> Iterator[tuple[set[int], set[int]]]:
    """For each entry, the lengths that it may have, and those of them that it has rather."""
    if is_array(item):
        if len(item.shape):
            yield {item.shape[0]}, {item.shape[0]}
        return
    if isinstance(item, PackedSequence):
        yield {int(item.batch_sizes[0])}, {int(item.batch_sizes[0])}
        return
    columns = columns_in(item, is_root=is_root)
    if columns is None:
        for key, child in items_in(item):
            if key not in whole:
                yield from _votes(child, nested(whole), is_root=False)
    elif not _is_number(item):  # a size, or a pair of options
        is_record = not any(map(is_array, item))
        yield {len(item), *columns}, {len(item)} if is_record else set()


def _first_dimensions(item: Any) -> Iterator[int | None]:
    """Of each array and each list of plain values in it; None for what has no dimension."""
    if is_array(item):
        yield item.shape[0] if len(item.shape) else None
    elif is_list(item) and all(_nature(entry) in ("value", None) for entry in item):
        yield len(item)
    elif is_list(item) or _is_container(item):
        for _, child in items_in(item):
            yield from _first_dimensions(child)
    elif item is not None:
        yield None


def _nature(item: Any) -> Any:
    """What samples of one batch have in common; None agrees with all."""
    if is_array(item):
        return getattr(item, "dtype", None), len(item.shape)
    if isinstance(item, Mapping):
        return Mapping
    if is_list(item):
        return frozenset(map(_nature, item)) - {None} or None
    return type(item) if _is_container(item) else None if item is None else "value"


def _is_number(item: Any) -> bool:
    if is_list(item):
        return all(map(_is_number, item))
    return item is None or isinstance(item, Number) or (is_array(item) and not len(item.shape))


def items_in(item: Any) -> Iterable[tuple[Any, Any]]:
    """The entries of a container, each with its key, field or position; nothing of anything else."""
    if isinstance(item, tuple) and (names := getattr(item, "_fields", None)) is not None:
        return zip(names, item, strict=True)
    if isinstance(item, list | tuple):
        return enumerate(item)
    if isinstance(item, Mapping):
        return item.items()
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        return [(field.name, getattr(item, field.name)) for field in dataclasses.fields(item)]
    return ()


def nested(whole: Names) -> Names:
    """The names that hold below the batch itself."""
    return [name for name in whole if isinstance(name, str)] if whole else ()


def is_array(item: Any) -> TypeGuard[Any]:
    """Whether this is a tensor, or looks like one (numpy)."""
    return isinstance(item, Tensor) or (hasattr(item, "shape") and hasattr(item, "__getitem__"))


def is_list(item: Any) -> TypeGuard[Any]:
    """Whether this is a list or a tuple whose entries have no names."""
    return isinstance(item, list | tuple) and not hasattr(item, "_fields") and not isinstance(item, torch.Size)


def _is_container(item: Any) -> bool:
    is_record = dataclasses.is_dataclass(item) and not isinstance(item, type)
    return is_record or isinstance(item, Mapping) or hasattr(item, "_fields")
