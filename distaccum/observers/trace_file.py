"""The file of a trace: whole JSON after each writing, which Perfetto and chrome://tracing open.

Its last bytes close it, and the next spans are written over them.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from ..engines import Engine
from ..law.errors import warn

VERSION = 1  # of the file's arguments
TAIL = b"\n]}\n"
HOST, DEVICE = range(2)  # threads of the file

Span = tuple[str, int, int, dict[str, Any], tuple[Any, Any] | None]  # name, begin and end, arguments, device events


class TraceFile:
    """One rank's. No other trace writes to it while it is open: it holds a lock that ends with the process."""

    def __init__(self, path: Path, head: dict[str, Any]) -> None:
        """Keeps what an earlier run left: rank0.json becomes rank0.1.json, or the next number that is free."""
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            with path.open("rb+") as earlier:
                _lock(earlier)
            number = 1
            while (other := path.with_suffix(f".{number}.json")).exists():
                number += 1
            path.rename(other)
        self._pid = head["otherData"]["rank"]
        self._file: Any = path.open("wb", buffering=0)
        _lock(self._file)
        names = [
            {"name": "process_name", "ph": "M", "pid": self._pid, "args": {"name": f"rank {self._pid}"}},
            {"name": "process_sort_index", "ph": "M", "pid": self._pid, "args": {"sort_index": self._pid}},
            {"name": "thread_name", "ph": "M", "pid": self._pid, "tid": HOST, "args": {"name": "host"}},
            {"name": "thread_name", "ph": "M", "pid": self._pid, "tid": DEVICE, "args": {"name": "device"}},
        ]
        first = json.dumps({**head, "traceEvents": []})[:-2].encode()
        self._file.write(first + b"\n" + b",\n".join(json.dumps(one).encode() for one in names) + TAIL)

    def write(self, spans: Sequence[Span], thread: int) -> None:
        if self._file is None or not spans:
            return
        lines = (
            f',\n{{"name":"{name}","ph":"X","pid":{self._pid},"tid":{thread},"ts":{began / 1000:.3f},'
            f'"dur":{(end - began) / 1000:.3f},"args":{json.dumps(about)}}}'
            for name, began, end, about, _ in spans
        )
        try:
            whole = self._file.seek(-len(TAIL), os.SEEK_END)
            left = memoryview("".join(lines).encode() + TAIL)
            while left:  # a disk that fills up takes a part, and refuses the next
                left = left[self._file.write(left) :]
        except OSError as error:
            with suppress(OSError):  # as it was, in bytes that it has already
                self._file.seek(whole)
                self._file.write(TAIL)
                self._file.truncate()
            self.close()
            warn(f"the trace ends here ({error.strerror}); training continues")

    def close(self) -> None:
        if self._file is not None:
            if fcntl is not None:
                with suppress(OSError):  # workers that were forked have the file open too
                    fcntl.flock(self._file, fcntl.LOCK_UN)
            self._file.close()
            self._file = None


fcntl: Any = import_module("fcntl") if os.name == "posix" else None  # without it two traces of one folder pass


def _lock(file: Any) -> None:
    """Raises BlockingIOError where another trace has the lock."""
    if fcntl is None:
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:  # a file system without locks
        return


def head_of(engine: Engine, device: torch.device) -> dict[str, Any]:
    boot = Path("/proc/sys/kernel/random/boot_id")  # processes that have it in common share a clock
    about = {
        "distaccum": VERSION,
        "rank": engine.peers.rank,
        "ranks": engine.peers.num_ranks,
        "engine": engine.name,
        "sync": engine.sync,
        "gathers": engine.gathers,
        "host": platform.node(),
        "boot": boot.read_text().strip() if boot.exists() else platform.node(),
        "anchor": {"perf_counter_ns": time.perf_counter_ns(), "time_ns": time.time_ns()},
        "device": str(device),
        "device_times": device.type == "cuda",
    }
    return {"displayTimeUnit": "ms", "otherData": about}
