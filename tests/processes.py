"""All processes of a test run end with it, however it ends."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

MARK = "DISTACCUM_TESTS"  # all processes of a run inherit this variable


def pytest_configure() -> None:
    # Ctrl-C and SIGTERM stop the run, even if a shell started it in the background with SIGINT ignored.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    os.environ[MARK] = f"{os.environ.get(MARK, '')} {os.getpid()}"  # a run inside a run carries both marks


def marked(run: int | None = None) -> list[int]:
    """The ids of the running programs that this test run (or run `run`) started; needs /proc."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command, environment = (folder / "cmdline").read_bytes(), (folder / "environ").read_bytes()
        except OSError:
            continue  # ended, or owned by another user
        marks = [
            value
            for name, _, value in (one.partition(b"=") for one in environment.split(b"\0"))
            if name == MARK.encode()
        ]
        # The helper processes of multiprocessing end with this process.
        if marks and str(run or os.getpid()).encode() in marks[0].split() and b"multiprocessing" not in command:
            found.append(int(folder.name))
    return found


def pytest_unconfigure() -> None:
    end_marked()


def end_marked(seconds: float = 10) -> None:
    """Sends SIGTERM first, so that scripts can undo their changes to the system by further programs, and then kills."""
    until = time.monotonic() + seconds
    _send(signal.SIGTERM, marked())
    while left := marked():
        if time.monotonic() > until:
            _send(signal.SIGKILL, left)
        time.sleep(0.05)


def _send(number: signal.Signals, pids: list[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
