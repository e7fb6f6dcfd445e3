"""Guards: what a loop may not do in a window, and how it hears of it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum, auto
from operator import is_ as is_same
from typing import Any, NoReturn, final

from torch import Tensor, nn

from .engines.base import Engine, is_zero
from .job import Job
from .law import DistaccumError, Once
from .private import is_view, version_of
from .scaling import has_unscaled

TAMPERED = "gradients were cleared or changed in mid-window (by zero_grad, clipping, unscale_ or another backward)"


class Stage(Enum):
    """The stage of a window, in words."""

    PLANNED = "not begun"
    RUNNING = "in its loop"
    COMPLETE = "complete but not stepped"  # gradients are final
    STEPPING = "being stepped"
    STEPPED = "stepped already"
    LEFT = "discarded (its loop was left, or another window was requested)"


OPEN = Stage.RUNNING, Stage.COMPLETE, Stage.STEPPING  # it holds gradients
OVER = Stage.STEPPED, Stage.LEFT


class Turn(Enum):
    """The backward of the micro-batch at work, or of a part of it."""

    DONE = auto()
    WAITING = auto()
    FAILED = auto()


DONE, WAITING, FAILED = Turn


@final
class Tamper:
    """Watches every gradient that is stepped, from the end of a backward to the next one, or to the loop's end.

    Two looks at each `.grad`, which tensor it is and how often it was written to, cost a quarter of a microsecond. How
    many writes a window's own backwards make cannot be told in advance: a micro-batch may leave a parameter out, and
    checkpoints add to one several times in one backward.
    """

    def __init__(self, job: Job) -> None:
        self._job, self._engine, self._groups = job, job.engine, job.groups
        self._own = job.groups[0] if len(job.groups) == 1 else [one for group in job.groups for one in group]
        self._holders: Sequence[Any] = ()  # whose gradients were looked at
        self._seen: list[Tensor | None] = []  # these
        self._versions: list[int] = []
        self._final: list[Sequence[nn.Parameter]] = []  # groups that have a gradient after the loop

    def look(self) -> None:
        """Remembers what gradients look like after a backward."""
        holders: Sequence[Any] = self._engine.holders(self._own)
        self._holders, self._seen = holders, [one.grad for one in holders]
        self._versions = _versions_of(self._seen)

    def differs(self) -> bool:
        """Returns whether a gradient came, went or was written to; forgets what was seen, which a backward may free."""
        holders, seen, versions = self._holders, self._seen, self._versions
        self._holders, self._seen = (), []
        scaler = self._job.scaler
        if scaler is not None and has_unscaled(scaler, self._job.optimizers):  # which counts as no write
            return True
        now = [one.grad for one in holders]
        if all(map(is_same, now, seen)):
            return _versions_of(now) != versions
        # A forward of DDP, which lays its buckets out anew after the first reduction, moves gradients to them.
        stays = [is_same(one, other) for one, other in zip(now, seen, strict=True)]
        return any(
            version_now != version if stay else one is None or other is None or not is_view(one)
            for one, other, stay, version_now, version in zip(
                now, seen, stays, _versions_of(now), versions, strict=True
            )
        )

    def complete(self) -> None:
        """Remembers where there are gradients after the loop; the caller may change them there."""
        self._final = [group for group in self._groups if any(one.grad is not None for one in group)]

    def is_cleared(self) -> bool:
        """Returns whether an optimizer's gradients are all gone since then."""
        return any(all(one.grad is None for one in group) for group in self._final)

    def clear(self) -> None:
        self._holders, self._seen, self._final = (), [], []


def _versions_of(gradients: Sequence[Tensor | None]) -> list[int]:
    return [-1 if one is None else version_of(one) for one in gradients]


def refuse_backward(window: Any) -> NoReturn:
    """Raises, since no micro-batch waits for a backward."""
    if window.stage is not Stage.RUNNING:
        raise DistaccumError(
            f"backward() on a window that is {window.describe()}; call it in the loop over its micro-batches"
        )
    if window.turn is FAILED:
        raise DistaccumError(
            f"backward() after one that failed {window.where()}: gradients are half added up; leave the loop, "
            "which discards the window, and go on with the next"
        )
    raise DistaccumError(
        f"a second backward() {window.where()}, which would count its samples twice; add the losses up, or go "
        "through window.parts(items), which gives each item a backward of its own"
    )


def give_up(window: Any, what: str) -> NoReturn:
    """Discards the window, and says why."""
    window.discard()
    raise DistaccumError(
        f"{what}, so the window's gradient is lost and the window is discarded; leave gradients alone in the loop, "
        "and their clearing to window.step()"
    )


def refuse_unfinished(window: Any) -> None:
    """Raises where the micro-batch at work lacks a backward, a part or a named loss."""
    if window.stage is Stage.LEFT:
        raise DistaccumError(f"this window is {window.describe()}")
    if window.has_more_parts:
        raise DistaccumError("parts() or heads() was left before its last item; go through all of them")
    refuse_missing_backward(window, "a micro-batch")
    if missing := window.losses.missing(window.counts_here):
        raise DistaccumError(
            f"micro-batch {window.place} got no loss for {missing}, although its count is above 0; give each "
            "name its loss, or let count give 0 where there is none"
        )


def refuse_missing_backward(window: Any, what: str) -> None:
    if window.turn is not DONE:
        raise DistaccumError(
            f"{what} without window.backward(loss) ({window.where()}); call it for each one (to leave a micro-batch "
            "out, let count give 0 for it)"
        )


def refuse_copy(window: Any) -> None:
    if window.stage not in OVER:
        raise DistaccumError(
            f"copying or pickling an Accumulator with a window that is {window.describe()}, of which a copy "
            "would share gradients and flags; do it between two windows, or make an Accumulator of the copied "
            "model and optimizer and give it load_state_dict(accumulator.state_dict())"
        )


def guard_steps(optimizer: Any, owner: Any, holds_gradients: Callable[[Any], bool]) -> None:
    """Refuses the caller's step() while `holds_gradients(owner)`, before it changes a weight; goes with `owner`."""
    if not hasattr(optimizer, "register_step_pre_hook"):
        return
    this = weakref.ref(owner)

    def refuse(*_: object) -> None:
        found = this()
        if found is not None and holds_gradients(found):
            raise DistaccumError(
                "optimizer.step() before the window's own: the gradients in it belong to the window; call "
                "window.step() after its loop and nothing else, or give the Accumulator optimizer=None and step "
                "before it"
            )

    weakref.finalize(owner, optimizer.register_step_pre_hook(refuse).remove)


def schedules_of(job: Job) -> list[Any]:
    """Lists the schedules that are to step; warns if one moved on since the last update, as `job.epochs` shows."""
    if any(now > then for now, then in zip(_epochs_of(job), job.epochs, strict=False)):
        job.once(
            "scheduler",
            "scheduler.step() was called beside window.step(), which steps the schedule once per update, so it runs "
            "ahead; leave the call out, or step the schedule yourself and leave scheduler= out",
        )
    return list(job.schedulers)


def step_schedules(job: Job, schedules: list[Any]) -> None:
    """Steps each once, also where Ctrl-C comes between two of them and this is called again."""
    while schedules:
        schedules.pop(0).step()
    job.epochs[:] = _epochs_of(job)


def _epochs_of(job: Job) -> list[int]:
    return [getattr(one, "last_epoch", 0) for one in job.schedulers]


def clear_stale(engine: Engine, parameters: Sequence[nn.Parameter], once: Once) -> None:
    """Clears gradients that stood before a window, with a warning."""
    # Zeros are nobody's: of zero_grad(set_to_none=False), or views of buckets that another Accumulator cleared.
    shown = [p.grad for p in parameters if p.grad is not None]
    if engine.stale(()) or not is_zero(shown):  # hidden ones, or those that are shown
        once("stale", "gradients that stood before the window were cleared: they are not part of it")
    engine.clear(parameters)


@contextmanager
def untouched_statistics(layers: Sequence[nn.Module]) -> Iterator[None]:
    """Undoes what a stand-in does to running statistics: it was counted when it came first."""
    found = [(b, b.clone()) for layer in layers if layer.training for b in layer.buffers(recurse=False)]
    try:
        yield
    finally:
        for buffer, value in found:
            buffer.copy_(value)
