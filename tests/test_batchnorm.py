"""Frozen batch normalisation, and GroupNorm in its place."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from problems import error, gradient
from torch import Tensor, nn

from distaccum import Accumulator
from distaccum.batchnorm import freeze, to_groupnorm


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
