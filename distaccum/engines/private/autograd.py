"""Private names of torch's autograd."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...private import require

# Skips the checks of shapes in torch.autograd.backward. Without it the public call does the same.
_run_autograd: Callable[..., Any] | None = getattr(torch.autograd.graph, "_engine_run_backward", None)

require("torch", torch, "_foreach_zero_")
zero_all: Callable[[list[Tensor]], Any] = torch._foreach_zero_  # in one kernel, as `Optimizer.zero_grad` does
require("torch", Tensor, "_version")  # the number of writes in place, which has no public name


def run_backward(roots: Sequence[Tensor], seeds: Sequence[Tensor]) -> None:
    """`torch.autograd.backward` without its checks of shapes, which take an eighth of a tiny micro-step.

    Roots are scalars here, or outputs with their own gradients.
    """
    if _run_autograd is None:
        torch.autograd.backward(roots, seeds)
    else:
        _run_autograd(tuple(roots), tuple(seeds), False, False, (), allow_unreachable=True, accumulate_grad=True)


def is_reached(parameter: Tensor) -> bool:
    """True if the running backward reaches `parameter`, as DeepSpeed itself asks; without the name, always true."""
    will_execute = getattr(torch._C, "_will_engine_execute_node", None)
    if will_execute is None:
        return True
    with torch.enable_grad():
        return bool(will_execute(parameter.view_as(parameter).grad_fn.next_functions[0][0]))  # type: ignore[union-attr]


class GradientStamp:
    """The `.grad` of `holder`, a parameter or another tensor's keeper, as it is now or at the last `take`."""

    __slots__ = ("gradient", "holder", "version")

    def __init__(self, holder: Any) -> None:
        self.holder = holder
        self.take()

    def take(self) -> None:
        self.gradient: Tensor | None = (gradient := self.holder.grad)
        self.version = -1 if gradient is None else gradient._version

    def is_current(self) -> bool:
        """Returns whether `.grad` is the same tensor, and nobody wrote into it."""
        gradient: Any = self.holder.grad
        return gradient is self.gradient and self.version == (-1 if gradient is None else gradient._version)
