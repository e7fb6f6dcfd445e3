"""Torch's criterions, and the number that their means divide by."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

BY_CLASS = ("cross_entropy", "nll_loss", "linear_cross_entropy", "log_prob")  # a target may count for nothing
_BY_ROW = """ctc_loss cosine_embedding_loss margin_ranking_loss multi_margin_loss multilabel_margin_loss
multilabel_soft_margin_loss triplet_margin_loss triplet_margin_with_distance_loss"""
_BY_ELEMENT = """mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy kl_div gaussian_nll_loss
binary_cross_entropy_with_logits poisson_nll_loss hinge_embedding_loss soft_margin_loss"""

See = Callable[[str, dict[str, Any], Tensor], object]


@contextmanager
def hearing(see: See, key: str) -> Iterator[list[str]]:
    """In the block, calls `see` with the name, arguments and loss of each call, except in compiled code.

    The code of each function is replaced, not its name: a script may hold it anywhere already. Yields the names of
    those that are not heard, since another library has put its own in their place.
    """
    names = [name for name in (*BY_CLASS, *f"{_BY_ROW} {_BY_ELEMENT}".split()) if hasattr(functional, name)]
    every = {name: getattr(functional, name) for name in names}
    own = [function for function in every.values() if getattr(function, "__globals__", None) is vars(functional)]
    with ExitStack() as stack:
        for function in own:
            for name in ("__dict__", "__code__", "__kwdefaults__"):
                stack.callback(setattr, function, name, getattr(function, name))
            code = function.__code__
            original: Any = FunctionType(code, function.__globals__, function.__name__, function.__defaults__)
            original.__kwdefaults__ = function.__kwdefaults__
            call = _heard_by(see, original, key, tuple(inspect.signature(function).parameters))
            function.__dict__ = {**vars(function), "__wrapped__": original}  # shows its signature and source
            function.__code__ = _in_its_place.__code__
            function.__kwdefaults__ = {"call": call}
        yield [name for name, function in every.items() if function not in own]


def _in_its_place(*args: Any, call: Any, **options: Any) -> Any:
    return call(*args, **options)


def _heard_by(see: See, original: Any, key: str, names: Sequence[str]) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        loss = original(*args, **options)
        if torch.compiler.is_compiling() or type(loss) is not Tensor or loss.grad_fn is None:
            return loss
        node: Any = loss.grad_fn
        if key not in node.metadata:  # another criterion may have called this one
            see(original.__name__, dict(zip(names, args, strict=False)) | options, loss)
        return loss

    return call


def reduction_of(given: dict[str, Any]) -> str:
    if given.get("reduce") is False:
        return "none"
    if given.get("size_average") is not None:
        return "mean" if given["size_average"] else "sum"
    return str(given.get("reduction", "mean"))


def is_over_pairs(name: str, given: dict[str, Any]) -> Any:
    """True, left on its device, for scores of a batch's rows among each other: row i has the target i."""
    target: Any = given.get("target")
    if name != "cross_entropy" or target.ndim != 1 or len(target) < 3 or given["input"].shape != 2 * target.shape:
        return False
    return (target == torch.arange(len(target), device=target.device)).all()


def count_of(name: str, given: dict[str, Any]) -> tuple[Any, int]:
    """The number of tokens or elements that its mean divides by, left on its device, and the number of rows.

    Without a reduction, a mask of the tokens that count.
    """
    first: Any = next(given[key] for key in ("input", "log_probs", "input1", "anchor") if key in given)
    target = given.get("target", given.get("targets"))
    rows = len(first) if first.ndim else 1
    if name in BY_CLASS and isinstance(target, Tensor) and not target.is_floating_point():
        kept = target != given.get("ignore_index", -100)
        weight = given.get("weight")
        if reduction_of(given) == "none":
            return kept, rows  # of which backward may leave out more
        return (kept.sum() if weight is None else (weight[target.where(kept, 0)] * kept).sum()), rows
    if name in BY_CLASS:  # its targets are probabilities
        return first.numel() // (first.shape[1] if first.ndim > 1 else first.shape[0]), rows
    if name == "ctc_loss":
        rows = len(given["target_lengths"])
    if name in _BY_ROW.split() or reduction_of(given) == "batchmean":
        return rows, rows
    shapes = [one.shape for one in (first, target) if isinstance(one, Tensor)]
    return torch.Size(torch.broadcast_shapes(*shapes)).numel(), rows  # type: ignore[no-untyped-call]  # torch's
