"""Ways to turn what a loader yields into micro-batches."""

from .by_cost import ByCost, trim_padding

__all__ = ["ByCost", "trim_padding"]
