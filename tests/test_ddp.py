"""DDP on real gloo ranks: the law, and the cost of reductions."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from counting import Counting
from inside import storages_kept
from problems import (
    CASES,
    big_batch,
    error,
    gradient,
    join,
    loss_of,
    make_batch,
    make_net,
    make_net_without_router,
    micro_batches_of,
    sample_loss,
    trunk,
    weights,
)
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint

from distaccum import Accumulator, DistaccumError, count_samples, count_tokens

BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-6}

# A window lists the micro-batch sizes of each rank.
LAYOUTS = {
    "even": [[[3, 3, 3]] * 3, [[2, 2]] * 3],
    "short tail": [[[4, 4, 4]] * 3, [[4], [4], [4]]],
    "uneven micro-batches": [[[1, 6, 2], [5, 1, 3], [2, 2, 9]], [[7, 1], [1, 7], [3, 3]]],
    "uneven ranks": [[[3, 3, 2], [4, 1], [5]], [[2], [1, 2, 3, 4], [2, 2]]],
    "a dry rank": [[[2, 3], [4, 1], [1]], [[3, 2, 1, 1], [], [2]], [[], [5], [1, 1]]],
    "dry from the start": [[[2, 3, 1, 2], [], [1]], [[3], [2], [1]], [[], [4], []]],
}


def law(case: str, layouts: list[Any], dtype: torch.dtype, **options: Any) -> list[tuple[float, float]]:
    """Errors of gradient and loss for each window on this rank."""
    loss_fn, how, reduction, count = CASES[case]
    rank, world = dist.get_rank(), dist.get_world_size()
    ddp = DistributedDataParallel(make_net(dtype), find_unused_parameters=True, **options)  # no loss uses the router
    accumulator = Accumulator(ddp, SGD(ddp.parameters(), lr=0.0), reduction=reduction, count=count)
    errors = []
    for index, layout in enumerate(layouts):
        window = accumulator.window(micro_batches_of(layout, index, rank, dtype))
        for micro_batch in window:
            window.backward(loss_fn(ddp, micro_batch, how))
        everything = [batch for r in range(world) for batch in micro_batches_of(layout, index, r, dtype)]
        loss, exact = big_batch(case, everything)
        wrong = error(gradient(ddp), exact)
        assert ddp.module.router.weight.grad is None, "a parameter that took no part got a gradient"
        assert ddp.require_backward_grad_sync
        errors.append((wrong, abs(window.step().loss - loss) / abs(loss)))
    return errors


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("layouts", LAYOUTS.values(), ids=LAYOUTS)
def test_window_equals_one_big_batch(ranks, world, layouts):
    cases = list(itertools.product(CASES, BOUNDS))
    for seen in ranks(world).run(laws, cases, layouts):
        for (case, dtype), errors in zip(cases, seen, strict=True):
            assert len(errors) == len(layouts)
            for wrong, loss in errors:
                assert wrong <= BOUNDS[dtype], (case, dtype)
                assert loss <= BOUNDS[dtype], (case, dtype)


def laws(cases, layouts):
    return [law(case, layouts, dtype) for case, dtype in cases]


def a_loader_that_ends_early(lengths):
    rank = dist.get_rank()
    ddp = DistributedDataParallel(make_net(), find_unused_parameters=True)
    accumulator = Accumulator(ddp, SGD(ddp.parameters(), lr=0.0), steps=3)
    loaders = [[make_batch(2 + i, seed=10 * r + i) for i in range(length)] for r, length in enumerate(lengths)]
    seen = []
    for epoch in range(2):
        for index, window in enumerate(accumulator.windows(iter(loaders[rank]))):  # has no length
            for micro_batch in window:
                window.backward(sample_loss(ddp, micro_batch))
            everything = [batch for loader in loaders for batch in loader[3 * index : 3 * index + 3]]
            wrong = error(gradient(ddp), big_batch("samples mean", everything)[1])
            seen.append((epoch, len(window), window.step().counts["samples"], wrong <= 1e-12))
    return seen


def test_epoch_ends_when_all_ranks_have_run_out(ranks):
    zero, one = ranks(2).run(a_loader_that_ends_early, [7, 3])
    assert zero == [(epoch, n, c, True) for epoch in range(2) for n, c in [(3, 18), (3, 18), (1, 8)]]
    assert one == [(epoch, n, c, True) for epoch in range(2) for n, c in [(3, 18), (0, 18), (0, 8)]]


# Common ways to wrap a model: each must be exact and reduce once.


class Checkpointed(nn.Module):
    def __init__(self, net: nn.Module, *, reentrant: bool) -> None:
        super().__init__()
        self.net, self.reentrant = net, reentrant

    def forward(self, x):
        if self.reentrant:
            x = x.clone().requires_grad_()
        return self.net.head(checkpoint(self.net.body, x, use_reentrant=self.reentrant))


class Buffered(nn.Module):
    """Frozen normalisation: its buffers are broadcast by DDP."""

    def __init__(self) -> None:
        super().__init__()
        net = make_net()
        self.body, self.head = nn.Sequential(net.body, nn.BatchNorm1d(6).double().eval()), net.head

    def forward(self, x):
        return self.head(self.body(x))


def hooked(hook):
    def wrap(module):
        ddp = DistributedDataParallel(module)
        ddp.register_comm_hook(None, hook)
        return ddp

    return wrap


def nested(module):
    """DDP inside a plain module, beside a parameter that no DDP covers."""
    return nn.Sequential(DistributedDataParallel(module[0]), DistributedDataParallel(module[1]), Scale())


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))

    def forward(self, x):
        return x * self.by


def with_options(**options):
    return lambda module: DistributedDataParallel(module, **options)


WRAPPINGS = {
    "plain": (trunk, with_options()),
    "find_unused_parameters": (trunk, with_options(find_unused_parameters=True)),
    "gradient_as_bucket_view": (trunk, with_options(gradient_as_bucket_view=True)),
    "both": (trunk, with_options(find_unused_parameters=True, gradient_as_bucket_view=True)),
    "static_graph": (trunk, with_options(static_graph=True)),
    "static_graph and bucket view": (trunk, with_options(static_graph=True, gradient_as_bucket_view=True)),
    "many buckets": (trunk, with_options(bucket_cap_mb=0.0005)),
    "buffers": (Buffered, with_options()),
    "allreduce_hook": (trunk, hooked(default_hooks.allreduce_hook)),
    "checkpoint": (lambda: Checkpointed(make_net_without_router(), reentrant=False), with_options()),
    "checkpoint reentrant": (lambda: Checkpointed(make_net_without_router(), reentrant=True), with_options()),
    "checkpoint reentrant, static_graph": (
        lambda: Checkpointed(make_net_without_router(), reentrant=True),
        with_options(static_graph=True),
    ),
    "nested": (trunk, nested),
}
UNEVEN = [[[2, 3], [1, 4, 2]], [[1], [3, 2]], [[2, 2], []], [[2, 2], [1, 1]]]


def wrapped(name, *, sync="last"):
    """Errors, flags and collectives of windows on uneven ranks."""
    make, wrap = WRAPPINGS[name]
    torch.manual_seed(1)
    model = wrap(make())
    reference = copy.deepcopy([*model.parameters()])
    plain = wrap_like_reference(make, model)
    rank = dist.get_rank()
    optimizer = SGD(model.parameters(), lr=0.0, momentum=0.9)
    accumulator = Accumulator(model, optimizer, sync=sync, batchnorm="ignore")
    seen = []
    for index, layout in enumerate(UNEVEN):
        with Counting() as count:
            window = accumulator.window(micro_batches_of(layout, index, rank))
            plan = count.take()
            steps = []
            for micro_batch in window:
                loss = loss_of(model, micro_batch)
                forward = count.take()
                window.backward(loss)
                steps.append((forward, count.take()))
            after = count.take()
        everything = [batch for r in range(2) for batch in micro_batches_of(layout, index, r)]
        loss = loss_of(plain, {"x": torch.cat([batch["x"] for batch in everything])})
        plain.zero_grad()
        loss.backward()  # re-entrant checkpoints do not support autograd.grad
        wrong = error(gradient(model), gradient(plain))
        update = window.step()
        seen.append((wrong, abs(update.loss - loss.item()) / loss.item(), plan, steps, after))
        flags = [m.require_backward_grad_sync for m in model.modules() if isinstance(m, DistributedDataParallel)]
        assert all(flags)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), reference, strict=True))
    return seen


def wrap_like_reference(make, model):
    torch.manual_seed(1)
    plain = make()
    if any(isinstance(module, Scale) for module in model.modules()):
        plain = nn.Sequential(plain, Scale())
    return plain


@pytest.mark.parametrize("sync", ["last", "every"])
@pytest.mark.parametrize("name", WRAPPINGS)
def test_wrappings_of_ddp_are_exact_with_uneven_and_dry_ranks(ranks, name, sync):
    for seen in ranks(2).run(wrapped_with_policy, name, sync):
        for wrong, loss, *_ in seen:
            assert wrong <= 1e-12
            assert loss <= 1e-12


def wrapped_with_policy(name, sync):
    return wrapped(name, sync=sync)


def reductions(collectives, num_elements):
    """The collectives that carry gradients, together at least `num_elements`."""
    return [name for name, size in collectives if name == "allreduce_" and size >= num_elements]


@pytest.mark.parametrize("name", ["plain", "gradient_as_bucket_view", "buffers", "checkpoint", "allreduce_hook"])
def test_window_is_reduced_once(ranks, name):
    for seen in ranks(2).run(wrapped, name):
        for index, (_, _, plan, steps, after) in enumerate(seen):
            assert [kind for kind, _ in plan] == ["allgather_"], "the plan is one small collective"
            dry = any(not rank for rank in UNEVEN[index])
            backwards = [reductions(backward, 50) for _, backward in steps]
            # A rank without a forward sends buffers here, and all agree on DDP's buckets, once.
            after = [one for one in after if one[0] != "broadcast_"]
            if dry:
                assert sum(map(len, backwards)) == 0
                assert len(reductions(after, 50)) == 1
                assert len(after) == 2, "the ranks' counts, and the reduction"
            else:
                assert backwards == [[]] * (len(steps) - 1) + [["allreduce_"]]
                assert after == []
            for forward, _ in steps:
                assert {kind for kind, _ in forward} <= {"broadcast_"}, "DDP's buffers"


def record_of_a_step():
    ddp = DistributedDataParallel(trunk())
    accumulator = Accumulator(ddp, SGD(ddp.parameters(), lr=0.0), steps=4)
    for window in accumulator.windows([make_batch(2, seed=i) for i in range(8)]):
        for micro_batch in window:
            window.backward(loss_of(ddp, micro_batch))
        with Counting() as count:
            update = window.step()
            loss = update.loss
    return count.collectives, count.host_reads, loss


def test_record_of_a_step_is_one_small_collective(ranks):
    (zero, reads, loss), (one, _, same) = ranks(2).run(record_of_a_step)
    assert zero == one == [("allreduce_", 1)]
    assert loss == same
    assert not reads, "the flag of on_nonfinite is on the host"


def buckets_of_a_window(num_steps):
    ddp = DistributedDataParallel(trunk(), bucket_cap_mb=0.0005)
    accumulator = Accumulator(ddp, SGD(ddp.parameters(), lr=0.0), steps=num_steps)
    counted = []
    for window in accumulator.windows([make_batch(2, seed=i) for i in range(3 * num_steps)]):
        with Counting() as count:
            for micro_batch in window:
                window.backward(loss_of(ddp, micro_batch))
        counted.append(len(reductions(count.collectives, 1)))
        window.step()
    return counted


def test_reductions_per_bucket_do_not_grow_with_the_window(ranks):
    (short, _), (long, _) = ranks(2).run(buckets_of_a_window, 1), ranks(2).run(buckets_of_a_window, 16)
    assert short == long
    assert max(short) > 1, "DDP starts with one bucket and rebuilds them after the first window"


def old_buckets():
    """The storages kept in mid-window that hold no gradient; DDP rebuilds its buckets in the second window."""
    net = nn.Sequential(*(nn.Linear(40, 40, bias=False) for _ in range(4))).double()
    ddp = DistributedDataParallel(net, gradient_as_bucket_view=True, bucket_cap_mb=0.02)
    accumulator = Accumulator(ddp, SGD(ddp.parameters(), lr=0.0), steps=4)
    counted, layouts = [], []
    for window in accumulator.windows([torch.ones(1, 40).double()] * 12):
        for i, x in enumerate(window):
            window.backward(ddp(x).sum())
            if i == 1:
                used = {p.grad.untyped_storage().data_ptr() for p in net.parameters()}
                counted.append(len(storages_kept(accumulator) - used))
                layouts.append(len(used))
        window.step()
    return counted, layouts


def test_rebuilt_buckets_leave_no_old_ones_behind(ranks):
    for counted, layouts in ranks(2).run(old_buckets):
        assert counted == [0, 0, 0]
        assert layouts[1] == layouts[2] > 1, "several buckets"


# Cases that fail silently elsewhere


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(5, 3).double(), nn.Linear(5, 3).double()

    def forward(self, x, *, two):
        return self.one(x) + (self.two(x) if two else 0)


def a_parameter_left_out(kwargs):
    torch.manual_seed(3)
    ddp = DistributedDataParallel(Branching(), **kwargs)
    accumulator = Accumulator(ddp, SGD(ddp.parameters(), lr=0.1), steps=2)
    batches = [make_batch(2, seed=i + 10 * dist.get_rank()) for i in range(2)]
    before = weights(ddp)

    def run(uses):
        window = accumulator.window(batches)
        for batch, use in zip(window, uses, strict=True):
            window.backward(ddp(batch["x"], two=use).square().mean())
        return window

    try:
        run([True, False])
        message = None
    except DistaccumError as caught:
        message = str(caught)
    assert torch.equal(weights(ddp), before)
    together = gradient(ddp).clone()
    dist.all_reduce(together)
    difference = error(2 * gradient(ddp), together) if message is None else 0.0
    if message is None:
        accumulator = Accumulator(ddp, SGD(ddp.parameters(), lr=0.1), steps=2)
        ddp.zero_grad()
    run([True, True])
    together = gradient(ddp).clone()
    dist.all_reduce(together)
    return message, difference, error(2 * gradient(ddp), together)


def test_parameter_left_out_of_the_last_backward_is_named(ranks):
    for message, _, after in ranks(2).run(a_parameter_left_out, {}):
        assert "two.weight, two.bias took no part in the last backward" in message
        assert "find_unused_parameters=True" in message
        assert after <= 1e-12, "the next window is exact"


def test_find_unused_parameters_makes_left_out_parameters_exact(ranks):
    for message, difference, after in ranks(2).run(a_parameter_left_out, {"find_unused_parameters": True}):
        assert message is None
        assert max(difference, after) <= 1e-12


def only_one_rank_uses_a_parameter(gradient_as_bucket_view):
    ddp = DistributedDataParallel(
        Branching(), find_unused_parameters=True, gradient_as_bucket_view=gradient_as_bucket_view
    )
    accumulator = Accumulator(ddp, SGD(ddp.parameters(), lr=0.1, weight_decay=0.5))
    rank, outcomes = dist.get_rank(), []
    for used_by in [{0}, {1}, set(), {0, 1}]:
        frozen = ddp.module.two.weight.detach().clone()
        batches = [[make_batch(2, seed=2 * r + i) for i in range(2)] for r in range(2)]
        plain = copy.deepcopy(ddp.module)
        plain.zero_grad()
        for r in range(2):
            for batch in batches[r]:
                (plain(batch["x"], two=r in used_by).square().mean() / 4).backward()
        window = accumulator.window(batches[rank])
        for batch in window:
            window.backward(ddp(batch["x"], two=rank in used_by).square().mean())
        exact = error(gradient(ddp), gradient(plain))
        window.step()
        outcomes.append((exact, torch.equal(ddp.module.two.weight, frozen)))
    return outcomes


@pytest.mark.parametrize("view", [True, False])
def test_parameters_that_some_or_no_ranks_use_are_exact(ranks, view):
    for outcomes in ranks(2).run(only_one_rank_uses_a_parameter, view):
        assert all(wrong <= 1e-12 for wrong, _ in outcomes)
        assert [unchanged for _, unchanged in outcomes] == [False, False, True, False], "no weight decay on it"


def unused_after_a_window_that_ddp_did_not_reduce(kind, view):
    ddp = DistributedDataParallel(Branching(), find_unused_parameters=True, gradient_as_bucket_view=view)
    accumulator = Accumulator(ddp, SGD(ddp.parameters(), lr=0.1, weight_decay=0.5))
    rank, outcomes = dist.get_rank(), []
    batches = [[make_batch(2, seed=2 * r + i) for i in range(2)] for r in range(2)]

    def run(mine, used_by, *, leave=False):
        window = accumulator.window(mine)
        for batch in window:
            window.backward(ddp(batch["x"], two=rank in used_by).square().mean())
            if leave:
                break
        return window

    if kind == "left":
        run(batches[rank], {0, 1}, leave=True)
    else:
        run(batches[rank] if rank == 0 else [], {0, 1}).step()
    for used_by in [set(), {1}, set(), {0, 1}]:
        before = ddp.module.two.weight.detach().clone()
        plain = copy.deepcopy(ddp.module)
        plain.zero_grad()
        for r in range(2):
            for batch in batches[r]:
                (plain(batch["x"], two=r in used_by).square().mean() / 4).backward()
        window = run(batches[rank], used_by)
        wrong = error(gradient(ddp), gradient(plain))
        window.step()
        outcomes.append((wrong, torch.equal(ddp.module.two.weight, before)))
    return outcomes


@pytest.mark.parametrize("view", [False, True], ids=["", "bucket view"])
@pytest.mark.parametrize("kind", ["left", "dry"])
def test_parameter_unused_after_an_unreduced_window_is_exact(ranks, kind, view):
    """DDP remembers which parameters took part until it reduces, and would fail on the missing gradient."""
    for outcomes in ranks(2).run(unused_after_a_window_that_ddp_did_not_reduce, kind, view):
        assert all(wrong <= 1e-12 for wrong, _ in outcomes)
        assert [unchanged for _, unchanged in outcomes] == [True, False, True, False]


def a_head_that_only_one_loss_reaches():
    rank = dist.get_rank()
    ddp = DistributedDataParallel(TwoHeads())
    accumulator = Accumulator(
        ddp, SGD(ddp.parameters(), lr=0.0), count={"tokens": count_tokens("labels"), "samples": count_samples}
    )
    wrongs = []
    for index in range(3):  # in the second window rank 1's last micro-batch has no token
        batches = [[make_batch(2, seed=10 * r + i) for i in range(2)] for r in range(2)]
        if index == 1:
            batches[1][1] = make_batch(3, seed=5, kept=0.0)
        window = accumulator.window(batches[rank])
        for batch in window:
            logits, router = ddp(batch["x"])
            window.backward(tokens=cross_entropy(logits, batch), samples=router.square().mean())
        wrongs.append(error(gradient(ddp), two_heads_of_the_big_batch(batches)))
        window.step()
    return wrongs


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = make_net()

    def forward(self, x):
        hidden = self.net.body(x)
        return self.net.head(hidden), self.net.router(hidden)


def two_heads_of_the_big_batch(batches):
    plain = TwoHeads()
    everything = join([batch for of_rank in batches for batch in of_rank])
    logits, router = plain(everything["x"])
    (cross_entropy(logits, everything) + router.square().mean()).backward()
    return gradient(plain)


def cross_entropy(logits, batch):
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def a_part_left_out_of_the_last_micro_batch(find_unused, sync, empty_on):
    rank = dist.get_rank()
    ddp = DistributedDataParallel(TwoHeads(), find_unused_parameters=find_unused)
    count = {"tokens": count_tokens("labels"), "samples": count_samples}
    accumulator = Accumulator(ddp, SGD(ddp.parameters(), lr=0.0), count=count, sync=sync)
    wrongs = []
    for position in [2, 0]:  # place of the micro-batch without tokens
        batches = [[make_batch(2, seed=10 * r + i) for i in range(3)] for r in range(2)]
        for r in empty_on:
            batches[r][position] = make_batch(3, seed=5, kept=0.0)
        window = accumulator.window(batches[rank])
        for batch in window:
            for task in window.parts(["samples", "tokens"]):
                logits, router = ddp(batch["x"])
                if find_unused:  # only one task's head takes part
                    loss = cross_entropy(logits, batch) if task == "tokens" else router.square().mean()
                else:
                    loss = (
                        cross_entropy(logits, batch) if task == "tokens" else router.square().mean() + 0 * logits.sum()
                    )
                    loss = loss + 0 * router.sum()
                window.backward(**{task: loss})
        wrongs.append(error(gradient(ddp), two_heads_of_the_big_batch(batches)))
        window.step()
    return wrongs


@pytest.mark.parametrize("empty_on", [[0, 1], [1]], ids=str)
@pytest.mark.parametrize("sync", ["last", "every"])
@pytest.mark.parametrize("find_unused", [True, False])
def test_part_without_a_count_is_left_out(ranks, find_unused, sync, empty_on):
    for wrongs in ranks(2).run(a_part_left_out_of_the_last_micro_batch, find_unused, sync, empty_on):
        assert max(wrongs) <= 1e-12


def one_rank_leaves_a_model_out():
    rank = dist.get_rank()
    one, two = (DistributedDataParallel(trunk(), find_unused_parameters=True) for _ in range(2))
    optimizers = [SGD(one.parameters(), lr=0.0), SGD(two.parameters(), lr=0.0)]
    accumulator = Accumulator([one, two], optimizers)
    wrongs = []
    for _ in range(2):
        batches = [[make_batch(2, seed=10 * r + i) for i in range(2)] for r in range(2)]
        window = accumulator.window(batches[rank])
        plain = trunk()
        for batch in window:
            loss = loss_of(one, batch)
            window.backward(loss + loss_of(two, batch) if rank == 0 else loss)
        for batch in batches[0]:
            (loss_of(plain, batch) / 4).backward()
        wrongs.append(error(gradient(two), gradient(plain)))
        window.step()
    return wrongs


def test_model_used_by_one_rank_is_exact(ranks):
    for wrongs in ranks(2).run(one_rank_leaves_a_model_out):
        assert max(wrongs) <= 1e-12


def test_term_left_out_of_the_last_backward_is_reduced(ranks):
    for wrongs in ranks(2).run(a_head_that_only_one_loss_reaches):
        assert max(wrongs) <= 1e-12


def frozen_in_mid_run():
    """How far windows are off by new Accumulators: after a freeze, and after the layer is trained again."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)).double()
    net[1].requires_grad_(False)
    ddp, rank = DistributedDataParallel(net, find_unused_parameters=True), dist.get_rank()
    samples, found = torch.randn(8, 3, dtype=torch.float64), []
    for trains in (False, True):
        net[0].requires_grad_(trains)
        accumulator = Accumulator(ddp, SGD(net.parameters(), lr=0.1), steps=2)
        for window in accumulator.windows(samples[rank::2].split([1, 3] if rank else [4])):
            for inputs in window:
                window.backward(ddp(inputs).square().mean())
            trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
            exact = torch.autograd.grad(net(samples).square().mean(), trained)
            found += [(p.grad - one).abs().max().item() for p, one in zip(trained, exact, strict=True)]
            window.step()
    net[1].requires_grad_(True)  # which DDP does not know, as many as it knows
    net[0].requires_grad_(False)
    try:
        Accumulator(ddp, SGD(net.parameters(), lr=0.1)).window([samples])
    except DistaccumError as caught:
        return found, str(caught)
    return found, "nothing"


def test_accumulator_made_after_a_freeze_is_exact_where_ddp_finds_unused_parameters(ranks):
    for found, swapped in ranks(2).run(frozen_in_mid_run):
        assert len(found) == 2 + 4 and max(found) <= 1e-12
        assert "1.weight, module.1.bias is trained but was frozen or absent when DDP wrapped" in swapped


def freezing(when):
    module = trunk()
    module[0][0].weight.requires_grad_(when != "thawed late")
    ddp = DistributedDataParallel(module)
    if when == "frozen early":
        ddp.module[0][0].weight.requires_grad_(False)
    try:
        accumulator = Accumulator(ddp, SGD(ddp.parameters(), lr=0.1))
    except ValueError as caught:
        return str(caught)
    ddp.module[0][0].weight.requires_grad_(when == "thawed late")
    try:
        accumulator.window([make_batch(2, seed=0)])
    except DistaccumError as caught:
        return str(caught)
    return None


@pytest.mark.parametrize(
    ("when", "message"),
    [
        ("frozen early", "wrapped 6 trainable parameters and the model has 5 now"),
        ("frozen late", "0.0.weight was frozen after DDP wrapped the model"),
        ("thawed late", "0.0.weight is trained but was frozen or absent when DDP wrapped"),
    ],
)
def test_change_of_requires_grad_after_wrapping_is_refused(ranks, when, message):
    for seen in ranks(2).run(freezing, when):
        assert message in seen


def refused(what):
    module = trunk()
    try:
        if what == "delay":
            named = [(name, parameter) for name, parameter in module.named_parameters() if "bias" in name]
            ddp = DistributedDataParallel(
                module, delay_all_reduce_named_params=named, param_to_hook_all_reduce=module[1].weight
            )
        elif what == "in backward":
            from torch.distributed.optim import _apply_optimizer_in_backward

            _apply_optimizer_in_backward(SGD, module.parameters(), {"lr": 0.1})
            ddp = DistributedDataParallel(module)
        elif what == "fused":
            ddp = DistributedDataParallel(module)
            ddp._register_fused_optim(torch.optim.SGD, lr=0.1)
        else:
            ddp = module
        Accumulator(ddp, SGD(ddp.parameters(), lr=0.1))
    except ValueError as caught:
        return str(caught)
    return None


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("delay", "delay_all_reduce_named_params"),
        ("in backward", "steps inside backward"),
        ("fused", "steps inside backward"),
        ("plain", "a plain module in a job of 2 ranks"),
    ],
)
def test_models_that_cannot_accumulate_are_refused(ranks, what, message):
    for seen in ranks(2).run(refused, what):
        assert message in seen
