"""Gradient: the norm of a window's whole gradient, taken once it is asked for; and helpers for tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.linalg import vector_norm
from torch.nn.utils import get_total_norm

from .law import DistaccumError
from .private import multiply_all

HALF = (torch.float16, torch.bfloat16)
# Reads the number in a tensor on the host, without a dispatched operation and without a wait.
number_of: Callable[[Tensor], Any] = Tensor.tolist
# The groups over which a tensor is cut; empty: each rank has the whole.
Groups = tuple[dist.ProcessGroup, ...]
# Added to the norm in clipping, as in torch.
EPSILON = 1e-6


@final
class Gradient:
    """The gradient of a window over all ranks, before it is clipped: its L2 `norm`, and whether all of it is `finite`.

    Nothing is computed before one of them is read, and nothing twice. Ranks with shards add up their parts then, so
    read it on all ranks or on none.

    Args:
        parameters: The parameters whose `.grad` it is; None: the wrapper takes the norm as it steps, and sets `taken`.
        cuts: The groups over which the gradient of each is cut; None: only DTensors are, as they say themselves.
        stages: Groups of ranks with other parameters.
        device: On which norms are added up; None: that of the first parameter.
    """

    def __init__(
        self,
        parameters: Sequence[Any] | None,
        cuts: Sequence[Groups] | None = None,
        stages: Groups = (),
        device: torch.device | None = None,
    ) -> None:
        self._parameters, self._cuts, self._stages = parameters, cuts, stages
        self._device = device or (parameters[0].device if parameters else torch.device("cpu"))

    @cached_property
    def taken(self) -> Tensor:
        """The norm on its device, which need not be read."""
        return self._take()

    @cached_property
    def norm(self) -> float:
        """The L2 norm, the same on all ranks; NaN or infinity if some element is."""
        gradients = self._gradients()
        if self.known() is None and not (self._cuts or self._stages) and gradients and all(map(_is_here, gradients)):
            norm = math.hypot(*map(number_of, map(vector_norm, gradients)))
        else:
            norm = number_of(self.taken)
        if math.isfinite(norm) or self._parameters is None:
            return float(norm)
        # Squares of finite elements may have overflowed, which those of smaller ones do not.
        shrink = 2.0 ** (-80 if self._device.type == "mps" else -600)
        return float(number_of(self._take(shrink)) / shrink)

    @property
    def finite(self) -> bool:
        """True if every element is finite, or if the wrapper has yet to judge that."""
        return (self._parameters is None and self.known() is None) or math.isfinite(self.norm)

    def known(self, *, take: bool = False) -> Tensor | float | None:
        """The norm if it was taken (with `take`: or can be), as a number if it was read; reads nothing."""
        known: Tensor | float | None = vars(self).get("norm", vars(self).get("taken"))
        return self.taken if known is None and take and self._parameters is not None else known

    def close(self, *, take: bool) -> Tensor | float | None:
        """Forgets the parameters, whose gradients will no longer be this one, and returns what is `known`."""
        known, self._parameters = self.known(take=take), None
        return known

    def clip(self, max_norm: float) -> None:
        """Scales the gradient to at most `max_norm`; reads nothing."""
        norm: Any = self.known(take=True)
        factor = max_norm / (norm + EPSILON)
        if isinstance(norm, Tensor):
            factor = factor.clamp(max=1.0)
        if not math.isinf(max_norm) and (isinstance(norm, Tensor) or not factor >= 1.0):
            multiply(self._gradients(), factor)

    def _gradients(self) -> list[Any]:
        return [parameter.grad for parameter in self._parameters or () if parameter.grad is not None]

    def _take(self, shrink: float | None = None) -> Tensor:
        """The norm over all ranks, of the gradient times `shrink`."""
        if self._parameters is None:
            raise DistaccumError(
                "the norm of a window's gradient was read where it cannot be taken; read it in judge(), before the "
                "step. DeepSpeed's own optimizers take it within the step: read update.grad_norm (with max_norm)"
            )
        parts: dict[Groups, list[Tensor]] = {groups: [] for groups in self._cuts or ()}
        for i, parameter in enumerate(self._parameters):
            if parameter.grad is not None:
                gradient, groups = _local_part(parameter)
                parts.setdefault(self._cuts[i] if self._cuts else groups, []).append(gradient)
        # A rank adds up each group's parts, even if it has none.
        norms = [_norm_over(groups, total_norm(part, shrink).to(self._device)) for groups, part in parts.items()]
        return _norm_over(self._stages, norms[0] if len(norms) == 1 else total_norm(norms).to(self._device))


def _is_here(gradient: Tensor) -> bool:
    is_dense = gradient.layout is torch.strided and gradient.dtype not in HALF
    return type(gradient) is Tensor and gradient.is_cpu and is_dense


def _local_part(parameter: Any) -> tuple[Tensor, Groups]:
    """This rank's part of a gradient, and the groups over which it is cut."""
    gradient = parameter.grad
    placements: Sequence[Any] = getattr(gradient, "placements", ())
    if any(placement.is_partial() for placement in placements):
        return gradient.full_tensor(), ()
    # DTensor caches results of earlier calls, and may place a gradient on another, equal mesh.
    cut = [i for i, placement in enumerate(placements) if not placement.is_replicate()]
    return local(gradient), tuple(parameter.device_mesh.get_group(i) for i in cut)


def _norm_over(groups: Groups, norm: Tensor) -> Tensor:
    """The norm of a whole, from the norm of this rank's part; the ranks of `groups` have the other parts."""
    if not groups:
        return norm
    square = widest(norm).square()
    for group in groups:
        dist.all_reduce(square, group=group)
    return square.sqrt()


def total_norm(gradients: Sequence[Tensor], shrink: float | None = None) -> Tensor:
    """The norm of all gradients (times `shrink`), in float32 at least."""
    dense = [gradient.coalesce().values() if gradient.is_sparse else gradient for gradient in gradients]
    if shrink is not None:
        wide = [torch.promote_types(one.dtype, widest(torch.empty((), device=one.device)).dtype) for one in dense]
        dense = [gradient.to(dtype) * shrink for gradient, dtype in zip(dense, wide, strict=True)]
    # The norm of a number is its size.
    return get_total_norm([vector_norm(one, dtype=torch.float32) if one.dtype in HALF else one for one in dense])


def unique(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    return list({id(parameter): parameter for parameter in parameters}.values())


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, as a view; any other tensor itself."""
    to_local: Callable[[], Tensor] | None = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


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


def names_of(models: Sequence[nn.Module]) -> dict[int, str]:
    """Parameter names by the parameters' ids; names in a second model start with its position."""
    return {
        id(parameter): name.removeprefix("module.") if i == 0 else f"{i}.{name}"
        for i, model in reversed(list(enumerate(models)))
        for name, parameter in model.named_parameters()
    }
