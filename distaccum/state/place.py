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
        # After a step that was the pass's last, whose end was yet unseen, the numbers of a state come before this one.
        job.random.is_between |= self._reader is not None
        self.load(None)
        tells_state = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
        tells_state = tells_state and all(adapter.tells_state(loader) for adapter in job.adapters)
        if position is not None and not tells_state:
            job.once("loader", f"the state holds a loader's state, which a {type(loader).__name__} cannot load")
            position = None
        if kept is not None:
            kept.resume(loader)
        reader = kept or Reader(loader, job.random.open, tells_state=tells_state, position=position)
        self._reader = reader if tells_state else None
        return reader

    def start(self, reader: Reader) -> None:
        """Notes that the window which is being planned begins at the position of this reader, which is at work."""
        self._reader = reader
        if self._job.start is not None:
            self._job.start.position = reader.position()

    def is_between(self) -> bool:
        """Returns whether a job that resumes begins with a loop over windows()."""
        random = self._job.random
        return random.is_between if random.loaded is not None else self.is_read and self._job.start is None

    def position(self) -> Position | None:
        """The position where the next update begins; None if no loader tells its state."""
        start = self._job.start
        before: Position | None = None if start is None else start.position
        if before is not None or self._reader is None:
            return before or self._loaded
        return self._reader.position()

    def load(self, position: Position | None) -> None:
        """Begins at the position of a state."""
        self._loaded = position
        self._reader = None
