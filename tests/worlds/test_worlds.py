"""Callers' worlds: what programs do with groups, processes and tools around an Accumulator.

Each is a program of 2 to 16 ranks that makes its own process groups. It trains on loaders of different lengths, so that
windows are uneven and ranks run dry, and compares each gradient with one big batch.
"""

import atexit
import multiprocessing
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from datetime import timedelta
from importlib import import_module
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from distaccum.law import LostRanksError
from tests.support.problems import gradient_of_trunk, make_batch, trunk
from tests.support.ranks import Ranks
from tests.support.windows import accumulating, error, gradient, run_window

SECONDS = 90
NUM_MICRO_BATCHES = [5, 2, 4, 1, 3, 0]  # of a rank's loader, by its place in the group


class Training:
    """A model over a group, under DDP or another wrapper."""

    def __init__(self, group: Any = None, wrap: Callable[..., Any] = DistributedDataParallel) -> None:
        self.ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        options = {} if group is None else {"process_group": group}
        self.model, self.accumulator = accumulating(wrap(trunk(), **options), steps=2)

    def epoch(self, times: int = 1) -> Iterator[Any]:
        """Yields after each window's loop, before its step."""
        lengths = [times * NUM_MICRO_BATCHES[i % 6] for i in range(len(self.ranks))]
        loaders = [[make_batch(1 + i % 3, seed=100 * r + i) for i in range(num)] for r, num in enumerate(lengths)]
        windows = self.accumulator.windows(loaders[self.ranks.index(dist.get_rank())])
        for i, window in enumerate(windows):
            run_window(window, self.model)
            exact = gradient_of_trunk([batch for loader in loaders for batch in loader[2 * i : 2 * i + 2]])
            wrong = error(gradient(self.model), exact)
            assert wrong <= 1e-12, wrong
            yield window
            window.step()
        assert i + 1 == (max(lengths) + 1) // 2

    def run(self) -> None:
        for _ in self.epoch():
            pass


def die_soon() -> None:
    """As a process that is killed, once its rank has answered."""
    threading.Timer(0.3, os._exit, [1]).start()


class Job:
    """A rank's process, which may join several process groups in turn."""

    def __init__(self, rank: int, num: int, folder: Path) -> None:
        self.rank, self.num, self.folder = rank, num, folder

    def join(self, generation: int = 0, backend: str = "gloo", seconds: float = SECONDS / 3, **place: int) -> None:
        """`place`: another rank, or another number of ranks."""
        place = {"rank": self.rank, "world_size": self.num, **place}
        store = f"file://{self.folder}/{generation}"
        dist.init_process_group(backend, init_method=store, timeout=timedelta(seconds=seconds), **place)


def plain(job: Job) -> None:
    job.join()
    Training().run()


def groups_of_the_caller(job: Job) -> None:
    """Of rank 0 alone, between windows, and without rank 0; some are destroyed, and others take their place."""
    job.join()
    dist.new_group([0])  # for a rank that alone writes checkpoints
    ended = [dist.new_group(), dist.new_group()]
    first = Training()
    for i, _ in enumerate(first.epoch()):
        dist.new_group([i % job.num])
        dist.barrier(dist.new_group())
    for group in ended:
        dist.destroy_process_group(group)
    Training(dist.new_group()).run()
    if job.rank:
        dist.new_group([*range(1, job.num)], use_local_synchronization=True)  # rank 0 knows none of it
    first.run()
    Training().run()


def gan(job: Job) -> None:
    """The generator is on all ranks, the discriminator on two, whose Accumulator is made first."""
    job.join()
    group = dist.new_group([0, 1])
    models = [Training(group)] if job.rank < 2 else []
    models.append(Training())
    for _ in zip_longest(*(model.epoch() for model in models)):
        pass


def teachers(job: Job) -> None:
    """Two teachers on two ranks of a mesh each, and a student on all."""
    job.join()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    student = Training()
    Training(mesh["columns"].get_group()).run()
    student.run()


def lost_rank(job: Job) -> None:
    """Rank 1 dies between a loop and its step; all others hear of it in that step."""
    job.join(seconds=8)
    windows = Training().epoch()
    next(windows)
    next(windows)
    if job.rank == 1:
        die_soon()
        return
    with pytest.raises(LostRanksError, match=f"rank {job.rank} lost contact"):
        next(windows)


def survivor_meets_a_new_rank(job: Job) -> None:
    """Rank 1 of the first job dies; rank 0 lives on, and the third process takes that place."""
    if job.rank < 2:
        job.join(0, world_size=2)
        Training().run()
        if job.rank:
            die_soon()
            return
        with suppress(RuntimeError):
            dist.all_reduce(torch.ones(1))
        dist.destroy_process_group()
    job.join(1, rank=job.rank // 2, world_size=2)
    Training().run()


def children_that_exit(job: Job) -> None:
    job.join()
    for window in Training().epoch():
        if job.rank and window.index == 2:
            time.sleep(1)  # so that rank 0 forks before this rank's last message is there
    if job.rank == 0:
        if not (child := os.fork()):
            atexit._run_exitfuncs()  # as sys.exit() does
            os._exit(0)
        until = time.monotonic() + 5
        while not (ended := os.waitpid(child, os.WNOHANG)[0]) and time.monotonic() < until:
            time.sleep(0.05)
        assert ended
        spawned = multiprocessing.get_context("spawn").Process(target=sys.exit, args=(3,))
        spawned.start()
        spawned.join(SECONDS // 2)
        assert spawned.exitcode == 3


def three_profilers(job: Job) -> None:
    job.join()
    windows = Training().epoch(times=6)
    for _ in range(3):
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            assert len(list(islice(windows, 5))) == 5
        assert profiler.events()


def debugged(job: Job) -> None:
    """Without DDP, whose constructor ends in a segfault then, on gloo and on each version."""
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    dist.set_debug_level_from_env()
    job.join()
    Training(wrap=fully_shard).run()


def backends_by_device(job: Job) -> None:
    """As NCCL beside gloo: what went to the other backend would not be summed."""
    import_module("torch.testing._internal.distributed.fake_pg")  # which registers "fake"
    job.join(backend="cpu:gloo,cuda:fake")
    Training().run()
    Training(dist.new_group()).run()


WORLDS: list[tuple[int, Callable[[Job], None]]] = [
    *((num, plain) for num in (9, 12, 16)),
    (3, groups_of_the_caller),
    (3, gan),
    (4, teachers),
    (9, lost_rank),
    (3, survivor_meets_a_new_rank),
    (2, children_that_exit),
    (2, three_profilers),
    (3, debugged),
    (3, backends_by_device),
]


def live(world: Callable[[Job], None], num: int, folder: Path) -> None:
    """Runs on a rank that is in no process group but those of the world."""
    rank = dist.get_rank()
    dist.destroy_process_group()
    warnings.simplefilter("default")
    world(Job(rank, num, folder))


@pytest.mark.parametrize(("num", "world"), WORLDS, ids=lambda part: getattr(part, "__name__", str(part)))
def test_world_trains_exactly(num, world, tmp_path):
    with closing(Ranks(num)) as ranks:  # of its own: some die, or keep groups
        ranks.run(live, world, num, tmp_path, seconds=SECONDS)


def restarted() -> str:
    """A worker of torchrun: all of its first start die, rank 0 without an error."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=SECONDS / 3))
    training = Training()
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        next(training.epoch())
        os._exit(dist.get_rank())
    training.run()
    return "exact"


def as_torchrun() -> None:
    """Does what torchrun does, with workers that are forked instead of importing torch anew."""
    place = {"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0"}
    print(elastic_launch(LaunchConfig(1, 1, 2, max_restarts=1, start_method="fork", **place), restarted)())


def test_job_that_torchrun_restarts_trains_exactly(programs):
    # torch keeps the addresses of dead processes in its store, also for a loop by hand.
    alone = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    done = programs.run("-c", "from tests.worlds import test_worlds; test_worlds.as_torchrun()", status=0, **alone)
    assert "{0: 'exact', 1: 'exact'}" in done.text, done.text
