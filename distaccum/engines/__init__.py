"""Engines: the differences between wrappers of a model."""

from __future__ import annotations

from typing import TypeVar

from .base import Engine, Sync

__all__ = ["Engine", "Sync", "register", "registered"]

registered: list[type[Engine]] = []
Kind = TypeVar("Kind", bound=type[Engine])


def register(engine: Kind) -> Kind:
    """Class decorator: makes Accumulators try the `wraps` of your engine, before those of the library's own."""
    if engine not in registered:
        registered.append(engine)
    return engine
