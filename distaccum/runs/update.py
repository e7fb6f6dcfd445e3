"""update(): a window run for the caller; undone on all ranks where it fails, and run again where that may help."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from enum import IntEnum
from functools import partial
from typing import Any, final

from torch import Tensor

from ..cutting import Columns
from ..drawing import LOOP, Make, Manner, cut_up
from ..engines import Engine
from ..extension import Extension, hooks_of
from ..guard import Stage
from ..law import DistaccumError, LostRanksError, all_or_none, in_short, ranks_where
from ..nonfinite import NonfiniteError
from ..planner import Planner
from ..update import Update
from ..window import Window
from .memory import free, is_out_of_memory
from .snapshot import Snapshot

LossFn = Callable[[Any], Tensor | Mapping[str, Tensor]]


class Vote(IntEnum):
    OK = 0
    OUT_OF_MEMORY = 1
    FAILED = 2


class FailedElsewhere(Exception):  # noqa: N818  # it never leaves this library
    """Another rank failed."""


@final
class Agreement(Extension):
    """Ranks agree that none has failed, before any of them reduces."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.own = Vote.OK
        self.votes: list[int] = []  # by rank, the last ones
        self.failed: list[str] = []  # the error of each that has failed
        self.is_reducing = False  # in a backward that other ranks take part in

    def before_backward(self, window: Window, reduces: bool) -> None:
        if reduces:
            self.agree()
            self.is_reducing = True

    def after_backward(self, window: Window) -> None:
        self.is_reducing = False

    def finishing(self, window: Window) -> None:
        if not self._engine.will_reduce(True):
            self.agree()
            self.is_reducing = True

    def agree(self) -> None:
        """Raises where another rank has failed; this one waits for the votes of all."""
        self.vote(Vote.OK)
        if any(self.votes):
            raise FailedElsewhere

    def report(self, error: Exception) -> None:
        """Reports this rank's error to the others, unless it came from them."""
        if not isinstance(error, FailedElsewhere):
            self.vote(Vote.OUT_OF_MEMORY if is_out_of_memory(error) else Vote.FAILED, error)

    def vote(self, vote: Vote, error: Exception | None = None) -> None:
        self.own, peers = vote, self._engine.peers
        if error is not None and vote == Vote.FAILED:
            peers.tell(error)
        self.votes = [int(row[0]) for row in peers.gather_largest([float(vote)])]
        if Vote.FAILED in self.votes:
            why = in_short(error) if error is not None and vote == Vote.FAILED else ""
            self.failed = peers.gather_objects(why, everyone=True)

    def ranks(self, vote: Vote) -> str:
        """Those that voted so, as a text."""
        return ranks_where([found == vote for found in self.votes])


def run_all(window: Window, loss_fn: LossFn) -> None:
    """A loop over the micro-batches."""
    for micro_batch in window:
        loss = loss_fn(micro_batch)
        if isinstance(loss, Mapping):
            if not loss:
                raise ValueError("loss_fn gave a dict without a loss, expected one for each name")
            window.backward(**loss)
        else:
            window.backward(loss)


def update(planner: Planner, extensions: Sequence[Extension], batch: Any, loss_fn: LossFn, columns: Columns) -> Update:
    """One update of a batch that is cut."""
    planner.job.engine.refuse_closure("update")
    draw = cut_up(batch, planner.job, columns)
    run = partial(run_all, loss_fn=loss_fn)
    return retry(planner, draw, lambda one: (run, replace(LOOP, hooks=hooks_of([one, *extensions]))))


def retry(
    planner: Planner,
    draw: Make,
    begin: Callable[[Agreement], tuple[Callable[[Window], None], Manner]],
) -> Update:
    """Runs a window and steps it; where that failed for want of memory, again with smaller micro-batches.

    `begin` gives what runs the window, and in which manner, whose hooks are those of the agreement too, anew for each
    attempt.
    """
    planner.make_way()
    job = planner.job
    engine, size = job.engine, job.size
    job.random.put_back()  # now, so that a second attempt has the same numbers
    snapshot = Snapshot(job.models)
    while True:
        agreement = Agreement(engine)
        run, manner = begin(agreement)
        window = planner.plan(draw, replace(manner, agrees=True))
        has_run = False
        try:
            run(window)
            has_run = True
            update = window.step()
        except NonfiniteError:
            snapshot.restore()
            raise
        except Exception as error:
            if has_run:  # in step(), where no rank waits to hear of it, and weights may have changed
                window.discard()
                raise
            window.discard()
            snapshot.restore()
            _settle(planner, window, agreement, error)
        except BaseException:
            window.discard()
            if window.stage is not Stage.STEPPED:  # else Ctrl-C came after the weights moved
                snapshot.restore()
            raise
        else:
            plan = window.plan
            size.succeeded(plan.largest, max(plan.num_counted), plan.largest_sample)
            return update
        free()


def _settle(planner: Planner, window: Window, agreement: Agreement, error: Exception) -> None:
    """Ranks exchange their failures; returns where a smaller micro-batch may fit."""
    peers, largest = planner.job.engine.peers, window.plan.largest
    if isinstance(error, LostRanksError):
        raise error
    try:
        if agreement.is_reducing and peers.num_ranks > 1 and not is_out_of_memory(error):
            raise error  # the others are in the reduction, where nothing reaches them; or failed in the same way
        try:
            agreement.report(error)
        except DistaccumError as lost:
            raise DistaccumError(
                f"rank {peers.rank} failed where the other ranks cannot hear of it, since they wait for it in a "
                f"collective of the model's wrapper ({in_short(error)}); start all ranks again, from a checkpoint"
            ) from lost
        if agreement.own == Vote.FAILED:
            raise error
        all_or_none(
            agreement.failed,
            None,
            f"rank {{ranks}} failed in update {window.index} ({{why}}); the window is undone on all ranks, and nothing "
            "was stepped",
        )
        if not planner.job.size.ran_out(largest):
            seen = f": {in_short(error)}" if agreement.own == Vote.OUT_OF_MEMORY else ""
            raise DistaccumError(
                f"a micro-batch of {largest} sample does not fit into the memory of rank "
                f"{agreement.ranks(Vote.OUT_OF_MEMORY)}{seen}; nothing was stepped. Use a smaller model or sample, "
                "activation checkpointing, or a lower precision"
            )
    finally:
        del error  # or its traceback would keep the failed forward, and itself
