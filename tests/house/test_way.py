"""The way of an update, as `python -m tests.programs.way` prints it: its files, and its changes between them."""

import sys

import pytest

from tests.programs.way import way_of, way_of_an_update
from tests.support.ranks import on_ranks


@pytest.mark.parametrize(("has_more", "most"), [(False, 85), (True, 94)])
@on_ranks(2)
def test_update_enters_few_files(has_more, most):
    way = way_of_an_update(has_more)
    assert len(way.files) <= 12, sorted(way.files)
    assert way.changes <= most


def test_way_counts_files_and_changes(tmp_path):
    for name, text in (("one", "import two\ndef f():\n    two.g()\n    two.g()\n"), ("two", "def g(): pass\n")):
        (tmp_path / f"{name}.py").write_text(text)
    sys.path.insert(0, str(tmp_path))
    try:
        from one import f
    finally:
        sys.path.remove(str(tmp_path))
    way = way_of(f, str(tmp_path))
    assert [tuple(call) for call in way.calls] == [(0, "one.py", 2, "f"), *[(1, "two.py", 1, "g")] * 2]
    assert (way.files, way.changes) == ({"one.py", "two.py"}, 4)
