"""Fits lines and numbers to the terminal."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterable


def fitted(lines: Iterable[str], indent: int = 4) -> str:
    """Joins the lines into one text; those that are too long go on in new lines, indented by `indent`."""
    columns = max(20, min(shutil.get_terminal_size((120, 24)).columns, 120))
    text = []
    for line in lines:
        margin = " " * (len(line) - len(line.lstrip()) + indent)
        fits = textwrap.wrap(line, columns, subsequent_indent=margin, break_long_words=False, break_on_hyphens=False)
        text += fits or [line]
    return "\n".join(text)


def bytes_text(number: int | None) -> str:
    if number is None:
        return "-"
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= size:
            return f"{number / size:.4g} {unit}" if number < 1000 * size else f"{number / size:,.0f} {unit}"
    return f"{number} B"
