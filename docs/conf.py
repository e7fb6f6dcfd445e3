"""Sphinx configuration: Markdown by MyST, the reference from docstrings, links out of docs/ by address."""

from __future__ import annotations

import importlib.metadata
import os
import re
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util import logging

project = "distaccum"
author = "the developers of distaccum"
copyright = author  # noqa: A001  # Sphinx's name for it
metadata = importlib.metadata.metadata("distaccum")
release = metadata["Version"]
REPOSITORY = dict(url.split(", ", 1) for url in metadata.get_all("Project-URL"))["Repository"]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 4  # in the form that hosting sites use
exclude_patterns = ["_*"]
highlight_language = "text"  # a fence without a language shows output
default_role = "code"  # the role of single backticks in docstrings
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints = "signature"
napoleon_numpy_docstring = False
maximum_signature_line_length = 100
python_display_short_literal_types = True

html_theme = "furo"
html_title = f"distaccum {release}"
html_logo = html_favicon = "images/logo.svg"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = ["site.js"]
html_copy_source = False
html_show_sourcelink = False
html_theme_options = {"source_repository": REPOSITORY, "source_branch": "main", "source_directory": "docs/"}

DOCS = Path(__file__).parent
html_search_scorer = str(DOCS / "_static" / "scorer.js")
RESULTS = DOCS.parent / "launch" / "results"
MEASURED = "measured"  # a link to launch/results, which makes its files pages
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\((?![a-z]+:|#)([^)#\s]*)(#[^)\s]*)?\)")
PICTURE = re.compile(r"!\[([^\]]*)\]\(\.\./launch/results/")
MOVED = {
    "context": "meshes.html#context-parallelism",
    "doctor": "plan.html",
    "engine": "how.html#a-new-engine",
    "experts": "meshes.html#expert-parallelism",
    "fabric": "accelerate.html#fabric",
    "field": "results.html#wrong-in-public",
    "limits": "faq.html#limits",
    "noise": "extensions.html#the-noise-scale",
    "pairs": "losses.html#losses-over-pairs",
    "pipelines": "meshes.html#pipelines",
    "resume": "faults.html#resume",
    "rl": "losses.html#reinforcement-learning-and-preferences",
    "tokens": "cutting.html#by-tokens",
}


def lead_on(app: Sphinx, page: str, source: list[str]) -> None:
    """Points links to results at their pages, and others out of docs/ at the repository, where targets must exist."""
    is_result = page.startswith(f"{MEASURED}/")
    folder = (RESULTS.parent / "results" / page.removeprefix(f"{MEASURED}/") if is_result else DOCS / page).parent
    up = "../" * page.count("/")
    lists = source[0]
    if page == "index":
        source[0] = first_screen()

    def lead(match: re.Match[str]) -> str:
        words, path, anchor = match[1], match[2], match[3] or ""
        target = Path(os.path.normpath(folder / path))
        if target.is_relative_to(RESULTS) and target.suffix == ".md":
            name = target.relative_to(RESULTS).with_suffix("").as_posix()
            words = words.replace("`", "")
            return f"{{doc}}`{words} </{MEASURED}/{name}>`"  # a plain link would follow the symbolic link out of docs/
        if target.is_relative_to(DOCS):
            return f"[{words}]({up}{target.relative_to(DOCS).as_posix()}{anchor})" if is_result else match[0]
        if not target.exists():
            logging.getLogger(__name__).warning("%s is not in the repository", path, location=page)
        kind = "tree" if target.is_dir() else "blob"
        return f"[{words}]({REPOSITORY}/{kind}/main/{target.relative_to(DOCS.parent).as_posix()}{anchor})"

    source[0] = LINK.sub(lead, PICTURE.sub(rf"![\1]({up}{MEASURED}/", source[0]))
    if page.rpartition("/")[2] == "index":
        source[0] += contents(lists)
    if page == "results":
        pages = sorted(path.relative_to(RESULTS).with_suffix("") for path in RESULTS.rglob("*.md"))
        source[0] += "\n\n```{toctree}\n:hidden:\n\n" + "\n".join(f"{MEASURED}/{one}" for one in pages) + "\n```\n"


def first_screen() -> str:
    """The site's first page: what the README begins with, whose links are those of a page in docs/."""
    first, *sections = re.split(
        r"^(?=## )", (DOCS.parent / "README.md").read_text(encoding="utf-8"), flags=re.MULTILINE
    )
    wanted = ("## Which are you?", "## Audit what you have", "## Before and after")
    text = first + "".join(section for heading in wanted for section in sections if section.startswith(heading))
    return re.sub(r"\]\((?![a-z]+:|#)(docs/)?", lambda match: "](" if match[1] else "](../", text)


def keep_numbers(app: Sphinx, doctree: nodes.document) -> None:
    """Keeps tables from breaking a line within 1e-16."""
    for cell in doctree.findall(nodes.entry):
        for text in [*cell.findall(nodes.Text)]:
            if text.parent is not None and not isinstance(text.parent, nodes.literal):
                text.parent.replace(text, nodes.Text(re.sub(r"(?<=\de-)(?=\d)", "\N{WORD JOINER}", text)))


def leave_notes(app: Sphinx, exception: Exception | None) -> None:
    """Makes the address of a page that was merged into another lead there."""
    for name, target in MOVED.items():
        note = f'<!doctype html><meta http-equiv="refresh" content="0; url={target}"><a href="{target}">moved</a>\n'
        (Path(app.outdir) / f"{name}.html").write_text(note, encoding="utf-8")


def contents(index: str) -> str:
    """The side bar: the pages that an index lists under each of its headings, so that no page is listed twice."""
    found = ""
    for section in re.split(r"^## ", index, flags=re.MULTILINE):
        pages = dict.fromkeys(re.findall(r"\]\((?!\.\./)([\w/]+)\.md\)", section))
        caption = section.partition("\n")[0] if not section.startswith("# ") else ""
        found += "\n\n```{toctree}\n:hidden:\n" + f":caption: {caption}\n" * bool(caption) + "\n"
        found += "\n".join(pages) + "\n```\n"
    return found


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("source-read", lead_on)
    app.connect("doctree-read", keep_numbers)
    app.connect("build-finished", leave_notes)
    return {"parallel_read_safe": True}
