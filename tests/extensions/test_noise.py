"""The gradient noise scale: the two norms of each update, their average, and the cost of measuring."""

import math
from collections.abc import Sequence
from itertools import permutations
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import SGD

from distaccum import Accumulator, count_samples
from distaccum.extensions import NoiseScale
from distaccum.extensions.noise import split as split_norms
from tests.support.counting import Counting
from tests.support.engines import COALESCES, FORMS, KINDS, wrapped, zero
from tests.support.inside import Norms, norms_of
from tests.support.oracle import own
from tests.support.problems import (
    CASES,
    big_batch,
    make_batch,
    make_net,
    make_net_without_router,
    micro_batches_of,
    sample_loss,
)
from tests.support.ranks import on_ranks
from tests.support.windows import accumulating, refused, run_window

UNEVEN = [[[2, 1, 3], [4, 2]], [[3], [2, 1]], [[2], [5]], [[1, 4], []]]  # by window, by rank
EVERYBODY = [[[2, 1, 3], [4, 2, 1]], [[3], [2]]]


def exact_norms(case: str, layout: Any, index: int, dtype: torch.dtype = torch.float64) -> Norms:
    """Computed by autograd from big batches in float64."""
    count = CASES[case][3]
    ranks = [micro_batches_of(layout, index, rank, dtype) for rank in range(len(layout))]
    mean = case.replace("sum_to_mean", "mean").replace("sum", "mean")
    firsts = [batches[0] for batches in ranks if batches]
    small = [float(big_batch(mean, [first])[1].square().sum()) for first in firsts]
    everything = [batch for batches in ranks for batch in batches]
    large = float(big_batch(mean, everything)[1].square().sum())
    per_sample = sum(1 / count(first) for first in firsts) / len(firsts)
    return Norms(sum(small) / len(small), per_sample, large, sum(map(count, everything)))


def difference(seen: Norms | None, exact: Norms) -> float:
    assert seen is not None
    return max(abs(one - other) / abs(other) for one, other in zip(seen, exact, strict=True))


def off(name: str, case: str, layouts: Any, parts: Sequence[float] = (1.0,), **options: Any) -> float:
    """The largest error of the windows' norms."""
    dtype = KINDS[name].dtype if name in KINDS else torch.float64
    loss_fn, how, reduction, count = CASES[case]
    options = {"reduction": reduction, "count": count, "extensions": [NoiseScale()], **options}
    uses_all = name in FORMS and "find" not in name
    net = make_net_without_router() if uses_all else make_net()
    model, optimizer, _ = wrapped(name, net.to(dtype), 0.0)
    accumulator = Accumulator(model, optimizer, **options)
    wrongs, rank = [], dist.get_rank() if dist.is_initialized() else 0
    for index, layout in enumerate(layouts):
        window = accumulator.window(micro_batches_of(layout, index, rank, dtype))
        for batch in window:
            for part in window.parts(parts) if len(parts) > 1 else parts:
                window.backward(loss_fn(model, batch, how) * part)
        wrongs.append(difference(norms_of(window.step()), exact_norms(case, layout, index, dtype)))
    return max(wrongs)


@pytest.mark.parametrize("case", CASES)
def test_norms_equal_those_of_big_batches(case):
    layouts = [[[2, 1, 3]], [[4, 1]]]
    for options in ({}, {"max_norm": 0.01}, {"on_nonfinite": "ignore"}, {"on_nonfinite": "skip"}):
        assert off("plain", case, layouts, **options) <= 1e-12


SHARDS = ("FSDP2", "FSDP2, parts", "HSDP, 2 replicas of 1 shard")
GRID = [("DDP", case, sync) for case in ("samples mean", "samples sum_to_mean") for sync in ("last", "every")]
GRID += [(name, "samples mean", "last") for name in ("DDP views", "DDP static", "DDP find")]
GRID += [(name, "samples mean", sync) for name in SHARDS for sync in KINDS[name].policies]
ZERO = ("ZeRO 0", "ZeRO 1", *(("ZeRO 2", "ZeRO 3") if COALESCES else ()))  # else they reduce in each micro-step
GRID += [(name, "samples mean", "last") for name in ("HSDP, 2 replicas of 2 shards", *ZERO)]
GRID += [("DDP", "tokens sum", "every"), ("FSDP2", "tokens sum", "last")]


@pytest.mark.parametrize(("name", "case", "sync"), GRID)
@on_ranks(lambda name, **_: 4 if "2 shards" in name else 2)
def test_norms_are_exact_on_uneven_ranks(name, case, sync):
    zero = name.startswith("ZeRO")
    layouts = EVERYBODY if zero else UNEVEN if dist.get_world_size() == 2 else [layout * 2 for layout in UNEVEN[:3]]
    assert off(name, case, layouts, sync=sync) <= (1e-5 if zero else 1e-12)
    if name in FORMS:
        assert off(name, case, EVERYBODY, (0.25, 0.75), sync=sync) <= 1e-12


@on_ranks(2)
def test_engines_that_hide_gradients_are_refused():
    from deepspeed.accelerator import get_accelerator

    measuring = {"extensions": [NoiseScale()], "on_nonfinite": "ignore"}  # which older versions need
    model, _ = zero(2)(make_net(torch.float32), 0.1)
    assert "reduces in each micro-step" in refused(Accumulator, model, sync="every", **measuring)
    get_accelerator().is_fp16_supported = lambda: True  # DeepSpeed reports False on CPUs
    half, _ = zero(1, fp16={"enabled": True, "initial_scale_power": 8})(make_net(torch.float32), 0.1)
    assert "trains in fp16" in refused(Accumulator, half, **measuring)
    flat, optimizer = KINDS["FSDP1"].wrap(make_net(torch.float32), 0.1)
    assert "which flattens parameters together; use fully_shard" in refused(Accumulator, flat, optimizer, **measuring)


@pytest.mark.parametrize("caller_steps", [True, False])
def test_norms_are_those_before_scaling_and_clipping(caller_steps):
    model, scaler = make_net(torch.float32), GradScaler("cpu", init_scale=1024.0)
    optimizer = SGD(model.parameters(), lr=0.0, fused=not caller_steps)
    options = {"scaler": scaler, "max_norm": None if caller_steps else 0.01}
    accumulator = Accumulator(model, None if caller_steps else optimizer, extensions=[NoiseScale()], **options)
    window = run_window(accumulator.window(micro_batches_of([[2, 1, 3]], 0, 0, torch.float32)), model, sample_loss)
    if caller_steps:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        scaler.step(optimizer)
        scaler.update()
    update = window.step()
    assert difference(norms_of(update), exact_norms("samples mean", [[2, 1, 3]], 0, torch.float32)) <= 1e-5


class Linear(nn.Module):
    """A sample's gradient is the sample itself."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.one, self.two = (nn.Linear(size, 1, bias=False, dtype=torch.float64) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        one, two = x.chunk(2, dim=1)
        return self.one(one) + self.two(two)


@pytest.mark.parametrize("reduction", ["mean", "sum", "sum_to_mean"])
@pytest.mark.parametrize("sizes", [[1, 3], [2, 1, 1], [3, 1]], ids=str)
def test_estimate_is_unbiased_over_all_arrangements(sizes, reduction):
    """The averages over windows with 4 of 5 samples in every order."""
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64) + 1
    trace = float(x.var(dim=0).sum())
    square = float(x.mean(dim=0).square().sum()) - trace / 5  # corrected for drawing without replacement
    model, accumulator = accumulating(Linear(3), reduction=reduction, extensions=[NoiseScale()])
    splits = []
    for order in permutations(range(5), 4):
        window = accumulator.window(x[list(order)].split(sizes))
        how = torch.mean if reduction == "mean" else torch.sum
        run_window(window, model, lambda model, samples, how=how: how(model(samples)))
        splits.append(split_norms(*norms_of(window.step())))
    means = [sum(values) / len(values) for values in zip(*splits, strict=True)]
    assert means == pytest.approx([square, trace], rel=1e-12)


COSTS = [("DDP", {}), ("FSDP2", {}), ("FSDP2", {"sync": "every"}), ("FSDP2", {"max_norm": 1.0})]


@pytest.mark.parametrize(("name", "options"), COSTS)
@on_ranks(2)
def test_measurement_adds_no_collective_and_no_wait(name, options):
    seen: list[list[Any]] = []
    for extensions in ([], [NoiseScale()]):
        model, optimizer = KINDS[name].wrap(make_net_without_router(), 0.0)
        accumulator = Accumulator(model, optimizer, extensions=extensions, **options)
        seen.append([])
        for index in range(3):
            with Counting() as count:
                window = run_window(accumulator.window(own(EVERYBODY[0], index)), model)
                in_loop = sum(count.host_reads.values())
                window.step()
            seen[-1].append(([name for name, _ in count.collectives], in_loop, sum(count.host_reads.values())))
    assert seen[0] == seen[1]


def made(**options: Any) -> tuple[nn.Module, Accumulator]:
    return accumulating(make_net(), 0.05, extensions=[NoiseScale()], **options)


def go(model: nn.Module, accumulator: Accumulator, index: int, sizes: tuple[int, ...] = (2, 1, 3)) -> Any:
    window = accumulator.window([make_batch(size, seed=10 * index + i) for i, size in enumerate(sizes)])
    return run_window(window, model, sample_loss).step()


def test_skipped_and_nonfinite_updates_do_not_count():
    for how in ("skip", "ignore"):
        model, accumulator = made(on_nonfinite=how)
        value = go(model, accumulator, 0).noise_scale
        if how == "ignore":
            saved = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        bad = make_batch(2, seed=3)
        bad["x"][0, 0, 0] = math.nan
        update = run_window(accumulator.window([bad, make_batch(1, seed=4)]), model, sample_loss).step()
        assert update.stepped == (how == "ignore") and update.noise_scale == value
        if how == "ignore":
            model.load_state_dict(saved)
        assert go(model, accumulator, 2).noise_scale not in (value, None)


@pytest.mark.parametrize(("second", "scale"), [(-1, math.inf), (1, 0.0)])
def test_noise_scale_is_infinite_without_a_signal_and_0_without_noise(second, scale):
    model, accumulator = accumulating(Linear(2), extensions=[NoiseScale()])
    ones = torch.ones(1, 4, dtype=torch.float64)
    window = run_window(accumulator.window([ones, second * ones]), model, lambda model, x: model(x).mean())
    assert window.step().noise_scale == scale


def test_averages_continue_from_a_loaded_state():
    model, accumulator = made()
    values = [go(model, accumulator, index).noise_scale for index in range(6)]
    model, accumulator = made()
    for index in range(3):
        go(model, accumulator, index)
    state, weights = accumulator.state_dict(), model.state_dict()
    other, again = made()
    other.load_state_dict(weights)
    again.load_state_dict(state)
    assert [go(other, again, index).noise_scale for index in range(3, 6)] == values[3:]


@pytest.mark.parametrize("options", [{}, {"max_norm": 0.1}, {"on_nonfinite": "ignore"}, {"reduction": "sum"}], ids=str)
def test_state_in_a_hook_after_the_weights_moved_has_the_updates_noise(options):
    net = make_net()
    optimizer = SGD(net.parameters(), lr=0.01)
    states: dict[str, Any] = {}

    def take(name: str) -> float:
        states[name] = accumulator.state_dict()["noise"]
        return 1.0

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: take("schedule") if states else 1.0)
    accumulator = Accumulator(net, optimizer, scheduler=schedule, extensions=[NoiseScale()], **options)
    optimizer.register_step_pre_hook(lambda *_: take("before") and None)
    optimizer.register_step_post_hook(lambda *_: take("after") and None)
    for index in range(2):
        before = accumulator.state_dict()["noise"]
        go(net, accumulator, index)
        after = accumulator.state_dict()["noise"]
        assert states == {"before": before, "after": after, "schedule": after} and before != after


def test_losses_that_share_a_denominator_add_up():
    model, accumulator = made(count={"a": count_samples, "b": count_samples})
    losses = lambda *given: {"a": sample_loss(*given) / 4, "b": sample_loss(*given) * 3 / 4}  # noqa: E731
    update = run_window(accumulator.window(micro_batches_of([[2, 1]], 0, 0)), model, losses).step()
    assert update.noise_scale is not None
    assert difference(norms_of(update), exact_norms("samples mean", [[2, 1]], 0)) <= 1e-12
