"""Planner: from what each rank has to a window of all of them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, final

from ..law import (
    FAILED,
    DistaccumError,
    Plan,
    all_or_none,
    in_short,
    make_plan,
    refuse_unlike_parts,
    reports_of,
    shorten,
)
from ..ranks import Rows
from ..window.hooks import Hooks
from ..window.seeds import Seeds
from ..window.source import Source, StandIn
from ..window.status import Stage, Status
from ..window.window import Trained, Window
from ..wrappers.accelerate import is_dispatching
from .commit import Committer
from .config import Config
from .drawing import Candidate, Drawing
from .feed import Ahead, Feed, Given, Left, Place
from .progress import Progress
from .reporting import LOOP, SUM, Manner, Reporter
from .setup import Setup, guard_steps


@final
class Planner:
    """Plans the windows of one accumulator, one after the other."""

    def __init__(self, config: Config, setup: Setup, progress: Progress, committer: Committer, hooks: Hooks) -> None:
        self.config, self.setup, self.progress = config, setup, progress
        self._committer, self._hooks = committer, hooks
        self._seeds = Seeds(setup.engine, setup.once, setup.scaler, scales=setup.scales_seeds)
        self._trained: Trained | None = None
        self.reporter = Reporter(config, setup, progress)
        self.feed: Ahead | None = None  # of the loop over windows(), or of one that was left
        self.left: list[Left] = []  # iterators that were left
        self.status: Status | None = None  # of the window that was planned last
        self._window: weakref.ref[Window] | None = None
        self._watch()

    def _watch(self) -> None:
        for one in [*self.setup.optimizers, *self.setup.engine.guarded()]:
            guard_steps(one, self, Planner.forbids_steps)

    def forbids_steps(self) -> bool:
        """Whether gradients stand in the optimizers that belong to a window, and it is not the one that steps."""
        return not self._committer.is_stepping and self.has_open_window

    @property
    def has_open_window(self) -> bool:
        """Whether a window holds gradients, while anybody has it."""
        return self.standing() is not None and self.status is not None and self.status.is_open

    def standing(self) -> Window | None:
        """The window that was planned last, while anybody has it."""
        return self._window() if self._window is not None else None

    def __getstate__(self) -> dict[str, Any]:
        """Of a deep copy, with its model and optimizer in one: `copy.deepcopy((model, optimizer, accumulator))`."""
        self.setup.engine.peers.refuse_copy()
        if self.standing() is not None and self.status is not None:
            self.status.refuse_copy()
        return {**self.__dict__, "_window": None, "status": None, "_trained": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._watch()

    def separate(self) -> Planner:
        """A separate planner with the same setup, without extensions and with its own progress."""
        progress = Progress(self.config, self.setup)
        progress.size, progress.stand_in = self.progress.size, self.progress.stand_in
        return Planner(self.config, self.setup, progress, self._committer, Hooks())

    def plan(self, make: Drawing, manner: Manner = LOOP) -> Window:
        """The window of the micro-batches that `make` gives for an update."""
        return self.plan_from(Given(make, partial(self.reporter, manner=manner), self.setup.engine.peers), manner)

    def plan_from(self, feed: Feed, manner: Manner = LOOP) -> Window:
        """Draws a window, exchanges reports with the other ranks, and returns it."""
        self.make_way()
        self.setup.accelerated.refuse_accumulation()
        candidate, wait = feed.draw(self.progress.index)
        plan = self._plan_with_others(candidate, wait, tuple(SUM if manner.is_sum else self.config.reductions))
        window = self._window_of(candidate, plan, manner, feed)
        feed.accept(candidate, ahead=not plan.no_more_after and not plan.epoch_over)
        return window

    def _plan_with_others(self, candidate: Candidate, wait: Callable[[], Rows], names: Sequence[str]) -> Plan:
        peers = self.setup.engine.peers
        if candidate.error is not None and not candidate.report.num_drawn and is_dispatching():
            candidate.raise_error()  # the others wait for this rank in the loader, where they cannot hear of it
        rows = wait()
        if any(row[FAILED] for row in rows):
            failed = peers.gather_objects(candidate.error and in_short(candidate.error), everyone=True)
            candidate.raise_error()
            all_or_none(failed, None, "rank {ranks} could not plan this window ({why}); no gradient was touched")
        for about, warning in candidate.batches.warnings.items():
            self.setup.once.on_each_rank(about, warning)
        reports = reports_of(peers.sharing, peers.by_samples(rows))
        if peers.has_parts:
            refuse_unlike_parts(peers.parts, reports, self.config.counts_whole)
        return make_plan(names, reports)

    def _window_of(self, candidate: Candidate, plan: Plan, manner: Manner, feed: Feed) -> Window:
        setup, progress, batches = self.setup, self.progress, candidate.batches
        engine = setup.engine
        reductions = SUM if manner.is_sum else self.config.reductions
        micro_batches = [batches.micro_batches[i] for i in candidate.counted]
        counts = [candidate.counts[i] for i in candidate.counted]
        if not plan.is_empty:
            engine.check(plan)
            if setup.batchnorms:
                self._look_at_batchnorm(plan)
        stand_in: StandIn | None = progress.stand_in
        if candidate.counted and engine.lockstep:
            last = (candidate.full or candidate.counted)[-1]
            stand_in = StandIn(batches.micro_batches[last], candidate.counts[last])
        trained = self._trained_now()
        source = Source(engine, plan, stand_in, micro_batches, counts, candidate.counted)
        source.pieces = [candidate.pieces[i] for i in candidate.counted] if candidate.pieces else []
        ledger = manner.ledger(engine, reductions, plan.counts, trained.parameters[0].device, self._seeds)
        self.status = status = Status(progress.index, plan, source, ledger, trained.parameters)
        hooks = self._hooks if manner.hooks is None else manner.hooks
        window = Window(status, trained, hooks, self._committer, feed.pace)
        self._window = weakref.ref(window)
        return window

    def _trained_now(self) -> Trained:
        """The same until the optimizers' parameters change."""
        setup = self.setup
        parameters = setup.parameters()
        if self._trained is None or self._trained.parameters is not parameters.every:
            self._trained = Trained(
                engine=setup.engine,
                parameters=parameters.every,
                groups=parameters.groups,
                optimizers=setup.optimizers,
                scaler=setup.scaler,
                normalising=[module for _, module in setup.batchnorms],
                start=self.progress.start,
                once=setup.once,
            )
        return self._trained

    def make_way(self) -> None:
        """Raises if the last window still holds gradients; a second request discards it."""
        status, window = self.status, self.standing()
        if status is None or status.stage is Stage.STEPPED:
            return
        if window is not None:
            if status.is_open and not status.allow_discard:
                status.allow_discard = True
                raise DistaccumError(
                    f"another window was requested while one is {status.describe()}; finish its loop and call its "
                    "step(), or discard() it (a second request discards it)"
                )
            window.discard()
            return
        if self.forget() and not (status.allow_discard or status.was_asked_to_step or status.plan.is_empty):
            self.setup.once(
                "forgotten",
                f"the window of update {status.index} was dropped between its loop and its step(), so its gradients "
                "were discarded and nothing was learned from them; call window.step() after the loop, or discard() to "
                "give a window up",
            )

    def forget(self) -> bool:
        """Clears what a window that was dropped left; whether that was between its loop and its step()."""
        status = self.status
        if status is None or not status.is_open or self.standing() is not None:
            return False
        self.setup.engine.release()  # Ctrl-C may have come while the window was discarded
        self.setup.engine.clear(status.parameters)
        self.status = None
        return status.stage is Stage.COMPLETE

    def _look_at_batchnorm(self, plan: Plan) -> None:
        if self.config.batchnorm != "warn" or sum(plan.num_counted) <= 1 or "batchnorm" in self.setup.once.keys:
            return
        names = [name for name, module in self.setup.batchnorms if module.training]
        if names:
            self.setup.once(
                "batchnorm",
                f"{shorten(names)} normalise each micro-batch by its own statistics, so the gradient is not that of "
                "the big batch; freeze them (distaccum.batchnorm.freeze), use GroupNorm (to_groupnorm, there) or "
                "LayerNorm, or accept it with batchnorm='ignore'",
            )

    def own_part(self) -> tuple[dict[str, Any], Any]:
        """This rank's random numbers and its loader's state: of the start of the window at work, or of now."""
        status = self.status
        if not self.has_open_window or status is None:
            return self.progress.start.now(), self.loaders_place()
        if status.stage is Stage.COMPLETE and not self.setup.steps:
            raise DistaccumError(
                "state_dict() between a window's loop and its step() with optimizer=None, where the weights may have "
                "been stepped already; take it after window.step()"
            )
        return self.progress.start.random, self.loaders_place()

    def loaders_place(self) -> Place | None:
        """Where the loader stood when the window at work started, or where it stands."""
        feed, window, status = self.feed, self.standing(), self.status
        if feed is None:
            return self.progress.place
        is_of_window = window is not None and status is not None and not status.is_over and feed.status is status
        return feed.at_start if is_of_window else feed.reader.place()
