"""What ranks tell each other: rows, in a round for each bit of their number; sums that nobody waits for."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist
from counting import Counting
from ranks import RankError

from distaccum.engines.peers import GroupPeers
from distaccum.engines.private.process_group import is_shared
from distaccum.engines.rounds import gather_in_rounds


def gathered():
    """In each group of the first ranks: what came, and how many messages were sent."""
    found = []
    for num in range(1, dist.get_world_size() + 1):
        group = dist.new_group(range(num))
        if dist.get_rank() < num:
            with Counting() as counting:
                rows = gather_in_rounds([float(dist.get_rank()), 0.5], group)
            found.append((rows.tolist(), [name for name, _ in counting.take()]))
    return found


def test_rows_come_in_order_after_a_round_for_each_bit(ranks):
    for rank, found in enumerate(ranks(7).run(gathered)):
        for num, (rows, sent) in zip(range(rank + 1, 8), found, strict=True):
            assert rows == [[float(one), 0.5] for one in range(num)]
            assert sent == ["recv_", "send"] * (num - 1).bit_length()


def summed():
    peers = GroupPeers(dist.group.WORLD)
    values = torch.tensor([1.0 + dist.get_rank(), 10.0], dtype=torch.float64)
    if dist.get_rank():
        time.sleep(0.3)
    began = time.perf_counter()
    sum_ = peers.sum(values)
    seconds = time.perf_counter() - began
    before = values.tolist()
    sum_.wait()
    sum_.wait()
    return seconds, before, values.tolist()


def test_sum_of_the_host_runs_while_nobody_waits(ranks):
    for rank, (seconds, before, after) in enumerate(ranks(2).run(summed)):
        assert seconds < 0.25  # the other rank came 0.3 seconds later
        assert before == [1.0 + rank, 10.0]
        assert after == [3.0, 20.0]


def kept():
    peers = GroupPeers(dist.group.WORLD)
    sum_ = peers.sum(values := torch.tensor([1.0 + dist.get_rank()], dtype=torch.float64))
    del peers
    others = is_shared(sum_.sent)
    sum_.wait()
    return others, values.item()


def test_sum_that_somebody_keeps_does_not_hold_up_the_end(ranks):
    """The end of its peers waits, for a second at most, until nobody else has what was sent."""
    assert ranks(2).run(kept) == [(False, 3.0)] * 2


def lost():
    peers = GroupPeers(dist.group.WORLD)
    if dist.get_rank() == 2:
        os._exit(1)
    time.sleep(0.2)
    peers.gather([1.0])


def test_rank_that_is_gone_is_an_error_of_the_others(ranks):
    with pytest.raises(RankError, match="lost contact with the other ranks"):
        ranks(4).run(lost)
