"""A loader that fills the same memory again, seen before a window computes with it."""

from __future__ import annotations

from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from ..cutting import tensors_in
from ..law import DistaccumError
from ..private import own_version_of

NUM_ELEMENTS = 64  # of each tensor that are compared


@final
class FirstDrawn:
    """The first micro-batch of a window, as it was when it was drawn.

    A loader that fills one buffer again, or several in turn, comes back to that of the first before any other.
    """

    def __init__(self, micro_batch: Any) -> None:
        self._micro_batch, self._before = micro_batch, _look_at(micro_batch)

    def refuse_change(self) -> None:
        now, before = _look_at(self._micro_batch), self._before
        if len(now) != len(before) or not all(map(_Seen.is_as, now, before)):
            raise DistaccumError(
                "the loader wrote to a micro-batch that it had yielded before (to the same buffer, or the same dict), "
                "and a window draws its micro-batches before it runs; expected memory of its own for each: yield "
                "copies, by tensor.clone(), array.copy() or dict(batch)"
            )


class _Seen(NamedTuple):
    tensor: Tensor
    version: int | None  # counts torch's writes
    elements: bytes  # numpy and other libraries write without torch's knowledge

    def is_as(self, other: _Seen) -> bool:
        return self.tensor is other.tensor and self[1:] == other[1:]


def _look_at(micro_batch: Any) -> list[_Seen]:
    """The tensors of a micro-batch as they are now; nothing is read from a device."""
    found: list[_Seen] = []
    for _, tensor in tensors_in(micro_batch):
        elements = b""
        if tensor.is_cpu and tensor.layout is torch.strided and not tensor.is_nested and tensor.numel():
            some = tensor.detach().reshape(-1)[:: -(-tensor.numel() // NUM_ELEMENTS)]
            packed = some.clone(memory_format=torch.contiguous_format)
            elements = bytes(packed.view(torch.uint8).tolist())  # as bytes NaN equals itself
        found.append(_Seen(tensor, own_version_of(tensor), elements))
    return found
