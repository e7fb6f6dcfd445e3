"""What a gradient noise scale says about a batch size."""

from __future__ import annotations

import math
from typing import NamedTuple

FAR = 3.0  # a batch is far from the noise scale from this factor on


class Meaning(NamedTuple):
    """Whether a larger batch would help, and the cost of this one.

    Attributes:
        verdict (str): "larger helps", "enough" or "wasteful".
        updates (float): Updates to the same loss, as a multiple of the fewest, those of a very large batch.
        samples (float): Samples to the same loss, as a multiple of the fewest, those of a very small batch.
    """

    verdict: str
    updates: float
    samples: float

    def __str__(self) -> str:
        return f"{self.updates:.2f} x the fewest updates, {self.samples:.2f} x the fewest samples: {self.verdict}"


def meaning(noise_scale: float, batch: float) -> Meaning:
    """What a noise scale B says about a batch: whether a larger one helps, and what training with this one costs.

    To the same loss it takes `1 + B / batch` times the fewest updates and `1 + batch / B` times the fewest samples.
    Below a third of B a batch twice as large saves more than 37% of the updates for less than 25% more samples ("larger
    helps"); above three times B it saves less than 13% for more than 75% ("wasteful").

    Args:
        noise_scale: B, as in `Update.noise_scale`.
        batch: Samples (or tokens) per update over all ranks, in the unit of `noise_scale`; above 0.

    Returns:
        A `Meaning`, a named tuple; printed, a sentence.

    Raises:
        ZeroDivisionError: `batch` is 0.

    Example:
        >>> meaning(noise_scale=800, batch=100)
        Meaning(verdict='larger helps', updates=9.0, samples=1.125)
    """
    updates = 1 + noise_scale / batch
    samples = math.inf if noise_scale == 0 else 1 + batch / noise_scale
    if batch * FAR < noise_scale:
        return Meaning("larger helps", updates, samples)
    return Meaning("wasteful" if batch > noise_scale * FAR else "enough", updates, samples)
