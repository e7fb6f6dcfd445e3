"""DDP shared with others: several accumulators, copies, and forwards that only some ranks run."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from problems import error
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from distaccum import Accumulator, DistaccumError
from distaccum.extensions import WideSums

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


def spread(tensor: Tensor) -> float:
    """The largest difference of the tensor between ranks."""
    both = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(both, tensor.contiguous())
    return max(float((one - both[0]).abs().max()) for one in both)


# Forwards that only some ranks run


def static_windows(lengths: tuple[int, int], sync: Any) -> list[float]:
    rank, net = dist.get_rank(), Buffered()
    whole = copy.deepcopy(net)
    net.factor.mul_(1 + rank)  # DDP broadcasts rank 0's
    ddp = DistributedDataParallel(net, static_graph=True)
    accumulator = Accumulator(ddp, SGD(ddp.parameters(), lr=0.0), sync=sync)
    errors = []
    for index in range(3):
        everyone = [inputs(n, r, index) for r, n in enumerate(lengths)]
        for x in (window := accumulator.window(everyone[rank])):
            window.backward(ddp(x).square().mean())
        whole.zero_grad()
        whole(torch.cat(everyone[0] + everyone[1])).square().mean().backward()
        errors.append(error(net.weight.grad, whole.weight.grad))
        window.step()
    return errors


@pytest.mark.parametrize("sync", ["last", "every"])
def test_static_graph_with_a_buffer_is_exact_on_uneven_ranks(ranks, sync):
    for lengths in [(1, 2), (3, 2)]:
        for errors in ranks(2).run(static_windows, lengths, sync):
            assert max(errors) <= 1e-12, lengths


def parts_of_some_ranks(users: tuple[int, ...], is_first: bool, sync: Any) -> list[float]:
    """Two DDP models with a buffer each; only some ranks use the second, before or after the first."""
    rank, nets = dist.get_rank(), [Buffered(0), Buffered(1)]
    whole = copy.deepcopy(nets)
    one, other = models = [DistributedDataParallel(net, find_unused_parameters=True) for net in nets]
    accumulator = Accumulator(models, SGD([p for m in models for p in m.parameters()], lr=0.0), sync=sync)

    def outputs(first: Any, second: Any, x: Tensor, r: int) -> Tensor:
        if r not in users:
            return first(x)
        return second(x) + first(x) if is_first else first(x) + second(x)

    errors = []
    for index in range(2):
        everyone = [inputs(2, r, index) for r in range(2)]
        for x in (window := accumulator.window(everyone[rank])):
            window.backward(outputs(one, other, x, rank).square().mean())
        for net in whole:
            net.zero_grad()
        total = sum(outputs(*whole, x, r).square().mean() / 4 for r, one_rank in enumerate(everyone) for x in one_rank)
        total.backward()
        for net, exact in zip(nets, whole, strict=True):
            if exact.weight.grad is not None:
                errors.append(error(net.weight.grad, exact.weight.grad))
            else:
                errors.append(float(net.weight.grad is not None))
        window.step()
    return errors


@pytest.mark.parametrize("is_first", [False, True], ids=["after", "before"])
def test_model_with_a_buffer_used_by_one_rank_is_exact(ranks, is_first):
    for users in [(0,), (1,)]:
        for errors in ranks(2).run(parts_of_some_ranks, users, is_first, "last"):
            assert max(errors) <= 1e-12, users


def forwards_of_rank_0() -> list[float]:
    """Rank 0 runs forwards between windows without no_grad(). Before, DDP has rebuilt its buckets on all ranks."""
    rank, net = dist.get_rank(), nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    ddp = DistributedDataParallel(net)
    accumulator = Accumulator(ddp, SGD(ddp.parameters(), lr=0.0))
    errors = []
    for index in range(5):
        if rank == 0 and index in (2, 3):
            ddp(inputs(1, 0)[0])
        everyone = [inputs(2, r, index) for r in range(2)]
        for x in (window := accumulator.window(everyone[rank])):
            window.backward(ddp(x).square().mean())
        whole = copy.deepcopy(net)
        whole.zero_grad()
        whole(torch.cat(everyone[0] + everyone[1])).square().mean().backward()
        errors += [error(p.grad, q.grad) for p, q in zip(net.parameters(), whole.parameters(), strict=True)]
        window.step()
    return errors


def test_windows_stay_exact_after_forwards_of_one_rank_alone(ranks):
    for errors in ranks(2).run(forwards_of_rank_0):
        assert max(errors) <= 1e-12


# Windows of several accumulators


def crossing(unused: bool) -> tuple[float, list[bool], float]:
    rank, net = dist.get_rank(), nn.Linear(3, 3).double()
    ddp = DistributedDataParallel(net, find_unused_parameters=unused)
    a, b = (Accumulator(ddp, SGD(ddp.parameters(), lr=0.0)) for _ in range(2))
    everyone = [inputs(3, r) for r in range(2)]
    first, second = a.window(inputs(2, rank, 1)), b.window(everyone[rank])
    next(iter_first := iter(first))
    flags = []
    for i, x in enumerate(second):
        if i == 0:
            first.discard()  # while the other window is open
            flags.append(ddp.require_backward_grad_sync)
        second.backward(ddp(x).square().mean())
    del iter_first
    whole = copy.deepcopy(net)
    whole.zero_grad()
    whole(torch.cat(everyone[0] + everyone[1])).square().mean().backward()
    wrong = error(net.weight.grad, whole.weight.grad)
    second.step()
    flags.append(ddp.require_backward_grad_sync)
    ddp(everyone[rank][0]).square().mean().backward()
    return wrong, flags, spread(net.weight.grad)


@pytest.mark.parametrize("unused", [False, True], ids=["", "unused"])
def test_crossing_windows_leave_ddp_as_found(ranks, unused):
    for wrong, flags, ranks_apart in ranks(2).run(crossing, unused):
        assert wrong <= 1e-12
        assert flags == [False, True]
        assert ranks_apart == 0


def one_in_another() -> list[Any]:
    """A critic's windows inside a generator's: the generator's gradients in the critic must not count there."""
    rank = dist.get_rank()
    generator = nn.Linear(3, 3).double()
    critic = nn.ModuleDict({"judges": nn.Linear(3, 1), "rarely": nn.Linear(3, 1)}).double()
    critic.forward = lambda x, rarely=False: critic["rarely" if rarely else "judges"](x)  # type: ignore[method-assign]
    whole = copy.deepcopy(critic["judges"])
    ddps = [DistributedDataParallel(one, find_unused_parameters=True) for one in (generator, critic)]
    outer = Accumulator(ddps, SGD(ddps[0].parameters(), lr=0.0))
    inner = Accumulator(ddps[1], SGD(ddps[1].parameters(), lr=0.0))
    seen: list[Any] = []
    warnings.simplefilter("ignore")  # the inner window clears gradients of the outer one
    for x in (window := outer.window(inputs(2, rank))):
        window.backward(ddps[1](ddps[0](x), rarely=True).square().mean())
        if not seen:
            everyone = [inputs(2, r, 7) for r in range(2)]
            for y in (within := inner.window(everyone[rank])):
                within.backward(ddps[1](y).square().mean())
            whole(torch.cat(everyone[0] + everyone[1])).square().mean().backward()
            seen.append(error(critic["judges"].weight.grad, whole.weight.grad))
            seen.append(critic["rarely"].weight.grad)
            within.step()
    exact = copy.deepcopy(generator)
    exact.zero_grad()
    critic["rarely"](exact(torch.cat(inputs(2, 0) + inputs(2, 1)))).square().mean().backward()
    seen.append(error(generator.weight.grad, exact.weight.grad))
    window.step()
    return seen


def test_inner_window_ignores_the_gradients_of_the_outer_one(ranks):
    for inner, unused, outer in ranks(2).run(one_in_another):
        assert inner <= 1e-12 and unused is None and outer <= 1e-12


@pytest.mark.filterwarnings("ignore:gradients that stood before")
def test_critics_windows_in_a_generators_window_are_exact():
    models = generator, critic = nn.Linear(3, 3), nn.Linear(3, 1)
    outer = Accumulator(models, SGD(generator.parameters(), lr=0.1), steps=2)
    inner = Accumulator(critic, SGD(critic.parameters(), lr=0.1), steps=2)
    batches = [torch.randn(2, 3) for _ in range(4)]
    for window in outer.windows(batches):
        for x in window:
            window.backward(critic(generator(x)).square().mean())
            for within in inner.windows(batches[:2]):
                for y in within:
                    within.backward(critic(y).square().mean())
                exact = copy.deepcopy(critic)
                exact(torch.cat(batches[:2])).square().mean().backward()
                assert error(critic.weight.grad, exact.weight.grad) <= 1e-6
                within.step()
        window.step()


@pytest.mark.parametrize("name", ["optimizer", "scheduler"])
def test_optimizer_or_scheduler_given_twice_is_refused(name):
    model = nn.Linear(2, 2)
    optimizer = SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    options = {"optimizer": [optimizer] * 2} if name == "optimizer" else {"scheduler": [schedule, schedule]}
    with pytest.raises(ValueError, match=f"{name} holds the same .* twice, which would step twice per update"):
        Accumulator(model, **{"optimizer": optimizer, **options})
    Accumulator([model, model], optimizer, steps=1)  # a model given twice is trained once


# Settings of DDP that a window cannot accept


def refused_by_ddp_settings(what: str) -> str:
    net = Buffered()
    if what == "ignored":
        net.other = nn.Parameter(torch.ones(3, dtype=F64))
        net._ddp_params_and_buffers_to_ignore = [".other", "weight"]  # DDP knows only the first, without a module
    ddp = DistributedDataParallel(net)
    accumulator = Accumulator(ddp, SGD(ddp.parameters(), lr=0.1), steps=2)

    def windows() -> None:
        for window in accumulator.windows(inputs(4 - 2 * dist.get_rank(), dist.get_rank())):
            for x in window:
                window.backward(ddp(x).square().mean())
            window.step()

    try:
        if what == "join":
            with ddp.join():
                windows()
        windows()
    except DistaccumError as error:
        if what == "join":
            with ddp.join(enable=False):
                pass
        else:
            net.other.requires_grad_(False)
        windows()  # the cure in the error
        return str(error)
    return "nothing"


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("join", "a window inside DDP's join()"),
        ("ignored", "other is trained but was frozen or absent when DDP wrapped the model, or is in _ddp_params"),
    ],
)
def test_join_and_ignored_parameters_are_refused_with_the_cure(ranks, what, message):
    assert all(message in text for text in ranks(2).run(refused_by_ddp_settings, what))


def trained_on_one_rank() -> float:
    rank = dist.get_rank()
    net, scale = nn.Linear(3, 1).double(), nn.Parameter(torch.ones(3, dtype=F64))
    whole, exact = copy.deepcopy(net), scale.detach().clone().requires_grad_()
    ddp = DistributedDataParallel(net)
    scale.requires_grad_(rank == 1)
    accumulator = Accumulator(ddp, SGD([*ddp.parameters(), scale], lr=0.1))
    everyone = [inputs(2, r) for r in range(2)]
    for x in (window := accumulator.window(everyone[rank])):
        window.backward((ddp(x) * scale).square().mean())
    for r, one in enumerate(everyone):
        (whole(torch.cat(one)) * (exact if r else exact.detach())).square().mean().div(2).backward()
    errors = [error(net.weight.grad, whole.weight.grad), error(scale.grad, exact.grad)]
    window.step()
    return max(*errors, spread(scale.detach()))


def test_loss_parameter_trained_on_one_rank_is_exact(ranks):
    assert max(ranks(2).run(trained_on_one_rank)) <= 1e-12


# Copies


def copies() -> list[Any]:
    """Copies of DDP, an optimizer and a scaler, made before, in and after a window."""
    rank, seen = dist.get_rank(), []
    ddp = DistributedDataParallel(nn.Linear(3, 1).double())
    optimizer = SGD(ddp.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")

    def copied(what: Any) -> list[Any]:
        box = io.BytesIO()
        torch.save(what, box)
        box.seek(0)
        return [copy.deepcopy(what), pickle.loads(pickle.dumps(what)), torch.load(box, weights_only=False)]

    def reduces(one: Any) -> bool:
        one.zero_grad()
        one(inputs(1, rank)[0]).square().mean().backward()
        return spread(one.module.weight.grad) == 0

    def steps_alone(one: Any, copied_scaler: Any) -> bool:
        """A copied scaler must not know its original's open window: the step would be refused."""
        one.zero_grad()
        twin = Accumulator(one, SGD(one.parameters(), lr=0.1), scaler=copied_scaler)
        for x in (inner := twin.window(inputs(1, rank))):
            inner.backward(one(x).square().mean())
        return inner.step().stepped

    accumulator = Accumulator(ddp, optimizer, scaler=scaler, steps=3)
    for window in accumulator.windows(inputs(6, rank)):
        for x in window:
            made = copied(ddp)
            copied(optimizer)
            seen += [steps_alone(*both) for both in zip(made, copied(scaler), strict=True)]
            window.backward(ddp(x).square().mean())
        update = window.step()
        seen += [reduces(one) for one in copied(ddp)]
        copied(scaler)
        copied(update)
    again = copied(ddp)[0]
    other = Accumulator(again, SGD(again.parameters(), lr=0.1), scaler=copied(scaler)[0], steps=2)
    for window in other.windows(inputs(4, rank)):
        for x in window:
            window.backward(again(x).square().mean())
        seen.append(spread(again.module.weight.grad) == 0)
        window.step()
    return seen


def test_copies_of_ddp_optimizers_and_scalers_are_whole(ranks):
    for seen in ranks(2).run(copies):
        assert seen and all(seen)


def flags_after_a_window() -> tuple[bool, bool]:
    ddp = DistributedDataParallel(nn.Linear(3, 1).double())
    ddp.require_forward_param_sync = False
    window = Accumulator(ddp, SGD(ddp.parameters(), lr=0.1)).window(inputs(2, dist.get_rank()))
    for x in window:
        window.backward(ddp(x).square().mean())
    return ddp.require_backward_grad_sync, ddp.require_forward_param_sync


def test_flags_are_put_back_as_they_were_found(ranks):
    assert ranks(2).run(flags_after_a_window) == [(True, False)] * 2


def a_copy_that_is_armed() -> float:
    """A copy's forward outside of windows must not affect the original."""
    rank = dist.get_rank()
    ddp = DistributedDataParallel(nn.Linear(3, 1).double())
    accumulator = Accumulator(ddp, SGD(ddp.parameters(), lr=0.1))
    other = copy.deepcopy(ddp)
    loss = other(inputs(1, rank)[0]).square().mean()
    for x in (window := accumulator.window(inputs(2, rank))):
        window.backward(ddp(x).square().mean())
    window.step()
    loss.backward()
    return spread(other.module.weight.grad)


def test_copy_of_ddp_reduces_after_a_window_of_the_original(ranks):
    assert ranks(2).run(a_copy_that_is_armed) == [0, 0]


def after_it_is_gone() -> list[float]:
    """The hooks of an accumulator do nothing once it is deleted, also in mid-window."""
    rank, seen = dist.get_rank(), []
    net = nn.Linear(3, 1, dtype=torch.bfloat16)
    ddp = DistributedDataParallel(net)
    optimizer = SGD(ddp.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        accumulator = Accumulator(ddp, optimizer, extensions=[WideSums(torch.float32)])
        for x in (window := accumulator.window(inputs(3, rank))):
            window.backward(ddp(x.bfloat16()).float().square().mean())
            break
        del accumulator, window
        gc.collect()
        optimizer.zero_grad()
        ddp(inputs(1, rank)[0].bfloat16()).float().square().mean().backward()
        seen.append(spread(net.weight.grad.float()))
        optimizer.step()
        seen.append(spread(net.weight.detach().float()))
    return seen


def test_hooks_of_a_deleted_accumulator_do_nothing(ranks):
    for seen in ranks(2).run(after_it_is_gone):
        assert seen == [0.0] * 4
