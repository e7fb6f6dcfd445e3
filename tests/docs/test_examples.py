"""docs/examples: each diff fits what it was made from, and pages count the diff's lines."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
DIFFS = sorted(EXAMPLES.glob("*.diff"))
_spec = importlib.util.spec_from_file_location("distaccum_examples_get", EXAMPLES / "get.py")
assert _spec is not None and _spec.loader is not None
get = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = get
_spec.loader.exec_module(get)


def files_of_hunks(hunks):
    """The smallest files that the hunks fit, before and after: blank lines stand where the diff shows nothing."""
    before, after = [], []
    for hunk in hunks:
        start = hunk.old_start - 1 if hunk.old_length else hunk.old_start
        blank = [f"line {number}" for number in range(len(before), start)]
        before += blank + hunk.old
        after += blank + hunk.new
    return "\n".join([*before, "end", ""]), "\n".join([*after, "end", ""])


def test_table_and_diffs_name_the_same_examples():
    assert sorted(get.originals()) == [path.stem for path in DIFFS]
    for path in DIFFS:
        assert set(get.parse(path.read_text())) <= set(get.originals()[path.stem]["files"])


@pytest.mark.parametrize("path", DIFFS, ids=lambda path: path.stem)
def test_hunks_are_consistent_and_apply(path):
    for hunks in get.parse(path.read_text()).values():
        shift, end = 0, 0
        for hunk in hunks:
            assert hunk.old_start > end, "hunks overlap or are out of order"
            # A side without lines counts from the line before.
            assert hunk.new_start + (not hunk.new_length) == hunk.old_start + (not hunk.old_length) + shift
            shift += hunk.new_length - hunk.old_length
            end = hunk.old_start + hunk.old_length - 1
        before, after = files_of_hunks(hunks)
        assert get.apply(before, hunks) == after
        with pytest.raises(get.ExampleError, match="does not fit"):
            get.apply("one more line\n" + before, hunks)


@pytest.mark.parametrize("path", DIFFS, ids=lambda path: path.stem)
def test_page_and_index_count_the_lines_of_the_diff(path):
    removed, added = get.count(path.read_text())
    counted = rf"\b{removed}\b.{{0,60}}?\b{added}\b"  # "removes 24 lines and adds 8", "| 24 | 8 |", "-24 +8"
    assert re.search(counted, " ".join(path.with_suffix(".md").read_text().split()))
    row = re.search(rf"^\| \[[^|]*\]\({path.stem}\.md\).*$", (EXAMPLES / "index.md").read_text(), re.MULTILINE)
    assert row is not None and re.search(counted, row.group())
