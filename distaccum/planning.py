"""Planning: this rank's part of a window, the reports of all ranks, and the plan and window that follow from them."""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from numbers import Real
from typing import Any, final

import torch
from torch import Tensor

from .agreement import compare
from .batch import Count, count_samples, fresh
from .batches import Batches, DrawFn, LocalPart, Pace
from .batchnorm import warn_of_batchnorm
from .guard import OPEN, OVER, Stage, refuse_copy, tell_count
from .job import LOOP, Counts, Job, Micro, RunMode, Start
from .law import NOBODY, DistaccumError, Plan, Reports, Span, all_or_none
from .private import step_hooks_of
from .text import in_short
from .window import SUM, Window

PLAIN = frozenset((int, float))
SAMPLES: Mapping[str, Count] = {"samples": count_samples}


@final
class Planner:
    """Plans the windows of one Accumulator.

    Attributes:
        place: The loader's position, for a state; None in a trial.
        left: Readers of iterators whose loop was left, with items that were drawn of them.
    """

    def __init__(self, job: Job, place: Any = None) -> None:
        self.job = job
        self.place = place
        self._window: weakref.ref[Window] | None = None
        self.left: list[Any] = []
        _guard_steps(self)

    @property
    def window(self) -> Window | None:
        """The window that was planned last; None if nobody holds it any more."""
        return None if self._window is None else self._window()

    def __getstate__(self) -> dict[str, Any]:
        """The state of a deep copy with model and optimizer: `copy.deepcopy((model, optimizer, accumulator))`."""
        if self.window is not None:
            refuse_copy(self.window)
        return {**self.__dict__, "_window": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        _guard_steps(self)

    def plan(self, draw: DrawFn, mode: RunMode = LOOP) -> Window:
        """Plans the window of the micro-batches that `draw` returns for the next update."""
        self.begin()
        part = local_part(self.job, draw, mode)
        return self.window_of(part, self.job.engine.peers.plan(part.report), mode)

    def begin(self) -> None:
        """Makes way for the next window."""
        job = self.job
        self.close_previous()
        if job.due:  # as a loaded state says
            job.step_schedules()
        job.start = Start()
        for adapter in job.adapters:
            adapter.begin()
        # Before the first plan, because its rows have as many counts as ranks have names.
        if job.compared is None:
            compare(job)

    def window_of(self, part: LocalPart, reports: Reports, mode: RunMode = LOOP, pace: Pace | None = None) -> Window:
        """Makes the window from the merged reports; raises on all of them if one failed."""
        job, peers, config = self.job, self.job.engine.peers, self.job.config
        if reports.failed:
            failed = peers.gather_objects(part.error and in_short(part.error), everyone=True)
            why = "rank {ranks} could not plan this window ({why}); no gradient was touched"
            all_or_none(failed, part.take_error(), why)
        if reports.changed:
            compare(job)
        plan = Plan(tuple(SUM if mode.is_sum else config.reductions), reports, len(part.micros))
        is_shared = peers.shares_samples or peers.has_parts
        if not plan.ranks_agree or (is_shared and peers.doubts(reports, config.counts.values())):
            peers.compare(peers.gather_objects(part.report, everyone=True), config.counts.values())
        window = Window(job, plan, part, mode, pace)
        if plan.num_micro_batches > 1 and job.batchnorms and config.batchnorm == "warn" and not plan.is_empty:
            warn_of_batchnorm(job.batchnorms, job.once)
        for hook in job.last_hooks:
            hook.come_last()
        self._window = weakref.ref(window)
        return window

    def close_previous(self) -> None:
        """Raises if the last window still holds gradients; a second request discards it, as the error says."""
        window = self.window
        if window is None:
            self.clear_orphan()
        elif window.stage in OPEN and not window.may_be_dropped:
            window.may_be_dropped, self.job.lacks_step = True, False
            raise DistaccumError(
                f"another window was requested while one is {window.describe()}; finish its loop and call its "
                "step(), or discard() it (a second request discards it)"
            )
        elif window.stage not in OVER:
            window.discard()

    def clear_orphan(self, *, warns: bool = True) -> None:
        """Clears what a window left behind if it was dropped while it held gradients."""
        job = self.job
        if not job.holds_gradients or self.window is not None:
            return
        # Ctrl-C may have broken off its discard().
        job.engine.clear(job.parameters())
        job.holds_gradients = False
        if job.lacks_step and warns:
            job.once(
                "forgotten",
                f"the window of update {job.index} was dropped between its loop and its step(), so its gradients "
                "were discarded and nothing was learned from them; call window.step() after the loop, or discard() to "
                "give a window up",
            )


@final
class StepHook:
    """Called before each step of an optimizer: refuses one in mid-window, and lets the window's own move on.

    Each plan brings it behind all other hooks, right before the weights move: a state that a hook takes before them is
    of this update, and of the next one afterwards.
    """

    def __init__(self, planner: Planner, optimizer: Any) -> None:
        self._planner, self._optimizer, self._hooks = weakref.ref(planner), optimizer, step_hooks_of(optimizer)
        self._handle = optimizer.register_step_pre_hook(self)

    def come_last(self) -> None:
        if next(reversed(self._hooks), None) != self._handle.id:
            self.remove()
            self._handle = self._optimizer.register_step_pre_hook(self)

    def remove(self) -> None:
        self._handle.remove()

    def __call__(self, *_: object) -> None:
        planner = self._planner()
        window = planner and planner.window
        if window is None:
            return
        if window.stage is Stage.STEPPING:
            window.move_on()
        elif window.stage in (Stage.RUNNING, Stage.COMPLETE) and not window.may_be_dropped:
            raise DistaccumError(
                "optimizer.step() before the window's own: the gradients in it belong to the window; call "
                "window.step() after its loop and nothing else, or give the Accumulator optimizer=None and step "
                "before it"
            )


def _guard_steps(planner: Planner) -> None:
    """Hooks the steps of the optimizers, for as long as the planner lives."""
    optimizers = [given for given in planner.job.optimizers if hasattr(given, "register_step_pre_hook")]
    planner.job.last_hooks = [StepHook(planner, optimizer) for optimizer in optimizers]
    for hook in planner.job.last_hooks:
        weakref.finalize(planner, hook.remove)


def local_part(job: Job, draw: DrawFn, mode: RunMode = LOOP) -> LocalPart:
    """Draws and counts the micro-batches of the next update; keeps an error until the other ranks have the report.

    Micro-batches that count nothing are left out, unless other ranks have parts of them.
    """
    index = job.index
    engine, peers, counts_of = job.engine, job.engine.peers, SAMPLES if mode.is_sum else job.config.counts
    batches, error, fingerprint = Batches([]), None, 0
    counts, pieces = list[Counts](), list[list[Counts]]()
    try:
        batches = draw(index)
        if engine.pipeline is None:
            counts = _counts_of(counts_of, batches.micro_batches, batches.lengths)
            if "count" not in job.once.keys and batches.lengths is None and count_samples in counts_of.values():
                tell_count(batches.micro_batches, job.once)
        else:
            pieces = engine.pipeline.count(batches.micro_batches, partial(_counts_of, counts_of))
            counts = [tuple(map(sum, zip(*of_pieces, strict=True))) for of_pieces in pieces]
        if peers.fingerprint is not None:
            fingerprint = peers.fingerprint(batches.micro_batches)
    except Exception as caught:
        error = caught
        peers.tell(caught)
    micros = [
        Micro(batch, own, number, pieces[number] if pieces else ())
        for number, (batch, own) in enumerate(zip(batches.micro_batches, counts, strict=False))
        if peers.has_parts or any(own)
    ]
    full = micros if peers.has_parts or len(counts_of) == 1 else [micro for micro in micros if all(micro.counts)]
    by_hand, measured = (False, (0, 0)) if mode.measure is None else mode.measure(batches)
    report = Reports(
        update=Span(index, index),
        steps=Span(batches.steps, batches.steps),
        agrees=Span(mode.agrees, mode.agrees),
        num_counted=Span(len(micros), len(micros)),
        stranded=NOBODY if micros or job.substitute else Span(peers.rank, peers.rank),
        has_more=not batches.no_more_after,
        lacks_terms=len(full) != len(micros),
        lacks_terms_in_last=bool(micros) and (not full or full[-1] is not micros[-1]),
        failed=error is not None,
        reduce_afterwards=by_hand or engine.pipeline is not None,
        changed=not peers.is_alone and job.compared != job.trainable(),
        num_drawn=len(batches.micro_batches),
        measured=measured,
        num_micro_batches=len(micros),
        unlike=fingerprint,
        totals=tuple(map(sum, zip(*counts, strict=True))) or (0.0,) * len(counts_of),
    )
    try:
        last = (full or micros)[-1] if micros and engine.lockstep else None
        # A sum has one count, and its micro-batch may stand in where there are more.
        names = len(job.config.counts) // len(counts_of)
        substitute = last and replace(last, batch=fresh(last.batch), counts=last.counts * names)
        return LocalPart(report, micros, substitute, error)
    finally:
        del error, batches  # or this frame and the error's traceback would keep each other


def _counts_of(
    counts_of: Mapping[str, Count], micro_batches: Sequence[Any], lengths: Sequence[int] | None = None
) -> list[Counts]:
    """Each micro-batch's denominators by name. Counts on a device are all read at once."""
    values: list[Any] = []
    for count in counts_of.values():
        # A batch that was cut knows its lengths.
        known = lengths if count is count_samples else None
        values += known or [count(micro_batch) for micro_batch in micro_batches]
    rows = len(micro_batches)
    are_plain = PLAIN.issuperset(map(type, values))
    numbers = values if are_plain else _read(values)
    for i, value in enumerate(numbers):
        if not (are_plain or isinstance(value, Real)) or not 0 <= value < math.inf:
            name, which = divmod(i, rows)
            shape = f" of shape {list(value.shape)}" if isinstance(value, Tensor) else ""
            seen = repr(value) if len(repr(value)) < 60 else f"a {type(value).__name__}{shape}"
            cure = "; add them up with .sum()" if shape else ""
            raise ValueError(
                f"count gave {seen} for {list(counts_of)[name]!r} in micro-batch {which}, expected a finite number "
                f"of at least 0{cure}"
            )
    numbers = list(map(float, numbers))
    return list(zip(*(numbers[i : i + rows] for i in range(0, len(numbers), rows)), strict=True)) if rows else []


def _read(values: list[Any]) -> list[Any]:
    """Replaces one-element tensors with their numbers, in one read for all of them."""
    tensors = {i: value for i, value in enumerate(values) if isinstance(value, Tensor) and value.numel() == 1}
    if not tensors:
        return values
    device = next(iter(tensors.values())).device
    # Exact for whole numbers up to 2**53.
    wide = None if device.type == "mps" else torch.float64
    stacked = torch.stack([tensor.detach().reshape(()).to(device, wide) for tensor in tensors.values()])
    numbers = dict(zip(tensors, stacked.tolist(), strict=True))
    return [numbers.get(i, value) for i, value in enumerate(values)]
