"""The law: windows equal one big batch. Here on a plain module; grids/test_engines.py has gloo ranks."""

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.amp import GradScaler
from torch.optim import SGD

from distaccum import Accumulator, count_samples, count_tokens
from tests.support.oracle import step_off
from tests.support.problems import CASES, big_batch, join, make_batch, make_net, sample_loss, token_loss
from tests.support.windows import accumulating, error, gradient, run_window, weights

BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-6}


class OnDevice(torch.Tensor):
    """Losses whose value the record does not take at once, as that of one on a GPU."""


@pytest.mark.parametrize("sizes", [[4], [4, 4], [1, 7, 2]], ids=str)
@pytest.mark.parametrize("kind", [torch.Tensor, OnDevice])
def test_record_has_losses_as_they_went_backward(kind, sizes):
    """Whatever the caller does to them in place."""
    batches = [make_batch(size, seed=i) for i, size in enumerate(sizes)]
    net, accumulator = accumulating(make_net(), reduction={"a": "mean", "b": "sum"})
    expected = {"a": big_batch("samples mean", batches)[0], "b": big_batch("samples sum", batches)[0]}

    window = accumulator.window(batches)
    for batch in window:
        a, b = (sample_loss(net, batch, how).as_subclass(kind) for how in ("mean", "sum"))
        window.backward(a=a, b=b)
        a.detach().zero_()
        b.detach().mul_(3)
    assert window.step().losses == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("write", [lambda one: one.mul_(2), lambda one: one.data.mul_(2) and None])
def test_hook_that_writes_to_its_gradient_changes_no_other_micro_batch(write):
    batches = [make_batch(4, seed=i) for i in range(3)]
    net, accumulator = accumulating(make_net())
    for _ in range(2):
        window = accumulator.window(batches)
        for batch in window:
            loss = sample_loss(net, batch)
            loss.register_hook(write)
            window.backward(loss)
        assert error(gradient(net), 2 * big_batch("samples mean", batches)[1]) <= 1e-12
        window.step()


def test_window_without_counts_makes_no_update_and_names_the_reason():
    net = make_net()
    optimizer = SGD(net.parameters(), lr=1.0, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    accumulator = Accumulator(net, optimizer, steps=2, count=count_tokens("labels"), scheduler=schedule)
    before = weights(net)
    loader = [make_batch(2, seed=i, kept=0.0) for i in range(2)]
    (update,) = [run_window(window, net, token_loss).step() for window in accumulator.windows(loader)]
    assert (update.stepped, update.micro_batches, update.counts, update.loss) == (False, 0, {"tokens": 0}, 0.0)
    assert "no tokens" in update.reason
    assert schedule.last_epoch == 0
    assert torch.equal(weights(net), before)
    assert accumulator.index == 1


def masked_mean(net, batch):
    """Unlike that of torch's mean over no token, its gradient is NaN."""
    kept = batch["labels"].ne(-100)
    return (net(batch["x"]).square().mean(-1) * kept).sum() / kept.sum()


def means_and_sums(net, batch):
    return {"tokens": masked_mean(net, batch), "samples": net(batch["x"]).square().sum()}


def test_named_losses_may_have_different_reductions_and_drop_terms_without_a_count():
    batches = [make_batch(3, seed=0), make_batch(2, seed=1, kept=0.0), make_batch(1, seed=2)]
    count = {"tokens": count_tokens("labels"), "samples": count_samples}
    net, accumulator = accumulating(make_net(), 1.0, reduction={"tokens": "mean", "samples": "sum"}, count=count)
    window = accumulator.window(batches)
    off = step_off(net, window, make_net(), join(batches), means_and_sums)
    assert max(off) <= 1e-12, "the mean over nothing is no part of the record"
    assert set(window.counts) == {"tokens", "samples"}


def scaled_in(dtype):
    return lambda model, x: (model["weight"] * x.mean()).to(dtype)


def test_loss_in_half_precision_rounds_its_share_and_warns():
    x = torch.linspace(1, 2, 3)
    model, accumulator = accumulating(torch.nn.ParameterDict({"weight": torch.nn.Parameter(torch.ones(()))}))
    with pytest.warns(UserWarning, match=r"bfloat16.*criterion\(outputs.float\(\)"):
        window = run_window(accumulator.window(x.split(1)), model, scaled_in(torch.bfloat16))
    assert model["weight"].grad.item() == pytest.approx(1.5, rel=2e-3)  # a third in bf16 is 0.33398
    assert window.step().loss == pytest.approx(1.5, rel=1e-6), "the record has the share itself"
    for dtype, num in [(torch.float32, 3), (torch.bfloat16, 2)]:  # a half is exact, so no warning
        window = run_window(accumulator.window(x[:num].split(1)), model, scaled_in(dtype))
        assert model["weight"].grad.item() == pytest.approx(x[:num].mean().item(), rel=1e-6)
        window.step()
    options = {"reduction": "sum_to_mean", "count": lambda part: 2**25}  # float16 has no such share, but scaled
    run_window(Accumulator(model, scaler=GradScaler("cpu"), **options).window([x]), model, scaled_in(torch.float16))
    assert model["weight"].grad.item() == pytest.approx(1.5 * 2.0**-9, rel=1e-3)
    model.zero_grad()
    with pytest.raises(ValueError, match=r"float16 rounds its share, 2\.98023e-08, by 100\.00% in"):
        run_window(Accumulator(model, **options).window([x]), model, scaled_in(torch.float16))


micro_batches = st.tuples(st.integers(0, 5), st.integers(0, 2**31), st.sampled_from([0.0, 0.3, 1.0]))
windows = st.lists(st.lists(micro_batches, max_size=6), min_size=1, max_size=3)


@settings(max_examples=int(os.environ.get("WINDOWS", "300")), deadline=None, derandomize="WINDOWS" not in os.environ)
@given(drawn=windows, case=st.sampled_from(sorted(CASES)), dtype=st.sampled_from(list(BOUNDS)))
def test_random_window_equals_one_big_batch(drawn, case, dtype):
    """Random sizes (some empty) and masks, in consecutive windows of one accumulator."""
    loss_fn, how, reduction, count = CASES[case]
    net, accumulator = accumulating(make_net(dtype), reduction=reduction, count=count)
    for sizes in drawn:
        batches = [make_batch(size, seed=seed, kept=kept, dtype=dtype) for size, seed, kept in sizes]
        window = run_window(accumulator.window(batches), net, lambda net, batch: loss_fn(net, batch, how))
        total = sum(float(count(batch)) for batch in batches)
        assert window.counts == {next(iter(window.counts)): total}
        if total:
            loss, exact = big_batch(case, batches)
            assert error(gradient(net), exact) <= BOUNDS[dtype]
            update = window.step()
            assert update.loss == pytest.approx(loss, rel=BOUNDS[dtype])
            assert update.stepped and update.grad_norm is None
        else:
            assert gradient(net).count_nonzero() == 0
            assert not window.step().stepped
