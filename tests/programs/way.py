"""The way of one update: every call inside the library in a window of two micro-batches on DDP, with file and line.

    python -m tests.programs.way  # of rank 0, indented by who calls whom

The window is the fifth: DDP has laid out its buckets, and what is made once is made. tests/house/test_way.py bounds
the files, and how often the way changes from one to another.
"""

import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR

import distaccum
from distaccum import Accumulator
from tests.support.ranks import Ranks
from tests.support.windows import run_window

FOLDER = str(Path(distaccum.__file__).parent)


class Call(NamedTuple):
    depth: int
    file: str
    line: int
    name: str


class Way(NamedTuple):
    calls: list[Call]
    changes: int  # from a file to another, in calls and returns

    @property
    def files(self) -> set[str]:
        return {call.file for call in self.calls}


def way_of(run: Callable[[], object], folder: str = FOLDER) -> Way:
    """The calls of functions in `folder` while `run` runs."""
    stack: list[str] = []
    calls: list[Call] = []
    changes = 0

    def note(frame: FrameType, event: str, _: Any) -> None:
        nonlocal changes
        code = frame.f_code
        if not code.co_filename.startswith(folder):
            return
        if event == "call":
            name = getattr(code, "co_qualname", code.co_name)
            calls.append(Call(len(stack), str(Path(code.co_filename).relative_to(folder)), code.co_firstlineno, name))
            changes += bool(stack) and stack[-1] != code.co_filename
            stack.append(code.co_filename)
        elif event == "return" and stack:
            stack.pop()
            changes += bool(stack) and stack[-1] != code.co_filename

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return Way(calls, changes)


def way_of_an_update(has_more: bool = False) -> Way:
    """Of a rank; `has_more`: with clipping and a schedule."""
    ddp = DistributedDataParallel(nn.Linear(4, 4))
    optimizer = SGD(ddp.parameters(), lr=0.1)
    more = {"max_norm": 1.0, "scheduler": StepLR(optimizer, 10)} if has_more else {}
    with patch("distaccum.accumulator.adapters_for", lambda _: []):  # other tests have imported Accelerate
        accumulator = Accumulator(ddp, optimizer, steps=2, **more)
    windows = accumulator.windows([torch.randn(2, 4) for _ in range(20)])
    for _ in range(4):
        run_window(next(windows), ddp).step()
    return way_of(lambda: run_window(next(windows), ddp).step())


def main() -> None:
    with closing(Ranks(2)) as ranks:
        way = Way(*ranks.run(way_of_an_update)[0])
    for call in way.calls:
        print(f"{f'{call.file}:{call.line}':<28} {'  ' * call.depth}{call.name}")
    print(f"{len(way.calls)} calls in {len(way.files)} files, {way.changes} changes of file")


if __name__ == "__main__":
    main()
