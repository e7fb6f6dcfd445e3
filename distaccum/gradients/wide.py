"""Gradients of low-precision parameters, added up in a wider dtype."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterable
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor, nn

from ..law import DistaccumError
from ..private import hooks_after_accumulation


class Sum:
    """The sum of one parameter's gradients, in a wider dtype."""

    __slots__ = ("dtype", "grad", "parameter")

    def __init__(self, parameter: nn.Parameter, dtype: torch.dtype) -> None:
        self.parameter, self.dtype = parameter, dtype
        self.grad: Tensor | None = None


class Phase(Enum):
    """Where a gradient goes when backward has made it."""

    OFF = auto()  # no window is open: it stays in .grad
    ADD = auto()  # into the sum; .grad is cleared
    PASS = auto()  # it stays in .grad, to be reduced by itself
    ROUND = auto()  # into the sum, which is rounded into .grad


class Sums:
    """Adds up the gradients of low-precision parameters in `dtype`, and rounds the sum into `.grad` once.

    Equivalent to, after each backward of a window,

        wide[p] += p.grad
        p.grad = None

    and `p.grad = wide[p].to(p.dtype)` after the last. Hooks do it within backward, a parameter at a time, so that only
    one gradient exists twice. They run before DDP's, which therefore reduces the rounded sum.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], dtype: torch.dtype, kept: Container[int] = frozenset()
    ) -> None:
        """`kept`: ids of parameters whose .grad is set to zeros, and not to None, once it is added."""
        self._sums: dict[int, Sum] = {}
        self._dtype, self._kept = dtype, kept
        self.phase = Phase.OFF
        self._hooks: list[Any] = []
        weakref.finalize(self, _remove, self._hooks)
        self.watch(parameters)

    def watch(self, parameters: Iterable[nn.Parameter]) -> None:
        """Adds those that are new or trained now; raises if another accumulator's window is open on one of them."""
        this = weakref.ref(self)
        for p in parameters:
            hooks = hooks_after_accumulation(p)
            others = [other() for hook in hooks if (other := getattr(hook, "sums", this)) is not this]
            if any(other is not None and other is not self and other.phase is not Phase.OFF for other in others):
                raise DistaccumError(
                    "another accumulator's window with WideSums is open on this model and takes its "
                    "gradients; finish that window before the next begins"
                )
            if id(p) not in self._sums and p.requires_grad and (wide := _wider(p, self._dtype)):
                self._sums[id(p)] = Sum(p, wide)
                self._hooks += [
                    p.register_hook(_before(this, id(p))),  # type: ignore[no-untyped-call]  # torch's
                    p.register_post_accumulate_grad_hook(_into(this)),  # type: ignore[no-untyped-call]  # torch's
                ]

    def __getstate__(self) -> dict[str, Any]:
        """A copy's state: the copy has other parameters to watch."""
        return {**self.__dict__, "_sums": {}, "_hooks": []}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        weakref.finalize(self, _remove, self._hooks)

    def of(self, parameter: nn.Parameter) -> Sum | None:
        return self._sums.get(id(parameter))

    def holders(self, parameters: Iterable[nn.Parameter]) -> list[Any]:
        """The objects whose .grad holds the gradients before they are rounded."""
        return [self._sums.get(id(parameter), parameter) for parameter in parameters]

    def holds(self, parameter: nn.Parameter) -> bool:
        one = self.of(parameter)
        return one is not None and one.grad is not None

    def standing(self, parameter: nn.Parameter) -> Tensor | None:
        """The sum so far, with a gradient that has not been added yet."""
        one, come = self.of(parameter), parameter.grad
        if one is None or one.grad is None:
            return come
        return one.grad + come if self.phase is Phase.PASS and come is not None else one.grad

    def take(self, parameter: nn.Parameter) -> None:
        """Adds the gradient that backward has just made."""
        one, gradient = self._sums[id(parameter)], parameter.grad
        if gradient is None or gradient.dtype.itemsize >= one.dtype.itemsize:  # the model was cast since
            return
        if self.phase is Phase.ADD:
            _add(one, gradient)
            self._let_go(parameter)
        elif self.phase is Phase.ROUND and one.grad is not None:
            _add(one, gradient)
            self._round(one)

    def show(self, parameter: int) -> None:
        """Rounds the sum of a parameter that gets no gradient in the backward that reduces."""
        self.round([self._sums[parameter].parameter])

    def take_all(self, but: Callable[[nn.Parameter], bool]) -> None:
        """Adds the gradients that PASS left in .grad."""
        for one in self._sums.values():
            if one.parameter.grad is not None and not but(one.parameter):
                _add(one, one.parameter.grad)
                self._let_go(one.parameter)

    def round(self, parameters: Iterable[nn.Parameter] | None = None) -> None:
        """Rounds the sums of all or of these into .grad, outside of backward."""
        for one in self._sums.values() if parameters is None else map(self.of, parameters):
            if one is not None and one.grad is not None:
                if one.parameter.grad is not None:
                    _add(one, one.parameter.grad)
                self._round(one)

    def clear(self) -> None:
        self.phase = Phase.OFF
        for one in self._sums.values():
            one.grad = None

    def _round(self, one: Sum) -> None:
        parameter, wide, one.grad = one.parameter, one.grad, None
        assert wide is not None
        if wide.is_sparse:
            parameter.grad = wide.coalesce().to(parameter.dtype)
        elif parameter.grad is None or parameter.grad.is_sparse:
            parameter.grad = wide.to(parameter.dtype)
        else:
            parameter.grad.copy_(wide)

    def _let_go(self, parameter: nn.Parameter) -> None:
        if id(parameter) in self._kept and parameter.grad is not None:
            parameter.grad.zero_()
        else:
            parameter.grad = None


def _wider(parameter: nn.Parameter, dtype: torch.dtype) -> torch.dtype | None:
    """The dtype to add up in; None if the parameter's own is as wide."""
    wide = dtype.to_complex() if parameter.is_complex() else dtype
    return None if torch.promote_types(parameter.dtype, wide) == parameter.dtype else wide


def _remove(hooks: list[Any]) -> None:
    for hook in hooks:
        hook.remove()


def _into(sums: weakref.ref[Sums]) -> Callable[[Tensor], None]:
    """A hook that adds each gradient; it does not keep the sums alive."""

    def take(parameter: Any) -> None:
        known = sums()
        if known is not None and known.phase not in (Phase.OFF, Phase.PASS):
            known.take(parameter)

    take.sums = sums  # type: ignore[attr-defined]  # by which `watch` recognises it
    return take


def _before(sums: weakref.ref[Sums], parameter: int) -> Callable[[Tensor | None], None]:
    """A hook for a parameter that backward reaches without a gradient: `_into`'s may not run then, but DDP's does."""

    def show(gradient: Tensor | None) -> None:
        if gradient is None and (known := sums()) is not None and known.phase is Phase.ROUND:
            known.show(parameter)

    return show


@torch.no_grad()
def _add(one: Sum, gradient: Tensor) -> None:
    if one.grad is not None and gradient.is_sparse != one.grad.is_sparse:
        gradient, one.grad = gradient.to_dense(), one.grad.to_dense()
    one.grad = gradient.to(one.dtype) if one.grad is None else one.grad.add_(gradient)
