"""Figures of matplotlib, which is imported when one is drawn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

KINDS = (".png", ".svg", ".pdf")


def blank(path: Path, width: float, height: float) -> Any:
    """A figure for `path`, in inches; not by pyplot, which would change the caller's own figures."""
    if path.suffix not in KINDS:
        raise ValueError(f"the picture {str(path)!r} has no ending that says its kind, expected .png, .svg or .pdf")
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise RuntimeError("a picture needs matplotlib: pip install distaccum[plot]") from None
    return Figure(figsize=(width, height), layout="constrained")


def save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
