"""What must be equal on all ranks: a difference is an error on all of them, before a weight changes."""

from contextlib import closing
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import ConstantLR, ReduceLROnPlateau, StepLR

from distaccum import Accumulator, Extension, count_samples, count_tokens
from distaccum.norms import local
from tests.support.engines import KINDS, with_sgd, wrappers
from tests.support.problems import make_net_without_router, micro_batches_of, trunk
from tests.support.ranks import Ranks, on_ranks
from tests.support.windows import refused, run_window, says, weights


class Quiet(Extension):
    pass


# What an error names, and the options of each rank
OPTIONS = {
    "steps (rank 0: 2; rank 1: 3)": {"steps": (2, 3)},
    "steps (rank 0: 2; rank 1: function)": {"steps": (2, lambda index: 2)},
    "max_norm (rank 0: 1.0; rank 1: None)": {"max_norm": (1, None)},
    "sync (rank 0: last; rank 1: every)": {"sync": ("last", "every")},
    "on_nonfinite (rank 0: skip; rank 1: raise)": {"on_nonfinite": ("skip", "raise")},
    "reduction (rank 0: {'samples': 'mean'}; rank 1: {'samples': 'sum'})": {"reduction": ("mean", "sum")},
    "reduction (rank 0: {'a': 'mean'}; rank 1: {'a': 'mean', 'b': 'mean'})": {
        "count": [dict.fromkeys(names, count_samples) for names in ("a", "ab")]
    },
    "count (rank 0: {'n': 'function'}; rank 1: {'n': 'TokenCount'})": {
        "count": [{"n": count} for count in (count_samples, count_tokens("x"))]
    },
    "scaler (rank 0: None; rank 1: GradScaler)": {"scaler": (None, torch.amp.GradScaler("cpu"))},
    "extensions (rank 0: []; rank 1: ['Quiet'])": {"extensions": ([], [Quiet()])},
    "scheduler (rank 0: ['ConstantLR']; rank 1: ['StepLR'])": {"scheduler": (ConstantLR, StepLR)},
}
OPTIMIZERS = {
    "momentum in group 0 of SGD (rank 0: 0.0; rank 1: 0.1)": lambda p, rank: SGD(p, lr=0.1, momentum=0.1 * rank),
    "optimizer (rank 0: ['SGD']; rank 1: ['Adam'])": lambda p, rank: (SGD, Adam)[rank](p, lr=0.1),
    "the number of parameters in group 0 of SGD (rank 0: 6; rank 1: 5)": lambda p, rank: SGD(p[rank:], lr=0.1),
}


@on_ranks(2)
def test_settings_that_differ_between_ranks_are_named_on_all_of_them():
    rank = dist.get_rank()
    for said in (*OPTIONS, *OPTIMIZERS):
        model = DistributedDataParallel(trunk())
        options = {name: values[rank] for name, values in OPTIONS.get(said, {}).items()}
        optimizer = OPTIMIZERS.get(said, lambda p, _: SGD(p, lr=0.1))([*model.parameters()], rank)
        if "scheduler" in options:
            options["scheduler"] = options["scheduler"](optimizer, 1)
        before = weights(model)
        accumulator = Accumulator(model, optimizer, **options)
        batches = micro_batches_of([[2, 3]] * 2, 0, rank)
        seen = refused(accumulator.window, batches)
        assert seen.startswith(f"DistaccumError: ranks disagree on {said}, expected the same everywhere"), seen
        assert torch.equal(weights(model), before)
        assert refused(accumulator.window, batches) == seen, "as long as they differ"


def beside(model, lr):
    return with_sgd(nn.ModuleList([model, nn.Linear(4, 4)]), lr)


# By name: how a model is wrapped, and whether rank 3 has copies of what other ranks have
WRAPPED = {
    "DDP": (KINDS["DDP"].wrap, True),
    "FSDP2": (KINDS["FSDP2"].wrap, False),
    "FSDP2 on a hybrid mesh": (KINDS["HSDP, 2 replicas of 2 shards"].wrap, True),
    "beside FSDP2": (lambda net, lr: beside(fully_shard(net), lr), True),
    "beside DDP": (lambda net, lr: beside(DistributedDataParallel(net), lr), True),
    "ignored by FSDP2": (lambda net, lr: with_sgd(fully_shard(net, ignored_params={net.head.bias}), lr), True),
    "ignored by FSDP1": (lambda net, lr: with_sgd(wrappers.fsdp1(net, ignored_modules=[net.head]), lr), True),
    "FSDP1": (KINDS["FSDP1"].wrap, False),
    "FSDP1 on a hybrid mesh": (KINDS["FSDP1, HYBRID_SHARD"].wrap, True),
}


def waiting(how, comes_late):
    """What this rank says: rank 1 alone does not make an Accumulator, fails to, or makes no window."""
    group = dist.new_group(timeout=timedelta(seconds=3))
    model = DistributedDataParallel(trunk(), process_group=group)
    optimizer = SGD(model.parameters(), lr=0.1)
    if comes_late:  # another Accumulator is there already
        Accumulator(model, optimizer)
    options = {"steps": 0} if how == "fails" else {"scheduler": ReduceLROnPlateau(optimizer)} if how == "late" else {}
    said = ""
    if dist.get_rank() == 0:
        said = refused(lambda: Accumulator(model, optimizer).window([]))
    elif how != "not made":
        said = refused(Accumulator, model, optimizer, **options)
    dist.barrier()
    return said


ABSENT = [
    ("not made", ", which did not come to it", False),
    ("fails", " (ValueError: steps=0, expected a whole number", True),
    ("late", " (TypeError: ReduceLROnPlateau needs a metric, ", False),
    ("no window", ", which did not come to it", True),
]


@pytest.mark.parametrize(("how", "where", "comes_late"), ABSENT)
def test_rank_that_does_not_come_is_named_with_the_error_that_kept_it(how, where, comes_late):
    with closing(Ranks(2)) as ranks:  # of its own, since the group cannot be used any more
        said, _ = ranks.run(waiting, how, comes_late)
    begins = "LostRanksError: rank 0 lost contact with the other ranks: it waited in its first window for rank 1"
    assert said.startswith(begins + where)


@on_ranks(4)
def test_copies_of_weights_that_differ_are_refused_and_parts_are_not():
    for name, (wrap, is_copied) in WRAPPED.items():
        for change in (0.0, 1e-9, 1.0):
            model, optimizer = wrap(make_net_without_router(), 0.1)
            parameter = list(model.parameters())[-1]
            with torch.no_grad():
                local(parameter).mul_(1 + change * (dist.get_rank() == 3))
            accumulator = Accumulator(model, optimizer)
            said = refused(accumulator.window, micro_batches_of([[1]] * 4, 0, dist.get_rank()))
            assert (said != "nothing") == (is_copied and change == 1.0), (name, change, said)
            assert said == "nothing" or says("... differs between the data-parallel ranks (rank ...[Shard(0)])", said)


@on_ranks(2)
def test_parameters_that_are_frozen_on_one_rank_alone_are_named():
    """On all ranks they may be, also where only one has drawn ahead; and a loss's own where it is not used."""
    rank, scale = dist.get_rank(), nn.Parameter(torch.ones(()))
    model = fully_shard(trunk())
    optimizer = SGD([*model.parameters(), scale], lr=0.1)
    accumulator = Accumulator(model, optimizer, steps=1)
    for step, change in enumerate((lambda: None, lambda: scale.requires_grad_(rank == 0))):
        change()
        run_window(accumulator.window(micro_batches_of([[2]] * 2, step, rank)), model).step()
    # Rank 1 has nothing to draw ahead.
    for window in accumulator.windows(micro_batches_of([[2] * 5, [2]], 2, rank)):
        run_window(window, model).step()
        model[0][0].requires_grad_(window.index % 2 == 0)
    before = weights(model)
    model[0][2].requires_grad_(rank == 0)
    said = refused(accumulator.window, [])
    assert "parameter 2 (rank 0: 0.2.weight of shape [8, 8] in torch.float64; rank 1: 0.2.weight of" in said
    assert "in torch.float64, frozen)" in said
    assert torch.equal(weights(model), before)
