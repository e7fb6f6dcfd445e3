"""Guards: what a loop may not do in a window, and how it hears of it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum, auto
from operator import is_ as is_same
from typing import Any, NoReturn, final

import torch
from torch import Tensor, nn

from .engines import Engine
from .job import Job
from .law import DistaccumError, Once
from .norms import is_zero
from .private import is_view, version_of
from .scaling import has_unscaled

TAMPERED = "gradients were cleared or changed in mid-window (by zero_grad, clipping, unscale_ or another backward)"


class Stage(Enum):
    PLANNED = auto()
    RUNNING = auto()
    COMPLETE = auto()  # after the loop: gradients are final
    STEPPED = auto()
    LEFT = auto()  # discarded


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

    def __init__(self, job: Job, groups: Sequence[Sequence[nn.Parameter]]) -> None:
        self._job, self._engine, self._groups = job, job.engine, groups
        self._own = groups[0] if len(groups) == 1 else [one for group in groups for one in group]
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


def refuse_backward(stage: Stage, turn: Turn, where: str, described: str) -> NoReturn:
    """No micro-batch waits for one."""
    if stage is not Stage.RUNNING:
        raise DistaccumError(f"backward() on a window that is {described}; call it in the loop over its micro-batches")
    if turn is FAILED:
        raise DistaccumError(
            f"backward() after one that failed {where}: gradients are half added up; leave the loop, "
            "which discards the window, and go on with the next"
        )
    raise DistaccumError(
        f"a second backward() {where}, which would count its samples twice; add the losses up, or go "
        "through window.parts(items), which gives each item a backward of its own"
    )


def refuse_copy(window: Any) -> None:
    if not window.is_over:
        raise DistaccumError(
            f"copying or pickling an Accumulator with a window that is {window.describe()}, of which a copy "
            "would share gradients and flags; do it between two windows, or make an Accumulator of the copied "
            "model and optimizer and give it load_state_dict(accumulator.state_dict())"
        )


def without_backward(what: str, where: str) -> DistaccumError:
    return DistaccumError(
        f"{what} without window.backward(loss) ({where}); call it for each one (to leave a micro-batch "
        "out, let count give 0 for it)"
    )


def refuse_inference_mode() -> None:
    """Raises inside it: what is made there (a scale, DDP's buckets) could not be written to outside."""
    if torch.is_inference_mode_enabled():
        raise DistaccumError("a window inside torch.inference_mode(), where nothing is trained; leave that mode first")


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


def clear_stale(engine: Engine, parameters: Sequence[nn.Parameter], once: Once) -> None:
    """Clears gradients that stood before a window, with a warning."""
    if not engine.stale(parameters):
        return
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
