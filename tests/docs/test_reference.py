"""The reference: docstrings describe each public argument, and docs/reference.md shows each public name."""

import inspect
import pydoc
import re
from functools import cached_property
from pathlib import Path

import pytest

import distaccum
from distaccum import batchnorm, extensions, feeding

REFERENCE = Path(__file__).parents[2] / "docs" / "reference.md"
OPENED = [distaccum.Accumulator, distaccum.Window, distaccum.Update, distaccum.Report, distaccum.Forecast]
OPENED += [distaccum.Extension]
MADE_FOR_CALLERS = {distaccum.Window, distaccum.Update, distaccum.Report, distaccum.Forecast}  # which nobody calls
SECTION = re.compile(r"^(\w+):$")
ENTRY = re.compile(r"^ {4}([*\w]+(?:, [*\w]+)*)(?: \(.*?\))?: \S")


def section(doc, name):
    """The names that a section of a docstring describes."""
    found, is_in = set(), False
    for line in inspect.cleandoc(doc).splitlines():
        if heading := SECTION.match(line):
            is_in = heading[1] == name
        elif is_in and (entry := ENTRY.match(line)):
            found.update(one.strip("* ") for one in entry[1].split(","))
    return found


def undescribed(name, member):
    """What a public function, method or class lacks, as texts."""
    doc = member.__doc__ if isinstance(member, type) else inspect.getdoc(member)
    if not doc or (isinstance(member, type) and "(" in doc.split("\n")[0].partition(" ")[0]):  # dataclass makes one
        return [f"{name} has no docstring"]
    if not callable(member) or (isinstance(member, type) and issubclass(member, Exception)):
        return []
    if member in MADE_FOR_CALLERS:
        fields = getattr(member, "__dataclass_fields__", {})
        public = {one for one in fields if not one.startswith("_")}
        return [f"{name}.{one}" for one in sorted(public - section(doc, "Attributes"))]
    given = set(inspect.signature(member).parameters) - {"self", "cls"}
    said = section(doc, "Args")
    named = set(re.findall(r"`(\w+)`", doc))  # or in the text
    undescribed = [f"{name}({argument})" for argument in sorted(given - said - named)]
    return undescribed + [f"{name} has no {argument}" for argument in sorted(said - given)]


def members_of(kind):
    for name, member in vars(kind).items():
        is_shown = inspect.isfunction(member) or isinstance(member, property | cached_property)
        if is_shown and not name.startswith("_"):
            yield f"{kind.__name__}.{name}", member


def public():
    yield from ((name, getattr(distaccum, name)) for name in distaccum.__all__)
    yield from ((f"extensions.{name}", getattr(extensions, name)) for name in extensions.__all__)
    yield from (("batchnorm.freeze", batchnorm.freeze), ("batchnorm.to_groupnorm", batchnorm.to_groupnorm))
    yield "feeding.trim_padding", feeding.trim_padding
    for kind in OPENED:
        yield from members_of(kind)


@pytest.mark.parametrize(("name", "member"), [pytest.param(*one, id=one[0]) for one in public()])
def test_arguments_are_described(name, member):
    assert undescribed(name, member) == []


def test_help_shows_names_for_defaults():
    text = pydoc.plaintext.document(distaccum.Accumulator)
    assert text.count("count: 'Count | Mapping[str, Count]' = count_samples") == 2  # of the class and of __init__
    assert " at 0x" not in text


def test_missing_descriptions_are_found():
    class Bare:
        def bare(self, a): ...

        def half(self, a, *, b=1, **named):  # noqa: D417  # to be found
            """The sum.

            Args:
                a, **named: Numbers,
                    b: is no argument.
                c: Gone.
            """

    found = [one for name, member in members_of(Bare) for one in undescribed(name, member)]
    assert found == ["Bare.bare has no docstring", "Bare.half(b)", "Bare.half has no c"]


def test_public_names_stand_in_the_reference():
    text = REFERENCE.read_text()
    shown = set(re.findall(r"^\.\. auto\w+:: distaccum\.([\w.]+)", text, re.MULTILINE))
    assert set(distaccum.__all__) <= shown
    assert shown >= {"batchnorm.freeze", "batchnorm.to_groupnorm", "engines.Engine"}
    assert all(f"`{name}`" in text.partition("\n## ")[0] for name in distaccum.__all__)
