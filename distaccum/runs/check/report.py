"""check(): compares the big batch with the accumulated one on the user's own model, and reports why they differ."""

from __future__ import annotations

import copy
import shutil
import textwrap
import warnings
from dataclasses import dataclass, replace
from typing import Any

from ...batch import Columns
from ...extension import hooks_of
from ...law import DistaccumError
from ...norms import names_of
from ...planning import Planner
from ..snapshot import kept
from ..update import LossFn, refuse_closure
from .causes import causes_of
from .comparison import Comparison


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
        shown, width = self.parameters[:12], max(12, *(len(row.name) for row in self.parameters[:12]))
        wide = [f" {row.error64:>9.1e}" if row.error64 is not None else "" for row in shown]
        table = [f"{'gradient of':<{width}} {'norm':>10} {'error':>9}" + (f" {'float64':>9}" if wide[0] else "")]
        table += [f"{r.name:<{width}} {r.norm:>10.3e} {r.error:>9.1e}{w}" for r, w in zip(shown, wide, strict=True)]
        if len(self.parameters) > 12:
            table.append(f"and {len(self.parameters) - 12} more with smaller errors")
        texts = [headline, *self.causes, *(f"note: {note}" for note in self.notes)]
        first, *others = (textwrap.fill(text, columns) for text in texts)
        return "\n\n".join([first, "\n".join(table), *others])


def check(planner: Planner, batch: Any, loss_fn: LossFn, columns: Columns) -> Report:
    """Makes the report; puts back gradients, buffers, modes, random numbers, and which warnings were given."""
    planner.close_previous()
    job, engine = planner.job, planner.job.engine
    refuse_closure(engine, "check")
    if "step" in engine.owns:
        raise DistaccumError(
            f"check() with {engine.name}, which shows no gradient; check the module before it is wrapped"
        )
    every, warned = job.parameters(), set(job.once.keys)
    # A job whose windows have no extensions, judge nothing, and count separately.
    trial = copy.copy(job)
    trial.begin_anew()
    trial.fit, trial.substitute = job.fit, job.substitute
    trial.hooks, trial.config = hooks_of(()), replace(job.config, on_nonfinite="ignore")
    with warnings.catch_warnings(), kept(job.models, every if engine.stale(every) else ()) as before:
        warnings.simplefilter("ignore")
        try:
            return _report(Comparison(Planner(trial), batch, columns, loss_fn, before))
        finally:
            job.once.keys = warned


def _report(comparison: Comparison) -> Report:
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
        causes = () if equivalent else tuple(causes_of(used))
    dtype, narrowest = (str(kind).removeprefix("torch.") for kind in (used.dtype, used.narrowest))
    if narrowest != dtype:
        used.notes.append(f"the model or the loss computes in {narrowest} in part, in {dtype} too: hence the bound")
    names = names_of(comparison.models)
    rows = [
        Difference(names.get(id(p), f"parameter {i}"), norm, error, error64 if is_wide else None)
        for i, (p, (norm, error), (_, error64)) in enumerate(zip(comparison.parameters, own, errors, strict=True))
    ]
    rows.sort(key=lambda row: row.error if row.error64 is None else row.error64, reverse=True)
    return Report(
        equivalent=equivalent,
        worst=max(error for _, error in errors),
        causes=causes,
        parameters=tuple(rows),
        dtype=dtype,
        bound=bound,
        samples=used.length,
        micro_batches=used.micro_batches,
        notes=tuple(used.notes),
    )
