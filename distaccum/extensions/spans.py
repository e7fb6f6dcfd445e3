"""Names in the trace of torch.profiler."""

from __future__ import annotations

from typing import final

from torch.profiler import record_function

from ..extension import Extension
from ..update import Update
from ..window import Window


@final
class Spans(Extension):
    """Names each window, its backwards, its reduction after the loop, and its step, for torch.profiler."""

    def __init__(self) -> None:
        self._open: list[record_function] = []

    def begin(self, window: Window) -> None:
        self._enter(f"distaccum: window {window.index}")

    def before_backward(self, window: Window, reduces: bool) -> None:
        self._enter("distaccum: backward that reduces" if reduces else "distaccum: backward")

    def after_backward(self, window: Window) -> None:
        self._leave()

    def finishing(self, window: Window) -> None:
        self._enter("distaccum: finish")

    def numbers(self, window: Window) -> None:
        self._leave()
        self._enter("distaccum: step")

    def end(self, window: Window, update: Update | None) -> None:
        while self._open:
            self._leave()

    def _enter(self, name: str) -> None:
        self._open.append(record_function(name))
        self._open[-1].__enter__()  # type: ignore[no-untyped-call]  # torch's

    def _leave(self) -> None:
        self._open.pop().__exit__(None, None, None)
