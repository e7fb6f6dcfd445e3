"""Loss scaling, clipping, and gradients that are not finite."""

import math

import pytest
import torch
from torch import nn
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW

from distaccum import Accumulator, DistaccumError, Extension
from distaccum.job import MOST_SKIPS
from tests.support.counting import Counting
from tests.support.engines import fully_sharded
from tests.support.problems import BATCHES, accumulating_trunk, assert_next_is_exact, gradient_of_trunk, trunk
from tests.support.ranks import on_ranks
from tests.support.windows import accumulating, error, gradient, hooked, loss_of, run_window, weights

NARROW = [{**batch, "x": batch["x"].float()} for batch in BATCHES]


def scaled(**options):
    scaler = GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    model, accumulator = accumulating_trunk(scaler=scaler, **options)
    return model, scaler, accumulator


def steps_exactly(accumulator, model, before):
    """Runs a window; asserts that the weights have moved by its exact gradient."""
    update = run_window(accumulator.window(BATCHES), model).step()
    assert update.stepped
    assert error(before - weights(model), 0.1 * gradient_of_trunk(BATCHES)) <= 1e-12
    return update


def test_step_is_refused_after_the_scale_was_set_in_mid_window():
    model, scaler, accumulator = scaled()
    before = weights(model)
    window = run_window(accumulator.window(BATCHES), model)
    scaler.update(2.0**5)
    with pytest.raises(DistaccumError, match=r"scale was updated while this window was open.*GradScaler of its own"):
        window.step()
    assert torch.equal(weights(model), before)
    assert all(parameter.grad is None for parameter in model.parameters())
    steps_exactly(accumulator, model, before)


def test_window_after_a_load_has_the_loaded_scale():
    model, scaler, accumulator = scaled(on_nonfinite="skip")
    before, state = weights(model), accumulator.state_dict()
    state["scaler"]["scale"] = 16.0
    run_window(accumulator.window(BATCHES), model)  # and dropped
    accumulator.load_state_dict(state)
    assert scaler.get_scale() == 16.0
    steps_exactly(accumulator, model, before)
    with pytest.raises(ValueError, match="the state holds a scaler and this accumulator has none"):
        accumulating_trunk()[1].load_state_dict(accumulator.state_dict())


def poison(batch):
    return {**batch, "x": batch["x"] * math.nan}


def test_policy_raise_applies_to_the_loss_alone_with_a_scaler():
    model, scaler, accumulator = scaled()
    window = run_window(accumulator.window(BATCHES), lambda x: hooked(model(x), lambda g: g * math.inf))
    assert window.step().reason == "the scaled gradients overflowed"
    before = weights(model)
    with pytest.raises(DistaccumError, match="the loss of this window is not finite"):
        run_window(accumulator.window([poison(BATCHES[0])]), model).step()
    scale = scaler.get_scale()
    steps_exactly(accumulator, model, before)
    assert scaler.get_scale() == scale, "an error leaves the scaler as it was"


def test_optimizers_that_share_a_scaler_are_unscaled_once_each():
    one, two = trunk(), trunk()
    optimizers = [SGD(one.parameters(), lr=0.1), SGD(two.parameters(), lr=0.2)]
    scaler = GradScaler("cpu", init_scale=2.0**10, growth_interval=1)
    accumulator = Accumulator([one, two], optimizers, scaler=scaler)
    before = weights(one)
    for by in (1.0, math.inf):  # then only the second overflows, but neither steps
        window = accumulator.window(BATCHES)
        run_window(window, two, lambda two, x, by=by: loss_of(one, x) + hooked(loss_of(two, x), lambda g: g * by))
        assert window.step().stepped == (by == 1.0)
        assert error(before - weights(one), 0.1 * gradient_of_trunk(BATCHES)) <= 1e-12
        assert error(before - weights(two), 0.2 * gradient_of_trunk(BATCHES)) <= 1e-12
        assert scaler.get_scale() == (2.0**11 if by == 1.0 else 2.0**10)


def test_gradient_whose_squares_overflow_is_taken_for_a_nonfinite_one():
    """A limit: all of its elements are finite, and their sum of squares is not."""
    model, accumulator = accumulating(nn.Linear(4, 1, bias=False), 1.0, max_norm=1.0)
    window = run_window(accumulator.window([torch.full((2, 4), 1e30)]), model, lambda model, x: model(x).mean())
    with pytest.raises(DistaccumError, match=r"or as the squares of its elements were added up\), on all"):
        window.step()


def test_norms_of_half_precision_are_taken_in_float32():
    model, accumulator = accumulating(nn.Linear(300, 300).to(torch.bfloat16), 0.1, max_norm=math.inf)
    window = accumulator.window([{"x": torch.randn(4, 300, dtype=torch.bfloat16)}])
    run_window(window, lambda x: model(x).float())
    exact = torch.cat([p.grad.double().flatten() for p in model.parameters()]).norm().item()
    assert window.step().grad_norm == pytest.approx(exact, rel=1e-5)


@pytest.mark.parametrize(("optimizer", "option"), [(SGD, "fused"), (AdamW, "fused"), (SGD, "foreach")])
def test_overflow_steps_no_fused_or_foreach_optimizer(optimizer, option):
    model = trunk().float()
    scaler = GradScaler("cpu", init_scale=2.0**10)
    steps = optimizer(model.parameters(), lr=0.1, **{option: True})
    accumulator = Accumulator(model, steps, scaler=scaler, max_norm=1.0)
    before = weights(model)
    window = run_window(accumulator.window(NARROW), model)
    next(model.parameters()).grad[0] = math.inf
    assert window.step().reason == "the scaled gradients overflowed"
    assert torch.equal(weights(model), before)
    assert scaler.get_scale() == 2.0**9
    assert run_window(accumulator.window(NARROW), model).step().stepped
    assert not torch.equal(weights(model), before)


def test_gradient_unscaled_by_the_caller_is_not_unscaled_again():
    (one, two) = (trunk().float(), trunk().float())
    for model, looks in ((one, True), (two, False)):
        optimizer = SGD(model.parameters(), lr=0.5, momentum=0.9, fused=True)
        scaler = GradScaler("cpu", init_scale=2.0**10)
        accumulator = Accumulator(model, optimizer, scaler=scaler, max_norm=0.1)
        for _ in range(2):
            window = run_window(accumulator.window(NARROW), model)
            if looks:
                scaler.unscale_(optimizer)
            window.step()
    assert error(weights(one), weights(two)) <= 1e-6


class ByNorm(Extension):
    """Skips an update whose norm is more than `most`."""

    def __init__(self, most):
        self.most, self.norms = most, []

    def judge(self, window, gradient):
        self.norms.append(gradient.norm)
        return f"the norm is {gradient.norm:.3g}" if gradient.norm > self.most else None


@on_ranks(2)
def test_norm_that_extensions_judge_is_the_whole_gradients_and_costs_no_second_reduction():
    exact = gradient_of_trunk(BATCHES)
    size = exact.norm().item()
    for kind in ("DDP", "FSDP2"):
        for options in ({}, {"max_norm": 0.5 * size}, {"on_nonfinite": "ignore"}):
            sent = []
            for judges in ([], [ByNorm(2 * size)], [ByNorm(2 * size), ByNorm(0.5 * size)]):
                model = DistributedDataParallel(trunk()) if kind == "DDP" else fully_sharded(parts=False)(trunk(), 1)[0]
                accumulator = Accumulator(model, SGD(model.parameters(), lr=0.1), extensions=judges, **options)
                before = weights(model)
                window = run_window(accumulator.window(BATCHES), model)
                with Counting() as count:
                    update = window.step()
                sent.append(len(count.collectives))
                assert [judge.norms for judge in judges] == [[pytest.approx(size, rel=1e-12)]] * len(judges)
                moved = 0.1 * exact * (0 if len(judges) == 2 else 0.5 if "max_norm" in options else 1)
                assert (before - weights(model) - moved).norm() <= 1e-6 * size
                assert update.reason == (f"the norm is {size:.3g}" if len(judges) == 2 else None)
            assert sent[1] - sent[0] == sent[2] - sent[0] == (kind == "FSDP2" and "on_nonfinite" in options), sent


def test_long_run_of_skips_is_an_error():
    model, accumulator = accumulating_trunk(on_nonfinite="skip")
    for i in range(MOST_SKIPS - 1):
        assert not run_window(accumulator.window([poison(BATCHES[0])]), model).step().stepped
        if i == 3:
            accumulator.load_state_dict(accumulator.state_dict())  # loading keeps the count
    with pytest.raises(DistaccumError, match=r"50 updates in a row were skipped, the last because a gradient is not f"):
        run_window(accumulator.window([poison(BATCHES[0])]), model).step()
    assert_next_is_exact(accumulator, model)


@pytest.mark.parametrize("scaler", [False, True], ids=["", "scaler"])
def test_nonfinite_weights_are_named_rather_than_the_data(scaler):
    model, accumulator = scaled()[::2] if scaler else accumulating_trunk()
    with torch.no_grad():
        model[0][2].bias[3] = math.nan
    window = run_window(accumulator.window(BATCHES), model)
    with pytest.raises(DistaccumError, match=r"weights that are not finite already, first in 0.2.bias.*a checkpoint"):
        window.step()


SCALINGS = {
    "scaled": lambda scaler, loss: scaler.scale(loss),
    "half": lambda scaler, loss: scaler.scale(loss.half()),
    "divided": lambda scaler, loss: scaler.scale(loss) / 4,
    "added": lambda scaler, loss: scaler.scale(loss) + scaler.scale(loss),
}


@pytest.mark.parametrize("scale", SCALINGS.values(), ids=SCALINGS)
def test_loss_scaled_by_the_caller_is_refused(scale):
    model, scaler, accumulator = scaled()
    run_window(accumulator.window(BATCHES), model).step()
    alone = Accumulator(model, SGD(model.parameters(), lr=0.1))  # nothing would unscale its gradients
    for one in (accumulator, alone, alone):
        with pytest.raises(ValueError, match=r"scaler.scale\(\) has multiplied, .* scaler=scaler\) scales it"):
            run_window(one.window(BATCHES), model, lambda model, batch: scale(scaler, loss_of(model, batch)))


def test_scale_of_a_caller_who_steps_and_factors_of_his_own_are_exact():
    model, scaler = trunk(), GradScaler("cpu", init_scale=2.0**16)
    optimizer, exact = SGD(model.parameters(), lr=0.1), gradient_of_trunk(BATCHES)
    scaler.scale(torch.ones(1))
    window = Accumulator(model).window(BATCHES)
    run_window(window, model, lambda model, batch: scaler.scale(loss_of(model, batch)))
    scaler.unscale_(optimizer)
    assert error(gradient(model), exact) <= 1e-12
    window.discard()
    factor = torch.tensor(2.0**16)  # equal to the scale of a scaler that is alive
    run_window(Accumulator(model, optimizer).window(BATCHES), model, lambda *given: loss_of(*given) * factor)
    assert error(gradient(model), exact * 2.0**16) <= 1e-12
