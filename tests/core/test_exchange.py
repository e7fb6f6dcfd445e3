"""Exchanges of rows between few ranks and many: what they give, and in which order."""

import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from distaccum.law import NOBODY, Plan
from distaccum.ranks import Peers
from tests.support.ranks import on_ranks
from tests.support.windows import accumulating, run_window

flags, numbers = st.booleans(), st.integers(0, 2**31)
totals = st.tuples(st.integers(0, 2**40), st.integers(0, 2**40))
fields = [numbers, flags, numbers, numbers, numbers, st.just(NOBODY), *[flags] * 6, numbers, numbers]
pair = st.tuples(numbers, numbers)
plans = st.builds(Plan, *fields, measured=pair, totals=totals, names=st.just(("a", "b")))


@given(st.lists(st.tuples(plans, flags), min_size=1, max_size=9), st.integers(1, 9))
def test_merged_plans_are_a_plan_however_they_are_grouped(drawn, size):
    given = [plan._replace(num_micro_batches=plan.most, fewest=plan.most) for plan, _ in drawn]
    stranded = [rank for rank, (_, is_stranded) in enumerate(drawn) if is_stranded]
    given = [one._replace(stranded=rank) if rank in stranded else one for rank, one in enumerate(given)]
    rows = [plan.to_row() for plan in given]
    assert [plan.merged([row]) for plan, row in zip(given, rows, strict=True)] == given
    plan = given[0].merged(rows)
    groups = [rows[i : i + size] for i in range(0, len(rows), size)]
    assert given[0].merged([given[0].merged(group).to_row() for group in groups][::-1]) == plan

    counted = [own.num_micro_batches for own in given]
    assert (plan.fewest, plan.most, plan.num_micro_batches) == (min(counted), max(counted), sum(counted))
    assert plan.totals == tuple(map(sum, zip(*(own.totals for own in given), strict=True)))
    assert plan.has_more == any(own.has_more for own in given)
    assert plan.lacks_terms == any(own.lacks_terms for own in given)
    assert plan.stranded == (stranded[0] if stranded else NOBODY)


@pytest.mark.parametrize("world", [2, 12])
@on_ranks()
def test_exchange_gives_rows_largest_values_and_sums_in_order(world):
    rank, peers = dist.get_rank(), Peers(dist.group.WORLD)
    sums = []
    for i in range(5):
        time.sleep(0.02 * (rank * i % 3))
        values = torch.tensor([float(rank), 1.0, i], dtype=torch.float64)
        peers.sum(values)
        sums.append(values)
    assert peers.gather([rank, -rank]) == [[one, -one] for one in range(world)]
    assert peers.largest([rank, -rank, float(rank == 5)]) == [world - 1, 0, world > 5]
    given = [["words"] * (one % 4) for one in range(world)]
    assert peers.gather_objects(given[rank]) == given
    for i, values in enumerate(sums):
        assert values.tolist() == [world * (world - 1) / 2, world, world * i]


@on_ranks(12)
def test_windows_open_no_connection_and_start_no_thread():
    def things() -> tuple[int, int]:
        sockets = sum(path.is_socket() for path in Path("/proc/self/fd").iterdir())
        return sockets, len(list(Path("/proc/self/task").iterdir()))

    model = DistributedDataParallel(nn.Linear(2, 2), process_group=dist.new_group(list(range(12))))
    for _ in range(2):  # DDP lays its buckets out
        model(torch.ones(2, 2)).sum().backward()
    model.zero_grad()
    before = things()
    _, accumulator = accumulating(model, 0.1, steps=2)
    for window in accumulator.windows([torch.ones(2, 2)] * (2 + dist.get_rank() % 4)):
        run_window(window, model).step()
        assert things() == before
