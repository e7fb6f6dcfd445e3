"""Changes the core in one place at a time, at random, and runs the tests, which must fail.

    python -m tests.programs.mutants --seed 7 --num 60               # prints a table of the mutants
    python -m tests.programs.mutants --seed 7 --num 6 --only window  # in the files whose name contains this

A mutant turns a condition, drops a statement, or changes a constant or an operator; a seed gives the same mutants of
the same source, and a smaller number the first of them. Texts, annotations and assertions stay, since no test can see a
change of them. Each mutant runs in a copy of the repository, against the file's own tests and then those of the core,
the engines, update() and the grid. A test that hangs has failed. Not part of the suite: a mutant that survives takes
minutes.
"""

import argparse
import ast
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
HANG = 240  # seconds of one test
DOORS = "__init__", "__main__", "transformers"
FILES = sorted(path.stem for path in (ROOT / "distaccum").glob("*.py") if path.stem not in DOORS)
PAIRS = ["FloorDiv Mult", "Mult Div", "Add Sub", "And Or", "Lt LtE", "Gt GtE", "Eq NotEq", "Is IsNot", "In NotIn"]
OPERATORS = {
    getattr(ast, a): getattr(ast, b) for one, two in map(str.split, PAIRS) for a, b in ((one, two), (two, one))
}
CALLS = {"min": "max", "max": "min", "any": "all", "all": "any"}


@dataclass(frozen=True)
class Mutant:
    file: str  # under distaccum/, without .py
    line: int
    change: str
    source: str  # of the whole file


def mutants_of(source: str, file: str = "") -> Iterator[Mutant]:
    """All mutants of a file, each of valid Python that differs from it."""
    lines = source.splitlines(keepends=True)

    def offset(line: int, column: int) -> int:
        return sum(map(len, lines[: line - 1])) + len(lines[line - 1].encode()[:column].decode())

    for node, fresh in _changes(ast.parse(source)):
        start, end = offset(node.lineno, node.col_offset), offset(node.end_lineno or 0, node.end_col_offset or 0)
        before, after = source[start:end], "pass" if isinstance(fresh, ast.Pass) else f"({ast.unparse(fresh)})"
        change = f"`{' '.join(before.split())}`: " + ("dropped" if after == "pass" else f"`{after[1:-1]}`")
        yield Mutant(file, node.lineno, change, source[:start] + after + source[end:])


def _changes(node: ast.AST) -> Iterator[tuple[ast.expr | ast.stmt, ast.AST]]:
    """What can be changed in a node and below it, each with what takes its place."""
    match node:
        case ast.Expr(ast.Call()) | ast.Raise() | ast.Delete() | ast.AugAssign() | ast.Continue() | ast.Break():
            yield node, ast.Pass()
        case ast.Return(None) | ast.Assign([ast.Attribute() | ast.Subscript()]):  # a local name would be missing
            yield node, ast.Pass()
        case ast.If(test) | ast.While(test) | ast.IfExp(test) if not isinstance(test, ast.Compare):
            yield test, ast.UnaryOp(ast.Not(), test)  # of a comparison the operator is changed
        case ast.comprehension(ifs=tests):
            yield from ((one, ast.UnaryOp(ast.Not(), one)) for one in tests)
        case ast.Compare(left, operators, others):
            for place, operator in enumerate(operators):
                if other := OPERATORS.get(type(operator)):
                    changed = [*operators[:place], other(), *operators[place + 1 :]]
                    yield node, ast.Compare(left, changed, others)
        case ast.BinOp(op=operator) | ast.BoolOp(op=operator) if other := OPERATORS.get(type(operator)):
            yield node, type(node)(**{**dict(ast.iter_fields(node)), "op": other()})
        case ast.Constant(bool(value)):
            yield node, ast.Constant(not value)
        case ast.Constant(int(value) | float(value)):
            yield node, ast.Constant(value + 1)
        case ast.Call(ast.Name(name) as called) if name in CALLS:
            yield called, ast.Name(CALLS[name])
    for name, value in ast.iter_fields(node):
        if name not in ("annotation", "returns", "decorator_list", "type_params"):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST) and not _is_unseen(child):
                    yield from _changes(child)


def _is_unseen(node: ast.AST) -> bool:
    """Texts, errors, assertions of the library's own mistakes, and what only a type checker or `==` reads."""
    match node:
        case ast.IfExp(_, one, other):
            return _is_unseen(one) or _is_unseen(other)  # a choice of words
        case ast.BinOp(left, operator):
            return _is_unseen(left) or isinstance(operator, ast.BitOr)
        case ast.Call(ast.Name(name)):
            return name == "field" or name.endswith("Error")
        case ast.FunctionDef(returns=ast.Name("str")) | ast.Constant(str()) | ast.keyword("strict"):
            return True
    return isinstance(node, ast.JoinedStr | ast.Assert)


def chosen(seed: int, num: int, only: str = "") -> list[Mutant]:
    files = [file for file in FILES if only in file]
    every = [one for file in files for one in mutants_of((ROOT / f"distaccum/{file}.py").read_text(), file)]
    random.Random(seed).shuffle(every)
    return every[:num]


def copied_tree(folder: Path) -> Path:
    """Copies the repository; the tests run on that copy of the library."""
    ignored = shutil.ignore_patterns(".*", "build", "__pycache__", "*.egg-info")
    return Path(shutil.copytree(ROOT, folder / "tree", ignore=ignored))


def first_failure(tree: Path, file: str = "window") -> str | None:
    """The first test that fails in the copy, or is hanging; None if all pass. The tests of this file run first."""
    own = [f"distaccum/{file}.py", *([f"tests/core/test_{file}.py"] * (ROOT / f"tests/core/test_{file}.py").exists())]
    files = [*own, "tests/core", "tests/engines", "tests/runs/test_update.py", "tests/grids/test_engines.py"]
    options = ["-o", f"faulthandler_timeout={HANG}", "-o", "faulthandler_exit_on_timeout=true"]
    options += ["-n", "0", "-m", "not slow"]
    command = [sys.executable, "-m", "pytest", "-xv", "--tb=no", *options, *files]
    environment = {**os.environ, "PYTHONPATH": str(tree), "COLUMNS": "400"}
    done = subprocess.run(command, cwd=tree, env=environment, text=True, capture_output=True)
    begun = re.findall(r"^(\S+::\S+)", done.stdout, re.MULTILINE)
    return (begun or ["the import"])[-1].removeprefix("tests/") if done.returncode else None


def run(mutants: Sequence[Mutant]) -> int:
    """Prints a row for each mutant; returns the number that survived."""
    survived = 0
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        tree = copied_tree(Path(folder))
        if broken := first_failure(tree):
            raise SystemExit(f"{broken} fails without a mutant; repair it first")
        print("| mutant | change | killed by |\n| --- | --- | --- |", flush=True)
        for mutant in mutants:
            path = tree / f"distaccum/{mutant.file}.py"
            whole = path.read_text()
            path.write_text(mutant.source)
            test = first_failure(tree, mutant.file)
            path.write_text(whole)
            survived += test is None
            end = f"`{test}`" if test else "**SURVIVED**"
            print(f"| {mutant.file}.py:{mutant.line} | {mutant.change} | {end} |", flush=True)
    print(f"\n{len(mutants) - survived} of {len(mutants)} killed")
    return survived


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--num", type=int, default=60, help="mutants (60)")
    parser.add_argument("--only", default="", metavar="TEXT", help="only files whose name contains this")
    arguments = parser.parse_args()
    mutants = chosen(arguments.seed, arguments.num, arguments.only)
    if not mutants:
        parser.error(f"no mutant of a file with {arguments.only!r} in its name, expected part of: {', '.join(FILES)}")
    return 1 if run(mutants) else 0


if __name__ == "__main__":
    raise SystemExit(main())
