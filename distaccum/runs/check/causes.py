"""Why the accumulated gradient is not the big batch's, as far as types of layers and the loss's parts tell."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import nn

from ...batchnorm import KINDS
from ...cutting import cut_batch, tensors_in
from ...law import as_int_if_whole, shorten
from .comparison import Comparison, uneven_sizes, weighted_sum, without_labels

DROPOUTS = nn.Dropout | nn.Dropout1d | nn.Dropout2d | nn.Dropout3d | nn.AlphaDropout | nn.FeatureAlphaDropout


def causes_of(comparison: Comparison) -> list[str]:
    """The causes that are found; the modules that are named are left in eval mode, where other causes show."""
    found = []
    training = [(name, module) for name, module in comparison.modules if module.training]
    if _differs(comparison):
        dropping = [(name, module) for name, module in training if _drops(module)]
        if dropping:
            found.append(f"dropout: random numbers are drawn by {_kinds(dropping)}, and micro-batches draw others")
            _into_eval(module for _, module in dropping)
        if not dropping or _differs(comparison):
            where = ", outside of dropout layers" if dropping else ""
            found.append(
                "random: the model or the loss gives the same batch another gradient the second time: random numbers "
                f"are drawn{where}, or something is kept between calls (a buffer, an attribute)"
            )
            _into_eval(comparison.models)
    if normalising := [(name, module) for name, module in training if isinstance(module, KINDS)]:
        found.append(
            f"batchnorm: in training mode a sample's output depends on the others in {_kinds(normalising)}, "
            "and a micro-batch has fewer of them"
        )
        _into_eval(module for _, module in normalising)
    if found and (_differs(comparison) or comparison.agrees(comparison.compare())):
        return found
    in_losses = (_cause_in_the_loss(comparison, name) for name in comparison.reductions)
    found += dict.fromkeys(cause for cause in in_losses if cause is not None)
    return found or ["unknown: no cause was found; the error is beyond rounding"]


def _differs(comparison: Comparison) -> bool:
    """Returns whether a second call on the whole batch gives another gradient, as random numbers go on."""
    name, batch = next(iter(comparison.reductions)), comparison.batch
    return comparison.differ(comparison.bare(name, batch), comparison.bare(name, batch, restore=False))


def _cause_in_the_loss(comparison: Comparison, name: str) -> str | None:
    """Why the loss of this name is not the declared sum of its parts' losses; None where it is."""
    batch, length, reduction = comparison.batch, comparison.length, comparison.reductions[name]
    at_once = comparison.count(name, batch, length)
    if not at_once:
        return None
    sizes = uneven_sizes(batch, length, [max(1, length // 6), max(2, length // 2)], comparison.whole)
    parts = list(cut_batch(batch, sizes, length, comparison.whole))
    counts = [comparison.count(name, part, size) for part, size in zip(parts, sizes, strict=True)]
    counted = [i for i, count in enumerate(counts) if count]
    measured = [comparison.bare(name, parts[i]) for i in counted]
    pairs = zip(counted, measured, strict=True)
    not_finite = comparison.not_finite | {without_labels(parts[i]) for i, one in pairs if not math.isfinite(one.loss)}
    if not_finite:
        why = max(not_finite)
        return (
            f"count: the loss of a micro-batch is nan: {why}"
            if why
            else "loss: a micro-batch's loss is not finite, and the whole batch's is"
        )
    of_name = f" of {name!r}" if len(comparison.reductions) > 1 else ""
    gave = f"{[as_int_if_whole(count) for count in counts]} for parts of {sizes} samples"
    if sum(counts) != at_once and reduction != "sum":
        at_once = as_int_if_whole(at_once)
        return f"count: it gave {at_once}{of_name} for the whole batch and {gave}, which should add up to it"
    exact = comparison.bare(name, batch)

    def fits(numbers: Sequence[float] | None) -> bool:
        """Returns whether the whole is the mean of its parts by these numbers; None: their sum."""
        numbers = [numbers[i] for i in counted] if numbers else None
        weights = [1.0] * len(counted) if numbers is None else [one / (sum(numbers) or math.nan) for one in numbers]
        made = weighted_sum(measured, weights)
        size = sum(abs(weight * part.loss) for weight, part in zip(weights, measured, strict=True))
        is_same_loss = abs(made.loss - exact.loss) <= comparison.bound() * max(size, 1e-9)
        return is_same_loss and not comparison.differ(made, exact)

    is_mean = reduction == "mean"
    if fits(counts if is_mean else None):
        return None
    if is_mean and fits(None):
        return (
            f"reduction: the criterion{of_name} sums over its batch and reduction='mean' says that it averages; say "
            "'sum' or 'sum_to_mean', or let it average"
        )
    for what, cure, numbers in _denominators(parts, sizes):
        if fits(numbers):
            averages = f"the criterion{of_name} averages over {what}"
            if is_mean:
                return f"count: {averages}, and count gave {gave}; {cure}"
            return f"reduction: {averages} and {reduction=} says that it sums; say 'mean', or let it sum"
    return (
        f"loss: the loss{of_name} is no sum or mean over samples, labels or what count gave ({gave}): samples depend "
        "on each other in it or in the model, or it is a mean by weights of its own, whose sum count has to give"
    )


def _denominators(parts: Sequence[Any], sizes: Sequence[int]) -> Iterator[tuple[str, str, list[float]]]:
    """Lists what a criterion may average over, with the cure and the number in each part; the likely ones first."""
    yield "samples", "leave count at count_samples", [float(size) for size in sizes]
    for ignored in (-100, 0):  # padding is often 0 where a label is -100
        for column in zip(*map(tensors_in, parts), strict=True):
            where, first = column[0]
            if first.ndim == 0 or first.is_floating_point() or first.is_complex():
                continue
            for shift in (True, False) if first.ndim > 1 else (False,):
                kept = [(one[:, 1:] if shift else one).ne(ignored).sum() for _, one in column]
                options = f"{', ignore_index=0' * (not ignored)}{', shift=True' * shift}"
                what = f"the labels in {where} that are not {ignored}{', without the first of each row' * shift}"
                yield what, f"count=count_tokens({where}{options})", [float(one) for one in kept]


def _drops(module: nn.Module) -> bool:
    if isinstance(module, nn.MultiheadAttention | nn.RNNBase):
        return module.dropout > 0
    return isinstance(module, DROPOUTS) and module.p > 0


def _into_eval(modules: Iterable[nn.Module]) -> None:
    for module in modules:
        for one in module.modules():
            one.training = False


def _kinds(found: Sequence[tuple[str, nn.Module]]) -> str:
    """The names of modules, and their classes, as "drop (Dropout)"."""
    kinds = ", ".join(dict.fromkeys(type(module).__name__ for _, module in found))
    return f"{shorten([name or 'the model' for name, _ in found])} ({kinds})"
