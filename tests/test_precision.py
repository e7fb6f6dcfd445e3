"""Loss scaling, clipping, and gradients that are not finite."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.distributed as dist
from engines import full_gradient, full_weights, fully_sharded
from problems import error, gradient, gradient_of_trunk, join, loss_of, make_batch, run_window, trunk, weights
from torch import nn
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import StepLR
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from distaccum import Accumulator, DistaccumError
from distaccum.job import MOST_SKIPS
from distaccum.norms import clip, total_norm
from distaccum.scaling import forget, stamp_of_scale

BATCHES = [make_batch(size, seed=i) for i, size in enumerate([2, 3, 1])]


def scaled(model=None, optimizer=None, **options):
    model = model or trunk()
    optimizer = optimizer or SGD(model.parameters(), lr=0.1)
    scaler = GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    return model, scaler, Accumulator(model, optimizer, scaler=scaler, **options)


def test_step_is_refused_after_the_scale_was_set_in_mid_window():
    model, scaler, accumulator = scaled()
    before = weights(model)
    window = run_window(accumulator.window(BATCHES), model)
    scaler.update(2.0**5)
    with pytest.raises(DistaccumError, match=r"scale was updated while this window was open.*GradScaler of its own"):
        window.step()
    assert torch.equal(weights(model), before)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert run_window(accumulator.window(BATCHES), model).step().stepped
    assert error(before - weights(model), 0.1 * gradient_of_trunk(BATCHES)) <= 1e-12


def test_window_after_a_load_has_the_loaded_scale():
    model, _, accumulator = scaled()
    before, state = weights(model), accumulator.state_dict()
    state["scaler"]["scale"] = 16.0
    run_window(accumulator.window(BATCHES), model)  # and dropped
    accumulator.load_state_dict(state)
    run_window(accumulator.window(BATCHES), model).step()
    assert error(before - weights(model), 0.1 * gradient_of_trunk(BATCHES)) <= 1e-12


def scale_updated_under_a_dry_rank():
    scaler = GradScaler("cpu", init_scale=8.0, growth_interval=1)
    one, two = (DistributedDataParallel(trunk()) for _ in range(2))
    first, second = (Accumulator(ddp, SGD(ddp.parameters(), lr=0.1), scaler=scaler) for ddp in (one, two))
    for accumulator, ddp in ((first, one), (second, two)):
        assert run_window(accumulator.window(BATCHES), ddp).step().stepped
    window = run_window(first.window(BATCHES), one)
    other = run_window(second.window(BATCHES if dist.get_rank() == 0 else []), two)
    assert window.step().stepped
    with pytest.raises(DistaccumError, match="scale was updated while this window was open"):
        other.step()


def test_dry_rank_also_refuses_a_scale_that_was_updated(ranks):
    ranks(2).run(scale_updated_under_a_dry_rank)


def test_scaler_changes_no_gradient():
    model, scaler, accumulator = scaled()
    before = weights(model)
    window = run_window(accumulator.window(BATCHES), model)
    assert error(gradient(model), 2.0**10 * gradient_of_trunk(BATCHES)) <= 1e-12
    update = window.step()
    assert error(before - weights(model), 0.1 * gradient_of_trunk(BATCHES)) <= 1e-12
    assert update.loss == pytest.approx(loss_of(trunk(), join(BATCHES)).item(), rel=1e-12)
    assert scaler.get_scale() == 2.0**10
    run_window(accumulator.window(BATCHES), model).step()
    assert scaler.get_scale() == 2.0**11, "one update() per window"


def test_caller_may_unscale_to_read_the_gradient():
    model = trunk()
    optimizer = SGD(model.parameters(), lr=0.1)
    _, scaler, accumulator = scaled(model, optimizer)
    before = weights(model)
    for _ in range(2):  # the second time after an abandoned window
        window = run_window(accumulator.window(BATCHES), model)
        scaler.unscale_(optimizer)
        assert error(gradient(model), gradient_of_trunk(BATCHES)) <= 1e-12
        window.discard()
    run_window(accumulator.window(BATCHES), model).step()
    assert error(before - weights(model), 0.1 * gradient_of_trunk(BATCHES)) <= 1e-12


def test_forgotten_optimizer_can_be_unscaled_again_by_the_same_scale():
    model = trunk()
    optimizer, scaler = SGD(model.parameters(), lr=0.1), GradScaler("cpu", init_scale=8.0, growth_interval=1)
    scaler.scale(loss_of(model, BATCHES[0])).backward()
    scaler.unscale_(optimizer)
    forget(scaler, [optimizer])
    scaler.unscale_(optimizer)
    assert scaler.get_scale() == 8.0


def test_stamp_of_the_scale_changes_with_the_scale_alone():
    model = trunk()
    optimizer, scaler = SGD(model.parameters(), lr=0.1), GradScaler("cpu", init_scale=8.0)
    assert stamp_of_scale(scaler) is None, "no scale has been made"
    scaler.scale(loss_of(model, BATCHES[0])).backward()
    before = stamp_of_scale(scaler)
    scaler.scale(loss_of(model, BATCHES[1])).backward()
    scaler.step(optimizer)
    assert stamp_of_scale(scaler) == before is not None
    scaler.update()
    assert stamp_of_scale(scaler) != before


def poison(batch, value=math.nan):
    return {**batch, "x": batch["x"] * value}


def test_overflow_skips_the_update():
    model = trunk()
    optimizer = SGD(model.parameters(), lr=0.1)
    schedule = StepLR(optimizer, 1)
    _, scaler, accumulator = scaled(model, optimizer, on_nonfinite="skip", scheduler=schedule)
    before = weights(model)
    update = run_window(accumulator.window([*BATCHES, poison(BATCHES[0])]), model).step()
    assert (update.stepped, update.reason) == (False, "the scaled gradients overflowed")
    assert torch.equal(weights(model), before)
    assert (scaler.get_scale(), schedule.last_epoch) == (2.0**9, 0)
    update = run_window(accumulator.window(BATCHES), model).step()
    assert update.stepped
    assert error(before - weights(model), 0.1 * gradient_of_trunk(BATCHES)) <= 1e-12


class Overflowing(torch.autograd.Function):
    """Finite forward, infinite backward, as with a too large loss scale in float16."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * math.inf


def test_policy_raise_applies_to_the_loss_alone_with_a_scaler():
    model, scaler, accumulator = scaled()
    window = accumulator.window(BATCHES)
    for batch in window:
        window.backward(Overflowing.apply(model(batch["x"])).square().mean())
    assert window.step().reason == "the scaled gradients overflowed"
    before = weights(model)
    with pytest.raises(DistaccumError, match="the loss of this window is not finite"):
        run_window(accumulator.window([poison(BATCHES[0])]), model).step()
    scale = scaler.get_scale()
    assert run_window(accumulator.window(BATCHES), model).step().stepped
    assert scaler.get_scale() == scale, "an error leaves the scaler as it was"
    assert error(before - weights(model), 0.1 * gradient_of_trunk(BATCHES)) <= 1e-12


def test_optimizers_that_share_a_scaler_are_unscaled_once_each():
    one, two = trunk(), trunk()
    optimizers = [SGD(one.parameters(), lr=0.1), SGD(two.parameters(), lr=0.2)]
    scaler = GradScaler("cpu", init_scale=2.0**10, growth_interval=1)
    accumulator = Accumulator([one, two], optimizers, scaler=scaler)
    before = weights(one)
    window = accumulator.window(BATCHES)
    for batch in window:
        window.backward(loss_of(one, batch) + loss_of(two, batch))
    assert window.step().stepped
    assert error(before - weights(one), 0.1 * gradient_of_trunk(BATCHES)) <= 1e-12
    assert error(before - weights(two), 0.2 * gradient_of_trunk(BATCHES)) <= 1e-12
    assert scaler.get_scale() == 2.0**11
    kept = weights(one), weights(two)
    window = accumulator.window(BATCHES)
    for batch in window:  # only the second overflows, but neither steps
        window.backward(loss_of(one, batch) + Overflowing.apply(two(batch["x"])).square().mean())
    assert not window.step().stepped
    assert torch.equal(weights(one), kept[0])
    assert torch.equal(weights(two), kept[1])
    assert scaler.get_scale() == 2.0**10


def test_optimizer_without_gradients_is_unscaled_in_a_later_window():
    model = trunk()
    optimizer = SGD(model[1].parameters(), lr=1.0)
    accumulator = Accumulator(model, optimizer, scaler=GradScaler("cpu"))
    window = accumulator.window(BATCHES)
    for batch in window:
        window.backward(model[0](batch["x"]).square().mean())
    assert window.step().stepped
    before = weights(model[1])
    run_window(accumulator.window(BATCHES), model).step()
    plain = trunk()
    loss_of(plain, join(BATCHES)).backward()
    assert error(before - weights(model[1]), gradient(plain[1])) <= 1e-12


def test_disabled_scaler_changes_nothing():
    model = trunk()
    accumulator = Accumulator(model, SGD(model.parameters(), lr=0.1), scaler=GradScaler("cpu", enabled=False))
    before = weights(model)
    assert run_window(accumulator.window(BATCHES), model).step().stepped
    assert error(before - weights(model), 0.1 * gradient_of_trunk(BATCHES)) <= 1e-12


def test_scaler_is_part_of_the_state():
    model, _, accumulator = scaled(on_nonfinite="skip")
    run_window(accumulator.window([poison(BATCHES[0])]), model).step()
    _, other_scaler, other = scaled()
    other.load_state_dict(accumulator.state_dict())
    assert (other.index, other_scaler.get_scale()) == (1, 2.0**9)
    plain = Accumulator(model, SGD(model.parameters(), lr=0.1))
    with pytest.raises(ValueError, match="the state holds a scaler and this accumulator has none"):
        plain.load_state_dict(accumulator.state_dict())


def scaler_on_ranks(layout):
    ddp = DistributedDataParallel(trunk())
    scaler = GradScaler("cpu", init_scale=2.0**10)
    accumulator = Accumulator(ddp, SGD(ddp.parameters(), lr=0.1), scaler=scaler, on_nonfinite="skip")
    before = weights(ddp)
    rank = dist.get_rank()
    mine = [[poison(BATCHES[0])], [BATCHES[1]]] if layout == "one overflows" else [[], BATCHES]
    update = run_window(accumulator.window(mine[rank]), ddp).step()
    step = before - weights(ddp)
    return update.stepped, scaler.get_scale(), error(step, 0.1 * gradient_of_trunk(BATCHES)), float(step.norm())


def test_overflow_on_one_rank_skips_the_update_on_all(ranks):
    for stepped, scale, _, moved in ranks(2).run(scaler_on_ranks, "one overflows"):
        assert (stepped, scale, moved) == (False, 2.0**9, 0.0)


def test_rank_without_a_loss_keeps_its_scaler_synchronised(ranks):
    for stepped, scale, wrong, _ in ranks(2).run(scaler_on_ranks, "dry from the start"):
        assert (stepped, scale) == (True, 2.0**10)
        assert wrong <= 1e-12


# Clipping


@pytest.mark.parametrize("of_norm", [1e-3, 0.9, 1.1, math.inf])
def test_gradient_of_all_models_is_clipped_once(of_norm):
    one, two = trunk(), trunk()
    before = torch.cat([weights(one), weights(two)])
    reference = nn.ModuleList([copy.deepcopy(one), copy.deepcopy(two)])
    big = join(BATCHES)
    (loss_of(reference[0], big) + 2 * loss_of(reference[1], big)).backward()
    max_norm = of_norm * float(gradient(reference).norm())
    norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), max_norm)
    optimizers = [SGD(one.parameters(), lr=1.0), SGD(two.parameters(), lr=1.0)]
    accumulator = Accumulator([one, two], optimizers, max_norm=max_norm)
    window = accumulator.window(BATCHES)
    for batch in window:
        window.backward(loss_of(one, batch) + 2 * loss_of(two, batch))
    update = window.step()
    assert update.grad_norm == pytest.approx(float(norm), rel=1e-12)
    assert error(before - torch.cat([weights(one), weights(two)]), gradient(reference)) <= 1e-12


def test_norm_is_not_taken_by_default():
    model = trunk()
    accumulator = Accumulator(model, SGD(model.parameters(), lr=0.1))
    assert run_window(accumulator.window(BATCHES), model).step().grad_norm is None


def test_clipping_comes_after_unscaling():
    model, _, accumulator = scaled(max_norm=1e-3)
    before = weights(model)
    update = run_window(accumulator.window(BATCHES), model).step()
    assert update.grad_norm == pytest.approx(float(gradient_of_trunk(BATCHES).norm()), rel=1e-12)
    assert float((before - weights(model)).norm()) == pytest.approx(0.1 * 1e-3, rel=1e-2)


# Not finite


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_policy_raise_names_the_loss_and_changes_nothing(value):
    model = trunk()
    optimizer = AdamW(model.parameters(), lr=0.1)
    accumulator = Accumulator(model, optimizer)
    before = weights(model)
    window = run_window(accumulator.window([*BATCHES, poison(BATCHES[0], value)]), model)
    message = (
        r"the gradient of this window is not finite \(the loss of micro-batch 3 on rank 0 is nan; "
        r"first in 0.0.weight, 0.0.bias, 0.2.weight and 3 more\)"
    )
    with pytest.raises(DistaccumError, match=message):
        window.step()
    assert torch.equal(weights(model), before)
    assert not optimizer.state
    run_window(accumulator.window(BATCHES), model)
    assert error(gradient(model), gradient_of_trunk(BATCHES)) <= 1e-12


def test_policy_skip_leaves_weights_and_optimizer_unchanged():
    model = trunk()
    optimizer = AdamW(model.parameters(), lr=0.1)
    schedule = StepLR(optimizer, 1)
    accumulator = Accumulator(model, optimizer, on_nonfinite="skip", scheduler=schedule, max_norm=1.0)
    run_window(accumulator.window(BATCHES), model).step()
    before, state = weights(model), copy.deepcopy(optimizer.state_dict())
    update = run_window(accumulator.window([poison(BATCHES[0])]), model).step()
    assert (update.index, update.stepped) == (1, False)
    assert update.reason.startswith(
        "a gradient is not finite (the loss of micro-batch 0 on rank 0 is nan; first in 0.0."
    )
    assert torch.equal(weights(model), before)
    for mine, theirs in zip(optimizer.state_dict()["state"].values(), state["state"].values(), strict=True):
        assert all(torch.equal(mine[key], theirs[key]) for key in theirs)
    assert schedule.last_epoch == 1


def test_policy_ignore_steps_with_nonfinite_gradients():
    model = trunk()
    accumulator = Accumulator(model, SGD(model.parameters(), lr=0.1), on_nonfinite="ignore")
    assert run_window(accumulator.window([poison(BATCHES[0])]), model).step().stepped
    assert weights(model).isnan().any()


def test_nonfinite_gradient_raises_before_the_callers_step():
    model = trunk()
    accumulator = Accumulator(model)
    with pytest.raises(DistaccumError, match="not finite"):
        run_window(accumulator.window([poison(BATCHES[0])]), model)


def test_large_finite_gradients_are_clipped_to_the_norm():
    """Only their sum of squares overflows: they are clipped to a norm of 1, not to 0."""
    model = nn.Linear(4, 1, bias=False)
    accumulator = Accumulator(model, SGD(model.parameters(), lr=1.0), max_norm=1.0)
    before = weights(model)
    window = accumulator.window([torch.full((2, 4), 1e30)])
    for batch in window:
        window.backward(model(batch).mean())
    update = window.step()
    assert update.grad_norm == pytest.approx(2e30)
    assert float((before - weights(model)).norm()) == pytest.approx(1.0)


def wrap_trunk(kind):
    return DistributedDataParallel(trunk()) if kind == "DDP" else fully_sharded(parts=False)(trunk(), 0.1)[0]


def one_rank_is_poisoned(kind, on_nonfinite, where):
    model = wrap_trunk(kind)
    accumulator = Accumulator(model, SGD(model.parameters(), lr=0.1), on_nonfinite=on_nonfinite)
    before = full_weights(model)
    seen = []
    for _ in range(2):
        window = accumulator.window(BATCHES)
        for i, batch in enumerate(window):
            is_bad = (dist.get_rank(), i) == (1, 1)
            loss = loss_of(model, poison(batch) if is_bad and where == "loss" else batch)
            window.backward(Poisoned.apply(loss) if is_bad and where == "backward" else loss)
        try:
            seen.append(window.step().reason)
        except DistaccumError as caught:
            seen.append(str(caught))
    unchanged = torch.equal(full_weights(model), before)
    run_window(accumulator.window(BATCHES), model)
    return seen, unchanged, error(full_gradient(model), gradient_of_trunk(BATCHES))


class Poisoned(torch.autograd.Function):
    @staticmethod
    def forward(ctx, loss):
        return loss.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * math.nan


@pytest.mark.parametrize("where", ["loss", "backward"])
@pytest.mark.parametrize("on_nonfinite", ["raise", "skip"])
@pytest.mark.parametrize("kind", ["DDP", "FSDP2"])
def test_ranks_agree_on_the_place_of_a_nan(ranks, kind, on_nonfinite, where):
    """A nonfinite loss is found in its micro-batch; a NaN from a backward has no known place in a loop."""
    (seen, unchanged, wrong), (other, also_unchanged, also_wrong) = ranks(2).run(
        one_rank_is_poisoned, kind, on_nonfinite, where
    )
    assert seen == other
    assert all(
        text.startswith("the gradient of this window" if on_nonfinite == "raise" else "a gradient") for text in seen
    )
    places = {
        "loss": ["(the loss of micro-batch 1 on rank 1 is nan; first in 0.0.weight, 0.0.bias, "] * 2,
        "backward": ["(every loss is finite, so it came up in a backward or in the reduction; first in 0.0"] * 2,
    }[where]
    assert all(place in text for place, text in zip(places, seen, strict=True)), seen
    assert unchanged and also_unchanged
    assert max(wrong, also_wrong) <= 1e-12


def test_long_run_of_skips_is_an_error():
    model = trunk()
    accumulator = Accumulator(model, SGD(model.parameters(), lr=0.1), on_nonfinite="skip")
    for i in range(MOST_SKIPS - 1):
        assert not run_window(accumulator.window([poison(BATCHES[0])]), model).step().stepped
        if i == 3:
            accumulator.load_state_dict(accumulator.state_dict())  # loading keeps the count
    with pytest.raises(
        DistaccumError, match=r"50 updates in a row were skipped, the last because a gradient is not fin"
    ):
        run_window(accumulator.window([poison(BATCHES[0])]), model).step()
    run_window(accumulator.window(BATCHES), model)
    assert error(gradient(model), gradient_of_trunk(BATCHES)) <= 1e-12


def overflow_after_the_reduction():
    """An overflow on one rank after the reduction, which DDP does not spread."""
    ddp = DistributedDataParallel(trunk())
    scaler = GradScaler("cpu", init_scale=2.0**10)
    accumulator = Accumulator(ddp, SGD(ddp.parameters(), lr=0.1), scaler=scaler)
    before = weights(ddp)
    window = run_window(accumulator.window(BATCHES), ddp)
    if dist.get_rank() == 1:
        next(ddp.parameters()).grad.view(-1)[0] = math.inf
    update = window.step()
    return update.stepped, scaler.get_scale(), torch.equal(weights(ddp), before), update.loss


def test_ranks_agree_on_found_inf(ranks):
    (one, other) = ranks(2).run(overflow_after_the_reduction)
    assert one == other
    assert one[:3] == (False, 2.0**9, True) and math.isfinite(one[3])


def test_sparse_gradients_are_clipped():
    model = nn.Embedding(10, 3, sparse=True)
    accumulator = Accumulator(model, SGD(model.parameters(), lr=1.0), max_norm=1e-2)
    before = model.weight.detach().clone()
    window = accumulator.window([torch.tensor([1, 2, 2]), torch.tensor([5])])
    for batch in window:
        window.backward(model(batch).square().sum(1).mean())
    update = window.step()
    assert update.grad_norm > 1e-2
    assert float((before - model.weight.detach()).norm()) == pytest.approx(1e-2, rel=1e-3)


class Multiplied(TorchDispatchMode):
    """Counts the multiplications of gradients in place."""

    def __init__(self):
        super().__init__()
        self.num = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.num += operation.overloadpacket.__name__ in ("_foreach_mul_", "mul_")
        return operation(*args, **(kwargs or {}))


def fused_sgd(parameters):
    return SGD(parameters, lr=0.5, momentum=0.9, fused=True)


def foreach_sgd(parameters):
    return SGD(parameters, lr=0.5, momentum=0.9, foreach=True)


def fused_adam(parameters):
    return AdamW(parameters, lr=0.01, fused=True)


@pytest.mark.parametrize(("max_norm", "clips"), [(0.01, True), (100.0, False)])
def test_gradient_within_the_norm_is_not_multiplied_by_one(max_norm, clips):
    model = trunk()
    accumulator = Accumulator(model, SGD(model.parameters(), lr=0.5, foreach=False), max_norm=max_norm)
    window = run_window(accumulator.window(BATCHES), model)
    with Multiplied() as seen:
        window.step()
    assert (seen.num > 0) == clips


@pytest.mark.parametrize("optimizer", [fused_sgd, fused_adam, foreach_sgd])
def test_overflow_steps_no_fused_or_foreach_optimizer(optimizer):
    model = trunk().float()
    scaler = GradScaler("cpu", init_scale=2.0**10)
    accumulator = Accumulator(model, optimizer(model.parameters()), scaler=scaler, max_norm=1.0)
    batches = [{**batch, "x": batch["x"].float()} for batch in BATCHES]
    before = weights(model)
    window = run_window(accumulator.window(batches), model)
    next(model.parameters()).grad[0] = math.inf
    assert window.step().reason == "the scaled gradients overflowed"
    assert torch.equal(weights(model), before)
    assert scaler.get_scale() == 2.0**9
    assert run_window(accumulator.window(batches), model).step().stepped
    assert not torch.equal(weights(model), before)


def test_gradient_unscaled_by_the_caller_is_not_unscaled_again():
    (one, two) = (trunk().float(), trunk().float())
    for model, looks in ((one, True), (two, False)):
        optimizer = fused_sgd(model.parameters())
        scaler = GradScaler("cpu", init_scale=2.0**10)
        accumulator = Accumulator(model, optimizer, scaler=scaler, max_norm=0.1)
        for _ in range(2):
            window = run_window(accumulator.window([{**b, "x": b["x"].float()} for b in BATCHES]), model)
            if looks:
                scaler.unscale_(optimizer)
            window.step()
    assert error(weights(one), weights(two)) <= 1e-6


def test_norms_of_half_precision_are_taken_in_float32():
    model = nn.Linear(300, 300).to(torch.bfloat16)
    accumulator = Accumulator(model, SGD(model.parameters(), lr=0.1), max_norm=math.inf)
    window = accumulator.window([torch.randn(4, 300, dtype=torch.bfloat16)])
    for x in window:
        window.backward(model(x).float().square().mean())
    exact = torch.cat([p.grad.double().flatten() for p in model.parameters()]).norm().item()
    assert window.step().grad_norm == pytest.approx(exact, rel=1e-5)


def test_norms_need_no_private_kernel(monkeypatch):
    def clipped():
        gradients = [torch.arange(6.0), torch.ones(2, 2, dtype=torch.bfloat16)]
        norm = total_norm(gradients, 2.0)
        clip(gradients, 1.0, norm)
        return [norm, total_norm(gradients, math.inf), *gradients]

    expected = clipped()
    monkeypatch.delattr(torch, "_foreach_norm")
    assert all(
        one.dtype == other.dtype and torch.equal(one, other) for one, other in zip(clipped(), expected, strict=True)
    )


def test_overflow_of_another_user_of_the_scaler_counts():
    model, other = trunk().float(), trunk().float()
    scaler = GradScaler("cpu", init_scale=2.0**10)
    own = SGD(other.parameters(), lr=0.1)
    accumulator = Accumulator(model, fused_sgd(model.parameters()), scaler=scaler)
    for i in range(3):
        scaler.scale(loss_of(other, {**BATCHES[0], "x": BATCHES[0]["x"].float()})).backward()
        if i == 2:
            next(other.parameters()).grad[0] = math.inf
        scaler.step(own)
        run_window(accumulator.window([{**b, "x": b["x"].float()} for b in BATCHES]), model).step()
        own.zero_grad()
    assert scaler.get_scale() == 2.0**9


@pytest.mark.parametrize("count", [2.0**-18, 1.1e6, 2.0**26], ids=["overflows", "subnormal", "underflows"])
def test_share_that_float16_cannot_hold_is_refused(count):
    model = nn.Linear(1, 1, bias=False)
    accumulator = Accumulator(
        model, SGD(model.parameters(), lr=0.1), reduction="sum_to_mean", count=lambda _: count / 3
    )
    window = accumulator.window([torch.ones(1, 1)])
    with pytest.raises(ValueError, match=r"loss in torch.float16, which rounds its share, .* in float32"):
        for x in window:
            window.backward(model(x).sum().half())
    window = accumulator.window([torch.ones(1, 1)])
    for x in window:
        window.backward(model(x).sum())
    assert model.weight.grad.item() == pytest.approx(3 / count, rel=1e-6)


def test_scaler_lifts_a_share_that_float16_cannot_hold():
    model = nn.Linear(1, 1, bias=False)
    scaler = GradScaler("cpu", init_scale=2.0**20)
    accumulator = Accumulator(
        model, SGD(model.parameters(), lr=1.0), reduction="sum_to_mean", count=lambda _: 2.0**26, scaler=scaler
    )
    before = model.weight.item()
    window = accumulator.window([torch.ones(1, 1)])
    with pytest.warns(UserWarning, match="rounds its share"):
        for x in window:
            window.backward(model(x).sum().half())
    assert window.step().stepped
    assert before - model.weight.item() == pytest.approx(2.0**-26, abs=2.0**-24)


def test_search_for_a_scaled_loss_runs_no_checkpointed_forward():
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.gain, self.calls = nn.BatchNorm1d(4), nn.Parameter(torch.ones(4)), 0

        def forward(self, x):
            self.calls += 1
            return x + self.norm(x) * self.gain

    def trained(scaler):
        torch.manual_seed(0)
        block, first = Block(), nn.Linear(4, 4)
        model = nn.Sequential(first, block)
        accumulator = Accumulator(model, SGD(model.parameters(), lr=0.0), steps=2, scaler=scaler, batchnorm="ignore")
        for window in accumulator.windows([torch.randn(3, 4) for _ in range(4)]):
            for x in window:
                window.backward(checkpoint(block, first(x), use_reentrant=False).mean())
            window.step()
        return block

    plain, scaled = trained(None), trained(GradScaler("cpu", init_scale=8.0))
    assert plain.calls == scaled.calls == 8
    assert torch.equal(plain.norm.running_mean, scaled.norm.running_mean)


@pytest.mark.parametrize(
    "scale",
    [
        lambda scaler, loss: scaler.scale(loss),
        lambda scaler, loss: scaler.scale(loss.half()),
    ],
    ids=["scaled", "half"],
)
def test_loss_scaled_by_the_caller_is_refused(scale):
    model, scaler, accumulator = scaled()
    run_window(accumulator.window(BATCHES), model).step()
    window = accumulator.window(BATCHES)
    with pytest.raises(ValueError, match=r"scaler.scale\(\) has multiplied"):
        for micro_batch in window:
            window.backward(scale(scaler, loss_of(model, micro_batch)))


def test_loss_multiplied_by_another_number_is_accepted():
    model, scaler, accumulator = scaled()
    other = GradScaler("cpu", init_scale=2.0**10)
    window = accumulator.window(BATCHES)
    for micro_batch in window:
        loss = loss_of(model, micro_batch)
        window.backward(loss * torch.tensor(2.0**10) / 2.0**10 + other.scale(loss) / 2.0**10 - loss)
    window.step()
    assert scaler.get_scale() == 2.0**10


@pytest.mark.parametrize("scaler", [False, True], ids=["", "scaler"])
def test_nonfinite_weights_are_named_rather_than_the_data(scaler):
    model, _, accumulator = (
        scaled() if scaler else (model := trunk(), None, Accumulator(model, SGD(model.parameters())))
    )
    with torch.no_grad():
        model[0][2].bias[3] = math.nan
    message = (
        r"before its first backward there were weights that are not finite already, first in 0.2.bias\), on all "
        r"ranks alike; nothing was stepped and the window is discarded. Go back to a checkpoint"
    )
    window = run_window(accumulator.window(BATCHES), model)
    with pytest.raises(DistaccumError, match=message):
        window.step()
