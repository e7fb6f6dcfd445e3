"""Defects that the tests must find: each is put into a copy of the library, one at a time, and the tests are run.

    python tests/mutants.py              # all of them: the quick tests first, the others where those pass
    python tests/mutants.py --only ddp   # of one area, or whose name has this in it
    python tests/mutants.py --table      # the table of what has been found so far
    python tests/mutants.py --list

The defects stand in mutants.txt. Where the text of one is not found exactly once the program says so, and the mutant
must be written anew for the code that stands there now. Answers are kept in runs/mutants.json after each mutant, and a
run goes on where one was broken off; `--again` forgets them. This is no part of the suite: all of them take half an
hour.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
ANSWERS = ROOT / "runs/mutants.json"
MINUTES = 20  # for one run of the tests; a mutant that hangs is found
# Where a defect is looked for first.
AREAS = {
    "window": ("law", "loops", "transaction", "state", "streaming", "ddp", "precision"),
    "planning": ("law", "loaders", "loops", "streaming", "transaction", "state", "ddp"),
    "ddp": ("ddp", "ddp_shared", "accumulate_dtype", "ddp_forms"),
    "fsdp2": ("fully_shard", "engines", "parts", "state"),
    "deepspeed": ("deepspeed", "engines", "accelerate"),
    "stepping": ("precision", "transaction", "batchnorm", "memory", "state", "ddp"),
}


@dataclass(frozen=True)
class Mutant:
    area: str
    name: str  # the defect, in words
    file: str  # under distaccum/
    before: str  # found once in it
    after: str

    @property
    def title(self) -> str:
        return f"{self.file}: {self.name}"


def mutants() -> list[Mutant]:
    """Those of mutants.txt: a heading each, `@ area: name (file)`, and the change, as a diff shows it."""
    found = []
    for block in (Path(__file__).parent / "mutants.txt").read_text().split("\n@ ")[1:]:
        heading, *lines = block.rstrip().splitlines()
        match = re.fullmatch(r"(\w+): (.+) \((\S+)\)", heading)
        assert match is not None, heading
        before, after = ("".join(f"{line[1:]}\n" for line in lines if line[:1] != sign) for sign in "+-")
        found.append(Mutant(*match.groups(), before, after))
    return found


def broken(mutants: Sequence[Mutant]) -> list[str]:
    """Those whose text is not in the library exactly once."""
    problems = []
    for one in mutants:
        found = (ROOT / "distaccum" / one.file).read_text().count(one.before)
        if found != 1 or one.before == one.after:
            problems.append(f"{one.area}: {one.name}: its text is {found} times in distaccum/{one.file}, expected once")
    return problems


def copied_tree(folder: Path) -> Path:
    """What git knows of, and what is new: the tests run there, with that library in the place of this one."""
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in listing.stdout.splitlines():
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def run_tests(tree: Path, files: Sequence[str], marker: str) -> str | None:
    """The first test that fails of those that have the marker, or None where all pass."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=no", "-m", marker, *files]
    log = tree / "tests.log"
    with log.open("w") as file:
        running = subprocess.Popen(
            command,
            cwd=tree,
            env={**os.environ, "PYTHONPATH": str(tree)},
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = running.wait(60 * MINUTES)
        except subprocess.TimeoutExpired:
            os.killpg(running.pid, signal.SIGTERM)  # on which the tests end what they started
            running.wait()
            return f"does not end within {MINUTES} minutes"
    if status in (0, 5):  # 5: nothing was selected
        return None
    failed = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", log.read_text(), re.MULTILINE)
    return str(failed[0]).removeprefix("tests/") if failed else f"status {status}: {log.read_text()[-300:]}"


def examine(mutant: Mutant, tree: Path, *, quick_alone: bool, known: dict[str, Any]) -> dict[str, Any]:
    """What finds it: the quick tests of its area, all quick ones, or the others; each only where those before pass."""
    path = tree / "distaccum" / mutant.file
    whole, began = path.read_text(), time.monotonic()
    path.write_text(whole.replace(mutant.before, mutant.after))
    near = [f"tests/test_{name}.py" for name in AREAS[mutant.area]]
    # But for what reads the source as text, and would find a line more.
    every = [one for one in (tree / "tests").glob("test_*.py") if one.stem not in ("test_architecture", "test_suite")]
    far = sorted(str(one.relative_to(tree)) for one in every)
    far = [*(one for one in far if one not in near), "distaccum"]
    try:
        quick, rest = known.get("quick"), "not run"
        if not known:
            quick = run_tests(tree, near, "quick") or run_tests(tree, far, "quick")
        if not quick and not quick_alone:
            rest = run_tests(tree, [*near, *far, "launch/training"], "not quick")
    finally:
        path.write_text(whole)
    seconds = known.get("seconds", 0) + round(time.monotonic() - began)
    return {"area": mutant.area, "quick": quick, "rest": None if quick else rest, "seconds": seconds}


def table(answers: dict[str, Any]) -> str:
    lines = ["| area | defect | found by | quick |", "| --- | --- | --- | --- |"]
    for name, answer in answers.items():
        found = answer["quick"] or answer["rest"]
        by = "**nobody**" if found is None else found if found == "not run" else f"`{found}`"
        lines.append(f"| {answer['area']} | {name} | {by} | {'yes' if answer['quick'] else ''} |")
    quick = sum(bool(answer["quick"]) for answer in answers.values())
    every = sum((answer["quick"] or answer["rest"] or "not run") != "not run" for answer in answers.values())
    lines.append(f"\n{len(answers)} defects: {every} found, {quick} of them by the quick tests")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], epilog="Each takes 10 to 60 seconds, more where the quick tests pass."
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="those whose area or name has this in it")
    parser.add_argument("--list", action="store_true", help="print the defects and run nothing")
    parser.add_argument("--table", action="store_true", help="print what was found so far and run nothing")
    parser.add_argument("--again", action="store_true", help="forget earlier answers, of those that are asked for")
    parser.add_argument("--quick", action="store_true", help="the quick tests alone; without it, later, the others")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="so many at a time (2)")
    arguments = parser.parse_args()
    every = mutants()
    answers = json.loads(ANSWERS.read_text()) if ANSWERS.exists() else {}
    chosen = [one for one in every if arguments.only in f"{one.area} {one.name}"]
    if arguments.table:
        print(table(answers))
        return 0
    if not chosen:
        parser.error(f"no defect has {arguments.only!r} in its area or name; --list names them")
    if problems := broken(every):
        parser.error("\n".join(problems))
    if arguments.list:
        print("\n".join(f"{one.area}: {one.name}" for one in chosen))
        return 0
    ANSWERS.parent.mkdir(exist_ok=True)
    if arguments.again:
        answers = {title: one for title, one in answers.items() if title not in {mutant.title for mutant in chosen}}
    done = {title for title, one in answers.items() if arguments.quick or one["rest"] != "not run"}
    wanted = [one for one in chosen if one.title not in done]
    waiting, lock = iter(wanted), threading.Lock()

    def work() -> None:
        with tempfile.TemporaryDirectory() as folder:
            tree = copied_tree(Path(folder))
            while True:
                with lock:
                    mutant = next(waiting, None)
                if mutant is None:
                    return
                known = answers.get(mutant.title, {})
                answer = examine(mutant, tree, quick_alone=arguments.quick, known=known)
                with lock:
                    answers[mutant.title] = answer
                    ANSWERS.write_text(json.dumps(answers, indent=1) + "\n")
                    found = answer["quick"] or answer["rest"] or "NOBODY"
                    print(f"{mutant.title}: {found} ({answer['seconds']} s)", flush=True)

    workers = [threading.Thread(target=work) for _ in range(min(arguments.jobs, len(wanted)))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    answers = {one.title: answers[one.title] for one in every if one.title in answers}  # in their order
    ANSWERS.write_text(json.dumps(answers, indent=1) + "\n")
    alive = [name for name, answer in answers.items() if (answer["quick"] or answer["rest"]) in (None, "not run")]
    return 1 if alive else 0


if __name__ == "__main__":
    raise SystemExit(main())
