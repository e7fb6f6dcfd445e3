"""How Sphinx builds the guide: Markdown by MyST, the reference from docstrings, links that leave docs/ by address."""

from __future__ import annotations

import importlib.metadata
import os
import re
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx
from sphinx.util import logging

project = "distaccum"
author = "the developers of distaccum"
copyright = author  # noqa: A001  # Sphinx's name for it
metadata = importlib.metadata.metadata("distaccum")
release = metadata["Version"]
REPOSITORY = dict(url.split(", ", 1) for url in metadata.get_all("Project-URL"))["Repository"]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 4  # of the form that hosting sites give them
exclude_patterns = ["_*"]
default_role = "code"  # a single backtick in a docstring
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints = "signature"
napoleon_numpy_docstring = False
maximum_signature_line_length = 100
python_display_short_literal_types = True

html_theme = "furo"
html_title = "distaccum"
html_copy_source = False
html_show_sourcelink = False
html_theme_options = {"source_repository": REPOSITORY, "source_branch": "main", "source_directory": "docs/"}

DOCS = Path(__file__).parent
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\((\.\./[^)#\s]*)(#[^)\s]*)?\)")


def lead_out(app: Sphinx, page: str, source: list[str]) -> None:
    """Links that leave docs/ become links to the repository; what they lead to must be there."""
    folder = (DOCS / page).parent

    def to_repository(match: re.Match[str]) -> str:
        words, path, anchor = match[1], match[2], match[3] or ""
        target = Path(os.path.normpath(folder / path))
        if target.is_relative_to(DOCS):
            return match[0]
        if not target.exists():
            logging.getLogger(__name__).warning("%s is not in the repository", path, location=page)
        kind = "tree" if target.is_dir() else "blob"
        return f"[{words}]({REPOSITORY}/{kind}/main/{target.relative_to(DOCS.parent).as_posix()}{anchor})"

    source[0] = LINK.sub(to_repository, source[0])
    if page.rpartition("/")[2] == "index":
        source[0] += contents(source[0])


def contents(index: str) -> str:
    """The side bar: what an index lists under each of its headings, so that no page is listed twice."""
    found = ""
    for section in re.split(r"^## ", index, flags=re.MULTILINE):
        pages = dict.fromkeys(re.findall(r"\]\((?!\.\./)([\w/]+)\.md\)", section))
        caption = section.partition("\n")[0] if not section.startswith("# ") else ""
        found += "\n\n```{toctree}\n:hidden:\n" + f":caption: {caption}\n" * bool(caption) + "\n"
        found += "\n".join(pages) + "\n```\n"
    return found


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("source-read", lead_out)
    return {"parallel_read_safe": True}
