"""The private names of torch that gradients need, as they are in torch 2.9 to 2.15."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor


def norms_of(alike: Sequence[Tensor], kind: float, dtype: torch.dtype | None) -> Sequence[Tensor]:
    """The norm of each of these tensors of one device and dtype, in one kernel.

    `torch.nn.utils.get_total_norm` is as many kernels, and several times the host's work. Without the name: a kernel
    per tensor.
    """
    if (foreach := getattr(torch, "_foreach_norm", None)) is None:
        return [torch.linalg.vector_norm(one, kind, dtype=dtype) for one in alike]
    norms: Sequence[Tensor] = foreach(alike, kind, dtype=dtype)
    return norms


def multiply(alike: Sequence[Tensor], factor: Tensor | float) -> None:
    """Multiplies tensors of one device and dtype in place, in one kernel, which no public name does by any factor.

    Without the name: a kernel per tensor.
    """
    if (foreach := getattr(torch, "_foreach_mul_", None)) is None:
        for one in alike:
            one.mul_(factor)
    else:
        foreach(alike, factor)


def hooks_after_accumulation(parameter: Tensor) -> Iterable[Any]:
    """The hooks that `register_post_accumulate_grad_hook` added, which cannot be listed publicly.

    Without the name: none, so that two windows with WideSums on one parameter are not refused.
    """
    return (getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values()


# How often a tensor was written to in place; autograd's own check has no public name. Without the name: 0, so that such
# a write is not seen.
version_of: Callable[[Tensor], int] = attrgetter("_version") if hasattr(Tensor, "_version") else lambda _: 0


def own_version_of(tensor: Tensor) -> int | None:
    """The number of writes to this tensor; None for a view, which shares it with all other views, or in inference.

    Private: whether it is a view. Without the name: of the tensor and its views together.
    """
    return None if getattr(tensor, "_base", None) is not None or tensor.is_inference() else version_of(tensor)


def is_view(gradient: Tensor) -> bool:
    """Whether a gradient lies in the memory of another tensor, as in a bucket of DDP, which no public name tells.

    Without the name: yes, so that a gradient which somebody replaced in mid-window by another is not noticed.
    """
    return getattr(gradient, "_base", gradient) is not None
