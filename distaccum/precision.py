"""The gradient as a whole: the dtype it adds up in, loss scaling, its norm, clipping, and whether it is finite."""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum, auto
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from .errors import DistaccumError

EPSILON = 1e-6  # beside the norm in clipping, as torch has it
HALF = (torch.float16, torch.bfloat16)
FOREACH = ("cpu", "cuda")  # devices that have the norms of many tensors in one kernel


def unscale(scaler: GradScaler, optimizers: Sequence[Optimizer]) -> list[Tensor]:
    """Divides each optimizer's gradients by the scale, once, and gives the flags of overflow that `update` will read.

    None of them where there was no gradient to look at.
    """
    found: list[Tensor] = []
    sharded = sys.modules.get("torch.distributed.fsdp.sharded_grad_scaler")
    # It sums its flags over ranks, also of one whose shards have no gradient: all take part for each optimizer.
    waits = sharded is not None and isinstance(scaler, sharded.ShardedGradScaler)
    for optimizer in optimizers:
        if not waits and not any(p.grad is not None for group in optimizer.param_groups for p in group["params"]):
            continue  # the scaler would take it for unscaled until the next update() that had something to look at
        try:
            scaler.unscale_(optimizer)
        except RuntimeError as error:
            if "already been called" not in str(error):  # the caller did, to look at the gradients
                raise
        # Private, and the only way to the flag without a second pass: GradScaler.step reads it too.
        found += scaler._found_inf_per_device(optimizer).values()
    return found


def unscales_in_step(scaler: GradScaler, optimizers: Sequence[Optimizer]) -> bool:
    """Whether no pass need be made to unscale: the optimizers divide as they step, and the caller did not unscale.

    Private: which optimizers' gradients the scaler has looked at. A scaler of another kind has its own ways.
    """
    return (
        type(scaler) in (GradScaler, torch.cuda.amp.GradScaler)
        and divide_in_step(optimizers)
        and not any(scaler._found_inf_per_device(one) for one in optimizers)
    )


def tell(scaler: GradScaler, optimizers: Sequence[Optimizer], overflow: Tensor) -> None:
    """As if the scaler had looked at the gradients of these itself, so that its `update()` reads what was found.

    Private: where it keeps that.
    """
    for one in optimizers:
        if any(p.grad is not None for group in one.param_groups for p in group["params"]):
            scaler._per_optimizer_states[id(one)]["found_inf_per_device"] = {overflow.device: overflow}


def update_without_gradients(scaler: GradScaler, overflows: Tensor) -> None:
    """What `scaler.update()` does, which refuses where it was shown no gradient. Private: the fields that it reads."""
    scale, growth = scaler._scale, scaler._growth_tracker
    if scale is not None and growth is not None:
        factors = scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()
        torch._amp_update_scale_(scale, growth, overflows.to(scale.device, torch.float32), *factors)


def is_scaled_by(scaler: GradScaler, loss: Tensor) -> bool:
    """Whether `loss` came out of `scaler.scale()`, or a sum, a quotient or a mean of what did.

    By what its graph has saved. Private: the scale's tensor, which a scaler of another kind may not have, and what a
    node keeps without unpacking it (torch 2.13; hooks on saved tensors, as of checkpointing, would run else).
    """
    scale: Tensor | None = getattr(scaler, "_scale", None)
    waiting, seen = [loss.grad_fn], 0
    while scale is not None and waiting and seen < 16:
        node, seen = waiting.pop(0), seen + 1
        name = "" if node is None else node.name()
        if name == "MulBackward0":
            kept: Any = getattr(node, "_raw_saved_other", None)
            # Elsewhere than at the root, unpacking may be a checkpoint's, which would run a forward here.
            other = kept.data if hasattr(kept, "data") else getattr(node, "_saved_other", None) if seen == 1 else None
            if isinstance(other, Tensor) and other.device == scale.device and other.data_ptr() == scale.data_ptr():
                return True
        if name.startswith(("Mul", "Div", "Add", "Sum", "Mean", "Stack", "Unsqueeze", "ToCopy")):
            waiting += [following for following, _ in node.next_functions]  # type: ignore[union-attr]  # see above
    return False


def refuse_mixed(optimizers: Sequence[Optimizer]) -> None:
    """What a GradScaler cannot unscale: DTensors and plain tensors in one list."""
    for optimizer in optimizers:
        if any(p.is_complex() for group in optimizer.param_groups for p in group["params"]):
            raise ValueError(
                f"scaler with a {type(optimizer).__name__} that holds complex parameters, which a GradScaler cannot "
                "unscale; leave the scaler out, or keep real parameters (torch.view_as_complex in the forward)"
            )
        kinds = {hasattr(p, "to_local") for group in optimizer.param_groups for p in group["params"]}
        if len(kinds) > 1:
            raise ValueError(
                f"scaler with a {type(optimizer).__name__} that holds sharded and plain parameters, which a GradScaler "
                "cannot unscale together; make an optimizer for each kind and pass both"
            )


def leaves(roots: Sequence[Tensor]) -> dict[int, Tensor]:
    """The tensors, by identity, whose gradient a backward from these roots adds to."""
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
    """In float32 at least. `torch.nn.utils.get_total_norm` is as many kernels, and several times the host's work."""
    dense = [gradient.coalesce().values() if gradient.is_sparse else gradient for gradient in gradients]
    if math.isinf(kind):
        dense = [gradient for gradient in dense if gradient.numel()]  # nothing is the largest of none
    if over is not None:
        dense = [gradient / over.to(gradient.device) for gradient in dense]
    by_kind = _by_kind(dense)
    if not by_kind or any(
        device.type not in FOREACH or hasattr(one[0], "to_local") for (device, _), one in by_kind.items()
    ):
        return torch.nn.utils.get_total_norm(dense, kind)
    norms: list[Tensor] = []
    for (_, dtype), alike in by_kind.items():
        norms += torch._foreach_norm(alike, kind, dtype=torch.float32 if dtype in HALF else None)
    if len(by_kind) > 1:
        wide = torch.float64 if any(norm.dtype == torch.float64 for norm in norms) else torch.float32
        norms = [norm.to(norms[0].device, wide) for norm in norms]
    norm: Tensor = torch.linalg.vector_norm(torch.stack(norms), kind)
    return norm


def clip(gradients: Sequence[Tensor], max_norm: float, norm: Tensor) -> None:
    """Scales gradients of norm `norm` to at most `max_norm`."""
    scale(gradients, torch.clamp(max_norm / (norm + EPSILON), max=1.0))


def scale(gradients: Sequence[Tensor], factor: Tensor | float) -> None:
    for gradient in gradients:
        if gradient.is_sparse:
            gradient.mul_(factor.to(gradient.device) if isinstance(factor, Tensor) else factor)
    for (device, _), alike in _by_kind([local(one) for one in gradients if not one.is_sparse]).items():
        torch._foreach_mul_(alike, factor.to(device) if isinstance(factor, Tensor) else factor)


def _by_kind(gradients: Iterable[Tensor]) -> dict[tuple[torch.device, torch.dtype], list[Tensor]]:
    """What one kernel can take together."""
    by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for gradient in gradients:
        by_kind.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    return by_kind


class Norm(Protocol):
    """Of the whole gradient over all ranks, divided by `over`; `kind` is 2 or infinity."""

    def __call__(self, kind: float, over: Tensor | None = None) -> Tensor: ...


class Look(NamedTuple):
    finite: bool  # every element
    norm: Tensor | None
    read: float = math.inf  # the norm, where it was read


def look_at(norm_of: Norm, norm: Tensor | None) -> Look:
    """Whether every element is finite, and the norm. One number is read, of one pass, or of none where it is known."""
    # On a CPU the largest element takes eighteen times as long as the norm, and says no more in the usual case.
    read = (norm_of(2.0) if norm is None else norm).item()
    if math.isfinite(read):
        return Look(True, norm, read)
    largest = norm_of(math.inf)  # which cannot overflow, as a sum of squares can
    if not math.isfinite(largest.item()):
        return Look(False, norm)
    return Look(True, None if norm is None else largest * norm_of(2.0, largest))


def divide_in_step(optimizers: Sequence[Optimizer]) -> bool:
    """Whether all of these divide gradients in the kernel that steps (`fused=True`), as a GradScaler lets them.

    By the attributes that it sets, and takes away again: `grad_scale`, in float32, and `found_inf`. torch's own alone:
    a wrapper may show another's attributes, and keep to itself those that it is given. Not with hooks, which may look
    at gradients, nor of DTensors, whose kernels take no plain tensor beside them.
    """
    return bool(optimizers) and all(
        type(one).__module__.startswith("torch.optim.")
        and getattr(one, "_step_supports_amp_scaling", False)
        and all(group.get("fused") for group in one.param_groups)
        and all(getattr(hook, "__module__", "").startswith("distaccum.") for hook in _pre_hooks(one))
        and not any(hasattr(p, "to_local") or p.dtype == torch.float64 for g in one.param_groups for p in g["params"])
        for one in optimizers
    )


def _pre_hooks(optimizer: Optimizer) -> list[Any]:
    own: dict[int, Any] = getattr(optimizer, "_optimizer_step_pre_hooks", {})  # private, as is the other
    everyone: dict[int, Any] = getattr(sys.modules[Optimizer.__module__], "_global_optimizer_pre_hooks", {})
    return [*own.values(), *everyone.values()]


@contextmanager
def divided(optimizers: Sequence[Optimizer], by: Tensor | None) -> Iterator[None]:
    """In it each step divides the gradients first. `by` is a tensor, so that nobody waits for it."""
    if by is None:
        yield
        return
    stepping: list[Any] = list(optimizers)
    for one in stepping:
        one.grad_scale, one.found_inf = by, torch.zeros_like(by)
    try:
        yield
    finally:
        for one in stepping:
            del one.grad_scale, one.found_inf


class Sum:
    """What the gradients of one parameter have added up to, in a wider dtype."""

    __slots__ = ("dtype", "grad", "parameter")

    def __init__(self, parameter: nn.Parameter, dtype: torch.dtype) -> None:
        self.parameter, self.dtype = parameter, dtype
        self.grad: Tensor | None = None


class Phase(Enum):
    """What becomes of a gradient when backward has made it."""

    OFF = auto()  # no window's: it stays in .grad
    ADD = auto()  # it goes into the sum, and .grad is empty again
    PASS = auto()  # it stays in .grad, to be reduced by itself
    ROUND = auto()  # the sum with it is rounded into .grad


class Sums:
    """Adds up the gradients of low-precision parameters in `dtype`; `.grad` is rounded once, when all are in.

    Equivalent to, after each backward of a window,

        wide[p] += p.grad
        p.grad = None

    and `p.grad = wide[p].to(p.dtype)` after the last; but a parameter at a time, within backward, so that only one
    gradient is there twice. The hook of a parameter runs before DDP's: what DDP reduces, in the backward that reduces
    and overlapped with it, is the rounded sum.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], dtype: torch.dtype, kept: Container[int] = frozenset()
    ) -> None:
        """`kept`: ids of parameters whose .grad stays, as zeros, when it has been added."""
        self._sums: dict[int, Sum] = {}
        self._dtype, self._kept = dtype, kept
        self.phase = Phase.OFF
        self._hooks: list[Any] = []
        weakref.finalize(self, _remove, self._hooks)
        self.watch(parameters)

    def watch(self, parameters: Iterable[nn.Parameter]) -> None:
        """Those of them that are new, or trained now, add up too; an error where another's are at work on them."""
        this = weakref.ref(self)
        for p in parameters:
            hooks = (getattr(p, "_post_accumulate_grad_hooks", None) or {}).values()
            others = [other() for hook in hooks if (other := getattr(hook, "sums", this)) is not this]
            if any(other is not None and other is not self and other.phase is not Phase.OFF for other in others):
                raise DistaccumError(
                    "another accumulator's window with accumulate_dtype is open on this model, and takes its "
                    "gradients; finish one window before the next begins"
                )
            if id(p) not in self._sums and p.requires_grad and (wide := _wider(p, self._dtype)):
                self._sums[id(p)] = Sum(p, wide)
                self._hooks += [
                    p.register_hook(_before(this, id(p))),  # type: ignore[no-untyped-call]  # torch's
                    p.register_post_accumulate_grad_hook(_into(this)),  # type: ignore[no-untyped-call]  # torch's
                ]

    def __getstate__(self) -> dict[str, Any]:
        """Of a copy, which watches other parameters."""
        return {**self.__dict__, "_sums": {}, "_hooks": []}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        weakref.finalize(self, _remove, self._hooks)

    def of(self, parameter: nn.Parameter) -> Sum | None:
        return self._sums.get(id(parameter))

    def holders(self, parameters: Iterable[nn.Parameter]) -> list[Any]:
        """In whose .grad gradients are before they are rounded."""
        return [self._sums.get(id(parameter), parameter) for parameter in parameters]

    def holds(self, parameter: nn.Parameter) -> bool:
        one = self.of(parameter)
        return one is not None and one.grad is not None

    def standing(self, parameter: nn.Parameter) -> Tensor | None:
        """What has added up, also when a gradient has just come."""
        one, come = self.of(parameter), parameter.grad
        if one is None or one.grad is None:
            return come
        return one.grad + come if self.phase is Phase.PASS and come is not None else one.grad

    def take(self, parameter: nn.Parameter) -> None:
        """A gradient has come."""
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
        """No gradient has come, and this backward reduces what .grad shows."""
        self.round([self._sums[parameter].parameter])

    def take_all(self, but: Callable[[nn.Parameter], bool]) -> None:
        """Those that a PASS left."""
        for one in self._sums.values():
            if one.parameter.grad is not None and not but(one.parameter):
                _add(one, one.parameter.grad)
                self._let_go(one.parameter)

    def round(self, parameters: Iterable[nn.Parameter] | None = None) -> None:
        """Into .grad, of all or of these, where no backward does it."""
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
    """What adds up in more than the parameter's own dtype; None where that is enough."""
    wide = dtype.to_complex() if parameter.is_complex() else dtype
    return None if torch.promote_types(parameter.dtype, wide) == parameter.dtype else wide


def _remove(hooks: list[Any]) -> None:
    for hook in hooks:
        hook.remove()


def _into(sums: weakref.ref[Sums]) -> Callable[[Tensor], None]:
    """A hook, which goes with the sums."""

    def take(parameter: Any) -> None:
        known = sums()
        if known is not None and known.phase not in (Phase.OFF, Phase.PASS):
            known.take(parameter)

    take.sums = sums  # type: ignore[attr-defined]  # by which others know it
    return take


def _before(sums: weakref.ref[Sums], parameter: int) -> Callable[[Tensor | None], None]:
    """A hook. A backward that reaches a parameter and gives it no gradient may not run `_into`'s, and runs DDP's."""

    def show(gradient: Tensor | None) -> None:
        if gradient is None and (known := sums()) is not None and known.phase is Phase.ROUND:
            known.show(parameter)

    return show


@torch.no_grad()
def _add(one: Sum, gradient: Tensor) -> None:
    if one.grad is not None and gradient.is_sparse != one.grad.is_sparse:
        gradient, one.grad = gradient.to_dense(), one.grad.to_dense()
    one.grad = gradient.to(one.dtype) if one.grad is None else one.grad.add_(gradient)
