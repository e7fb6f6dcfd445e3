"""Starts the programs under launch/ as real processes, forked from one that has done the slow imports."""

from __future__ import annotations

import faulthandler
import os
import runpy
import signal
import socket
import sys
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

from tests.support.ranks import fork, may_have_children

ROOT = Path(__file__).parents[2]
SECONDS = 300  # per program; a longer run counts as a hang, on a loaded machine too


class Program:
    """A process that runs a program."""

    def __init__(self, process: BaseProcess, log: Path, errors: Path) -> None:
        self._process, self._log, self._errors = process, log, errors
        self.of_all = ""  # of rank 0: the output of all ranks, once they have ended

    @property
    def status(self) -> int | None:
        """None: it runs; negative: killed by this signal."""
        return self._process.exitcode

    @property
    def text(self) -> str:
        """Its output, on both streams unless stderr is kept separately."""
        return self._log.read_text() if self._log.exists() else ""  # no file: killed before it printed

    @property
    def errors(self) -> str:
        return self._errors.read_text() if self._errors.exists() else ""

    def send(self, number: int) -> None:
        if self.status is None:
            os.kill(self._process.pid or 0, number)

    def wait(self, seconds: float = SECONDS) -> Program:
        return wait_for([self], seconds)[0]


def wait_for(programs: list[Program], seconds: float = SECONDS) -> list[Program]:
    """Waits for all. After a failure the others may wait for the failed one, so they get only some seconds more."""
    until = time.monotonic() + seconds
    while None in (statuses := [one.status for one in programs]):
        if any(statuses):
            until = min(until, time.monotonic() + 30)
        if time.monotonic() > until:
            for one in programs:
                one.send(signal.SIGABRT)  # prints its stack
            time.sleep(1)
            ends = ["none, hangs" if status is None else status for status in statuses]
            lines = [f"rank {i}, status {ends[i]}:\n{one.text}{one.errors}" for i, one in enumerate(programs)]
            raise AssertionError("\n".join(lines))
        time.sleep(0.02)
    return programs


def wait_until(seen: Callable[[], object], program: Program, seconds: float = SECONDS) -> bool:
    """Whether `seen` became true before the program ended."""
    until = time.monotonic() + seconds
    while not seen():
        if program.status is not None:
            return False
        assert time.monotonic() < until, program.text
        time.sleep(0.005)
    return True


class Programs:
    """`programs.run("train", "--updates", "2")`; `ranks=2` starts two, as a launcher would.

    A program is a module ("train", "distaccum"), a script ("launch/bench/law.py"), or "-c" with Python code as its
    first argument; each runs as under `python`.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._started: list[Program] = []

    def start(
        self, program: str, *arguments: object, cwd: Path | None = None, own_stderr: bool = False, **environment: str
    ) -> Program:
        """With `own_stderr`, stderr goes to a file of its own."""
        log = self._folder / f"{len(self._started)}.log"
        errors = log.with_suffix(".errors")
        words, logs = [str(one) for one in arguments], [str(log), str(errors if own_stderr else log)]
        process = fork(run, program, words, logs, cwd or self._folder, environment)  # without --out, train writes here
        self._started.append(Program(process, log, errors))
        return self._started[-1]

    def start_ranks(self, ranks: int, program: str, *arguments: object, **environment: str) -> list[Program]:
        job = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
        job |= {"MASTER_PORT": free_port(), **environment}
        return [self.start(program, *arguments, **job, RANK=str(rank), LOCAL_RANK=str(rank)) for rank in range(ranks)]

    def run(
        self, program: str, *arguments: object, ranks: int = 1, status: int | None = None, **environment: str
    ) -> Program:
        """Rank 0's result; all ranks must have ended with the same status, with this if one is given."""
        if ranks == 1:
            ended = [self.start(program, *arguments, **environment).wait()]
        else:
            ended = wait_for(self.start_ranks(ranks, program, *arguments, **environment))
        expected = {ended[0].status if status is None else status}
        ended[0].of_all = "\n".join(done.text for done in ended)
        assert {done.status for done in ended} == expected, ended[0].of_all
        return ended[0]

    def stop(self) -> None:
        """Ends the programs that still run."""
        for one in self._started:
            one.send(signal.SIGKILL)


def free_port() -> str:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return str(found.getsockname()[1])


def run(program: str, arguments: list[str], logs: list[str], cwd: Path, environment: dict[str, str]) -> None:
    """Runs the program in a process that was forked for it, which ends with its status."""
    may_have_children()
    for stream, log in enumerate(logs, start=1):
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    faulthandler.enable(2)
    os.environ.update(environment)
    sys.path[:0] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    os.chdir(cwd)
    sys.argv[:] = [program, *arguments]
    if program == "-c":
        sys.argv[1:] = arguments[1:]
        exec(compile(arguments[0], "<string>", "exec"), {"__name__": "__main__"})
    elif program.endswith(".py"):
        sys.path.insert(0, str(Path(program).parent))
        runpy.run_path(program, run_name="__main__")
    else:
        runpy.run_module(program, run_name="__main__", alter_sys=True)
