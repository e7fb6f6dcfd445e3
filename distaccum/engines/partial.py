"""Gradients that a window has added up so far, as copies on the host, and back."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..gradients.norms import local
from ..gradients.wide import Sum
from ..law.errors import DistaccumError

# The placements of a DTensor that a state can hold, and the argument that each was made with.
ARGUMENTS = {"Shard": ["dim"], "Partial": ["reduce_op"], "Replicate": []}


def gradients_of(holders: Sequence[Any]) -> list[Any]:
    """Copies of the holders' gradients."""
    return [on_host(one.grad, one.parameter if isinstance(one, Sum) else one) for one in holders]


def put_gradients(holders: Sequence[Any], gradients: Sequence[Any]) -> None:
    """Gives parameters, or the sums of their gradients, what `gradients_of` copied."""
    if len(gradients) != len(holders):
        raise ValueError(
            f"the state is of a model with {len(gradients)} parameters and this one has {len(holders)}; give the "
            "same model and optimizer"
        )
    for one, gradient in zip(holders, gradients, strict=True):
        parameter: Tensor = one.parameter if isinstance(one, Sum) else one
        wanted = getattr(one, "grad_dtype", None) or one.dtype
        seen = gradient[0] if isinstance(gradient, list) else gradient
        if seen is not None and seen.dtype != wanted:
            raise ValueError(
                f"the state has a gradient that adds up in {seen.dtype}, expected {wanted}; give the same "
                "accumulate_dtype"
            )
        if seen is None or seen.is_sparse:
            one.grad = None if seen is None else seen.to(parameter.device)
        else:
            one.grad = from_host(gradient, parameter)


def on_host(gradient: Tensor | None, parameter: Any) -> Any:
    """A copy of this rank's part; with the placements of a DTensor where its parameter has others."""
    if gradient is None:
        return None
    kept = local(gradient).detach().to("cpu", copy=True)
    placements = getattr(gradient, "placements", None)
    if placements is None or placements == parameter.placements:
        return kept
    return [kept, [_as_words(placement) for placement in placements]]


def from_host(kept: Any, parameter: Any) -> Tensor:
    """The gradient that `on_host` copied, on the device and the mesh of its parameter."""
    if isinstance(kept, Tensor):
        made = torch.empty_like(parameter, dtype=kept.dtype, memory_format=torch.preserve_format)
        if local(made).shape != kept.shape:
            raise ValueError(
                f"the state has a gradient of shape {list(kept.shape)} for a parameter of shape "
                f"{list(local(made).shape)}; give the same model and number of ranks"
            )
        local(made).copy_(kept)
        return made
    part, words = kept
    if not hasattr(parameter, "placements"):
        raise ValueError("the state has the gradient of a DTensor for a plain parameter; give the same model")
    kinds: Any = sys.modules["torch.distributed.tensor"]
    gradient: Tensor = kinds.DTensor.from_local(
        part.to(local(parameter).device),
        parameter.device_mesh,
        [getattr(kinds, kind)(*arguments) for kind, *arguments in words],
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    return gradient


def _as_words(placement: Any) -> list[Any]:
    kind = type(placement).__name__
    if kind not in ARGUMENTS:
        raise DistaccumError(
            f"state_dict() in mid-window with a gradient placed as {placement}, which cannot be kept; call it between "
            "two windows, after window.step()"
        )
    return [kind, *(getattr(placement, argument) for argument in ARGUMENTS[kind])]
