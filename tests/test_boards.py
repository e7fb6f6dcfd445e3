"""What ranks of one host leave for each other in memory: who sees it when, and what ends the waiting."""

from __future__ import annotations

import math
import os
import random
import signal
import time
from contextlib import nullcontext
from datetime import timedelta
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from counting import Counting
from problems import error, gradient, gradient_of_trunk, join, loss_of, micro_batches_of, run_window, trunk
from ranks import RankError
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from distaccum import Accumulator, DistaccumError
from distaccum.engines import board
from distaccum.engines.peers import GroupPeers

ROW = [0.1, -0.0, math.inf, 1e300]


def gathered(hosts: str, width: int):
    """On hosts by rank: the rows, and the messages of a gathering after the introduction."""
    peers, rank = introduced(hosts, width), dist.get_rank()
    with Counting() as counting:
        rows = peers.gather([float(rank), *ROW, *[0.5] * (width - 5)])
    return rows, [name for name, _ in counting.take()]


def introduced(hosts: str, width: int = 1):
    rank, num = dist.get_rank(), dist.get_world_size()
    peers = GroupPeers(dist.group.WORLD)
    with patch.object(board, "host_number", lambda: "-abcd".index(hosts[rank]) - 1):
        for turn in range(board.FIRST + 3):
            row = [float(turn + rank)] * width
            assert peers.gather(row) == [[float(turn + one)] * width for one in range(num)]
    return peers


def rows_of(num: int, width: int):
    return [[float(rank), *ROW, *[0.5] * (width - 5)] for rank in range(num)]


@pytest.mark.parametrize("num", [2, 3, 4])
def test_rows_of_a_host_come_without_a_message(ranks, num):
    for rows, sent in ranks(num).run(gathered, "a" * num, 15):
        assert rows == rows_of(num, 15)
        assert sent == []


@pytest.mark.parametrize("hosts", ["aabb", "abab", "abba"])
def test_one_rank_of_each_host_sends(ranks, hosts):
    leaders = [hosts.index("a"), hosts.index("b")]
    for rank, (rows, sent) in enumerate(ranks(4).run(gathered, hosts, 15)):
        assert rows == rows_of(4, 15)
        assert sent == (["recv_", "send"] if rank in leaders else [])


@pytest.mark.parametrize("hosts", ["aaab", "abcd", "aaa-", "----"])
def test_hosts_of_unlike_numbers_send_messages(ranks, hosts):
    for rows, sent in ranks(4).run(gathered, hosts, 15):
        assert rows == rows_of(4, 15)
        assert sent == ["recv_", "send"] * 2


def test_row_that_is_too_long_is_a_message(ranks):
    width = board.WIDTH + 1
    for rows, sent in ranks(2).run(gathered, "aa", width):
        assert rows == rows_of(2, width)
        assert sent == ["allgather_"]


def without_memory(rank: int, name: str):
    """Where one rank cannot make its file, open that of another, or hold a lock."""
    fails = patch.object(board.fcntl if name == "lockf" else os, name, side_effect=OSError("no room"))
    with fails if dist.get_rank() == rank else nullcontext():
        return gathered("aa", 15)


@pytest.mark.parametrize(("rank", "name"), [(0, "memfd_create"), (1, "memfd_create"), (1, "open"), (0, "lockf")])
def test_rank_that_cannot_share_memory_sends_messages(ranks, rank, name):
    for rows, sent in ranks(2).run(without_memory, rank, name):
        assert rows == rows_of(2, 15)
        assert sent == ["allgather_"]


def test_file_that_another_process_has_closed_is_not_opened_in_its_place(tmp_path):
    made = board.MemoryFile.new(8)
    number, identity = made.number, made.identity
    assert board.MemoryFile.of_another(os.getpid(), number, identity).identity == identity
    del made
    again = board.MemoryFile.new(8)
    assert again.number == number
    with pytest.raises(OSError, match="has closed it"):
        board.MemoryFile.of_another(os.getpid(), number, identity)
    del again
    with (tmp_path / "precious").open("w+") as another:
        assert another.fileno() == number
        with pytest.raises(OSError, match="has closed it"):
            board.MemoryFile.of_another(os.getpid(), number, identity)
        with pytest.raises(OSError, match="has closed it"):  # the number of a file that was deleted may come again
            board.MemoryFile.of_another(os.getpid(), number, os.fstat(number).st_ino)


def hurried(hosts: str):
    """Plans and records in turn, of ranks that come late by chance; records are read at once, later, or never."""
    rank, num = dist.get_rank(), dist.get_world_size()
    chance, wrong, kept = random.Random(rank), [], []
    peers = introduced(hosts)
    for turn in range(400):
        if chance.random() < 0.05:
            time.sleep(0.002 * chance.random())
        if peers.gather([float(turn), float(rank)]) != [[float(turn), float(one)] for one in range(num)]:
            wrong.append(turn)
        values = torch.tensor([turn + rank, 1.0], dtype=torch.float64)
        kept.append((turn, values, peers.sum(values)))
        if chance.random() < 0.3:
            kept[-1][2].wait()
    for turn, values, sum_ in kept:
        sum_.wait()
        if values.tolist() != [num * turn + num * (num - 1) / 2, num]:
            wrong.append(("record", turn))
    return wrong


@pytest.mark.parametrize("hosts", ["aa", "aaa", "aabb"])
def test_no_row_is_lost_by_ranks_that_are_late(ranks, hosts):
    assert ranks(len(hosts)).run(hurried, hosts) == [[]] * len(hosts)


def killed():
    peers = introduced("aaaa")
    if dist.get_rank() == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    peers.gather([1.0])


def test_rank_that_was_killed_is_an_error_of_those_that_wait_for_it(ranks):
    with pytest.raises(RankError, match=r"lost contact with the other ranks.*rank 2 has ended"):
        ranks(4).run(killed)


def late(seconds: float):
    group = dist.new_group(timeout=timedelta(seconds=seconds))
    peers = GroupPeers(group)
    for _ in range(board.FIRST + 3):
        peers.gather([1.0])
    if dist.get_rank() == 1:
        time.sleep(2.5)
        return ""
    try:
        peers.gather([1.0])
    except DistaccumError as error:
        return str(error)


def test_waiting_ends_at_the_timeout_of_the_group(ranks):
    said, _ = ranks(2).run(late, 1.0)
    assert "timed out after 1 s of waiting for rank 1" in said


def cut_off():
    rank, rounds = dist.get_rank(), board.gather_in_rounds

    def fails(*args):
        rounds(*args)
        raise RuntimeError("connection reset by peer")

    peers = introduced("aabb")
    with patch.object(board, "gather_in_rounds", fails if rank == 0 else rounds):
        try:
            return peers.gather([float(rank)])
        except DistaccumError as error:
            return str(error)


def test_rank_that_lost_another_host_says_so_to_its_own(ranks):
    first, second, *others = ranks(4).run(cut_off)
    assert "connection reset by peer" in first
    assert "rank 0 lost contact with another" in second
    assert others == [[[0.0], [1.0], [2.0], [3.0]]] * 2


def apart():
    """The first rank has a record more than the second."""
    peers, rank = introduced("aa"), dist.get_rank()
    peers.gather([1.0])
    if rank == 0:
        peers.sum(torch.tensor([1.0]))
    try:
        peers.gather([float(rank)])
    except DistaccumError as error:
        return str(error)


def test_rank_that_left_out_a_step_is_an_error_of_both(ranks):
    first, second = ranks(2).run(apart)
    assert "rank 1 has ended, or its Accumulator has" in first
    assert "rank 0 is ahead of this rank" in second


def dropped():
    peers = introduced("aa")
    values = torch.tensor([1.0 + dist.get_rank()])
    sum_ = peers.sum(values)
    peers.gather([1.0])
    if dist.get_rank():
        del peers, sum_
        return None
    time.sleep(0.5)
    sum_.wait()  # the other one left its number
    return values.item()


def test_number_outlives_the_rank_that_left_it(ranks):
    assert ranks(2).run(dropped) == [3.0, None]


# Windows, before and after their ranks have boards

LAYOUTS = [[[2, 3], [4, 1], [1], [5]], [[3, 2, 1], [], [2], [1, 1]], [[1], [6], [2, 2, 2], []], [[2], [2], [2], [2]]]
UNCOUNTED, NAN = -4, -2  # windows in which the second rank's micro-batch cannot be counted, and is not a number


def windows(hosts: str):
    """For each: how far its gradient and loss are off, or what went wrong; and its collectives."""
    rank, num = dist.get_rank(), dist.get_world_size()
    ddp = DistributedDataParallel(trunk())
    accumulator = Accumulator(ddp, SGD(ddp.parameters(), lr=0.0), on_nonfinite="skip")
    found, sent = [], []
    with patch.object(board, "host_number", lambda: "-abcd".index(hosts[rank]) - 1):
        for index in range(board.FIRST + 8):
            layout = LAYOUTS[index % len(LAYOUTS)][:num]
            mine = micro_batches_of(layout, index, rank)
            every = [batch for one in range(num) for batch in micro_batches_of(layout, index, one)]
            if rank == 1 and index == board.FIRST + 8 + UNCOUNTED:
                mine = [None]
            if rank == 1 and index == board.FIRST + 8 + NAN:
                mine = [{**mine[0], "x": mine[0]["x"] * math.nan}]
            with Counting() as counting:
                try:
                    window = run_window(accumulator.window(mine), ddp)
                except (DistaccumError, ValueError, TypeError) as error_:
                    found.append(str(error_))
                    continue
                wrong = error(gradient(ddp), gradient_of_trunk(every))
                update = window.step()
                if (index + rank) % 3 == 0:  # of the others nobody asks, or later
                    wrong = max(wrong, abs(update.loss - loss_of(trunk(), join(every)).item()))
            found.append(wrong if update.reason is None else update.reason)
            sent.append(counting.take())
    return found, sent


@pytest.mark.parametrize("hosts", ["aa", "aaa", "aabb", "abab", "aaab"])
def test_windows_on_boards_are_exact_and_fail_together(ranks, hosts):
    for rank, (found, sent) in enumerate(ranks(len(hosts)).run(windows, hosts)):
        if rank == 1:
            assert "count" in found[UNCOUNTED]
        else:
            assert "rank 1" in found[UNCOUNTED]
        assert "gradient is not finite" in found[NAN]
        assert max(one for one in found if isinstance(one, float)) <= 1e-12
        assert sum(isinstance(one, float) for one in found) == board.FIRST + 6
        if set(hosts) == {"a"}:
            assert len(sent[0]) >= 3, "a plan, a reduction, a record"
            assert sent[-1] == [("allreduce_", sum(one.numel() for one in trunk().parameters()))]
