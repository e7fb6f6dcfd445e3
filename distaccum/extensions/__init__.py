"""Extensions of the library: pass them to `Accumulator(extensions=[...])`."""

from .noise import NoiseScale
from .spans import Spans

__all__ = ["NoiseScale", "Spans"]
