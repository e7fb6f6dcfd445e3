"""What a loader's or caller's batch becomes before it is counted."""

from .by_cost import ByCost, trim_padding

__all__ = ["ByCost", "trim_padding"]
