"""Fetches a published training script at a fixed commit, checks its SHA-256, and applies the diff of this folder.

    python docs/examples/get.py --list
    python docs/examples/get.py nanogpt                              # into examples/nanogpt, over https
    python docs/examples/get.py nanogpt --into /tmp/nanogpt --from CHECKOUT   # from a local clone

It writes two folders: `original` as published, and `moved` with NAME.diff applied. It needs only Python.

`originals.json` has one entry per example: repository, commit, licence, `folder` (the files' place in the
repository), `files` (path below the folder -> SHA-256) and `run` (the command for `moved`). measure_NAME.py measures
an example; a file named accelerate.py in this folder would hide the library of that name.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
HEADER = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")


class ExampleError(Exception):
    """An error to show to the user in one line."""


class Hunk(NamedTuple):
    """A hunk of a unified diff: its first line in both files (from 1), and its lines with their signs."""

    old_start: int
    old_length: int
    new_start: int
    new_length: int
    lines: list[str]

    @property
    def old(self) -> list[str]:
        return [line[1:] for line in self.lines if line[0] in " -"]

    @property
    def new(self) -> list[str]:
        return [line[1:] for line in self.lines if line[0] in " +"]


def originals(folder: Path = HERE) -> dict[str, dict[str, Any]]:
    """The table of originals by name."""
    return json.loads((folder / "originals.json").read_text(encoding="utf-8"))


def parse(diff: str) -> dict[str, list[Hunk]]:
    """Parses a unified diff; returns the hunks of each file."""
    files: dict[str, list[Hunk]] = {}
    lines = diff.split("\n")
    at, hunks = 0, None
    while at < len(lines):
        line = lines[at]
        at += 1
        if line.startswith("+++ "):
            hunks = files.setdefault(line[4:].split("\t")[0].strip().removeprefix("b/"), [])
        elif match := HEADER.match(line):
            if hunks is None:
                raise ExampleError(f"line {at} of the diff has a hunk before any file")
            old_start, old, new_start, new = (1 if number is None else int(number) for number in match.groups())
            body: list[str] = []
            num_old = num_new = 0
            while num_old < old or num_new < new:
                if at == len(lines) or lines[at][:1] not in ("", " ", "+", "-", "\\"):
                    raise ExampleError(f"the hunk {match.group()!r} of the diff is shorter than it says")
                if not lines[at].startswith("\\"):  # "\ No newline at end of file"
                    body.append(lines[at] or " ")  # editors strip the space of an empty line
                    num_old += body[-1][0] in " -"
                    num_new += body[-1][0] in " +"
                at += 1
            if (num_old, num_new) != (old, new):
                raise ExampleError(f"the hunk {match.group()!r} of the diff has {num_old} old and {num_new} new lines")
            hunks.append(Hunk(old_start, old, new_start, new, body))
    if not files:
        raise ExampleError("the diff names no file")
    return files


def apply(text: str, hunks: list[Hunk]) -> str:
    """Applies the hunks to the text. They must fit exactly, at their lines."""
    lines = text.split("\n")
    result: list[str] = []
    done = 0
    for hunk in hunks:
        start = hunk.old_start - 1 if hunk.old_length else hunk.old_start  # without old lines: after that line
        if start < done or lines[start : start + hunk.old_length] != hunk.old:
            raise ExampleError(f"the hunk at line {hunk.old_start} does not fit this file")
        result += lines[done:start] + hunk.new
        done = start + hunk.old_length
    return "\n".join(result + lines[done:])


def count(diff: str) -> tuple[int, int]:
    """Counts the lines that the diff removes and adds."""
    lines = [line for hunks in parse(diff).values() for hunk in hunks for line in hunk.lines]
    return sum(line[0] == "-" for line in lines), sum(line[0] == "+" for line in lines)


def fetch(repository: str, commit: str, path: str, checkout: Path | None) -> bytes:
    """Returns the bytes of a file at a commit, from a local clone or over https."""
    if checkout is not None:
        try:
            shown = subprocess.run(["git", "-C", str(checkout), "show", f"{commit}:{path}"], capture_output=True)
            if shown.returncode == 0:
                return shown.stdout
        except OSError:
            pass  # no git repository: use the file there, if its checksum is right
        try:
            return (checkout / path).read_bytes()
        except OSError as error:
            raise ExampleError(
                f"{checkout} has neither commit {commit[:10]} nor a file {path} ({error.strerror})"
            ) from None
    address = f"{repository.replace('https://github.com/', 'https://raw.githubusercontent.com/')}/{commit}/{path}"
    try:
        with urllib.request.urlopen(address, timeout=60) as answer:
            return bytes(answer.read())
    except (urllib.error.URLError, TimeoutError) as error:
        reason = getattr(error, "reason", error)
        raise ExampleError(f"cannot fetch {address}: {reason}. Clone {repository} and use --from CLONE") from None


def get(name: str, into: Path | None = None, checkout: Path | None = None, folder: Path = HERE) -> Path:
    """Writes `original` and `moved` of an example below `into`, and returns that folder."""
    table = originals(folder)
    if name not in table:
        raise ExampleError(f"unknown example {name!r}; known are {', '.join(table)}")
    if checkout is not None and not checkout.is_dir():
        raise ExampleError(f"--from {checkout} is not a folder")
    entry = table[name]
    contents: dict[str, bytes] = {}
    for path, expected in entry["files"].items():
        full = f"{entry['folder']}/{path}" if entry["folder"] else path
        contents[path] = fetch(entry["repository"], entry["commit"], full, checkout)
        found = hashlib.sha256(contents[path]).hexdigest()
        if found != expected:
            raise ExampleError(
                f"{full} has SHA-256 {found[:16]}..., expected {expected[:16]}...: it is not the file at commit "
                f"{entry['commit'][:10]}"
            )
    moved = dict(contents)
    diff = (folder / f"{name}.diff").read_text(encoding="utf-8")
    for path, hunks in parse(diff).items():
        if path not in contents:
            raise ExampleError(f"{name}.diff changes {path}, which originals.json does not list")
        moved[path] = apply(contents[path].decode().replace("\r\n", "\n"), hunks).encode()
    into = Path("examples", name) if into is None else into
    for kind, files in (("original", contents), ("moved", moved)):
        for path, content in files.items():
            target = into / kind / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
    return into


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Fetch a training script and move it to distaccum.")
    parser.add_argument("name", nargs="?", help="the example; --list shows them")
    parser.add_argument("--into", type=Path, metavar="DIR", help="where to write (default: examples/NAME)")
    parser.add_argument("--from", type=Path, metavar="CHECKOUT", dest="checkout", help="a local clone; no network")
    parser.add_argument("--list", action="store_true", help="list the examples and their originals")
    args = parser.parse_args(arguments)
    try:
        if args.list or args.name is None:
            for name, entry in originals().items():
                removed, added = count((HERE / f"{name}.diff").read_text(encoding="utf-8"))
                place = f"{entry['repository']} {entry['commit'][:10]} {entry['folder']}".rstrip()
                print(f"{name:<12} -{removed:<3} +{added:<3} {place}")
            return 0
        into = get(args.name, args.into, args.checkout)
    except (ExampleError, OSError) as error:
        print(f"get.py: {error}", file=sys.stderr)
        return 1
    print(f"{into / 'original'}: as published (licence: {originals()[args.name]['licence']})")
    print(f"{into / 'moved'}: after {args.name}.diff")
    print(f"To run it: cd {into / 'moved'} && {originals()[args.name]['run']}")
    if (HERE / f"measure_{args.name}.py").exists():
        print(f"To measure both: python {HERE / f'measure_{args.name}.py'} {into}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
