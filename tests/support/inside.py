"""The only access of the tests to the library's private names; each function says why a test needs it."""

import math
from typing import Any, NamedTuple

from distaccum import Accumulator, Update
from distaccum.extensions.noise import Estimate


class Norms(NamedTuple):
    """A window's two gradients."""

    small: float  # |g|^2 of a rank's first micro-batch, the mean over ranks
    per_sample: float  # 1 / its count, the mean over ranks
    large: float  # |g|^2 of the window
    total: float  # the window's count


def norms_of(update: Update) -> Norms | None:
    """Compared with autograd's norms; users see only a smoothed ratio of both."""
    estimate: Estimate = update.notes["noise"]
    norms = list(map(float, estimate.norms))
    return Norms(*norms) if norms and not math.isnan(norms[0]) else None


def storages_kept(accumulator: Accumulator) -> set[int]:
    """DDP's buckets that only the library still holds: a memory leak, which no result shows."""
    engine: Any = accumulator._planner.job.engine
    return {gradient.untyped_storage().data_ptr() for gradient, _ in engine._zeroed.values()}
