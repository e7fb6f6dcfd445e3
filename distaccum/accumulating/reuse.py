"""Drawing micro-batches from an iterator, and a loader that fills the same memory again."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor

from ..gradients.private import own_version_of
from ..law.batches import tensors_in
from ..law.errors import DistaccumError

NUM_ELEMENTS = 64  # of each tensor that are compared


def draw_from(iterator: Iterator[Any], number: float = math.inf) -> tuple[list[Any], bool]:
    """That number of micro-batches, or all that are left, and whether the iterator has ended.

    Raises where the first one changed while the others were drawn: a loader that fills one buffer again, or several in
    turn, comes back to that of the first micro-batch before any other.
    """
    drawn: list[Any] = []
    first: list[_Seen] = []
    # By next() alone, and not once more after the end: some loaders start anew when asked for an iterator (as
    # islice and zip ask theirs), or after they have ended.
    while len(drawn) < number:
        try:
            drawn.append(next(iterator))
        except StopIteration:
            break
        if len(drawn) == 1 < number:
            first = _look_at(drawn[0])
    if len(drawn) > 1 and not _are_equal(_look_at(drawn[0]), first):
        raise DistaccumError(
            "the loader wrote to a micro-batch that it had yielded before (to the same buffer, or the same dict), and "
            "a window draws its micro-batches before it runs; expected memory of its own for each: yield copies, by "
            "tensor.clone(), array.copy() or dict(batch)"
        )
    return drawn, len(drawn) < number


class _Seen(NamedTuple):
    tensor: Tensor
    version: int | None  # counts torch's writes
    elements: str  # numpy and other libraries write without torch's knowledge


def _look_at(micro_batch: Any) -> list[_Seen]:
    """The tensors of a micro-batch as they are now; nothing is read from a device."""
    found: list[_Seen] = []
    for _, tensor in tensors_in(micro_batch):
        elements = ""
        if tensor.is_cpu and not tensor.is_sparse and not tensor.is_nested and tensor.numel():
            step = -(-tensor.numel() // NUM_ELEMENTS)
            elements = str(tensor.detach().reshape(-1)[::step].tolist())  # as text NaN equals itself
        found.append(_Seen(tensor, own_version_of(tensor), elements))
    return found


def _are_equal(now: list[_Seen], before: list[_Seen]) -> bool:
    return len(now) == len(before) and all(
        one.tensor is other.tensor and one[1:] == other[1:] for one, other in zip(now, before, strict=True)
    )
