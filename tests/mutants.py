"""Puts each defect of mutants.txt into a copy of the library, one at a time, and runs the tests, which must find it.

    python tests/mutants.py              # all defects: the quick tests first, the others where those pass
    python tests/mutants.py --only ddp   # the defects whose area or name contains this
    python tests/mutants.py --table      # the table of the results so far
    python tests/mutants.py --list

The text of a defect must occur exactly once in the library; otherwise the program stops, and the entry must be
rewritten for the current code. Results are saved to runs/mutants.json after each defect, and the next run continues;
`--again` discards them. This program is not part of the suite: all defects take half an hour.
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
MINUTES = 20  # per run of the tests; a defect that makes them hang counts as found
# The files that are tested first for a defect.
AREAS = {
    "window": ("law", "loops", "transaction", "state", "ddp", "precision"),
    "planning": ("law", "loaders", "loops", "transaction", "state", "ddp"),
    "ddp": ("ddp", "ddp_shared", "accumulate_dtype", "ddp_forms"),
    "fsdp2": ("fully_shard", "engines", "parts", "state"),
    "deepspeed": ("deepspeed", "engines", "accelerate"),
    "trainers": ("fabric", "lightning", "accelerate"),
    "transformers": ("transformers",),
    "stepping": ("precision", "transaction", "batchnorm", "memory", "state", "ddp"),
    "meshes": ("pipeline", "context", "meshes", "mesh_states"),
    "runs": ("contrast", "memory", "transaction", "ddp"),
}


@dataclass(frozen=True)
class Mutant:
    area: str
    name: str  # the defect, in words
    file: str  # under distaccum/
    before: str  # occurs once in the file
    after: str

    @property
    def title(self) -> str:
        return f"{self.file}: {self.name}"


def mutants() -> list[Mutant]:
    """The entries of mutants.txt: each is a heading, `@ area: name (file)`, and a diff."""
    found = []
    for block in (Path(__file__).parent / "mutants.txt").read_text().split("\n@ ")[1:]:
        heading, *lines = block.rstrip().splitlines()
        match = re.fullmatch(r"(\w+): (.+) \((\S+)\)", heading)
        assert match is not None, heading
        before, after = ("".join(f"{line[1:]}\n" for line in lines if line[:1] != sign) for sign in "+-")
        found.append(Mutant(*match.groups(), before, after))
    return found


def broken(mutants: Sequence[Mutant]) -> list[str]:
    """Names the defects whose text is not in the library exactly once."""
    problems = []
    for one in mutants:
        found = (ROOT / "distaccum" / one.file).read_text().count(one.before)
        if found != 1 or one.before == one.after:
            problems.append(f"{one.area}: {one.name}: its text is {found} times in distaccum/{one.file}, expected once")
    return problems


def copied_tree(folder: Path) -> Path:
    """Copies tracked and new files; the tests run on that copy of the library."""
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
    """The first failing test among those with the marker, or None if all pass."""
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
            os.killpg(running.pid, signal.SIGTERM)  # on SIGTERM the tests end their processes
            running.wait()
            return f"does not end within {MINUTES} minutes"
    if status in (0, 5):  # 5: nothing was selected
        return None
    failed = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", log.read_text(), re.MULTILINE)
    return str(failed[0]).removeprefix("tests/") if failed else f"status {status}: {log.read_text()[-300:]}"


def examine(mutant: Mutant, tree: Path, *, quick_alone: bool, known: dict[str, Any]) -> dict[str, Any]:
    """Runs the quick tests of the defect's area, then all quick tests, then the others, until one fails."""
    path = tree / "distaccum" / mutant.file
    whole, began = path.read_text(), time.monotonic()
    path.write_text(whole.replace(mutant.before, mutant.after))
    near = [f"tests/test_{name}.py" for name in AREAS[mutant.area]]
    # Without the tests that read the source as text: they would fail on any added line.
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
    parser.add_argument("--only", default="", metavar="TEXT", help="only the defects whose area or name contains this")
    parser.add_argument("--list", action="store_true", help="print the defects and run nothing")
    parser.add_argument("--table", action="store_true", help="print the results so far and run nothing")
    parser.add_argument("--again", action="store_true", help="discard earlier results")
    parser.add_argument(
        "--quick", action="store_true", help="run only the quick tests; a later run without it adds the others"
    )
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="number of defects tested at a time (2)")
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
