"""Runs a script as itself, under the audit."""

from __future__ import annotations

import json
import os
import runpy
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

from .session import Audit, watched


def run(given: Any) -> int:
    """Returns the script's own exit status if it is not 0, otherwise the verdict's."""
    if given.folder is not None:
        Path(given.folder).mkdir(parents=True, exist_ok=True)
    path = Path(given.json or "report.json")
    if given.json is not None and (path.is_dir() or not os.access(path.parent, os.W_OK)):  # before hours of training
        raise FileNotFoundError(f"{path} cannot be written; expected a file in a folder that is there")
    if not (given.module or Path(given.script).exists()):
        raise FileNotFoundError(f"{given.script} is not there, expected a script, or a module after -m")
    status: Any = 0
    errors = os.dup(2)  # the script may close or replace its own

    def tell(report: Audit) -> None:
        with suppress(OSError, ValueError, AttributeError):  # the report goes to stderr, which may still be open
            sys.stdout.flush()
        own = f"\nThe exit status, {status}, is the script's own." * (isinstance(status, int) and bool(status))
        os.write(errors, f"{report}{own}\n".encode())
        if given.json is not None:
            Path(given.json).write_text(json.dumps(report.as_dict(), indent=2) + "\n")

    with watched(None, given.updates, given.folder, tell) as report:  # which reports even if Ctrl-C ends the script
        try:
            alive: Any = _run_as_python(given)  # until the verdict
        except SystemExit as left:  # also after as many updates as were asked for
            status = left.code
            alive = left.__traceback__  # noqa: F841
            report.ended = not left.code
        except Exception as error:
            traceback.print_exc()
            report.error = f"{type(error).__name__}: {error}"
    for name in ("stdout", "stderr"):
        if getattr(getattr(sys, name), "closed", True):  # by the script
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115  # as long as the process
    if isinstance(status, str):  # sys.exit("a message")
        print(status, file=sys.stderr)
        status = 1
    return status or (2 if report.error else report.status)


def _run_as_python(given: Any) -> Any:
    """The script's globals, after it ran as `python` runs it."""
    sys.argv[:] = [given.script, *given.launcher, *given.arguments]
    folder = Path.cwd() if given.module else Path(given.script).resolve().parent
    sys.path.insert(0, str(folder))
    if given.module:
        return runpy.run_module(given.script, run_name="__main__", alter_sys=True)
    return runpy.run_path(given.script, run_name="__main__")
