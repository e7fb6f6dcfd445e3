"""Helpers for tensors and parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .private import multiply_all

HALF = (torch.float16, torch.bfloat16)
# Reads the number in a tensor on the host, without a dispatched operation and without a wait.
number_of: Callable[[Tensor], Any] = Tensor.tolist


def unique(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    return list({id(parameter): parameter for parameter in parameters}.values())


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, as a view; any other tensor itself."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def multiply(gradients: Iterable[Any], factor: float | Tensor) -> None:
    """Multiplies gradients in place, those of one kind in one kernel."""
    by_kind: dict[Any, list[Tensor]] = {}
    for gradient in map(local, gradients):
        if gradient.layout is torch.strided:
            by_kind.setdefault((gradient.device, gradient.dtype), []).append(gradient)
        else:
            gradient.mul_(factor)
    for (device, _), alike in by_kind.items():
        multiply_all(alike, factor.to(device) if isinstance(factor, Tensor) else factor)


def widest(number: Tensor) -> Tensor:
    """Converts to float64, or to float32 on Apple's GPUs, which have no wider type."""
    return number.float() if number.device.type == "mps" else number.double()


def nodes_of(loss: Tensor) -> list[Any]:
    """The nodes of the graph that a loss was made with, each once; those with a `variable` are leaves."""
    nodes: dict[Any, None] = {}
    waiting: list[Any] = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in nodes:
            nodes[node] = None
            waiting += [following for following, _ in node.next_functions]
    return list(nodes)


def names_of(models: Sequence[nn.Module]) -> dict[int, str]:
    """Parameter names by the parameters' ids; names in a second model start with its position."""
    return {
        id(parameter): name.removeprefix("module.") if i == 0 else f"{i}.{name}"
        for i, model in reversed(list(enumerate(models)))
        for name, parameter in model.named_parameters()
    }
