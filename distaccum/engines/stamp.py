"""Whether a gradient was written or replaced since it was last seen."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from .private.autograd import GradientStamp, zero_all

__all__ = ["GradientStamp", "ZeroedViews"]


class ZeroedViews:
    """Gradients that are cleared in place: set to None, views of DDP's buckets would lose the memory that they save."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._views = {id(parameter) for parameter in parameters}
        self.stamps: dict[int, GradientStamp] = {}  # of what was zeroed, by the parameter's id

    def clear(self, parameters: Iterable[nn.Parameter]) -> None:
        views: dict[int, nn.Parameter] = {}
        for parameter in parameters:
            if id(parameter) not in self._views:
                parameter.grad = None
            elif parameter.grad is not None:
                views[id(parameter)] = parameter
        if views:
            zero_all([parameter.grad for parameter in views.values() if parameter.grad is not None])
        self.stamps = {of: GradientStamp(parameter) for of, parameter in views.items()}

    def holds(self, parameter: Any) -> bool:
        """Whether the gradient is zero because `clear` zeroed it, and stands for none."""
        stamp = self.stamps.get(id(parameter))
        return stamp is not None and stamp.is_current()

    def was_moved(self, parameter: nn.Parameter) -> bool:
        """Whether a forward has replaced a zeroed view by one of rebuilt buckets, zero too; the old bucket is freed."""
        stamp = self.stamps.get(id(parameter))
        if stamp is None or stamp.gradient is parameter.grad:
            return False
        stamp.take()
        return True
