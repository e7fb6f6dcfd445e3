"""Running statistics pooled over a window (batchnorm="pool"), frozen statistics, and GroupNorm instead."""

from __future__ import annotations

import copy
import pickle
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from engines import FSDP2_RUNS_ON_CPU
from problems import error, gradient
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint

from distaccum import Accumulator, DistaccumError
from distaccum.batchnorm import freeze, to_groupnorm

SHAPES = {nn.BatchNorm1d: (4,), nn.BatchNorm2d: (4, 3, 2), nn.BatchNorm3d: (4, 2, 1, 3)}


def samples(size: int, seed: int, shape: tuple[int, ...] = (4,)) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 2 * torch.randn(size, *shape, generator=generator, dtype=torch.float64) + seed


class Normalised(nn.Module):
    """The layer is first, so its inputs do not depend on how the batch is cut."""

    def __init__(self, kind: Any = nn.BatchNorm1d, momentum: float | None = 0.1) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.layer = kind(4, momentum=momentum)
        self.out = nn.Linear(4, 2)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.layer(x).flatten(2).mean(2) if x.ndim > 2 else self.layer(x)).square().mean()


def buffers(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).double().abs().max()) for name in one)


def pooled(model: nn.Module, **options: Any) -> Accumulator:
    return Accumulator(model, SGD(model.parameters(), lr=0.0), batchnorm="pool", **options)


def run(accumulator: Accumulator, model: nn.Module, micro_batches: list[Tensor]) -> Any:
    window = accumulator.window(micro_batches)
    for x in window:
        window.backward(model(x))
    return window.step()


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("kind", SHAPES)
def test_pooled_statistics_equal_one_forward_of_all_samples(kind, momentum):
    model, whole = Normalised(kind, momentum), Normalised(kind, momentum)
    accumulator = pooled(model)
    for i, sizes in enumerate([(2, 5, 1 + len(SHAPES[kind])), (7, 2)]):
        batch = samples(sum(sizes), i, SHAPES[kind])
        run(accumulator, model, list(batch.split(sizes)))
        whole(batch)
    assert difference(buffers(model), buffers(whole)) <= 1e-14
    assert int(model.layer.num_batches_tracked) == 2 and model.layer.momentum == momentum
    assert not model.layer._forward_hooks and not model.layer._forward_pre_hooks


def test_unstepped_window_leaves_the_statistics_unchanged():
    model = Normalised()
    accumulator = pooled(model, on_nonfinite="skip", micro_batch_size=3)
    before = buffers(model)
    for x in (window := accumulator.window([samples(3, 1), samples(3, 2)])):
        window.backward(model(x))
        break
    assert difference(buffers(model), before) == 0
    assert not run(accumulator, model, [samples(3, 1), samples(3, 2) * float("nan")]).stepped
    assert difference(buffers(model), before) == 0
    with pytest.raises(KeyError):
        accumulator.update(samples(5, 1), lambda x: model(x) + {}["a bug"])
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        run(accumulator, model, [samples(3, 1), samples(1, 1)])
    assert difference(buffers(model), before) == 0 and model.layer.momentum == 0.1
    run(accumulator, model, [samples(3, 1), samples(4, 2)])
    whole = Normalised()
    whole(torch.cat([samples(3, 1), samples(4, 2)]))
    assert difference(buffers(model), buffers(whole)) <= 1e-14


def test_statistics_count_each_training_forward_once():
    """Recomputed activations do not count, nor do forwards after backward, in eval mode or outside the loop."""
    model, whole = Normalised(), Normalised()
    accumulator = pooled(model)
    window = accumulator.window(micro_batches := [samples(3, 1), samples(4, 2)])
    for x in window:
        model.eval()
        model(x)
        model.train()
        window.backward(checkpoint(model, x, use_reentrant=False))
        with torch.no_grad():
            model(x)
    window.step()
    whole(torch.cat(micro_batches))
    assert difference(buffers(model), buffers(whole)) <= 1e-14
    outside = buffers(model)
    model(samples(3, 3))
    assert difference(buffers(model), outside) > 1e-3  # as in torch


def test_layer_used_twice_pools_both_inputs():
    model, whole = Normalised(), Normalised()
    model.spare, whole.spare = (nn.BatchNorm1d(4, momentum=None).double() for _ in range(2))
    accumulator = pooled(model)
    first, second = [samples(3, 1), samples(2, 2)], [samples(3, 3), samples(2, 4)]
    window = accumulator.window(list(zip(first, second, strict=True)))
    for one, other in window:
        window.backward(model(one) + model(other))
    window.step()
    whole(torch.cat([*first, *second]))
    assert difference(buffers(model), buffers(whole)) <= 1e-14


def test_update_and_contrast_count_each_sample_once():
    model, whole = Normalised(), Normalised()
    accumulator, tried = pooled(model, micro_batch_size="auto"), []

    def loss_fn(x: Tensor) -> Tensor:
        loss = model(x)
        tried.append(len(x))
        if len(x) > 4:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return loss

    accumulator.update(samples(8, 1), loss_fn)
    assert tried == [8, 4, 4]
    accumulator.contrast(samples(8, 2), lambda x: model.out(model.layer(x)), lambda r: (r @ r.T).square().mean())
    whole(samples(8, 1))
    whole(samples(8, 2))
    assert difference(buffers(model), buffers(whole)) <= 1e-14


def test_resumed_window_keeps_its_statistics():
    micro_batches, ends = [samples(3, i) for i in range(3)], []
    for pause in (False, True):
        model = Normalised()
        accumulator = pooled(model)
        window = accumulator.window(micro_batches)
        for x in window:
            window.backward(model(x))
            if pause and window.num_done == 2:
                state, weights = accumulator.state_dict(), copy.deepcopy(model.state_dict())
                break
        if pause:
            model = Normalised()
            model.load_state_dict(weights)
            accumulator = pooled(model)
            accumulator.load_state_dict(state)
            window = accumulator.window(micro_batches)
            for x in window:
                window.backward(model(x))
        window.step()
        ends.append(buffers(model))
    assert difference(*ends) == 0


class Outer(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def compiled(where: str) -> nn.Module:
    model = Normalised()
    inner = model.out if where == "beside" else model.layer if where == "the layer" else model
    if where == "its forward":
        model.forward = torch.compile(model.forward, backend="eager")  # type: ignore[method-assign]
    elif where in ("below, in place", "the layer", "beside"):
        inner.compile(backend="eager")
    elif where == "above, in place":
        outer = Outer(model)
        outer.compile(backend="eager")
        return outer
    else:
        inner = torch.compile(model, backend="eager")
    return Outer(inner if where == "below" else model) if where != "top" else inner


@pytest.mark.parametrize(
    "where", ["top", "below", "below, in place", "above, in place", "the layer", "its forward", "beside"]
)
def test_compiled_module_with_a_batchnorm_layer_is_refused(where):
    if where == "beside":
        assert pooled(compiled(where))
        return
    with pytest.raises(
        ValueError, match=r"torch\.compile of (inner|inner.layer|the model), which does not run the hooks"
    ):
        pooled(compiled(where))


def calls(model: nn.Module, x: Tensor) -> Tensor:
    return model(x)


@pytest.mark.filterwarnings("ignore")  # torch's own, from tracing a window
@pytest.mark.parametrize("is_warm", [False, True])
def test_compiled_function_that_calls_the_model_is_exact_or_refused(is_warm):
    torch._dynamo.reset()
    model, whole = Normalised(), Normalised()
    call = torch.compile(partial(calls, model), backend="eager")
    accumulator, batch, before = pooled(model, micro_batch_size=3), samples(9, 1), buffers(model)
    if is_warm:
        call(batch[:3])
        model.load_state_dict({**model.state_dict(), **before})
        with pytest.raises(DistaccumError, match=r"was not seen: a compiled function called it, which does not run"):
            accumulator.update(batch, call)
        assert difference(buffers(model), before) == 0 and accumulator.index == 0
    else:
        accumulator.update(batch, call)
        whole(batch)
        assert difference(buffers(model), buffers(whole)) <= 1e-14


def test_copy_of_the_model_in_mid_window_has_its_own_statistics():
    model, batch = Normalised(), samples(6, 1)
    accumulator, whole, expected = pooled(model, micro_batch_size=3), Normalised(), Normalised()
    window = accumulator.split(batch)
    for i, x in enumerate(window):
        window.backward(model(x))
        if i == 0:
            copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    window.step()
    whole(batch)
    expected(batch)
    assert difference(buffers(model), buffers(whole)) <= 1e-14
    for one in copies:
        one(batch)
        assert difference(buffers(one), buffers(expected)) == 0


def test_model_without_running_statistics_is_accepted():
    assert pooled(nn.Linear(2, 2)) and pooled(nn.BatchNorm1d(2, track_running_stats=False))


def test_ctrl_c_in_a_forward_restores_the_statistics():
    model = Normalised()
    accumulator = pooled(model, micro_batch_size=2)
    before = buffers(model)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        for x in accumulator.split(samples(4, 1)):
            model.layer.register_forward_pre_hook(interrupt)
            model(x)
    assert model.layer.momentum == 0.1 and difference(buffers(model), before) == 0
    assert model.layer._buffers["running_mean"] is model.layer.running_mean


def test_accumulators_on_one_model_restore_its_statistics():
    model = Normalised()
    one, other = pooled(model), pooled(model)
    before = buffers(model)
    x = samples(4, 1)
    first, second = one.window([x]), other.window([x])
    for _ in first:
        for _ in second:
            model(x)
            break
        break
    assert model.layer.momentum == 0.1 and difference(buffers(model), before) == 0


class Renorm(nn.BatchNorm1d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.running_mean


def test_layer_with_its_own_forward_is_refused():
    with pytest.raises(ValueError, match="with Renorm, whose forward is not torch's"):
        pooled(Renorm(3))


def test_layer_called_by_keyword_without_a_batch_count_is_pooled():
    model, whole = Normalised(), Normalised()
    model.layer.num_batches_tracked = None
    accumulator, batch = pooled(model, micro_batch_size=3), samples(6, 1)
    window = accumulator.split(batch)
    for x in window:
        window.backward(model.out(model.layer(input=x)).square().mean())
    window.step()
    whole(batch)
    assert error(model.layer.running_mean, whole.layer.running_mean) <= 1e-14


def test_layer_in_a_loss_over_pairs_sees_the_whole_batch():
    for how in ("pool", "ignore"):
        model, whole = Normalised(), Normalised()
        accumulator = Accumulator(model, SGD(model.parameters(), lr=0.0), micro_batch_size=3, batchnorm=how)
        accumulator.contrast(samples(8, 1), model.out, lambda r, m=model: m.layer(r.repeat(1, 2)).square().sum())
        whole.layer(whole.out(samples(8, 1)).repeat(1, 2))
        assert difference(buffers(model), buffers(whole)) <= 1e-14


def test_frozen_batchnorm_is_exact():
    model = Normalised()
    model(samples(9, 1))
    model.zero_grad()
    assert freeze(model) == ["layer"] and model.training
    whole, batch = copy.deepcopy(model), samples(7, 2)
    accumulator = Accumulator(model, steps=3)  # must not warn
    window = accumulator.split(batch)
    for x in window:
        window.backward(model(x))
    whole(batch).backward()
    assert error(gradient(model), gradient(whole)) <= 1e-12
    assert difference(buffers(model), buffers(whole)) == 0
    window.step()


def test_groupnorm_in_place_of_batchnorm_is_exact():
    model = Normalised(nn.BatchNorm2d)
    with torch.no_grad():
        model.layer.weight.uniform_()
    weight = model.layer.weight
    assert isinstance(to_groupnorm(model, per_group=2).layer, nn.GroupNorm)
    assert model.layer.weight is weight and model.layer.num_groups == 2
    whole, batch = copy.deepcopy(model), samples(7, 2, (4, 3, 2))
    accumulator = Accumulator(model, steps=3)
    window = accumulator.split(batch)
    for x in window:
        window.backward(model(x))
    whole(batch).backward()
    assert error(gradient(model), gradient(whole)) <= 1e-12
    window.step()
    with pytest.raises(TypeError, match="got a BatchNorm1d itself"):
        to_groupnorm(nn.BatchNorm1d(3))


# Ranks

LAYOUTS = [[(3, 4), (2,)], [(2, 2), (5, 3, 2)], [(), (4, 2)]]  # windows: sizes by rank


class Synchronised:
    """Stands for torch's, which needs an accelerator: normalises by the statistics of all ranks' inputs."""

    def forward(self: Any, x: Tensor) -> Tensor:
        sums = torch.stack([x.detach().sum(0), x.detach().square().sum(0), x.new_full((x.shape[1],), len(x))])
        dist.all_reduce(sums)
        mean, number = sums[0] / sums[2], sums[2, 0]
        variance = sums[1] / sums[2] - mean.square()
        with torch.no_grad():
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(variance * number / (number - 1), self.momentum)
            self.num_batches_tracked += 1
        return (x - mean) / (variance + self.eps).sqrt() * self.weight + self.bias


def pooled_over_ranks(wrapper: str, layouts: Any) -> float:
    rank, model = dist.get_rank(), Normalised()
    whole: Any = Normalised()
    if wrapper == "FSDP2":
        from torch.distributed.fsdp import fully_shard

        wrapped = fully_shard(model)
    else:
        wrapped = DistributedDataParallel(model)
        if wrapper == "SyncBatchNorm":  # DDP accepts it only on a GPU
            nn.SyncBatchNorm.forward = Synchronised.forward
            model.layer.__class__ = nn.SyncBatchNorm
    accumulator = pooled(wrapped)
    for i, layout in enumerate(layouts):
        everyone = [[samples(n, 10 * i + 3 * r + j) for j, n in enumerate(sizes)] for r, sizes in enumerate(layout)]
        run(accumulator, wrapped, everyone[rank])
        whole(torch.cat([x for of_rank in everyone for x in of_rank]))
    return difference(buffers(model), buffers(whole))


@pytest.mark.parametrize(
    ("wrapper", "layouts"),
    [
        ("DDP", LAYOUTS),
        ("SyncBatchNorm", [[(3, 4), (2, 5)], [(2,), (6,)]]),
        pytest.param(
            "FSDP2", LAYOUTS[:2], marks=pytest.mark.skipif(not FSDP2_RUNS_ON_CPU, reason="not on CPU in torch 2.6")
        ),
    ],
)
def test_pooled_statistics_cover_all_ranks(ranks, wrapper, layouts):
    assert max(ranks(2).run(pooled_over_ranks, wrapper, layouts)) <= 1e-13


class WithoutHooks(Normalised):
    """It calls the layer as a compiled function does: no hook runs."""

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.layer.forward(x)).square().mean()


def layer_that_is_not_seen_on_one_rank() -> str:
    ddp = DistributedDataParallel(WithoutHooks())
    accumulator = Accumulator(ddp, SGD(ddp.parameters(), lr=0.1), batchnorm="pool", micro_batch_size=3)
    batch = samples(6 if dist.get_rank() == 0 else 0, 1)
    with pytest.raises(DistaccumError) as caught:
        accumulator.update(batch, ddp)
    return str(caught.value)


def test_unseen_layer_on_one_rank_of_an_update_is_an_error_on_all(ranks):
    own, other = ranks(2).run(layer_that_is_not_seen_on_one_rank)
    assert "was not seen" in own and other.startswith("rank 0 failed in update 0")
