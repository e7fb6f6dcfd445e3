"""Reader: draws from a loader with `next()` alone, and refuses one that writes to what it has yielded."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, final

import torch
from torch import Tensor

from .batch import tensors_in
from .law import DistaccumError
from .private import own_version_of

# So many elements are compared in each tensor of a loop's first item.
NUM_ELEMENTS = 64
# A tensor, torch's count of writes to it, and some elements, since numpy and others write without torch's knowledge.
Look = tuple[Tensor, int | None, bytes]


@final
class Reader:
    """Draws from a loader with `next()` alone, and keeps what was drawn and not yet used.

    Attributes:
        drawn: The items that are not used yet.
        source: The loader; or, if it tells its state, a pass over it (`state/places.py`).
    """

    def __init__(self, loader: Iterable[Any], before_opening: Callable[[], object] = bool) -> None:
        self.source, self._before_opening = loader, before_opening
        self._iterator: Iterator[Any] | None = None
        self.drawn: list[Any] = []
        self._is_fresh = True
        # The first item and how it looked, until the loop gets it.
        self._first: tuple[Any, list[Look]] | None = None
        # The loader's, raised after these items.
        self._error: Exception | None = None
        self._has_ended = False
        # A reference to the iterator of which items are kept, because its loop was left.
        self.of: Callable[[], Any] = bool

    def fill(self, num: int, *, is_first_used: bool = False) -> bool:
        """Draws until there are `num` items, or the loader ends or fails; returns whether there are `num`.

        With `is_first_used`, the loop gets the first item next, and may write to it.
        """
        drawn = self.drawn
        while len(drawn) < num and not self._has_ended and self._error is None:
            if self._iterator is None:
                self._before_opening()
                self._iterator = iter(self.source)
            try:
                # Never called again after the end: some loaders then start over, others do on their next iter().
                drawn.append(next(self._iterator))
            except StopIteration:
                self._has_ended = True
            except Exception as error:
                self._error = error
            if self._is_fresh and drawn:
                self._first, self._is_fresh = (drawn[0], _look_at(drawn[0])), False
        if is_first_used and self._first is not None:
            self.settle_reuse()
        return len(drawn) >= num

    def peek(self, num: int) -> tuple[list[Any], bool]:
        """Up to `num` items, drawn where they are missing, which stay until `use`; and whether these are the last."""
        if not self.fill(num) and self._error is not None:
            raise self._error
        if len(self.drawn) > 1:
            self._refuse_reuse()
        return self.drawn[:num], self._has_ended and len(self.drawn) <= num

    def settle_reuse(self) -> None:
        """Checks for reuse a last time, before the loop gets the first item and may write to it."""
        self._refuse_reuse()
        self._first = None

    def _refuse_reuse(self) -> None:
        """Raises if the first item was written to, as by a loader that rotates buffers and came back to its first."""
        if self._first is None:
            return
        item, before = self._first
        now = _look_at(item)
        pairs = zip(now, before, strict=False)
        if len(now) != len(before) or not all(a[0] is b[0] and a[1:] == b[1:] for a, b in pairs):
            raise DistaccumError(
                "the loader wrote to a micro-batch that it had yielded before (to the same buffer, or the same dict), "
                "but a window draws all its micro-batches before it runs; expected separate memory for each: yield "
                "copies, by tensor.clone(), array.copy() or dict(batch)"
            )

    def drop_error(self, num: int) -> bool:
        """Drops the loader's error, if that is why there are not `num` items; returns whether it is."""
        is_why = self._error is not None and len(self.drawn) < num
        self._error = None if is_why else self._error
        return is_why

    def leave(self, loader: Any) -> bool:
        """Releases the `loader`, since the caller left the loop; returns whether items of an iterator are kept."""
        if self.source is loader:
            self.source = ()
        self._iterator, self._before_opening = None, bool
        if not isinstance(loader, Iterator):
            self.drawn = []
            return False
        self.of = reference(loader)
        return bool(self.drawn or self._error)

    def resume(self, iterator: Iterator[Any]) -> None:
        """Goes on with the iterator that was left, or with the pass over it."""
        self._iterator = iter(iterator)


def reference(loader: Any) -> Callable[[], Any]:
    """A reference to a loader: a weak one, unless its type forbids it, as that of a list's iterator."""
    try:
        return weakref.ref(loader)
    except TypeError:
        return lambda: loader


def all_of(micro_batches: Any) -> list[Any]:
    """Draws all micro-batches of an iterable."""
    # What is in a list exists already.
    if isinstance(micro_batches, list | tuple):
        return list(micro_batches)
    return Reader(micro_batches).peek(sys.maxsize)[0]


def _look_at(item: Any) -> list[Look]:
    """The tensors of an item as they look now; reads nothing from a device."""
    looks: list[Look] = []
    for _, tensor in tensors_in(item):
        elements = b""
        if tensor.is_cpu and tensor.layout is torch.strided and not tensor.is_nested and tensor.numel():
            some = tensor.detach().reshape(-1)[:: -(-tensor.numel() // NUM_ELEMENTS)]
            packed = some.clone(memory_format=torch.contiguous_format)
            # Bytes, because NaN does not equal itself.
            elements = bytes(packed.view(torch.uint8).tolist())
        looks.append((tensor, own_version_of(tensor), elements))
    return looks
