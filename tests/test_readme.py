"""The README's code runs, and prints what it says that it prints.

Each python block runs in a namespace of its own, on as many ranks as its fence says (```python ranks=2).
A comment behind a print is what it must give, one after the other where ` | ` is between.
"""

from __future__ import annotations

import io
import re
import warnings
from contextlib import redirect_stdout
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"
BLOCKS = re.findall(r"^```python(?: ranks=(\d+))?\n(.*?)^```", README.read_text(), re.DOTALL | re.MULTILINE)


def printed_by(code):
    warnings.simplefilter("error")
    out = io.StringIO()
    with redirect_stdout(out):
        exec(compile(code, "README.md", "exec"), {"__name__": "__main__"})
    return out.getvalue().strip().splitlines()


@pytest.mark.parametrize(("num", "code"), BLOCKS, ids=[str(i) for i in range(len(BLOCKS))])
def test_block(ranks, num, code):
    comments = re.findall(r"^ *print\(.*\)  # (.*)$", code, re.MULTILINE)
    expected = [line.strip() for comment in comments for line in comment.split(" | ")]
    for printed in ranks(int(num)).run(printed_by, code) if num else [printed_by(code)]:
        assert [line.strip() for line in printed] == expected


def test_the_readme_has_blocks():
    assert len(BLOCKS) > 5


def test_all_links_in_the_repository_lead_somewhere():
    for target in re.findall(r"\]\(([^)#:]+)\)", README.read_text()):
        assert (README.parent / target).exists(), target
