"""Extensions of the library: pass them to `Accumulator(extensions=[...])`."""

from .noise import NoiseScale
from .spans import Spans
from .wide_sums import WideSums

__all__ = ["NoiseScale", "Spans", "WideSums"]
