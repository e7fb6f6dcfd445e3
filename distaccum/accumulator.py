"""Accumulator: options in, windows out. An update reads from top to bottom: plan, window, commit."""

from __future__ import annotations

import math
import operator
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from numbers import Real
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import LBFGS, Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from .batches import Count, batch_length, count_samples, cut_batch
from .engines import Sync, choose_engine
from .engines.accelerate import Accelerated
from .precision import look_at, refuse_mixed, unscale
from .shares import (
    REDUCTIONS,
    DistaccumError,
    Offer,
    Plan,
    Reduction,
    Schedule,
    at_update,
    cut_evenly,
    listed,
    make_plan,
    steps_for,
    whole_number,
)
from .update import Update, Waitable
from .window import Spare, Window

OnNonfinite = Literal["raise", "skip", "ignore"]
BatchNorm = Literal["warn", "ignore"]
WHOLE = "; write 100 // 50 for 100 / 50, or give batch_size=100, micro_batch_size=50"


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
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        *,
        steps: Schedule | None = None,
        batch_size: Schedule | None = None,
        micro_batch_size: int | None = None,
        reduction: Reduction | Mapping[str, Reduction] = "mean",
        count: Count | Mapping[str, Count] = count_samples,
        max_norm: float | None = None,
        scheduler: LRScheduler | Sequence[LRScheduler] | None = None,
        scaler: GradScaler | None = None,
        accelerator: Any = None,
        sync: Sync = "last",
        on_nonfinite: OnNonfinite = "raise",
        batchnorm: BatchNorm = "warn",
    ) -> None:
        self._models: list[nn.Module] = _several("model", model, "forward")
        self._accelerated = Accelerated(
            accelerator,
            _several("optimizer", optimizer, "param_groups"),
            _several("scheduler", scheduler, "step"),
            scaler if scaler is not None and scaler.is_enabled() else None,
        )
        self._engine = choose_engine(self._models, _choice("sync", sync, get_args(Sync)))
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
        self._steps, self._batch_size, self._micro_batch_size = _sizes(steps, batch_size, micro_batch_size)
        self._reductions, self._counts = _by_name(reduction, count)
        self._max_norm = self._engine.adopt_max_norm(_positive("max_norm", max_norm))
        self._on_nonfinite = _choice("on_nonfinite", on_nonfinite, get_args(OnNonfinite))
        self._batchnorm = _choice("batchnorm", batchnorm, get_args(BatchNorm))
        if not self._optimizers and not self._engine.steps and (max_norm is not None or on_nonfinite == "skip"):
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
            if self._engine.steps:
                raise ValueError(f"scaler with {self._engine.name}, which scales losses itself; leave it out")
            refuse_mixed(self._optimizers)
        if self._engine.judges and on_nonfinite == "ignore":
            raise ValueError(
                f"on_nonfinite='ignore' with {self._engine.name}, which looks at each gradient and skips what is not "
                "finite; say 'raise' or 'skip'"
            )
        self._trained = self._engine.parameters()
        if not self._trained:
            raise ValueError("the model has no parameters, so there is no gradient to accumulate")
        if self._optimizers and not {*map(id, self._trained)} & {*map(id, self._owned())}:
            raise ValueError(
                "the optimizer holds none of the model's parameters; make it from model.parameters() after the "
                "model is moved, wrapped and complete"
            )
        self._batchnorms = [named for model in self._models for named in _batchnorms(model)]
        self._index = 0
        self._warned: set[str] = set()
        self._stepping = False
        self._unfinished = False
        self._spare: Spare | None = None  # of a window whose gradient was finite
        self._window: weakref.ref[Window] | None = None
        for one in [*self._optimizers, *self._engine.guarded()]:
            _guard(one, self)

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
        if self._steps is None and self._batch_size is None:
            raise ValueError(
                "windows() groups micro-batches and no number was given; pass steps=, or batch_size= and "
                "micro_batch_size=, to the Accumulator"
            )
        return self._windows(loader)

    def _windows(self, loader: Iterable[Any]) -> Iterator[Window]:
        iterator: Iterator[Any] | None = None
        exhausted = False

        def draw() -> _Drawn:
            nonlocal iterator, exhausted
            steps = self._steps_now()
            iterator = iter(loader) if iterator is None else iterator
            micro_batches = [] if exhausted else list(islice(iterator, steps))  # asked once more, some start anew
            exhausted = len(micro_batches) < steps
            return _Drawn(micro_batches, steps=steps, exhausted=exhausted)

        with self._accelerated.reading(loader):
            while True:
                window = self._plan(draw)
                if window._plan.empty:
                    return
                try:
                    yield window
                except GeneratorExit:
                    window._let_go()
                    raise
                if window._plan.exhausted:
                    window._make_way()  # else a step() forgotten on the last window would pass in silence
                    return

    def split(self, batch: Any, length: int | None = None) -> Window:
        """One window that cuts `batch`, this rank's part of the update, into micro-batches.

        The fewest that respect `micro_batch_size`, or `steps` of them; in order, as even as can be, the larger
        ones last. Every tensor whose first dimension is the batch's is cut (as views), and lists of one value
        per sample; all else goes whole to each. `length` says the batch's length where it cannot be seen.
        """
        if self._steps is None and self._micro_batch_size is None:
            raise ValueError("split() cuts a batch and no size was given; pass micro_batch_size= or steps=")

        def cut() -> _Drawn:
            total = batch_length(batch) if length is None else operator.index(length)
            parts = None if self._steps is None else at_update("steps", self._steps, self._index, WHOLE)
            sizes = cut_evenly(total, parts=parts, largest=self._micro_batch_size)
            return _Drawn(list(cut_batch(batch, sizes, total)), lengths=sizes)

        return self._plan(cut)

    def window(self, micro_batches: Iterable[Any]) -> Window:
        """One window of the micro-batches that the caller made; ranks may have different numbers of them."""
        return self._plan(lambda: _Drawn(list(micro_batches)))

    def _steps_now(self) -> int:
        if self._steps is not None:
            return at_update("steps", self._steps, self._index, WHOLE)
        assert self._batch_size is not None and self._micro_batch_size is not None
        wanted = at_update("batch_size", self._batch_size, self._index)
        ranks, micro = self._engine.num_ranks, self._micro_batch_size
        steps = steps_for(wanted, micro, ranks)
        if steps * micro * ranks != wanted:
            self._warn(
                "batch_size",
                f"batch_size={wanted} is not a multiple of {ranks} ranks x {micro} samples: each full update holds "
                f"{steps * micro * ranks} ({steps} micro-batches per rank); split() cuts a batch unevenly instead",
            )
        return steps

    def _plan(self, draw: Callable[[], _Drawn]) -> Window:
        """Looks the window up, tells the other ranks, and hands it out."""
        standing = self._window() if self._window is not None else None
        if standing is not None:
            standing._make_way()
        self._accelerated.refuse_accumulation()
        names = tuple(self._reductions)
        drawn, counts, error = _Drawn([]), list[tuple[float, ...]](), None
        try:
            drawn = draw()
            counts = self._count(drawn)
        except Exception as caught:  # the others wait in the gathering below; tell them first
            error = caught
        kept = [i for i, numbers in enumerate(counts) if any(numbers)]
        whole = [i for i in kept if all(counts[i])]
        offer = Offer(
            steps=drawn.steps,
            drawn=len(drawn.micro_batches),
            kept=len(kept),
            exhausted=drawn.exhausted,
            whole=whole == kept,
            whole_last=whole[-1:] == kept[-1:],
            ready=self._spare is not None,
            failed=error is not None,
            totals=tuple(sum(numbers[j] for numbers in counts) for j in range(len(names))),
        )
        rows = self._engine.gather(offer.to_row())
        if error is not None:
            try:
                raise error
            finally:
                del error, drawn  # or the traceback would keep what was drawn, and itself
        plan = make_plan(names, [Offer.from_row(row) for row in rows])
        if not plan.nothing:
            self._engine.check(plan)
            self._look_at_batchnorm(plan)
        spare = self._spare
        if kept and self._engine.in_step:
            last = (whole or kept)[-1]
            spare = Spare(drawn.micro_batches[last], counts[last])
        window = Window(
            self,
            self._engine,
            plan,
            [drawn.micro_batches[i] for i in kept],
            [counts[i] for i in kept],
            self._reductions,
            index=self._index,
            spare=spare,
            parameters=self._parameters(),
            watched=self._watched(),
            scaler=self._scaler,
            scales=self._accelerated.run_backward is None,
        )
        self._window = weakref.ref(window)
        return window

    def _count(self, drawn: _Drawn) -> list[tuple[float, ...]]:
        """Each micro-batch's denominators by name. Counts that live on a device are read together, once."""
        values: list[Any] = []
        for count in self._counts.values():
            known = drawn.lengths if count is count_samples else None  # split knows what it cut
            values += known or [count(micro_batch) for micro_batch in drawn.micro_batches]
        if any(isinstance(value, Tensor) for value in values):
            values = _read(values)
        rows = len(drawn.micro_batches)
        for i, value in enumerate(values):
            if not (isinstance(value, Real) and 0 <= float(value) < math.inf):
                raise ValueError(
                    f"count gave {value!r} for {list(self._counts)[i // rows]!r} in micro-batch {i % rows}, expected a "
                    "finite number of at least 0"
                )
        numbers = [float(value) for value in values]
        return list(zip(*(numbers[i : i + rows] for i in range(0, len(numbers), rows or 1)), strict=True))

    # One update

    def _begin(self, window: Window) -> None:
        if self._engine.stale(window._parameters):
            self._engine.clear(window._parameters)
            if not self._unfinished:  # else they are of a window that was dropped between its loop and its step
                self._warn("stale", "gradients that stood before the window were cleared: they are not part of it")
        self._unfinished = True
        if self._scaler is not None:
            _windows_on(self._scaler).add(window)
        self._engine.begin(window._plan, window._parameters)

    def _complete(self, window: Window) -> None:
        self._engine.finish()
        caller_steps = not self._optimizers and not self._engine.steps
        if caller_steps and self._scaler is None and self._on_nonfinite == "raise":
            finite, _ = look_at(partial(self._engine.norm, window._parameters), None)
            if not finite:
                raise DistaccumError(_nonfinite("gradient"))

    def _commit(self, window: Window) -> Update:
        if window._plan.nothing:
            reason: str | None = f"no {' and no '.join(window.counts)} in any micro-batch of any rank"
            terms, reduction, norm = None, None, None
        else:
            terms = window._terms()
            reduction = self._engine.sum_over_ranks(terms)
            reason, norm = self._step_optimizers(window, terms, reduction)
            if reason is None and self._engine.in_step:
                self._spare = window._spare
        window._close()
        self._unfinished = False
        self._index += 1
        self._accelerated.after_step(reason is None)
        if reason is None:
            for schedule in self._schedulers:
                schedule.step()
        return Update(
            index=window.index,
            counts=window.counts,
            micro_batches=len(window),
            stepped=reason is None,
            reason=reason,
            seconds=time.perf_counter() - window._started,
            _terms=terms,
            _divisor=window._divisor,
            _reduction=reduction,
            _norm=norm,
        )

    def _step_optimizers(
        self, window: Window, terms: Tensor, reduction: Waitable | None
    ) -> tuple[str | None, Tensor | None]:
        """Steps every optimizer, or none and says why. Gives the norm before clipping, where it was asked for."""
        if not self._optimizers and not self._engine.steps:
            return None, None
        window._refuse_cleared_gradients()
        stepped = [parameter for parameter in self._owned() if parameter.grad is not None]
        norm_of = partial(self._engine.norm, stepped)
        overflows = None
        if self._scaler is not None:
            others = [other for other in _windows_on(self._scaler) if other is not window and other._is_open]
            if others:
                raise DistaccumError(
                    "another window is open on one GradScaler, whose update() would change the scale under it; finish "
                    "one window before the next begins, or give each accumulator a GradScaler of its own"
                )
            if not len(window):
                self._scaler.scale(terms.new_zeros(()))  # makes its scale, which on other ranks the losses made
            overflows = unscale(self._scaler, self._optimizers, self._engine.agree)
        judges = self._engine.judges
        norm = norm_of(2.0) if self._max_norm is not None and not judges else None

        reason = None
        if overflows is not None:
            if bool(overflows):
                reason = "the scaled gradients overflowed"
                if self._on_nonfinite == "raise":
                    self._refuse_nonfinite_loss(window, terms, reduction)
        elif self._on_nonfinite != "ignore" and not judges:
            finite, norm = look_at(norm_of, norm)
            if not finite and self._on_nonfinite == "raise":
                window.discard()
                raise DistaccumError(_nonfinite("gradient"))
            reason = None if finite else "a gradient is not finite"

        if reason is None:
            if norm is not None and self._max_norm is not None and self._max_norm < math.inf:
                self._engine.clip(stepped, self._max_norm, norm)
            self._stepping = True
            try:
                reason = self._engine.step(self._optimizers)
            except BaseException:
                window.discard()  # some weights may have changed: not to be stepped again
                raise
            finally:
                self._stepping = False
            if judges:
                norm = norm_of(2.0) if self._max_norm is not None else None
                if reason is not None and self._on_nonfinite == "raise":
                    self._refuse_nonfinite_loss(window, terms, reduction)
                    if not self._engine.scales:
                        window.discard()
                        raise DistaccumError(_nonfinite("gradient"))
        if self._scaler is not None and overflows is not None:
            self._scaler.update()
        return reason, norm

    def _refuse_nonfinite_loss(self, window: Window, terms: Tensor, reduction: Waitable | None) -> None:
        if reduction is not None:
            reduction.wait()
        if not bool(terms.isfinite().all()):
            window.discard()
            raise DistaccumError(_nonfinite("loss"))

    # State

    def state_dict(self) -> dict[str, Any]:
        """The update's index and the scaler's state, between two windows."""
        window = self._window() if self._window is not None else None
        if window is not None and window._is_open:
            raise DistaccumError("state_dict() in mid-window, expected it between two; call window.step() first")
        return {"index": self._index, "scaler": self._scaler.state_dict() if self._scaler else None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where `state_dict` was taken."""
        if (state["scaler"] is None) != (self._scaler is None):
            has, wants = ("no", "one") if state["scaler"] is None else ("a", "none")
            raise ValueError(f"the state holds {has} scaler and this accumulator has {wants}; give both the same")
        self._index = int(state["index"])
        if self._scaler is not None:
            self._scaler.load_state_dict(state["scaler"])

    # What stands around

    def _watched(self) -> list[Sequence[nn.Parameter]]:
        """Parameters that take part alike: tampering with one of each shows."""
        return [_owned_by(one) for one in self._optimizers] or [self._trained]

    def _owned(self) -> list[nn.Parameter]:
        """What the optimizers step, each parameter once."""
        return _unique(parameter for one in self._optimizers for parameter in _owned_by(one))

    def _parameters(self) -> list[nn.Parameter]:
        """The models' and the optimizers', each once."""
        return _unique([*self._trained, *self._owned()]) if self._optimizers else self._engine.parameters()

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
        if self._batchnorm == "warn" and sum(plan.kept) > 1 and "batchnorm" not in self._warned:
            names = [name for name, module in self._batchnorms if module.training]
            if names:
                self._warn(
                    "batchnorm",
                    f"{listed(names)} normalise each micro-batch by its own statistics, so the gradient is not that of "
                    "the big batch; freeze them with eval(), use GroupNorm or LayerNorm, or accept it with "
                    "batchnorm='ignore'",
                )

    def _warn(self, key: str, message: str) -> None:
        """Once, on rank 0."""
        if key not in self._warned and self._engine.rank == 0:
            warnings.warn(message, stacklevel=4)
        self._warned.add(key)


@dataclass(frozen=True)
class _Drawn:
    micro_batches: list[Any]
    lengths: list[int] | None = None  # in samples, where they were cut
    steps: int = 0  # that were wanted; 0: as many as there are
    exhausted: bool = False


def _read(values: list[Any]) -> list[Any]:
    """The values with numbers in the place of one-element tensors: one read for all of them."""
    tensors = {i: value for i, value in enumerate(values) if isinstance(value, Tensor) and value.numel() == 1}
    if not tensors:
        return values
    device = next(iter(tensors.values())).device
    wide = None if device.type == "mps" else torch.float64  # holds any whole number of another dtype
    stacked = torch.stack([tensor.detach().reshape(()).to(device, wide) for tensor in tensors.values()])
    read = dict(zip(tensors, stacked.tolist(), strict=True))
    return [read.get(i, value) for i, value in enumerate(values)]


def _windows_on(scaler: GradScaler) -> weakref.WeakSet[Window]:
    """Kept on the scaler itself, which is what accumulators share."""
    windows: weakref.WeakSet[Window] = scaler.__dict__.setdefault("_distaccum_windows", weakref.WeakSet())
    return windows


def _guard(optimizer: Optimizer, accumulator: Accumulator) -> None:
    """Refuses the caller's own step() in mid-window, before it changes a weight."""
    if not hasattr(optimizer, "register_step_pre_hook"):
        return
    this = weakref.ref(accumulator)

    def refuse(*_: object) -> None:
        owner = this()
        window = owner._window() if owner is not None and owner._window is not None else None
        if owner is None or owner._stepping or window is None:
            return
        if window._is_open:
            raise DistaccumError(
                "optimizer.step() before the window's own: the gradients in it belong to the window; call "
                "window.step() after its loop and nothing else, or give the Accumulator optimizer=None and step "
                "before it"
            )

    optimizer.register_step_pre_hook(refuse)


def _owned_by(optimizer: Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _batchnorms(model: nn.Module) -> list[tuple[str, nn.Module]]:
    kinds = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d | nn.SyncBatchNorm
    return [(name, module) for name, module in model.named_modules() if isinstance(module, kinds)]


def _unique(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    return list({id(parameter): parameter for parameter in parameters}.values())


def _nonfinite(what: str) -> str:
    return (
        f"the {what} of this window is not finite (a NaN or an infinity), on all ranks alike; nothing was stepped "
        "and the window is discarded. Look for it in the data or lower the learning rate; on_nonfinite='skip' "
        "skips such updates"
    )


# Arguments


def _several(name: str, value: Any, needs: str) -> list[Any]:
    """One or several things that have `needs`, as a list; None is none of them."""
    values = [] if value is None else list(value) if isinstance(value, list | tuple) else [value]
    for one in values:
        if not hasattr(one, needs) or isinstance(one, type):
            raise TypeError(f"{name}={one!r} is a {type(one).__name__} without {needs}, expected a {name}")
    if not values and (name == "model" or value is not None):
        raise ValueError(f"{name}={value!r}, expected a {name} or a sequence of them")
    return values


def _sizes(
    steps: Schedule | None, batch_size: Schedule | None, micro_batch_size: int | None
) -> tuple[Schedule | None, Schedule | None, int | None]:
    if steps is not None and (batch_size is not None or micro_batch_size is not None):
        raise ValueError(
            "steps says how many micro-batches, batch_size and micro_batch_size how many samples; give one or the other"
        )
    if batch_size is not None and micro_batch_size is None:
        raise ValueError(f"{batch_size=} without micro_batch_size, the samples that one forward on a rank can hold")
    return (
        steps if steps is None or callable(steps) else whole_number("steps", steps, WHOLE),
        batch_size if batch_size is None or callable(batch_size) else whole_number("batch_size", batch_size),
        None if micro_batch_size is None else whole_number("micro_batch_size", micro_batch_size),
    )


def _by_name(
    reduction: Reduction | Mapping[str, Reduction], count: Count | Mapping[str, Count]
) -> tuple[dict[str, Reduction], dict[str, Count]]:
    """Reduction and count of each named loss; one name where no dict gives several."""
    given = [choice for choice in (reduction, count) if isinstance(choice, Mapping)]
    names = list(given[0]) if given else [_name_of(count)]
    if not names or (len(given) == 2 and given[0].keys() != given[1].keys()):
        raise ValueError(
            f"reduction names {list(given[0])} and count names {list(given[-1])}, expected the same losses in both"
        )
    reductions = dict(reduction) if isinstance(reduction, Mapping) else dict.fromkeys(names, reduction)
    counts = dict(count) if isinstance(count, Mapping) else dict.fromkeys(names, count)
    for name in names:
        _choice("reduction", reductions[name], REDUCTIONS)
        if not callable(counts[name]):
            raise TypeError(f"count={counts[name]!r} for {name!r}, expected a callable: batch -> number")
    return reductions, {name: counts[name] for name in reductions}


def _name_of(count: object) -> str:
    name = getattr(count, "__name__", "")
    return {"count_samples": "samples", "tokens": "tokens"}.get(name, "count")


def _choice(name: str, value: Any, known: Sequence[Any]) -> Any:
    if value not in known:
        raise ValueError(f"{name}={value!r}, expected one of {', '.join(map(repr, known))}")
    return value


def _positive(name: str, value: float | None) -> float | None:
    if value is not None and not value > 0:
        raise ValueError(f"{name}={value!r}, expected a number above 0, or None")
    return value
