"""The shape of the library, read from its source: what may import what, how large things are, who knows whom."""

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# From the lowest floor up; a room imports from its own floor and from those below.
FLOORS = (
    "text",
    "law guesses",
    "batch private norms scaling batchnorm feeding",
    "options ranks",
    "adapter meshes",
    "engines",
    "wrappers",
    "choosing job",
    "agreement losses guard parts",
    "batches update",
    "window",
    "planning extension",
    "loader",
    "state runs",
    "accumulator",
    "auditing extensions saving tools trainers",  # rooms that can be taken away
    "transformers lightning __main__",
)
NAMES_ALL = ("__init__.py",)  # names behind which modules of any floor are imported
LARGEST = {"class": 300, "function": 60, "file": 450, "signature": 8}  # in lines of code
LARGER = {"Window": 380}  # an update is read there from top to bottom
FREE_SIGNATURES = {"Accumulator.__init__", "plan"}  # the contract's
FOREIGN_ROOMS = (
    "private.py",
    "engines/private/",
    "wrappers/private.py",
    "meshes/private.py",
    "auditing/private.py",
    "scaling.py",
)
PRIVATE = re.compile(r"_[a-zA-Z]\w*")
# Public in spite of the underscore: a named tuple's.
PUBLIC = {"_fields", "_make", "_replace", "_asdict"}

Source = Mapping[str, str]  # by path in the package


parsed = cache(ast.parse)  # each rule looks at each file


def sources(package: str = "distaccum") -> dict[str, str]:
    folder = ROOT / package
    return {str(path.relative_to(folder)): path.read_text() for path in sorted(folder.rglob("*.py"))}


def room(path: str) -> str:
    return path.split("/")[0].removesuffix(".py")


def floor(name: str) -> int | None:
    return next((i for i, names in enumerate(FLOORS) if name in names.split()), None)


def nodes(source: Source) -> Iterator[tuple[str, ast.AST]]:
    """All nodes of all files, each with its path."""
    yield from ((path, node) for path, text in source.items() for node in ast.walk(parsed(text)))


# 1. Imports run downwards, and in no circle; those for types alone count


def imports(path: str, text: str) -> Iterator[str]:
    """The modules of this package that one imports, dotted: of a package, its names may be modules."""
    package = path.split("/")[:-1]
    for node in ast.walk(parsed(text)):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1] + (node.module or "").split(".") * bool(node.module)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "distaccum":
            base = str(node.module).split(".")[1:]
        else:
            continue
        yield from (".".join([*base, alias.name]) for alias in node.names)


def upward_imports(source: Source) -> Counter[str]:
    found: Counter[str] = Counter()
    for path, text in source.items():
        here = floor(room(path))
        if path in NAMES_ALL:
            continue
        if here is None:
            found[f"{room(path)} is on no floor"] += 1
            continue
        for name in set(imports(path, text)):
            there = floor(name.split(".")[0])
            if there is not None and there > here:
                found[f"{path} imports {name}"] += 1
    return found


def circles(source: Source) -> Counter[str]:
    """The modules of a circle of imports, if there is one."""
    modules = {path.removesuffix(".py").removesuffix("/__init__").replace("/", "."): path for path in source}
    edges: dict[str, set[str]] = {}
    for module, path in modules.items():
        names = set(imports(path, source[path])) if path not in NAMES_ALL else set()
        edges[module] = {found for name in names for found in (name, name.rpartition(".")[0]) if found in modules}
        edges[module].discard(module)
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        return Counter(set(error.args[1]))
    return Counter()


# 2. Sizes


@cache
def lines_of_code(text: str) -> set[int]:
    """The numbers of the lines with a token that is no comment and no part of a docstring or an import."""
    between = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in between:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(parsed(text)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        elif isinstance(node, ast.Module | Definition) and ast.get_docstring(node, clean=False) is not None:
            docstring = node.body[0]
            lines.difference_update(range(docstring.lineno, (docstring.end_lineno or docstring.lineno) + 1))
    return lines


def code_lines(text: str) -> int:
    return len(lines_of_code(text))


def sizes(source: Source) -> Counter[str]:
    """What is larger than it may be, and how large."""
    found: Counter[str] = Counter()
    for path, text in source.items():
        if (lines := code_lines(text)) > LARGEST["file"]:
            found[path] = lines
        for name, node in definitions(parsed(text)):
            kind = "class" if isinstance(node, ast.ClassDef) else "function"
            lines = len(lines_of_code(text).intersection(range(node.lineno, (node.end_lineno or node.lineno) + 1)))
            if lines > LARGER.get(name, LARGEST[kind]) and name not in FREE_SIGNATURES:
                found[f"{path} {name}"] = lines
            if not isinstance(node, ast.ClassDef) and name not in FREE_SIGNATURES:
                given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                number = sum(one.arg not in ("self", "cls") for one in given)
                if number > LARGEST["signature"]:
                    found[f"{path} {name}()"] = number
    return found


Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def definitions(tree: ast.AST, within: str = "") -> Iterator[tuple[str, Definition]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, Definition):
            name = f"{within}{node.name}"
            yield name, node
            yield from definitions(node, f"{name}.")
        else:
            yield from definitions(node, within)


# 3. Private names are their module's; those of other libraries have a room


def private_reaches(source: Source) -> tuple[Counter[str], Counter[str]]:
    """By file, the private names of our other modules, and of other libraries outside of their rooms."""
    own = {path: private_definitions(text) for path, text in source.items()}
    ours: Counter[str] = Counter()
    foreign: Counter[str] = Counter()
    for path, text in source.items():
        if not path.startswith(FOREIGN_ROOMS):
            elsewhere = set().union(*(names for other, names in own.items() if other != path))
            names = private_names(text)
            ours[path] = len(names & elsewhere)
            foreign[path] = len(names - elsewhere)
    return +ours, +foreign


def private_names(text: str) -> set[str]:
    """Names with an underscore that are not this file's own: of attributes, of arguments, in texts, imported."""
    tree = parsed(text)
    rows = [node.value for node in tree.body if isinstance(node, ast.Assign) and "NAMES" in ast.unparse(node.targets)]
    left_out = {id(node) for row in rows for node in ast.walk(row)}
    names: set[str] = set()
    for node in (node for node in ast.walk(tree) if id(node) not in left_out):
        match node:
            case ast.Attribute(value, name) if not (isinstance(value, ast.Name) and value.id == "self"):
                names.add(name)
            case ast.keyword(str(name)):
                names.add(name)
            case ast.Constant(str(value)) if PRIVATE.fullmatch(value):
                names.add(value)
            case ast.ImportFrom(level=0):
                names |= {alias.name for alias in node.names}
    return {name for name in names if PRIVATE.fullmatch(name)} - private_definitions(text) - PUBLIC


def private_definitions(text: str) -> set[str]:
    """Names that this module makes: definitions, and what it sets on `self`."""
    tree = parsed(text)
    found = {node.name for _, node in definitions(tree)}
    for node in ast.walk(tree):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in targets:
            for one in ast.walk(target) if isinstance(target, ast.AST) else ():
                if isinstance(one, ast.Attribute) and isinstance(one.value, ast.Name) and one.value.id == "self":
                    found.add(one.attr)
                elif isinstance(one, ast.Name):
                    found.add(one.id)
    return {name for name in found if name.startswith("_")}


# 4. One name, one module


def names_twice(source: Source) -> Counter[str]:
    names: Counter[str] = Counter()
    for text in source.values():
        names.update({node.name for node in parsed(text).body if isinstance(node, Definition)})
    ours = {"main", "__getattr__", "__dir__"}
    return Counter({name: number for name, number in names.items() if number > 1 and name not in ours})


# 5. English: a docstring begins with a noun or a verb, which says something in a hover

EMPTY = ("Those", "The same", "What", "Whether", "As ", "Of ", "That ")


def empty_beginnings(source: Source) -> Counter[str]:
    documented = ((path, node) for path, node in nodes(source) if isinstance(node, ast.Module | Definition))
    return Counter(path for path, node in documented if (ast.get_docstring(node) or "").startswith(EMPTY))


# 6. A value is called by what it is

NO_NAMES = {"one", "found"}


def unnamed_values(source: Source) -> Counter[str]:
    """How many values of a file are called `one` or `found` outside of comprehensions."""
    every = list(nodes(source))
    targets = [node.target for _, node in every if isinstance(node, ast.comprehension)]
    in_comprehensions = {id(name) for target in targets for name in ast.walk(target)}
    unnamed: Counter[str] = Counter()
    for path, node in every:
        is_stored = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and id(node) not in in_comprehensions
        name = node.id if is_stored else getattr(node, "arg", None) if isinstance(node, ast.arg) else None
        unnamed[path] += name in NO_NAMES
    return +unnamed


# 7. Exchanges run on the group that trains; nothing of ours lives beside the caller's program

OWN_WAYS = {"new_group", "split_group", "new_subgroups", "atexit", "socket", "Thread", "ThreadPoolExecutor"}


def own_ways(source: Source) -> Counter[str]:
    """Process groups, threads, sockets and exit handlers that a file makes."""
    ways: Counter[str] = Counter()
    for path, node in nodes(source):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
        names += [getattr(node, "attr", ""), getattr(node, "id", "")]
        ways.update(f"{path} {name}" for name in OWN_WAYS.intersection(names))
    return ways


# 8. A line has one idea, and a text has no effect

BUILTINS = "bool float id iter len list map max min next repr reversed set sorted str sum tuple type"
OF_TEXTS = "encode format get items join keys lower removeprefix removesuffix replace startswith strip upper values"
OF_OURS = "a as_int_if_whole bytes_text shown describe in_short known_engines name_of plural ranks_where shorten"
OF_ROOMS = "_kind _lines crc32 named _named _names_of cwd fspath Path signature get_rank get_world_size where"
PURE = frozenset(f"{BUILTINS} {OF_TEXTS} {OF_OURS} {OF_ROOMS}".split())
Leaf = ast.Name | ast.Constant


def packed_assignments(source: Source) -> Counter[str]:
    """Assignments of a file, `a, b = x, y`, that have more than one idea.

    One idea is a swap, constants, parts of one thing under their own names (`a, b = x.a, x.b`, or arguments that `self`
    keeps), or one expression in which one name or constant differs: `f(a), f(b)`.
    """
    packed: Counter[str] = Counter()
    for path, node in nodes(source):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
            values = node.value.elts
            targets = [target.elts for target in node.targets if isinstance(target, ast.Tuple)]
            packed[path] += any(not have_one_idea(elements, values) for elements in targets)
    return +packed


def have_one_idea(targets: list[ast.expr], values: list[ast.expr]) -> bool:
    is_swap = sorted(map(ast.unparse, targets)) == sorted(map(ast.unparse, values))
    if is_swap or all(isinstance(value, ast.Constant) for value in values):
        return True
    bases = [kept_from(target, value) for target, value in zip(targets, values, strict=False)]
    if None not in bases and len(set(bases)) == 1:
        return True
    callees = {id(node.func) for value in values for node in ast.walk(value) if isinstance(node, ast.Call)}
    leaves = [
        [ast.dump(node) for node in ast.walk(value) if isinstance(node, Leaf) and id(node) not in callees]
        for value in values
    ]
    differing = [i for i, column in enumerate(zip(*leaves, strict=False)) if len(set(column)) > 1]
    if len(differing) != 1 or any(isinstance(value, ast.Name) for value in values):
        return False
    forms = [ast.dump(value).replace(own[differing[0]], "_") for value, own in zip(values, leaves, strict=True)]
    return len(set(forms)) == 1


def kept_from(target: ast.expr, value: ast.expr) -> str | None:
    """The thing whose part is kept under its own name, "" for an argument that `self` keeps; None for others."""
    is_on_self = ast.unparse(target).startswith("self.")
    name = ast.unparse(target).removeprefix("self.").removeprefix("_")
    if isinstance(value, ast.Attribute):
        return ast.unparse(value.value) if value.attr.removeprefix("_") == name else None
    return "" if is_on_self and ast.unparse(value) == name else None


def acting_texts(source: Source) -> Counter[str]:
    """Calls in the f-strings of a file that are not known to be pure."""
    acting: Counter[str] = Counter()
    texts = [(path, node) for path, node in nodes(source) if isinstance(node, ast.JoinedStr)]
    calls = {id(node): (path, node) for path, text in texts for node in ast.walk(text) if isinstance(node, ast.Call)}
    for path, call in calls.values():
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        acting[path] += name not in PURE
    return +acting


# Named here and run by the tests: workers and ranks import this file.
RULES: dict[str, Callable[[Source], Counter[str]]] = {
    "upward imports": upward_imports,
    "modules in a circle": circles,
    "too large": sizes,
    "private names of ours": lambda source: private_reaches(source)[0],
    "private names of others": lambda source: private_reaches(source)[1],
    "names defined twice": names_twice,
    "docstrings that begin with nothing": empty_beginnings,
    "values without a name": unnamed_values,
    "groups and threads of our own": own_ways,
    "assignments of several ideas": packed_assignments,
    "texts with an effect": acting_texts,
}


@pytest.mark.parametrize("rule", RULES)
def test_rule_holds(rule):
    assert not RULES[rule](sources())


def test_rules_can_fail():
    ways = "from threading import Thread\nimport atexit\ndist.new_group([0])\n"
    found = own_ways({"a.py": ways, "b.py": "group = dist.group.WORLD\n"})
    assert found == {"a.py Thread": 1, "a.py atexit": 1, "a.py new_group": 1}
    up = {"law/errors.py": "from ..window.window import Window\n", "attic.py": ""}
    assert upward_imports(up) == {"law/errors.py imports window.window.Window": 1, "attic is on no floor": 1}
    assert upward_imports({"window/window.py": "from ..law.errors import DistaccumError\n"}) == {}
    circle = {"law/a.py": "from .b import f\n", "law/b.py": "from ..law import a\n", "law/c.py": "from . import a"}
    assert circles(circle) == {"law.a": 1, "law.b": 1}
    assert circles({"law/a.py": "from .b import f\n", "law/b.py": ""}) == {}
    wide = f"def wide({', '.join('abcdefghi')}):\n    pass\n"
    assert sizes({"a.py": wide}) == {"a.py wide()": 9}
    assert sizes({"a.py": "class Long:\n" + "    a = 1\n" * 300}) == {"a.py Long": 301}
    assert sizes({"a.py": "a = 1\n" * 451 + "\n" * 9}) == {"a.py": 451}
    reach = {"a.py": "class A:\n    def __init__(self):\n        self._x = 1\n", "b.py": "def f(a):\n    a._x, a._y\n"}
    assert private_reaches(reach) == ({"b.py": 1}, {"b.py": 1})
    assert private_reaches({"a.py": "getattr(a, '_y')\n"})[1] == {"a.py": 1}
    assert private_reaches({"engines/private/a.py": "a._y\n"})[1] == {}
    assert names_twice({"a.py": "def f(): pass\n", "b.py": "def f(): pass\n"}) == {"f": 2}
    assert empty_beginnings({"a.py": "def f():\n    '''Those of it.'''\n"}) == {"a.py": 1}
    named = "for one in x:\n    found = one\nf = lambda one: one\ng = (found := 1)\n"
    assert unnamed_values({"a.py": named, "b.py": "[one for one in x]\n"}) == {"a.py": 4}
    packed = "a, b = b, a\nc = d, e = 0, None\nf, g = h(1), h(2)\ni, j = k.grad, m.grad\nn, o = p.n, p.o\nself._q, self.r = q, r"  # noqa: E501
    assert packed_assignments({"a.py": packed}) == {}
    unrelated = "a, b = c, d\ne, f = g.h, g.i\nj, k = m(n), 0\np, q = m(n, 0), m(r, 1)\ns = t, u = v(), w()\n"
    assert packed_assignments({"a.py": unrelated, "runs/b.py": "a, b = [], 0"}) == {"a.py": 5, "runs/b.py": 1}
    assert acting_texts({"a.py": "f'{len(a)} {b.eval()} {c(d)!r}' + str(e())"}) == {"a.py": 2}
