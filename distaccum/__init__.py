"""Gradient accumulation that is exact, and costs one reduction per update."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .accumulator import Accumulator as Accumulator
    from .auditing.session import audit as audit
    from .batch import count_samples as count_samples
    from .batch import count_tokens as count_tokens
    from .extension import Extension as Extension
    from .feeding.by_cost import ByCost as ByCost
    from .law import DistaccumError as DistaccumError
    from .runs.check.report import Report as Report
    from .saving import load as load
    from .saving import save as save
    from .tools.plan import Forecast as Forecast
    from .tools.plan import plan as plan
    from .update import Update as Update
    from .window import Window as Window

__version__ = "0.2.0"

# The module of each name.
_PUBLIC = {
    "Accumulator": "accumulator",
    "ByCost": "feeding.by_cost",
    "DistaccumError": "law",
    "Extension": "extension",
    "Forecast": "tools.plan",
    "Report": "runs.check.report",
    "Update": "update",
    "Window": "window",
    "audit": "auditing.session",
    "count_samples": "batch",
    "count_tokens": "batch",
    "load": "saving",
    "plan": "tools.plan",
    "save": "saving",
}
__all__ = [*_PUBLIC]
NO_TORCH = "distaccum needs torch 2.9 or later, which this Python does not have: pip install torch"
_ELSEWHERE = {
    "AccumulatingTrainer": "transformers",
    "ExactAccumulation": "lightning",
    **dict.fromkeys(("NoiseScale", "Spans", "WideSums"), "extensions"),
    **dict.fromkeys(("freeze", "to_groupnorm"), "batchnorm"),
    "trim_padding": "feeding",
}

if not TYPE_CHECKING:  # otherwise mypy would take a misspelt name for Any

    def __getattr__(name: str) -> Any:
        """Imports public names and modules on first use: torch takes seconds to import, and `--help` needs no torch."""
        from importlib import import_module
        from importlib.util import find_spec

        if name in _PUBLIC:
            try:
                globals()[name] = value = getattr(import_module(f"{__name__}.{_PUBLIC[name]}"), name)
            except ModuleNotFoundError as error:
                if error.name != "torch":
                    raise
                raise ImportError(NO_TORCH) from None
            return value
        if name in _ELSEWHERE:  # an AttributeError's text would be lost in `from distaccum import name`
            raise ImportError(
                f"{name} is in {__name__}.{_ELSEWHERE[name]}: from {__name__}.{_ELSEWHERE[name]} import {name}"
            )
        if name.startswith("_") or find_spec(f"{__name__}.{name}") is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return import_module(f"{__name__}.{name}")  # such as `distaccum.batchnorm`

    def __dir__() -> list[str]:
        return sorted(["__version__", *__all__])
