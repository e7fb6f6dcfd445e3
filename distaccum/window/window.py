"""Window: the micro-batches of one update, as a transaction."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, TypeVar, final

from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from ..engines import Engine
from ..law import DistaccumError, Once
from ..norms import is_zero
from ..scaling import forget
from ..update import Update
from .backwards import TAMPERED, Backwards
from .hooks import Hooks
from .parts import each_head, each_part
from .refusals import end_micro_batch, refuse_inference_mode
from .source import untouched_statistics
from .start import Start
from .status import DONE, WAITING, Stage, Status
from .tamper import Tamper

Item = TypeVar("Item")
Outputs = TypeVar("Outputs")


@dataclass(frozen=True)
class Trained:
    """What all windows of an accumulator change."""

    engine: Engine
    parameters: Sequence[nn.Parameter]  # the models' and the optimizers', each once
    groups: Sequence[Sequence[nn.Parameter]]  # an optimizer's parameters each; the models', where there is none
    optimizers: Sequence[Optimizer]
    scaler: GradScaler | None
    normalising: Sequence[nn.Module]  # layers with running statistics
    start: Start
    once: Once


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
    """

    def __init__(
        self,
        status: Status,
        trained: Trained,
        hooks: Hooks,
        commit: Callable[[Window], Update],
        pace: Callable[[int, int, int], None],
    ) -> None:
        self.index = status.index
        self.counts: dict[str, float] = dict(status.plan.counts)
        # For the library's own; `numbers` are those of extensions, by their key.
        self.status, self.started, self.numbers = status, time.perf_counter(), dict[str, Tensor]()
        self._plan, self._source = status.plan, status.source
        self._trained, self._engine, self._parameters = trained, trained.engine, trained.parameters
        self._ledger, self._hooks, self._commit = status.ledger, hooks, commit
        self._pace = pace  # draws a part of the next window
        self._is_begun = False  # by begin(), and not iterated yet
        self._is_heard = False  # extensions heard of its begin, and not of its end
        self._tamper = Tamper(trained.engine, trained.groups, trained.scaler, trained.optimizers)
        self._backwards = Backwards(weakref.ref(self), status, trained.engine, trained.parameters, hooks, self._tamper)

    def __getstate__(self) -> dict[str, Any]:
        self.status.refuse_copy()
        return self.__dict__

    def __len__(self) -> int:
        """This rank's micro-batches; stand-ins are not among them."""
        return self._source.num

    def __bool__(self) -> bool:
        """True, also where this rank has nothing to do: it still steps with the others."""
        return True

    @property
    def num_micro_steps(self) -> int:
        """What the loop yields on this rank, stand-ins included; 0 where nothing counts."""
        return self._source.num_micro_steps

    @property
    def num_done(self) -> int:
        """Micro-batches of this rank that went backward, stand-ins included."""
        return self.status.num_done

    @property
    def stand_in(self) -> bool:
        """True while the micro-batch at work only keeps this rank in step with the others; it was there before, its
        share is 0, and it is counted nowhere. A plain module and DDP never need one.
        """
        return self.status.stage is Stage.RUNNING and self._source.is_stand_in

    def __iter__(self) -> Iterator[Any]:
        """Yields this rank's micro-batches in order, once; only the last one's backward reduces (`sync="last"`).

        Left early, by `break` or an exception, the window is discarded. A micro-batch without `backward` is an error.
        """
        status, source = self.status, self._source
        if not self._is_begun:
            self.begin()
        self._is_begun = False
        checks_names = self._ledger.has_several
        try:
            while source.advance():
                self._pace(self.index, source.place, source.num_micro_steps)
                status.turn = WAITING
                if source.is_stand_in:
                    self._engine.stand_in()
                    with untouched_statistics(self._trained.normalising):
                        yield source.take()
                else:
                    yield source.take()
                if checks_names or status.turn is not DONE or status.has_more_parts or status.stage is Stage.LEFT:
                    end_micro_batch(status)
            if self._tamper.differs():
                self._refuse_lost(TAMPERED)
            if not self._plan.is_empty:
                self._finish()
            status.stage = Stage.COMPLETE
        finally:
            if status.stage is not Stage.COMPLETE:
                self.discard()

    def begin(self) -> None:
        """What the loop does first, where ranks may communicate: for a rank that does so otherwise before its loop."""
        if self.status.stage is not Stage.PLANNED:
            raise DistaccumError(f"this window is {self.status.describe()}; a window is iterated once")
        self.status.stage, self._is_begun = Stage.RUNNING, True
        try:
            if not self._plan.is_empty:
                self._begin()
            self._is_heard = True
            for hear in self._hooks.begin:
                hear(self)
        except BaseException:
            self.discard()
            raise

    def _begin(self) -> None:
        refuse_inference_mode()
        self._trained.start.begin()
        if self._engine.stale(self._parameters):
            # Zeros are nobody's: of zero_grad(set_to_none=False), or views of buckets that another Accumulator cleared.
            shown = [p.grad for p in self._parameters if p.grad is not None]
            if self._engine.stale(()) or not is_zero(shown):  # hidden ones, or those that are shown
                self._trained.once(
                    "stale", "gradients that stood before the window were cleared: they are not part of it"
                )
            self._engine.clear(self._parameters)
        self._engine.begin(self._plan, self._parameters)
        forget(self._trained.scaler, self._trained.optimizers)  # a window that was dropped may have left marks
        self._ledger.begin()

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
        for give in self._hooks.numbers:
            found = give(self)
            if found is not None:
                self.numbers[give.__self__.key] = found  # type: ignore[attr-defined]  # of a bound method

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
        source, backwards = self._source, self._backwards
        reduce = backwards.begin(self._refuse_lost)
        losses, seeds, entry = self._ledger.weigh(source.counts_here, source.is_stand_in, loss, named)
        if losses:
            backwards.run(reduce, self._engine.backward, losses, seeds, reduce)
        else:
            backwards.run(reduce, self._engine.skip)
        if not source.is_stand_in:
            self._ledger.note(entry, source.numbers[source.place])
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
        return self._backwards.run_pieces(inputs, options, self._refuse_lost)

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
        return each_part(self.status, items)

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
        if self._engine.owns_step:
            raise DistaccumError(f"heads() with {self._engine.name}, whose backward takes losses alone; add them up")
        return each_head(self.status, outputs, items, partial(self._backwards.run_trunk, self._refuse_lost))

    def step(self) -> Update:
        """The record of the update: clips, steps, updates the scaler, steps the schedule, clears the gradients.

        With `optimizer=None` you step before it, and it records and clears. Call it once, after the loop.

        Raises:
            DistaccumError: In mid-window, after a discard, for a gradient with NaN, or after 50 skips in a row.
        """
        if self.status.stage is not Stage.COMPLETE:
            raise DistaccumError(
                f"step() on a window that is {self.status.describe()}; step once, after the loop over its micro-batches"
            )
        self.status.was_asked_to_step = True
        if (self._trained.optimizers or self._engine.owns_step) and self._tamper.is_cleared():
            self._refuse_lost("gradients were cleared between the window's loop and its step()")
        return self._commit(self)

    def discard(self) -> None:
        """Gives the window up: its gradients are cleared and the model is put back. Weights do not change."""
        status = self.status
        if status.is_over:
            return
        if status.stage is not Stage.PLANNED:
            self._engine.release()
            self._engine.clear(self._parameters)
            forget(self._trained.scaler, self._trained.optimizers)
        status.stage, status.turn = Stage.LEFT, DONE  # late, so that what Ctrl-C breaks off is done again
        self._release()
        end_window(self, None)

    def _release(self) -> None:
        self._source.clear()
        self._ledger.clear()
        self._tamper.clear()

    def _refuse_lost(self, what: str) -> NoReturn:
        self.discard()
        raise DistaccumError(
            f"{what}, so the window's gradient is lost and the window is discarded; leave gradients alone in the loop, "
            "and their clearing to window.step()"
        )


def refusal_of(window: Window) -> str | None:
    """The reason of an extension not to step it."""
    return next((why for one in window._hooks.judge if (why := one(window)) is not None), None)


def close_window(window: Window) -> None:
    """Clears what was stepped or skipped."""
    window.status.stage = Stage.STEPPED
    window._engine.clear(window._parameters)
    window._release()


def end_window(window: Window, update: Update | None) -> None:
    """Tells all extensions, whatever one raises; twice is no harm."""
    is_heard, window._is_heard = window._is_heard, False
    errors: list[Exception] = []
    for hear in window._hooks.end if is_heard else ():
        try:
            hear(window, update)
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]
