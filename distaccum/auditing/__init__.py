"""`distaccum audit`: what the accumulation of an unchanged script does; and `Receipt`, which proves a long run's."""

from .receipt import Receipt

__all__ = ["Receipt"]
