"""Finds why the accumulated gradient is not the big batch's, from the types of layers and the losses of parts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from ...batch import cut_batch, tensors_in
from ...batchnorm import KINDS
from ...law import as_int_if_whole
from ...text import shorten
from .comparison import Comparison, uneven_sizes, weighted_sum

DROPOUTS = nn.Dropout | nn.Dropout1d | nn.Dropout2d | nn.Dropout3d | nn.AlphaDropout | nn.FeatureAlphaDropout


def causes_of(comparison: Comparison) -> list[str]:
    """The causes that show; leaves the modules that they name in eval mode, so that other causes show too."""
    causes, dropping = [], []
    training = [(name, module) for name, module in comparison.modules if module.training]
    if _differs(comparison):
        if dropping := [(name, module) for name, module in training if _drops(module)]:
            causes.append(
                f"dropout: random numbers are drawn by {_into_eval(dropping)}, and micro-batches draw others; the "
                "gradient is that of the masks that were drawn, as dropout means it: nothing to do, where this is the "
                "only cause"
            )
        if not dropping or _differs(comparison):
            _into_eval(training)
            agrees = "in eval mode all calls agree, as where attention drops by itself (GPT-2's); the check went on so"
            causes.append(
                "random: the model or the loss gives the same batch another gradient the second time: random numbers "
                f"are drawn{', outside of dropout layers' * bool(dropping)}, or something is kept between calls (a "
                "buffer, an attribute); random numbers need no cure if they are the only cause; "
                f"{'draw none to see the other causes' if _differs(comparison) else agrees}"
            )
    if normalising := [(name, module) for name, module in training if isinstance(module, KINDS)]:
        causes.append(
            "batchnorm: in training mode a sample's output depends on the others in "
            f"{_into_eval(normalising)}, and a micro-batch has fewer of them; freeze them "
            "(distaccum.batchnorm.freeze), put GroupNorm in their place (to_groupnorm, there), or accept it with "
            "batchnorm='ignore'"
        )
    if causes:
        if _differs(comparison):
            return causes
        errors = comparison.compare()
        if comparison.agrees(errors):
            left = max(error for _, error in errors)
            # A layer of your own may do more than drop in training mode.
            are_torchs = all(type(module).__module__.startswith("torch.") for _, module in dropping)
            if causes[-1].startswith("random"):
                causes[-1] += f", and the error is {left:.1e}"
            elif len(causes) == 1 and dropping and are_torchs:
                causes[0] += f", and it is: the error is {left:.1e} with these layers in eval mode"
            return causes
    in_losses = (_cause_in_the_loss(comparison, name) for name in comparison.reductions)
    causes += dict.fromkeys(cause for cause in in_losses if cause is not None)
    return causes or ["unknown: no cause was found; the error is beyond rounding"]


def _differs(comparison: Comparison) -> bool:
    """Returns whether a second call on the whole batch, with later random numbers, gives another gradient."""
    name, batch = next(iter(comparison.reductions)), comparison.batch
    return comparison.differ(comparison.bare(name, batch), comparison.bare(name, batch, restore=False))


def _cause_in_the_loss(comparison: Comparison, name: str) -> str | None:
    """The reason why the loss of this name is not the declared sum of its parts' losses; None if it is."""
    batch, reduction, sizes = comparison.batch, comparison.reductions[name], uneven_sizes(comparison.length)
    parts = list(cut_batch(batch, sizes, comparison.length, comparison.whole))
    counts = [comparison.count(name, part, size) for part, size in zip(parts, sizes, strict=True)]
    if not any(counts):
        return None
    measured = [comparison.bare(name, part) for part in parts]
    of_name = f" of {name!r}" if len(comparison.reductions) > 1 else ""
    gave = f"{[as_int_if_whole(count) for count in counts]} for parts of {sizes} samples"
    exact = comparison.bare(name, batch)

    def fits(numbers: Sequence[float], *, is_sum: bool = False) -> bool:
        """Returns whether the whole is its parts' mean weighted by `numbers`, or the sum of those with a number."""
        pairs = [(part, number) for part, number in zip(measured, numbers, strict=True) if number]
        if not pairs:
            return False
        terms = [(part, 1.0 if is_sum else number / sum(numbers)) for part, number in pairs]
        made, size = weighted_sum(terms), sum(abs(weight * part.loss) for part, weight in terms)
        is_same_loss = abs(made.loss - exact.loss) <= comparison.bound() * max(size, 1e-9)
        return is_same_loss and not comparison.differ(made, exact)

    is_mean = reduction == "mean"
    if comparison.is_finite and fits(counts, is_sum=not is_mean):
        return None
    if is_mean and fits(counts, is_sum=True):
        return (
            f"reduction: the criterion{of_name} sums over its batch and reduction='mean' says that it averages; say "
            "'sum' or 'sum_to_mean', or let it average"
        )
    for what, cure, numbers in _denominators(parts, sizes):
        if (numbers != counts or not is_mean) and fits(numbers):
            averages = f"the criterion{of_name} averages over {what}"
            if is_mean:
                return f"count: {averages}, and count gave {gave}; {cure}"
            return f"reduction: {averages} and {reduction=} says that it sums; say 'mean', or let it sum"
    if not (comparison.is_finite and all(math.isfinite(part.loss) for part in measured)):
        return "loss: a micro-batch's loss is not finite, and the whole batch's is"
    return (
        f"loss: the loss{of_name} is no sum or mean over samples, labels or what count gave ({gave}): samples depend "
        "on each other in it or in the model (a loss over pairs: accumulator.contrast), or it is a mean by weights of "
        "its own, and count must return their sum"
    )


def _denominators(parts: Sequence[Any], sizes: Sequence[int]) -> Iterator[tuple[str, str, list[float]]]:
    """Yields what a criterion may average over, with the cure and the number in each part."""
    yield "samples", "leave count at count_samples", [*map(float, sizes)]
    for column in zip(*map(tensors_in, parts), strict=True):
        where, first = column[0]
        if first.ndim == 0 or first.is_floating_point() or first.is_complex():
            continue
        for shift in (True, False) if first.ndim > 1 else (False,):
            kept = [float((labels[:, 1:] if shift else labels).ne(-100).sum()) for _, labels in column]
            what = f"the labels in {where} that are not -100{', without the first of each row' * shift}"
            yield what, f"count=count_tokens({where}{', shift=True' * shift})", kept


def _drops(module: nn.Module) -> bool:
    if isinstance(module, nn.MultiheadAttention | nn.RNNBase):
        return module.dropout > 0
    return isinstance(module, DROPOUTS) and module.p > 0


def _into_eval(modules: Sequence[tuple[str, nn.Module]]) -> str:
    """Puts modules into eval mode; returns their names and classes, such as "drop (Dropout)"."""
    for _, module in modules:
        module.eval()
    kinds = ", ".join(dict.fromkeys(type(module).__name__ for _, module in modules))
    return f"{shorten([name or 'the model' for name, _ in modules])} ({kinds})"
