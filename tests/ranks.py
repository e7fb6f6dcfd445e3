"""Real ranks: processes with a gloo group, started once for many functions."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import socket
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing import spawn
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any
from unittest.mock import patch

import forks

SECONDS = 60  # per function; a longer run counts as a hang


class Ranks:
    """`Ranks(2).run(function, *args)` gives `[function(*args) on rank 0, on rank 1]`.

    An error, death or hang of a rank raises here, with that rank's traceback. The processes are then discarded, and
    new ones start for the next function.
    """

    def __init__(self, num: int) -> None:
        self.num = num
        self._forks: forks.Forks | None = None
        self._pipes: list[Connection] = []

    def run(self, function: Callable[..., Any], *args: Any, seconds: float = SECONDS) -> list[Any]:
        __tracebackhide__ = True
        try:
            if self._forks is None:
                self._start()
            for pipe in self._pipes:
                pipe.send((function, args, seconds))
            return self._collect(time.monotonic() + seconds + 5)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        if self._forks is not None:
            self._forks.close()
        for pipe in self._pipes:
            pipe.close()
        self._forks, self._pipes = None, []

    def _start(self) -> None:
        # Forking this process itself is unsafe once it has threads.
        self._forks = forks.connect()
        self._folder = Path(tempfile.mkdtemp())
        # Ranks need this program's paths to find its functions, and its key to use its queues.
        mine = {**spawn.get_preparation_data("ranks"), "authkey": bytes(multiprocessing.current_process().authkey)}
        for rank in range(self.num):
            ours, theirs = socket.socketpair()
            self._forks.fork("ranks:serve", rank, self.num, str(self._folder), files=[theirs.fileno()])
            theirs.close()
            self._pipes.append(Connection(ours.detach()))
            self._pipes[-1].send(mine)
        self._collect(time.monotonic() + SECONDS)  # so that the import of torch does not count as a function's time

    def _collect(self, until: float) -> list[Any]:
        __tracebackhide__ = True
        results: dict[int, Any] = {}
        errors: dict[int, str] = {}
        while len(results) + len(errors) < self.num and time.monotonic() < until:
            waiting = [pipe for rank, pipe in enumerate(self._pipes) if rank not in results | errors]
            for pipe in wait(waiting, timeout=max(0.0, until - time.monotonic())):
                rank = self._pipes.index(pipe)  # type: ignore[arg-type]
                try:
                    good, value = pipe.recv()  # type: ignore[union-attr]
                except (EOFError, OSError):
                    words = self._last_words(rank)
                    good, value = False, f"{'hangs' if 'Timeout (' in words else 'died'}\n{words}"
                if good:
                    results[rank] = value
                else:
                    errors[rank] = value
                    until = min(until, time.monotonic() + 3)  # the others may wait for this rank forever
        for rank in range(self.num):
            if rank not in results | errors:
                errors[rank] = f"did not end\n{self._last_words(rank)}"
        if errors:
            first, *others = sorted(errors.items(), key=_is_of_others)
            lines = [f"rank {first[0]} {first[1]}"]
            # The consequences of the first error get one line each; ranks that hang show their stacks.
            lines += [f"rank {rank} {text if _hangs(text) else text.splitlines()[-1]}" for rank, text in others]
            raise RankError("\n".join(lines))
        return [results[rank] for rank in range(self.num)]

    def _last_words(self, rank: int) -> str:
        path = self._folder / f"{rank}.log"
        return path.read_text()[-4000:] if path.exists() else ""


class RankError(AssertionError):
    pass


def _is_of_others(error: tuple[int, str]) -> tuple[bool, bool]:
    """A sort key: the consequences of another rank's failure come after it."""
    _, text = error
    return "Connection closed by peer" in text, text.startswith("did not end")


def _hangs(text: str) -> bool:
    return text.startswith(("hangs", "did not end"))


def _in_short(error: BaseException) -> str:
    """The error with the frame that raised it and the frames of this repository."""
    shown = traceback.TracebackException.from_exception(error, compact=True)
    root = str(Path(__file__).parent.parent)
    own = [frame for frame in shown.stack[1:] if frame.filename.startswith(root) and ".venv" not in frame.filename]
    last = [frame for frame in shown.stack[-1:] if frame not in own]
    shown.stack = traceback.StackSummary.from_list([*own, *last])
    return "".join(shown.format())


@contextmanager
def launched() -> Iterator[None]:
    """The environment in which Fabric and Lightning take this process for a rank that was launched for them."""
    import torch.distributed as dist

    world, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    launch = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "NODE_RANK": "0", "LOCAL_RANK": str(rank)}
    with patch.dict(os.environ, {**launch, "WORLD_SIZE": str(world)}), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # their own
        yield


def serve(rank: int, num: int, folder: str, file: int) -> None:
    """Runs in a process that was forked for this rank."""
    import torch
    import torch.distributed as dist

    pipe = Connection(file)
    spawn.prepare(pipe.recv())
    log = (Path(folder) / f"{rank}.log").open("w")
    for stream in (1, 2):  # the last words of C++ code that aborts the process
        os.dup2(log.fileno(), stream)
    faulthandler.enable(log)
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # otherwise Accelerate sets it, with a warning
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=num,
        timeout=timedelta(seconds=SECONDS),
    )
    warnings.simplefilter("error")
    pipe.send((True, None))
    while True:
        try:
            function, args, seconds = pipe.recv()
        except EOFError:
            return
        faulthandler.dump_traceback_later(seconds, file=log, exit=True)
        torch.manual_seed(0)
        try:
            answer = (True, function(*args))
        except BaseException as error:
            answer = (False, _in_short(error))
            del error
        faulthandler.cancel_dump_traceback_later()
        pipe.send(answer)
