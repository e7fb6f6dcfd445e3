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
    """The line of the user's code that runs now; the innermost line outside of torch and the audit, and its caller's.

    A helper with a criterion in it is called for each task from another line.
    """
    frame = inspect.currentframe()
    inner = ""
    lines: list[str] = []
    while frame is not None and len(lines) < 2:
        path = frame.f_code.co_filename
        line = f"{path}:{frame.f_lineno}"
        inner = inner or line * (not path.startswith(BENEATH))
        lines += [line] * is_users(path)
        frame = frame.f_back
    return (lines or [inner])[0], " from ".join([inner, *lines[1:]])
