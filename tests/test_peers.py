"""What ranks tell each other: rows, sums that nobody waits for, and what is lost with a rank."""

from __future__ import annotations

import copy
import gc
import math
import os
import pickle
import time
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from counting import Counting
from problems import error, gradient, gradient_of_trunk, join, loss_of, micro_batches_of, run_window, trunk
from ranks import RankError
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from distaccum import Accumulator, DistaccumError
from distaccum.ranks import GroupPeers

ROW = [0.1, -0.0, math.inf, 1e300]


def gathered():
    """In each group of the first ranks: what came, and what was sent."""
    found, rank = [], dist.get_rank()
    for num in range(1, dist.get_world_size() + 1):
        group = dist.new_group(range(num))
        peers = GroupPeers(group) if rank < num else None
        dist.barrier()  # since torch names groups by their number
        if peers is not None:
            with Counting() as counting:
                first, second = peers.post([float(rank), *ROW]), peers.post([float(-rank)])  # before anybody waits
                rows = second(), first(), peers.gather([2.0 * rank])
            found.append((rows, [name for name, _ in counting.take()]))
    return found


def test_rows_come_in_order_by_one_collective_each(ranks):
    for rank, found in enumerate(ranks(3).run(gathered)):
        for num, (rows, sent) in zip(range(rank + 1, 4), found, strict=True):
            every = range(num)
            assert rows == (
                [[float(-one)] for one in every],
                [[one, *ROW] for one in every],
                [[2.0 * one] for one in every],
            )
            assert sent == ["allgather_"] * 3


def summed():
    peers = GroupPeers(dist.group.WORLD)
    values = torch.tensor([1.0 + dist.get_rank(), 10.0], dtype=torch.float64)
    if dist.get_rank():
        time.sleep(0.3)
    began = time.perf_counter()
    sum_ = peers.sum(values)
    seconds = time.perf_counter() - began
    del peers  # somebody keeps the sum, as an update does
    sum_.wait()
    sum_.wait()
    return seconds, values.tolist()


def test_sum_runs_while_nobody_waits_and_outlives_its_peers(ranks):
    for seconds, values in ranks(2).run(summed):
        assert seconds < 0.25  # the other rank came 0.3 seconds later
        assert values == [3.0, 20.0]


def accumulators():
    """File descriptors and groups that twenty Accumulators leave, without a collector of garbage."""
    ddp = DistributedDataParallel(trunk())

    def train():
        accumulator = Accumulator(ddp, SGD(ddp.parameters(), lr=0.1))
        for index in range(2):
            window = accumulator.window(micro_batches_of([[2], [1, 1]], index, dist.get_rank()))
            run_window(window, ddp).step()
        return accumulator

    last = train()
    gc.collect()
    gc.disable()
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(20):
        last = train()
    left = len(list(Path("/proc/self/fd").iterdir())) - before
    gc.enable()
    said = []
    for copied in (copy.deepcopy, pickle.dumps):
        copied((ddp, SGD(ddp.parameters(), lr=0.1)))  # which torch can
        with pytest.raises(DistaccumError) as caught:
            copied((ddp, last))
        said.append(str(caught.value))
    return left, said


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts files in /proc")
def test_accumulators_leave_no_files_and_refuse_to_be_copied(ranks):
    for left, said in ranks(2).run(accumulators):
        assert left == 0
        assert all("cannot be copied or pickled" in one and "load_state_dict" in one for one in said)


def on_another_device():
    """Windows, a closure and a check where tensors that do not say their device have no numbers."""
    rank = dist.get_rank()
    ddp = DistributedDataParallel(trunk())
    accumulator = Accumulator(ddp, SGD(ddp.parameters(), lr=0.0), micro_batch_size=2)
    mine = [micro_batches_of([[2, 3], [4, 1]], 0, one) for one in range(2)]
    batch, exact = join(mine[rank]), gradient_of_trunk([*mine[0], *mine[1]])
    with torch.device("meta"):
        window = run_window(accumulator.window(mine[rank]), ddp)
        wrong = error(gradient(ddp), exact)
        losses = [window.step().loss, accumulator.update(batch, partial(loss_of, ddp)).loss]
        return wrong, losses, accumulator.check(batch, partial(loss_of, ddp)).equivalent


def test_default_device_changes_nothing(ranks):
    for wrong, losses, equivalent in ranks(2).run(on_another_device):
        assert wrong <= 1e-12
        assert losses[0] == pytest.approx(losses[1], rel=1e-12)
        assert equivalent


def lost():
    peers = GroupPeers(dist.group.WORLD)
    if dist.get_rank() == 2:
        os._exit(1)
    time.sleep(0.2)
    peers.gather([1.0])


def test_rank_that_is_gone_is_an_error_of_the_others(ranks):
    with pytest.raises(RankError, match="lost contact with the other ranks"):
        ranks(3).run(lost)
