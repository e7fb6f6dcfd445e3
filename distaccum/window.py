"""Window: the micro-batches of one update, as a transaction. An update can be read here from top to bottom."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, TypeVar, final

from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from .drawing import Manner
from .guard import (
    DONE,
    FAILED,
    TAMPERED,
    WAITING,
    Stage,
    Tamper,
    clear_stale,
    refuse_backward,
    refuse_copy,
    refuse_inference_mode,
    untouched_statistics,
    without_backward,
)
from .job import Counts, Job, Micro, Trace
from .law import DistaccumError, Plan, Reduction
from .losses import Losses, Term
from .nonfinite import judge, look_at
from .parts import each_head, each_part, weigh_chunks
from .scaling import forget
from .stepping import Step
from .update import Update

Item = TypeVar("Item")
Outputs = TypeVar("Outputs")
SUM: Mapping[str, Reduction] = {"samples": "sum"}


@final
class Window:
    """This rank's micro-batches of one update; an Accumulator makes it.

    Equivalent to, for the mean over all samples on all ranks::

        for micro_batch in window:
            loss = criterion(model(micro_batch))
            (loss * ranks * count(micro_batch) / window.counts["samples"]).backward()  # the last one reduces
        optimizer.step()
        optimizer.zero_grad()

    without a multiplication in the graph: the factor is backward's seed.

    Attributes:
        index (int): The update's index, from 0; a skipped update counts too.
        counts (dict[str, float]): The denominators over all ranks, by name.
        stand_in (bool): True while the micro-batch at work only keeps this rank in step with the others; it was there
            before, its share is 0, and it is counted nowhere. A plain module and DDP never need one.
    """

    def __init__(
        self,
        job: Job,
        plan: Plan,
        micros: Sequence[Micro],
        spare: Micro | None,
        manner: Manner,
        pace: Callable[[int, int, int], None],
    ) -> None:
        self.index, self.counts = job.index, dict(plan.counts)
        # For the library's own:
        self.plan, self.micros, self.spare = plan, list(micros), spare
        trained = job.parameters()
        self.parameters: Sequence[nn.Parameter] = trained.every
        reductions = SUM if manner.is_sum else job.config.reductions
        self.losses = Losses(job, reductions, plan.counts, self.parameters[0].device)
        self.numbers: dict[str, Tensor] = {}  # of extensions, by their key
        self.stage, self.turn, self.stand_in = Stage.PLANNED, DONE, False
        self.has_more_parts = False  # of parts() or heads()
        self.may_be_dropped = False  # another window may discard this one without an error
        self.trace = Trace(self.index)
        self._job, self._engine, self._own = job, job.engine, len(micros)
        self._hooks = job.hooks if manner.hooks is None else manner.hooks
        self._turns = 0 if plan.is_empty else job.engine.num_micro_steps(plan)
        self._early = job.engine.num_early(plan)
        self._pace = pace  # draws a part of the next window
        self._place, self.counts_here = -1, Counts()  # the micro-step at work, and the counts of its micro-batch
        self._is_begun = False  # by begin(), and not iterated yet
        self._is_heard = False  # extensions heard of its begin, and not of its end
        self._is_first = True  # no backward ended yet
        self._tamper, self._stepped = Tamper(job, trained.groups), trained.stepped
        self._started = time.perf_counter()

    def __getstate__(self) -> dict[str, Any]:
        refuse_copy(self)
        return self.__dict__

    def __len__(self) -> int:
        """This rank's micro-batches; stand-ins are not among them."""
        return self._own

    def __bool__(self) -> bool:
        """True, also where this rank has nothing to do: it still steps with the others."""
        return True

    @property
    def num_micro_steps(self) -> int:
        """The micro-batches that the loop yields on this rank, stand-ins included; 0 where nothing counts."""
        return self._turns

    @property
    def num_done(self) -> int:
        """The micro-batches of this rank that went backward, stand-ins included."""
        return self._place + (self.turn is DONE and not self.has_more_parts)

    @property
    def pieces_here(self) -> Sequence[Counts]:
        """The counts of what the micro-batch at work is run in, where a pipeline cuts it."""
        return () if self.stand_in else self.micros[self._place].pieces

    @property
    def is_open(self) -> bool:
        """True while it holds gradients: from the begin of its loop to its step or discard."""
        return self.stage in (Stage.RUNNING, Stage.COMPLETE)

    @property
    def is_over(self) -> bool:
        """True once it was stepped, skipped or discarded."""
        return self.stage in (Stage.STEPPED, Stage.LEFT)

    def _where(self) -> str:
        return f"in micro-batch {self._place} of {self._own}" if self._place >= 0 else "outside the loop"

    def describe(self) -> str:
        """Where it stands, in words."""
        return {
            Stage.PLANNED: "not begun",
            Stage.RUNNING: f"in its loop ({self._where()})",
            Stage.COMPLETE: "complete but not stepped",
            Stage.STEPPED: "stepped already",
            Stage.LEFT: "discarded (its loop was left, or another window was requested)",
        }[self.stage]

    # The loop

    def __iter__(self) -> Iterator[Any]:
        """Yields this rank's micro-batches in order, once; only the last one's backward reduces (`sync="last"`).

        Left early, by `break` or an exception, the window is discarded. A micro-batch without `backward` is an error.
        """
        if not self._is_begun:
            self.begin()
        self._is_begun = False
        try:
            for place in range(self._turns):
                self._place, self.turn = place, WAITING
                self.stand_in = place >= self._own
                self._pace(self.index, place, self._turns)
                if self.stand_in:
                    assert self.spare is not None  # the engine's check has seen to it
                    self.counts_here = self.spare.counts
                    self._engine.stand_in()
                    with untouched_statistics([module for _, module in self._job.batchnorms]):
                        yield self.spare.batch
                else:
                    self.counts_here = self.micros[place].counts
                    yield self._take(place)
                if self.turn is not DONE or self.has_more_parts or self.losses.has_several or self.stage is Stage.LEFT:
                    self._end_micro_batch()
            self.stand_in = False
            if self._tamper.differs():
                self._refuse_lost(TAMPERED)
            if not self.plan.is_empty:
                self._finish()
            self.stage, self.trace.lacks_step = Stage.COMPLETE, not self.plan.is_empty
        finally:
            if self.stage is not Stage.COMPLETE:
                self.discard()

    def _take(self, place: int) -> Any:
        """A micro-batch, which is the caller's to free."""
        micro = self.micros[place]
        batch, micro.batch = micro.batch, None
        return batch

    def to_come(self) -> list[Any]:
        """The micro-batches that the loop will yield, stand-ins too."""
        num = self._turns - self._own
        return [*(one.batch for one in self.micros), *([self.spare.batch] * num if self.spare is not None else [])]

    def begin(self) -> None:
        """Starts the engine, which may communicate. Iterating calls it; call it yourself if your ranks communicate
        before their first micro-batch.
        """
        if self.stage is not Stage.PLANNED:
            raise DistaccumError(f"this window is {self.describe()}; a window is iterated once")
        self.stage, self._is_begun, self._job.trace = Stage.RUNNING, True, self.trace
        try:
            if not self.plan.is_empty:
                self._begin()
            self._is_heard = True
            for hear in self._hooks.begin:
                hear(self)
        except BaseException:
            self.discard()
            raise

    def _begin(self) -> None:
        job, engine = self._job, self._engine
        refuse_inference_mode()
        job.random.begin()
        clear_stale(engine, self.parameters, job.once)
        engine.begin(self.plan, self.parameters)
        forget(job.scaler, job.optimizers)  # a window that was dropped may have left marks
        self.losses.begin()

    def backward(self, loss: Tensor | None = None, **named: Tensor | None) -> None:
        """Runs backward for this micro-batch, weighted so that the window adds up to the big batch.

        Args:
            loss: What the criterion gave: a scalar with a graph, not divided and not scaled.
            **named: With several denominators a loss for each, `window.backward(tokens=a, samples=b)`, or None. One
                whose denominator is 0 in this micro-batch is left out.

        Raises:
            TypeError, ValueError: No real scalar tensor with a graph, or an unknown name.
            DistaccumError: A second backward in one micro-batch, one outside the loop, or gradients that were changed.
        """
        # Every micro-step comes through here, and shall cost less than the division that the seed saves.
        reduces = self._start_backward()
        losses, seeds, terms = self.losses.weigh(self.counts_here, self.stand_in, loss, named)
        if losses:
            self._run(reduces, self._engine.backward, losses, seeds, reduces)
        else:
            self._run(reduces, self._engine.skip)
        self._note(terms)
        self._tamper.look()

    def _start_backward(self) -> bool:
        """Raises where no backward may come now; whether the one that comes reduces."""
        if self.turn is not WAITING:
            refuse_backward(self.stage, self.turn, self._where(), self.describe())
        if self._is_first and self._engine.stale(self.parameters, in_window=True):
            self._refuse_lost("gradients came into the window that its backward() did not make")
        if self._tamper.differs():
            self._refuse_lost(TAMPERED)
        return self._reduces and not self.has_more_parts

    @property
    def _reduces(self) -> bool:
        """True if the last backward of the micro-step at work reduces."""
        return self._place == self._turns - 1 or self._place < self._early

    def _run(self, reduces: bool, call: Callable[..., Outputs], *given: Any) -> Outputs:
        """Calls what runs backward."""
        if self._hooks.before_backward:
            sends = self._engine.will_reduce(reduces)
            for hear in self._hooks.before_backward:
                hear(self, sends)
        self.turn = FAILED
        try:
            outputs = call(*given)
        except RuntimeError as error:
            if self._engine.lockstep or self._engine.will_reduce(reduces):
                self._engine.peers.refuse_lost(error)
            raise
        for heard in self._hooks.after_backward:
            heard(self)
        self.turn, self._is_first = DONE, False
        return outputs

    def _note(self, terms: Sequence[Term]) -> None:
        if not self.stand_in:
            self.losses.note(terms, self.micros[self._place].number)

    def _end_micro_batch(self) -> None:
        """Raises where the micro-batch at work lacks a backward, a part or a named loss."""
        if self.stage is Stage.LEFT:
            raise DistaccumError(f"this window is {self.describe()}")
        if self.has_more_parts:
            raise DistaccumError("parts() or heads() was left before its last item; go through all of them")
        if self.turn is not DONE:
            raise without_backward("a micro-batch", self._where())
        if missing := self.losses.missing(self.counts_here):
            raise DistaccumError(
                f"micro-batch {self._place} got no loss for {missing}, although its count is above 0; give each "
                "name its loss, or let count give 0 where there is none"
            )

    def _finish(self) -> None:
        """Gradients become final."""
        for hear in self._hooks.finishing:
            hear(self)
        try:
            self._engine.finish()
        except RuntimeError as error:
            self._engine.peers.refuse_lost(error)
            raise
        self._engine.release()
        self._tamper.complete()
        job = self._job
        looks = not job.steps and job.scaler is None and job.config.on_nonfinite == "raise"  # before the caller steps
        if looks and not look_at(self._engine, self.parameters).finite:
            judge(self._engine, self.losses, self.parameters, "gradient", "raise")
        for give in self._hooks.numbers:
            found = give(self)
            if found is not None:
                self.numbers[give.__self__.key] = found  # type: ignore[attr-defined]  # of a bound method

    # Several backwards in one micro-batch

    def parts(self, items: Iterable[Item]) -> Iterator[Item]:
        """Yields `items`; each gets a backward of its own, so that one graph lives at a time, and only the last may
        reduce.

        Args:
            items: At least one; names of tasks or slices, since they are drawn one ahead. Compute the losses in the
                loop.

        Raises:
            ValueError: `items` is empty.
            DistaccumError: An item got no `backward`, the loop is left early, or this micro-batch had a backward.
        """
        return each_part(self, items, self._where)

    def heads(self, outputs: Outputs, items: Iterable[Item]) -> Iterator[tuple[Item, Outputs]]:
        """Yields each item with `outputs`, cut off from their trunk, which goes backward once after the last head::

            for head, features in window.heads(trunk(inputs), heads):
                window.backward(criterion(head(features), labels))

        Args:
            outputs: The trunk's, with its graph: a tensor, or tuples, lists and dicts of them.
            items: The heads, or their names; at least one. One head's graph is alive at a time.

        Raises:
            ValueError: `outputs` have no graph, or `items` is empty.
            DistaccumError: The engine is DeepSpeed, or as in `parts()`.
        """
        if "step" in self._engine.owns:
            raise DistaccumError(f"heads() with {self._engine.name}, whose backward takes losses alone; add them up")
        return each_head(self, outputs, items, self._where, self._run_trunk)

    def _run_trunk(self, outputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Runs the backward of what `heads` cut off."""
        if self._tamper.differs():
            self._refuse_lost(TAMPERED)
        losses, seeds, reduces = list(outputs), self.losses.unscaled(gradients), self._reduces
        if self._engine.will_reduce(reduces):
            losses, seeds = map(list, self._engine.with_earlier(losses, seeds))
        self._run(reduces, self._engine.backward, losses, seeds, reduces)
        self._tamper.look()

    def run(self, *inputs: Any, **options: Any) -> Any:
        """Runs forward and backward of this micro-batch through a pipeline's schedule, on every stage alike.

        Args:
            *inputs: Of the first stage; other stages leave them.
            **options: `target` for the last stage's loss function, `losses=[]` to be filled there with each chunk's,
                and keywords of the stages' forward.

        Returns:
            What the schedule's `step()` does: the outputs on the last stage, else None.

        Raises:
            DistaccumError: The model is no pipeline's schedule, or as in `backward()`.
        """
        reduces, found = self._start_backward(), list[Sequence[Term]]()
        outputs = self._run(reduces, self._engine.run, inputs, options, weigh_chunks(self, found))
        for terms in found:
            self._note(terms)
        if not found:
            self.losses.expect_none()
        self._tamper.look()
        return outputs

    # The update

    def step(self) -> Update:
        """The record of the update: clips, steps, updates the scaler, steps the schedule, clears the gradients.

        With `optimizer=None` you step before it, and it records and clears. Call it once, after the loop.

        Raises:
            DistaccumError: In mid-window, after a discard, for a gradient with NaN, or after 50 skips in a row.
        """
        if self.stage is not Stage.COMPLETE:
            raise DistaccumError(
                f"step() on a window that is {self.describe()}; step once, after the loop over its micro-batches"
            )
        job, schedules, self.trace.lacks_step = self._job, list(self._job.schedulers), False
        if (job.optimizers or "step" in self._engine.owns) and self._tamper.is_cleared():
            self._refuse_lost("gradients were cleared between the window's loop and its step()")
        step = Step(job, self.parameters, self._stepped, self.losses)
        try:
            if self.plan.is_empty:
                reason: str | None = f"no {' and no '.join(self.counts)} in any micro-batch of any rank"
            else:
                reason = step(self.numbers, self._refusal)
                if reason is None and self._engine.lockstep:
                    job.spare = self.spare
                job.skipped = 0 if reason is None else job.skipped + 1
            self._close(Stage.STEPPED)
            job.index += 1
            job.after_step(reason is None)
            if reason is None:
                _step_all(schedules)
        except BaseException:
            if step.has_stepped:
                # Ctrl-C, or a rank that was lost: what counts the weights' steps goes with them.
                job.index = self.index + 1
                self._close(Stage.STEPPED)
                if job.scaler is not None:
                    job.scaler.update(job.scaler.get_scale())  # it keeps to which optimizers it was shown
                _step_all(schedules)
            else:
                self.discard()  # it may be half unscaled or clipped
            raise
        record = step.record
        update = Update(
            index=self.index,
            counts=self.counts,
            micro_batches=self._own,
            stepped=reason is None,
            reason=reason,
            seconds=time.perf_counter() - self._started,
            _terms=None if record is None else record.losses,
            _divisor=self._engine.divisor,
            _reduction=None if record is None else record.sending,
            _norm=None if job.config.max_norm is None else step.norm,
            _read=step.read,
            _numbers={} if record is None else record.sums,
        )
        self._end(update)
        job.refuse_to_skip_on(reason)
        return update

    def _refusal(self) -> str | None:
        """The reason of an extension not to step."""
        return next((why for one in self._hooks.judge if (why := one(self)) is not None), None)

    # The end

    def discard(self) -> None:
        """Gives the window up: its gradients are cleared and the model is put back. Weights do not change."""
        if self.is_over:
            return
        if self.stage is not Stage.PLANNED:
            self._engine.release()
            self._engine.clear(self.parameters)
            forget(self._job.scaler, self._job.optimizers)
        self._close(Stage.LEFT, clears=False)  # late, so that what Ctrl-C breaks off is done again
        self._end(None)

    def _refuse_lost(self, what: str) -> NoReturn:
        """Discards the window, and says why."""
        self.discard()
        raise DistaccumError(
            f"{what}, so the window's gradient is lost and the window is discarded; leave gradients alone in the loop, "
            "and their clearing to window.step()"
        )

    def _close(self, stage: Stage, *, clears: bool = True) -> None:
        self.stage, self.turn, self.stand_in = stage, DONE, False
        if clears:
            self._engine.clear(self.parameters)
        self.micros, self.spare = [], None
        self.losses.clear()
        self._tamper.clear()
        self._job.trace = None

    def _end(self, update: Update | None) -> None:
        """Tells all extensions, whatever one raises; twice is no harm."""
        is_heard, self._is_heard = self._is_heard, False
        errors: list[Exception] = []
        for hear in self._hooks.end if is_heard else ():
            try:
                hear(self, update)
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]


def _step_all(schedules: list[LRScheduler]) -> None:
    """Steps each once, also where Ctrl-C comes between two of them."""
    while schedules:
        schedules.pop(0).step()
