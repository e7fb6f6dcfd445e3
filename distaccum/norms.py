"""The norm of the whole gradient, clipping, and names of parameters."""

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
FOREACH = ("cpu", "cuda")  # devices that have the norms of many tensors in one kernel


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


def total_norm(gradients: Sequence[Tensor], kind: float, over: Tensor | None = None) -> Tensor:
    """The norm of all gradients, divided by `over`; in float32 at least."""
    dense = [gradient.coalesce().values() if gradient.is_sparse else gradient for gradient in gradients]
    if kind == math.inf:
        dense = [gradient for gradient in dense if gradient.numel()]  # an empty tensor has no largest element
    if over is not None:
        dense = [gradient / over.to(gradient.device) for gradient in dense]
    by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}  # one kernel takes no others together
    for gradient in dense:
        by_kind.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    norms: list[Tensor] = []
    for (device, dtype), alike in by_kind.items():
        if device.type not in FOREACH or hasattr(alike[0], "to_local"):
            return torch.nn.utils.get_total_norm(dense, kind)
        norms += norms_of(alike, kind, torch.float32 if dtype in HALF else None)
    if not norms:
        return torch.zeros((), device="cpu")
    if len(by_kind) > 1:
        norms = [norm.to(norms[0].device) for norm in norms]
    norm: Tensor = torch.linalg.vector_norm(torch.stack(norms), kind)
    return norm


def norm_on_host(gradients: Sequence[Tensor]) -> float | None:
    """Their L2 norm as a number where all are on the host, on which kernels that add it up cost more than the norm."""
    for one in gradients:
        if type(one) is not Tensor or not one.is_cpu or one.layout is not torch.strided or one.dtype in HALF:
            return None
    return math.hypot(*map(number_of, norms_of(gradients, 2.0, None)))


def is_zero(gradients: Sequence[Tensor]) -> bool:
    """Tells whether this rank's parts of all gradients are zeros; waits for the device."""
    return bool(total_norm([local(one) for one in gradients], math.inf) == 0)


def read(number: Tensor) -> float:
    """Waits for the device that it is on, if it is on one."""
    value: float = number_of(number) if type(number) is Tensor and number.is_cpu else number.item()
    return value


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
