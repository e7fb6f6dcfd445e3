"""The harness itself: a rank that fails, hangs or dies is seen at once, with its traceback."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist
from ranks import RankError


def sum_of_ranks():
    total = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(total)
    return total.item()


def fail_on_rank_1():
    if dist.get_rank() == 1:
        raise KeyError("this is why")
    sum_of_ranks()  # waits for rank 1


def hang_on_rank_1():
    if dist.get_rank() == 1:
        time.sleep(1000)
    return 0


def die_on_rank_1():
    if dist.get_rank() == 1:
        os._exit(3)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (fail_on_rank_1, ["rank 1 Traceback", "this is why", "in fail_on_rank_1"]),
        (hang_on_rank_1, ["rank 1 died", "in hang_on_rank_1"]),
        (die_on_rank_1, ["rank 1 died"]),
    ],
)
def test_what_goes_wrong_on_a_rank_is_an_error_here(ranks, function, words):
    these = ranks(2)
    these.run(sum_of_ranks)  # starting them may take its time
    start = time.monotonic()
    with pytest.raises(RankError) as caught:
        these.run(function, seconds=6)
    assert time.monotonic() - start < 50
    for word in words:
        assert word in str(caught.value)
    assert these.run(sum_of_ranks) == [1.0, 1.0], "started anew"
