"""DDP shared with others: several accumulators, copies, and forwards that only some ranks run."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from distaccum import Accumulator
from tests.support.oracle import gradients_off
from tests.support.problems import error, make_net_without_router, refused
from tests.support.ranks import on_ranks

F64 = torch.float64


class Buffered(nn.Module):
    """A layer with a buffer that rank 0 sends to the others."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(3, 3, generator=generator, dtype=F64))
        self.register_buffer("factor", torch.tensor(2.0 + seed, dtype=F64))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight) * self.factor


def inputs(number: int, rank: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 * seed + rank)
    return [torch.randn(2, 3, generator=generator, dtype=F64) for _ in range(number)]


def run(window: Any, model: Any) -> Any:
    for x in window:
        window.backward(model(x).square().mean())
    return window


def spread(tensor: Tensor) -> float:
    """The largest difference of the tensor between ranks."""
    both = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(both, tensor.contiguous())
    return max(float((one - both[0]).abs().max()) for one in both)


# Forwards that only some ranks run


@on_ranks(2)
def test_windows_stay_exact_after_forwards_of_one_rank_alone():
    """Rank 0 runs forwards between windows without no_grad(). Before, DDP has rebuilt its buckets on all ranks."""
    ddp = DistributedDataParallel(make_net_without_router())
    accumulator = Accumulator(ddp, SGD(ddp.parameters(), lr=0.0))
    found = gradients_off(ddp, accumulator, [[[2, 1], [2, 3]]] * 2)
    for _ in range(2):
        if dist.get_rank() == 0:
            ddp(torch.ones(1, 5, dtype=F64))
        found += gradients_off(ddp, accumulator, [[[2, 1], [2, 3]]])
    assert max(found) <= 1e-12


# Windows of several accumulators


# Settings of DDP that a window cannot accept


@on_ranks(2)
def test_join_and_ignored_parameters_are_refused_with_the_cure():
    """What is said, and that the error's own cure is one."""
    net, rank = Buffered(), dist.get_rank()
    net.other = nn.Parameter(torch.ones(3, dtype=F64))
    net._ddp_params_and_buffers_to_ignore = [".other", "weight"]  # DDP knows only the first, without a module
    ddp = DistributedDataParallel(net)
    accumulator = Accumulator(ddp, SGD(ddp.parameters(), lr=0.1), steps=2)
    said = [refused(accumulator.window, inputs(2, rank))]
    net.other.requires_grad_(False)
    run(accumulator.window(inputs(2, rank)), ddp).step()

    def windows() -> None:
        for window in accumulator.windows(inputs(4 - 2 * rank, rank)):
            run(window, ddp).step()

    with ddp.join():
        said.append(refused(windows))
    with ddp.join(enable=False):
        windows()
    windows()
    ignored, join = said
    assert "other is trained but was frozen or absent when DDP wrapped the model, or is in _ddp_params" in ignored
    assert "a window inside DDP's join()" in join


@pytest.mark.parametrize("users", [[0, 1], [1]], ids=str)
@on_ranks(2)
def test_parameter_used_by_the_loss_alone_is_reduced(users):
    """A parameter of the loss, which only these ranks train."""
    rank = dist.get_rank()
    net, scale = nn.Linear(3, 1).double(), nn.Parameter(torch.ones(3, dtype=F64))
    whole, wanted = copy.deepcopy(net), scale.detach().clone().requires_grad_()
    ddp = DistributedDataParallel(net)
    scale.requires_grad_(rank in users)
    accumulator = Accumulator(ddp, SGD([*ddp.parameters(), scale], lr=0.1))
    window = run(accumulator.window(inputs(2, rank)), lambda x: ddp(x) * scale)
    for r in range(2):
        factor = wanted if r in users else wanted.detach()
        (whole(torch.cat(inputs(2, r))) * factor).square().mean().div(2).backward()
    errors = [error(net.weight.grad, whole.weight.grad), error(scale.grad, wanted.grad)]
    window.step()
    assert max(*errors, spread(scale.detach())) <= 1e-12


@on_ranks(2)
def test_flags_are_put_back_as_they_were_found():
    ddp = DistributedDataParallel(nn.Linear(3, 1).double())
    ddp.require_forward_param_sync = False
    accumulator = Accumulator(ddp, SGD(ddp.parameters(), lr=0.1))
    run(accumulator.window(inputs(2, dist.get_rank())), ddp).step()
    assert ddp.require_backward_grad_sync and not ddp.require_forward_param_sync
    with ddp.no_sync():
        run(accumulator.window(inputs(2, dist.get_rank())), ddp)
        assert spread(ddp.module.weight.grad) == 0 and not ddp.require_backward_grad_sync


# Copies


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
                within = run(alone.window(inputs(1, rank)), one)
                assert spread(one.module.weight.grad) == 0 and within.step().stepped
            window.backward(ddp(x).square().mean())
        copied(window.step())
    for one in copied(ddp):
        one.zero_grad()
        one(inputs(1, rank)[0]).square().mean().backward()
        assert spread(one.module.weight.grad) == spread(ddp.module.weight.detach()) == 0
