"""Guards: what a loop may not do in a window."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum, auto
from typing import Any, NoReturn

from torch import nn

from .engines.base import Engine, is_zero
from .law import DistaccumError, Once

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
            f"micro-batch {window.micro_step} got no loss for {missing}, although its count is above 0; give each "
            "name its loss, or let count give 0 where there is none"
        )


def refuse_missing_backward(window: Any, what: str) -> None:
    """Raises where `what` is at work and had no backward."""
    if window.turn is not DONE:
        raise DistaccumError(
            f"{what} without window.backward(loss) ({window.where()}); call it for each one (to leave a micro-batch "
            "out, let count give 0 for it)"
        )


def refuse_copy(window: Any) -> None:
    """Raises where the window is not over."""
    if window.stage not in OVER:
        raise DistaccumError(
            f"copying or pickling an Accumulator with a window that is {window.describe()}, of which a copy "
            "would share gradients and flags; do it between two windows, or make an Accumulator of the copied "
            "model and optimizer and give it load_state_dict(accumulator.state_dict())"
        )


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
