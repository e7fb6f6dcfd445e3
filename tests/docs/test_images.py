"""The guide's pictures are what docs/images/draw.py draws, and can be read on a white page and on a dark one."""

from __future__ import annotations

import runpy
from pathlib import Path
from xml.etree import ElementTree

import pytest

IMAGES = Path(__file__).parents[2] / "docs" / "images"
DRAW = runpy.run_path(str(IMAGES / "draw.py"))
SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("name", DRAW["PICTURES"])
def test_file_is_what_the_program_draws(name, tmp_path):
    DRAW["PICTURES"][name]().write(tmp_path / name)
    assert (tmp_path / name).read_text() == (IMAGES / name).read_text(), "run: python docs/images/draw.py"


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
