"""Other forms of DDP: compiled, on a sub-group, on one rank, several at once; and the windows that each refuses."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from distaccum import Accumulator
from distaccum.ranks import own_group
from tests.support.counting import Counting
from tests.support.oracle import everything, gradients_off, own
from tests.support.problems import (
    error,
    gradient,
    loss_of,
    make_batch,
    micro_batches_of,
    refused,
    run_window,
    trunk,
)
from tests.support.ranks import on_ranks

LAYOUT = [[2, 3], [1, 4, 2]]


def make(ddp: Any = None, **options: Any) -> Any:
    ddp = ddp if ddp is not None else DistributedDataParallel(trunk(), **options)
    return ddp, Accumulator(ddp, SGD([p for p in ddp.parameters() if p.requires_grad], lr=0.0), batchnorm="ignore")


@pytest.mark.slow
@pytest.mark.parametrize("how", ["inside", "around"])
@on_ranks(2, seconds=50)
def test_compiled_models_are_exact_and_reduce_once(how):
    if how == "inside":
        model, accumulator = make(DistributedDataParallel(torch.compile(trunk(), backend="aot_eager")))
    else:
        model, accumulator = make(torch.compile(DistributedDataParallel(trunk()), backend="aot_eager"))
    wrongs = gradients_off(model, accumulator, [LAYOUT] * 3, trunk)
    group = dist.group.WORLD._get_backend(torch.device("cpu"))
    before = group._get_sequence_number_for_group()  # an active dispatch mode would disable the compiler
    run_window(accumulator.window(own([[1] * 5] * 2)), model)
    collectives = group._get_sequence_number_for_group() - before
    assert max(wrongs) <= 1e-12
    assert collectives == 1, "one reduction for five micro-steps; the plan has a group of its own"


@on_ranks(3)
def test_sub_group_divides_by_its_own_size():
    rank, group = dist.get_rank(), dist.new_group([0, 2])
    if rank == 1:
        return
    ddp, accumulator = make(process_group=group)
    for index, layout in enumerate([LAYOUT, [[], [2, 1]]]):
        window = run_window(accumulator.window(micro_batches_of(layout, index, rank // 2)), ddp)
        plain = trunk()
        loss_of(plain, everything(layout, index)).backward()
        assert error(gradient(ddp), gradient(plain)) <= 1e-12
        window.step()


@on_ranks(3)
def test_plan_of_a_sub_group_goes_through_the_host():
    """Where the collectives of the group run only on a device, as NCCL's do."""
    group = dist.new_group([0, 2], backend="cuda:gloo")
    if dist.get_rank() == 1:
        return
    made = own_group(group)
    assert made is not group and own_group(group) is made
    mine = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(mine, group=made)
    assert (mine.item(), dist.get_process_group_ranks(made)) == (2.0, [0, 2])


@pytest.mark.parametrize("option", ["", "find_unused_parameters", "static_graph", "gradient_as_bucket_view"])
@on_ranks(2)
def test_parts_reduce_once_and_a_model_absent_from_the_last_part_too(option):
    """Two models, one per part: the first takes no part in the backward that reduces. Then parts of one model."""
    options = {option: True} if option else {}
    models = [DistributedDataParallel(trunk(), **options) for _ in range(2)]
    both = Accumulator(models, [SGD(model.parameters(), lr=0.0) for model in models])
    one, alone = make()
    wrongs, reductions = [], []
    for index in range(3):
        plain = trunk()
        loss_of(plain, everything(LAYOUT, index)).backward()
        window = both.window(own(LAYOUT, index))
        for batch in window:
            for model in window.parts(models):
                window.backward(loss_of(model, batch))
        wrongs += [error(gradient(model), gradient(plain)) for model in models]
        window.step()
        window = alone.window(own(LAYOUT, index))
        with Counting() as count:
            for batch in window:
                for share in window.parts([0.25, 0.75]):
                    window.backward(share * loss_of(one, batch))
        reductions.append(sum(name == "allreduce_" for name, _ in count.collectives))
        wrongs.append(error(gradient(one), gradient(plain)))
        window.step()
    assert max(wrongs) <= 1e-12
    assert reductions == [1, 1, 1]


@on_ranks(2)
def test_frozen_model_beside_a_trained_one_stays_unchanged():
    one, two = (DistributedDataParallel(trunk(), find_unused_parameters=True) for _ in range(2))
    accumulator = Accumulator([one, two], SGD([*one.parameters(), *two.parameters()], lr=0.0))
    two.requires_grad_(False)
    assert max(gradients_off(one, accumulator, [LAYOUT] * 2, trunk)) <= 1e-12


@on_ranks(2)
def test_bucket_views_are_cleared_in_place():
    rank = dist.get_rank()
    ddp = DistributedDataParallel(trunk(), gradient_as_bucket_view=True)
    accumulator = Accumulator(ddp, SGD(ddp.parameters(), lr=0.0), steps=2)
    places = []
    for window in accumulator.windows([make_batch(2, seed=i) for i in range(8)]):
        run_window(window, ddp).step()
        places.append([parameter.grad.data_ptr() for parameter in ddp.parameters()])
        assert gradient(ddp).count_nonzero() == 0
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for left in (0.0, 1.0):
            ddp.module[1].bias.grad.fill_(left)
            run_window(Accumulator(ddp, SGD(ddp.parameters(), lr=0.0)).window([make_batch(2, seed=9)]), ddp).step()
    seen = [str(one.message) for one in seen]
    assert [message[:20] for message in seen] == ["gradients that stood"][rank:], "and zeros are nobody's"
    assert places[1] == places[2] == places[3], "from the second window on, when DDP has rebuilt its buckets"


IMPOSSIBLE = {
    "SyncBatchNorm": "ranks have [1, 2] micro-batches, and SyncBatchNorm communicates in each forward",
    "static_graph": "ranks have [1, 0] micro-batches, and DDP with static_graph=True must see a backward",
    "second group": "expected one data-parallel group",
}


@on_ranks(2)
def test_impossible_models_and_windows_are_refused_on_all_ranks():
    ddp = DistributedDataParallel(trunk())
    ddp.module.append(nn.SyncBatchNorm(4))  # DDP wraps it only on GPUs; planning needs no forward
    ddp.module[-1].requires_grad_(False)
    own_group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    groups = [DistributedDataParallel(nn.Linear(2, 2), process_group=group) for group in (None, own_group)]
    seen = {
        "SyncBatchNorm": refused(make(ddp)[1].window, own([[1], [1, 1]])),
        "static_graph": refused(make(static_graph=True)[1].window, own([[1], []])),
        "second group": refused(make, nn.Sequential(*groups)),
    }
    assert {what: said for what, said in seen.items() if IMPOSSIBLE[what] not in said} == {}
