"""Tables and lines that fit the terminal."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterable, Sequence

NARROWEST, WIDEST = 20, 120  # columns


def width() -> int:
    """Columns of the terminal, within readable limits."""
    return max(NARROWEST, min(shutil.get_terminal_size((WIDEST, 24)).columns, WIDEST))


def wrapped(lines: Iterable[str], columns: int, indent: int = 4) -> list[str]:
    """The lines, with the parts that do not fit continued on new lines, indented by `indent`.

    >>> wrapped(["  one two three"], columns=9)
    ['  one two', '      three']
    """
    found = []
    for line in lines:
        margin = " " * (len(line) - len(line.lstrip()) + indent)
        fits = textwrap.wrap(
            line, columns, subsequent_indent=margin, break_long_words=False, break_on_hyphens=False
        )  # an option stays whole
        found += fits or [line]
    return found


def table(rows: Sequence[Sequence[str]], columns: int) -> list[str]:
    """Aligned cells, the first of each row its name; columns that do not fit follow below, with the names again.

    >>> table([["", "first", "second"], ["rank 0", "1", "2"]], columns=16)
    ['          first', '  rank 0      1', '', '          second', '  rank 0       2']
    >>> table([["", "first", "second"], ["rank 0", "1", "2"]], columns=30)
    ['          first  second', '  rank 0      1       2']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines: list[str] = []
    start = 1
    while start < len(widths):
        stop, room = start + 1, columns - 2 - widths[0] - 2 - widths[start]
        while stop < len(widths) and room >= 2 + widths[stop]:
            room -= 2 + widths[stop]
            stop += 1
        lines += [""] if lines else []
        for name, *cells in ((row[0], *row[start:stop]) for row in rows):
            padded = "  ".join(f"{cell:>{size}}" for cell, size in zip(cells, widths[start:stop], strict=True))
            lines.append(f"  {name:<{widths[0]}}  {padded}".rstrip())
        start = stop
    return lines
