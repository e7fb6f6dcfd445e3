"""Fits lines to the terminal."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterable


def fitted(lines: Iterable[str], indent: int = 4) -> str:
    """Joins the lines into one text; those that are too long go on in new lines, indented by `indent`."""
    columns = max(20, min(shutil.get_terminal_size((120, 24)).columns, 120))
    found = []
    for line in lines:
        margin = " " * (len(line) - len(line.lstrip()) + indent)
        fits = textwrap.wrap(line, columns, subsequent_indent=margin, break_long_words=False, break_on_hyphens=False)
        found += fits or [line]
    return "\n".join(found)
