"""Budgets: how many lines a file or a room may have. A number here is what was reached, and may become smaller."""

from collections import Counter

import pytest

from distaccum.engines import Engine
from tests.house.test_architecture import Source, sources

# A room ends with a slash, and has the lines of all files in it.
BUDGETS = {
    "accumulator.py": 300,
    "adapter.py": 70,
    "batch.py": 345,
    "doors.py": 70,
    "engines/": 1505,
    "engines/private/": 310,
    "extension.py": 120,
    "guard.py": 260,
    "meshes/": 680,
    "norms.py": 55,
    "law.py": 240,
    "options.py": 215,
    "scaling.py": 80,
    "text.py": 60,
    "update.py": 95,
    "wrappers/": 985,
}
# Further below its number than this, a file gets a smaller one.
SLACK = 15


def lines_of(source: Source, place: str) -> int:
    return sum(len(text.splitlines()) for path, text in source.items() if path == place or path.startswith(place + "/"))


@pytest.mark.parametrize("place", BUDGETS)
def test_file_or_room_keeps_its_budget(place):
    lines = lines_of(sources(), place.rstrip("/"))
    assert BUDGETS[place] - SLACK <= lines <= BUDGETS[place]


def test_lines_are_those_of_a_file_or_of_all_files_in_a_room():
    source = {"a.py": "\n" * 3, "a/b.py": "\n" * 4, "a/c/d.py": "\n" * 5, "ab/e.py": "\n"}
    assert Counter({place: lines_of(source, place) for place in ("a.py", "a", "a/c")}) == {"a.py": 3, "a": 9, "a/c": 5}


def test_engine_has_few_members():
    members = [name for name in vars(Engine) if name == "__init__" or not name.startswith("__")]
    assert len(members) <= 24, members
