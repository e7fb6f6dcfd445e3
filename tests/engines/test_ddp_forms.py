"""Other forms of DDP: compiled, on a sub-group, several at once, copied; and the windows that each refuses."""

import copy
import io
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from distaccum import Accumulator
from tests.support.oracle import choices, everything, gradients_off, own
from tests.support.problems import Choosing, make_batch, make_net_without_router, trunk
from tests.support.ranks import on_ranks
from tests.support.windows import (
    accumulating,
    error,
    gradient,
    gradient_of,
    loss_of,
    refused,
    run_window,
    set_weights,
    warned,
    weights,
)

LAYOUT = [[2, 3], [1, 4, 2]]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["inside", "around"])
@on_ranks(2)
def test_compiled_models_are_exact_and_reduce_once(how):
    wraps = [DistributedDataParallel, partial(torch.compile, backend="aot_eager")]
    inner, outer = wraps[::-1] if how == "inside" else wraps
    model, accumulator = accumulating(outer(inner(trunk())))
    wrongs = gradients_off(model, accumulator, [LAYOUT] * 3, trunk)
    group = dist.group.WORLD._get_backend(torch.device("cpu"))
    before = group._get_sequence_number_for_group()  # an active dispatch mode would disable the compiler
    run_window(accumulator.window(own([[1] * 5] * 2)), model)
    collectives = group._get_sequence_number_for_group() - before
    assert max(wrongs) <= 1e-12
    assert collectives == 2, "the plan, and one reduction for five micro-steps"


@on_ranks(2)
def test_bucket_views_are_cleared_in_place():
    rank = dist.get_rank()
    ddp, accumulator = accumulating(DistributedDataParallel(trunk(), gradient_as_bucket_view=True), steps=2)
    places = []
    for window in accumulator.windows([make_batch(2, seed=i) for i in range(8)]):
        run_window(window, ddp).step()
        places.append([parameter.grad.data_ptr() for parameter in ddp.parameters()])
        assert gradient(ddp).count_nonzero() == 0
    with warned() as texts:
        for left in (0.0, 1.0):
            ddp.module[1].bias.grad.fill_(left)
            run_window(Accumulator(ddp, SGD(ddp.parameters(), lr=0.0)).window([make_batch(2, seed=9)]), ddp).step()
    assert [text[:20] for text in texts] == ["gradients that stood"][rank:], "and zeros are nobody's"
    assert places[1] == places[2] == places[3], "from the second window on, when DDP has rebuilt its buckets"


@on_ranks(2)
def test_impossible_models_and_windows_are_refused_on_all_ranks():
    ddp = DistributedDataParallel(trunk())
    ddp.module.append(nn.SyncBatchNorm(4))  # DDP wraps it only on GPUs; planning needs no forward
    ddp.module[-1].requires_grad_(False)
    said = refused(accumulating(ddp, batchnorm="ignore")[1].window, own([[1], [1, 1]]))
    assert "ranks have 1 to 2 micro-batches, and SyncBatchNorm communicates in each forward" in said
    own_group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    groups = [DistributedDataParallel(nn.Linear(2, 2), process_group=group) for group in (None, own_group)]
    assert "expected one data-parallel group" in refused(accumulating, nn.Sequential(*groups))


def inputs(number: int, rank: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 * seed + rank)
    return [torch.randn(2, 3, generator=generator, dtype=torch.float64) for _ in range(number)]


def spread(tensor: Tensor) -> float:
    """The largest difference of the tensor between ranks."""
    both = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(both, tensor.contiguous())
    return max(float((one - both[0]).abs().max()) for one in both)


@on_ranks(2)
def test_windows_stay_exact_after_forwards_of_one_rank_alone():
    """Rank 0 runs forwards between windows without no_grad(). Before, DDP has rebuilt its buckets on all ranks."""
    ddp, accumulator = accumulating(DistributedDataParallel(make_net_without_router()))
    found = gradients_off(ddp, accumulator, [[[2, 1], [2, 3]]] * 2)
    for _ in range(2):
        if dist.get_rank() == 0:
            ddp(torch.ones(1, 5, dtype=torch.float64))
        found += gradients_off(ddp, accumulator, [[[2, 1], [2, 3]]])
    assert max(found) <= 1e-12


@pytest.mark.parametrize("options", [{}, {"static_graph": True}, {"gradient_as_bucket_view": True}], ids=str)
@on_ranks(2)
def test_windows_of_two_accumulators_stay_exact_beside_steps_by_hand(options):
    """Steps by hand make DDP lay out its buckets, in the forward of the second."""
    ddp = DistributedDataParallel(make_net_without_router(), **options)
    found = []
    for num in (1, 2):
        for accumulator in [Accumulator(ddp, SGD(ddp.parameters(), lr=0.0)) for _ in range(2)]:
            found += gradients_off(ddp, accumulator, [[[2], [2, 3, 1]]] * num)
        for _ in range(3):
            ddp(torch.ones(1, 5, dtype=torch.float64)).sum().backward()
            ddp.zero_grad()
    assert max(found) <= 1e-12


@on_ranks(2)
def test_join_and_ignored_parameters_are_refused_with_the_cure():
    net, rank = nn.Linear(3, 3, bias=False).double(), dist.get_rank()
    net.other = nn.Parameter(torch.ones(3, dtype=torch.float64))
    net._ddp_params_and_buffers_to_ignore = [".other", "weight"]  # DDP knows only the first, without a module
    ddp, accumulator = accumulating(DistributedDataParallel(net), 0.1, steps=2)
    said = [refused(accumulator.window, inputs(2, rank))]
    net.other.requires_grad_(False)
    run_window(accumulator.window(inputs(2, rank)), ddp).step()

    def windows() -> None:
        for window in accumulator.windows(inputs(4 - 2 * rank, rank)):
            run_window(window, ddp).step()

    with ddp.join():
        said.append(refused(windows))
    with ddp.join(enable=False):
        windows()
    windows()
    assert "other is not frozen as it was when DDP wrapped the model, or is in _ddp_params" in said[0]
    assert "a window inside DDP's join()" in said[1]


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"static_graph": True}], ids=str)
@on_ranks(2)
def test_parameter_added_after_wrapping_is_averaged(options):
    net, rank = nn.Linear(3, 3, bias=False).double(), dist.get_rank()
    optimizer = SGD(net.parameters(), lr=0.1)
    accumulator = Accumulator(ddp := DistributedDataParallel(net, **options), optimizer)
    run_window(accumulator.window(inputs(2, rank)), ddp).step()
    net.bias = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    optimizer.add_param_group({"params": [net.bias]})
    exact = gradient_of(copy.deepcopy(net), torch.cat([*inputs(2, 0), *inputs(2, 1)]))
    run_window(accumulator.window(inputs(2, rank)), ddp)
    assert error(gradient(net), exact) <= 1e-12


USERS = [
    *((users, False, [[["012", "012"]] * 2]) for users in ([0, 1], [1])),
    ([0, 1], True, [[["0", ""], ["1", "01"]], [["01", "1"], ["", ""]]]),
]


@pytest.mark.parametrize(("users", "is_searched", "turns"), USERS, ids=str)
@on_ranks(2)
def test_parameter_used_by_the_loss_alone_is_reduced(users, is_searched, turns):
    """Also by a rank whose last micro-batch uses no parameter of DDP."""
    ddp = DistributedDataParallel(Choosing(), find_unused_parameters=is_searched)
    plain = Choosing()
    scale = nn.Parameter(torch.ones(5, dtype=torch.float64))
    scale.requires_grad_(dist.get_rank() in users)
    accumulator = Accumulator(ddp, SGD([*ddp.parameters(), scale], lr=0.1))
    for uses in turns:
        wanted = scale.detach().clone().requires_grad_()
        batches = choices(uses)
        set_weights(plain, weights(ddp))
        plain.zero_grad()
        window = accumulator.window(batches[dist.get_rank()])
        for batch, used in window:
            window.backward((ddp(batch["x"], used) * scale).square().mean())
        for r, of_rank in enumerate(batches):
            for batch, used in of_rank:
                factor = wanted if r in users else wanted.detach()
                ((plain(batch["x"], used) * factor).square().mean() / 4).backward()
        errors = [error(gradient(ddp), gradient(plain)), error(scale.grad, wanted.grad)]
        window.step()
        assert max(*errors, spread(scale.detach())) <= 1e-12, uses


@on_ranks(2)
def test_flags_are_put_back_as_they_were_found():
    ddp = DistributedDataParallel(nn.Linear(3, 1).double())
    ddp.require_forward_param_sync = False
    accumulator = Accumulator(ddp, SGD(ddp.parameters(), lr=0.1))
    run_window(accumulator.window(inputs(2, dist.get_rank())), ddp).step()
    assert ddp.require_backward_grad_sync and not ddp.require_forward_param_sync
    with ddp.no_sync():
        run_window(accumulator.window(inputs(2, dist.get_rank())), ddp)
        assert spread(ddp.module.weight.grad) == 0 and not ddp.require_backward_grad_sync


@on_ranks(2)
def test_steps_by_hand_are_exact_after_a_window_whose_reduction_failed():
    """In the middle, when the last layer's gradients were ready."""
    ddp, layout = DistributedDataParallel(trunk()), [[2], [2]]
    fails = ddp.module[0].register_forward_hook(lambda *given: given[-1].register_hook(lambda _: 1 / 0) and None)
    with pytest.raises(ZeroDivisionError):
        run_window(Accumulator(ddp, SGD(ddp.parameters(), lr=0.1)).window(own(layout)), ddp)
    fails.remove()
    loss_of(ddp, own(layout)[0]).backward()
    assert error(gradient(ddp), gradient_of(trunk(), everything(layout))) <= 1e-12


@on_ranks(2)
def test_steps_by_hand_know_nothing_of_the_parameters_that_a_left_window_used():
    ddp = DistributedDataParallel(Choosing(), find_unused_parameters=True)
    window = Accumulator(ddp, SGD(ddp.parameters(), lr=0.1)).window(own([[2, 2]] * 2))
    for batch in window:
        window.backward(ddp(batch["x"], "01").square().mean())
        break
    window.discard()
    ddp(batch["x"], "0").square().mean().backward()
    assert [layer.weight.grad is None for layer in ddp.module.layers] == [False, True, True]


def copied(what: Any) -> list[Any]:
    box = io.BytesIO()
    torch.save(what, box)
    box.seek(0)
    return [copy.deepcopy(what), torch.load(box, weights_only=False)]


@on_ranks(2)
def test_copies_of_ddp_and_scalers_know_nothing_of_an_open_window():
    rank, ddp = dist.get_rank(), DistributedDataParallel(nn.Linear(3, 1).double())
    optimizer, scaler = SGD(ddp.parameters(), lr=0.1), torch.amp.GradScaler("cpu")
    accumulator = Accumulator(ddp, optimizer, scaler=scaler)
    for _ in range(2):
        for x in (window := accumulator.window(inputs(2, rank))):
            copied(optimizer)
            for one, its_scaler in zip(copied(ddp), copied(scaler), strict=True):
                one.zero_grad()
                alone = Accumulator(one, SGD(one.parameters(), lr=0.1), scaler=its_scaler)
                within = run_window(alone.window(inputs(1, rank)), one)
                assert spread(one.module.weight.grad) == 0 and within.step().stepped
            window.backward(ddp(x).square().mean())
        copied(window.step())
    for one in copied(ddp):
        one.zero_grad()
        one(inputs(1, rank)[0]).square().mean().backward()
        assert spread(one.module.weight.grad) == spread(ddp.module.weight.detach()) == 0
