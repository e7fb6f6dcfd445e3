"""Batches: counting their samples and tokens, and cutting them into parts."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor
from typing_extensions import TypeVar

# A batch is the caller's, and a count maps it to a number or a tensor of one. Names are of entries: keys and fields at
# any depth, positions in the batch itself. An entry is an array or a list, after the keys that lead to it and before
# the numbers of samples that it may hold.
Batch = TypeVar("Batch", default=Any)
Count = Callable[[Any], Any]
Names = Collection[str | int]
KeyPath = tuple[Any, ...]
Entry = tuple[KeyPath, Any, set[int]]


def count_samples(batch: Any, whole: Names = ()) -> int:
    """The number of samples in a micro-batch: the length of its batch dimension.

    Args:
        batch: Tensors or arrays in any nesting of dicts, lists, tuples and dataclasses. The batch dimension is the
            first dimension of each, and the length of a list with one entry per sample, such as texts or dicts of
            boxes. What has none goes whole to each part: 0-d and `[1, T]`, None, strings and numbers.
        whole: Names of entries to ignore.

    Raises:
        TypeError: Nothing in it has a dimension; give a `count` of your own, such as `len`.
        ValueError: Entries differ in length, or a list may hold samples or columns.

    Example:
        >>> import torch
        >>> boxes = [{"boxes": torch.zeros(n, 4), "label": torch.zeros(n)} for n in (7, 2, 7)]
        >>> count_samples({"image": torch.zeros(3, 3, 8, 8), "boxes": boxes})
        3
    """
    # The usual batch first: this runs in every micro-step of a loader.
    columns = batch.values() if type(batch) is dict else batch if type(batch) in (tuple, list) else (batch,)
    alike = {one.shape[0] if isinstance(one, Tensor) and one.ndim else None for one in columns}
    if not whole and len(alike) == 1 and (length := alike.pop()) is not None:
        return length
    entries = [entry for entry in each_entry(batch, whole) if entry[2]]
    # A row as [1, T] is of one sample if all else can be, and otherwise for all of them.
    for some in (entries, [entry for entry in entries if not _is_row(entry[1])]):
        common = set.intersection(*(lengths for _, _, lengths in some)) if some else set()
        # Dicts in a list are samples, such as 3 boxes each of images with 3 channels, unless the list is all there is.
        if len(common) > 1 and len(some) > 1:
            lists = [item for path, item, _ in some if path and is_list(item)]
            common &= {len(item) for item in lists if any(isinstance(entry, Mapping) for entry in item)} or common
        if len(common) == 1:
            return common.pop()
    if not entries:
        raise TypeError(
            f"a {type(batch).__name__} without tensors or lists of samples has no batch dimension that can be seen; "
            "pass count= to the Accumulator, and length= to the call that cuts it"
        )
    seen = ", ".join(
        f"{'.'.join(map(str, path)) or type(batch).__name__!r}: {' or '.join(map(str, sorted(lengths)))}"
        for path, _, lengths in entries
    )
    raise ValueError(
        f"the lengths of the entries of a batch are {{{seen}}}, expected one length that all share; to cut it, say "
        "split(batch, length=n), which cuts the entries of that length, or whole=('name',) for what is never cut; to "
        "count it, give the Accumulator count=, a function such as lambda batch: len(batch['labels'])"
    )


def entries_of(item: Any) -> dict[Any, Any]:
    """The entries of a container by key, field or position; {} for anything else."""
    if isinstance(item, Mapping):
        return dict(item)
    if isinstance(item, list | tuple):
        return dict(zip(getattr(item, "_fields", range(len(item))), item, strict=True))
    is_record = dataclasses.is_dataclass(item) and not isinstance(item, type)
    return {field.name: getattr(item, field.name) for field in dataclasses.fields(item)} if is_record else {}


def rebuilt(item: Any, change: Callable[[Any, Any], Any]) -> Any:
    """A container of the same type, with `change(child, key)` for each child; returns anything else unchanged."""
    entries = {key: change(child, key) for key, child in entries_of(item).items()}
    if isinstance(item, Mapping):
        # A copy keeps the type, such as OrderedDict, defaultdict or UserDict; some have no update().
        parts: Any = copy.copy(item) if isinstance(item, MutableMapping) else {}
        for key, value in entries.items():
            parts[key] = value
        return parts
    if isinstance(item, list | tuple):
        return type(item)(*entries.values()) if hasattr(item, "_fields") else type(item)(entries.values())
    if entries and (hasattr(item, "__post_init__") or not all(field.init for field in dataclasses.fields(item))):
        raise TypeError(
            f"a {type(item).__name__} derives fields from others (in __post_init__, or with init=False), whose values "
            "for a part of its samples cannot be known; derive them in properties, or cut it yourself: "
            "accumulator.window(micro_batches)"
        )
    return dataclasses.replace(item, **entries) if entries else item


def tensors_in(item: Any, where: str = "") -> list[tuple[str, Tensor]]:
    """The tensors, each with its key, field or position."""
    if isinstance(item, Tensor):
        return [(where, item)]
    return [named for key, child in entries_of(item).items() for named in tensors_in(child, repr(key))]


def map_tensors(item: Any, change: Callable[[Tensor], Any]) -> Any:
    """Returns the same nesting with each tensor changed."""
    return change(item) if isinstance(item, Tensor) else rebuilt(item, lambda child, _: map_tensors(child, change))


def fresh(item: Any) -> Any:
    """New dicts and lists around the same tensors, so that a loop may take entries out, as `batch.pop("y")` does."""
    is_container = isinstance(item, MutableMapping) or type(item) in (list, tuple)
    return rebuilt(item, lambda child, _: fresh(child)) if is_container else item


def is_array(item: Any) -> TypeGuard[Any]:
    """Tells whether this is a tensor, or looks like one (numpy)."""
    return isinstance(item, Tensor) or (hasattr(item, "shape") and hasattr(item, "__getitem__"))


def is_list(item: Any) -> TypeGuard[Any]:
    """Tells whether this is a list or a tuple whose entries have no names."""
    return isinstance(item, list | tuple) and not hasattr(item, "_fields") and not isinstance(item, torch.Size)


def each_entry(item: Any, whole: Names = (), length: int | None = None, path: KeyPath = ()) -> Iterator[Entry]:
    """Yields each array and each list of samples, but none that is named as whole.

    The entries of a list may be samples, or columns, which hold a value of each sample; a known `length` tells which.
    """
    if goes_whole(path, whole):
        return
    if is_array(item):
        yield path, item, set(item.shape[:1])
    elif is_list(item) and (lengths := _lengths_of(item, length, is_batch=not path)):
        yield path, item, lengths
    else:
        for key, child in entries_of(item).items():
            yield from each_entry(child, whole, length, (*path, key))


def goes_whole(path: KeyPath, whole: Names) -> bool:
    return len(path) > 0 and (len(path) == 1 or isinstance(path[-1], str)) and path[-1] in whole


def _lengths_of(items: Sequence[Any], length: int | None, *, is_batch: bool) -> set[Any]:
    """The numbers of samples that a list may hold; {} if its entries are to be looked at instead."""
    if not items or len({_nature(item) for item in items} - {None}) > 1:
        # As a batch, an empty list is that of a rank without samples.
        return {0} if is_batch and not items else set()
    each = [_first_dimensions(item) for item in items if item is not None]
    may_be_columns = each and all(len(own) <= 1 and None not in own for own in each)
    columns = (set().union(*each) or {1}) if may_be_columns else set()
    # A batch such as (images, labels) is of columns.
    is_pair = is_batch and len(columns) == 1 and all(map(is_array, items))
    if length is None:
        if is_pair:
            return set()
        may_be_either = is_batch or len(columns) == 1
        return {len(items), *columns} if may_be_either else {len(items)}
    if len(items) == length > 1 and columns == {length} and not is_pair:
        raise ValueError(
            f"the batch of {length} samples has a {type(items).__name__} of {length} entries, each with a first "
            f"dimension of {length}: samples may be its entries or their rows; stack it into one tensor if they are "
            "its entries, or give a dict if they are rows"
        )
    are_columns = columns == {length} if len(items) == length else len(columns) > 0
    return set() if are_columns else {len(items)}


def _first_dimensions(item: Any) -> set[int | None]:
    """The lengths of arrays and lists of plain values in it; includes None if anything in it has no dimension."""
    if is_array(item):
        return set() if _is_row(item) else {item.shape[0] if len(item.shape) else None}
    if is_list(item) and {_nature(entry) for entry in item} <= {"value", None}:
        return {len(item)}
    children = [_first_dimensions(child) for child in entries_of(item).values()]
    return set().union(*children) if children or item is None else {None}


def _is_row(item: Any) -> bool:
    """Tells whether this is an array of shape [1, T], which may belong to any number of samples."""
    return is_array(item) and len(item.shape) > 1 and item.shape[0] == 1


def _nature(item: Any) -> Any:
    """Returns a key that is equal for samples of one batch; None agrees with every key."""
    if is_array(item):
        return getattr(item, "dtype", None), len(item.shape)
    if is_list(item):
        return frozenset(map(_nature, item)) - {None} or None
    if isinstance(item, Mapping):
        return Mapping
    return None if item is None else type(item) if entries_of(item) else "value"


@dataclasses.dataclass(frozen=True)
class TokenCount:
    """Counts labels; made by `count_tokens`."""

    labels: str | int
    ignore_index: int
    shift: bool
    # The name of an unnamed loss.
    unit = "tokens"

    def __call__(self, batch: Any) -> Tensor:
        return self._kept(batch).sum()

    def of_rows(self, batch: Any) -> Tensor:
        """The number of kept labels in each row."""
        return self._kept(batch).flatten(1).sum(1)

    def _kept(self, batch: Any) -> Tensor:
        try:
            # Of a tensor this would be a row.
            labels = None if isinstance(batch, Tensor) else batch[self.labels]
        except (TypeError, KeyError, IndexError):
            labels = getattr(batch, str(self.labels), None)
        if not isinstance(labels, Tensor):
            keys = f", of {', '.join(map(repr, batch))}" if isinstance(batch, Mapping) else ""
            raise TypeError(
                f"count_tokens({self.labels!r}) found {type(labels).__name__} in a {type(batch).__name__}, expected a "
                f"tensor; name the key, attribute or position of the labels{keys}"
            )
        return (labels[..., 1:] if self.shift else labels).ne(self.ignore_index)


def count_tokens(labels: str | int = "labels", *, ignore_index: int = -100, shift: bool = False) -> TokenCount:
    """Makes a `count=` for token losses: the number of labels kept, as a one-element tensor on the labels' device.

    Args:
        labels: The key, attribute or position of the labels in a micro-batch; a tensor of integers.
        ignore_index: The label that the criterion leaves out, as in `CrossEntropyLoss`.
        shift: Leaves out the first label of each row (the last dimension), as next-token losses do.

    Example:
        >>> import torch
        >>> batch = {"labels": torch.tensor([[5, 6, -100], [7, -100, -100]])}
        >>> int(count_tokens("labels")(batch)), int(count_tokens("labels", shift=True)(batch))
        (3, 1)
    """
    return TokenCount(labels, ignore_index, shift)


@dataclasses.dataclass(frozen=True)
class Columns:
    """The caller's description of a batch: its number of samples (None: `count_samples`) and entries never to cut."""

    length: int | None = None
    whole: Names = ()

    def __post_init__(self) -> None:
        if isinstance(self.whole, str) or not all(isinstance(name, str | int) for name in self.whole):
            raise TypeError(f"whole={self.whole!r}, expected a tuple of names, such as whole=('class_weights',)")

    def length_of(self, batch: Any) -> int:
        names = set(_names_in(batch)) if self.whole else set()
        if missing := [name for name in self.whole if name not in names]:
            raise ValueError(
                f"whole={tuple(self.whole)!r} and the batch has no {', '.join(map(repr, missing))}, expected some of "
                f"{sorted(map(str, names))}"
            )
        return count_samples(batch, self.whole) if self.length is None else operator.index(self.length)


def _names_in(item: Any, *, is_root: bool = True) -> Iterator[str | int]:
    for key, child in entries_of(item).items():
        if is_root or isinstance(key, str):
            yield key
        yield from _names_in(child, is_root=False)


def cut_batch(batch: Any, sizes: Sequence[int], length: int, whole: Names = ()) -> Iterator[Any]:
    """The parts of `batch`, of `sizes` samples, in order. Tensors are views, not copies.

    >>> [part["x"].tolist() for part in cut_batch({"x": torch.arange(3), "lr": 0.1}, [1, 2], length=3)]
    [[0], [1, 2]]
    """
    stops = itertools.accumulate(sizes)
    return pick_rows(batch, [range(stop - size, stop) for stop, size in zip(stops, sizes, strict=True)], length, whole)


def pick_rows(batch: Any, groups: Iterable[Sequence[int]], length: int, whole: Names = ()) -> Iterator[Any]:
    """The parts of `batch` with these samples. Neighbouring samples are views of its tensors, not copies."""
    cut = {path for path, is_cut in cut_entries(batch, length, whole).items() if is_cut}
    if not cut:
        raise ValueError(f"{length=} and nothing in the {type(batch).__name__} is as long, expected the batch's length")
    on_the_way = {path[:depth] for path in cut for depth in range(len(path))}

    def pick(item: Any, rows: Sequence[int], path: KeyPath) -> Any:
        if path in on_the_way:
            return rebuilt(item, lambda child, key: pick(child, rows, (*path, key)))
        if path not in cut:
            return item
        if not rows:
            return item[:0]
        # Rows are in order, so these are neighbours.
        if rows[-1] - rows[0] + 1 == len(rows):
            return item[rows[0] : rows[-1] + 1]
        return item[list(rows)] if is_array(item) else type(item)(item[row] for row in rows)

    for rows in groups:
        yield pick(batch, rows, ())


def cut_entries(batch: Any, length: int, whole: Names = ()) -> dict[KeyPath, bool]:
    """Maps the path of each array and list to whether it is cut (True) or goes whole to each part.

    >>> cut_entries({"x": torch.zeros(3, 2), "prior": torch.zeros(4)}, length=3)
    {('x',): True, ('prior',): False}
    """
    entries = {}
    for path, item, lengths in each_entry(batch, whole, length):
        entries[path] = length in lengths
        name = str(path[-1]) if path else ""
        kind = ""
        if isinstance(item, Tensor) and item.is_nested:
            kind = "a nested tensor, whose samples differ in length"
        elif isinstance(item, Tensor) and entries[path] and item.layout is not torch.strided:
            kind = f"a sparse tensor ({item.layout})"
        elif name.startswith(("cu_seq", "batch_sizes")) or (
            name == "position_ids" and is_array(item) and item.shape == (length,)
        ):
            kind = f"packed sequences, joined in one row, of which {name!r} gives the positions"
        if kind:
            raise TypeError(
                f"the batch holds {kind}: it cannot be cut; give a list of samples and put them together in loss_fn, "
                "or cut it yourself: accumulator.window(micro_batches)"
            )
    return entries
