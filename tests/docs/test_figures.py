"""Figures: a number in a paragraph or table of the README or guide that cites a page of results stands on that page.

A paragraph or a row of a table cites the pages that it links to; a row without any, those of the paragraph before its
table. A number is right if one on a cited page rounds to it (1.04 for 1.038, 37% for 3.7e-01).
"""

import re
from collections.abc import Iterator

import pytest

from tests.support.programs import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
RESULT = re.compile(r"\]\([^)]*launch/results/([\w/]+)\.md(?:#[^)]*)?\)")
NUMBER = re.compile(r"(?<![\w.+-])(\d[\d,]*(?:\.\d+)?(?:e-?\d+)?)(%?)(?![\w]|\.\d)")
# No figures: code, links' targets, dates, versions, and bounds that a test asserts (1e-10).
ASIDE = re.compile(
    r"```.*?```|`[^`]*`|\]\([^)]*\)|\d{4}-\d\d-\d\d|(?:torch|transformers|DeepSpeed|Accelerate|Python) [\d.]+|\b1e-\d+",
    re.DOTALL,
)


def cited(text: str) -> Iterator[tuple[str, frozenset[str]]]:
    """Each paragraph and row of a page of the guide, with the pages that it cites."""
    before: frozenset[str] = frozenset()
    for paragraph in re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE).split("\n\n"):
        is_table = paragraph.lstrip().startswith("|")
        for part in re.split(r"\n(?=\| |- |\d+\. )", paragraph.strip()):
            own = frozenset(RESULT.findall(part))
            yield part, own or (before if is_table else own)
        before = before if is_table else frozenset(RESULT.findall(paragraph))


def figures(text: str) -> list[tuple[str, bool]]:
    """Numbers with a decimal point or at least two digits, and whether they are percentages."""
    found = NUMBER.findall(ASIDE.sub(" ", text))
    return [(number.rstrip(","), bool(percent)) for number, percent in found if len(number.rstrip(",")) > 1]


def is_on(number: str, percent: bool, page: list[float]) -> bool:
    plain = number.replace(",", "")
    value, digits = float(plain), len(plain.partition("e")[0].partition(".")[2])
    scale = 100 if percent else 1
    if "e" in plain:
        return any(f"{one:.{digits}e}" == f"{value:.{digits}e}" for one in page)
    return any(abs(scale * one - value) <= 0.5 * 10**-digits + 1e-9 for one in page) or (percent and value in page)


def numbers_of(name: str) -> list[float]:
    text = re.sub(r"\d{4}-\d\d-\d\d", "", (ROOT / "launch" / "results" / f"{name}.md").read_text())
    return [float(one.replace(",", "")) for one in re.findall(r"\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?", text)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_figures_stand_on_the_pages_that_are_cited(page):
    wrong = []
    for part, names in cited(page.read_text()):
        known = [number for name in sorted(names) for number in numbers_of(name)]
        for number, percent in figures(part) if names else []:
            if not is_on(number, percent, known):
                wrong.append(f"{number}{'%' * percent} is not on {', '.join(sorted(names))}: {part.strip()[:100]}")
    assert wrong == []


def test_wrong_figure_is_found():
    page = [1.038, 0.37, 402.0, 2.6e-15]
    assert all(is_on(*one, page) for one in [("1.04", False), ("37", True), ("402", False), ("2.6e-15", False)])
    assert not any(is_on(*one, page) for one in [("1.05", False), ("38", True), ("404", False), ("4.4e-15", False)])
    text = "It takes 1.05 s ([all](../launch/results/x.md)).\n\n| row | 404 |\n\nElsewhere 12 is none."
    assert [(figures(part), set(names)) for part, names in cited(text)] == [
        ([("1.05", False)], {"x"}),
        ([("404", False)], {"x"}),
        ([("12", False)], set()),
    ]
