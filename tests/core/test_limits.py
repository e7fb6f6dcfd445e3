"""The limits of accumulation: where it differs from the one big batch, and what is exact instead."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from distaccum import Accumulator
from distaccum.batchnorm import freeze, to_groupnorm
from tests.support.windows import error, gradient

EXACT = 1e-12
Batch = tuple[Tensor, Tensor]


def make_batch(seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 4, (64,), generator=generator)
    places = torch.randn(4, 12, generator=generator, dtype=torch.float64)
    return places[y] + torch.randn(64, 12, generator=generator, dtype=torch.float64), y


def network(layers: int, make: Callable[[], nn.Module] = nn.Identity) -> nn.Module:
    torch.manual_seed(1)
    hidden = [one for _ in range(layers) for one in (nn.Linear(12, 12), make(), nn.Tanh())]
    return nn.Sequential(*hidden, nn.Linear(12, 4)).double()


def of_classes(model: nn.Module) -> Callable[[Batch], Tensor]:
    return lambda batch: cross_entropy(model(batch[0]), batch[1])


def off(model: nn.Module, loss_fn: Any, size: int, whole_fn: Any = None, batch: Batch | None = None) -> float:
    """The error of the gradient in micro-batches, against the one batch from the same random state."""
    batch, found = make_batch() if batch is None else batch, []
    for num, loss in ((size, loss_fn), (64, whole_fn or loss_fn)):
        model.zero_grad()
        torch.manual_seed(3)
        window = Accumulator(model, micro_batch_size=num, batchnorm="ignore").split(batch)
        for micro_batch in window:
            window.backward(loss(micro_batch))
        found.append(gradient(model))
        window.step()
    return error(*found)


def test_batch_normalisation_differs_more_with_each_layer_and_less_with_larger_micro_batches():
    def of(layers: int, size: int, cure: Any = None) -> float:
        model = network(layers, lambda: nn.BatchNorm1d(12))
        with torch.no_grad():
            model(make_batch(9)[0])  # statistics to freeze
        if cure is not None:
            cure(model)
        return off(model, of_classes(model), size)

    errors = [[of(n, size) for size in (32, 4)] for n in (1, 8)]
    assert 0.01 < errors[0][0] < errors[0][1] < errors[1][1] and errors[0][0] < errors[1][0] < errors[1][1]
    assert of(8, 4, freeze) <= EXACT and of(8, 4, lambda model: to_groupnorm(model, per_group=3)) <= EXACT


def test_groupnorm_keeps_the_weights_and_frozen_layers_their_mode():
    model = network(1, lambda: nn.BatchNorm1d(12))
    weight = model[1].weight
    assert freeze(model) == ["1"] and model.training
    Accumulator(model, steps=3).split(make_batch()).discard()  # must not warn
    layer = to_groupnorm(model, per_group=4)[1]
    assert isinstance(layer, nn.GroupNorm) and layer.weight is weight and layer.num_groups == 3
    with pytest.raises(TypeError, match="got a BatchNorm1d itself"):
        to_groupnorm(nn.BatchNorm1d(3))


def test_dropout_in_several_layers_draws_other_masks():
    model = network(4, lambda: nn.Dropout(0.3))
    assert off(model, of_classes(model), 8) > 0.1


class Scaled:
    """A loss divided by a running mean of itself, which moves with each call, or when `move` is called."""

    def __init__(self, model: nn.Module, *, moves: bool) -> None:
        self.model, self.moves, self.mean, self.seen = model, moves, 1.0, []

    def __call__(self, batch: Batch) -> Tensor:
        loss, scale = of_classes(self.model)(batch), self.mean
        self.seen.append(loss.item())
        if self.moves:
            self.move()
        return loss / scale

    def move(self) -> None:
        self.mean += 0.1 * (sum(self.seen) / len(self.seen) - self.mean)
        self.seen.clear()


@pytest.mark.parametrize("moves", [True, False])
def test_loss_with_state_differs_unless_the_state_moves_after_the_window(moves):
    model = network(2)
    one, whole = Scaled(model, moves=moves), Scaled(model, moves=True)
    errors = []
    for i in range(3):
        errors.append(off(model, one, 8, whole, make_batch(i)))
        if not moves:
            one.move()
    assert errors[-1] > 0.01 if moves else max(errors) <= EXACT


def test_gradient_penalty_is_exact_per_sample_but_not_across_samples():
    model = network(2)

    def per_sample(batch: Batch) -> Tensor:
        x = batch[0].clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return (slope.norm(dim=1) - 1).square().mean()

    def across_samples(batch: Batch) -> Tensor:
        (slope,) = torch.autograd.grad(of_classes(model)(batch), model[0].weight, create_graph=True)
        return of_classes(model)(batch) + slope.square().sum()

    assert off(model, per_sample, 8) <= EXACT < 0.1 < off(model, across_samples, 8)
