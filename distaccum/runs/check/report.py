"""check(): compares the big batch with the accumulated one on the user's own model, and reports why they differ."""

from __future__ import annotations

import copy
import math
import shutil
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from ...batch import Columns, cut_batch, tensors_in
from ...batchnorm import KINDS
from ...extension import hooks_of
from ...job import Job
from ...law import DistaccumError, as_int_if_whole
from ...norms import names_of
from ...planning import Planner
from ...text import Once, in_short, shorten
from ..update import LossFn, Snapshot, refuse_closure
from .comparison import Comparison, uneven_sizes, weighted_sum

Named = Sequence[tuple[str, nn.Module]]
DROPOUTS = nn.Dropout | nn.Dropout1d | nn.Dropout2d | nn.Dropout3d | nn.AlphaDropout | nn.FeatureAlphaDropout
DROPOUTS |= nn.MultiheadAttention | nn.RNNBase


@dataclass(frozen=True)
class Difference:
    """A parameter's gradient, accumulated against the big batch's.

    Attributes:
        name (str): The parameter's name in the model.
        norm (float): The L2 norm of the big batch's gradient.
        error (float): The relative error of the accumulated gradient, in the parameter's dtype.
        error64 (float | None): That error in float64; None if the model cannot be cast.
    """

    name: str
    norm: float
    error: float
    error64: float | None


@dataclass(frozen=True)
class Report:
    """The result of `Accumulator.check`. Printed, it is a table, worst parameters first, with causes and their cures.

    Attributes:
        equivalent (bool): Whether the gradients differ by no more than rounding.
        worst (float): The largest relative error of a parameter, in float64 if that was possible.
        causes (tuple[str, ...]): Why they differ, each beginning with its kind: "batchnorm: ...", "dropout: ...",
            "random: ...", "count: ...", "reduction: ...", "loss: ..." or "unknown: ...".
        parameters (tuple[Difference, ...]): Each parameter's difference, the worst first.
        dtype (str): The dtype in which `worst` was found, such as "float64".
        bound (float): The relative error up to which a difference counts as rounding.
        samples (int): Samples of the big batch, over all ranks.
        micro_batches (tuple[int, ...]): Micro-batches by rank.
        notes (tuple[str, ...]): Why float64 was not used, or why the bound is wider than that of `dtype`.
    """

    equivalent: bool
    worst: float
    causes: tuple[str, ...]
    parameters: tuple[Difference, ...]
    dtype: str
    bound: float
    samples: int
    micro_batches: tuple[int, ...]
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        columns = min(shutil.get_terminal_size((120, 24)).columns, 120)
        verdict = "equivalent" if self.equivalent else "NOT equivalent"
        cut = " + ".join(map(str, self.micro_batches))
        headline = (
            f"accumulated in {cut} micro-batches, one batch of {self.samples}: {verdict} "
            f"(largest relative error {self.worst:.1e} in {self.dtype}; rounding gives up to {self.bound:.0e})"
        )
        shown = self.parameters[:12]
        width = max(12, *(len(row.name) for row in self.parameters[:12]))
        wide = [f" {row.error64:>9.1e}" if row.error64 is not None else "" for row in shown]
        table = [f"{'gradient of':<{width}} {'norm':>10} {'error':>9}" + (f" {'float64':>9}" if wide[0] else "")]
        table += [f"{r.name:<{width}} {r.norm:>10.3e} {r.error:>9.1e}{w}" for r, w in zip(shown, wide, strict=True)]
        if len(self.parameters) > 12:
            table.append(f"and {len(self.parameters) - 12} more with smaller errors")
        texts = [headline, *self.causes, *(f"note: {note}" for note in self.notes)]
        first, *others = (textwrap.fill(text, columns) for text in texts)
        return "\n\n".join([first, "\n".join(table), *others])


def check(planner: Planner, batch: Any, loss_fn: LossFn, columns: Columns) -> Report:
    """Makes the report; puts back gradients, buffers, modes and random numbers."""
    planner.close_previous()
    job = planner.job
    refuse_closure(job.engine, "check")
    if "step" in job.engine.owns:
        raise DistaccumError(
            f"check() with {job.engine.name}, which shows no gradient; check the module before it is wrapped"
        )
    # A job whose windows have no extensions, judge nothing, count separately, and warn for themselves.
    trial = copy.copy(job)
    trial.once = Once(job.engine.peers.rank)
    trial.begin_anew()
    trial.fit = job.fit
    trial.substitute = job.substitute
    trial.hooks = hooks_of(())
    trial.config = replace(job.config, on_nonfinite="ignore")
    with _kept(job) as before, ExitStack() as stack:
        comparison = Comparison(Planner(trial), batch, columns, loss_fn, before)
        stack.callback(comparison.cast_back)
        return _report(comparison)


@contextmanager
def _kept(job: Job) -> Iterator[Snapshot]:
    """Gives no warnings, and restores buffers, random numbers, modes and gradients."""
    every = job.parameters()
    stale = every if job.engine.stale(every) else []
    gradients = [(p, p.grad, p.grad.clone()) for p in stale if p.grad is not None]
    modes = [(module, module.training) for model in job.models for module in model.modules()]
    snapshot = Snapshot(job.models)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield snapshot
        finally:
            for module, training in modes:
                module.training = training
            snapshot.restore()
            for parameter, gradient, values in gradients:
                parameter.grad = gradient.copy_(values)


def _report(comparison: Comparison) -> Report:
    own = errors = comparison.compare()
    used = comparison
    wide = comparison.widened()
    if wide is not None:
        try:
            errors = wide.compare()
            used = wide
        except Exception as error:
            comparison.cast_back()
            comparison.notes.append(f"not in float64: {in_short(error)}")
    if not any(norm or error for norm, error in (*own, *errors)):
        raise DistaccumError(
            "the gradient of the whole batch is zero in every parameter, so nothing was compared; make the loss "
            "depend on the parameters (look for a detach, a factor of 0, a ReLU that is never above 0), or check "
            "with another batch"
        )
    equivalent = used.agrees(errors)
    causes = () if equivalent else tuple(_causes_of(used))
    dtype, narrowest = (str(kind).removeprefix("torch.") for kind in (used.dtype, used.narrowest))
    if narrowest != dtype:
        used.notes.append(f"the model or the loss computes in {narrowest} in part, in {dtype} too: hence the bound")
    names = names_of(comparison.models)
    rows = [
        Difference(names.get(id(p), f"parameter {i}"), norm, error, error64 if used is wide else None)
        for i, (p, (norm, error), (_, error64)) in enumerate(zip(comparison.parameters, own, errors, strict=True))
    ]
    rows.sort(key=lambda row: row.error if row.error64 is None else row.error64, reverse=True)
    return Report(
        equivalent=equivalent,
        worst=max(error for _, error in errors),
        causes=causes,
        parameters=tuple(rows),
        dtype=dtype,
        bound=used.bound(),
        samples=used.length,
        micro_batches=used.micro_batches,
        notes=tuple(used.notes),
    )


# Layers that make micro-batches differ in training mode: the cause, which they are, and the cure.
LAYERS = (
    (
        "dropout",
        DROPOUTS,
        "random numbers are drawn by {layers}, and micro-batches draw others; the gradient is that of the masks that "
        "were drawn, as dropout means it: nothing to do, where this is the only cause",
    ),
    (
        "batchnorm",
        KINDS,
        "in training mode a sample's output depends on the others in {layers}, and a micro-batch has fewer of them; "
        "freeze them (distaccum.batchnorm.freeze), put GroupNorm in their place (to_groupnorm, there), or accept it "
        "with batchnorm='ignore'",
    ),
)
RANDOM = (
    "random: the model or the loss gives the same batch another gradient the second time: random numbers are drawn "
    "outside of dropout layers (as by attention that drops by itself), or something is kept between calls (a buffer, "
    "an attribute); random numbers need no cure if they are the only cause"
)


def _causes_of(comparison: Comparison) -> list[str]:
    """The causes that show; leaves the layers that they name in eval mode, so that other causes show too."""
    training = [(name, module) for name, module in comparison.modules if module.training]
    causes: list[str] = []
    for cause, kinds, text in LAYERS:
        layers = [(name, module) for name, module in training if isinstance(module, kinds) and not _drops_none(module)]
        if layers:
            _put_into_eval(layers)
            causes.append(f"{cause}: {text.format(layers=_named(layers))}")
    if _differs(comparison):
        _put_into_eval(training)
        causes.append(RANDOM)
        if _differs(comparison):
            causes[-1] += "; draw none to see the other causes"
            return causes
    errors = comparison.compare() if causes else []
    if causes and comparison.agrees(errors):
        causes[-1] += f"; with this put aside the error is {max(error for _, error in errors):.1e}"
        return causes
    in_losses = [_cause_in_the_loss(comparison, name) for name in comparison.reductions]
    every = [*causes, *dict.fromkeys(cause for cause in in_losses if cause is not None)]
    return every or ["unknown: no cause was found; the error is beyond rounding"]


def _drops_none(module: nn.Module) -> bool:
    return getattr(module, "p", getattr(module, "dropout", None)) == 0


def _differs(comparison: Comparison) -> bool:
    """Returns whether a second call on the whole batch, with later random numbers, gives another gradient."""
    given = next(iter(comparison.reductions)), comparison.batch
    return comparison.differ(comparison.bare(*given), comparison.bare(*given, restore=False))


def _cause_in_the_loss(comparison: Comparison, name: str) -> str | None:
    """The reason why the loss of this name is not the declared sum of its parts' losses; None if it is."""
    batch = comparison.batch
    reduction = comparison.reductions[name]
    sizes = uneven_sizes(comparison.length)
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
        made = weighted_sum(terms)
        size = max(sum(abs(weight * part.loss) for part, weight in terms), 1e-9)
        return abs(made.loss - exact.loss) <= comparison.bound() * size and not comparison.differ(made, exact)

    is_mean = reduction == "mean"
    if comparison.is_finite and fits(counts, is_sum=not is_mean):
        return None
    if is_mean and fits(counts, is_sum=True):
        return (
            f"reduction: the criterion{of_name} sums over its batch and reduction='mean' says that it averages; say "
            "'sum' or 'sum_to_mean', or let it average"
        )
    for what, cure, numbers in (*_denominators(parts, sizes), ("what count gave", "", counts)):
        if (numbers != counts or not is_mean) and fits(numbers):
            averages = f"the criterion{of_name} averages over {what}"
            if is_mean:
                return f"count: {averages}, and count gave {gave}; {cure}"
            return f"reduction: {averages} and {reduction=} says that it sums; say 'mean', or let it sum"
    if not (comparison.is_finite and all(math.isfinite(part.loss) for part in measured)):
        return f"loss: not finite in a part (of {sizes} samples), and the whole batch's is; is its count above 0 there?"
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


def _put_into_eval(modules: Named) -> None:
    for _, module in modules:
        module.eval()


def _named(modules: Named) -> str:
    """Their names and classes, such as "drop (Dropout)"."""
    kinds = ", ".join(dict.fromkeys(type(module).__name__ for _, module in modules))
    return f"{shorten([name or 'the model' for name, _ in modules])} ({kinds})"
