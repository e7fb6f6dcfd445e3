"""Private names of other libraries: each is in its room's table, is there, and can go as the table promises."""

import ast
import inspect
import itertools
import re
from contextlib import ExitStack
from functools import partial
from importlib import import_module, metadata
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest

from distaccum import private
from tests.house.test_architecture import ROOT, private_names
from tests.programs.matrix import LIBRARIES
from tests.support.engines import FOR_ONE_RANK, KINDS, LAYOUTS, Run
from tests.support.ranks import on_ranks
from tests.support.versions import needs, numbers
from tests.support.windows import refused, says

FILES = sorted([*(ROOT / "distaccum").glob("**/private.py"), *(ROOT / "distaccum").glob("**/private/*.py")])
ROOMS = {str(path.relative_to(ROOT / "distaccum")): path for path in FILES if "\nNAMES = (" in path.read_text()}


def module_of(room: str) -> Any:
    return import_module("distaccum." + room.removesuffix(".py").replace("/", "."))


def table(room: str) -> dict[str, tuple[str, str, str, str]]:
    """The rows by the name's last part: the dotted name, what for, since which version, what happens without."""
    return {row[0].rpartition(".")[2]: row for row in module_of(room).NAMES}


# 1. The table lists what the module uses


@pytest.mark.parametrize("room", ROOMS)
def test_table_lists_the_private_names_that_its_module_uses(room):
    assert private_names(ROOMS[room].read_text()) == set(table(room))


# 2. The installed versions have them


def is_there(dotted: str) -> bool:
    """Looked up; what only an object has is looked for in the source of its class or module."""
    *path, last = dotted.split(".")
    owner: Any = import_module(path[0])
    for name in path[1:]:
        owner = getattr(owner, name, None) or import_module(f"{owner.__name__}.{name}")
    return hasattr(owner, last) or bool(re.search(rf"\b{last.removesuffix('Backward')}\b", inspect.getsource(owner)))


def was_seen(name: str, versions: str) -> bool:
    """Returns whether the installed version is of `versions`: since "2.13", or "2.9 to 2.11"."""
    since, _, until = versions.partition(" to ")
    installed = numbers(metadata.version(name.split(".")[0]))
    return installed >= numbers(since) and (not until or installed[:2] <= numbers(until))


def test_names_are_there_in_the_versions_that_the_table_tells():
    rows = [row for room in ROOMS for row in table(room).values()]
    assert len(rows) > 40
    due = [name for name, _, versions, _ in rows if was_seen(name, versions)]
    assert [name for name in due if not is_there(name)] == []


def versions_that_ran() -> dict[str, set[tuple[int, ...]]]:
    """By library, the first two numbers of the versions in the table that tests/programs/matrix.py printed."""
    lines = (ROOT / "CONTRIBUTING.md").read_text().split("| torch | accelerate |")[1].splitlines()
    rows = [line.strip("| ").split(" | ") for line in itertools.takewhile(bool, lines[2:])]
    ran = {name: {numbers(row[i])[:2] for row in rows} for i, name in enumerate(LIBRARIES)}
    return ran | dict.fromkeys(("lightning_fabric", "pytorch_lightning"), ran["lightning"])


def test_tables_tell_versions_that_the_matrix_ran():
    ran = versions_that_ran()
    told = {(name.split(".")[0], versions) for room in ROOMS for name, _, versions, _ in table(room).values()}
    told |= {(library.lower(), versions) for library, versions in private.SEEN.items()}
    never = [(library, one) for library, versions in told for one in re.findall(r"\d+\.\d+", versions)
             if numbers(one) not in ran[library]]  # fmt: skip
    assert never == []


# 3. Each engine answers as its table promises: refused, or exact all the same; a plain module, with any of them gone


def without(name: str, *modules: ModuleType) -> ExitStack:
    """To these modules no object has an attribute of this name."""

    def get(owner: Any, asked: str, *default: Any) -> Any:
        return getattr(owner, "is gone" if asked == name else asked, *default)

    stack = ExitStack()
    for module in modules:
        has = {"hasattr": lambda owner, asked: asked != name and hasattr(owner, asked)}
        stack.enter_context(patch.dict(vars(module), getattr=get, **has))
    return stack


def reads(room: str) -> set[str]:
    """Names that a module reads without asking whether they are there."""
    nodes = ast.walk(ast.parse(ROOMS[room].read_text()))
    return {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)}


@pytest.mark.parametrize("room", ROOMS)
def test_name_that_is_read_unasked_is_refused_where_it_is_missing(room):
    assert [name for name in reads(room) & set(table(room)) if "refused" not in table(room)[name][3]] == []


ENGINES = [
    ("private.py", "plain"),
    ("private.py", "DDP"),
    ("engines/private/ddp.py", "DDP"),
    pytest.param("engines/private/fsdp2.py", "FSDP2", marks=needs("torch", "2.13", "FSDP2")),
]


@pytest.mark.parametrize(("room", "kind"), ENGINES)
@on_ranks(lambda kind, **_: KINDS[kind].world)
def test_engine_without_a_name_answers_as_its_table_promises(room, kind):
    make = partial(Run, kind)
    for name, (*_, answer) in table(room).items():
        with without(name, module_of(room), private):
            if answer == "refused":
                said = refused(make)
                assert says(f"DistaccumError: ...has no {name}, ...; use ...", said), (name, said)
            else:
                run = Run(kind)
                for index, layout in enumerate(LAYOUTS if run.world > 1 else FOR_ONE_RANK):
                    assert max(run.window(layout, index)) <= run.kind.bound, name


def test_rules_can_fail():
    text = "NAMES = (('a._listed',),)\ndef _own(x): x._a, getattr(x, '_b'), replaced(x, _c=1), _own, '_ no name'\n"
    text += "from torch import _d\nclass A:\n    def f(self): self._e\n"
    assert private_names(text) == {"_a", "_b", "_c", "_d"}
    assert is_there("torch.nn.Module._buffers") and not is_there("torch.nn.Module._buffer")
