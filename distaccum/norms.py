"""The norm of gradients, clipping, and names of parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from .private import norms_of

EPSILON = 1e-6  # beside the norm in clipping, as torch has it
HALF = (torch.float16, torch.bfloat16)
# The number in a tensor on the host: no operation of the dispatcher, and nobody waits.
number_of: Callable[[Tensor], Any] = Tensor.tolist


def leaves(roots: Sequence[Tensor]) -> dict[int, Tensor]:
    """The tensors, by identity, to whose gradient a backward from these roots adds."""
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


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, as a view; any other tensor itself."""
    to_local: Callable[[], Tensor] | None = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


def total_norm(gradients: Sequence[Tensor], kind: float = 2.0, over: Tensor | None = None) -> Tensor:
    """The norm of all gradients, divided by `over`; in float32 at least."""
    by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}  # one kernel takes no others together
    for gradient in gradients:
        if gradient.is_sparse:
            gradient = gradient.coalesce().values()
        if over is not None:
            gradient = gradient / over.to(gradient.device)
        if kind != math.inf or gradient.numel():  # an empty tensor has no largest element
            by_kind.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    norms: list[Tensor] = []
    for (_, dtype), alike in by_kind.items():
        norms += norms_of(alike, kind, dtype=torch.float32 if dtype in HALF else None)
    if not norms:
        return torch.zeros((), device="cpu")
    if len(by_kind) > 1:
        norms = [norm.to(norms[0].device) for norm in norms]
    norm: Tensor = torch.linalg.vector_norm(torch.stack(norms), kind)
    return norm


def is_zero(gradients: Sequence[Tensor]) -> bool:
    """Tells whether this rank's parts of all gradients are zeros; waits for the device."""
    return bool(total_norm([local(one) for one in gradients], math.inf) == 0)


def clip(gradients: Sequence[Tensor], max_norm: float, norm: Tensor) -> None:
    """Scales gradients of norm `norm` to at most `max_norm`."""
    holders: Any = [SimpleNamespace(grad=local(one)) for one in gradients]  # of DTensors the parts, in one kernel
    torch.nn.utils.clip_grads_with_norm_(holders, max_norm, norm)


def widest(number: Tensor) -> Tensor:
    """In float64, or in float32 on Apple's GPUs, which have no wider type."""
    return number.float() if number.device.type == "mps" else number.double()


def names_of(models: Sequence[nn.Module]) -> dict[int, str]:
    """By the parameters' identity; names of a second model start with its position."""
    return {
        id(parameter): name.removeprefix("module.") if i == 0 else f"{i}.{name}"
        for i, model in reversed(list(enumerate(models)))
        for name, parameter in model.named_parameters()
    }
