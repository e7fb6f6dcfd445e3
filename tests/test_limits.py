"""The limits of accumulation: it differs from the one big batch, check() names the cause, and the cure is exact."""

from __future__ import annotations

import sys

import pytest
from programs import ROOT

from distaccum import Accumulator

sys.path.insert(0, str(ROOT / "launch" / "bench"))
import limits

EXACT = 1e-12


def causes(model, loss_fn, batch) -> list[str]:
    report = Accumulator(model, micro_batch_size=8).check(batch, loss_fn)
    return [cause.split(":")[0] for cause in report.causes]


@pytest.mark.parametrize("sorted_by_class", [False, True])
def test_batch_normalisation_differs_more_with_each_layer_and_less_with_larger_micro_batches(sorted_by_class):
    errors = [[limits.of_batchnorm(n, size, sorted_by_class=sorted_by_class) for size in (32, 4)] for n in (1, 8)]
    assert 0.01 < errors[0][0] < errors[0][1] < errors[1][1] and errors[0][0] < errors[1][0] < errors[1][1]
    for cure in ("frozen", "GroupNorm"):
        assert limits.of_batchnorm(8, 4, sorted_by_class=sorted_by_class, cure=cure) <= EXACT


def test_dropout_in_several_layers_draws_other_masks_without_bias():
    assert limits.of_dropout(1, 8) <= EXACT  # on a CPU, one draw equals several
    assert limits.of_dropout(4, 8) > 0.1 and limits.of_two_draws(4) > 0.1
    few, many = (limits.of_mean_over_draws(2, 8, draws) for draws in (10, 160))
    assert many[0] < few[0] / 2 and many[0] < 2 * many[1]  # the mean converges, as the mean of big batches does
    model = limits.network(2, lambda: limits.nn.Dropout(0.3))
    assert causes(model, limits.of_classes(model), limits.make_batch()) == ["dropout"]


def test_loss_with_state_differs_unless_the_state_moves_after_the_window():
    assert limits.of_state(8, moves=True) > 0.01
    assert limits.of_state(8, moves=False) <= EXACT
    model = limits.network(2, limits.nn.Identity)
    assert causes(model, limits.Scaled(model, moves=True), limits.make_batch()) == ["state"]


def test_gradient_penalty_is_exact_per_sample_but_not_across_samples():
    assert limits.of_penalty(8, across=False) <= EXACT < 0.1 < limits.of_penalty(8, across=True)
    model = limits.network(2, limits.nn.Identity)
    assert causes(model, limits.penalty_across_samples(model), limits.make_batch()) == ["loss"]
