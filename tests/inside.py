"""Reaches into the library's private names: each says why a test needs it."""

from __future__ import annotations

from typing import Any

from distaccum import Accumulator, Update
from distaccum.law.sizes import MicroBatchSize
from distaccum.observers.noise import Norms
from distaccum.window.window import Window


def norms_of(update: Update) -> Norms | None:
    """To compare each norm of an update with autograd's: a user sees a smoothed ratio of both."""
    update.noise_scale  # noqa: B018  # reads the numbers
    record: Any = update._noise
    norms: Norms | None = record.norms
    return norms


def pending_updates(accumulator: Accumulator) -> int:
    """To count the updates whose numbers stay on the device: a bound on memory, which no result shows."""
    noise: Any = accumulator._noise
    return len(noise.averages._pending)


def fit_of(accumulator: Accumulator) -> MicroBatchSize:
    """To see that a refused state changed no attribute, also those that no state holds."""
    return accumulator._progress.size


def storages_kept(accumulator: Accumulator) -> set[int]:
    """To find buckets of DDP that only the library still holds: a leak of memory, which no result shows."""
    engine: Any = accumulator._setup.engine
    return {stamp.gradient.untyped_storage().data_ptr() for stamp in engine._zeroed.stamps.values()}


def window_of(accumulator: Accumulator) -> Window:
    """To know the micro-step within update(), which hands out no window."""
    window = accumulator._planner.standing()
    assert window is not None
    return window


def turns_of(window: Window) -> int:
    """To strike in the last micro-step of all ranks: a window's length leaves stand-ins out."""
    return window._source.num_micro_steps
