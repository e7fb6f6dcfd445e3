"""A process that has imported the slow libraries, and forks the ranks and programs of all workers of a run.

The imports cost 12 seconds of a core; a fork costs a twentieth of a second. `DISTACCUM_FORKS` is the address of that
process. Where it is unset, the first user starts one.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

ADDRESS = "DISTACCUM_FORKS"
MOST = 1 << 16  # bytes per read


class Forks:
    """Requests forks from the process at `address`, and their exit status. close() ends those that still run."""

    def __init__(self, address: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(address)
        self._replies = self._socket.makefile("r")

    def fork(self, function: str, *arguments: Any, files: Sequence[int] = ()) -> int:
        """The id of a process that calls `module:function` with these arguments and its descriptors of these files."""
        return self._ask({"function": function, "arguments": arguments, "path": sys.path}, files)

    def load(self, module: str) -> None:
        """Imports a module into all processes that are forked later."""
        self._ask({"load": module})

    def status(self, pid: int) -> int | None:
        """The exit status of a process that was forked here, or None while it runs. Can be read once."""
        status = self._ask({"wait": pid})
        return None if status is None else os.waitstatus_to_exitcode(status)

    def close(self) -> None:
        """Returns when all processes that were forked here have ended."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
            self._replies.read()
        self._replies.close()
        self._socket.close()

    def _ask(self, request: dict[str, Any], files: Sequence[int] = ()) -> Any:
        socket.send_fds(self._socket, [json.dumps(request).encode() + b"\n"], list(files))
        reply = json.loads(self._replies.readline() or '{"error": "the process that forks has died"}')
        if isinstance(reply, dict):
            raise RuntimeError(reply["error"])
        return reply


def connect() -> Forks:
    start()
    return Forks(os.environ[ADDRESS])


def start() -> None:
    """Starts the process if none runs. It holds a pipe of this process, and so ends with it."""
    if ADDRESS in os.environ:
        return
    address = Path(tempfile.mkdtemp(prefix="distaccum-")) / "forks"
    # A new session, so that Ctrl-C in the terminal does not reach it.
    process = subprocess.Popen([sys.executable, __file__, address], stdin=subprocess.PIPE, start_new_session=True)
    atexit.register(shutil.rmtree, address.parent)
    atexit.register(process.communicate)  # runs before rmtree
    until = time.monotonic() + 60
    while not address.exists():
        assert process.poll() is None and time.monotonic() < until
        time.sleep(0.01)
    os.environ[ADDRESS] = str(address)


def serve(address: str) -> None:
    """Answers until standard input ends."""
    sys.path.insert(0, str(Path(__file__).parent.parent))  # the library beside these tests, not an installed one
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{address}.new")
    listener.listen()
    Path(f"{address}.new").rename(address)  # appears only when it listens
    _load("preloaded")
    selector = selectors.DefaultSelector()
    selector.register(sys.stdin.fileno(), selectors.EVENT_READ)
    selector.register(listener, selectors.EVENT_READ)
    clients: dict[socket.socket, tuple[bytes, list[int], set[int]]] = {}  # bytes read, files, processes
    while True:
        for key, _ in selector.select():
            if key.fileobj is listener:
                client, _ = listener.accept()
                clients[client] = b"", [], set()
                selector.register(client, selectors.EVENT_READ)
                continue
            if not isinstance(key.fileobj, socket.socket):  # standard input
                for _, _, pids in clients.values():
                    _end(pids)
                os._exit(0)  # a normal exit would take seconds, with all these libraries
            client = key.fileobj
            text, files, pids = clients[client]
            try:
                data, more, _, _ = socket.recv_fds(client, MOST, 3)
            except ConnectionError:  # the client was killed before it read the last reply
                data, more = b"", []
            text, files = text + data, files + list(more)
            if not data:
                _end(pids)
                selector.unregister(client)
                del clients[client]
                client.close()
                continue
            if not text.endswith(b"\n"):
                clients[client] = text, files, pids
                continue
            request, reply = json.loads(text), None
            try:
                if "load" in request:
                    _load(request["load"])
                elif "wait" in request:
                    pid, status = os.waitpid(request["wait"], os.WNOHANG)
                    pids.discard(pid)
                    reply = status if pid else None
                else:
                    module, _, function = request["function"].partition(":")
                    reply = os.fork()
                    if not reply:
                        _child(module, function, [*request["arguments"], *files], request["path"], [listener, *clients])
                    pids.add(reply)
            except Exception as error:
                reply = {"error": repr(error)}
            for file in files:
                os.close(file)
            clients[client] = b"", [], pids
            with suppress(OSError):
                client.sendall(json.dumps(reply).encode() + b"\n")


def _load(module: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # otherwise each fork's first collection would copy all pages that it visits


def _end(pids: set[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _child(module: str, function: str, arguments: list[Any], path: list[str], others: list[socket.socket]) -> None:
    status = 1
    try:
        for one in others:
            one.close()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.path += [folder for folder in path if folder not in sys.path]
        status = getattr(importlib.import_module(module), function)(*arguments) or 0
    except SystemExit as left:
        if isinstance(left.code, str):
            print(left.code, file=sys.stderr)
        status = left.code if isinstance(left.code, int) else int(left.code is not None)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    serve(sys.argv[1])
