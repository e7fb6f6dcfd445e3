"""Gradient accumulation that is exact, and costs one reduction per update."""

from .accumulator import Accumulator
from .batches import count_samples, count_tokens
from .check import Report
from .forecast import Forecast, plan
from .shares import DistaccumError
from .update import Update
from .window import Window

__all__ = [
    "Accumulator",
    "DistaccumError",
    "Forecast",
    "Report",
    "Update",
    "Window",
    "count_samples",
    "count_tokens",
    "plan",
]
__version__ = "0.1.0"
