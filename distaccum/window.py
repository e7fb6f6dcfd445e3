"""Window: the micro-batches of one update, as a transaction. An update can be read here from top to bottom."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from operator import is_ as is_same
from typing import Any, Generic, TypeVar, final

import torch
from torch import Tensor, nn

from . import guard
from .batch import Batch, Count, fresh
from .batches import Batches, Pace
from .batchnorm import untouched_statistics
from .engines.base import GRAD, OVERFLOW, Gradient
from .guard import DONE, FAILED, OVER, TAMPERED, WAITING, Stage, give_up
from .guesses import Answering, refuse_arguments
from .job import MOST_SKIPS, Hooks, Job, Micro, Start, few_of
from .law import Counts, DistaccumError, Plan, Reduction
from .losses import Losses, Record
from .parts import each_head, each_part
from .private import is_view, version_of
from .ranks import raise_if_lost
from .scaling import forget, has_unscaled, note_overflow, stamp_of_scale, unscale
from .text import plural
from .update import Update

Item = TypeVar("Item")
Outputs = TypeVar("Outputs")
STILL = "no weight changed between the window's loop and its step()"
MOVES = "give the optimizer to the Accumulator, or call optimizer.step() right before window.step()"


@dataclass(frozen=True)
class RunMode:
    """The way in which a window is run; None: as the accumulator says."""

    hooks: Hooks | None = None  # of extensions
    counts: Mapping[str, Count] | None = None
    reductions: Mapping[str, Reduction] | None = None
    agrees: bool = False  # ranks agree before they reduce
    # For the plan: whether no backward may reduce, and two numbers, of which the room that asks reads the largest.
    measure: Callable[[Batches], tuple[bool, tuple[int, int]]] | None = None


LOOP = RunMode()


@final
class Tamper:
    """Watches gradients to be stepped, from the end of a backward to the next one, or to the end of the loop.

    After the last backward it looks at all of them, before it at a few: whoever clears, clips or unscales in
    mid-window does so to all, and two looks at each of thousands of tensors would take longer than a micro-step. Our
    own writes cannot be predicted: a backward may skip a parameter, and checkpoints add several times.
    """

    def __init__(self, job: Job, parameters: Sequence[nn.Parameter]) -> None:
        self.few = few_of(parameters)
        self._parameters = parameters
        self._job = job
        self.clear()

    def clear(self) -> None:
        """Forgets what it saw."""
        self._holders: Sequence[Any] = ()  # leaves whose gradients were looked at
        self._seen: list[Tensor | None] = []
        self._stamps: list[int] = []

    def look(self, *, is_last: bool) -> None:
        """Remembers what gradients look like after a backward."""
        self._holders = self._job.engine.grad_leaves(self._parameters if is_last else self.few)
        self._seen = list(map(GRAD, self._holders))
        self._stamps = _stamps_of(self._seen)

    def differs(self) -> bool:
        """Returns whether a gradient was set, removed or written to; forgets what it saw, so that it can be freed."""
        holders, seen, stamps = self._holders, self._seen, self._stamps
        self.clear()
        scaler = self._job.scaler
        if scaler is not None and has_unscaled(scaler, self._job.optimizers):  # a write that no version counts
            return True
        now = list(map(GRAD, holders))
        if all(map(is_same, now, seen)):
            return _stamps_of(seen) != stamps
        return any(map(_has_changed, now, seen, _stamps_of(now), stamps))


def _has_changed(now: Tensor | None, seen: Tensor | None, stamp: int, before: int) -> bool:
    if now is seen:
        return stamp != before
    # DDP lays its buckets out anew in the forward after its first reduction, and moves gradients into them.
    has_moved = now is not None and seen is not None and is_view(now)
    return not has_moved


def _stamps_of(gradients: Sequence[Tensor | None]) -> list[int]:
    """How often each was written to."""
    return [-1 if gradient is None else version_of(gradient) for gradient in gradients]


@final
class Window(Answering, Generic[Batch]):
    """This rank's micro-batches of one update; an Accumulator makes it.

    Equivalent to, for the mean over all samples on all ranks::

        for micro_batch in window:
            loss = criterion(model(micro_batch))
            (loss * ranks * count(micro_batch) / window.counts["samples"]).backward()  # the last one reduces
        optimizer.step()
        optimizer.zero_grad()

    but without a multiplication in the graph: the factor is the seed of backward.

    Attributes:
        index (int): The update's index, from 0; a skipped update counts too.
        counts (dict[str, float]): The denominators over all ranks, by name.
        num_micro_steps (int): How many micro-batches the loop yields on this rank, with stand-ins; 0 if nothing counts.
        stand_in (bool): True while the current micro-batch only keeps this rank in step with the others: an earlier
            one, run again with a share of 0 and counted nowhere. A plain module and DDP never need one.
    """

    def __init__(self, job: Job, plan: Plan, batches: Batches, mode: RunMode, pace: Pace | None) -> None:
        self.index = job.index
        self.counts = {name: int(n) if n == int(n) else n for name, n in zip(plan.names, plan.totals, strict=True)}
        # For use inside the library:
        self.plan = plan
        self.is_empty = not (plan.most and any(plan.totals))  # nothing counts, so there is no update
        self.micros = batches.micros
        self.substitute = batches.substitute or job.substitute
        self.parameters: Sequence[nn.Parameter] = job.parameters()
        reductions = mode.reductions or job.config.reductions
        self.losses = Losses(job, reductions, self.counts, self.parameters[0].device)
        self.numbers: dict[str, Tensor] = {}  # from extensions, by key
        # Including stand-ins.
        self.num_micro_steps, self._num_early = (0, 0) if self.is_empty else job.engine.num_micro_steps(plan)
        self.stage = Stage.PLANNED
        self.turn = DONE
        self.stand_in = False
        self.micro_step = -1  # the index of the current micro-batch
        self.at_work: Micro | None = None  # the current micro-batch; None while this rank stands in
        self.counts_here = Counts()  # of the current micro-batch
        self.has_more_parts = False  # parts() or heads() has items left
        self.may_be_dropped = False  # another window may discard this one without an error
        self._job = job
        self._engine = job.engine
        self._num_own = len(self.micros)
        self._hooks = job.hooks if mode.hooks is None else mode.hooks
        self._pace = pace  # draws part of the next window
        self.start = job.start or Start()  # for use inside the library
        self._is_heard = False  # extensions were told of its beginning
        self._is_first = True  # no backward has ended yet
        self._has_stepped = False  # the weights have moved
        # The record and the gradient of a step; `moved` has them from where the weights move to the end.
        self.moved: tuple[Record, Gradient] | None = None
        self._at_step: tuple[Record, Gradient] | None = None
        self._tamper = Tamper(job, job.trained or self.parameters)
        self._stamp: object = None  # identifies the scaler's scale, which all seeds have
        self._final: list[Sequence[nn.Parameter]] = []  # by optimizer, where any had a gradient after the loop
        self._started = time.perf_counter()

    def __repr__(self) -> str:
        own = plural(self._num_own, "micro-batch")
        return f"<Window of update {self.index}: {own}, {self.counts}, {self.describe()}>"

    def __len__(self) -> int:
        """The number of this rank's micro-batches, without stand-ins."""
        return self._num_own

    def __bool__(self) -> bool:
        """True, even if this rank has no micro-batch: it still steps with the others."""
        return True

    @property
    def num_done(self) -> int:
        """The number of micro-batches on this rank whose backward is done, stand-ins included."""
        return self.micro_step + (self.turn == DONE and not self.has_more_parts)

    def where(self) -> str:
        """The position of the loop, in words."""
        here = "in a stand-in" if self.stand_in else f"in micro-batch {self.micro_step} of {self._num_own}"
        return here if self.micro_step >= 0 else "outside the loop"

    def describe(self) -> str:
        """The stage, in words."""
        return self.stage.value + (f" ({self.where()})" if self.stage is Stage.RUNNING else "")

    # The loop

    def __iter__(self) -> Iterator[Batch]:
        """Yields this rank's micro-batches in order, once; only the last one's backward reduces (`sync="last"`).

        Leaving the loop early, by `break` or an exception, discards the window on this rank. Other ranks are not told:
        they wait for this one when they reduce. A micro-batch without `backward` is an error.
        """
        if self.stage is not Stage.RUNNING or self.micro_step >= 0:  # unless the caller called begin()
            self.begin()
        try:
            for micro_step in range(self.num_micro_steps):
                self.micro_step = micro_step
                self.turn = WAITING
                self.stand_in = micro_step >= self._num_own
                if self._pace is not None:
                    self._pace(micro_step, self.num_micro_steps)
                if self.stand_in:
                    assert self.substitute is not None  # ensured by engine.num_micro_steps()
                    self.at_work = None
                    self.counts_here = self.substitute.counts
                    self._engine.stand_in()
                    with untouched_statistics([module for _, module in self._job.batchnorms]):
                        yield fresh(self.substitute.batch)
                else:
                    self.at_work = self.micros[micro_step]
                    self.counts_here = self.at_work.counts
                    yield self._take(self.at_work)
                if self.turn != DONE or self.has_more_parts or self.losses.has_several or self.stage is Stage.LEFT:
                    guard.refuse_unfinished(self)
            self.stand_in = False
            if self._tamper.differs():
                give_up(self, TAMPERED)
            if not self.is_empty:
                self._finish()
            if not self._job.steps:
                self._job.moves.look(self._job.stepped())
            self.stage = Stage.COMPLETE
        finally:
            if self.stage is not Stage.COMPLETE:
                self.discard()

    def _take(self, micro: Micro) -> Any:
        """Hands the batch over without keeping a reference, so that the caller can free it."""
        batch = micro.batch
        micro.batch = None
        return batch

    def begin(self) -> None:
        """Starts the engine, which may communicate. The loop does it; call it if you communicate before the loop."""
        job, engine = self._job, self._engine
        if job.start is not self.start:  # another one was planned since
            self.discard()
        if self.stage is not Stage.PLANNED:
            raise DistaccumError(f"this window is {self.describe()}; a window is iterated once")
        self.stage = Stage.RUNNING
        job.open = self
        try:
            if torch.is_inference_mode_enabled():  # tensors made there are read-only outside
                raise DistaccumError("a window inside torch.inference_mode(), which trains nothing; leave that mode")
            if not self.is_empty:
                if engine.stale(self.parameters):
                    guard.clear_stale(engine, self.parameters, job.once)
                engine.begin(self.plan, self.parameters)
                if job.scaler is not None:
                    forget(job.scaler, job.optimizers)  # a dropped window may have left marks
                    self._stamp = stamp_of_scale(job.scaler, self.parameters[0].device)
            self._is_heard = True
            for hear in self._hooks["begin"]:
                hear(self)
        except BaseException as error:
            self.discard()
            raise_if_lost(error)
            raise

    def backward(self, loss: Tensor | None = None, **named: Tensor | None) -> None:
        """Runs backward for this micro-batch, weighted so that the window adds up to the big batch.

        Args:
            loss: The criterion's result: a scalar with a graph, neither divided nor scaled.
            **named: With several denominators, a loss or None for each: `window.backward(tokens=a, samples=b)`. A loss
                whose denominator is 0 in this micro-batch is left out.

        Raises:
            TypeError, ValueError: The loss is not a real scalar tensor with a graph, or its name is unknown.
            DistaccumError: A second backward in one micro-batch, one outside the loop, or gradients that were changed.
        """
        # Every micro-step passes through here, so it must cost less than the division that the seed saves.
        may_reduce = self._start_backward()
        losses, seeds = self.losses.weigh(self.counts_here, self.at_work, loss, named)
        if losses:
            self._run(may_reduce, self._engine.backward, losses, seeds, may_reduce)
        else:
            self._run(may_reduce, partial(self._engine.show_parameters, in_loop=True))

    def _start_backward(self) -> bool:
        """Raises if a backward is not allowed now; returns whether it may reduce."""
        if self.turn != WAITING:
            guard.refuse_backward(self)
        if self._is_first and self._engine.stale(self._tamper.few):
            give_up(self, "gradients came into the window that its backward() did not make, as by loss.backward()")
        if self._tamper.differs():
            give_up(self, TAMPERED)
        return self._is_last or (not self.has_more_parts and self.micro_step < self._num_early)

    @property
    def _is_last(self) -> bool:
        """True if the backward that comes, or was, is the window's last on this rank."""
        return not self.has_more_parts and self.micro_step == self.num_micro_steps - 1

    def _run(self, may_reduce: bool, call: Callable[..., Outputs], *given: Any) -> Outputs:
        """Runs a backward by calling `call`, and tells the extensions before and after."""
        if self._hooks["before_backward"]:
            sends = self._engine.will_reduce(may_reduce)
            for hear in self._hooks["before_backward"]:
                hear(self, sends)
        self.turn = FAILED
        try:
            outputs = call(*given)
        except RuntimeError as error:
            guard.refuse_freed_graph(self, error)
            raise_if_lost(error)
            raise
        for heard in self._hooks["after_backward"]:
            heard(self)
        self.turn = DONE
        self._is_first = False
        self._tamper.look(is_last=self._is_last)
        return outputs

    def _finish(self) -> None:
        """Makes the gradients final."""
        engine, job = self._engine, self._job
        for hear in self._hooks["finishing"]:
            hear(self)
        try:
            engine.finish()
        except RuntimeError as error:
            raise_if_lost(error)
            raise
        if not job.unused.issuperset(id(p) for group in job.groups for p in group if p.grad is None):
            guard.refuse_untrained(self, job)
        self._final = [group for group in job.groups if any(one.grad is not None for one in group)]
        looks = not job.steps and job.scaler is None and job.config.on_nonfinite == "raise"  # the caller steps next
        if looks and not engine.gradient(self.parameters).finite:
            guard.judge(self, engine, "gradient", "raise")
        for give in self._hooks["numbers"]:
            numbers = give(self)
            if numbers is not None:
                self.numbers[give.__self__.key] = torch.as_tensor(numbers).reshape(-1)

    # Several backwards in one micro-batch

    def parts(self, items: Iterable[Item]) -> Iterator[Item]:
        """Yields `items`, each for a backward of its own: one graph is alive at a time, and only the last may reduce.

        Args:
            items: Names of tasks or slices, which are drawn one ahead; so compute the losses in the loop.

        Raises:
            ValueError: `items` is empty.
            DistaccumError: An item got no `backward`, the loop is left early, or this micro-batch had a backward.
        """
        yield from each_part(self, items)

    def heads(self, outputs: Outputs, items: Iterable[Item]) -> Iterator[tuple[Item, Outputs]]:
        """Yields each item with `outputs`, detached from their trunk, whose backward runs once, after the last head::

            for head, features in window.heads(trunk(inputs), heads):
                window.backward(criterion(head(features), labels))

        Args:
            outputs: The trunk's, with their graph: a tensor, or tuples, lists and dicts of tensors.
            items: The heads, or their names; at least one. One head's graph is alive at a time.

        Raises:
            ValueError: `outputs` have no graph, or `items` is empty.
            DistaccumError: The engine is DeepSpeed or FSDP1, or as in `parts()`.
        """
        yield from each_head(self, self._job, self._start_backward, self._run, outputs, items)

    def run(self, *inputs: Any, **options: Any) -> Any:
        """Runs forward and backward of this micro-batch through a schedule that does both; call it on every stage.

        Args:
            *inputs: The first stage's inputs; the other stages ignore them.
            **options: `target` for the last stage's loss function, and keyword arguments of the stages' forward.

        Returns:
            The result of the schedule's `step()`: the outputs on the last stage, None on the others.

        Raises:
            DistaccumError: The model is no such schedule, or as in `backward()`.
        """
        may_reduce = self._start_backward()
        return self._run(may_reduce, self._engine.run, self.at_work, self.losses.weigh, inputs, options)

    # The update

    def step(self, **unknown: Any) -> Update:
        """Clips, steps, updates the scaler, steps the schedule, clears the gradients, and returns the record.

        Call it once, after the loop. With `optimizer=None` step yourself first: it then only records and clears.

        Args:
            **unknown: None; options such as `max_norm` go to the Accumulator, as the error says.

        Raises:
            TypeError: It was given an argument.
            DistaccumError: In mid-window, after a discard, for a gradient with NaN, or after 50 skips in a row.
        """
        if unknown:
            refuse_arguments("step", (), unknown)
        if self.stage is not Stage.COMPLETE:
            raise DistaccumError(
                f"step() on a window that is {self.describe()}; step once, after the loop over its micro-batches"
            )
        job = self._job
        skipped = self._job.skipped
        if job.schedulers:
            job.watch_schedules()
        if job.steps and any(all(one.grad is None for one in group) for group in self._final):
            give_up(self, "gradients were cleared between the window's loop and its step()")
        try:
            reason, record = self._step()
            is_skip = reason not in (None, STILL)
            if not is_skip and self._engine.lockstep:
                job.substitute = self.substitute
            self.move_on(skipped + 1 if is_skip else 0)
            if reason is STILL:
                job.due.clear()
                job.once("still", f"{STILL}: {MOVES}")
            self._close(Stage.STEPPED)
            for adapter in job.adapters:
                adapter.after_step(reason is None)
            if job.due:
                job.step_schedules()
        except BaseException as error:
            if not self._has_stepped:
                job.index = self.index
                job.skipped = skipped
                job.start = self.start
                job.due.clear()
                self.discard()  # the gradient may be half unscaled or half clipped
                raise_if_lost(error)
                raise
            # Ctrl-C or a lost rank after the weights moved: the index, scaler and schedules must move along.
            self.move_on()
            self._close(Stage.STEPPED)
            if job.scaler is not None:
                job.scaler.update(job.scaler.get_scale())  # the same; forgets what was unscaled
            job.step_schedules()
            raise
        seconds = time.perf_counter() - self._started
        update = Update(self.index, self.counts, self._num_own, reason is None, reason, seconds, {}, record)
        self._end(update)
        if job.skipped >= MOST_SKIPS:
            job.skipped = 0
            raise DistaccumError(
                f"{MOST_SKIPS} updates in a row were skipped, the last because {reason}; nothing is learned like "
                "this. Look at the data and at the weights, lower the learning rate, or go back to a checkpoint"
            )
        return update

    def _step(self) -> tuple[str | None, Record | None]:
        """Sums the record, judges, clips and steps; returns why not, the same on all ranks, and the record."""
        job = self._job
        engine = self._engine
        scaler = self._job.scaler
        config = self._job.config
        if self.is_empty:
            return f"no {' and no '.join(self.counts)} in any micro-batch of any rank", None
        if not job.steps:
            record = Record(self.losses, self.numbers, None if scaler is None else [])
            return None if job.moves.happened(job.stepped()) else STILL, record
        flags = None if scaler is None else unscale(scaler, job.optimizers, self._stamp)
        gradient = engine.gradient(job.trained or self.parameters)
        record = Record(self.losses, self.numbers, flags)
        self._at_step = record, gradient
        reason = self._judge(gradient, record)
        if reason is None:
            self.stage = Stage.STEPPING
            reason = engine.step(job.optimizers, gradient, config.max_norm)
            self._has_stepped = reason is None
            if reason is not None:
                reason = guard.explain_skip(self, engine, record, reason, config.on_nonfinite)
        if scaler is not None and reason is not None:
            scaler.update()
        if reason is not None and config.max_norm is not None:
            gradient.take()
        record.norm = gradient.known
        record.shows_norm = config.max_norm is not None
        # Its parameters are cleared now.
        gradient.parameters = None
        return reason, record

    def _judge(self, gradient: Gradient, record: Record) -> str | None:
        """Returns why the gradient must not be stepped, or None."""
        engine = self._engine
        scaler = self._job.scaler
        on_nonfinite = self._job.config.on_nonfinite
        if scaler is not None:
            overflows = record.overflows(engine.peers)
            note_overflow(scaler, self._job.optimizers, overflows)
            if bool(overflows):
                return guard.explain_skip(self, engine, record, OVERFLOW, on_nonfinite)
        elif on_nonfinite != "ignore" and not gradient.finite:
            return guard.judge(self, engine, "gradient", on_nonfinite)
        return next((why for judge in self._hooks["judge"] if (why := judge(self, gradient)) is not None), None)

    def move_on(self, skipped: int = 0) -> None:
        """Makes the next update the one at which a job resumes, after `skipped` updates in a row; does so once."""
        job = self._job
        if not skipped and job.index == self.index:
            job.due = list(job.schedulers)
            if job.scaler is not None and job.optimizers:
                job.scaler.update()
        job.index = self.index + 1
        job.skipped = skipped
        job.start = None
        self.moved = self._at_step

    # The end

    def discard(self) -> None:
        """Gives the window up: clears its gradients and restores the wrappers. Weights do not change."""
        if self.stage in OVER:
            return
        # If Ctrl-C breaks this off, the next window goes on with it.
        self.may_be_dropped = True
        if self.stage is not Stage.PLANNED:
            self._engine.clear(self.parameters)
            forget(self._job.scaler, self._job.optimizers)
            self._tamper.clear()
        self._close(Stage.LEFT)  # last, so that a discard broken off by Ctrl-C is done again
        self._end(None)

    def _close(self, stage: Stage) -> None:
        self.stage = stage
        self.turn = DONE
        self.stand_in = False
        if stage is Stage.STEPPED:
            self._engine.clear(self.parameters)
        self.micros = []
        self.substitute = None
        self.at_work = None
        if self._job.open is self:
            self._job.open = None

    def _end(self, update: Update | None) -> None:
        """Tells every extension that heard of the window's beginning."""
        self.moved = self._at_step = None
        # In order, and each even if one raises.
        with ExitStack() as stack:
            for hear in reversed(self._hooks["end"]) if self._is_heard else ():
                stack.callback(hear, self, update)
