"""Starting the programs under launch/: real processes, forked from one that has imported what takes long."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Done:
    status: int  # negative: the signal that ended it
    text: str  # what it printed, to either stream


class Program:
    """A process that runs `train.py` or another program of launch/ with these arguments."""

    def __init__(self, server: Programs, pid: int, log: Path) -> None:
        self._server, self.pid, self._log = server, pid, log
        self._status: int | None = None

    @property
    def text(self) -> str:
        return self._log.read_text() if self._log.exists() else ""  # killed before it said anything

    def poll(self) -> int | None:
        if self._status is None and (status := self._server.ask(wait=self.pid)) is not None:
            self._status = os.waitstatus_to_exitcode(status)
        return self._status

    def send(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def wait(self, seconds: float = 180) -> Done:
        return wait_for([self], seconds)[0]


def wait_for(programs: list[Program], seconds: float = 180) -> list[Done]:
    """How they ended. Where one fails the others may wait for it: they get a few seconds more."""
    until = time.monotonic() + seconds
    statuses: dict[int, int] = {}
    while len(statuses) < len(programs):
        for i, one in enumerate(programs):
            if i not in statuses and (status := one.poll()) is not None:
                statuses[i] = status
                until = min(until, time.monotonic() + 10) if status else until
        if time.monotonic() > until:
            for i, one in enumerate(programs):
                if i not in statuses:
                    one.send(signal.SIGKILL)
            texts = [f"rank {i}, status {statuses.get(i, 'none, hangs')}:\n{p.text}" for i, p in enumerate(programs)]
            raise AssertionError("\n".join(texts))
        time.sleep(0.02)
    return [Done(statuses[i], one.text) for i, one in enumerate(programs)]


def wait_until(seen: Callable[[], object], program: Program, seconds: float = 180) -> bool:
    """Whether it was seen before the program ended."""
    until = time.monotonic() + seconds
    while not seen():
        if program.poll() is not None:
            return False
        assert time.monotonic() < until, program.text
        time.sleep(0.005)
    return True


class Programs:
    """`programs.run("train", "--updates", "2")`; with `ranks=2` there are two, as a launcher would start them."""

    def __init__(self, folder: Path, command: tuple[str, ...] = (__file__,)) -> None:
        self._folder, self._number = folder, 0
        # Ctrl-C in the terminal is not for the programs: `stop` ends them.
        self._server = subprocess.Popen(
            [sys.executable, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
            start_new_session=True,
        )  # fmt: skip

    def ask(self, **request: Any) -> Any:
        assert self._server.stdin is not None and self._server.stdout is not None
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        return json.loads(self._server.stdout.readline())

    def start(self, program: str, *arguments: object, cwd: Path | None = None, **environment: str) -> Program:
        self._number += 1
        log = self._folder / f"{self._number}.log"
        words = [str(argument) for argument in arguments]
        cwd = cwd or self._folder  # where a run without --out may be
        pid = self.ask(program=program, arguments=words, log=str(log), cwd=str(cwd), environment=environment)
        return Program(self, pid, log)

    def start_ranks(self, ranks: int, program: str, *arguments: object, **environment: str) -> list[Program]:
        port = free_port()
        job = {
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        return [
            self.start(program, *arguments, **job, RANK=str(rank), LOCAL_RANK=str(rank), **environment)
            for rank in range(ranks)
        ]

    def run(self, program: str, *arguments: object, ranks: int = 1, **environment: str) -> Done:
        """Rank 0's end, when all have ended alike."""
        if ranks == 1:
            return self.start(program, *arguments, **environment).wait()
        ended = wait_for(self.start_ranks(ranks, program, *arguments, **environment))
        assert len({done.status for done in ended}) == 1, "\n".join(done.text for done in ended)
        return ended[0]

    def stop(self) -> None:
        """The server ends the programs that still run when it hears no more, as where this process is killed."""
        self._server.__exit__(None, None, None)


def free_port() -> str:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return str(found.getsockname()[1])


def serve() -> None:
    sys.path.insert(0, str(ROOT / "launch"))
    os.environ["DS_ACCELERATOR"] = "cpu"
    import accelerate
    import deepspeed
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot
    import prove
    import sklearn.datasets
    import torch
    import torchvision
    import train

    assert accelerate and deepspeed and matplotlib.pyplot and sklearn.datasets and torchvision  # to be there
    torch.set_num_threads(1)
    answer({"train": train.main, "prove": prove.main})


def answer(programs: dict[str, Callable[[list[str]], Any]]) -> None:
    """Forks for each line of the input that names one of these programs."""
    started: set[int] = set()
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            pid, status = os.waitpid(request["wait"], os.WNOHANG)
            started.discard(pid)
            reply = status if pid else None
        else:
            reply = os.fork()
            if not reply:
                break
            started.add(reply)
        print(json.dumps(reply), flush=True)
    else:
        for pid in started:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        os._exit(0)  # without the seconds that so many libraries take to leave
    # The child.
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.close(0)
    os.environ.update(request["environment"])
    sys.argv[0] = f"{request['program']}.py"
    os.chdir(request["cwd"])
    if limit := os.environ.get("LARGEST_FILE"):  # in bytes: as on a disk that is full
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), int(limit)))
    try:
        status = programs[request["program"]](request["arguments"])
    except SystemExit as left:
        status = left.code
    except BaseException:
        import traceback

        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    serve()
