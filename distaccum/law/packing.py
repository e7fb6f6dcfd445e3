"""Packed batches: several sequences in one row, one after the other, with the places where they begin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

Span = tuple[int, int]  # where a sequence begins, and where it ends
STARTS, LONGEST = "cu_seq", ("max_length", "max_seqlen")  # how the names of such entries begin


def spans_in(batch: Any) -> list[Span] | None:
    """The sequences of a packed batch: by `cu_seqlens`, or by position ids that start again; None: it is not packed.

    >>> spans_in({"input_ids": torch.ones(1, 5), "position_ids": torch.tensor([[0, 1, 0, 1, 2]])})
    [(0, 2), (2, 5)]
    """
    if not isinstance(batch, Mapping):
        return None
    for name, value in batch.items():
        if str(name).startswith(STARTS) and isinstance(value, Tensor) and value.ndim == 1:
            return list(pairwise(value.tolist()))
    places = batch.get("position_ids")
    if not isinstance(places, Tensor) or places.numel() != places.shape[-1] or not places.numel():
        return None
    starts = places.flatten().eq(0).nonzero().flatten().tolist()
    return list(pairwise([*starts, places.numel()])) if len(starts) > 1 and starts[0] == 0 else None


def pick_spans(batch: Mapping[Any, Any], spans: Sequence[Span]) -> dict[Any, Any]:
    """A packed batch of some of the sequences."""
    whole = max(end for _, end in spans_in(batch) or spans)
    lengths = [end - start for start, end in spans]
    return {name: _of_spans(str(name), value, spans, lengths, whole) for name, value in batch.items()}


def _of_spans(name: str, value: Any, spans: Sequence[Span], lengths: Sequence[int], whole: int) -> Any:
    if name.startswith(LONGEST):
        longest = max(lengths)
        return torch.full_like(value, longest) if isinstance(value, Tensor) else type(value)(longest)
    if not isinstance(value, Tensor):
        return value
    if name.startswith(STARTS):
        return torch.tensor([0, *lengths], dtype=value.dtype).cumsum(0, dtype=value.dtype).to(value.device)
    along = next((dim for dim, size in enumerate(value.shape[:2]) if size == whole), None)
    if along is None:
        return value
    pieces = [value.narrow(along, start, end - start) for start, end in spans]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=along)
