"""Runs a script as itself, under the audit."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from .session import Audit, watched


def run(given: Any) -> int:
    """Returns the script's own exit status if it is not 0, otherwise the verdict's."""
    if given.folder is not None:
        Path(given.folder).mkdir(parents=True, exist_ok=True)
    path = Path(given.json or "report.json")
    if given.json is not None and (path.is_dir() or not os.access(path.parent, os.W_OK)):  # before hours of training
        raise FileNotFoundError(f"{path} cannot be written; expected a file in a folder that is there")
    code = _prepare(given)
    status: Any = 0
    # the script may close or replace its own
    errors = sys.stderr
    saved = os.dup(2)

    def tell(report: Audit) -> None:
        with suppress(OSError, ValueError, AttributeError):  # the report goes to stderr, which may still be open
            sys.stdout.flush()
        launched = report.status and not report.error and "TORCHELASTIC_RUN_ID" in os.environ
        noise = f"\nWhat torchrun adds below is about the exit status, {report.status}; no rank has failed otherwise."
        own = f"\nThe exit status, {status}, is the script's own." * (isinstance(status, int) and bool(status))
        text = f"{report}{own}{noise * bool(launched)}\n"
        try:
            print(text, end="", file=errors, flush=True)
        except (OSError, ValueError):
            os.write(saved, text.encode())
        if given.json is not None:
            Path(given.json).write_text(json.dumps(report.as_dict(), indent=2) + "\n")

    with watched(None, given.updates, given.folder, tell) as report:  # which reports even if Ctrl-C ends the script
        try:
            exec(code, sys.modules["__main__"].__dict__)
        except SystemExit as left:  # also after as many updates as were asked for
            status = left.code
            report.ended = not left.code
        except Exception as error:
            traceback.print_exception(error.with_traceback(error.__traceback__ and error.__traceback__.tb_next))
            status = 2
            report.error = f"{type(error).__name__}: {error}"
    for name in ("stdout", "stderr"):
        if getattr(getattr(sys, name), "closed", True):  # by the script
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115  # as long as the process
    if isinstance(status, str):  # sys.exit("a message")
        print(status, file=sys.stderr)
    if isinstance(status, str) or status:
        return 1 if isinstance(status, str) else status
    return report.status


def _prepare(given: Any) -> CodeType:
    """The script's code; sets up `__main__`, the arguments and the path as `python` does."""
    main = ModuleType("__main__")
    path = given.script
    if given.module:
        sys.path.insert(0, str(Path.cwd()))
        spec = importlib.util.find_spec(path)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{path}.__main__")
        if spec is None or spec.origin is None:
            raise ModuleNotFoundError(f"there is no module {path}")
        path = spec.origin
        main.__spec__ = spec
        main.__package__ = spec.parent
    elif not Path(path).is_file():
        raise FileNotFoundError(f"there is no {path}")
    else:
        main.__spec__ = None  # as under Python itself
        sys.path.insert(0, str(Path(path).resolve().parent))
    main.__file__ = path
    sys.argv[:] = [path, *given.launcher, *given.arguments]
    sys.modules["__main__"] = main
    return compile(Path(path).read_bytes(), str(Path(path).resolve()), "exec", dont_inherit=True)
