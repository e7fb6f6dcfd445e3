"""The processes of a test run: all of them end with it, however it ends."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

MARK = "DISTACCUM_TESTS"  # the variable that all processes of a run inherit, and their children


def pytest_configure() -> None:
    # Ctrl-C stops it, also where a shell that started it in the background lets it ignore that; so does SIGTERM.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    os.environ[MARK] = f"{os.environ.get(MARK, '')} {os.getpid()}"  # a run within a run is both's


def marked(run: int | None = None) -> list[int]:
    """The ids of the programs that this test run (or that one) started and that still run; needs /proc."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command, environment = (folder / "cmdline").read_bytes(), (folder / "environ").read_bytes()
        except OSError:
            continue  # gone, or another user's
        marks = [
            value
            for name, _, value in (one.partition(b"=") for one in environment.split(b"\0"))
            if name == MARK.encode()
        ]
        # The helpers of multiprocessing leave by themselves when this process does.
        if marks and str(run or os.getpid()).encode() in marks[0].split() and b"multiprocessing" not in command:
            found.append(int(folder.name))
    return found


def pytest_unconfigure() -> None:
    end_marked()


def end_marked(seconds: float = 10) -> None:
    """Asks them to stop, as scripts put back what they made in the system, and then kills them."""
    until = time.monotonic() + seconds
    asked: set[int] = set()
    while left := marked():
        for pid in left:
            number = signal.SIGKILL if time.monotonic() > until else signal.SIGTERM
            if number == signal.SIGKILL or pid not in asked:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
            asked.add(pid)
        time.sleep(0.05)
