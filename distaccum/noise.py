"""What a gradient noise scale says about a batch size."""

from __future__ import annotations

import math
from typing import NamedTuple

FAR = 3.0  # a batch is far from the noise scale from this factor on


class Meaning(NamedTuple):
    """Whether a larger batch would help, and the cost of this one."""

    verdict: str  # "larger helps", "enough" or "wasteful"
    updates: float  # a multiple of the fewest, those of a very large batch
    samples: float  # a multiple of the fewest, those of a very small batch

    def __str__(self) -> str:
        return f"{self.updates:.2f} x the fewest updates, {self.samples:.2f} x the fewest samples: {self.verdict}"


def meaning(noise_scale: float, batch: float) -> Meaning:
    """What training with `batch` samples per update needs: 1 + B / batch times the fewest updates, 1 + batch / B times
    the fewest samples, to the same loss.

    Below a third of B a batch twice as large saves more than 37% of the updates for less than 25% more samples ("larger
    helps"); above three times B it saves less than 13% for more than 75% ("wasteful").

    >>> meaning(noise_scale=800, batch=100)
    Meaning(verdict='larger helps', updates=9.0, samples=1.125)
    """
    updates = 1 + noise_scale / batch
    samples = math.inf if noise_scale == 0 else 1 + batch / noise_scale
    if batch * FAR < noise_scale:
        return Meaning("larger helps", updates, samples)
    return Meaning("wasteful" if batch > noise_scale * FAR else "enough", updates, samples)
