"""The guide's pictures are what docs/images/draw.py draws, and can be read on a white page and on a dark one."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from xml.etree import ElementTree

import pytest

IMAGES = Path(__file__).parent.parent / "docs" / "images"
DRAW = runpy.run_path(str(IMAGES / "draw.py"))
SVG = "{http://www.w3.org/2000/svg}"


def luminance(colour):
    """As in WCAG 2."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one, other):
    lighter, darker = sorted((luminance(one), luminance(other)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


@pytest.mark.parametrize("name", DRAW["PICTURES"])
def test_file_is_what_the_program_draws(name, tmp_path):
    DRAW["PICTURES"][name]().write(tmp_path / name)
    assert (tmp_path / name).read_text() == (IMAGES / name).read_text(), "run: python docs/images/draw.py"


def test_every_picture_has_its_program():
    assert {path.name for path in IMAGES.glob("*.svg")} == set(DRAW["PICTURES"])


@pytest.mark.parametrize("name", DRAW["PICTURES"])
def test_picture_has_a_title_and_a_description_and_stays_within_its_edges(name):
    text = (IMAGES / name).read_text()
    root = ElementTree.fromstring(text)
    assert root.findtext(f"{SVG}title")
    assert len(root.findtext(f"{SVG}desc")) > 100
    assert len(text.encode()) <= 12 * 1024
    width, height = (float(root.get(side)) for side in ("width", "height"))
    for box in root.iter(f"{SVG}rect"):
        x, y, w, h = (float(box.get(side)) for side in ("x", "y", "width", "height"))
        assert 0 <= x <= x + w <= width, ElementTree.tostring(box)
        assert 0 <= y <= y + h <= height, ElementTree.tostring(box)


@pytest.mark.parametrize("name", DRAW["PICTURES"])
def test_colours_can_be_read_on_a_white_page_and_on_a_dark_one(name):
    text = (IMAGES / name).read_text()
    free = set(re.findall(r'<text[^>]*fill="(#\w{6})"', text)) - {DRAW["ON_FILL"]}
    fills = set(re.findall(r'<rect[^>]*fill="(#\w{6})"', text))
    assert free == {DRAW["TEXT"]}
    for page in ("#ffffff", "#0d1117"):
        assert all(contrast(colour, page) > 4.3 for colour in free)
        assert all(contrast(colour, page) > 3 for colour in fills)
    assert all(contrast(DRAW["ON_FILL"], colour) > 4.5 for colour in fills)
