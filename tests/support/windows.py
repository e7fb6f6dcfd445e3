"""Accumulators, their windows, what they refuse, and the vectors that are compared."""

import gc
import math
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD

from distaccum import Accumulator, DistaccumError


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def flat(tensors: Iterable[Tensor]) -> Tensor:
    """All in one vector: of DTensors the whole, of sparse tensors all numbers, of complex numbers both parts."""
    whole = [full(tensor.to_dense() if tensor.is_sparse else tensor).detach() for tensor in tensors]
    return torch.cat([(torch.view_as_real(t) if t.is_complex() else t).flatten() for t in whole])


def gradient(module: nn.Module) -> Tensor:
    """None counts as zeros."""
    return flat(torch.zeros_like(p) if p.grad is None else p.grad for p in module.parameters())


def weights(module: nn.Module) -> Tensor:
    return flat(module.parameters())


def set_weights(module: nn.Module, vector: Tensor) -> None:
    """Takes what `weights` gave."""
    values = [torch.view_as_real(p.detach()) if p.is_complex() else p.detach() for p in module.parameters()]
    for value, part in zip(values, vector.split([value.numel() for value in values]), strict=True):
        value.copy_(part.view_as(value))


def error(seen: Tensor, exact: Tensor) -> float:
    """Relative error in the 2-norm."""
    return float((seen.double() - exact.double()).norm() / exact.double().norm())


def accumulating(model: Any, lr: float = 0.0, **options: Any) -> tuple[Any, Accumulator]:
    """The model, and an Accumulator that steps it by SGD."""
    return model, Accumulator(model, SGD(model.parameters(), lr=lr), **options)


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    return model(batch["x"] if isinstance(batch, dict) else batch).square().mean()


def gradient_of(model: nn.Module, whole: Any, loss_fn: Callable[..., Tensor] = loss_of) -> Tensor:
    """The gradient of one call on the whole batch: the oracle."""
    loss_fn(model, whole).backward()
    return gradient(model)


def backward(window: Any, losses: Any) -> None:
    """Of a loss, or of a dict of named ones."""
    window.backward(**losses) if isinstance(losses, dict) else window.backward(losses)


def run_window(window: Any, model: nn.Module, loss_fn: Callable[..., Any] = loss_of) -> Any:
    for micro_batch in window:
        backward(window, loss_fn(model, micro_batch))
    return window


def one_weight(**options: Any) -> tuple[nn.Module, Accumulator]:
    return accumulating(nn.Linear(1, 1, bias=False), **options)


def numbers_of(window: Any, model: nn.Module) -> list[int]:
    """Runs and steps a window of single numbers, and returns them; the gradient must be their mean."""
    numbers = []
    for x in window:
        numbers.append(int(x))
        window.backward(model(x).mean())
    assert math.isclose(model.weight.grad.item(), sum(numbers) / len(numbers), rel_tol=1e-6)
    window.step()
    return numbers


def refused(call: Callable[..., object], *args: Any, **options: Any) -> str:
    """The error with its type, or "nothing"."""
    try:
        call(*args, **options)
    except (DistaccumError, TypeError, ValueError) as raised:
        return f"{type(raised).__name__}: {raised}"
    return "nothing"


@contextmanager
def freed_by_counts() -> Iterator[None]:
    """Reference counts alone free objects within."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def warned() -> Iterator[list[str]]:
    """The texts of the warnings within, once they are over; none is an error there."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield texts
    texts += [str(warning.message) for warning in caught]


def says(sentence: str, said: str) -> bool:
    """Compares an error with the sentence of a table, in which ... stands for any words."""
    return re.fullmatch(".*".join(map(re.escape, sentence.split("..."))), said, re.DOTALL) is not None


def rows_of(table: str) -> list[list[str]]:
    """The cells of a table: a row a line, with | between cells."""
    return [[cell.strip() for cell in line.split(" | ")] for line in table.strip().splitlines()]


def hooked(x: Tensor, hook: Callable[[Tensor], Tensor | None]) -> Tensor:
    """The same numbers, with a gradient that goes through `hook`."""
    x = x.clone()
    x.register_hook(hook)
    return x
