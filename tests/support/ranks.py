"""Real ranks: processes with a gloo group, started once for many functions."""

import faulthandler
import functools
import importlib
import inspect
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest.mock import patch

SECONDS = 240  # per function; a longer run counts as a hang, on a loaded machine too


def fork(function: Callable[..., Any], *args: Any) -> BaseProcess:
    """A process that runs the function, forked from a server that has done the imports of `preloaded`."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.support.preloaded"])
    with patch.dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, sys.path))):  # where the server finds it
        forkserver.ensure_running()
    process = context.Process(target=function, args=args, daemon=True)
    process.start()
    return process


def may_have_children() -> None:
    """Lets this daemon start the workers of a DataLoader, as a program that nobody forked does."""
    multiprocessing.current_process()._config["daemon"] = False
    multiprocessing.set_start_method(None, force=True)


class Ranks:
    """`Ranks(2).run(function, *args)` gives `[function(*args) on rank 0, on rank 1]`.

    An error, death or hang of a rank raises here, with that rank's traceback. The processes are then discarded, and
    new ones start for the next function.
    """

    def __init__(self, num: int) -> None:
        self.num = num
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []

    def run(self, function: Callable[..., Any], *args: Any, seconds: float = SECONDS) -> list[Any]:
        __tracebackhide__ = True
        try:
            if not self._processes:
                self._start()
            for pipe in self._pipes:
                pipe.send((function, args, seconds))
            return self._collect(time.monotonic() + seconds + 5)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            process.join()
            pipe.close()
        self._processes, self._pipes = [], []

    def _start(self) -> None:
        self._folder = Path(tempfile.mkdtemp())
        for rank in range(self.num):
            ours, theirs = multiprocessing.Pipe()
            self._pipes.append(ours)
            self._processes.append(fork(serve, rank, self.num, self._folder, theirs))
            theirs.close()
        self._collect(time.monotonic() + 2 * SECONDS)  # so that the import of torch does not count as a function's time

    def _collect(self, until: float) -> list[Any]:
        __tracebackhide__ = True
        results: dict[int, Any] = {}
        errors: dict[int, str] = {}
        while len(results) + len(errors) < self.num and time.monotonic() < until:
            waiting = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in results | errors}
            for pipe in wait(list(waiting), timeout=max(0.0, until - time.monotonic())):
                rank = waiting[pipe]  # type: ignore[index]
                try:
                    good, value = pipe.recv()  # type: ignore[union-attr]
                except (EOFError, OSError):
                    words = self._last_words(rank)
                    good, value = False, f"{'hangs' if 'Timeout (' in words else 'died'}\n{words}"
                (results if good else errors)[rank] = value
                if not good:
                    until = min(until, time.monotonic() + 5)  # the others may wait for this rank forever
        errors |= {r: f"did not end\n{self._last_words(r)}" for r in range(self.num) if r not in results | errors}
        if not errors:
            return [results[rank] for rank in range(self.num)]
        first, *others = sorted(errors, key=lambda rank: is_consequence(errors[rank]))
        lasts = [f"rank {rank} {in_a_line(errors[rank])}" for rank in others]
        raise RankError("\n".join([f"rank {first} {errors[first]}", *lasts]))

    def _last_words(self, rank: int) -> str:
        path = self._folder / f"{rank}.log"
        return path.read_text()[-4000:] if path.exists() else ""


class RankError(AssertionError):
    pass


def on_ranks(num: int | Callable[..., int] | None = None) -> Callable[[Any], Any]:
    """Runs a test itself on each of `num` ranks, to which its arguments are sent.

    `num` may be a function of these; without it the argument `world` is the number.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def test(ranks: Callable[[int], Ranks], **arguments: Any) -> None:
            __tracebackhide__ = True
            where = function.__module__, function.__name__
            world = num(**arguments) if callable(num) else num or arguments["world"]
            ranks(world).run(_run_test, *where, arguments)

        signature = inspect.signature(function)
        parameters = [inspect.Parameter("ranks", inspect.Parameter.KEYWORD_ONLY), *signature.parameters.values()]
        ordered = sorted(parameters, key=lambda one: one.kind)
        test.__signature__ = signature.replace(parameters=ordered)  # type: ignore[attr-defined]
        return test

    return decorate


def _run_test(module: str, name: str, arguments: dict[str, Any]) -> None:
    from torch.nn import functional

    # ZeRO 3 puts a linear function of its own there for good, which compiled code of torch 2.11 gives gradients of 0.
    with patch.object(functional, "linear", functional.linear):
        found = getattr(importlib.import_module(module), name).__wrapped__(**arguments)
    assert found is None, f"{name} returned {found}; a test asserts"


def is_consequence(text: str) -> tuple[bool, bool]:
    """A sort key: the consequences of another rank's failure come after it."""
    return "Connection closed by peer" in text, text.startswith("did not end")


def in_a_line(text: str) -> str:
    """The last, but of a rank that hangs all, which say where."""
    return text if text.startswith(("hangs", "did not end")) else text.splitlines()[-1]


def in_short(error: BaseException) -> str:
    """The error with the frame that raised it and the frames of this repository."""
    shown = traceback.TracebackException.from_exception(error, compact=True)
    root = str(Path(__file__).parents[2])
    own = [frame for frame in shown.stack[1:] if frame.filename.startswith(root) and ".venv" not in frame.filename]
    last = [frame for frame in shown.stack[-1:] if frame not in own]
    shown.stack = traceback.StackSummary.from_list([*own, *last])
    if isinstance(error, AssertionError) and shown.stack:  # pytest shows no values of an assertion on a rank
        at = error.__traceback__
        while at is not None and at.tb_next is not None:
            at = at.tb_next
        values = {name: repr(value)[:200] for name, value in at.tb_frame.f_locals.items()} if at is not None else {}
        shown.stack[-1].locals = values
    return "".join(shown.format())


@functools.cache
def mesh_of(shape: tuple[int, ...], *names: str) -> Any:
    """A mesh over this job's ranks, made once in it: each group that is made leaves a polling thread."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", shape, mesh_dim_names=names or None)


@contextmanager
def launched() -> Iterator[None]:
    """The environment in which Fabric and Lightning take this process for a rank that was launched for them."""
    import torch.distributed as dist

    world, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    launch = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "NODE_RANK": "0", "LOCAL_RANK": str(rank)}
    with patch.dict(os.environ, {**launch, "WORLD_SIZE": str(world)}), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # their own
        yield


def serve(rank: int, num: int, folder: Path, pipe: Connection) -> None:
    """Runs in the process of this rank."""
    import torch
    import torch.distributed as dist

    may_have_children()
    log = (folder / f"{rank}.log").open("w")
    for stream in (1, 2):  # the last words of C++ code that aborts the process
        os.dup2(log.fileno(), stream)
    faulthandler.enable(log)
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # otherwise Accelerate sets it, with a warning
    place = {"init_method": f"file://{folder}/store", "rank": rank, "world_size": num}
    dist.init_process_group("gloo", timeout=timedelta(seconds=SECONDS), **place)
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
    warnings.filterwarnings("ignore", message="no weight changed")  # many want gradients alone
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is dep")  # in torch 2.14
    warnings.filterwarnings("ignore", message=".torch.jit")  # of torch 2.13, by its own imports
    pipe.send((True, None))
    while True:
        try:
            function, args, seconds = pipe.recv()
        except EOFError:
            os._exit(0)
        faulthandler.dump_traceback_later(seconds, file=log, exit=True)
        torch.manual_seed(0)
        try:
            answer = (True, function(*args))
        except BaseException as error:
            answer = (False, in_short(error))
            del error
        faulthandler.cancel_dump_traceback_later()
        pipe.send(answer)
