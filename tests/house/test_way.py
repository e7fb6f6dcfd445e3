"""The way of an update: the calls, the files and the changes of file of two micro-batches on DDP."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR

import distaccum
from distaccum import Accumulator, adapter
from tests.support.ranks import on_ranks
from tests.support.windows import run_window

FOLDER = str(Path(distaccum.__file__).parent)


def way_of(call: Callable[[], object], folder: str = FOLDER) -> tuple[set[str], int]:
    """The files of `folder` that a call enters, and how often it changes from one to another."""
    stack: list[str] = []
    files: set[str] = set()
    changes = 0

    def note(frame: FrameType, event: str, _: Any) -> None:
        nonlocal changes
        path = frame.f_code.co_filename
        if not path.startswith(folder):
            return
        if event == "call":
            changes += bool(stack) and stack[-1] != path
            stack.append(path)
            files.add(path)
        elif event == "return" and stack:
            stack.pop()
            changes += bool(stack) and stack[-1] != path

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return files, changes


@on_ranks(2)
@pytest.mark.parametrize(("has_more", "most"), [(False, 100), (True, 112)])
def test_update_enters_few_files(has_more, most):
    ddp = DistributedDataParallel(nn.Linear(4, 4))
    optimizer = SGD(ddp.parameters(), lr=0.1)
    more = {"max_norm": 1.0, "scheduler": StepLR(optimizer, 10)} if has_more else {}
    with patch.dict(adapter.ADAPTERS, clear=True):  # other tests have imported Accelerate
        accumulator = Accumulator(ddp, optimizer, steps=2, **more)
    windows = accumulator.windows([torch.randn(2, 4) for _ in range(20)])

    for _ in range(4):
        run_window(next(windows), ddp).step()
    files, changes = way_of(lambda: run_window(next(windows), ddp).step())
    assert len(files) <= 12, sorted(files)
    assert changes <= most


def test_way_counts_files_and_changes(tmp_path):
    for name, text in (("one", "import two\ndef f():\n    two.g()\n    two.g()\n"), ("two", "def g(): pass\n")):
        (tmp_path / f"{name}.py").write_text(text)
    sys.path.insert(0, str(tmp_path))
    try:
        from one import f
    finally:
        sys.path.remove(str(tmp_path))
    files, changes = way_of(f, str(tmp_path))
    assert ({Path(one).stem for one in files}, changes) == ({"one", "two"}, 4)
