"""Text: the wording of errors and warnings."""

from __future__ import annotations

import inspect
import os
import reprlib
import warnings
from collections.abc import Sequence
from pathlib import Path

PACKAGE = f"{Path(__file__).parent}{os.sep}"


def ranks_where(flags: Sequence[object]) -> str:
    """The ranks whose flag is set, as an error lists them: "0, 2"."""
    return ", ".join(str(rank) for rank, flag in enumerate(flags) if flag)


def in_short(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def shown(value: object) -> str:
    """A value as an error shows it: its repr, cut short."""
    return " ".join(reprlib.repr(value).split())


def plural(number: int, noun: str) -> str:
    """A number with its noun, as "1 rank", "1,024 ranks" or "2 micro-batches"."""
    ending = "es" if noun.endswith("ch") else "s"
    return f"{number:,} {noun}{ending if number != 1 else ''}"


def a(noun: str) -> str:
    """A noun with its article, as "an int" or "a list"."""
    return f"{'an' if noun[:1].lower() in 'aeio' else 'a'} {noun}"


def warn(message: str) -> None:
    """Warns at the line of the caller's code that led here, however deep in this package the warning comes from."""
    level = 1
    frame = inspect.currentframe()  # deleted below: a frame that holds itself lives on, with its callers
    while frame is not None and frame.f_back is not None and frame.f_code.co_filename.startswith(PACKAGE):
        frame = frame.f_back
        level += 1
    del frame
    warnings.warn(message, stacklevel=level)


class Once:
    """Warns once for each key: on rank 0, or on each rank about what it alone sees, such as its data."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.keys: set[str] = set()

    def __call__(self, key: str, message: str, *, on_each_rank: bool = False) -> None:
        is_new = key not in self.keys
        self.keys.add(key)
        if is_new and (on_each_rank or self._rank == 0):
            warn(message)


def shorten(names: Sequence[str]) -> str:
    """The first three names, and how many more there are."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
