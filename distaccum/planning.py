"""Planning: this rank's part of a window, the reports of all ranks, and the plan and window that follow from them."""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from numbers import Real
from typing import Any, final

import torch
from torch import Tensor

from .agreement import compare
from .batch import Count, count_samples
from .batches import Batches, DrawFn, Pace
from .batchnorm import warn_of_batchnorm
from .guard import OVER, Stage, tell_count
from .job import Job, Micro, Start
from .law import NOBODY, Counts, DistaccumError, Plan, all_or_none
from .private import step_hooks_of
from .text import in_short
from .window import LOOP, RunMode, Window


@final
class Planner:
    """Plans the windows of one Accumulator.

    Attributes:
        place: The loader's position, for a state; None in a trial.
        readers: Of the loops over `windows()`; of those that were left, only with items that were drawn of an iterator.
    """

    def __init__(self, job: Job, place: Any = None) -> None:
        self.job = job
        self.place = place
        self.readers: list[Any] = []
        optimizers = [given for given in job.optimizers if hasattr(given, "register_step_pre_hook")]
        # They act for as long as the planner lives.
        self._hooks = [StepHook(job, optimizer) for optimizer in optimizers]
        for hook in self._hooks:
            weakref.finalize(self, hook.remove)

    def plan(self, draw: DrawFn, mode: RunMode = LOOP) -> Window:
        """Plans the window of the micro-batches that `draw` returns for the next update."""
        return self.window_of(self.counted(draw, mode), mode)

    def counted(self, draw: DrawFn, mode: RunMode = LOOP) -> Batches:
        """Makes way for the next window; draws and counts its micro-batches.

        Those that count nothing are left out, unless other ranks have parts of them. An error is kept until the other
        ranks have the plan.
        """
        job = self.job
        engine = job.engine
        counts_of = mode.counts or job.config.counts
        self.close_previous()
        if job.due:  # as a loaded state says
            job.step_schedules()
        job.start = Start()
        for adapter in job.adapters:
            adapter.begin()
        # Before the first plan, because its rows have as many counts as ranks have names.
        if job.compared is None:
            compare(job)
        batches = Batches([])
        try:
            batches = draw(job.index)
            drawn = batches.micro_batches
            count = partial(_counts_of, counts_of, batches.lengths)
            counts = count(drawn) if engine.recount is None else engine.recount(drawn, count)
            if "count" not in job.once.keys and batches.lengths is None and count_samples in counts_of.values():
                tell_count(drawn, job.once)
            batches.micros = [
                Micro(batch, own, number)
                for number, (batch, own) in enumerate(zip(drawn, counts, strict=True))
                if engine.peers.has_parts or any(own)
            ]
            full = [micro for micro in batches.micros if engine.peers.has_parts or all(micro.counts)]
            if engine.lockstep and (full or (batches.micros and job.substitute is None)):
                batches.substitute = (full or batches.micros)[-1].to_replay(len(job.config.counts))
        except Exception as error:
            batches.error = error
            engine.peers.tell(error)
        return batches

    def window_of(self, batches: Batches, mode: RunMode = LOOP, pace: Pace | None = None) -> Window:
        """Makes the window of `batches` and those of the other ranks; raises on all of them if one failed."""
        job = self.job
        peers = self.job.engine.peers
        config = self.job.config
        plan = peers.plan(_plan_of(job, batches, mode), batches.micro_batches, config.counts.values())
        if plan.failed:
            failed = peers.gather_objects(batches.error and in_short(batches.error), everyone=True)
            why = "rank {ranks} could not plan this window ({why}); no gradient was touched"
            all_or_none(failed, batches.take_error(), why)
        if plan.changed:
            compare(job)
        window = Window(job, plan, batches, mode, pace)
        if plan.num_micro_batches > 1 and job.batchnorms and config.batchnorm == "warn" and not window.is_empty:
            warn_of_batchnorm(job.batchnorms, job.once)
        for hook in self._hooks:
            hook.come_last()
        return window

    def close_previous(self) -> None:
        """Raises if a window still holds gradients; a second request discards it, as the error says."""
        window = self.job.open
        if window is not None and window.stage not in OVER and not window.may_be_dropped:
            window.may_be_dropped = True
            raise DistaccumError(
                f"another window was requested while one is {window.describe()}; finish its loop and call its "
                "step(), or discard() it (a second request discards it)"
            )
        if window is not None:
            window.discard()


@final
class StepHook:
    """Called before each step of an optimizer: refuses one in mid-window, and lets the window's own move on.

    Each plan brings it behind all other hooks, right before the weights move: a state that a hook takes before them is
    of this update, and of the next one afterwards.
    """

    def __init__(self, job: Job, optimizer: Any) -> None:
        self._job = weakref.ref(job)
        self._optimizer = optimizer
        self._hooks = step_hooks_of(optimizer)
        try:
            self._handle = optimizer.register_step_pre_hook(self)
        except AttributeError:
            raise TypeError(
                f"optimizer is a {type(optimizer).__name__}, a torch optimizer without step hooks, expected one "
                "whose __init__ calls Optimizer.__init__; if it wraps another optimizer, give that one, or "
                "optimizer=None and step it yourself after the loop"
            ) from None

    def come_last(self) -> None:
        if next(reversed(self._hooks), None) != self._handle.id:
            self.remove()
            self._handle = self._optimizer.register_step_pre_hook(self)

    def remove(self) -> None:
        self._handle.remove()

    def __call__(self, *_: object) -> None:
        job = self._job()
        window = job and job.open
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


def _plan_of(job: Job, batches: Batches, mode: RunMode) -> Plan:
    """The plan of this rank's part of the next window."""
    peers = job.engine.peers
    micros = batches.micros
    names = tuple(mode.counts or job.config.counts)
    # A rank without any stands in.
    lacks = [not (peers.has_parts or all(micro.counts)) for micro in micros or filter(None, [job.substitute])]
    by_hand, measured = (False, (0, 0)) if mode.measure is None else mode.measure(batches)
    return Plan(
        update=job.index,
        steps=batches.steps,
        agrees=mode.agrees,
        fewest=len(micros),
        most=len(micros),
        stranded=NOBODY if micros or job.substitute else peers.rank,
        has_more=not batches.no_more_after,
        lacks_terms=any(lacks),
        lacks_terms_in_last=any(lacks[-1:]),
        failed=batches.error is not None,
        reduce_afterwards=by_hand,
        changed=not peers.is_alone and job.compared != job.trainable(),
        num_drawn=len(batches.micro_batches),
        num_micro_batches=len(micros),
        measured=measured,
        totals=tuple(map(sum, zip(*(micro.counts for micro in micros), strict=True))) or (0.0,) * len(names),
        names=names,
        num_here=len(micros),
    )


def _counts_of(
    counts_of: Mapping[str, Count], lengths: Sequence[int] | None, micro_batches: Sequence[Any]
) -> list[Counts]:
    """Each micro-batch's denominators by name. Counts on a device are all read at once."""
    values: list[Any] = []
    for count in counts_of.values():
        # A batch that was cut knows its lengths.
        known = lengths if count is count_samples and len(lengths or ()) == len(micro_batches) else None
        values += known or [count(micro_batch) for micro_batch in micro_batches]
    rows = len(micro_batches)
    numbers = _read(values)
    for i, value in enumerate(numbers):
        if not (isinstance(value, Real) and 0 <= float(value) < math.inf):
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
