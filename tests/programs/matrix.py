"""Prints what ran on which versions, as CONTRIBUTING.md has it: `python -m tests.programs.matrix`.

Reads what pytest left in build/matrix, in a folder for each environment: `bash tests/run.sh --torch 2.9` writes
build/matrix/.venv-2.9/all.xml, and a run in parts may have left several files.
"""

import re
from collections import Counter
from importlib import metadata
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[2]
LIBRARIES = ("torch", "accelerate", "deepspeed", "lightning")
# The tests of an engine, by a part of their names; one on several engines counts for each.
ENGINES = {
    "DDP": r"\bDDP|test_ddp",
    "FSDP2": r"FSDP2|HSDP|fsdp2|debugged",
    "FSDP1": r"FSDP1",
    "DeepSpeed": r"ZeRO|deepspeed",
    "Accelerate": r"accelerate",
    "Fabric": r"fabric",
    "Lightning": r"lightning",
    "pipelines": r"pipeline",
    "callers' worlds": r"worlds",
}


class Outcome:
    """What ran in one environment."""

    def __init__(self, folder: Path) -> None:
        site = next((ROOT / folder.name).glob("lib/python*/site-packages"))
        found = {name: next(iter(metadata.distributions(name=name, path=[str(site)]))) for name in LIBRARIES}
        self.versions = [found[name].version.split("+")[0] for name in LIBRARIES]
        self.cases: dict[str, tuple[str, str]] = {}  # by name: passed, skipped or failed, and why it was skipped
        self.date, self.seconds = "", 0.0
        trees = map(ElementTree.parse, sorted(folder.glob("*.xml")))
        for suite in (suite for tree in trees for suite in tree.iter("testsuite")):
            self.date = max(self.date, suite.attrib["timestamp"][:10])
            self.seconds += float(suite.attrib["time"])
            for case in suite.iter("testcase"):
                ends = {child.tag: child.get("message", "").removeprefix("Skipped: ") for child in case}
                end = "failed" if {"failure", "error"} & set(ends) else "skipped" if "skipped" in ends else "passed"
                self.cases[f"{case.get('classname')}::{case.get('name')}"] = end, ends.get("skipped", "")

    def count(self, end: str, pattern: str = "") -> int:
        return sum(how == end and re.search(pattern, name) is not None for name, (how, _) in self.cases.items())

    def of_engine(self, pattern: str) -> str:
        others = [f"{number} {end}" for end in ("skipped", "failed") if (number := self.count(end, pattern))]
        return ", ".join([str(self.count("passed", pattern)), *others])


def table(*rows: list[str]) -> str:
    head, *others = (f"| {' | '.join(row)} |" for row in rows)
    return "\n".join([head, "| --- " * len(rows[0]) + "|", *others])


def page(outcomes: list[Outcome]) -> str:
    runs, torches = [], [one.versions[0] for one in outcomes]
    for one in outcomes:
        counts = [str(one.count(end)) for end in ("passed", "skipped", "failed")]
        runs.append([*one.versions, one.date, *counts, f"{one.seconds / 60:.0f}"])
    why = [Counter(reason for _, reason in one.cases.values() if reason) for one in outcomes]
    reasons = [[reason, *(str(one[reason]) for one in why)] for reason in sorted(set().union(*why))]
    engines = [[name, *(one.of_engine(pattern) for one in outcomes)] for name, pattern in ENGINES.items()]
    tables = [table([*LIBRARIES, "date", "passed", "skipped", "failed", "minutes"], *runs)]
    tables += [table(["passed, with torch", *torches], *engines), table(["skipped, with torch", *torches], *reasons)]
    return "\n\n".join(tables)


if __name__ == "__main__":
    folders = [folder for folder in (ROOT / "build/matrix").iterdir() if any(folder.glob("*.xml"))]
    print(page(sorted(map(Outcome, folders), key=lambda one: [*map(int, one.versions[0].split("."))])))
