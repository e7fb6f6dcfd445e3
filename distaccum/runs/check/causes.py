"""Why what is accumulated is not the big batch's gradient: found by trying, and named."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...batchnorm import KINDS
from ...gradients.snapshot import set_seed
from ...law.batches import cut_batch, map_tensors, tensors_in
from ...law.shares import listed
from .compare import Comparison, Measured, weighted_sum

DROPOUTS = nn.Dropout | nn.Dropout1d | nn.Dropout2d | nn.Dropout3d | nn.AlphaDropout | nn.FeatureAlphaDropout


class Diagnosis:
    """Runs the model again: with other random numbers, layers on halves of inputs, the loss on parts of the batch."""

    def __init__(self, comparison: Comparison) -> None:
        self._of = comparison

    def causes(self) -> list[str]:
        name = next(iter(self._of.subject.reductions))
        if self._of.differ(self._of.bare(name, self._of.batch), self._of.bare(name, self._of.batch)):
            keeping = self._found(self._gives_another, ())
            where = f" in {_kinds(keeping)}" if keeping else ""
            or_drawn = "" if keeping else ", or drawn by a generator of the loss's own"
            return [
                "state: the gradient of the same batch is another one the second time, although buffers and random "
                f"numbers were put back: something is kept between calls{where}{or_drawn}"
            ]
        causes = []
        training = [(module, module.training) for _, module in self._of.modules]
        try:
            if self._is_random(name):
                drawing = self._found(self._draws, DROPOUTS)
                if drawing:
                    causes.append(
                        f"dropout: random numbers are drawn by {_kinds(drawing)}, and micro-batches draw others"
                    )
                    _set_training([module for _, module in drawing], False)
                if self._is_random(name):
                    causes += self._random_elsewhere(name, is_named=bool(drawing))
            mixing = self._found(self._mixes, KINDS)
            in_eval = self._mixing_in_eval([module for _, module in mixing])
            normalising = [(n, m) for n, m in mixing if m.training and id(m) not in in_eval]
            if normalising:
                causes.append(
                    f"batchnorm: in training mode a sample's output depends on the others in {_kinds(normalising)}, "
                    "and a micro-batch has fewer of them"
                )
                _set_training([module for _, module in normalising], False)
            if self._is_random(name) or (
                max(error for _, error in self._of.compare()) <= self._of.bound() and not self._of.unlike
            ):
                return causes
            changing = self._changing_modules(name)
            if changing:
                return [
                    *causes,
                    f"state: each forward changes buffers that the gradient depends on, of {_kinds(changing)}",
                ]
            others = [one for one in mixing if one not in normalising]
            for each in self._of.subject.reductions:
                causes += self._cause_in_the_loss(each, others)
            return list(dict.fromkeys(causes)) or ["unknown: no cause was found; the error is beyond rounding"]
        finally:
            for module, was in training:
                module.training = was

    def _random_elsewhere(self, name: str, *, is_named: bool) -> list[str]:
        """What draws beside the modules that are known to: others, which are then in eval mode, or the loss."""
        training = [(module, module.training) for _, module in self._of.modules]
        _set_training([module for _, module in self._of.modules], False)
        drawn = "random numbers are drawn by the model or the loss"
        if self._is_random(name) and not self._of.engine.hides_parameters and not self._found(self._draws, ()):
            for module, was in training:
                module.training = was
            drawn, is_named = "the loss draws random numbers, outside of the model's modules", False
        return [] if is_named else [f"random: {drawn}, and micro-batches draw others"]

    def _is_random(self, name: str) -> bool:
        return self._of.differ(self._of.bare(name, self._of.batch, seed=1), self._of.bare(name, self._of.batch, seed=2))

    def _changing_modules(self, name: str) -> list[tuple[str, nn.Module]]:
        """Those with buffers that a forward changes, where the next gradient is another one for it."""
        first = self._of.bare(name, self._of.batch, seed=1)
        changed = [
            (n, m)
            for n, m in self._of.modules
            if any(not torch.equal(b, was) for b, was in self._of.before.buffers_of(m))
        ]
        return changed if self._of.differ(first, self._of.bare(name, self._of.batch, seed=1, put_back=False)) else []

    def _cause_in_the_loss(self, name: str, mixing: list[tuple[str, nn.Module]]) -> list[str]:
        """What the loss of the whole is, as a weighted sum of those of its parts."""
        if not self._of.count(name, self._of.batch):
            return []
        if why := min(filter(None, self._of.unlike), default=""):
            return [f"count: the loss of a micro-batch is nan: {why}"]
        sizes = _uneven(self._of.length)
        parts = list(cut_batch(self._of.batch, sizes, self._of.length))
        counts = [self._of.count(name, part) for part in parts]
        kept = [i for i, n in enumerate(counts) if n]
        of_parts = [self._of.bare(name, parts[i]) for i in kept]
        whole = self._of.bare(name, self._of.batch)
        prefix = f" of {name!r}" if len(self._of.subject.reductions) > 1 else ""
        if not all(math.isfinite(one.loss) for one in of_parts):
            return [
                f"count: it gave {_tidy(counts)}{prefix} for parts of {sizes} samples, and the loss of one of them is "
                "not finite: the criterion counts something else"
            ]
        if self._of.unlike:
            return ["loss: that of a micro-batch is not finite, and that of the whole batch is"]
        reduction = self._of.subject.reductions[name]
        total, at_once = sum(counts), self._of.count(name, self._of.batch)
        if total != at_once and reduction != "sum":
            return [
                f"count: it gave {_tidy([at_once])[0]}{prefix} for the whole batch and {_tidy(counts)} for parts of "
                f"{sizes} samples, which should add up to it"
            ]
        declared = [counts[i] / total for i in kept] if reduction == "mean" else [1.0] * len(kept)

        def fits(weights: Sequence[float]) -> bool:
            made = weighted_sum(of_parts, weights)
            size = sum(abs(weight * part.loss) for weight, part in zip(weights, of_parts, strict=True))
            is_same_loss = abs(made.loss - whole.loss) <= self._of.bound() * max(size, 1e-9)
            return is_same_loss and not self._of.differ(made, whole)

        if fits(declared):
            return []
        if reduction == "mean" and fits([1.0] * len(kept)):
            return [
                f"reduction: the criterion{prefix} sums over its batch and reduction='mean' says that it averages; say "
                "'sum' or 'sum_to_mean', or let it average"
            ]
        for one in denominators(parts, sizes):
            of_kept = [one.numbers[i] for i in kept]
            if sum(of_kept) and fits([number / sum(of_kept) for number in of_kept]):
                if reduction != "mean":
                    return [
                        f"reduction: the criterion{prefix} averages over {one.what} and reduction={reduction!r} says "
                        "that it sums; say 'mean', or let it sum"
                    ]
                return [
                    f"count: the criterion{prefix} averages over {one.what}, and count gave {_tidy(counts)} for parts "
                    f"of {sizes} samples; {one.cure}"
                ]
        free = self._free_weights(of_parts, whole)
        is_mean = free is not None and abs(sum(free) - 1) <= min(100 * self._of.bound(), 1e-3)
        if free is not None and is_mean and fits(free):  # else it grows with the number of samples, say
            shown = " : ".join(f"{weight:.3f}" for weight in free)
            kind = "count" if reduction == "mean" else "reduction"
            return [
                f"{kind}: the criterion{prefix} weighs parts of {sizes} samples as {shown}, and count gave "
                f"{_tidy(counts)} with reduction={reduction!r}; let count give the criterion's own denominator"
            ]
        if mixing:
            return [f"mixing: a sample's output depends on the others in {_kinds(mixing)}, in eval mode too"]
        return [f"loss: the loss{prefix} is no sum or mean over samples: that of the whole is not made of its parts'"]

    def _free_weights(self, parts: Sequence[Measured], whole: Measured) -> list[float] | None:
        """The weights that come closest, by least squares over the gradient and the loss."""
        products = [[_dot(one, other) for other in (*parts, whole)] for one in parts]
        rows = self._of.engine.peers.gather([value for row in products for value in row])
        summed = torch.tensor([sum(column) for column in zip(*rows, strict=True)], dtype=torch.float64)
        matrix = summed.reshape(len(parts), len(parts) + 1)
        scale = matrix[:, :-1].diagonal().mean().clamp(min=1e-300)
        losses = torch.tensor([one.loss for one in parts], dtype=torch.float64)
        size = losses.square().mean().clamp(min=1e-300)
        left = matrix[:, :-1] / scale + torch.outer(losses, losses) / size
        right = matrix[:, -1] / scale + losses * whole.loss / size
        found: list[float] = torch.linalg.lstsq(left, right[:, None], driver="gelsd").solution[:, 0].tolist()
        return found if all(math.isfinite(weight) for weight in found) else None

    # Modules, by what they do

    def _calls(self) -> list[tuple[str, nn.Module, tuple[Any, ...], dict[str, Any]]]:
        """Each module's first call on the whole batch; inner ones first."""
        self._of.before.restore()
        calls: dict[int, tuple[str, nn.Module, tuple[Any, ...], dict[str, Any]]] = {}

        def note(name: str) -> Callable[..., None]:
            def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                if id(module) not in calls:
                    kept = map_tensors((args, kwargs), lambda t: t.detach().clone())
                    calls[id(module)] = (name, module, *kept)

            return hook

        hooks = [m.register_forward_pre_hook(note(n), with_kwargs=True) for n, m in self._of.modules]
        try:
            self._of.loss(self._of.batch)
        finally:
            for hook in hooks:
                hook.remove()
        return [calls[id(m)] for _, m in reversed(self._of.modules) if id(m) in calls]

    def _found(self, is_it: Callable[[nn.Module, Any, Any], bool], kinds: Any) -> list[tuple[str, nn.Module]]:
        """The innermost modules that it is true of; where none can be called by itself, those of these kinds."""
        if self._of.engine.hides_parameters:
            return [(n, m) for n, m in self._of.modules if isinstance(m, kinds) and m.training]
        found: list[tuple[str, nn.Module]] = []
        inner: set[int] = set()
        for name, module, args, kwargs in self._calls():
            if any(id(m) in inner for m in module.modules()):
                continue
            try:
                with torch.no_grad():
                    is_one = is_it(module, args, kwargs)
            except Exception:  # a call that makes no sense by itself
                continue
            if is_one:
                inner.add(id(module))
                found.append((name, module))
        self._of.before.restore()
        return found[::-1]

    def _draws(self, module: nn.Module, args: Any, kwargs: Any) -> bool:
        """Whether it gives other outputs for other random numbers."""
        return self._gives_another(module, args, kwargs, seeds=(1, 2))

    def _gives_another(self, module: nn.Module, args: Any, kwargs: Any, seeds: tuple[int, int] = (1, 1)) -> bool:
        outputs = []
        for seed in seeds:
            self._of.before.restore()
            set_seed(seed)
            outputs.append(_outputs(module, args, kwargs))
        return any(not torch.equal(one, other) for one, other in zip(*outputs, strict=True))

    def _mixes(self, module: nn.Module, args: Any, kwargs: Any) -> bool:
        length = self._of.length
        self._of.before.restore()
        if not any(t.shape[0] == length for _, t in tensors_in((args, kwargs)) if t.ndim):
            return False
        whole = [one for one in _outputs(module, args, kwargs) if one.ndim and one.shape[0] == length]
        halves = [length // 2, length - length // 2]
        parts = []
        for one_args, one_kwargs in cut_batch((args, kwargs), halves, length):
            self._of.before.restore()
            parts.append([one for one in _outputs(module, one_args, one_kwargs) if one.ndim])
        for i, one in enumerate(whole):
            pieces = torch.cat([part[i] for part in parts])
            apart = float((pieces.double() - one.double()).norm())
            if apart > 10 * self._of.bound() * float(one.double().norm()):
                return True
        return False

    def _mixing_in_eval(self, mixing: Sequence[nn.Module]) -> set[int]:
        """All of them at once: each search runs the model and all of its modules."""
        was = [(m, m.training) for module in mixing for m in module.modules()]
        _set_training([m for m, _ in was], False)
        try:
            return {id(module) for _, module in self._found(self._mixes, ())} if mixing else set()
        finally:
            for one, training in was:
                one.training = training


def _outputs(module: nn.Module, args: Any, kwargs: Any) -> list[Tensor]:
    fresh_args, fresh_kwargs = map_tensors((args, kwargs), torch.clone)  # some compute in place
    return [tensor for _, tensor in tensors_in(module(*fresh_args, **fresh_kwargs))]


def _set_training(modules: Sequence[nn.Module], training: bool) -> None:
    for module in modules:
        for one in module.modules():
            one.training = training


def _kinds(found: Sequence[tuple[str, nn.Module]]) -> str:
    """Names, and the classes that they are of.

    >>> _kinds([("drop", nn.Dropout())])
    'drop (Dropout)'
    """
    kinds = ", ".join(dict.fromkeys(type(module).__name__ for _, module in found))
    return f"{listed([name or 'the model' for name, _ in found])} ({kinds})"


@dataclass(frozen=True)
class Denominator:
    """What a criterion may average over."""

    what: str
    cure: str
    numbers: list[float]  # of each part


def denominators(parts: Sequence[Any], sizes: Sequence[int]) -> list[Denominator]:
    """Those that a batch has in it, the likely ones first."""
    found = [Denominator("samples", "leave count at count_samples", [float(size) for size in sizes])]
    not_zero = []  # after all labels: padding is often 0 where a label is -100
    columns = [[tensor for _, tensor in tensors_in(part)] for part in parts]
    for i, (where, first) in enumerate(tensors_in(parts[0])):
        if first.is_floating_point() or first.is_complex() or first.ndim == 0:
            continue
        column = [tensors[i] for tensors in columns]
        kept = f"the labels in {where} that are not -100"
        if first.ndim > 1:
            rows = [one[:, 1:] for one in column]
            cure = f"count=count_tokens({where}, shift=True)"
            found.append(Denominator(f"{kept}, without the first of each row", cure, _each(rows, -100)))
            not_zero.append(Denominator(f"what is not 0 in {where}", "let count give that", _each(column, 0)))
            what = f"what is not 0 in {where}, without the first of each row"
            not_zero.append(Denominator(what, "let count give that", _each(rows, 0)))
        found.append(Denominator(kept, f"count=count_tokens({where})", _each(column, -100)))
    alike = Denominator("its parts, each alike (a mean of means)", "let it average over samples", [1.0] * len(parts))
    return [*found, *not_zero, alike]


def _each(column: Sequence[Tensor], ignored: int) -> list[float]:
    return [float(one.ne(ignored).sum()) for one in column]


def _dot(one: Measured, other: Measured) -> float:
    pairs = zip(one.gradients, other.gradients, strict=True)
    return sum(float((a.double() * b.double()).sum()) for a, b in pairs if a is not None and b is not None)


def _uneven(length: int) -> list[int]:
    """Three parts, each of another size where there are samples enough.

    >>> _uneven(12), _uneven(2)
    ([2, 4, 6], [1, 1])
    """
    first = max(1, length // 6)
    second = max(1, length // 3)
    return [n for n in (first, second, length - first - second) if n > 0] if length > 2 else [1] * length


def _tidy(numbers: Sequence[float]) -> list[float]:
    return [int(n) if n == int(n) else n for n in numbers]
