"""The guide's pictures are what docs/images/draw.py draws."""

import runpy
from pathlib import Path

import pytest

IMAGES = Path(__file__).parents[2] / "docs" / "images"
DRAW = runpy.run_path(str(IMAGES / "draw.py"))


@pytest.mark.parametrize("name", DRAW["PICTURES"])
def test_file_is_what_the_program_draws(name, tmp_path):
    DRAW["PICTURES"][name]().write(tmp_path / name)
    assert (tmp_path / name).read_text() == (IMAGES / name).read_text(), "run: python docs/images/draw.py"
