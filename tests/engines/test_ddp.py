"""DDP on real gloo ranks: the law, and the cost of reductions."""

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook import hook_with_zero_step
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint

from distaccum import Accumulator
from tests.support.counting import Counting
from tests.support.inside import storages_kept
from tests.support.oracle import choices, choices_off, everything, loss_of_choice, own, step_off
from tests.support.problems import Choosing, make_batch, make_net, make_net_without_router, trunk
from tests.support.ranks import on_ranks
from tests.support.windows import accumulating, loss_of, refused, weights

# Common ways to wrap a model: each must be exact and reduce once.


class Checkpointed(nn.Module):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.net, self.reentrant = make_net_without_router(), reentrant

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


def hooked(module):
    ddp = DistributedDataParallel(module)
    ddp.register_comm_hook(None, default_hooks.allreduce_hook)
    return ddp


def nested(module):
    """DDP inside a plain module, beside a layer that no DDP covers."""
    module[0], module[1] = DistributedDataParallel(module[0]), DistributedDataParallel(module[1])
    return module


def with_options(**options):
    return lambda module: DistributedDataParallel(module, **options)


WRAPPINGS = {
    "plain": (trunk, with_options()),
    "find_unused_parameters": (trunk, with_options(find_unused_parameters=True)),
    "gradient_as_bucket_view": (trunk, with_options(gradient_as_bucket_view=True)),
    "static_graph": (trunk, with_options(static_graph=True)),
    "static_graph and buffers": (Buffered, with_options(static_graph=True)),
    "many buckets": (trunk, with_options(bucket_cap_mb=0.0005)),
    "buffers": (Buffered, with_options()),
    "allreduce_hook": (trunk, hooked),
    "checkpoint": (lambda: Checkpointed(reentrant=False), with_options()),
    "checkpoint reentrant": (lambda: Checkpointed(reentrant=True), with_options()),
    "nested": (lambda: nn.Sequential(*trunk(), nn.Linear(4, 4).double()), nested),
}
UNEVEN = [[[2, 3], [1, 4, 2]], [[1], [3, 2]], [[2, 2], []], [[2, 2], [1, 1]]]


def reductions(collectives, num_elements):
    """The collectives that carry gradients, together at least `num_elements`."""
    return [name for name, size in collectives if name == "allreduce_" and size >= num_elements]


@pytest.mark.parametrize("sync", ["last", "every"])
@pytest.mark.parametrize("name", WRAPPINGS)
@on_ranks(2)
def test_wrappings_of_ddp_are_exact_with_uneven_and_dry_ranks(name, sync):
    make, wrap = WRAPPINGS[name]
    model, accumulator = accumulating(wrap(make()), 1.0, sync=sync, batchnorm="ignore")
    reduces_alone = name in ("plain", "gradient_as_bucket_view", "buffers", "checkpoint", "allreduce_hook")
    for index, layout in enumerate(UNEVEN):
        sent: list[list[tuple[str, int]]] = []  # in the plan, in each forward and backward, and after them
        with Counting() as count:
            window = accumulator.window(own(layout, index))
            sent.append(count.take())

            def run(batch, window=window, sent=sent, count=count):
                loss = loss_of(model, batch)
                sent.append(count.take())
                window.backward(loss)
                sent.append(count.take())

            take = lambda sent=sent, count=count: sent.append(count.take())  # noqa: E731
            off = step_off(model, window, make(), everything(layout, index), run=run, between=take)
        assert max(off) <= 1e-12
        assert all(m.require_backward_grad_sync for m in model.modules() if isinstance(m, DistributedDataParallel))
        if sync == "last" and reduces_alone:
            assert_reduced_once(layout, index, *sent)


def assert_reduced_once(layout, index, plan, *steps):
    *steps, after = steps
    assert [kind for kind, _ in plan] == ["exchange"] * (1 if index else 2), "the first compares ranks too"
    assert {kind for forward in steps[::2] for kind, _ in forward} <= {"broadcast_"}, "DDP's buffers"
    backwards = [reductions(backward, 50) for backward in steps[1::2]]
    # A rank without a forward sends buffers here, and all agree on DDP's buckets, once.
    after = [kind for kind in after if kind[0] != "broadcast_"]
    if [] in layout:
        assert sum(map(len, backwards)) == 0
        assert len(reductions(after, 50)) == 1
        assert len(after) == 2, "the ranks' counts, and the reduction"
    else:
        assert backwards == [[]] * (len(backwards) - 1) + [["allreduce_"]]
        assert after == []


@on_ranks(2)
def test_loop_over_a_loader_in_parts_sends_one_reduction_and_a_step_one_small_collective():
    ddp, accumulator = accumulating(DistributedDataParallel(trunk()), steps=4)
    for window in accumulator.windows([make_batch(2, seed=i) for i in range(8)]):
        with Counting() as count:
            for batch in window:
                for share in window.parts([0.25, 0.75]):
                    window.backward(share * loss_of(ddp, batch))
        assert [kind for kind, _ in count.collectives if kind != "broadcast_"] == ["allreduce_"]
        assert not count.host_reads
        with Counting() as count:
            window.step().loss  # noqa: B018
        assert not count.host_reads, "the flag of on_nonfinite is on the host"
    # A loss, and a place for overflows.
    assert count.collectives == [("exchange", 2)], "DDP's buckets are laid out after the first window"


@on_ranks(2)
def test_rebuilt_buckets_leave_no_old_ones_behind():
    """The storages kept in mid-window that hold no gradient; DDP rebuilds its buckets in the second window."""
    net = nn.Sequential(*(nn.Linear(40, 40, bias=False) for _ in range(4))).double()
    options = {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.02}
    ddp, accumulator = accumulating(DistributedDataParallel(net, **options), steps=4)
    counted, layouts = [], []
    for window in accumulator.windows([torch.ones(1, 40).double()] * 12):
        for i, x in enumerate(window):
            window.backward(ddp(x).sum())
            if i == 1:
                used = {p.grad.untyped_storage().data_ptr() for p in net.parameters()}
                counted.append(len(storages_kept(accumulator) - used))
                layouts.append(len(used))
        window.step()
    assert counted == [0, 0, 0]
    assert layouts[1] == layouts[2] > 1, "several buckets"


# The layers that each micro-batch of each rank uses, in consecutive windows
EVERYWHERE, NOWHERE = [["012", "012"]] * 2, [["0", "0"]] * 2
USES = [NOWHERE, [["01", "01"], ["0", "0"]], [["0", "0"], ["0", "01"]], NOWHERE, [["01", "0"]] * 2, EVERYWHERE]


@on_ranks(2)
def test_parameter_left_out_of_the_last_backward_is_named():
    ddp, accumulator = accumulating(DistributedDataParallel(Choosing()), 0.1)
    before = weights(ddp)
    message = refused(choices_off, ddp, accumulator, [["012", "02"]] * 2)
    assert torch.equal(weights(ddp), before)
    assert "layers.1.weight, layers.1.bias took no part in the last backward" in message
    assert "find_unused_parameters=True" in message
    assert choices_off(ddp, accumulator, EVERYWHERE) <= 1e-12, "the next window is exact"


@pytest.mark.parametrize("view", [False, True], ids=["", "bucket view"])
@pytest.mark.parametrize("after", ["", "left", "dry"])
@on_ranks(2)
def test_parameters_that_some_or_no_micro_batches_use_are_exact(after, view):
    """DDP remembers which parameters took part until it reduces, and would fail on a missing gradient."""
    options = {"find_unused_parameters": True, "gradient_as_bucket_view": view}
    ddp, accumulator = accumulating(DistributedDataParallel(Choosing(), **options), 0.1)
    if after == "left":
        for item in (window := accumulator.window(choices(EVERYWHERE)[dist.get_rank()])):
            window.backward(loss_of_choice(ddp, item))
            break
    elif after == "dry":
        assert choices_off(ddp, accumulator, [EVERYWHERE[0], []]) <= 1e-12
    for uses in USES:
        assert choices_off(ddp, accumulator, uses) <= 1e-12, uses


REFUSED = {
    "frozen early": "wrapped 6 trainable parameters and the model has 5 now",
    "frozen late": "0.0.weight is not trained as it was when DDP wrapped the model",
    "thawed late": "0.0.weight is not frozen as it was when DDP wrapped the model",
    "in backward": "steps inside backward",
    "in its hook": "steps inside backward",
    "its group": "over a ProcessGroup, which torch.distributed does not know, as in torchft, and counts need ranks "
    "that stay: give DDP a group of torch.distributed",
}


@on_ranks(2)
def test_models_that_cannot_accumulate_are_refused():
    found = {}
    for what in REFUSED:
        module = trunk()
        module[0][0].weight.requires_grad_(what != "thawed late")
        if what == "in backward":
            from torch.distributed.optim import _apply_optimizer_in_backward

            _apply_optimizer_in_backward(SGD, module.parameters(), {"lr": 0.1})
        ddp = DistributedDataParallel(module)
        if what == "in its hook":
            zero = ZeroRedundancyOptimizer(ddp.parameters(), SGD, lr=0.1, overlap_with_ddp=True)
            with patch.object(dist, "get_backend", lambda *_: "nccl"):  # torch refuses to make it for gloo
                ddp.register_comm_hook(None, hook_with_zero_step(default_hooks.allreduce_hook, ddp, zero))
        if what == "its group":
            ddp.process_group = dist.ProcessGroup(0, 1)
        if what == "frozen early":
            module[0][0].weight.requires_grad_(False)
        if "late" not in what:
            found[what] = refused(Accumulator, ddp, SGD(ddp.parameters(), lr=0.1))
            continue
        accumulator = Accumulator(ddp, SGD(ddp.parameters(), lr=0.1))
        module[0][0].weight.requires_grad_(what == "thawed late")
        found[what] = refused(accumulator.window, [make_batch(2, seed=0)])
    assert {what: said for what, said in found.items() if REFUSED[what] not in said} == {}
