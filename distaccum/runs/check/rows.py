"""Where a check cuts a batch, so that its parts differ in samples and in the labels that they keep."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate, pairwise
from typing import Any

from torch import Tensor

from ...cutting import Names, cut_batch, map_tensors, tensors_in

IGNORED = -100  # the default of torch's criterions


def uneven_sizes(batch: Any, length: int, at: Iterable[int], whole: Names = (), *, least: int = 1) -> list[int]:
    """The sizes of parts, each of `least` samples or more: cut after `at`, and where labels are unlike samples.

    There the share of the labels that are kept is as far as it can be from the share of the samples, so that a count
    of the wrong one shows.

    >>> import torch
    >>> uneven_sizes({"y": torch.tensor([1, 1, 1, -100, -100, -100, 1, 1])}, 8, [1])
    [1, 2, 5]
    """
    places = sorted({place for place in at if least <= place <= length - least})
    kept = kept_by_row(batch, length, whole)
    apart = [abs(so_far * length - (i + 1) * sum(kept)) for i, so_far in enumerate(accumulate(kept))]
    free = [
        place
        for place in range(least, length - least + 1)
        if apart and apart[place - 1] and all(place == other or abs(place - other) >= least for other in places)
    ]
    if free:
        places.append(max(free, key=lambda place: (apart[place - 1], place not in places)))
    return [end - start for start, end in pairwise(sorted({0, *places, length}))]


def kept_by_row(batch: Any, length: int, whole: Names = ()) -> list[int]:
    """How many labels each sample keeps, of tensors in which some are ignored; empty where there are none."""
    names = {where for where, tensor in tensors_in(batch) if _has_ignored(tensor)}
    if not names or not length:
        return []
    rows = cut_batch(batch, [1] * length, length, whole)
    return [sum(int(tensor.ne(IGNORED).sum()) for where, tensor in tensors_in(row) if where in names) for row in rows]


def all_ignored(batch: Any) -> Any:
    """The batch with all labels ignored, in tensors in which some are."""
    return map_tensors(
        batch, lambda tensor: tensor.new_full((), IGNORED).expand_as(tensor) if _has_ignored(tensor) else tensor
    )


def _has_ignored(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex()) and bool(tensor.eq(IGNORED).any())
