"""Gradient accumulation that is exact, and costs one reduction per update."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .accumulator import Accumulator
    from .cutting import count_samples, count_tokens
    from .extension import Extension
    from .feeding.by_cost import ByCost
    from .law import DistaccumError
    from .runs.check.report import Report
    from .tools.audit.session import audit
    from .tools.plan.forecast import plan
    from .tools.plan.report import Forecast
    from .update import Update
    from .window import Window

__all__ = [
    "Accumulator",
    "ByCost",
    "DistaccumError",
    "Extension",
    "Forecast",
    "Report",
    "Update",
    "Window",
    "audit",
    "count_samples",
    "count_tokens",
    "plan",
]
__version__ = "0.1.0"

_MODULES = {
    "Accumulator": "accumulator",
    "ByCost": "feeding.by_cost",
    "DistaccumError": "law",
    "Extension": "extension",
    "Forecast": "tools.plan.report",
    "Report": "runs.check.report",
    "Update": "update",
    "Window": "window",
    "audit": "tools.audit.session",
    "count_samples": "cutting",
    "count_tokens": "cutting",
    "plan": "tools.plan.forecast",
}

if not TYPE_CHECKING:  # or a misspelt name would pass as Any

    def __getattr__(name: str) -> Any:
        """The public names and the modules, imported when they are first used.

        Importing torch takes seconds, and the command's help, its mistakes and `plan` do without.
        """
        from importlib import import_module

        if name in _MODULES:
            globals()[name] = found = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
            return found
        missing = AttributeError(f"module {__name__!r} has no attribute {name!r}")
        if name.startswith("_"):
            raise missing
        try:
            return import_module(f"{__name__}.{name}")  # as of `distaccum.batchnorm.freeze`
        except ModuleNotFoundError as error:
            if error.name != f"{__name__}.{name}":
                raise
            raise missing from None

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
