"""A finding: one line of the report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "absent", "wrong"]
SHOWN = {"ok": "ok", "absent": "-", "wrong": "WRONG"}


@dataclass(frozen=True)
class Finding:
    about: str
    name: str
    seen: str
    state: State = "ok"
    cure: str = ""

    def __str__(self) -> str:
        return f"  {SHOWN[self.state]:5} {self.name:34} {self.seen}{'; ' if self.cure else ''}{self.cure}"
