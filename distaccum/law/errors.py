"""Errors, and warnings about what is slower or less exact than requested."""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Sequence
from pathlib import Path

PACKAGE = f"{Path(__file__).parent.parent}{os.sep}"


class DistaccumError(RuntimeError):
    """A broken protocol, such as `step()` in mid-window; its text says what was seen, what was expected, and the cure.

    Wrong arguments raise ValueError or TypeError. Where ranks can know of each other's error, all of them raise.
    """


class LostRanksError(DistaccumError):
    """Contact with other ranks is lost: they died or did not arrive, so no error can be reported to them.

    The process group cannot be used any more: start all ranks again, from a checkpoint.
    """


def all_or_none(failed: Sequence[object], error: Exception | None, message: str) -> None:
    """Raises on every rank if any has an error: a rank that has one its own, the others a DistaccumError.

    `failed` has for each rank its error in short, or a flag, which all ranks know; in the message `{ranks}` stands for
    those that failed, and `{why}` for their errors.
    """
    if error is not None:
        try:
            raise error
        finally:
            del error  # or its traceback would keep itself
    if any(failed):
        why = "; ".join(dict.fromkeys(str(one) for one in failed if one))
        raise DistaccumError(message.replace("{ranks}", ranks_where(failed)).replace("{why}", why))


def ranks_where(flags: Sequence[object]) -> str:
    """The ranks whose flag is set, as an error lists them.

    >>> ranks_where([True, False, True])
    '0, 2'
    """
    return ", ".join(str(rank) for rank, flag in enumerate(flags) if flag)


def warn(message: str) -> None:
    """A warning at the line of the caller's code that led here, however deep in this package it was seen."""
    frame, level = inspect.currentframe(), 1  # not kept: a frame that holds itself lives on, and all that called it
    while frame is not None and frame.f_back is not None and frame.f_code.co_filename.startswith(PACKAGE):
        frame, level = frame.f_back, level + 1
    del frame
    warnings.warn(message, stacklevel=level)


class Once:
    """Warns once for each key: on rank 0, or on each rank of what it alone sees, as its data."""

    def __init__(self, rank: int) -> None:
        self._is_first_rank = rank == 0
        self.keys: set[str] = set()

    def __call__(self, key: str, message: str) -> None:
        if key not in self.keys and self._is_first_rank:
            warn(message)
        self.keys.add(key)

    def on_each_rank(self, key: str, message: str) -> None:
        if key not in self.keys:
            self.keys.add(key)
            warn(message)
