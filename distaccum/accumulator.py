"""Accumulator: options in, windows out. An update reads from top to bottom: plan, window, commit."""

from __future__ import annotations

import operator
import os
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import LBFGS, Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from .accumulating.commit import NonfiniteError, OnNonfinite, Stepper, owned_by, windows_on
from .accumulating.config import WHOLE, by_name, choice, dtype_of_sums, positive, several, wanted_sizes
from .accumulating.drawing import Feed, Stream
from .accumulating.planner import Ahead, Draw, Drawn, Offered, count_all, look_up
from .batchnorm import batchnorms
from .engines import Engine, Sync, choose_engine
from .engines.accelerate import Accelerated
from .gradients.norms import local
from .gradients.scaling import refuse_broken_scaler, refuse_mixed
from .gradients.snapshot import Before, random_devices
from .law.batches import Count, batch_length, count_samples, cut_batch, widest_sample
from .law.errors import DistaccumError, warn
from .law.plan import Plan, RankReport, guess_counts, make_plan
from .law.shares import Reduction, Schedule, at_update, cut_evenly, listed, steps_for, tidy, whole_number_in
from .law.sizes import PROOFS, Fit, learned_sizes
from .law.update import Update
from .observers.noise import Noise, averages_in
from .observers.statistics import Pool
from .observers.trace import NOTHING, Trace, span
from .runs.check.compare import Measured, Subject
from .runs.check.report import Report, check
from .runs.contrast import Contrast, Encode
from .runs.update import Guard, Transaction
from .window.resume import Unfinished, pack, unpack
from .window.window import Spare, Stage, Window

BatchNorm = Literal["warn", "pool", "ignore"]
LossFn = Callable[[Any], Tensor | Mapping[str, Tensor]]
MOST_SKIPS = 50  # in a row


class Accumulator:
    """Cuts updates into windows of micro-batches; each window's gradient is that of the one big batch.

    >>> import torch
    >>> model = torch.nn.Linear(4, 1)
    >>> accumulator = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), steps=2)
    >>> loader = [torch.randn(3, 4), torch.randn(3, 4), torch.randn(1, 4)]
    >>> for window in accumulator.windows(loader):
    ...     for inputs in window:
    ...         window.backward(model(inputs).square().mean())
    ...     update = window.step()
    ...     print(update.index, update.counts)
    0 {'samples': 6}
    1 {'samples': 1}

    `model` is a module, plain or with wrappers of one kind in it (DDP, fully_shard, FSDP1), or a sequence of them
    trained together, or a DeepSpeed engine; `optimizer` is one, several, or None where the caller or the engine
    steps; `accelerator` is the Accelerator that prepared them. Either `steps` micro-batches per rank and
    update, or `batch_size` samples over all ranks of which one forward holds `micro_batch_size`; `steps` and
    `batch_size` may be callables of the update's index. `max_norm=inf` measures the norm and clips nothing.
    `accumulate_dtype=torch.float32` adds gradients of bfloat16 and float16 parameters up in float32 and rounds them
    once, before DDP reduces them in their own dtype.
    `lookahead=False` draws a window of `windows(loader)` while it runs, one micro-batch ahead; its count is then known
    at its end, and the gradient is corrected there.
    `measure_noise=True` gives each update the gradient noise scale, smoothed, in the unit of its count.
    `trace` is a folder in which each rank writes when it did what; `distaccum timeline` draws it.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        *,
        steps: Schedule | None = None,
        batch_size: Schedule | None = None,
        micro_batch_size: int | Literal["auto"] | None = None,
        reduction: Reduction | Mapping[str, Reduction] = "mean",
        count: Count | Mapping[str, Count] = count_samples,
        max_norm: float | None = None,
        scheduler: LRScheduler | Sequence[LRScheduler] | None = None,
        scaler: GradScaler | None = None,
        accelerator: Any = None,
        sync: Sync = "last",
        accumulate_dtype: torch.dtype | None = None,
        on_nonfinite: OnNonfinite = "raise",
        batchnorm: BatchNorm = "warn",
        lookahead: bool = True,
        measure_noise: bool = False,
        trace: str | os.PathLike[str] | None = None,
    ) -> None:
        self._models: list[nn.Module] = several("model", model, "forward")
        self._accelerated = Accelerated(
            accelerator,
            several("optimizer", optimizer, "param_groups"),
            several("scheduler", scheduler, "step"),
            scaler if scaler is not None and scaler.is_enabled() else None,
        )
        self._engine = choose_engine(self._models, choice("sync", sync, get_args(Sync)))
        self._engine.run_backward = self._accelerated.run_backward or self._engine.run_backward
        self._optimizers = self._engine.adopt_optimizers(self._accelerated.optimizers)
        self._schedulers = self._engine.adopt_schedulers(self._accelerated.schedulers)
        self._scaler: GradScaler | None = self._accelerated.scaler
        if any(isinstance(schedule, ReduceLROnPlateau) for schedule in self._schedulers):
            raise TypeError("ReduceLROnPlateau needs a metric, which no window knows; step it yourself")
        if any(isinstance(one, LBFGS) for one in self._optimizers):
            raise TypeError(
                "LBFGS needs a closure that evaluates the model again, which no window has; step it yourself"
            )
        self._steps, self._batch_size, self._micro_batch_size = wanted_sizes(steps, batch_size, micro_batch_size)
        self._fit = Fit(None if self._micro_batch_size == "auto" else self._micro_batch_size)
        self._reductions, self._counts = by_name(reduction, count)
        self._lookahead = lookahead
        if not lookahead:
            self._refuse_to_stream(sync)
        self._max_norm = self._engine.adopt_max_norm(positive("max_norm", max_norm))
        choice("on_nonfinite", on_nonfinite, get_args(OnNonfinite))
        self._batchnorm = choice("batchnorm", batchnorm, get_args(BatchNorm))
        if not self._optimizers and not self._engine.owns_step and (max_norm is not None or on_nonfinite == "skip"):
            raise ValueError(
                "max_norm and on_nonfinite='skip' act where the library steps, and no optimizer was given; pass "
                "it, or clip and skip yourself before window.step()"
            )
        if not self._optimizers and self._scaler is not None and self._schedulers:
            raise ValueError(
                "scheduler with a scaler and no optimizer: whether your scaler.step() stepped cannot be seen; step the "
                "schedule yourself, or pass the optimizer"
            )
        if self._scaler is not None:
            if self._engine.owns_step:
                raise ValueError(f"scaler with {self._engine.name}, which scales losses itself; leave it out")
            refuse_mixed(self._optimizers)
        if self._engine.judges_gradients and on_nonfinite == "ignore":
            raise ValueError(
                f"on_nonfinite='ignore' with {self._engine.name}, which looks at each gradient and skips what is not "
                "finite; say 'raise' or 'skip'"
            )
        looks = {
            f"max_norm={max_norm}": max_norm is not None,
            f"on_nonfinite={on_nonfinite!r}": on_nonfinite != "ignore",
            "scaler": self._scaler is not None,
            "measure_noise": measure_noise,
        }
        why = self._engine.hides_parts()
        if why is not None and any(looks.values()):
            raise ValueError(
                f"{', '.join(look for look, is_wanted in looks.items() if is_wanted)} with {self._engine.name} {why}: "
                "each rank would look at its own part of the gradient, and ranks would decide apart. Use fully_shard "
                "over the data-parallel mesh, or leave these out, with on_nonfinite='ignore'"
            )
        self._noise: Noise | None = None
        if measure_noise:
            stepped = partial(_stepped, self._engine, self._optimizers)
            self._noise = Noise(self._engine, self._reductions, self._counts, stepped, self._scaler)
        self._stepper = Stepper(
            self._engine, self._optimizers, self._scaler, max_norm=self._max_norm, on_nonfinite=on_nonfinite
        )
        self._trained = self._engine.parameters()
        if not self._trained:
            raise ValueError("the model has no parameters, so there is no gradient to accumulate")
        if self._optimizers and not {*map(id, self._trained)} & {*map(id, self._stepper.owned())}:
            raise ValueError(
                "the optimizer holds none of the model's parameters; make it from model.parameters() after the "
                "model is moved, wrapped and complete"
            )
        for parameter in _unstepped(self._trained, self._stepper.owned()):
            _User.on(parameter).accumulators.add(self)
        sums = dtype_of_sums(accumulate_dtype)
        if sums is not None:
            self._engine.accumulate_in(sums, self._parameters())
        self._batchnorms = [named for model in self._models for named in batchnorms(model)]
        self._pool = Pool(self._models, self._engine) if batchnorm == "pool" else None
        self._index = 0
        self._contrasts = 0  # that came through in this process
        self._skipped = 0  # in a row
        self._before = Before(self._models)
        self._feed: Feed | None = None  # of the windows() at hand
        self._ahead: Ahead | None = None  # of the same
        self._loaded: tuple[Unfinished | None, Any] = (None, None)  # of a state: a window, and the loader's
        self._warned: set[str] = set()
        self._unfinished = False
        self._spare: Spare | None = None  # of a window whose gradient was finite
        self._window: weakref.ref[Window] | None = None
        self._forgotten: int | None = None  # the index of one that was dropped between its loop and its step
        for one in [*self._optimizers, *self._engine.guarded()]:
            _guard(one, self)
        self._accelerated.refuse_to_save_one_part(self._unfinished_window)
        if too_long := self._accelerated.longer_schedules():
            self._warn("schedule", too_long)
        if trace is not None:
            self._engine.peers.waits = self._engine.trace = Trace(trace, self._engine, self._trained[0].device)

    @property
    def index(self) -> int:
        """The index of the next update: as many windows have been stepped or skipped."""
        return self._index

    # Windows

    def windows(self, loader: Iterable[Any]) -> Iterator[Window]:
        """One window after the other from a loader of micro-batches, until no rank has any left.

        What the loader yields is never cut. The last window may be short, and ranks may run out at
        different times.
        """
        if self._steps is None and (self._batch_size is None or self._micro_batch_size == "auto"):
            raise ValueError(
                "windows() groups micro-batches and no number was given; pass steps=, or batch_size= and "
                "micro_batch_size= as a number, to the Accumulator ('auto' is for update(), which cuts)"
            )
        return self._windows(loader)

    def _windows(self, loader: Iterable[Any]) -> Iterator[Window]:
        unfinished, state = self._loaded
        self._loaded = unfinished, None
        tells_state = self._accelerated.tells_state(loader)
        if state is not None and not tells_state:
            self._warn("loader", f"the state has a loader's in it, and a {type(loader).__name__} cannot load that")
            state = None
        self._feed = feed = Feed(loader, state, tells_state=tells_state)

        # Nor where how many are drawn depends on the update's index: another may come between.
        ahead_too = feed.may_be_read_ahead and not callable(self._steps) and not callable(self._batch_size)
        stream: Stream | None = None

        def draw(index: int) -> Drawn:
            nonlocal stream
            steps = self._steps_now(index)
            feed.begin(stream)
            if self._lookahead:
                return Drawn(feed.draw(steps), steps=steps, exhausted=feed.exhausted, ahead=ahead_too)
            stream = Stream(
                feed, steps, lambda batches: count_all(self._counts, Drawn(batches)), alone=not self._in_step
            )
            first = stream()
            return Drawn([] if first is None else [first[0]], steps=steps, exhausted=feed.exhausted, stream=stream)

        ahead = self._ahead = Ahead(feed, draw)
        was_left = False
        try:
            with self._accelerated.reading(loader):
                while True:
                    window = self._plan_from(ahead)
                    if window._plan.epoch_over:
                        return
                    window._ahead = ahead
                    try:
                        yield window
                    except GeneratorExit:
                        window._let_go()
                        window._ahead = None
                        was_left = tells_state  # a state_dict() that comes now says where
                        if window._stream is None or window._stage is Stage.COMPLETE:  # else it draws on
                            feed.leave(drawn_ahead=ahead.offered is not None)
                        raise
                    if window._plan.no_more_after:
                        window._make_way()  # else a step() forgotten on the last window would pass in silence
                        return
        finally:
            ahead.drop_rows()
            self._ahead = None if self._ahead is ahead else self._ahead
            if self._feed is feed and not was_left:
                self._feed = None

    def _plan_from(self, ahead: Ahead) -> Window:
        """The next window of a loader, which may be drawn already, and known to the other ranks."""
        offered, rows = ahead.offered, ahead.rows
        ahead.offered, ahead.rows = None, None
        if offered is None:
            return self._plan(ahead.draw)
        if ahead.has_failed and self._engine.peers.num_ranks > 1:
            raise DistaccumError(
                f"rank {self._engine.peers.rank} failed in the step of update {self._index}, and others may have gone "
                "on; start all ranks again, from a checkpoint"
            )
        if rows is None or offered.offer.update != self._index:  # another update came between, or none: on all ranks
            return self._plan(offered.again)
        self._before_planning()
        with self._planning():
            return self._window_of(offered, rows())

    def split(self, batch: Any, length: int | None = None) -> Window:
        """One window that cuts `batch`, this rank's part of the update, into micro-batches.

        The fewest that respect `micro_batch_size`, or `steps` of them; in order, as even as can be, the larger
        ones last. Every tensor whose first dimension is the batch's is cut (as views), and lists of one value
        per sample; all else goes whole to each. `length` says the batch's length where it cannot be seen.
        """
        self._refuse_to_cut_without_size("split")
        return self._plan(lambda _: self._cut(batch, length))

    def _cut(self, batch: Any, length: int | None = None, parts: int = 1) -> Drawn:
        total = batch_length(batch) if length is None else operator.index(length)
        steps = None if self._steps is None else at_update("steps", self._steps, self._index, WHOLE)
        largest = self._fit.size or max(total, 1)
        parts = max(steps or parts, -(-total // largest))
        sizes = cut_evenly(total, parts=parts)
        return Drawn(list(cut_batch(batch, sizes, total)), lengths=sizes, steps=steps or 0)

    def _refuse_to_cut_without_size(self, name: str) -> None:
        if self._steps is None and self._micro_batch_size is None:
            raise ValueError(f"{name}() cuts a batch and no size was given; pass micro_batch_size= or steps=")

    def window(self, micro_batches: Iterable[Any]) -> Window:
        """One window of the micro-batches that the caller made; ranks may have different numbers of them."""
        return self._plan(lambda _: Drawn(list(micro_batches)))

    def _steps_now(self, index: int) -> int:
        if self._steps is not None:
            return at_update("steps", self._steps, index, WHOLE)
        assert self._batch_size is not None and isinstance(self._micro_batch_size, int)
        wanted = at_update("batch_size", self._batch_size, index)
        ranks, micro = self._engine.peers.num_ranks, self._micro_batch_size
        steps = steps_for(wanted, micro, ranks)
        if steps * micro * ranks != wanted:
            self._warn(
                "batch_size",
                f"batch_size={wanted} is not a multiple of {ranks} ranks x {micro} samples: each full update holds "
                f"{steps * micro * ranks} ({steps} micro-batches per rank); split() cuts a batch unevenly instead",
            )
        return steps

    def _plan(self, draw: Draw, guard: Guard | None = None, *, as_sum: bool = False, by_hand: bool = False) -> Window:
        """Looks the window up, tells the other ranks, and hands it out."""
        self._before_planning()
        with self._planning():
            offered = self._offer(draw, self._index, self._spare, guard, as_sum=as_sum, by_hand=by_hand)
            return self._window_of(offered, self._engine.peers.gather(offered.offer.to_row()))

    def _planning(self, ahead: bool = False) -> AbstractContextManager[None]:
        trace = self._engine.trace
        return NOTHING if trace is None else trace.planning(self._index + ahead, ahead=ahead)

    def _before_planning(self) -> None:
        self._make_way()
        self._accelerated.refuse_accumulation()

    def _offer(
        self,
        draw: Draw,
        index: int,
        spare: Spare | None,
        guard: Guard | None = None,
        *,
        as_sum: bool = False,
        by_hand: bool = False,
    ) -> Offered:
        """What this rank has for window `index`; an error in looking it up is kept, for the others to hear of it."""
        return look_up(
            draw,
            index,
            {"samples": "sum"} if as_sum else self._reductions,
            None if as_sum else self._counts,
            guard,
            ready=spare is not None,
            by_hand=lambda drawn: (
                by_hand
                or (bool(self._stepper.watched_windows) and not self._in_step)
                or (guard is not None and self._is_unproven(drawn))
            ),
        )

    def _window_of(self, offered: Offered, rows: list[list[float]]) -> Window:
        """The window that follows from what all ranks have, an error on all of them if one could not look it up."""
        offered.raise_error()
        drawn, counts, kept, reductions = offered.drawn, offered.counts, offered.kept, offered.reductions
        plan = make_plan(tuple(reductions), [RankReport.from_row(row) for row in rows])
        if drawn.stream is not None and not plan.is_empty:
            plan = guess_counts(plan, drawn.steps)
        unfinished, loader = self._loaded
        if unfinished is not None:
            self._refuse_another_window(unfinished, [counts[i] for i in kept])
            self._loaded = None, loader
        if not plan.is_empty:
            self._engine.check(plan)
            self._look_at_batchnorm(plan)
        spare = self._spare
        if kept and self._engine.lockstep:
            last = (offered.whole or kept)[-1]
            spare = Spare(drawn.micro_batches[last], counts[last])
        window = Window(
            self,
            self._engine,
            plan,
            [drawn.micro_batches[i] for i in kept],
            [counts[i] for i in kept],
            reductions,
            index=self._index,
            spare=spare,
            parameters=self._parameters(),
            watched=self._watched(),
            scaler=self._scaler,
            scales=self._accelerated.run_backward is None,
            stream=None if plan.is_empty else drawn.stream,
            guard=offered.guard,
            unfinished=unfinished,
            looks=bool(self._stepper.watched_windows),
            numbers=kept,
            pool=self._pool,
            noise=self._noise if reductions is self._reductions else None,  # not of a loss over pairs
        )
        self._window = weakref.ref(window)
        return window

    def _make_way(self) -> None:
        if self._forgotten is not None:
            self._warn(
                "forgotten",
                f"the window of update {self._forgotten} was dropped between its loop and its step(), so its gradients "
                "are thrown away and nothing was learned of them; call window.step() after the loop, or discard() to "
                "give a window up",
            )
            self._forgotten = None
        standing = self._standing()
        if standing is not None:
            standing._make_way()

    def _standing(self) -> Window | None:
        """The window that was asked for last, while anybody has it."""
        return self._window() if self._window is not None else None

    def _refuse_another_window(self, unfinished: Unfinished, counts: list[tuple[float, ...]]) -> None:
        """A state of mid-window goes on in the window that it was taken in, or all ranks hear that it is not."""
        known = counts if self._lookahead else counts[:1]  # streaming, the first
        other = (
            unfinished.index != self._index
            or unfinished.counts[: len(known)] != known
            or (self._lookahead and len(unfinished.counts) != len(known))
        )
        others = [rank for rank, (differs,) in enumerate(self._engine.peers.gather([float(other)])) if differs]
        if others:
            raise DistaccumError(
                f"the state was taken in the middle of update {unfinished.index} and this window is not that one on "
                f"rank {', '.join(map(str, others))} (here it counted {unfinished.counts}, and now {counts}); "
                "give windows() the loader from that window's first micro-batch on"
            )

    @property
    def _in_step(self) -> bool:
        """Whether each forward or backward takes part of all ranks."""
        return self._engine.lockstep and self._engine.sync != "gathered"

    def _is_unproven(self, drawn: Drawn) -> bool:
        """Whether nobody knows that these micro-batches fit.

        Where ranks are in step a failure on one cannot be undone either way, and the size asked for is believed.
        """
        if self._in_step and not (self._micro_batch_size == "auto" and "gathered" in self._engine.policies):
            return False
        return not self._fit.is_proven(max(drawn.lengths or [0]), widest_sample(drawn.micro_batches))

    # The window, and all that can go wrong in it

    def update(self, batch: Any, loss_fn: LossFn) -> Update:
        """Cuts `batch`, runs every micro-batch through `loss_fn`, and steps. Equivalent to

            window = accumulator.split(batch)
            for micro_batch in window:
                window.backward(loss_fn(micro_batch))
            return window.step()

        but where a micro-batch does not fit into memory all ranks undo the window, halve the micro-batch and do it
        again; the size is remembered, and a larger one is tried now and then. `loss_fn` may give a dict of named
        losses. An error in it, on any rank, undoes the window on all: gradients, buffers and random numbers.
        """
        self._refuse_to_cut_without_size("update")
        return self._transact(batch, lambda window: _run(window, loss_fn))

    def contrast(self, batch: Any, encode: Encode, loss_fn: Callable[..., Tensor]) -> Update:
        """For a loss over all pairs of the batch: `loss_fn(*encode(batch))` over all ranks, in a part of its memory.

        `encode(micro_batch)` gives a representation, or a tuple of them, a row for each sample. `loss_fn` is given
        those of the whole batch, in the order of ranks and samples, and gives a scalar. Each micro-batch is encoded
        without a graph, the loss is taken once, on each rank alike, and each micro-batch is encoded again, with the
        same random numbers, to carry its part back. Parameters that `loss_fn` alone uses get their gradient too.
        `reduction` and `count` play no part; all else is as in `update`.
        """
        self._refuse_to_cut_without_size("contrast")

        def run(window: Window) -> None:
            verifies = self._contrasts < PROOFS
            Contrast(window, self._engine, self._scaler, encode, loss_fn, verifies=verifies).run()
            self._contrasts += 1

        return self._transact(batch, run, as_sum=True)

    def check(self, batch: Any, loss_fn: LossFn) -> Report:
        """Runs `batch` once as one big batch and once accumulated, and says how far the gradients are apart, and why.

        On the model itself, with the same random numbers; in float64 too where the module is plain. Gradients, buffers,
        modes and random numbers are put back, and nothing is stepped. In a job of several ranks the big batch is that
        of all ranks, on each of them: `batch` is this rank's part, and shall be small. `print(report)` tells all.
        """
        self._refuse_to_cut_without_size("check")
        self._make_way()
        if self._engine.owns_step:
            raise DistaccumError(
                f"check() with {self._engine.name}, which shows no gradient; check the module before it is wrapped"
            )
        parameters = [p for p in self._parameters() if p.requires_grad]
        kept = self._loaded, self._unfinished, set(self._warned)
        trace, self._engine.trace = self._engine.trace, None
        self._loaded = None, None
        subject = Subject(
            models=self._models,
            parameters=parameters,
            everything=self._parameters(),
            engine=self._engine,
            reductions=self._reductions,
            counts=self._counts,
            measure=partial(self._measure, batch, parameters),
        )
        try:
            return check(subject, batch, loss_fn)
        finally:
            self._loaded, self._unfinished, self._warned = kept
            self._engine.trace = trace

    def _measure(
        self,
        batch: Any,
        parameters: Sequence[nn.Parameter],
        micro_batches: Sequence[Any] | None,
        loss_fn: LossFn,
        *,
        as_sum: bool,
    ) -> Measured:
        num = 0

        def draw(_: int) -> Drawn:
            nonlocal num
            if micro_batches is not None:
                drawn = Drawn(list(micro_batches), [1] * len(micro_batches) if as_sum else None)
            else:
                drawn = self._cut(batch)
                if len(drawn.micro_batches) < 2 <= sum(drawn.lengths or []):
                    drawn = self._cut(batch, parts=2)
            num = len(drawn.micro_batches)
            return drawn

        window = self._plan(draw, as_sum=as_sum, by_hand=as_sum)
        window._is_trial = True
        try:
            _run(window, loss_fn)
            terms = window._terms()
            reduction = self._engine.peers.sum(terms)
            if reduction is not None:
                reduction.wait()
            scale = 1.0 if self._scaler is None else 1 / self._scaler.get_scale()
            gradients = [None if p.grad is None else _dense(local(p.grad)) * scale for p in parameters]
            return Measured(
                gradients, float(terms.sum()) / window._divisor, window._plan.num_counted, num - len(window)
            )
        finally:
            window.discard()

    def _transact(self, batch: Any, run: Callable[[Window], None], *, as_sum: bool = False) -> Update:
        self._make_way()
        transaction = Transaction(self._engine, self._fit, self._before, self._index)
        return transaction(lambda guard: self._plan(lambda _: self._cut(batch), guard, as_sum=as_sum), run)

    # One update

    def _begin(self, window: Window) -> None:
        if torch.is_inference_mode_enabled():
            # What is made in it (a scale, DDP's buckets) could not be written to outside of it.
            raise DistaccumError(
                "a window inside torch.inference_mode(), where nothing is trained; leave that mode first"
            )
        if self._engine.stale(window._parameters):
            known = self._unfinished or self._are_of_another_window(window._parameters)
            self._engine.clear(window._parameters)
            if not known:  # else they are of a window that was dropped between its loop and its step
                self._warn("stale", "gradients that stood before the window were cleared: they are not part of it")
        self._unfinished = True
        if self._scaler is not None:
            windows_on(self._scaler).add(window)
        self._engine.begin(window._plan, window._parameters)

    def _are_of_another_window(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Whether gradients stand only where another accumulator's open window passes through and does not step."""
        users = [getattr(p, "_distaccum_user", None) for p in parameters if self._engine.stale([p])]
        return all(
            isinstance(user, _User) and any(one is not self and one._has_open_window for one in user.accumulators)
            for user in users
        )

    @property
    def _has_open_window(self) -> bool:
        window = self._standing()
        return window is not None and window._is_open

    def _complete(self, window: Window) -> None:
        if window._guard is not None and not self._engine.will_reduce(True):
            window._guard()
            window._reducing = True
        try:
            with NOTHING if window._trace is None else window._trace.by_hand():
                self._engine.finish()
        except RuntimeError as error:
            self._engine.peers.refuse_lost(error)
            raise
        if window._stream is not None:
            self._correct(window)
        if not window._is_trial:
            self._stepper.refuse_nonfinite_gradient(window)

    def _correct(self, window: Window) -> None:
        """Streaming, shares were made with a guess of the window's count; here it is known."""
        rows = self._engine.peers.gather(window._total)
        total = sum(row[0] for row in rows)
        (name,), (reduction,) = window._plan.counts, self._reductions.values()
        window.counts[name] = tidy(total)
        if reduction != "sum":
            window._factor = window._plan.counts[name] / total
            self._engine.scale(window._parameters, window._factor)

    def _refuse_to_stream(self, sync: Sync) -> None:
        if len(self._reductions) > 1:
            raise ValueError(
                f"lookahead=False with several denominators ({', '.join(self._reductions)}): streaming learns a count "
                "at the window's end, and can then correct the gradient once; give one, or lookahead=True"
            )
        if self._engine.owns_step:
            raise ValueError(
                f"lookahead=False with {self._engine.name}, which keeps gradients where they cannot be corrected at "
                "the window's end; leave lookahead at True"
            )
        if sync == "every" and not self._engine.lockstep and self._engine.peers.num_ranks > 1:
            raise ValueError(
                f"lookahead=False and sync='every' with {self._engine.name}: which micro-batches all ranks have is not "
                "known before they are drawn; use sync='last'"
            )
        if any(isinstance(module, nn.SyncBatchNorm) for model in self._models for module in model.modules()):
            raise ValueError(
                "lookahead=False with SyncBatchNorm, whose forwards wait for each other, while no rank knows how many "
                "the others have; leave lookahead at True"
            )

    def _commit(self, window: Window) -> Update:
        self._stepper.has_stepped, schedules = False, list(self._schedulers)
        try:
            return self._step_and_count(window, schedules)
        except BaseException:
            if self._stepper.has_stepped:
                # Ctrl-C, or a rank that was lost: what counts the weights' steps goes with them.
                self._index = window.index + 1
                window._close()
                self._unfinished = False
                if self._scaler is not None:
                    self._scaler.update(self._scaler.get_scale())  # it keeps to which optimizers it was shown
                while schedules:
                    schedules.pop(0).step()
            raise

    def _step_and_count(self, window: Window, schedules: list[LRScheduler]) -> Update:
        if window._plan.is_empty:
            reason: str | None = f"no {' and no '.join(window._names)} in any micro-batch of any rank"
            terms, reduction, norm = None, None, None
        else:
            try:
                with span(window._trace, "step"):
                    reason, terms, reduction, norm = self._stepper(window)
            except BaseException as error:
                if window._ahead is not None:
                    window._ahead.has_failed = not isinstance(error, NonfiniteError)  # which all ranks raise
                raise
            if reason is not None and window._ahead is not None:
                window._ahead.drop_rows()  # what was told in them counted on a step
            if reason is None and self._pool is not None:
                self._pool.commit()
            if reason is None and self._engine.lockstep:
                self._spare = window._spare
            self._skipped = 0 if reason is None else self._skipped + 1
        window._close()
        self._unfinished = False
        self._index += 1
        if window._trace is not None:
            window._trace.end("stepped" if reason is None else reason)
        self._accelerated.after_step(reason is None)
        if reason is None:
            while schedules:
                schedules.pop(0).step()
        elif self._skipped >= MOST_SKIPS:
            skipped, self._skipped = self._skipped, 0
            raise DistaccumError(
                f"{skipped} updates in a row were skipped, the last because {reason}; nothing is learned like this. "
                "Look at the data and at the weights, lower the learning rate, or go back to a checkpoint"
            )
        noise = None
        if self._noise is not None:
            counts_in = terms is not None and reason is None and window._compares
            told = terms[len(window._names) :][:4] if terms is not None and counts_in else None
            by_step = norm if self._engine.judges_gradients else None
            noise = self._noise.averages.add(told, reduction, by_step, next(iter(window.counts.values())))
        return Update(
            index=window.index,
            counts=window.counts,
            micro_batches=len(window),
            stepped=reason is None,
            reason=reason,
            seconds=time.perf_counter() - window._started,
            _terms=None if terms is None else terms[: len(window._names)],
            _divisor=window._divisor,
            _reduction=reduction,
            _norm=norm if self._max_norm is not None else None,
            _noise=noise,
        )

    # State

    def state_dict(self) -> dict[str, Any]:
        """Where this is: the update's index, what was learned, the scaler, and the loader where it can tell.

        The loader's place is that of the `windows` at hand, or of the last that was left by `break` or an error.

        Between two micro-batches of a window (after `window.backward`) also what this rank needs to go on there: all
        ranks take it after as many micro-batches, and `window.can_pause` says whether they can. Save every rank's; what
        is under `rank 0`, `rank 1`, ... is that rank's own.
        """
        unfinished, loader = self._unfinished_window()
        return {
            "index": self._index,
            "skipped": self._skipped,
            "watched_windows": self._stepper.watched_windows,
            "fit": self._fit.state(),
            "noise": None if self._noise is None else self._noise.averages.state(),
            "scaler": self._scaler.state_dict() if self._scaler else None,
            "ranks": self._engine.peers.world_size,
            "in_window": unfinished is not None,
            f"rank {self._engine.peers.global_rank}": pack(unfinished, loader),
        }

    def _unfinished_window(self) -> tuple[Unfinished | None, Any]:
        """Where the window at hand is, and the loader where that window begins."""
        window = self._standing()
        if window is not None and window._stage is Stage.COMPLETE:
            raise DistaccumError("state_dict() between a window's loop and its step(); call window.step() first")
        at_start = self._loaded[1] if self._feed is None else self._feed.at_start
        if window is not None and window._stage is Stage.RUNNING:
            return window._state(random_devices(self._models)), at_start
        if window is not None and window._stage is Stage.PLANNED:  # drawn, and not begun
            return window._unfinished, at_start
        if self._ahead is not None and self._ahead.offered is not None:  # drawn, and nobody has it
            return self._loaded[0], at_start
        return self._loaded[0], self._loaded[1] if self._feed is None else self._feed.state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where `state_dict` was taken; from mid-window on as many ranks, on which the next window must be the
        same: give `windows` the loader from that window's first micro-batch on. Those done are drawn and not yielded.
        """
        if not isinstance(state, Mapping):
            raise TypeError(f"load_state_dict() got a {type(state).__name__}, expected what state_dict() gave")
        known = {"index", "scaler", "skipped", "watched_windows", "fit", "ranks", "in_window"}
        if missing := sorted(known - set(state)):
            raise ValueError(f"the state has no {', '.join(missing)}; give what state_dict() gave, of this version")
        if (state["scaler"] is None) != (self._scaler is None):
            has, wants = ("no", "one") if state["scaler"] is None else ("a", "none")
            raise ValueError(f"the state holds {has} scaler and this accumulator has {wants}; give both the same")
        window = self._standing()
        if window is not None and window._is_open:
            raise DistaccumError(f"load_state_dict() while a window is {window._describe()}; finish it or discard() it")
        # Everything is read before anything is set.
        numbers = {name: whole_number_in(state, name, 0) for name in ("index", "skipped", "watched_windows", "ranks")}
        for name in ("fit", "scaler"):
            if not isinstance(state[name], Mapping) and (name, state[name]) != ("scaler", None):
                raise ValueError(
                    f"the state has {name}={state[name]!r}, expected a dict; give what state_dict() gave, of this "
                    "version"
                )
        learned, averages = learned_sizes(state["fit"]), averages_in(state.get("noise"))
        if self._scaler is not None:
            refuse_broken_scaler(state["scaler"], self._scaler)
        ranks = self._engine.peers.world_size
        if state["in_window"] and state["ranks"] != ranks:
            raise DistaccumError(
                f"the state was taken in mid-window on {state['ranks']} ranks and this job has {ranks}, expected as "
                "many: each has its own part of the gradient. Start as many, or load a state from between two windows"
            )
        mine = state.get(f"rank {self._engine.peers.global_rank}") if state["ranks"] == ranks else None
        of_another = state["ranks"] == ranks and f"rank {self._engine.peers.global_rank}" not in state
        if (state["in_window"] and not mine) or (
            of_another and any(state.get(f"rank {rank}") for rank in range(ranks))  # where its loader stood
        ):
            taken = "in mid-window" if state["in_window"] else "on another rank"
            raise DistaccumError(
                f"the state was taken {taken} and has no part for rank {self._engine.peers.global_rank}; save "
                "and load the state_dict() of every rank"
            )
        if state["ranks"] != ranks and any(state.get(f"rank {rank}") for rank in range(state["ranks"])):
            self._warn(
                "ranks",
                f"the state is of {state['ranks']} ranks and this job has {ranks}: where loaders were is left out",
            )
        self._loaded, self._forgotten = unpack(mine), None
        self._feed = None if self._ahead is None else self._feed  # not where an epoch was left before
        self._index, self._skipped = numbers["index"], numbers["skipped"]
        self._stepper.watched_windows = numbers["watched_windows"]
        self._fit.load(learned)
        if self._noise is not None:
            self._noise.averages.load(averages)
        if self._scaler is not None:
            self._scaler.load_state_dict(state["scaler"])

    def __getstate__(self) -> dict[str, Any]:
        """Of a deep copy, with its model and optimizer in one: `copy.deepcopy((model, optimizer, accumulator))`."""
        window = self._standing()
        if window is not None and not window._is_over:
            raise DistaccumError(
                f"copying or pickling an Accumulator with a window that is {window._describe()}, of which a copy "
                "would share gradients and flags; do it between two windows, or make an Accumulator of the copied "
                "model and optimizer and give it load_state_dict(accumulator.state_dict())"
            )
        return {**self.__dict__, "_window": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        for one in [*self._optimizers, *self._engine.guarded()]:
            _guard(one, self)

    # What stands around

    def _watched(self) -> list[Sequence[nn.Parameter]]:
        """Parameters that take part alike: tampering with one of each shows."""
        return [owned_by(one) for one in self._optimizers] or [self._trained]

    def _parameters(self) -> list[nn.Parameter]:
        """The models' and the optimizers', each once."""
        return _unique([*self._trained, *self._stepper.owned()]) if self._optimizers else self._engine.parameters()

    @contextmanager
    def _untouched_statistics(self) -> Iterator[None]:
        """What a stand-in does to running statistics is undone: it was counted when it came first."""
        found = [
            (buffer, buffer.clone())
            for _, module in self._batchnorms
            if module.training
            for buffer in module.buffers(recurse=False)
        ]
        try:
            yield
        finally:
            for buffer, value in found:
                buffer.copy_(value)

    def _look_at_batchnorm(self, plan: Plan) -> None:
        if self._batchnorm == "warn" and sum(plan.num_counted) > 1 and "batchnorm" not in self._warned:
            names = [name for name, module in self._batchnorms if module.training]
            if names:
                self._warn(
                    "batchnorm",
                    f"{listed(names)} normalise each micro-batch by its own statistics, so the gradient is not that of "
                    "the big batch; freeze them (distaccum.batchnorm.freeze), use GroupNorm (to_groupnorm, there) or "
                    "LayerNorm, or accept it: batchnorm='pool' moves running statistics once per window, by "
                    "those of all of it, and 'ignore' once per micro-batch",
                )

    def _warn(self, key: str, message: str) -> None:
        """Once, on rank 0."""
        if key not in self._warned and self._engine.peers.rank == 0:
            warn(message)
        self._warned.add(key)


class _User:
    """Kept on parameters that accumulators' windows reach and do not step. A saved one has an empty dict there."""

    def __init__(self) -> None:
        self.accumulators: weakref.WeakSet[Accumulator] = weakref.WeakSet()

    @classmethod
    def on(cls, parameter: Any) -> _User:
        found = getattr(parameter, "_distaccum_user", None)
        if not isinstance(found, cls):
            found = parameter._distaccum_user = cls()
        return found

    def __reduce__(self) -> Any:
        return OrderedDict, ()  # which `torch.load` takes with `weights_only`


def _unstepped(trained: Sequence[nn.Parameter], stepped: Sequence[nn.Parameter]) -> list[Any]:
    """Those of a model, as a critic's in its generator's windows, that another accumulator steps."""
    known = {*map(id, stepped)}
    return [p for p in trained if p.requires_grad and id(p) not in known] if known else []


def _stepped(engine: Engine, optimizers: Sequence[Optimizer]) -> list[nn.Parameter]:
    return _unique([p for one in optimizers for p in owned_by(one)]) or engine.parameters()


def _dense(gradient: Tensor) -> Tensor:
    return gradient.to_dense() if gradient.is_sparse else gradient.detach()


def _run(window: Window, loss_fn: LossFn) -> None:
    for micro_batch in window:
        loss = loss_fn(micro_batch)
        if isinstance(loss, Mapping):
            if not loss:
                raise ValueError("loss_fn gave a dict without a loss, expected one for each name")
            window.backward(**loss)
        else:
            window.backward(loss)


def _guard(optimizer: Optimizer, accumulator: Accumulator) -> None:
    """Refuses the caller's own step() in mid-window, before it changes a weight."""
    if not hasattr(optimizer, "register_step_pre_hook"):
        return
    this = weakref.ref(accumulator)

    def refuse(*_: object) -> None:
        owner = this()
        window = owner._window() if owner is not None and owner._window is not None else None
        if owner is None or owner._stepper.is_stepping or window is None:
            return
        if window._is_open:
            raise DistaccumError(
                "optimizer.step() before the window's own: the gradients in it belong to the window; call "
                "window.step() after its loop and nothing else, or give the Accumulator optimizer=None and step "
                "before it"
            )

    weakref.finalize(accumulator, optimizer.register_step_pre_hook(refuse).remove)


def _unique(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    return list({id(parameter): parameter for parameter in parameters}.values())
