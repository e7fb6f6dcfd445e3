"""The harness itself: a failure on a rank shows at once, with its reason first."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import RankError


def sum_of_ranks():
    total = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(total)
    return total.item()


def fail_on_rank_1():
    if dist.get_rank() == 1:
        raise KeyError("this is why")
    sum_of_ranks()  # rank 0 waits here


def hang_on_rank_1():
    if dist.get_rank() == 1:
        time.sleep(1000)
    return 0


def die_on_rank_1():
    if dist.get_rank() == 1:
        os._exit(3)


FAILURES = [
    (fail_on_rank_1, ["rank 1 Traceback", "in fail_on_rank_1", "KeyError: 'this is why'", "rank 0 "]),
    (hang_on_rank_1, ["rank 1 hangs", "in hang_on_rank_1"]),
    (die_on_rank_1, ["rank 1 died"]),
]


@pytest.mark.parametrize(("function", "words"), FAILURES)
def test_failure_of_a_rank_is_an_error_that_shows_it_first(ranks, function, words):
    these = ranks(2)
    these.run(sum_of_ranks)  # start-up does not count
    start = time.monotonic()
    with pytest.raises(RankError) as caught:
        these.run(function, seconds=4 if function is hang_on_rank_1 else 12)
    assert time.monotonic() - start < 50
    message = str(caught.value)
    assert len(message.splitlines()) <= (8 if function is fail_on_rank_1 else 60), message
    places = [message.find(word) for word in words]
    assert -1 not in places and places == sorted(places) and places[0] == 0, message
    assert these.run(sum_of_ranks) == [1.0, 1.0], "started anew"
