"""Clipping, and helpers for tensors and parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from .private import multiply_all

EPSILON = 1e-6  # added to the norm in clipping, as in torch
HALF = (torch.float16, torch.bfloat16)
# Reads the number in a tensor on the host, without a dispatched operation and without a wait.
number_of: Callable[[Tensor], Any] = Tensor.tolist


def leaves(roots: Sequence[Tensor]) -> dict[int, Tensor]:
    """The leaves, by id, to whose gradients a backward from these roots adds."""
    found: dict[int, Tensor] = {}
    seen, waiting = set(), [root.grad_fn for root in roots]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            if (variable := getattr(node, "variable", None)) is not None:
                found[id(variable)] = variable
            waiting += [following for following, _ in node.next_functions]
    return found


def unique(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    return list({id(parameter): parameter for parameter in parameters}.values())


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, as a view; any other tensor itself."""
    to_local: Callable[[], Tensor] | None = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


def clip(gradients: Sequence[Tensor], max_norm: float, norm: Tensor) -> None:
    """Scales gradients of norm `norm` to at most `max_norm`."""
    holders: Any = [SimpleNamespace(grad=local(one)) for one in gradients]  # DTensors' local parts, in one kernel
    torch.nn.utils.clip_grads_with_norm_(holders, max_norm, norm)


def multiply(gradients: Iterable[Any], factor: float) -> None:
    """Multiplies gradients in place, those of one kind in one kernel."""
    by_kind: dict[Any, list[Tensor]] = {}
    for gradient in map(local, gradients):
        if gradient.layout is torch.strided:
            by_kind.setdefault((gradient.device, gradient.dtype), []).append(gradient)
        else:
            gradient.mul_(factor)
    for alike in by_kind.values():
        multiply_all(alike, factor)


def widest(number: Tensor) -> Tensor:
    """Converts to float64, or to float32 on Apple's GPUs, which have no wider type."""
    return number.float() if number.device.type == "mps" else number.double()


def names_of(models: Sequence[nn.Module]) -> dict[int, str]:
    """Parameter names by the parameters' ids; names in a second model start with its position."""
    return {
        id(parameter): name.removeprefix("module.") if i == 0 else f"{i}.{name}"
        for i, model in reversed(list(enumerate(models)))
        for name, parameter in model.named_parameters()
    }
