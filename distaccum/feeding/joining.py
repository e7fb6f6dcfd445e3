"""Joins batches into one, the reverse of a cut."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..cutting import KeyPath, Names, cut_entries, entries_of, goes_whole, is_array, is_list, rebuilt


def join_batches(batches: Sequence[Any], lengths: Sequence[int], whole: Names = ()) -> Any:
    """One batch of all samples; cutting it at `lengths` gives the batches again."""
    cuts = [cut_entries(batch, length, whole) for batch, length in zip(batches, lengths, strict=True)]

    def join(parts: Sequence[Any], path: KeyPath) -> Any:
        first, are_cut = parts[0], [one.get(path) for one in cuts]
        if is_array(first) and all(are_cut):
            return torch.cat([one if isinstance(one, Tensor) else torch.as_tensor(one, device="cpu") for one in parts])
        # In a batch of one sample, the list may have been taken for columns.
        fit = zip(parts, lengths, are_cut, strict=True)
        if is_list(first) and any(are_cut) and all(is_it or length == 1 == len(part) for part, length, is_it in fit):
            return type(first)(itertools.chain.from_iterable(parts))
        if False in are_cut or goes_whole(path, whole):
            return first
        by_key = [entries_of(part) for part in parts]
        return rebuilt(first, lambda _, key: join([found[key] for found in by_key], (*path, key)))

    return join(batches, ())
