"""Nested batches: which dimension holds their samples, what counts in them, and how they are cut."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import operator
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from functools import cached_property
from numbers import Number
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from .law import in_short

Count = Callable[[Any], Any]  # batch -> a number, or a tensor of one
Names = Collection[str | int]  # of entries: keys and fields at any depth, positions in the batch itself
Place = tuple[Any, ...]  # of an entry: the keys that lead to it


def count_samples(batch: Any, whole: Names = ()) -> int:
    """The number of samples in a micro-batch: the length of its batch dimension.

    Args:
        batch: Tensors or arrays in any nesting of dicts, lists, tuples and dataclasses. The batch dimension is the
            first dimension that most of them share. A list of samples, as texts or dicts of boxes, counts as one entry
            of its length; one whose entries may be columns, as `[view, other_view]`, lets the other entries decide.
        whole: Names of entries that have no say.

    Raises:
        TypeError: Nothing in it has a dimension; give a `count` of your own, such as `len`.
        ValueError: A tie between two lengths.

    Example:
        >>> import torch
        >>> boxes = [{"boxes": torch.zeros(n, 4), "label": torch.zeros(n)} for n in (7, 2, 7)]
        >>> count_samples({"image": torch.zeros(3, 3, 8, 8), "boxes": boxes})
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
    for lengths, rather in _votes(batch, whole):
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
    """Tells whether this has one value per sample: an array, or a list or tuple of alike entries, of that length."""
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
    may_be_columns = all(len(lengths) == 1 and None not in lengths for lengths in of_entries)
    columns: set[Any] = set().union(*of_entries) if may_be_columns else set()
    return None if is_root and len(columns) == 1 and all(map(is_array, item)) else columns


def _votes(item: Any, whole: Names, place: Place = ()) -> Iterator[tuple[set[int], set[int]]]:
    """For each entry, the lengths that it may have, and those of them that it has rather."""
    columns = columns_in(item, is_root=not place)
    if is_array(item):
        if len(item.shape):
            yield {item.shape[0]}, {item.shape[0]}
    elif isinstance(item, PackedSequence):
        yield {int(item.batch_sizes[0])}, {int(item.batch_sizes[0])}
    elif columns is None:
        for key, child in items_in(item):
            if not _goes_whole((*place, key), whole):
                yield from _votes(child, whole, (*place, key))
    elif not _is_number(item):  # a size, or a pair of options
        yield {len(item), *columns}, set() if any(map(is_array, item)) else {len(item)}


def _first_dimensions(item: Any) -> Iterator[int | None]:
    """Yields the length of each array and list of plain values in it, and None for anything without a dimension."""
    children = list(items_in(item))
    if is_array(item):
        yield item.shape[0] if len(item.shape) else None
    elif is_list(item) and all(_nature(entry) in ("value", None) for entry in item):
        yield len(item)
    elif children:
        for _, child in children:
            yield from _first_dimensions(child)
    elif item is not None:
        yield None


def _nature(item: Any) -> Any:
    """Returns a key that is equal for samples of one batch; None agrees with all."""
    if is_array(item):
        return getattr(item, "dtype", None), len(item.shape)
    if isinstance(item, Mapping):
        return Mapping
    if is_list(item):
        return frozenset(map(_nature, item)) - {None} or None
    if _is_dataclass(item) or hasattr(item, "_fields"):
        return type(item)
    return None if item is None else "value"


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
    if _is_dataclass(item):
        return [(field.name, getattr(item, field.name)) for field in dataclasses.fields(item)]
    return ()


def _goes_whole(place: Place, whole: Names) -> bool:
    """Tells whether an entry is named: by key or field at any depth, by position in the batch itself."""
    return place[-1] in whole and (len(place) == 1 or isinstance(place[-1], str))


def is_array(item: Any) -> TypeGuard[Any]:
    """Tells whether this is a tensor, or looks like one (numpy)."""
    return isinstance(item, Tensor) or (hasattr(item, "shape") and hasattr(item, "__getitem__"))


def is_list(item: Any) -> TypeGuard[Any]:
    """Tells whether this is a list or a tuple whose entries have no names."""
    return isinstance(item, list | tuple) and not hasattr(item, "_fields") and not isinstance(item, torch.Size)


@dataclasses.dataclass(frozen=True)
class TokenCount:
    """Counts labels; made by `count_tokens`."""

    labels: str | int
    ignore_index: int
    shift: bool
    over: Any  # the mesh over which what it counts is cut later

    def __call__(self, batch: Any) -> Tensor:
        number: Tensor = self._kept(batch).sum()
        if self.over is None:
            return number
        ranks, rank = int(self.over.size()), int(self.over.get_local_rank())
        return (number + (ranks - 1 - rank)) // ranks  # whole numbers, which add up to the whole

    def of_rows(self, batch: Any) -> Tensor:
        """The number in each row."""
        return self._kept(batch).flatten(1).sum(1)

    def _kept(self, batch: Any) -> Tensor:
        try:
            found = None if isinstance(batch, Tensor) else batch[self.labels]  # a row, which is not all labels
        except (TypeError, KeyError, IndexError):
            found = getattr(batch, str(self.labels), None)
        if not isinstance(found, Tensor):
            raise TypeError(
                f"count_tokens({self.labels!r}) found {type(found).__name__} in a {type(batch).__name__}, expected a "
                "tensor; name the key, attribute or position of the labels"
            )
        return (found[..., 1:] if self.shift else found).ne(self.ignore_index)


def count_tokens(
    labels: str | int = "labels", *, ignore_index: int = -100, shift: bool = False, over: Any = None
) -> TokenCount:
    """Makes a `count=` of the labels that a token loss keeps: a tensor of one number, on the labels' device.

    Args:
        labels: The key, attribute or position of the labels in a micro-batch; a tensor of integers.
        ignore_index: The label that the criterion leaves out, as in `CrossEntropyLoss`.
        shift: Leaves out the first label of each row (the last dimension), as losses on the next token do.
        over: The mesh of the ranks that have the same whole labels and cut them after they are counted, as
            `mesh["context"]`; each brings its part of the number. For criterions that sum.

    Example:
        >>> import torch
        >>> batch = {"labels": torch.tensor([[5, 6, -100], [7, -100, -100]])}
        >>> int(count_tokens("labels")(batch)), int(count_tokens("labels", shift=True)(batch))
        (3, 1)
    """
    return TokenCount(labels, ignore_index, shift, over)


def largest_sample(micro_batches: Iterable[Any]) -> int:
    """The most numbers that a sample has in one tensor, which distinguishes a long text from a short one."""
    return max((_numbers_of_sample(one, is_root=True) for one in micro_batches), default=0)


def _numbers_of_sample(item: Any, *, is_root: bool = False) -> int:
    if isinstance(item, Tensor):
        return -(-item.numel() // len(item)) if item.ndim and len(item) else 0
    if columns_in(item, is_root=is_root) is not None:  # perhaps a sample each
        return max((tensor.numel() for _, tensor in tensors_in(item)), default=0)
    return max((_numbers_of_sample(child) for _, child in items_in(item)), default=0)


def fingerprint(batch: Any) -> int:
    """A number that differs where another rank's batch does: of some values of each tensor, read at once."""
    found = [one.detach() for _, one in tensors_in(batch) if not hasattr(one, "to_local")]
    dense = [one for one in found if one.layout is torch.strided and not one.is_nested and one.numel()]
    some = [one.reshape(-1)[:: -(-one.numel() // 64)].double() for one in dense if not one.is_complex()]
    values = torch.cat([one.to(some[0].device) for one in some]).tolist() if some else []
    return zlib.crc32(repr(([tuple(one.shape) for one in dense], values)).encode())


@dataclasses.dataclass(frozen=True)
class Columns:
    """A caller's words about a batch: its number of samples (None: as many as can be seen), and entries never cut."""

    length: int | None = None
    whole: Names = ()

    def __post_init__(self) -> None:
        if isinstance(self.whole, str) or not all(isinstance(name, str | int) for name in self.whole):
            raise TypeError(f"whole={self.whole!r}, expected a tuple of names, such as whole=('class_weights',)")
        if self.length is not None:
            object.__setattr__(self, "length", operator.index(self.length))

    def length_of(self, batch: Any) -> int:
        names = set(_names_in(batch)) if self.whole else set()
        if missing := [name for name in self.whole if name not in names]:
            raise ValueError(
                f"whole={tuple(self.whole)!r} and the batch has no {', '.join(map(repr, missing))}, expected some of "
                f"{sorted(map(str, names))}"
            )
        return count_samples(batch, self.whole) if self.length is None else self.length


def _names_in(item: Any, *, is_root: bool = True) -> Iterator[str | int]:
    for key, child in items_in(item):
        if is_root or isinstance(key, str):
            yield key
        yield from _names_in(child, is_root=False)


def cut_batch(batch: Any, sizes: Sequence[int], length: int, whole: Names = ()) -> Iterator[Any]:
    """The parts of `batch`, of `sizes` samples, in order. Tensors are views, not copies.

    >>> [part["x"].tolist() for part in cut_batch({"x": torch.arange(3), "lr": 0.1}, [1, 2], length=3)]
    [[0], [1, 2]]
    """
    starts = itertools.accumulate(sizes, initial=0)
    rows = [range(start, start + size) for start, size in zip(starts, sizes, strict=False)]
    return pick_rows(batch, rows, length, whole)


def pick_rows(batch: Any, groups: Iterable[Sequence[int]], length: int, whole: Names = ()) -> Iterator[Any]:
    """The parts of `batch` with these of its samples. Those that are neighbours are views of its tensors."""
    entries = cut_entries(batch, length, whole)
    if not any(entries.values()):
        raise ValueError(f"{length=} and nothing in the {type(batch).__name__} is as long, expected the batch's length")
    for rows in groups:
        yield _pick(batch, rows, entries, ())


def cut_entries(item: Any, length: int, whole: Names = (), place: Place = ()) -> dict[Place, bool]:
    """Maps the place of each array and list to whether it is cut (True) or goes whole to each part.

    >>> cut_entries({"x": torch.zeros(3, 2), "prior": torch.zeros(4)}, length=3)
    {('x',): True, ('prior',): False}
    """
    if place and _goes_whole(place, whole):
        return {place: False}
    is_cut = is_column(item, length, is_root=not place)
    _refuse_uncuttable(item, length, is_cut=is_cut, name=str(place[-1]) if place else "")
    if is_cut or is_array(item) or columns_in(item, is_root=not place) == set():
        return {place: is_cut}
    found: dict[Place, bool] = {}
    for key, child in items_in(item):
        found |= cut_entries(child, length, whole, (*place, key))
    return found


def _pick(item: Any, rows: Sequence[int], entries: Mapping[Place, bool], place: Place) -> Any:
    is_cut = entries.get(place)
    if is_cut is None:
        return rebuilt(item, lambda child, key: _pick(child, rows, entries, (*place, key)))
    if not is_cut:
        return item
    if not rows or rows[-1] - rows[0] + 1 == len(rows):  # they are in order
        return item[rows[0] : rows[-1] + 1] if rows else item[:0]
    if isinstance(item, Tensor):
        return item[torch.tensor(rows, device=item.device)]
    return item[list(rows)] if is_array(item) else type(item)(item[row] for row in rows)


def _refuse_uncuttable(item: Any, length: int, *, is_cut: bool, name: str) -> None:
    """Raises for tensors whose samples are no slices of them."""
    kind = ""
    if isinstance(item, PackedSequence):
        kind = "a PackedSequence, whose samples are interleaved"
    elif isinstance(item, Tensor) and item.is_nested:
        kind = "a nested tensor, whose samples differ in length"
    elif is_cut and isinstance(item, Tensor) and item.layout is not torch.strided:
        kind = f"a sparse tensor ({item.layout})"
    elif name.startswith("cu_seq") or (name == "position_ids" and is_array(item) and item.shape == (length,)):
        kind = f"packed sequences, one after the other in a row, of which {name!r} says where each begins"
    if kind:
        raise TypeError(
            f"the batch holds {kind}: it cannot be cut; give a list of samples and put them together in loss_fn, or "
            "cut it yourself: accumulator.window(micro_batches)"
        )


def map_tensors(item: Any, change: Callable[[Tensor], Any]) -> Any:
    """Returns an equal nesting with each tensor changed."""
    if isinstance(item, Tensor):
        return change(item)
    return rebuilt(item, lambda child, _: map_tensors(child, change))


def tensors_in(item: Any, where: str = "") -> list[tuple[str, Tensor]]:
    """The tensors, each with its key, field or position."""
    if isinstance(item, Tensor):
        return [(where, item)]
    return [found for key, child in items_in(item) for found in tensors_in(child, repr(key))]


def join_batches(batches: Sequence[Any], lengths: Sequence[int], whole: Names = (), place: Place = ()) -> Any:
    """One batch of all samples; cutting it at `lengths` gives the batches again."""
    first = batches[0]
    if place and _goes_whole(place, whole):
        return first
    pairs = list(zip(batches, lengths, strict=True))
    are_cut = [is_column(batch, length, is_root=not place) for batch, length in pairs]
    if is_array(first):
        tensors = [one if isinstance(one, Tensor) else torch.as_tensor(one, device="cpu") for one in batches]
        return torch.cat(tensors) if all(are_cut) else first
    # Of one sample, a list may be one of rows, too.
    if any(are_cut) and all(
        is_it or len(batch) == length == 1 for is_it, (batch, length) in zip(are_cut, pairs, strict=True)
    ):
        return type(first)(value for batch in batches for value in batch)
    by_key = [dict(items_in(batch)) for batch in batches]
    return rebuilt(first, lambda _, key: join_batches([found[key] for found in by_key], lengths, whole, (*place, key)))


def rebuilt(item: Any, change: Callable[[Any, Any], Any]) -> Any:
    """A container of the same type, with `change(child, key)` for each child; returns anything else unchanged."""
    if isinstance(item, MutableMapping):
        parts = copy.copy(item)  # keeps the type, also of an OrderedDict, defaultdict or UserDict
        for key in item:
            parts[key] = change(item[key], key)
        return parts
    if isinstance(item, Mapping):
        return {key: change(value, key) for key, value in item.items()}
    if _is_dataclass(item):
        return _remade(item, change)
    if isinstance(item, list | tuple):
        made = [change(value, key) for key, value in items_in(item)]
        return type(item)(*made) if hasattr(item, "_fields") else type(item)(made)
    return item


def _remade(item: Any, change: Callable[[Any, Any], Any]) -> Any:
    """A dataclass of the changed arguments, which derives its other fields anew."""
    kind = type(item).__name__
    given = {
        field.name: change(getattr(item, field.name), field.name) for field in dataclasses.fields(item) if field.init
    }
    cure = (
        "give it what it needs and derive the rest in properties, or cut it yourself: accumulator.window(micro_batches)"
    )
    try:
        made = dataclasses.replace(item, **given)
    except Exception as error:
        raise TypeError(f"a {kind} of a part of its samples cannot be made ({in_short(error)}); {cure}") from error
    unknown = [name for name, value in given.items() if getattr(made, name) is not value]
    for name, value in getattr(item, "__dict__", {}).items():
        is_cached = isinstance(getattr(type(item), name, None), cached_property)
        if name not in given and tensors_in(value) and not is_cached:
            unknown.append(name)
    if unknown:
        raise TypeError(
            f"a {kind} changes or adds {', '.join(unknown)} beside its arguments, and what they are of a part of its "
            f"samples cannot be known; {cure}"
        )
    return made


def _is_dataclass(item: Any) -> bool:
    return dataclasses.is_dataclass(item) and not isinstance(item, type)
