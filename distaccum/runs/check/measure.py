"""The gradient of a window that is not stepped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from ...accumulating.drawing import Batches, cut_up
from ...accumulating.planner import Planner
from ...accumulating.reporting import Manner
from ...cutting import Columns
from ...law import DistaccumError
from ...norms import local
from ..update import LossFn, run_all
from .compare import Measured, Subject
from .report import Report, report


def _measured(planner: Planner, parameters: Sequence[nn.Parameter]) -> Measured:
    """The gradient and the loss of a window after its loop."""
    engine, scaler, status = planner.setup.engine, planner.setup.scaler, planner.status
    assert status is not None
    sums = status.ledger.sums()
    reduction = engine.peers.sum(sums)
    if reduction is not None:
        reduction.wait()
    scale = 1.0 if scaler is None else 1 / scaler.get_scale()
    gradients = [None if p.grad is None else _dense(local(p.grad)) * scale for p in parameters]
    return Measured(gradients, float(sums.sum()) / engine.divisor, status.plan.num_counted)


def check(planner: Planner, batch: Any, loss_fn: LossFn, columns: Columns) -> Report:
    """The report; all else is as it was before."""
    planner.make_way()
    setup = planner.setup
    setup.engine.refuse_closure("check")
    if setup.engine.owns_step:
        raise DistaccumError(
            f"check() with {setup.engine.name}, which shows no gradient; check the module before it is wrapped"
        )
    every = setup.parameters().every
    parameters = [p for p in every if p.requires_grad]

    def measure(
        micro_batches: Sequence[Any] | None, loss_fn: LossFn, lengths: Sequence[int] = (), *, as_sum: bool
    ) -> Measured:
        num = 0

        def draw(index: int) -> Batches:
            nonlocal num
            if micro_batches is not None:
                batches = Batches(list(micro_batches), [1] * len(micro_batches) if as_sum else list(lengths))
            else:
                progress = trial.progress
                batches = cut_up(batch, trial.config, progress.size, progress.seen, columns)(index)
                if len(batches.micro_batches) < 2 <= sum(batches.lengths or []):
                    batches = cut_up(batch, trial.config, progress.size, progress.seen, columns, parts=2)(index)
            num = len(batches.micro_batches)
            return batches

        window = trial.plan(draw, Manner(is_sum=as_sum, reduces_afterwards=as_sum))
        try:
            run_all(window, loss_fn)
            return replace(_measured(trial, parameters), left_out=num - len(window))
        finally:
            window.discard()

    with _separate(planner) as trial:
        subject = Subject(
            models=setup.models,
            parameters=parameters,
            everything=every,
            engine=setup.engine,
            reductions=planner.config.reductions,
            counts=planner.config.counts,
            measure=measure,
        )
        return report(subject, batch, columns, loss_fn)


@contextmanager
def _separate(planner: Planner) -> Iterator[Planner]:
    """A planner on the same model whose windows leave nothing: no warning, no state."""
    setup, keys = planner.setup, set(planner.setup.once.keys)
    try:
        yield planner.separate()
    finally:
        setup.once.keys = keys


def _dense(gradient: Tensor) -> Tensor:
    return gradient.to_dense() if gradient.is_sparse else gradient.detach()
