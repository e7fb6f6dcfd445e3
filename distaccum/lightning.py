"""The public name for scripts: `from distaccum.lightning import ExactAccumulation`."""

from .trainers.lightning import ExactAccumulation

__all__ = ["ExactAccumulation"]
