"""update(): a micro-batch that does not fit or an error in the loss undoes the window on all ranks."""

from __future__ import annotations

import contextlib
import gc
import math
import random
import weakref
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from engines import COALESCES, fully_sharded
from problems import error, join, loss_of, make_batch, make_net_without_router, weights
from torch import nn
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam

from distaccum import Accumulator, DistaccumError
from distaccum.runs.memory import is_out_of_memory
from distaccum.runs.snapshot import Snapshot
from distaccum.sizes import FIRST_WAIT, MicroBatchSize


class Limited:
    """A loss that runs out of memory above `limit` samples, at the given place."""

    def __init__(self, model: nn.Module, limit: float, where: str = "forward") -> None:
        self.model, self.limit, self.where = model, limit, where
        self.sizes: list[int] = []

    def __call__(self, batch: Any) -> torch.Tensor:
        size = len(batch["x"])
        self.sizes.append(size)
        if size > self.limit and self.where == "forward":
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size} GiB")
        outputs = self.model(batch["x"])
        if size > self.limit and self.where == "backward":
            outputs = OutOfMemory.apply(outputs)
        return outputs.square().mean()


class OutOfMemory(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory.")


def big_batch(net: nn.Module, batches: list[Any]) -> torch.Tensor:
    """Weights after one step of SGD with lr=1 on all samples."""
    optimizer = SGD(net.parameters(), lr=1.0)
    optimizer.zero_grad()
    loss_of(net, join(batches)).backward()
    optimizer.step()
    return weights(net)


# One process


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("micro_batch_size", [13, "auto"])
def test_micro_batch_that_does_not_fit_is_cut_smaller(where, micro_batch_size):
    model = make_net_without_router()
    accumulator = Accumulator(model, SGD(model.parameters(), lr=1.0), micro_batch_size=micro_batch_size)
    batch, loss_fn = make_batch(13, seed=1), Limited(model, 4, where)
    update = accumulator.update(batch, loss_fn)
    assert update.stepped and update.counts == {"samples": 13}
    assert loss_fn.sizes == [13, 6, 3, 3, 3, 4]
    assert error(weights(model), big_batch(make_net_without_router(), [batch])) <= 1e-12
    loss_fn.sizes.clear()
    accumulator.update(make_batch(12, seed=2), loss_fn)
    assert loss_fn.sizes == [4, 4, 4]  # the size is remembered


def test_single_sample_that_does_not_fit_is_an_error():
    model = make_net_without_router()
    accumulator = Accumulator(model, SGD(model.parameters(), lr=1.0), micro_batch_size="auto")
    before = weights(model)
    with pytest.raises(
        DistaccumError, match=r"1 sample does not fit.*rank 0: OutOfMemoryError: CUDA out of memory. Tried"
    ):
        accumulator.update(make_batch(5, seed=1), Limited(model, 0))
    assert torch.equal(weights(model), before) and all(p.grad is None for p in model.parameters())


class Random(nn.Module):
    """Uses dropout, running statistics and numbers from `random`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(nn.Linear(30, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1)).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x.flatten(1)) * random.uniform(0.5, 1.0)


@pytest.mark.filterwarnings("ignore:layers.1 normalise")
def test_batchnorm_counts_only_micro_batches_that_succeeded():
    ends = []
    for first_size in (4, 12):  # a size that fits at once, and one that is halved
        model = Random()
        accumulator = Accumulator(model, SGD(model.parameters(), lr=0.1), micro_batch_size=first_size)
        torch.manual_seed(5)
        random.seed(5)
        for i in range(3):
            accumulator.update(make_batch(12, seed=i), Limited(model, 5, "backward" if i else "forward"))
        ends.append(model.state_dict())
    for name, tensor in ends[0].items():
        # 12 is halved to 6 and to 3. These micro-batches differ from those of 4; only their number is the same.
        assert tensor.shape == ends[1][name].shape
    assert ends[0]["layers.1.num_batches_tracked"] == 9 and ends[1]["layers.1.num_batches_tracked"] == 12


@pytest.mark.filterwarnings("ignore:layers.1 normalise")
def test_undone_window_changes_no_later_bit():
    ends = []
    for fails in (False, True):
        model = Random()
        accumulator = Accumulator(model, Adam(model.parameters(), lr=0.1), micro_batch_size=4)
        torch.manual_seed(5)
        random.seed(5)
        for i in range(3):
            batch = make_batch(12, seed=i)
            if fails:
                seen = []

                def fail(micro_batch, seen=seen, model=model):
                    seen.append(micro_batch)
                    if len(seen) == 3:
                        raise KeyError("a bug")
                    return model(micro_batch["x"]).square().mean()

                with pytest.raises(KeyError, match="a bug"):
                    accumulator.update(batch, fail)
            accumulator.update(batch, lambda micro_batch, model=model: model(micro_batch["x"]).square().mean())
        ends.append(model.state_dict())
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def test_out_of_memory_errors_are_recognised_and_no_others():
    with pytest.raises(RuntimeError) as host:
        torch.empty(2**50)
    with pytest.raises(MemoryError) as python:
        bytearray(1 << 62)
    wrapped = ValueError("while compiling")
    wrapped.__cause__ = torch.OutOfMemoryError()
    for one in (host.value, python.value, wrapped, RuntimeError("CUDA error: out of memory")):
        assert is_out_of_memory(one)
    circle = KeyError("raise error from error")
    circle.__cause__ = circle
    longer = ValueError("of two")
    longer.__cause__ = RuntimeError("and back")
    longer.__cause__.__cause__ = longer
    for one in (circle, longer, RuntimeError("shapes differ"), KeyError("out of memory"), ValueError("out of memory")):
        assert not is_out_of_memory(one)


def test_failed_attempt_frees_its_tensors():
    model = make_net_without_router()
    accumulator = Accumulator(model, SGD(model.parameters(), lr=1.0), micro_batch_size="auto")
    held: list[Any] = []

    def loss_fn(batch: Any) -> torch.Tensor:
        if len(batch["x"]) > 4:
            activations = torch.ones(1000)
            held.append(weakref.ref(activations))
            raise torch.OutOfMemoryError("CUDA out of memory.")
        assert all(one() is None for one in held)  # before the smaller size is tried
        return loss_of(model, batch)

    gc.disable()
    try:
        accumulator.update(make_batch(13, seed=0), loss_fn)
    finally:
        gc.enable()
    assert held


def test_larger_sizes_are_retried_occasionally():
    fit = MicroBatchSize(most=None)
    limit, sizes = 53, []
    for _ in range(40 * FIRST_WAIT):
        length = 256
        while (largest := -(-length // -(-length // (fit.size or length)))) > limit:
            assert fit.ran_out(largest)
        sizes.append(largest)
        fit.succeeded(largest, -(-length // largest))
    assert sizes[0] == 32 and max(sizes) == 52  # 256 fits in 5 parts, not in 4 of 64


def test_size_recovers_up_to_the_given_number():
    fit = MicroBatchSize(most=10)
    assert fit.ran_out(10) and fit.size == 5  # another program used the memory for a while
    seen = set()
    for _ in range(20 * FIRST_WAIT):
        seen.add(fit.size)
        fit.succeeded(fit.size, 4)
    assert sorted(seen)[:2] == [5, 7] and max(seen) == 10


def test_learned_size_is_part_of_the_state():
    model = make_net_without_router()
    first, second = (Accumulator(model, SGD(model.parameters(), lr=0.0), micro_batch_size="auto") for _ in range(2))
    first.update(make_batch(8, seed=0), Limited(model, 1))
    second.load_state_dict(first.state_dict())
    loss_fn = Limited(model, 1)
    second.update(make_batch(8, seed=0), loss_fn)
    assert loss_fn.sizes == [1] * 8


# Ranks


def wrap(kind: str) -> nn.Module:
    net = make_net_without_router()
    if kind == "DDP":
        return DistributedDataParallel(net)
    return fully_sharded()(net, 1.0)[0]


def whole_weights(model: nn.Module) -> torch.Tensor:
    return torch.cat(
        [(p.full_tensor() if hasattr(p, "full_tensor") else p).detach().flatten() for p in model.parameters()]
    )


def error_that_sounds_like_a_lost_rank(where: str) -> list[str]:
    """Raises the caller's own errors on rank 0, in a loss or in a backward that does not reduce."""
    model = wrap("DDP")
    accumulator = Accumulator(model, SGD(model.parameters(), lr=0.1), micro_batch_size=3)
    messages = []
    for text in ("the feature store timed out", "Connection closed by peer", "Broken pipe", "the job was aborted"):

        def loss_fn(batch: Any, text: str = text) -> torch.Tensor:
            outputs = model(batch["x"])
            if dist.get_rank() == 0 and where == "loss":
                raise RuntimeError(text)
            if dist.get_rank() == 0:
                outputs.register_hook(partial(raise_error, text))
            return outputs.square().mean()

        with pytest.raises(RuntimeError) as caught:
            accumulator.update(make_batch(6, seed=0), loss_fn)
        messages.append(f"{type(caught.value).__name__}: {caught.value}")
    assert accumulator.update(make_batch(6, seed=0), lambda batch: loss_of(model, batch)).stepped
    return messages


def raise_error(text: str, _: torch.Tensor) -> None:
    raise RuntimeError(text)


@pytest.mark.parametrize("where", ["loss", "backward"])
def test_error_that_sounds_like_a_lost_rank_reaches_the_other_ranks(ranks, where):
    zero, one = ranks(2).run(error_that_sounds_like_a_lost_rank, where)
    assert [text.partition(":")[0] for text in zero] == ["RuntimeError"] * 4
    for text, heard in zip(zero, one, strict=True):
        assert heard.startswith(f"DistaccumError: rank 0 failed in update 0 ({text}); the window is undone")


def waits_for_a_lost_rank(where: str) -> str:
    """Rank 0's error after rank 1 has left, in a group that is unusable afterwards."""
    group = dist.new_group(timeout=timedelta(seconds=1))
    model = DistributedDataParallel(nn.Linear(3, 1), process_group=group)
    accumulator = Accumulator(model, SGD(model.parameters(), lr=0.1), steps=1)
    is_gone = dist.get_rank() == 1
    if is_gone and where == "planning":
        return ""
    try:
        for window in accumulator.windows([torch.ones(2, 3)]):
            for x in window:
                loss = model(x).mean()
                if is_gone:
                    return ""
                window.backward(loss)
    except DistaccumError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("where", ["planning", "reducing backward"])
def test_lost_rank_is_recognised_by_a_failed_collective(ranks, where):
    zero, _ = ranks(2).run(waits_for_a_lost_rank, where)
    assert zero.startswith("rank 0 lost contact with the other ranks")


EVERY_RANK = -1


def updates(kind: str, fault: str, at: list[int], sizes: list[int], options: dict[str, Any]) -> Any:
    """Runs updates with one fault in one rank's micro-batch; returns the message, the largest error and the leaks."""
    rank = dist.get_rank()
    model = wrap(kind)
    accumulator = Accumulator(model, SGD(model.parameters(), lr=1.0), **options)
    seen: list[int] = []
    message = ""
    trace: list[str] = []

    def loss_fn(batch: Any) -> torch.Tensor:
        seen.append(len(batch["x"]))
        here = at[0] in (rank, EVERY_RANK) and len(seen) == at[1]
        if fault.endswith("before forward") and here:
            raise KeyError("a bug") if "bug" in fault else torch.OutOfMemoryError("CUDA out of memory.")
        outputs = model(batch["x"])
        if here:
            outputs = (Bug if "bug" in fault else OutOfMemory).apply(outputs)
        return outputs.square().mean()

    wrong = []
    reference = make_net_without_router()
    for i in range(4):
        batches = [make_batch(max(0, size + i), seed=10 * i + r) for r, size in enumerate(sizes)]
        for attempt in range(2):
            try:
                update = accumulator.update(batches[rank], loss_fn)
            except (DistaccumError, KeyError) as caught:
                message = f"{type(caught).__name__}: {caught}"
                assert attempt == 0
                trace += leaked(model)
            else:
                break
        assert update.index == i
        exact = big_batch(reference, batches)
        wrong.append(error(whole_weights(model), exact))
        trace += leaked(model)
    return message, max(wrong), trace


class Bug(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise KeyError("a bug")


def leaked(model: nn.Module) -> list[str]:
    found = [name for name, p in model.named_parameters() if p.grad is not None and bool(p.grad.any())]
    if isinstance(model, DistributedDataParallel) and not model.require_backward_grad_sync:
        found.append("the flag")
    return found


KINDS = {
    "DDP": {"micro_batch_size": 3},
    "DDP, auto": {"micro_batch_size": "auto"},
    "DDP, every": {"micro_batch_size": 3, "sync": "every"},
    "FSDP2, gathered": {"micro_batch_size": 3, "sync": "gathered"},
    "FSDP2, auto": {"micro_batch_size": "auto"},
}


@pytest.mark.slow
@pytest.mark.parametrize("at", [[0, 1], [1, 1], [1, 2], [0, 4]], ids=str)
@pytest.mark.parametrize("fault", ["bug before forward", "bug in backward", "memory before forward", "in backward"])
@pytest.mark.parametrize("kind", KINDS)
def test_fault_on_one_rank_is_undone_on_all_ranks(ranks, kind, fault, at):
    """Before a size is proven, at any micro-batch: no reduction starts before all ranks have succeeded."""
    ends = ranks(2).run(updates, kind.partition(",")[0], fault, at, [7, 5], KINDS[kind])
    for rank, (message, wrong, trace) in enumerate(ends):
        assert wrong <= 1e-10 and not trace
        if "bug" in fault:
            assert message.startswith("KeyError: 'a bug'" if rank == at[0] else f"DistaccumError: rank {at[0]} failed")
        else:
            assert not message


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 2, 3, 8])
@pytest.mark.parametrize("fault", ["bug before forward", "bug in backward", "memory before forward", "in backward"])
def test_fault_on_all_ranks_is_undone_where_forwards_communicate(ranks, fault, number):
    """Under sync='last' a given size counts as proven: the last micro-batch's backward reduces at once."""
    ends = ranks(2).run(updates, "FSDP2", fault, [EVERY_RANK, number], [7, 7], {"micro_batch_size": 3})
    assert all(wrong <= 1e-10 and not trace for _, wrong, trace in ends)
    assert [message for message, *_ in ends] == ["KeyError: 'a bug'" if "bug" in fault else ""] * 2


@pytest.mark.parametrize("at", [[0, 10], [1, 6], [1, 8]], ids=str)
@pytest.mark.parametrize("fault", ["bug before forward", "memory before forward"])
@pytest.mark.parametrize("kind", ["DDP", "DDP, every", "FSDP2, gathered"])
def test_window_of_a_proven_size_is_undone_before_its_last_backward(ranks, kind, fault, at):
    ends = ranks(2).run(updates, kind.partition(",")[0], fault, at, [9, 6], KINDS[kind])
    assert all(wrong <= 1e-10 and not trace for _, wrong, trace in ends)
    assert [bool(message) for message, *_ in ends] == [fault.startswith("bug")] * 2


@pytest.mark.parametrize("kind", KINDS)
def test_fault_is_undone_beside_a_rank_without_samples(ranks, kind):
    if kind.startswith("FSDP2"):
        pytest.skip("a rank that never had a micro-batch cannot stand in")
    ends = ranks(2).run(updates, kind.partition(",")[0], "memory before forward", [0, 2], [7, -3], KINDS[kind])
    assert max(wrong for _, wrong, _ in ends) <= 1e-10


def counted(kind: str, options: dict[str, Any]) -> Any:
    from counting import Counting

    model = wrap(kind)
    accumulator = Accumulator(model, SGD(model.parameters(), lr=0.1), **options)
    seen = []
    for i in range(4):
        with Counting() as counting:
            accumulator.update(make_batch(8, seed=i), lambda batch: loss_of(model, batch)).loss  # noqa: B018
            seen.append([name for name, _ in counting.take()])
    return seen


def test_update_adds_one_small_collective(ranks):
    """Two windows of an unproven size, which the library reduces after an agreement, then windows of a proven size."""
    seen, other = ranks(2).run(counted, "DDP", {"micro_batch_size": 2})
    assert seen == other
    gathers = [names.count("allgather_") for names in seen]
    assert gathers == [2, 2, 2, 2]
    assert [sum("allreduce" in name for name in names) for names in seen] == [3, 3, 2, 2]


def test_wrong_sizes_are_refused_at_once():
    model = make_net_without_router()
    optimizer = SGD(model.parameters(), lr=0.1)
    for value in ("automatic", 2.5, 0):
        with pytest.raises((TypeError, ValueError), match="micro_batch_size="):
            Accumulator(model, optimizer, micro_batch_size=value)
    with pytest.raises(ValueError, match=r"update\(\) cuts a batch and no size was given"):
        Accumulator(model, optimizer).update(make_batch(2, seed=0), None)
    with pytest.raises(ValueError, match=r"'auto' is for update\(\)"):
        Accumulator(model, optimizer, batch_size=8, micro_batch_size="auto").windows([])
    assert math.isfinite(Accumulator(model, optimizer, steps=2).update(make_batch(3, seed=0), Limited(model, 9)).loss)


def test_learned_size_yields_to_another_micro_batch_size():
    model = make_net_without_router()
    small = Accumulator(model, SGD(model.parameters(), lr=0.0), micro_batch_size=2)
    small.update(make_batch(8, seed=0), Limited(model, 9))
    for asked in (4, "auto"):
        larger = Accumulator(model, SGD(model.parameters(), lr=0.0), micro_batch_size=asked)
        larger.load_state_dict(small.state_dict())
        loss_fn = Limited(model, 9)
        larger.update(make_batch(8, seed=0), loss_fn)
        assert loss_fn.sizes == ([4, 4] if asked == 4 else [8])


def test_assigned_buffers_are_undone():
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = make_net_without_router()
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen = self.seen + 1
            return self.net(x)

    model = Counting()
    accumulator = Accumulator(model, SGD(model.parameters(), lr=0.1), micro_batch_size="auto")
    accumulator.update(make_batch(8, seed=0), Limited(model, 4, "backward"))
    assert model.seen == 2


def test_buffers_that_were_replaced_or_deleted_are_restored():
    model = nn.Module()
    for name in ("replaced", "emptied", "deleted"):
        model.register_buffer(name, torch.zeros(2), persistent=name == "deleted")
    model.shared = nn.Module()
    model.shared.register_buffer("replaced", model.replaced)
    model.register_buffer("none", None)
    found = dict(model.named_buffers(remove_duplicate=False))
    snapshot = Snapshot([model])
    model.replaced = model.replaced + 1
    model.shared.replaced += 2
    model.emptied, model.none = None, torch.ones(1)
    del model.deleted
    snapshot.restore()
    now = dict(model.named_buffers(remove_duplicate=False))
    assert all(now[name] is one and not one.any() for name, one in found.items())
    assert list(model.state_dict()) == ["none", "deleted", "shared.replaced"]


def test_longer_samples_are_not_proven_by_shorter_ones():
    fit = MicroBatchSize(most=4)
    for _ in range(2):
        fit.succeeded(4, 2, width=100)
    assert fit.is_proven(4, 100) and fit.is_proven(2, 50)
    assert not fit.is_proven(4, 101) and not fit.is_proven(5, 100)


def test_proof_of_a_size_is_not_part_of_the_state():
    fit = MicroBatchSize(most=4)
    for _ in range(3):
        fit.succeeded(4, 2, width=100)
    restarted = MicroBatchSize(most=4)
    restarted.load(fit.state())
    fit.load(restarted.state())
    assert restarted.good == 4
    assert not restarted.is_proven(4, 100) and not fit.is_proven(4, 100)


def test_retry_leaves_the_scaler_as_found():
    model = make_net_without_router().float()
    scaler = GradScaler("cpu", init_scale=256.0, growth_interval=3)
    accumulator = Accumulator(model, SGD(model.parameters(), lr=1.0), micro_batch_size="auto", scaler=scaler)
    batches = [make_batch(8, seed=i, dtype=torch.float32) for i in range(2)]
    accumulator.update(batches[0], Limited(model, 8))
    at_start = scaler.state_dict()
    seen = []

    def loss_fn(batch: Any) -> torch.Tensor:
        seen.append((scaler.get_scale(), scaler.state_dict()))
        return Limited(model, 3, "backward")(batch)

    accumulator.update(batches[1], loss_fn)
    assert len(seen) > 4 and all(one == (256.0, at_start) for one in seen)
    assert scaler.state_dict() == {**at_start, "_growth_tracker": 2}
    expected = make_net_without_router().float()
    for batch in batches:
        big_batch(expected, [batch])
    assert error(weights(model), weights(expected)) <= 1e-6


@pytest.mark.filterwarnings("ignore:layers.1 normalise")
def test_ctrl_c_in_the_loss_undoes_the_window():
    ends = []
    for interrupted in (False, True):
        model, calls = Random(), 0
        accumulator = Accumulator(model, SGD(model.parameters(), lr=0.1), micro_batch_size=4)
        torch.manual_seed(5)
        random.seed(5)

        def loss_fn(batch: Any, model: nn.Module = model, interrupted: bool = interrupted) -> torch.Tensor:
            nonlocal calls
            calls += 1
            outputs = model(batch["x"])
            if interrupted and calls == 2:
                raise KeyboardInterrupt
            return outputs.square().mean()

        with pytest.raises(KeyboardInterrupt) if interrupted else contextlib.nullcontext():
            accumulator.update(make_batch(12, seed=0), loss_fn)
        if interrupted:
            accumulator.update(make_batch(12, seed=0), loss_fn)
        ends.append(model.state_dict())
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def sample_that_does_not_fit_on(which: int) -> str:
    rank, model = dist.get_rank(), DistributedDataParallel(make_net_without_router())
    accumulator = Accumulator(model, SGD(model.parameters(), lr=1.0), micro_batch_size="auto")
    before = weights(model)
    with pytest.raises(DistaccumError) as caught:
        accumulator.update(make_batch(4, seed=rank), Limited(model, 0 if rank == which else 9))
    assert torch.equal(weights(model), before)
    batches = [make_batch(4, seed=10 + r) for r in range(2)]
    accumulator.update(batches[rank], Limited(model, 9))
    assert error(weights(model), big_batch(make_net_without_router(), batches)) <= 1e-12
    return str(caught.value)


def test_single_sample_that_does_not_fit_is_an_error_on_all_ranks(ranks):
    for text in ranks(2).run(sample_that_does_not_fit_on, 1):
        assert "1 sample does not fit into the memory of rank 1" in text


def test_update_within_an_update_is_refused():
    model = make_net_without_router()
    accumulator = Accumulator(model, SGD(model.parameters(), lr=0.1), micro_batch_size=2)
    before, state = weights(model), torch.get_rng_state()

    def loss_fn(batch: Any) -> torch.Tensor:
        torch.rand(3)
        accumulator.update(batch, loss_fn)
        return loss_of(model, batch)

    with pytest.raises(DistaccumError, match="another window was requested while one is in its loop"):
        accumulator.update(make_batch(4, seed=0), loss_fn)
    assert torch.equal(weights(model), before) and torch.equal(torch.get_rng_state(), state)


class Expanded(nn.Module):
    """Has buffers whose elements share memory."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.register_buffer("scale", torch.ones(1).expand(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.scale


def test_expanded_buffer_to_which_nobody_can_write_is_no_obstacle():
    model = Expanded()
    accumulator, raises = Accumulator(model, SGD(model.parameters(), lr=0.1), micro_batch_size=4), [True]

    def loss_fn(batch: torch.Tensor) -> torch.Tensor:
        if raises:
            raises.pop()
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return model(batch).square().mean()

    assert accumulator.update(torch.randn(8, 3), loss_fn).micro_batches == 4
    assert accumulator.check(torch.randn(8, 3), loss_fn).equivalent


def test_update_within_inference_mode_is_refused():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3).eval())
    scaler = torch.amp.GradScaler("cpu")
    accumulator = Accumulator(model, SGD(model.parameters(), lr=0.1), micro_batch_size=2, scaler=scaler)
    x = torch.randn(4, 3)
    calls = (
        lambda: accumulator.update(x, lambda batch: model(batch).square().mean()),
        lambda: accumulator.contrast(x, model, lambda rows: (rows @ rows.T).square().mean()),
    )
    for call in calls:
        with torch.inference_mode(), pytest.raises(DistaccumError, match=r"inside torch.inference_mode\(\)"):
            call()
    for call in calls:
        assert call().stepped


def test_failed_update_keeps_nothing_alive():
    model = make_net_without_router()
    accumulator = Accumulator(model, SGD(model.parameters(), lr=0.1), micro_batch_size=2)
    held: list[Any] = []

    def loss_fn(batch: Any) -> torch.Tensor:
        activations = torch.ones(10)
        held.append(weakref.ref(activations))
        raise KeyError("a bug")

    gc.disable()
    try:
        with contextlib.suppress(KeyError):
            accumulator.update(make_batch(4, seed=0), loss_fn)
        assert held[0]() is None
    finally:
        gc.enable()


def test_error_in_the_step_discards_the_window():
    model = make_net_without_router()
    optimizer = SGD(model.parameters(), lr=0.1)
    accumulator = Accumulator(model, optimizer, micro_batch_size=2)
    hook = optimizer.register_step_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        accumulator.update(make_batch(4, seed=0), Limited(model, 9))
    assert all(p.grad is None for p in model.parameters())
    hook.remove()
    assert accumulator.update(make_batch(4, seed=0), Limited(model, 9)).stepped


@pytest.mark.parametrize("owner", ["optimizer", "caller"])
def test_nan_of_a_backward_is_named_for_each_owner_of_the_step(owner):
    model = make_net_without_router()
    optimizer = SGD(model.parameters(), lr=0.1) if owner == "optimizer" else None
    accumulator = Accumulator(model, optimizer, micro_batch_size=2)
    calls = []

    def loss_fn(batch: Any) -> torch.Tensor:
        calls.append(0)
        outputs = model(batch["x"])
        return (outputs * (outputs - outputs.detach()).sqrt()).sum()  # 0, with an infinite slope

    with pytest.raises(DistaccumError, match=r"every loss is finite, .*; first in body"):
        accumulator.update(make_batch(4, seed=0), loss_fn)
    assert len(calls) == 2  # it is not run again


def updates_on_zero(name: str, fault: str, at: list[int]) -> Any:
    """Like `updates`, on engines that own the step, in float32."""
    from engines import KINDS as ALL

    kind, rank = ALL[name], dist.get_rank()
    model, optimizer = kind.wrap(make_net_without_router().float(), 1.0)
    accumulator = Accumulator(model, optimizer, micro_batch_size=3)
    seen: list[int] = []

    def loss_fn(batch: Any) -> torch.Tensor:
        seen.append(len(batch["x"]))
        here = [rank, len(seen)] == at
        if here and fault.endswith("before forward"):
            raise KeyError("a bug") if "bug" in fault else torch.OutOfMemoryError("CUDA out of memory.")
        outputs = model(batch["x"])
        if here:
            outputs = (Bug if "bug" in fault else OutOfMemory).apply(outputs)
        return outputs.square().mean()

    message, wrong = "", []
    for i in range(4):
        before = kind.weights(model).double()
        batches = [make_batch(size, seed=10 * i + r, dtype=torch.float32) for r, size in enumerate([7, 5])]
        for _ in range(2):
            try:
                accumulator.update(batches[rank], loss_fn)
            except (DistaccumError, KeyError) as caught:
                message = f"{type(caught).__name__}: {caught}"
            else:
                break
        net = make_net_without_router()
        nn.utils.vector_to_parameters(before, net.parameters())
        batch = join(batches)
        loss_of(net, {**batch, "x": batch["x"].double()}).backward()
        exact = torch.cat([p.grad.flatten() for p in net.parameters()])
        wrong.append(error(before - kind.weights(model).double(), exact))
    return message, max(wrong)


@pytest.mark.slow
@pytest.mark.parametrize("at", [[1, 2], [0, 6]], ids=str)
@pytest.mark.parametrize("fault", ["bug before forward", "bug in backward", "memory before forward", "in backward"])
@pytest.mark.parametrize("name", ["ZeRO 0", "ZeRO 1", "ZeRO 2"])
def test_fault_on_one_rank_is_undone_under_deepspeed(ranks, name, fault, at):
    if name == "ZeRO 2" and not COALESCES:
        pytest.skip("this DeepSpeed reduces in each backward")
    for rank, (message, wrong) in enumerate(ranks(2).run(updates_on_zero, name, fault, at)):
        assert wrong <= 1e-5
        if "bug" in fault:
            assert message.startswith("KeyError: 'a bug'" if rank == at[0] else f"DistaccumError: rank {at[0]} failed")


def as_a_loop(kind: str) -> Any:
    """Trains on the same batches with split() and a loop, and with update()."""
    ends = []
    for closure in (False, True):
        torch.manual_seed(5)
        net: nn.Module = nn.Sequential(nn.Flatten(), nn.Linear(30, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)).double()
        model = DistributedDataParallel(net, static_graph=kind == "static graph")
        optimizer = SGD(model.parameters(), lr=0.1)
        accumulator = Accumulator(model, optimizer, micro_batch_size=3, batchnorm="ignore")
        for i in range(5):
            batch = make_batch(7, seed=10 * i + dist.get_rank())
            if closure:
                accumulator.update(batch, lambda batch, model=model: loss_of(model, batch))
            else:
                window = accumulator.split(batch)
                for micro_batch in window:
                    window.backward(loss_of(model, micro_batch))
                window.step()
        ends.append(torch.cat([value.double().flatten() for value in model.state_dict().values()]))
    return error(*ends)


@pytest.mark.parametrize("kind", ["buffers", "static graph"])
def test_update_equals_its_documented_loop(ranks, kind):
    """Also for buffers: DDP broadcasts them before the window, not in a forward that some rank may not run."""
    assert max(ranks(2).run(as_a_loop, kind)) <= 1e-12


def under_a_real_limit() -> Any:
    """The host's allocator refuses because of a limit on the address space."""
    import resource
    from pathlib import Path

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8))).double()
    plain = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8))).double()
    plain.load_state_dict(model.state_dict())
    batch = torch.randn(10_000, 256, dtype=torch.float64)  # 20 MB, and the same after each layer
    for part in batch.split(1000):
        (plain(part).square().mean(1).sum() / len(batch)).backward()
    sizes: list[int] = []

    def loss_fn(micro_batch: torch.Tensor) -> torch.Tensor:
        sizes.append(len(micro_batch))
        return model(micro_batch).square().mean()

    optimizer, gradients = SGD(model.parameters(), lr=0.0), []
    optimizer.register_step_pre_hook(lambda *_: gradients.extend(p.grad.clone() for p in model.parameters()))
    accumulator = Accumulator(model, optimizer, micro_batch_size="auto")
    found = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 80 * 2**20, found[1]))
    try:
        update = accumulator.update(batch, loss_fn)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, found)
    wrong = max(error(mine, p.grad) for mine, p in zip(gradients, plain.parameters(), strict=True))
    return sizes, update.counts, wrong


@pytest.mark.slow
def test_update_survives_a_real_allocator_that_refuses(ranks):
    ((sizes, counts, wrong),) = ranks(1).run(under_a_real_limit)
    assert sizes[0] == 10_000 and sizes[-1] < 6_000 and len(sizes) > 2
    assert counts == {"samples": 10_000} and wrong <= 1e-12


def one_rank_fails_to_step() -> list[str]:
    model = wrap("DDP")
    optimizer = SGD(model.parameters(), lr=0.1)
    accumulator = Accumulator(model, optimizer, micro_batch_size=3)

    def fail(*_: object) -> None:
        if accumulator.index == 3 and dist.get_rank() == 1:  # the size is proven by now
            raise ZeroDivisionError("in the optimizer")

    optimizer.register_step_pre_hook(fail)
    messages = []
    for i in range(5):
        try:
            accumulator.update(make_batch(6, seed=i), lambda batch: loss_of(model, batch))
        except (ZeroDivisionError, DistaccumError) as error:
            messages.append(f"{type(error).__name__}: {error}")
    return messages


def test_error_in_one_ranks_step_stops_all_ranks_before_the_next_window(ranks):
    zero, one = ranks(2).run(one_rank_fails_to_step)
    assert one[0] == "ZeroDivisionError: in the optimizer"
    assert zero[0].startswith("DistaccumError: ranks disagree on the update's index (rank 0: 4, rank 1: 3)")
    assert one[1] == zero[0]
