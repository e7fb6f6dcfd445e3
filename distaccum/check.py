"""check(): the one big batch against the accumulated one, on the user's own model, and why they differ."""

from __future__ import annotations

import math
import shutil
import textwrap
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from .batches import batch_length, cut_batch, join_batches, map_tensors, tensors_in
from .batchnorm import KINDS
from .engines import Engine
from .memory import Before, in_short, is_out_of_memory
from .nonfinite import names_of
from .shares import DistaccumError, Reduction, listed

LossFn = Callable[[Any], Tensor | Mapping[str, Tensor]]
# The largest error that rounding explains, by dtype; any other is half precision.
BOUNDS = {torch.float64: 1e-8, torch.float32: 1e-4}
BOUND_OF_HALF = 5e-2
ADVICE = {
    "batchnorm": "freeze them (distaccum.batchnorm.freeze), put GroupNorm in their place (to_groupnorm, there), or "
    "accept it with batchnorm='pool' or 'ignore'",
    "dropout": "the gradient is that of the masks that were drawn, which is all that dropout asks for: nothing to do, "
    "where this is the only cause",
    "mixing": "use a layer that looks at each sample alone",
    "state": "let the loss depend on the batch and the parameters alone, or accept that the order of calls matters",
    "loss": "a loss over pairs: accumulator.contrast; else make it a sum or a mean over samples",
}


DROPOUTS = nn.Dropout | nn.Dropout1d | nn.Dropout2d | nn.Dropout3d | nn.AlphaDropout | nn.FeatureAlphaDropout


# The report


@dataclass(frozen=True)
class Difference:
    """A parameter's gradient, accumulated against the big batch's."""

    name: str
    norm: float  # of the big batch's
    error: float  # relative, in the parameter's dtype
    error64: float | None  # in float64, where the model can be cast


@dataclass(frozen=True)
class Report:
    """What `check` found; printed, a table with the worst first and what to do."""

    equivalent: bool
    worst: float  # the largest relative error: in float64 where that was possible
    causes: tuple[str, ...]  # "batchnorm: ...", "dropout: ...", "count: ...", "reduction: ...", "loss: ...", ...
    parameters: tuple[Difference, ...]  # the worst first
    dtype: str  # that `worst` was found in
    bound: float  # up to which that is rounding
    samples: int  # over all ranks
    micro_batches: tuple[int, ...]  # by rank
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        width = min(shutil.get_terminal_size().columns, 120)
        verdict = "equivalent" if self.equivalent else "NOT equivalent"
        cut = " + ".join(map(str, self.micro_batches))
        lines = textwrap.wrap(
            f"accumulated in {cut} micro-batches, one batch of {self.samples}: {verdict} "
            f"(largest relative error {self.worst:.1e} in {self.dtype}; rounding gives up to {self.bound:.0e})",
            width,
        )
        with64 = any(one.error64 is not None for one in self.parameters)
        header = f"{'norm':>10} {'error':>9}" + (f" {'float64':>9}" if with64 else "")
        room = max(16, width - len(header) - 2)
        lines += ["", f"{'gradient of':<{room}} {header}"]
        for one in self.parameters[:12]:
            name = one.name if len(one.name) <= room else "..." + one.name[3 - room :]
            more = f" {one.error64:>9.1e}" if one.error64 is not None else ""
            lines.append(f"{name:<{room}} {one.norm:>10.3e} {one.error:>9.1e}{more}")
        if len(self.parameters) > 12:
            lines.append(f"and {len(self.parameters) - 12} more with smaller errors")
        for cause in self.causes:
            kind = cause.split(":")[0]
            lines += ["", *textwrap.wrap(cause, width)]
            if kind in ADVICE:
                lines += textwrap.wrap(ADVICE[kind], width, initial_indent="  -> ", subsequent_indent="     ")
        for note in self.notes:
            lines += ["", *textwrap.wrap(f"note: {note}", width)]
        return "\n".join(lines)


# Measuring


@dataclass(frozen=True)
class Measured:
    """A gradient: this rank's part of it, by parameter; and the loss."""

    gradients: list[Tensor | None]
    loss: float
    kept: tuple[int, ...]  # micro-batches, by rank

    def scaled(self, factor: float) -> Measured:
        scaled = [None if g is None else g * factor for g in self.gradients]
        return Measured(scaled, self.loss * factor, self.kept)


class Measure(Protocol):
    """Runs a window, and gives its gradient in the place of a step."""

    def __call__(self, micro_batches: Sequence[Any] | None, loss_fn: LossFn, *, as_sum: bool) -> Measured:
        """Of these on this rank (None: of the batch as it is cut); `as_sum`: the sum over ranks of bare losses."""


@dataclass
class Subject:
    """What is checked: the parts of the accumulator that a check needs."""

    models: Sequence[nn.Module]
    parameters: Sequence[nn.Parameter]  # that are trained
    everything: Sequence[nn.Parameter]  # frozen ones too
    engine: Engine
    reductions: Mapping[str, Reduction]
    counts: Mapping[str, Callable[[Any], Any]]
    is_plain: bool
    measure: Measure


class Check:
    def __init__(self, subject: Subject, batch: Any, loss_fn: LossFn) -> None:
        self._subject, self._engine = subject, subject.engine
        self._loss_fn = loss_fn
        self._own, self._own_length = batch, -1  # this rank's
        self._batch, self._length = batch, 0  # of all ranks
        self._kept: tuple[int, ...] = ()  # micro-batches, by rank
        self._notes: list[str] = []
        self._before = Before(subject.models)
        self._before.look()
        self._dtype = min((p.dtype for p in subject.parameters), key=lambda d: torch.finfo(d).bits)
        self._narrowest = self._dtype  # of what backward computes with; many models take a softmax or a norm in float32
        self._cast: Callable[[Any], Any] = lambda batch: batch
        self._modules = list({id(m): (n, m) for model in subject.models for n, m in model.named_modules()}.values())

    def run(self) -> Report:
        """The report; all else is as it was before."""
        error_text = ""
        with warnings.catch_warnings(), _untouched(self._subject):
            warnings.simplefilter("ignore")
            try:
                return self._report()
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                error_text = in_short(error)
        raise DistaccumError(
            f"the whole batch does not fit into memory, which a check needs ({error_text}); take a smaller one"
        )

    def _report(self) -> Report:
        self._join()
        own = self._compare()
        wide: list[tuple[float, float]] | None = None
        with self._in_float64() as is_wide:
            if is_wide:
                wide = self._compare()
            errors = wide or own
            worst, bound = max((error for _, error in errors), default=0.0), self._bound()
            causes = [] if worst <= bound else self._causes()
            if self._narrowest != self._dtype:
                narrow, cast = (str(one).removeprefix("torch.") for one in (self._narrowest, self._dtype))
                self._notes.append(
                    f"the model or the loss computes in {narrow} in part, in {cast} too: hence the bound"
                )
            dtype = str(self._dtype).removeprefix("torch.")
        names = [
            names_of(self._subject.models).get(id(p), f"parameter {i}") for i, p in enumerate(self._subject.parameters)
        ]
        rows = [
            Difference(name, norm, error, None if wide is None else wide[i][1])
            for i, (name, (norm, error)) in enumerate(zip(names, own, strict=True))
        ]
        rows.sort(key=lambda row: row.error if row.error64 is None else row.error64, reverse=True)
        return Report(
            equivalent=worst <= bound,
            worst=worst,
            causes=tuple(causes),
            parameters=tuple(rows),
            dtype=dtype,
            bound=bound,
            samples=self._length,
            micro_batches=self._kept,
            notes=tuple(self._notes),
        )

    def _join(self) -> None:
        """The batch of all ranks, on each of them."""
        device = next(iter(self._subject.parameters)).device
        if self._engine.num_ranks == 1:
            self._length = self._own_length = batch_length(self._own)
            if self._length < 2:
                raise ValueError(f"check() got {self._length} samples, expected at least two, to cut between them")
            return
        try:
            self._own_length = batch_length(self._own)
            failed = None
        except Exception as error:  # the others wait in the gathering below; tell them first
            failed = error
        batches = self._engine.gather_objects((map_tensors(self._own, lambda t: t.cpu()), self._own_length))
        if failed is not None:
            raise failed
        if lost := [str(rank) for rank, (_, length) in enumerate(batches) if length < 0]:
            raise DistaccumError(
                f"rank {', '.join(lost)} has a batch whose length cannot be seen (its own error says why)"
            )
        full = [(batch, length) for batch, length in batches if length]
        try:
            joined = join_batches([batch for batch, _ in full], [length for _, length in full])
        except Exception as error:
            raise DistaccumError(
                f"the batches of the ranks cannot be joined into one ({type(error).__name__}: "
                f"{' '.join(str(error).split())[:160]}), which the check needs; pad them to one length"
            ) from error
        self._batch, self._length = map_tensors(joined, lambda t: t.to(device)), sum(length for _, length in full)

    # In one mode and dtype

    def _compare(self) -> list[tuple[float, float]]:
        """By parameter, the big batch's norm and the relative error of what is accumulated."""
        exact = self._big_batch()
        self._refuse_nonfinite(exact)
        as_cut = self._accumulated(None)
        self._kept = as_cut.kept
        # And uneven parts, where a wrong count shows; of one sample batch normalisation would fail.
        length = self._own_length
        sizes = [length // 3, length - length // 3] if length > 5 else [length]
        uneven = self._accumulated(list(cut_batch(self._own, sizes, length)) if length else [])
        errors = zip(self._errors(as_cut, exact), self._errors(uneven, exact), strict=True)
        return [(norm, max(error, other)) for (norm, error), (_, other) in errors]

    def _accumulated(self, micro_batches: Sequence[Any] | None) -> Measured:
        self._before.put_back()
        return self._subject.measure(micro_batches, lambda batch: self._loss_fn(self._cast(batch)), as_sum=False)

    def _refuse_nonfinite(self, exact: Measured) -> None:
        names = names_of(self._subject.models)
        bad = [
            names.get(id(p), "a parameter")
            for p, g in zip(self._subject.parameters, exact.gradients, strict=True)
            if g is not None and not bool(g.isfinite().all())
        ]
        if any(bad for (bad,) in self._engine.gather([float(bool(bad) or not math.isfinite(exact.loss))])):
            where = f", its gradient not finite in {listed(bad)}" if bad else ""
            raise DistaccumError(
                f"the loss of the whole batch is {exact.loss:g}{where}, so there is nothing to compare with; look for "
                "it in the batch and the model, or lower the scaler's scale"
            )

    def _big_batch(self) -> Measured:
        total: Measured | None = None
        for name, reduction in self._subject.reductions.items():
            count = self._count(name, self._batch)
            if not count:
                continue
            one = self._bare(name, self._batch)
            one = one.scaled(1 / count) if reduction == "sum_to_mean" else one
            total = one if total is None else _sum([total, one], [1.0, 1.0])
        if total is None:
            raise ValueError(
                f"count gave 0 {' and 0 '.join(self._subject.reductions)} for the whole batch; check with another"
            )
        return total

    def _bare(self, name: str, batch: Any, *, seed: int | None = None, put_back: bool = True) -> Measured:
        """The gradient of one call of the criterion, of one name, unweighted."""

        def loss_fn(batch: Any) -> Tensor:
            with saved_tensors_hooks(self._look, lambda tensor: tensor):
                loss = self._loss_fn(self._cast(batch))
            if not isinstance(loss, Mapping):
                return loss
            found = loss.get(name, loss.get("loss") if len(self._subject.reductions) == 1 else None)
            if found is None:
                raise ValueError(
                    f"loss_fn gave losses {list(loss)}, expected one for each of {list(self._subject.reductions)}"
                )
            return found

        if put_back:
            self._before.put_back()
        if seed is not None:
            torch.manual_seed(seed)
        return self._subject.measure([batch], loss_fn, as_sum=True).scaled(1 / self._engine.num_ranks)

    def _look(self, tensor: Tensor) -> Tensor:
        if tensor.is_floating_point():
            self._narrowest = min(self._narrowest, tensor.dtype, key=lambda d: torch.finfo(d).bits)
        return tensor

    def _count(self, name: str, batch: Any) -> float:
        return float(self._subject.counts[name](batch))

    def _bound(self) -> float:
        return BOUNDS.get(self._narrowest, BOUND_OF_HALF)

    def _errors(self, seen: Measured, exact: Measured) -> list[tuple[float, float]]:
        """What is small beside the whole gradient is measured beside a part of the whole: rounding does not shrink."""
        squares = []
        for one, other in zip(seen.gradients, exact.gradients, strict=True):
            difference = one - other if one is not None and other is not None else one if other is None else other
            squares += [_square(difference), _square(other)]
        rows = self._engine.gather(squares)
        sums = [math.sqrt(sum(column)) for column in zip(*rows, strict=True)]
        pairs = list(zip(sums[0::2], sums[1::2], strict=True))
        floor = math.sqrt(torch.finfo(self._narrowest).eps) * math.sqrt(sum(norm**2 for _, norm in pairs))
        # Shards add up; what each rank has whole is counted so often.
        copies = 1.0 if self._engine.in_step else math.sqrt(self._engine.num_ranks)
        found = []
        for apart, norm in pairs:
            error = apart / max(norm, floor) if apart or not math.isfinite(apart) else 0.0
            found.append((norm / copies, error if math.isfinite(error) else math.inf))
        return found

    def _differ(self, one: Measured, other: Measured) -> bool:
        return max(error for _, error in self._errors(one, other)) > self._bound()

    @contextmanager
    def _in_float64(self) -> Iterator[bool]:
        """The model cast in place, where it is plain and the loss runs; then put back, bit for bit."""
        if not self._subject.is_plain or self._dtype == torch.float64:
            yield False
            return
        tensors = {id(t): t for model in self._subject.models for t in (*model.parameters(), *model.buffers())}
        tensors |= {id(p): p for p in self._subject.parameters}
        kept = [(t, t.data) for t in tensors.values() if _widened(t.data) is not t.data]
        dtype, narrowest, before = self._dtype, self._narrowest, self._before
        is_wide = True
        before.put_back()
        try:
            for tensor, _ in kept:
                tensor.data = _widened(tensor.data)
            self._cast = lambda batch: map_tensors(batch, _widened)
            self._dtype = self._narrowest = torch.float64
            self._before = Before(self._subject.models)
            self._before.look()
            try:
                self._bare(next(iter(self._subject.reductions)), self._batch)
            except Exception as error:
                is_wide = False
                self._notes.append(f"not in float64: {type(error).__name__}: {' '.join(str(error).split())[:120]}")
            if is_wide:
                yield True
        finally:
            for tensor, data in kept:
                tensor.data = data
            self._cast, self._dtype, self._before = (lambda batch: batch), dtype, before
            self._narrowest = narrowest
            before.put_back()
        if not is_wide:
            yield False

    # Why

    def _causes(self) -> list[str]:
        name = next(iter(self._subject.reductions))
        if self._differ(self._bare(name, self._batch), self._bare(name, self._batch)):
            keeping = self._found(self._gives_another, ())
            where = f" in {_kinds(keeping)}" if keeping else ""
            return [
                "state: the gradient of the same batch is another one the second time, although buffers and random "
                f"numbers were put back: something is kept between calls{where}"
            ]
        causes = []
        training = [(module, module.training) for _, module in self._modules]
        try:
            if self._is_random(name):
                drawing = self._found(self._draws, DROPOUTS)
                who = _kinds(drawing) if drawing else "the model or the loss"
                causes.append(f"dropout: random numbers are drawn by {who}, and micro-batches draw others")
                _set_training([module for _, module in drawing], False)
                if self._is_random(name):
                    _set_training([module for _, module in self._modules], False)
            mixing = self._found(self._mixes, KINDS)
            in_eval = self._mixing_in_eval([module for _, module in mixing])
            normalising = [(n, m) for n, m in mixing if m.training and id(m) not in in_eval]
            if normalising:
                causes.append(
                    f"batchnorm: in training mode a sample's output depends on the others in {_kinds(normalising)}, "
                    "and a micro-batch has fewer of them"
                )
                _set_training([module for _, module in normalising], False)
            if self._is_random(name) or max(error for _, error in self._compare()) <= self._bound():
                return causes
            changing = self._changing_modules(name)
            if changing:
                return [
                    *causes,
                    f"state: each forward changes buffers that the gradient depends on, of {_kinds(changing)}",
                ]
            others = [one for one in mixing if one not in normalising]
            for each in self._subject.reductions:
                causes += self._cause_in_the_loss(each, others)
            return causes or ["unknown: no cause was found; the error is beyond rounding"]
        finally:
            for module, was in training:
                module.training = was

    def _is_random(self, name: str) -> bool:
        return self._differ(self._bare(name, self._batch, seed=1), self._bare(name, self._batch, seed=2))

    def _changing_modules(self, name: str) -> list[tuple[str, nn.Module]]:
        """Those with buffers that a forward changes, where the next gradient is another one for it."""
        first = self._bare(name, self._batch, seed=1)
        changed = [
            (n, m) for n, m in self._modules if any(not torch.equal(b, was) for b, was in self._before.buffers_of(m))
        ]
        return changed if self._differ(first, self._bare(name, self._batch, seed=1, put_back=False)) else []

    def _cause_in_the_loss(self, name: str, mixing: list[tuple[str, nn.Module]]) -> list[str]:
        """What the loss of the whole is, as a weighted sum of those of its parts."""
        if not self._count(name, self._batch):
            return []
        sizes = _uneven(self._length)
        parts = list(cut_batch(self._batch, sizes, self._length))
        counts = [self._count(name, part) for part in parts]
        kept = [i for i, n in enumerate(counts) if n]
        of_parts = [self._bare(name, parts[i]) for i in kept]
        whole, prefix = self._bare(name, self._batch), f" of {name!r}" if len(self._subject.reductions) > 1 else ""
        if not all(math.isfinite(one.loss) for one in of_parts):
            return [
                f"count: it gave {_tidy(counts)}{prefix} for parts of {sizes} samples, and the loss of one of them is "
                "not finite: the criterion counts something else"
            ]
        reduction = self._subject.reductions[name]
        total, at_once = sum(counts), self._count(name, self._batch)
        if total != at_once and reduction != "sum":
            return [
                f"count: it gave {_tidy([at_once])[0]}{prefix} for the whole batch and {_tidy(counts)} for parts of "
                f"{sizes} samples, which should add up to it"
            ]
        declared = [counts[i] / total for i in kept] if reduction == "mean" else [1.0] * len(kept)

        def fits(weights: Sequence[float]) -> bool:
            made = _sum(of_parts, weights)
            size = sum(abs(weight * part.loss) for weight, part in zip(weights, of_parts, strict=True))
            return abs(made.loss - whole.loss) <= self._bound() * max(size, 1e-9) and not self._differ(made, whole)

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
        if (
            free is not None and abs(sum(free) - 1) <= min(100 * self._bound(), 1e-3) and fits(free)
        ):  # else it scales with the number, say
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
        rows = self._engine.gather([value for row in products for value in row])
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
        self._before.put_back()
        calls: dict[int, tuple[str, nn.Module, tuple[Any, ...], dict[str, Any]]] = {}

        def note(name: str) -> Callable[..., None]:
            def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                if id(module) not in calls:
                    kept = map_tensors((args, kwargs), lambda t: t.detach().clone())
                    calls[id(module)] = (name, module, *kept)

            return hook

        hooks = [m.register_forward_pre_hook(note(n), with_kwargs=True) for n, m in self._modules]
        try:
            self._loss_fn(self._cast(self._batch))
        finally:
            for hook in hooks:
                hook.remove()
        return [calls[id(m)] for _, m in reversed(self._modules) if id(m) in calls]

    def _found(self, is_it: Callable[[nn.Module, Any, Any], bool], kinds: Any) -> list[tuple[str, nn.Module]]:
        """The innermost modules that it is true of; where none can be called by itself, those of these kinds."""
        if self._engine.hides_parameters:
            return [(n, m) for n, m in self._modules if isinstance(m, kinds) and m.training]
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
        self._before.put_back()
        return found[::-1]

    def _draws(self, module: nn.Module, args: Any, kwargs: Any) -> bool:
        """Whether it gives other outputs for other random numbers."""
        return self._gives_another(module, args, kwargs, seeds=(1, 2))

    def _gives_another(self, module: nn.Module, args: Any, kwargs: Any, seeds: tuple[int, int] = (1, 1)) -> bool:
        outputs = []
        for seed in seeds:
            self._before.put_back()
            torch.manual_seed(seed)
            outputs.append(_outputs(module, args, kwargs))
        return any(not torch.equal(one, other) for one, other in zip(*outputs, strict=True))

    def _mixes(self, module: nn.Module, args: Any, kwargs: Any) -> bool:
        length = self._length
        self._before.put_back()
        if not any(t.shape[0] == length for _, t in tensors_in((args, kwargs)) if t.ndim):
            return False
        whole = [one for one in _outputs(module, args, kwargs) if one.ndim and one.shape[0] == length]
        halves = [length // 2, length - length // 2]
        parts = []
        for one_args, one_kwargs in cut_batch((args, kwargs), halves, length):
            self._before.put_back()
            parts.append([one for one in _outputs(module, one_args, one_kwargs) if one.ndim])
        for i, one in enumerate(whole):
            pieces = torch.cat([part[i] for part in parts])
            apart = float((pieces.double() - one.double()).norm())
            if apart > 10 * self._bound() * float(one.double().norm()):
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


@contextmanager
def _untouched(subject: Subject) -> Iterator[None]:
    """Gradients, buffers, modes and random numbers are put back."""
    stood = subject.engine.stale(subject.everything)
    gradients = [(p, p.grad, p.grad.clone()) for p in subject.everything if stood and p.grad is not None]
    modes = [(module, module.training) for model in subject.models for module in model.modules()]
    before = Before(subject.models)
    before.look()
    try:
        yield
    finally:
        before.put_back()
        for module, training in modes:
            module.training = training
        for parameter, gradient, values in gradients:
            parameter.grad = gradient.copy_(values)


def _widened(tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.double() if tensor.is_floating_point() else tensor


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


def _square(gradient: Tensor | None) -> float:
    return 0.0 if gradient is None else float(gradient.abs().double().square().sum())


def _sum(parts: Sequence[Measured], weights: Sequence[float]) -> Measured:
    gradients: list[Tensor | None] = []
    for column in zip(*(part.gradients for part in parts), strict=True):
        there = [g * weight for g, weight in zip(column, weights, strict=True) if g is not None]
        gradients.append(torch.stack(there).sum(0) if there else None)
    loss = sum(part.loss * weight for part, weight in zip(parts, weights, strict=True))
    return Measured(gradients, loss, parts[0].kept)


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
