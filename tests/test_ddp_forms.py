"""Other forms of DDP: compiled, on a sub-group, on one rank, several at once; and the windows that each refuses."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from counting import Counting
from problems import (
    error,
    gradient,
    gradient_of_trunk,
    loss_of,
    make_batch,
    make_net,
    micro_batches_of,
    run_window,
    trunk,
)
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from distaccum import Accumulator, DistaccumError
from distaccum.ranks import host_group

LAYOUT = [[2, 3], [1, 4, 2]]


def everything(layout, index):
    return [batch for rank in range(len(layout)) for batch in micro_batches_of(layout, index, rank)]


def compiled(how):
    module = trunk()
    if how == "inside":
        model = DistributedDataParallel(torch.compile(module, backend="aot_eager"))
    else:
        model = torch.compile(DistributedDataParallel(module), backend="aot_eager")
    accumulator = Accumulator(model, SGD(model.parameters(), lr=0.0))
    wrongs = []
    for index in range(3):
        window = run_window(accumulator.window(micro_batches_of(LAYOUT, index, dist.get_rank())), model)
        wrongs.append(error(gradient(model), gradient_of_trunk(everything(LAYOUT, index))))
        window.step()
    group = dist.group.WORLD._get_backend(torch.device("cpu"))
    before = group._get_sequence_number_for_group()  # an active dispatch mode would disable the compiler
    window = run_window(accumulator.window(micro_batches_of([[1] * 5] * 2, 0, dist.get_rank())), model)
    return wrongs, group._get_sequence_number_for_group() - before


@pytest.mark.slow
@pytest.mark.parametrize("how", ["inside", "around"])
def test_compiled_models_are_exact_and_reduce_once(ranks, how):
    for wrongs, collectives in ranks(2).run(compiled, how, seconds=50):
        assert max(wrongs) <= 1e-12
        assert collectives == 1, "one reduction for five micro-steps; the plan has a group of its own"


def of_a_sub_group():
    rank = dist.get_rank()
    group = dist.new_group([0, 2])
    if rank == 1:
        return None  # this rank is not in the sub-group
    ddp = DistributedDataParallel(trunk(), process_group=group)
    accumulator = Accumulator(ddp, SGD(ddp.parameters(), lr=0.0))
    mine = {0: 0, 2: 1}[rank]
    wrongs = []
    for index, layout in enumerate([LAYOUT, [[], [2, 1]]]):
        window = run_window(accumulator.window(micro_batches_of(layout, index, mine)), ddp)
        wrongs.append(error(gradient(ddp), gradient_of_trunk(everything(layout, index))))
        window.step()
    return wrongs


def test_sub_group_divides_by_its_own_size(ranks):
    zero, one, two = ranks(3).run(of_a_sub_group)
    assert one is None
    assert max(zero + two) <= 1e-12


def plan_group_of_a_sub_group():
    """A group whose collectives run only on a device, as NCCL's do."""
    group = dist.new_group([0, 2], backend="cuda:gloo")
    if dist.get_rank() == 1:
        return None
    made = host_group(group)
    assert made is not group
    mine = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(mine, group=made)
    assert host_group(group) is made
    return mine.item(), dist.get_process_group_ranks(made)


def test_plan_of_a_sub_group_goes_through_the_host(ranks):
    assert ranks(3).run(plan_group_of_a_sub_group) == [(2.0, [0, 2]), None, (2.0, [0, 2])]


def of_one_rank():
    group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    ddp = DistributedDataParallel(trunk(), process_group=group)
    accumulator = Accumulator(ddp, SGD(ddp.parameters(), lr=0.0))
    batches = micro_batches_of(LAYOUT, 0, 1)
    run_window(accumulator.window(batches), ddp)
    return error(gradient(ddp), gradient_of_trunk(batches))


def test_ddp_of_one_rank_is_exact(ranks):
    assert max(ranks(2).run(of_one_rank)) <= 1e-12


SCRIPT = """
import torch
from torch import nn
from distaccum import Accumulator
torch.manual_seed(0)
torch.distributed.init_process_group("gloo")
model = nn.parallel.DistributedDataParallel(nn.Linear(3, 1))
accumulator = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), steps=2)
for window in accumulator.windows(torch.randn(5, 4, 3)):
    for inputs in window:
        window.backward(model(inputs).square().mean())
    update = window.step()
print(update.index, update.counts)
torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_one_process_that_torchrun_started_trains_as_several_do(programs, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    (alone,) = programs.start_ranks(1, str(script))
    done = alone.wait()
    assert done.status == 0, done.text
    assert "2 {'samples': 4}" in done.text.split("\n")  # torch 2.9 prints of gloo's ranks too


def models_in_parts(options):
    """Two models, one per part: the first takes no part in the backward that reduces."""
    rank = dist.get_rank()
    one, two = DistributedDataParallel(trunk(), **options), DistributedDataParallel(trunk(), **options)
    optimizers = [SGD(one.parameters(), lr=0.0), SGD(two.parameters(), lr=0.0)]
    accumulator = Accumulator([one, two], optimizers)
    wrongs = []
    for index in range(3):
        window = accumulator.window(micro_batches_of(LAYOUT, index, rank))
        for batch in window:
            for model in window.parts([one, two]):
                window.backward(loss_of(model, batch))
        exact = gradient_of_trunk(everything(LAYOUT, index))
        wrongs += [error(gradient(one), exact), error(gradient(two), exact)]
        window.step()
    return wrongs


@pytest.mark.parametrize("option", ["find_unused_parameters", "static_graph", "gradient_as_bucket_view"])
def test_model_absent_from_the_last_part_is_reduced(ranks, option):
    for options in ({}, {option: True}):
        for wrongs in ranks(2).run(models_in_parts, options):
            assert max(wrongs) <= 1e-12


def a_model_all_frozen():
    one, two = (DistributedDataParallel(trunk(), find_unused_parameters=True) for _ in range(2))
    accumulator = Accumulator([one, two], SGD([*one.parameters(), *two.parameters()], lr=0.0))
    two.requires_grad_(False)
    wrongs = []
    for index in range(2):
        window = run_window(accumulator.window(micro_batches_of(LAYOUT, index, dist.get_rank())), one)
        wrongs.append(error(gradient(one), gradient_of_trunk(everything(LAYOUT, index))))
        window.step()
    return wrongs


def test_frozen_model_beside_a_trained_one_stays_unchanged(ranks):
    for wrongs in ranks(2).run(a_model_all_frozen):
        assert max(wrongs) <= 1e-12


def parts_of_a_batch():
    rank = dist.get_rank()
    ddp = DistributedDataParallel(trunk())
    accumulator = Accumulator(ddp, SGD(ddp.parameters(), lr=0.0))
    wrongs, reductions = [], []
    for index in range(3):
        window = accumulator.window(micro_batches_of(LAYOUT, index, rank))
        with Counting() as count:
            for batch in window:
                for share in window.parts([0.25, 0.75]):
                    window.backward(share * loss_of(ddp, batch))
        reductions.append(sum(name == "allreduce_" for name, _ in count.collectives))
        wrongs.append(error(gradient(ddp), gradient_of_trunk(everything(LAYOUT, index))))
        window.step()
    return wrongs, reductions


def test_parts_reduce_once(ranks):
    for wrongs, reductions in ranks(2).run(parts_of_a_batch):
        assert max(wrongs) <= 1e-12
        assert reductions == [1, 1, 1]


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(10, 4, sparse=True).double()
        self.head = nn.Linear(4, 1).double()

    def forward(self, ids):
        return self.head(self.rows(ids))


def sparse_gradients():
    torch.manual_seed(4)
    rank = dist.get_rank()
    ddp = DistributedDataParallel(Table())
    accumulator = Accumulator(ddp, SGD(ddp.parameters(), lr=0.0))
    wrongs = []
    layouts = [
        [[[1, 2], [3]], [[2, 2, 9]]],
        [[[1, 2], [3]], []],  # rank 1 is dry
        [[[5]], [[1], [2], [3]]],
    ]
    for layout in layouts:
        window = accumulator.window([torch.tensor(ids) for ids in layout[rank]])
        for ids in window:
            window.backward(ddp(ids).square().mean())
        plain = copy.deepcopy(ddp.module)
        plain.zero_grad()
        plain(torch.tensor([i for ids in layout for more in ids for i in more])).square().mean().backward()
        seen = torch.cat([p.grad.to_dense().flatten() for p in ddp.parameters()])
        exact = torch.cat([p.grad.to_dense().flatten() for p in plain.parameters()])
        wrongs.append(error(seen, exact))
        window.step()
    return wrongs


def test_sparse_gradients_of_an_embedding_are_exact(ranks):
    for wrongs in ranks(2).run(sparse_gradients):
        assert max(wrongs) <= 1e-12


def bucket_views():
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
    return places, [str(one.message) for one in seen]


def test_bucket_views_are_cleared_in_place(ranks):
    for rank, (places, seen) in enumerate(ranks(2).run(bucket_views)):
        assert [message[:20] for message in seen] == ["gradients that stood"][rank:], "and zeros are nobody's"
        assert places[1] == places[2] == places[3], "from the second window on, when DDP has rebuilt its buckets"


def refusal(what):
    if what == "SyncBatchNorm":
        ddp = DistributedDataParallel(trunk())
        ddp.module.append(nn.SyncBatchNorm(4))  # DDP wraps it only on GPUs; planning needs no forward
        ddp.module[-1].requires_grad_(False)
        accumulator = Accumulator(
            ddp, SGD([p for p in ddp.parameters() if p.requires_grad], lr=0.1), batchnorm="ignore"
        )
        sizes = [[1], [1, 1]]
    else:
        ddp = DistributedDataParallel(trunk(), static_graph=True)
        accumulator = Accumulator(ddp, SGD(ddp.parameters(), lr=0.1))
        sizes = [[1], []]
    try:
        accumulator.window(micro_batches_of(sizes, 0, dist.get_rank()))
    except DistaccumError as caught:
        return str(caught)
    return None


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("SyncBatchNorm", "ranks have [1, 2] micro-batches, and SyncBatchNorm communicates in each forward"),
        ("static_graph", "ranks have [1, 0] micro-batches, and DDP with static_graph=True must see a backward"),
    ],
)
def test_impossible_windows_are_refused_at_planning_on_all_ranks(ranks, what, message):
    for seen in ranks(2).run(refusal, what):
        assert seen.startswith(message)


def two_groups():
    mine = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    model = nn.Sequential(
        DistributedDataParallel(nn.Linear(2, 2)), DistributedDataParallel(nn.Linear(2, 2), process_group=mine)
    )
    try:
        Accumulator(model, SGD(model.parameters(), lr=0.1))
    except ValueError as caught:
        return str(caught)
    return None


def test_second_data_parallel_group_is_refused(ranks):
    for seen in ranks(2).run(two_groups):
        assert "expected one data-parallel group" in seen


def named_parameters_of_the_loss():
    rank = dist.get_rank()
    ddp, temperature = DistributedDataParallel(trunk()), nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
    accumulator = Accumulator(ddp, SGD([*ddp.parameters(), temperature], lr=0.0))
    window = accumulator.window(micro_batches_of(LAYOUT, 0, rank))
    for batch in window:
        window.backward(temperature * loss_of(ddp, batch))
    plain = trunk()
    exact = loss_of(plain, {"x": torch.cat([batch["x"] for batch in everything(LAYOUT, 0)])}).item()
    return abs(temperature.grad.item() - exact) / exact


def test_parameter_used_by_the_loss_alone_is_reduced(ranks):
    assert max(ranks(2).run(named_parameters_of_the_loss)) <= 1e-12


def warnings_of_batchnorm():
    import warnings

    net = nn.Sequential(nn.BatchNorm1d(6).double(), make_net().body)
    ddp = DistributedDataParallel(net)
    accumulator = Accumulator(ddp, SGD(ddp.parameters(), lr=0.1))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for index in range(2):
            run_window(accumulator.window(micro_batches_of(LAYOUT, index, dist.get_rank())), ddp).step()
    return [str(warning.message) for warning in seen]


def test_batchnorm_is_named_once_on_rank_0(ranks):
    zero, one = ranks(2).run(warnings_of_batchnorm)
    assert len(zero) == 1
    assert "module.0 normalise each micro-batch by its own statistics" in zero[0]
    assert one == []
