"""Place: where a job that resumes begins to read its loader, if the loader tells its state."""

from __future__ import annotations

from typing import Any, final

from ..job import Job
from ..loader import Position, Reader


@final
class Place:
    """The position at which a job that resumes begins: that of the `windows()` call at work."""

    def __init__(self, job: Job) -> None:
        self._job = job
        # No loop over windows() has windows left.
        self.is_read = True
        # Of the call at work, or of the last one, if its loader tells its state.
        self._reader: Reader | None = None
        # Of a loaded state, until a loader is opened.
        self._loaded: Position | None = None

    def open(self, loader: Any, kept: Reader | None) -> Reader:
        """The reader of a loader, from the position of a loaded state if any; `kept`: of an iterator that was left."""
        job = self._job
        position = self._loaded
        self._loaded = None
        tells_state = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
        tells_state = tells_state and all(adapter.tells_state(loader) for adapter in job.adapters)
        if position is not None and not tells_state:
            job.once("loader", f"the state holds a loader's state, which a {type(loader).__name__} cannot load")
            position = None
        if kept is not None:
            kept.resume(loader)
        # A loader may draw numbers as it is opened: those of a state between two loops come first.
        before_opening = job.random.put_back if self.is_read else bool
        reader = kept or Reader(loader, before_opening, tells_state=tells_state, position=position)
        self._reader = reader if tells_state else None
        return reader

    def start(self, reader: Reader) -> None:
        """Notes that the window which is being planned begins at the position of this reader, which is at work."""
        self._reader = reader
        if self._job.start is not None:
            self._job.start.position = reader.position()

    def position(self) -> Position | None:
        """The position where the next update begins; None if no loader tells its state."""
        before: Position | None = None if self._job.start is None else self._job.start.position
        if before is not None or self._reader is None:
            return before or self._loaded
        return self._reader.position()

    def load(self, position: Position | None, *, is_between: bool) -> None:
        """Begins at the position of a state, which was taken between two loops over windows(), or in one."""
        self._loaded = position
        self._reader = None
        self.is_read = is_between
