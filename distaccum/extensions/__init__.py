"""Extensions of the library: pass them to `Accumulator(extensions=[...])`."""

from .noise import NoiseScale
from .receipt import Receipt
from .spans import Spans
from .wide_sums import WideSums

__all__ = ["NoiseScale", "Receipt", "Spans", "WideSums"]
