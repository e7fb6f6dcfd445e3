"""Accumulators leave nothing behind when they are deleted: no hooks of models and optimizers, and no open files."""

import linecache
import os
import subprocess
import sys
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

from distaccum import Accumulator
from distaccum.extensions import WideSums
from tests.support.engines import KINDS
from tests.support.problems import make_net_without_router, micro_batches_of
from tests.support.ranks import on_ranks
from tests.support.windows import freed_by_counts, run_window

HOOKS = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_backward_hooks",
    "_post_accumulate_grad_hooks",
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
)


def num_hooks(model: nn.Module, optimizer: Any) -> int:
    holders = [*model.modules(), *model.parameters(), getattr(optimizer, "optimizer", optimizer)]
    return sum(len(getattr(holder, name, None) or ()) for holder in holders for name in HOOKS)


def num_files() -> int:
    folder = Path("/proc/self/fd")
    return len(list(folder.iterdir())) if folder.exists() else 0


HOOKED = [
    ("plain", 1, {}),
    ("plain", 1, {"extensions": [WideSums(torch.float64)]}),
    ("DDP", 2, {"extensions": [WideSums(torch.float64)]}),
    *(pytest.param(kind, 2, {}, marks=pytest.mark.slow) for kind in ("DDP", "FSDP2", "ZeRO 1")),
]


@pytest.mark.parametrize(("kind", "world", "options"), HOOKED)
@on_ranks()
def test_twenty_accumulators_leave_no_hook_and_no_file(kind, world, options):
    model, optimizer = KINDS[kind].wrap(make_net_without_router().float(), 0.1)
    before, most, files = num_hooks(model, optimizer), 0, []
    with freed_by_counts():  # a collection might run while torch iterates over its hooks
        for _ in range(20):
            accumulator = Accumulator(model, optimizer, steps=2, **options)
            for window in accumulator.windows(micro_batches_of([[2, 1]], 0, 0, torch.float32)):
                run_window(window, model)
                most = max(most, num_hooks(model, optimizer))  # an engine may guard steps in windows alone
                window.step()
            files.append(num_files())
            del accumulator, window
        assert files[-1] == files[0]
        assert most > before, "the accumulators must add hooks, or this test shows nothing"
        assert num_hooks(model, optimizer) == before
        freed = weakref.ref(model)
        del model, optimizer
        assert freed() is None or kind != "plain"


def lines_of_warnings(run: Callable[[], object]) -> list[str]:
    """The lines of this file that the warnings name."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    assert {one.filename for one in caught} == {__file__}
    return [linecache.getline(__file__, one.lineno).strip() for one in caught]


def test_warning_names_the_callers_line_at_any_depth(tmp_path):
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    optimizer, batch = SGD(model.parameters(), lr=0.1), torch.randn(4, 2)

    def loop() -> None:
        model(batch).sum().backward()  # before the window, so not part of it
        for window in Accumulator(model, optimizer, steps=2).windows([batch, batch]):
            for inputs in window:
                window.backward(model(inputs).square().mean())
            window.step()

    def whole() -> None:
        Accumulator(model, optimizer, micro_batch_size=2).update(batch, lambda rows: model(rows).square().mean())

    assert lines_of_warnings(loop) == ["for window in Accumulator(model, optimizer, steps=2).windows([batch, batch]):",
                                       "for inputs in window:"]  # fmt: skip
    (line,) = lines_of_warnings(whole)
    assert line.startswith("Accumulator(model, optimizer, micro_batch_size=2).update(")


LEAVES = """
import os, sys, threading
import torch._dynamo  # or each rank would import it
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from distaccum import Accumulator

def train(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}", rank=rank, world_size=2)
    model = DistributedDataParallel(nn.Linear(8, 8))
    accumulator = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), steps=2)
    for window in accumulator.windows([torch.randn(4, 8) for _ in range(6)]):
        for x in window:
            window.backward(model(x).square().mean())
        update = window.step()
    threading.current_thread().kept = kept = accumulator.windows(iter([torch.randn(4, 8)] * 4))  # outlives all modules
    next(kept)
    return accumulator, model, window, update

ranks = {}
for end in ("hold", "destroy"):
    for rank in range(2):
        if not (pid := os.fork()):
            held = train(rank, f"{sys.argv[1]}/{end}")
            if end == "destroy":
                dist.destroy_process_group()
            sys.exit()  # as a program that nobody forked
        ranks[pid] = end
print([(end, status) for pid, end in ranks.items() if (status := os.waitpid(pid, 0)[1])])
"""


@pytest.mark.slow
def test_job_ends_whose_last_loss_nobody_reads(tmp_path):
    command = [sys.executable, "-c", LEAVES, tmp_path]
    done = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=240
    )
    said = [line for line in done.stdout.splitlines() if not line.startswith("[Gloo]")]  # as of torch 2.9
    assert (done.returncode, said) == (0, ["[]"]), done.stderr
    assert "ignored" not in done.stderr
