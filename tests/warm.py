"""A `python` for launchers that starts fast: it runs its program in a fork of a process that has done the imports.

Commands, variables, streams, signals and statuses between a launcher and its ranks are unchanged. Without it a rank of
`launch/train.py` takes 11 seconds to start, and torchrun's agent 4.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys
import time
from pathlib import Path

import forks


def make(folder: Path) -> Path:
    """Makes a program with the command line of `python`: options, then `script.py`, `-m module`, `-c code` or `-`."""
    forked = forks.connect()
    forked.load("preloaded_programs")
    forked.close()
    python = folder / "python"
    python.write_text(f"#!{sys.executable} -S\nimport sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\n")
    with python.open("a") as file:
        file.write("import warm\nwarm.main()\n")
    python.chmod(0o755)
    return python


def main() -> None:
    """The program: requests the fork, forwards signals to it, and ends with its status."""
    forked = forks.connect()
    request = (sys.argv, str(Path.cwd()), dict(os.environ), os.getpid())
    pid = forked.fork("warm:run", *request, files=(0, 1, 2))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: os.kill(pid, number))
    while (status := forked.status(pid)) is None:
        time.sleep(0.02)
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    sys.exit(status)


def run(words: list[str], cwd: str, environment: dict[str, str], client: int, *streams: int) -> int | None:
    """Runs in the fork."""
    for place, stream in enumerate(streams):
        os.dup2(stream, place)
        os.close(stream)
    _enter_network_of(client)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    sys.executable, *words = words
    while words[0] in ("-u", "-S"):
        words.pop(0)
    sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
    kind = words[0] if words[0] in ("-m", "-c", "-") else ""
    sys.argv[:] = words[kind in ("-m", "-c") :]
    here = cwd if kind else str(Path(words[0]).parent.absolute())
    sys.path[:0] = [here, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    if kind == "-m":
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif kind:
        code = words[1] if kind == "-c" else Path("/dev/stdin").read_text()
        exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
    else:
        runpy.run_path(words[0], run_name="__main__")
    return None


def _enter_network_of(process: int) -> None:
    """Enters the network namespace of the launcher, which may have its own."""
    theirs, mine = Path(f"/proc/{process}/ns/net"), Path("/proc/self/ns/net")
    if theirs.exists() and theirs.readlink() != mine.readlink():
        with theirs.open() as file:
            if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), 0):
                raise OSError(ctypes.get_errno(), "setns")
