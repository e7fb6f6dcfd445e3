"""Why the accumulated gradient is not the big batch's: found by running the model again, and named."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...batchnorm import KINDS
from ...gradients.memory import in_short, is_out_of_memory
from ...gradients.snapshot import modes_kept, set_seed
from ...law.batches import cut_batch, map_tensors, tensors_in
from ...law.shares import shorten
from .compare import Comparison, Measured
from .weights import cause_in_the_loss

DROPOUTS = nn.Dropout | nn.Dropout1d | nn.Dropout2d | nn.Dropout3d | nn.AlphaDropout | nn.FeatureAlphaDropout
Named = tuple[str, nn.Module]


class Diagnosis:
    """Runs the model with other random numbers, modules on halves of their inputs, and the loss on parts of the batch.

    It leaves the modules that it has named in eval mode.
    """

    def __init__(self, comparison: Comparison) -> None:
        self._of = comparison
        self._untried: dict[str, str] = {}  # modules that could not be called by themselves, and why

    def causes(self) -> list[str]:
        if self._of.differ(self._gradient(), self._gradient()):
            keeping = self._found(self._varies, ())
            where = f" in {_kinds(keeping)}" if keeping else ", or drawn by a generator of the loss's own"
            return [
                "state: the same batch gives another gradient the second time, although buffers and random numbers "
                f"were restored: something is kept between calls{where}"
            ]
        causes = self._random_causes()
        mixing = self._found(self._mixes, KINDS)
        in_eval = self._mixing_in_eval([module for _, module in mixing])
        normalising = [(n, m) for n, m in mixing if m.training and m not in in_eval]
        if normalising:
            causes.append(
                f"batchnorm: in training mode a sample's output depends on the others in {_kinds(normalising)}, "
                "and a micro-batch has fewer of them"
            )
            _into_eval(module for _, module in normalising)
        if self._is_random() or self._of.agrees(self._of.compare()):
            return causes
        if changing := self._changing_modules():
            return [
                *causes,
                f"state: each forward changes buffers that the gradient depends on, of {_kinds(changing)}",
            ]
        others = [one for one in mixing if one not in normalising]
        for name in self._of.subject.reductions:
            if cause := cause_in_the_loss(self._of, name, _kinds(others) if others else ""):
                causes.append(cause)
        untried = "; ".join(f"{name or 'the model'} ({why})" for name, why in list(self._untried.items())[:3])
        unknown = "unknown: no cause was found; the error is beyond rounding"
        return list(dict.fromkeys(causes)) or [
            f"{unknown}; not called by themselves: {untried}" if untried else unknown
        ]

    def _gradient(self, *, seed: int | None = None, restore: bool = True) -> Measured:
        """The whole batch's gradient, of the first loss."""
        name = next(iter(self._of.subject.reductions))
        return self._of.bare(name, self._of.batch, seed=seed, restore=restore)

    def _is_random(self) -> bool:
        return self._of.differ(self._gradient(seed=1), self._gradient(seed=2))

    def _random_causes(self) -> list[str]:
        """Where random numbers are drawn: in modules, which are then in eval mode, or in the loss."""
        if not self._is_random():
            return []
        causes = []
        if drawing := self._found(partial(self._varies, seeds=(1, 2)), DROPOUTS):
            causes = [f"dropout: random numbers are drawn by {_kinds(drawing)}, and micro-batches draw others"]
            _into_eval(module for _, module in drawing)
            if not self._is_random():
                return causes
        models = self._of.subject.models
        with modes_kept(models):
            _into_eval(models)
            draws = self._is_random() and not self._of.engine.hides_parameters
            is_loss = draws and not self._found(partial(self._varies, seeds=(1, 2)), ())
        if is_loss:
            by_loss = "the loss draws random numbers, outside of the model's modules, and micro-batches draw others"
            return [*causes, f"random: {by_loss}"]
        _into_eval(models)
        return causes or ["random: random numbers are drawn by the model or the loss, and micro-batches draw others"]

    def _changing_modules(self) -> list[Named]:
        """Modules with buffers that a forward changes, if the next gradient differs for it."""
        first = self._gradient(seed=1)
        buffers_of = self._of.before.buffers_of
        changed = [(n, m) for n, m in self._of.modules if any(not torch.equal(b, was) for b, was in buffers_of(m))]
        return changed if self._of.differ(first, self._gradient(seed=1, restore=False)) else []

    # Modules, by what they do

    def _calls(self) -> list[tuple[str, nn.Module, Any, Any]]:
        """Each module's first call on the whole batch; inner ones first."""
        self._of.before.restore()
        calls: dict[nn.Module, Any] = {}

        def note(module: nn.Module, args: Any, kwargs: Any) -> None:
            if module not in calls:
                calls[module] = map_tensors((args, kwargs), lambda t: t.detach().clone())

        hooks = [module.register_forward_pre_hook(note, with_kwargs=True) for _, module in self._of.modules]
        try:
            self._of.loss(self._of.batch)
        finally:
            for hook in hooks:
                hook.remove()
        return [(name, m, *calls[m]) for name, m in reversed(self._of.modules) if m in calls]

    def _found(self, is_it: Callable[[nn.Module, Any, Any], bool], kinds: Any) -> list[Named]:
        """The innermost modules of which `is_it` is true; of these kinds where none can be called by itself."""
        if self._of.engine.hides_parameters:
            return [(n, m) for n, m in self._of.modules if isinstance(m, kinds) and m.training]
        found: list[Named] = []
        for name, module, args, kwargs in self._calls():
            if any(m in module.modules() for _, m in found):
                continue
            try:
                with torch.no_grad():
                    if is_it(module, args, kwargs):
                        found.insert(0, (name, module))
            except Exception as error:  # a call that makes no sense by itself, such as of halves of its inputs
                if is_out_of_memory(error):
                    raise
                self._untried[name] = f"{type(module).__name__}: {in_short(error)}"
        self._of.before.restore()
        return found

    def _varies(self, module: nn.Module, args: Any, kwargs: Any, seeds: tuple[int, int] = (1, 1)) -> bool:
        """Whether a second call gives other outputs, with random numbers of these seeds."""
        outputs = []
        for seed in seeds:
            self._of.before.restore()
            set_seed(seed)
            outputs.append(_outputs(module, args, kwargs))
        return any(not torch.equal(one, other) for one, other in zip(*outputs, strict=True))

    def _mixes(self, module: nn.Module, args: Any, kwargs: Any) -> bool:
        """Whether halves of the batch give other outputs than the whole."""
        length = self._of.length
        if not any(t.shape[0] == length for _, t in tensors_in((args, kwargs)) if t.ndim):
            return False
        self._of.before.restore()
        whole = [one for one in _outputs(module, args, kwargs) if one.ndim and one.shape[0] == length]
        parts = []
        for one_args, one_kwargs in cut_batch((args, kwargs), [length // 2, length - length // 2], length):
            self._of.before.restore()
            parts.append([one for one in _outputs(module, one_args, one_kwargs) if one.ndim])
        for i, one in enumerate(whole):
            pieces = torch.cat([part[i] for part in parts])
            apart = float((pieces.double() - one.double()).norm())
            if apart > 10 * self._of.bound() * float(one.double().norm()):
                return True
        return False

    def _mixing_in_eval(self, mixing: Sequence[nn.Module]) -> set[nn.Module]:
        """Tries all of them at once: each search runs the model and all of its modules."""
        with modes_kept(mixing):
            _into_eval(mixing)
            return {module for _, module in self._found(self._mixes, ())} if mixing else set()


def _outputs(module: nn.Module, args: Any, kwargs: Any) -> list[Tensor]:
    fresh_args, fresh_kwargs = map_tensors((args, kwargs), torch.clone)  # some compute in place
    return [tensor for _, tensor in tensors_in(module(*fresh_args, **fresh_kwargs))]


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
