"""update(): a micro-batch that does not fit or an error in the loss undoes the window on all ranks."""

import contextlib
import itertools
import random
import weakref
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Adam

from distaccum import Accumulator, DistaccumError
from distaccum.runs.memory import FIRST_WAIT, MicroBatchSize, is_out_of_memory, largest_sample
from tests.support.counting import Counting
from tests.support.engines import COALESCES, KINDS, wrapped
from tests.support.problems import join, make_batch, make_net_without_router
from tests.support.ranks import on_ranks
from tests.support.windows import (
    accumulating,
    error,
    freed_by_counts,
    gradient_of,
    hooked,
    loss_of,
    refused,
    set_weights,
    weights,
)


def raising(error: Exception) -> Any:
    def hook(_: torch.Tensor) -> None:
        raise error

    return hook


class Limited:
    """A loss that runs out of memory above `limit` samples, at the given place."""

    def __init__(self, model: nn.Module, limit: float, where: str = "forward") -> None:
        self.model, self.limit, self.where = model, limit, where
        self.sizes: list[int] = []

    def __call__(self, batch: Any) -> torch.Tensor:
        self.sizes.append(len(batch["x"]))
        too_large = torch.OutOfMemoryError("CUDA out of memory. Tried") if self.sizes[-1] > self.limit else None
        if too_large and self.where == "forward":
            raise too_large
        outputs = self.model(batch["x"])
        return (hooked(outputs, raising(too_large)) if too_large else outputs).square().mean()


def make(model: nn.Module | None = None, lr: float = 1.0, **options: Any) -> Any:
    return accumulating(model or make_net_without_router(), lr, **options)


def exact(batches: list[Any]) -> torch.Tensor:
    """The gradient of the one big batch at the first weights: a step with lr=1."""
    return gradient_of(make_net_without_router(), join(batches))


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("micro_batch_size", [13, "auto"])
def test_micro_batch_that_does_not_fit_is_cut_smaller_and_the_size_is_remembered(where, micro_batch_size):
    model, accumulator = make(micro_batch_size=micro_batch_size)
    batch = make_batch(13, seed=1)
    loss_fn = Limited(model, 4, where)
    before = weights(model)
    update = accumulator.update(batch, loss_fn)
    assert update.stepped and update.counts == {"samples": 13}
    assert loss_fn.sizes == [13, 6, 3, 3, 3, 4]
    assert error(before - weights(model), exact([batch])) <= 1e-12
    model, other = make(micro_batch_size=micro_batch_size)
    other.load_state_dict(accumulator.state_dict())
    loss_fn = Limited(model, 4)
    other.update(make_batch(12, seed=2), loss_fn)
    assert loss_fn.sizes == [4, 4, 4]


class Random(nn.Module):
    """Uses dropout, running statistics, a buffer that it assigns, and numbers from `random`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(nn.Linear(30, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1)).double()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = self.seen + 1
        return self.layers(x.flatten(1)) * random.uniform(0.5, 1.0)


def seeded() -> nn.Module:
    torch.manual_seed(5)
    random.seed(5)
    return Random()


@pytest.mark.filterwarnings("ignore:layers.1 normalise")
def test_buffers_count_only_micro_batches_that_succeeded():
    for first_size, counted in ((4, 9), (12, 12)):  # a size that fits at once, and one that is halved
        model, accumulator = make(seeded(), 0.1, micro_batch_size=first_size)
        for i in range(3):
            accumulator.update(make_batch(12, seed=i), Limited(model, 5, "backward" if i else "forward"))
        assert model.layers[1].num_batches_tracked == model.seen == counted


@pytest.mark.filterwarnings("ignore:layers.1 normalise")
@pytest.mark.parametrize("kind", [KeyError, KeyboardInterrupt])
def test_undone_window_changes_no_later_bit(kind):
    ends = []
    for fails in (False, True):
        model = seeded()
        accumulator = Accumulator(model, Adam(model.parameters(), lr=0.1), micro_batch_size=4)
        for i in range(3):
            calls: list[int] = []

            def loss_fn(batch, calls=calls, fails=fails, model=model):
                calls.append(0)
                outputs = model(batch["x"])
                if fails and len(calls) == 3:
                    raise kind
                return outputs.square().mean()

            with pytest.raises(kind) if fails else contextlib.nullcontext():
                accumulator.update(make_batch(12, seed=i), loss_fn)
            if fails:
                accumulator.update(make_batch(12, seed=i), loss_fn)
        ends.append(model.state_dict())
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def test_out_of_memory_errors_are_recognised_and_no_others():
    with pytest.raises(RuntimeError) as host:
        torch.empty(2**50)
    with pytest.raises(MemoryError) as python:
        bytearray(1 << 62)
    wrapped = ValueError("while compiling")
    wrapped.__cause__ = torch.OutOfMemoryError()
    handle = RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`")
    for one in (host.value, python.value, wrapped, RuntimeError("CUDA error: out of memory"), handle):
        assert is_out_of_memory(one)
    for one in (RuntimeError("shapes differ"), KeyError("out of memory"), ValueError("out of memory")):
        assert not is_out_of_memory(one)


@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, KeyError])
def test_failed_attempt_frees_its_tensors(kind):
    model, accumulator = make(micro_batch_size="auto")
    held: list[Any] = []

    def loss_fn(batch: Any) -> torch.Tensor:
        if len(batch["x"]) > 4:
            activations = torch.ones(1000)
            held.append(weakref.ref(activations))
            raise kind
        assert all(one() is None for one in held)  # before the smaller size is tried
        return loss_of(model, batch)

    with freed_by_counts():
        with contextlib.suppress(KeyError):
            accumulator.update(make_batch(13, seed=0), loss_fn)
        assert held and held[-1]() is None


def test_size_recovers_up_to_the_given_number():
    fit = MicroBatchSize(most=10)
    assert fit.ran_out(40) and fit.size == 10  # on another rank, which may cut larger
    assert fit.ran_out(10) and fit.size == 5  # another program used the memory for a while
    seen = set()
    for _ in range(20 * FIRST_WAIT):
        seen.add(fit.size)
        fit.succeeded(fit.size, 0, parts=4)
    assert sorted(seen)[:2] == [5, 7] and max(seen) == 10


def test_learned_size_yields_to_another_micro_batch_size():
    model, small = make(lr=0.0, micro_batch_size=2)
    small.update(make_batch(8, seed=0), Limited(model, 9))
    for asked, sizes in ((4, [4, 4]), ("auto", [8])):
        _, larger = make(model, 0.0, micro_batch_size=asked)
        larger.load_state_dict(small.state_dict())
        loss_fn = Limited(model, 9)
        larger.update(make_batch(8, seed=0), loss_fn)
        assert loss_fn.sizes == sizes


def test_retry_leaves_the_scaler_as_found():
    model = make_net_without_router().float()
    scaler = GradScaler("cpu", init_scale=256.0, growth_interval=3)
    _, accumulator = make(model, micro_batch_size="auto", scaler=scaler)
    batch = make_batch(8, seed=0, dtype=torch.float32)
    accumulator.update(batch, lambda part: Limited(model, 8)(part) * 0)
    at_start = scaler.state_dict()
    before = weights(model)
    seen = []

    def loss_fn(batch: Any) -> torch.Tensor:
        seen.append((scaler.get_scale(), scaler.state_dict()))
        return Limited(model, 3, "backward")(batch)

    accumulator.update(batch, loss_fn)
    assert len(seen) > 4 and all(one == (256.0, at_start) for one in seen)
    assert scaler.state_dict() == {**at_start, "_growth_tracker": 2}
    assert error(before - weights(model), exact([{"x": batch["x"].double()}])) <= 1e-6


def places_of_a_window(model: nn.Module, accumulator: Accumulator) -> Iterator[str]:
    yield "planning"
    window = accumulator.window([torch.ones(2, 3)])
    yield "beginning"
    for x in window:
        loss = model(x).mean()
        yield "reducing backward"
        window.backward(loss)
    yield "step"
    window.step()  # DDP lays its buckets out anew


@pytest.mark.parametrize("where", ["planning", "beginning", "reducing backward", "step"])
@on_ranks(2)
def test_lost_rank_is_recognised_by_a_failed_collective(where):
    """Rank 1 leaves, and the group is unusable afterwards."""
    group = dist.new_group(timeout=timedelta(seconds=3))
    net = nn.Sequential(nn.Linear(3, 1), nn.BatchNorm1d(1)) if where == "beginning" else nn.Linear(3, 1)
    model, accumulator = accumulating(DistributedDataParallel(net, process_group=group), 0.1, batchnorm="ignore")
    places = places_of_a_window(model, accumulator)
    if dist.get_rank() == 1:
        assert where in places
        return
    with pytest.raises(DistaccumError, match="rank 0 lost contact with the"):
        list(places)


BUG, NO_MEMORY, EVERY_RANK = "a bug", "CUDA out of memory.", -1
FAULTS = list(itertools.product((BUG, NO_MEMORY), ("loss", "backward")))


def leaked(model: Any) -> list[str]:
    if hasattr(model, "save_checkpoint"):
        return []
    found = [name for name, p in model.named_parameters() if p.grad is not None and bool(p.grad.any())]
    return found + ["the flag"] * (not getattr(model, "require_backward_grad_sync", True))


OPTIONS = {
    "DDP": {"micro_batch_size": 3},
    "DDP, auto": {"micro_batch_size": "auto"},
    "DDP, every": {"micro_batch_size": 3, "sync": "every"},
    "FSDP2": {"micro_batch_size": 3},
    "FSDP2, gathered": {"micro_batch_size": 3, "sync": "gathered"},
    "FSDP2, auto": {"micro_batch_size": "auto"},
    # Stage 2 reduces in each backward.
    **{f"ZeRO {stage}": {"micro_batch_size": 3} for stage in range(3 if COALESCES else 2)},
}


def scenes() -> Iterator[tuple[str, list[int], tuple[str, str], tuple[int, int]]]:
    """The options, the ranks' batches, the fault and its place.

    No reduction starts before all ranks have succeeded, at any micro-batch until a size is proven, and then up to the
    last loss. Under FSDP2 with sync='last' a given size counts as proven: the last backward reduces at once.
    """
    unproven = [(0, 1), (1, 1), (1, 2), (0, 4)]
    for kind in OPTIONS:
        if kind == "FSDP2":
            places = [(EVERY_RANK, n) for n in (1, 2, 3, 8)]
        else:
            places = [(1, 2), (0, 6), (0, 6), (1, 2)] if "ZeRO" in kind else unproven
        whole = kind == "DDP"  # which has every fault at every place
        for fault, at in itertools.product(FAULTS, unproven) if whole else zip(FAULTS, places, strict=True):
            yield kind, [7, 7] if kind == "FSDP2" else [7, 5], fault, at
        if kind in ("DDP", "DDP, every", "FSDP2, gathered"):
            for text, at in itertools.product((BUG, NO_MEMORY), [(0, 10), (1, 6), (1, 8)]):
                yield kind, [9, 6], (text, "loss"), at  # proven
        if "DDP" in kind:
            yield kind, [7, -3], (NO_MEMORY, "loss"), (0, 2)  # beside a rank without samples


@pytest.mark.parametrize(("kind", "sizes", "fault", "at"), list(scenes()), ids=str)
@on_ranks(2)
def test_fault_of_some_ranks_is_undone_on_all_ranks(kind, sizes, fault, at):
    """`at`: the rank, and its n-th micro-batch."""
    rank, (text, where) = dist.get_rank(), fault
    name = kind.partition(",")[0]
    dtype = KINDS[name].dtype
    model, optimizer, read = wrapped(name, make_net_without_router().to(dtype))
    accumulator = Accumulator(model, optimizer, **OPTIONS[kind])
    calls, message, wrong, leaks = 0, "", [], []

    def loss_fn(batch: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        here = at[0] in (rank, EVERY_RANK) and calls == at[1]
        error = torch.OutOfMemoryError(text) if text == NO_MEMORY else RuntimeError(text)
        if here and where == "loss":
            raise error
        outputs = model(batch["x"])
        return (hooked(outputs, raising(error)) if here else outputs).square().mean()

    for i in range(4):
        batches = [make_batch(max(0, size + i), seed=10 * i + r, dtype=dtype) for r, size in enumerate(sizes)]
        before, plain = read(model).double(), make_net_without_router()
        for attempt in range(2):
            try:
                update = accumulator.update(batches[rank], loss_fn)
                break
            except (DistaccumError, RuntimeError) as caught:
                message = f"{type(caught).__name__}: {caught}"
                assert attempt == 0
                leaks += leaked(model)
        assert update.index == i
        set_weights(plain, before)
        wrong.append(error(before - read(model).double(), gradient_of(plain, {"x": join(batches)["x"].double()})))
        leaks += leaked(model)
    assert max(wrong) <= (1e-5 if "ZeRO" in kind else 1e-10) and not leaks
    if kind == "FSDP2":  # whose forwards communicate, so nobody votes
        assert message.startswith(f"DistaccumError: rank {rank} failed where the other ranks cannot hear of it before")
        assert text in message
    elif text == NO_MEMORY:
        assert not message
    elif at[0] in (rank, EVERY_RANK):
        assert message == f"RuntimeError: {text}"
    else:
        assert message.startswith(f"DistaccumError: rank {at[0]} failed in update ") and text in message


@on_ranks(2)
def test_update_adds_one_small_collective():
    """Two windows of an unproven size, which the library reduces after an agreement, then windows of a proven size.

    Then the samples of rank 1 alone are longer than any that have fitted, until these are proven too.
    """
    model, accumulator = make(DistributedDataParallel(make_net_without_router()), 0.1, micro_batch_size=2)
    # The plan, the vote, the record; and which gradients ranks have, where the library reduces.
    for i, exchanges in enumerate([4, 4, 3, 3, 4, 4, 3]):
        x = make_batch(8, seed=i)["x"]
        x = torch.cat([x, x], 1) if i > 3 and dist.get_rank() == 1 else x
        with Counting() as counting:
            accumulator.update({"x": x}, partial(loss_of, model)).loss  # noqa: B018
            names = [name for name, _ in counting.take()]
        num_gathered = exchanges + (i == 0)  # the first plan compares ranks
        assert (names.count("exchange"), sum("allreduce" in name for name in names)) == (num_gathered, 1)


@on_ranks(2)
def test_single_sample_that_does_not_fit_is_an_error_on_all_ranks():
    rank = dist.get_rank()
    model, accumulator = make(DistributedDataParallel(make_net_without_router()), micro_batch_size="auto")
    before = weights(model)
    said = refused(accumulator.update, make_batch(4, seed=rank), Limited(model, 0 if rank == 1 else 9))
    assert torch.equal(weights(model), before)
    batches = [make_batch(4, seed=10 + r) for r in range(2)]
    accumulator.update(batches[rank], Limited(model, 9))
    assert error(before - weights(model), exact(batches)) <= 1e-12
    assert "1 sample does not fit into the memory of rank 1" in said


def test_largest_sample_of_a_list_is_its_largest_tensor():
    assert largest_sample([{"boxes": [torch.ones(2), torch.ones(7)]}, {"boxes": [torch.ones(3)]}]) == 7
