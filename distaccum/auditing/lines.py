"""Lines of the user's code."""

from __future__ import annotations

import functools
import inspect
import os
import sysconfig
from pathlib import Path

import torch

OURS = f"{Path(__file__).parents[1]}{os.sep}"
BENEATH = (f"{Path(torch.__file__).parent}{os.sep}", f"{Path(__file__).parent}{os.sep}")
ELSEWHERE = (*BENEATH, OURS, "<frozen", *(sysconfig.get_path(one) + os.sep for one in ("stdlib", "purelib", "platlib")))
INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")  # of the user, or of another prefix


@functools.cache
def is_users(path: str) -> bool:
    return not path.startswith(ELSEWHERE) and not any(folder in path for folder in INSTALLED)


def where() -> tuple[str, str]:
    """The line of the user's code that runs now, and the innermost line outside of torch and the audit."""
    frame = inspect.currentframe()
    inner = ""
    while frame is not None:
        path = frame.f_code.co_filename
        if not inner and not path.startswith(BENEATH):
            inner = f"{path}:{frame.f_lineno}"
        if is_users(path):
            return f"{path}:{frame.f_lineno}", inner
        frame = frame.f_back
    return inner, inner
