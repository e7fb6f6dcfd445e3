"""Why the accumulated gradient is not the big batch's, as far as types of layers and the loss's parts tell."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn

from ...batchnorm import KINDS
from ...law import shorten
from .compare import Comparison, Measured
from .weights import cause_in_the_loss

DROPOUTS = nn.Dropout | nn.Dropout1d | nn.Dropout2d | nn.Dropout3d | nn.AlphaDropout | nn.FeatureAlphaDropout
Named = tuple[str, nn.Module]


def causes_of(comparison: Comparison) -> list[str]:
    """The causes that are found; the modules that are named are left in eval mode, where other causes show."""
    if comparison.differ(_gradient(comparison, 1), _gradient(comparison, 1, restore=False)):
        return [
            "state: the same batch gives another gradient the second time: something is kept between calls (a buffer, "
            "an attribute), or drawn by a generator of the loss's own"
        ]
    found = []
    training = [(name, module) for name, module in comparison.modules if module.training]
    if _is_random(comparison):
        dropping = [(name, module) for name, module in training if _drops(module)]
        if dropping:
            found.append(f"dropout: random numbers are drawn by {_kinds(dropping)}, and micro-batches draw others")
            _into_eval(module for _, module in dropping)
        if not dropping or _is_random(comparison):
            where = ", outside of dropout layers" if dropping else ""
            found.append(
                f"random: random numbers are drawn by the model or the loss{where}, and micro-batches draw others"
            )
            _into_eval(comparison.subject.models)
    if normalising := [(name, module) for name, module in training if isinstance(module, KINDS)]:
        found.append(
            f"batchnorm: in training mode a sample's output depends on the others in {_kinds(normalising)}, "
            "and a micro-batch has fewer of them"
        )
        _into_eval(module for _, module in normalising)
    if found and (_is_random(comparison) or comparison.agrees(comparison.compare())):
        return found
    for name in comparison.subject.reductions:
        if cause := cause_in_the_loss(comparison, name):
            found.append(cause)
    return list(dict.fromkeys(found)) or ["unknown: no cause was found; the error is beyond rounding"]


def _gradient(comparison: Comparison, seed: int, *, restore: bool = True) -> Measured:
    """The whole batch's gradient, of the first loss."""
    name = next(iter(comparison.subject.reductions))
    return comparison.bare(name, comparison.batch, seed=seed, restore=restore)


def _is_random(comparison: Comparison) -> bool:
    return comparison.differ(_gradient(comparison, 1), _gradient(comparison, 2))


def _drops(module: nn.Module) -> bool:
    if isinstance(module, nn.MultiheadAttention | nn.RNNBase):
        return module.dropout > 0
    return isinstance(module, DROPOUTS) and module.p > 0


def _into_eval(modules: Iterable[nn.Module]) -> None:
    for module in modules:
        for one in module.modules():
            one.training = False


def _kinds(found: Sequence[Named]) -> str:
    """The names of modules, and their classes.

    >>> _kinds([("drop", nn.Dropout())])
    'drop (Dropout)'
    """
    kinds = ", ".join(dict.fromkeys(type(module).__name__ for _, module in found))
    return f"{shorten([name or 'the model' for name, _ in found])} ({kinds})"
