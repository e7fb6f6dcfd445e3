"""Which case of the grid of engines runs on which wrapper and policy, as a table.

python -m tests.programs.grid > tests/grids/README.md
"""

from typing import Any

from tests.grids import test_engines

ABOUT = """# The grid of engines: which case runs where

Printed by `python -m tests.programs.grid`. A row is a pair of a wrapper and a policy, a column a test of
`test_engines.py`, a cell the values of that test that run there. *Italics*: not with `run.sh --quick`; †: nor with
`run.sh --most`.
"""


def values_of(test: Any) -> dict[tuple[str, str], list[str]]:
    """The values of a test, by wrapper and policy."""
    (given,) = (mark.args for mark in test.pytestmark if mark.name == "parametrize")
    of_all = {mark.name for mark in test.pytestmark}
    found: dict[tuple[str, str], list[str]] = {}
    for one in given[1]:
        values, marks = getattr(one, "values", one), of_all | {mark.name for mark in getattr(one, "marks", ())}
        by_name = {"sync": "last", **dict(zip(given[0], values, strict=True))}
        name, sync = by_name.pop("name"), by_name.pop("sync")
        value = next(iter(by_name.values()), "yes")
        shown = f"*{value}*" if "slow" in marks else str(value)
        found.setdefault((name, sync), []).append(shown + "†" * ("long" in marks))
    return found


def page() -> str:
    tests = {name: values_of(test) for name, test in vars(test_engines).items() if name.startswith("test_")}
    heads = [name.removeprefix("test_").replace("_", " ") for name in tests]
    rows = [["wrapper, policy", *heads], ["---"] * (1 + len(heads))]
    for pair in test_engines.GRID:
        rows.append([", ".join(pair), *(", ".join(values.get(pair, ["-"])) for values in tests.values())])
    return "\n".join([ABOUT, *(f"| {' | '.join(row)} |" for row in rows)])


if __name__ == "__main__":
    print(page())
