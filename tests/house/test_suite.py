"""The tests themselves: their names are sentences, one file uses private names, and mutants.py makes real mutants."""

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

from tests.programs import mutants

FILES = sorted(Path(__file__).parents[1].glob("*/test_*.py"))
# An article, pronoun or conjunction in the place of the sentence's noun.
NO_SUBJECT = "a an the it its they their that this those these what which who whose where when how if nobody nothing"
HELD = "accumulator window update stepper"  # the tests' variables for objects of the library


def unfit_names(text: str) -> list[str]:
    names = re.findall(r"^ *def test_(\w+)", text, re.MULTILINE)
    twice = [name for name, number in Counter(names).items() if number > 1]
    first = re.compile(rf"({'|'.join(NO_SUBJECT.split())})_")
    return [name for name in names if first.match(name) or "_" not in name] + twice


def reaches(text: str) -> list[str]:
    return re.findall(rf"\b(?:{'|'.join(HELD.split())})\._[a-z]\w+", text)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_names_have_a_subject_and_private_names_stay_in_one_file(path):
    text = path.read_text()
    if path.stem != "test_suite":  # this file quotes examples
        assert not unfit_names(re.sub(r'""".*?"""', "", text, flags=re.DOTALL))
        assert not reaches(text), "go through tests/support/inside.py, with the reason"


def test_rules_can_fail():
    assert unfit_names("def test_the_window():\n\ndef test_law():\n") == ["the_window", "law"]
    assert unfit_names("def test_window_ends():\n\ndef test_window_ends():\n") == ["window_ends"]
    assert reaches("seen = accumulator._engine.finish") == ["accumulator._engine"]


def test_seed_gives_the_same_mutants_of_valid_python_that_differ():
    found = mutants.chosen(seed=7, num=40)
    assert found == mutants.chosen(seed=7, num=60)[:40]
    for one in found:
        before = (mutants.ROOT / "distaccum" / f"{one.file}.py").read_text()
        assert ast.dump(ast.parse(one.source)) != ast.dump(ast.parse(before)), one
