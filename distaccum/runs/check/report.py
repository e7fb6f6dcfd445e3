"""check(): the one big batch against the accumulated one, on the user's own model, and why they differ."""

from __future__ import annotations

import shutil
import textwrap
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ...cutting import Columns
from ...law import DistaccumError, in_short
from ...norms import names_of
from ...snapshot import kept
from ..memory import is_out_of_memory
from .causes import causes_of
from .compare import Comparison, LossFn, Subject

ADVICE = {
    "batchnorm": "freeze them (distaccum.batchnorm.freeze), put GroupNorm in their place (to_groupnorm, there), or "
    "accept it with batchnorm='ignore'",
    "dropout": "the gradient is that of the masks that were drawn, as dropout means it: nothing to do, where this is "
    "the only cause",
    "random": "the gradient is that of the numbers that were drawn: nothing to do, where this is the only cause; let "
    "the loss draw none to see its other causes",
    "state": "let the loss depend on the batch and the parameters alone, or accept that the order of calls matters",
    "loss": "a loss over pairs: accumulator.contrast; else make it a sum or a mean over samples, of layers that look "
    "at each sample alone",
}


@dataclass(frozen=True)
class Difference:
    """A parameter's gradient, accumulated against the big batch's.

    Attributes:
        name (str): The parameter's name in the model.
        norm (float): The L2 norm of the big batch's gradient.
        error (float): The relative error of the accumulated one, in the parameter's dtype.
        error64 (float | None): The same in float64; None where the model cannot be cast.
    """

    name: str
    norm: float
    error: float
    error64: float | None


@dataclass(frozen=True)
class Report:
    """The result of `Accumulator.check`; printed, a table with the worst parameters first, the causes and their cures.

    Attributes:
        equivalent (bool): Whether the gradients differ by no more than rounding.
        worst (float): The largest relative error of a parameter, in float64 where that was possible.
        causes (tuple[str, ...]): Why they differ, each beginning with its kind: "batchnorm: ...", "dropout: ...",
            "random: ...", "state: ...", "count: ...", "reduction: ...", "loss: ..." or "unknown: ...".
        parameters (tuple[Difference, ...]): Each parameter's difference, the worst first.
        dtype (str): The dtype that `worst` was found in, such as "float64".
        bound (float): The relative error up to which a difference counts as rounding.
        samples (int): Samples of the big batch, over all ranks.
        micro_batches (tuple[int, ...]): Micro-batches by rank.
        notes (tuple[str, ...]): What else was seen, such as micro-batches that were left out.
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
        columns = max(20, min(shutil.get_terminal_size((120, 24)).columns, 120))
        verdict = "equivalent" if self.equivalent else "NOT equivalent"
        cut = " + ".join(map(str, self.micro_batches))
        lines = textwrap.wrap(
            f"accumulated in {cut} micro-batches, one batch of {self.samples}: {verdict} "
            f"(largest relative error {self.worst:.1e} in {self.dtype}; rounding gives up to {self.bound:.0e})",
            columns,
        )
        with64 = any(one.error64 is not None for one in self.parameters)
        header = f"{'norm':>10} {'error':>9}" + (f" {'float64':>9}" if with64 else "")
        longest = max((len(one.name) for one in self.parameters[:12]), default=0)
        room = max(16, min(columns - len(header) - 2, longest))
        lines += ["", f"{'gradient of':<{room}} {header}"]
        for one in self.parameters[:12]:
            name = one.name if len(one.name) <= room else "..." + one.name[3 - room :]
            more = f" {one.error64:>9.1e}" if one.error64 is not None else ""
            lines.append(f"{name:<{room}} {one.norm:>10.3e} {one.error:>9.1e}{more}")
        if len(self.parameters) > 12:
            lines.append(f"and {len(self.parameters) - 12} more with smaller errors")
        for cause in self.causes:
            kind = cause.split(":")[0]
            lines += ["", *textwrap.wrap(cause, columns)]
            if kind in ADVICE:
                lines += textwrap.wrap(ADVICE[kind], columns, initial_indent="  -> ", subsequent_indent="     ")
        for note in self.notes:
            lines += ["", *textwrap.wrap(f"note: {note}", columns)]
        return "\n".join(lines)


def report(subject: Subject, batch: Any, columns: Columns, loss_fn: LossFn) -> Report:
    """The report; gradients, buffers, modes and random numbers are as they were before."""
    gradients_of = subject.everything if subject.engine.stale(subject.everything) else ()
    with warnings.catch_warnings(), kept(subject.models, gradients_of) as before:
        warnings.simplefilter("ignore")
        try:
            return _report(Comparison(subject, batch, columns, loss_fn, before))
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            seen = in_short(error)
    raise DistaccumError(f"the whole batch does not fit into memory, which a check needs ({seen}); take a smaller one")


def _report(comparison: Comparison) -> Report:
    comparison.join()
    own = comparison.compare()
    with comparison.in_float64() as used:
        is_wide = used is not comparison
        errors = used.compare() if is_wide else own
        if not any(norm or error for norm, error in (*own, *errors)):
            raise DistaccumError(
                "the gradient of the whole batch is zero in every parameter, so nothing was compared; make the loss "
                "depend on the parameters (look for a detach, a factor of 0, a ReLU that is never above 0), or check "
                "with another batch"
            )
        equivalent, bound = used.agrees(errors), used.bound()
        notes = [*used.notes, *_notes_on(used, equivalent)]
        causes = [] if equivalent else causes_of(used)
    dtype = str(used.dtype).removeprefix("torch.")
    if used.narrowest != used.dtype:
        narrow = str(used.narrowest).removeprefix("torch.")
        notes.append(f"the model or the loss computes in {narrow} in part, in {dtype} too: hence the bound")
    names = names_of(comparison.subject.models)
    rows = [
        Difference(names.get(id(p), f"parameter {i}"), norm, error, error64 if is_wide else None)
        for i, (p, (norm, error), (_, error64)) in enumerate(
            zip(comparison.subject.parameters, own, errors, strict=True)
        )
    ]
    rows.sort(key=lambda row: row.error if row.error64 is None else row.error64, reverse=True)
    return Report(
        equivalent=equivalent,
        worst=max(error for _, error in errors),
        causes=tuple(causes),
        parameters=tuple(rows),
        dtype=dtype,
        bound=bound,
        samples=used.length,
        micro_batches=used.kept,
        notes=tuple(notes),
    )


def _notes_on(comparison: Comparison, equivalent: bool) -> Iterator[str]:
    if left_out := comparison.left_out:
        has, is_left = ("has", "is") if left_out == 1 else ("have", "are")
        yield (
            f"{left_out} of {sum(comparison.kept) + left_out} micro-batches {has} no "
            f"{' and no '.join(comparison.subject.reductions)} and {is_left} left out, as in training"
        )
    if equivalent and (names := comparison.uncertain_counts()):
        yield (
            "some labels are ignored (-100), as many in each sample, and count is of none of them "
            f"({', '.join(names)}): whether the loss averages over samples or over labels that are kept does not show; "
            "check with samples that keep different numbers of labels"
        )
    if equivalent and comparison.is_random:
        yield (
            "random numbers are drawn by the model or the loss; micro-batches drew those of the whole batch, which "
            "holds only for this order and this cut"
        )
