"""An optimizer, and the backwards that it has not used yet."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, final

from torch import Tensor

from .ledger import Ledger, Receipts, on_host, quietly


@final
class Backward:
    """A call of backward, such as a micro-step's."""

    def __init__(self, line: str, drawn: int) -> None:
        self.line, self.drawn, self.begun = line, drawn, time.perf_counter()
        self.terms: list[dict[str, Any]] = []
        # The number of the clearing, its line ("": by hand), and whether a loader had ended before
        self.cleared: tuple[int, str, bool] | None = None
        self.values: Receipts | None = None  # of the parameters, at the clearing
        self.received: Receipts | None = None
        self.is_sure = True  # it is known which optimizers it reached
        self.left: Receipts | None = None  # of the gradients after it

    def as_dict(self) -> dict[str, Any]:
        for term in self.terms:
            for key in ("seed", "low", "count", "print"):
                term[key] = None if term[key] is None else abs(float(term[key]))
            if term["divisors"] is not None:
                term["divisors"] = [(how, _number(value)) for how, value in term["divisors"]]
        return {name: getattr(self, name) for name in ("line", "drawn", "terms", "cleared")}


@final
class Trained:
    """An optimizer, with the backwards of its current update and what happened between them."""

    def __init__(self, optimizer: Any, place: int, ledger: Ledger, pending: list[Backward]) -> None:
        self.optimizer, self.place, self.pending, self._ledger = optimizer, place, pending, ledger
        self.num = self._num_cleared = 0
        self.is_filled = False  # the last backward filled .grad; engines may keep gradients elsewhere
        # Kind, line ("": a window of ours), the number of backwards before it, and the schedule's id
        self.events: list[tuple[str, str, int, int]] = []
        self._closed: Receipts | None = None  # of the gradients before they are unscaled or clipped

    @property
    def is_waiting(self) -> bool:
        """True if a backward gave gradients that were neither used nor cleared."""
        return bool(self.pending) and self.pending[-1].cleared is None

    @property
    def has_gradient(self) -> bool:
        return any(parameter.grad is not None for parameter in parameters_of(self.optimizer))

    def add(self, made: Backward, most: int) -> None:
        self.pending, self._closed, self.is_filled = [*self.pending[-most:], made], None, self.has_gradient

    def note(self, kind: str, line: str = "", whose: int = 0) -> None:
        self.events.append((kind, line, len(self.pending), whose))

    @quietly
    def close(self) -> None:
        """Takes receipts of its gradients, before they are unscaled, clipped or used."""
        if self._closed is None and self.pending and all(made.received is not None for made in self.pending):
            self._closed = self._ledger.receipts(self._places())

    def forgo(self, line: str) -> None:
        """Notes that gradients which it has not used are cleared."""
        self._num_cleared += 1
        how = self._num_cleared, line, any(kind == "ended" for kind, *_ in self.events)
        for made in (made for made in self.pending if made.cleared is None):
            made.cleared = how
        if self.pending[-1].received is not None:
            self.pending[-1].values = self._ledger.receipts(self._places(), of_values=True)
        self.events, self._closed = [], None

    def forget(self) -> None:
        self.pending, self._closed, self.events = [], None, []

    def record(self) -> dict[str, Any]:
        """Returns what is known about the update, in plain numbers."""
        used = {made.line for made in self.pending if made.cleared is None}
        for made in self.pending:  # cleared by hand: backwards of other lines (another model's) are meant to go
            made.cleared = made.cleared if made.cleared and (made.cleared[1] or made.line not in used) else None
        backwards = [made.as_dict() for made in self.pending]
        found = {"optimizer": self.place, "index": self.num, "events": self.events, "backwards": backwards}
        return found if self._closed is None else found | self._receipts(self._closed, backwards)

    def _receipts(self, closed: Receipts, backwards: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The receipts of the update; also gives each backward its own, all in one read from the device."""
        every = set(closed).union(*(made.received or {} for made in self.pending))
        places = sorted(every.intersection(self._places()))
        values = self._ledger.receipts(places, of_values=True)
        of_each = ((made.received or {}, made.left or {}, made.values or values) for made in self.pending)
        rows = on_host([closed, values, *(one for three in of_each for one in three)], places)
        for made, backward, received, left in zip(self.pending, backwards, rows[2::3], rows[3::3], strict=True):
            backward |= {"received": received} if made.left is None else {"received": received, "left": left}
        kept = zip(self.pending, rows[4::3], strict=True)
        moved = any(bool((row != rows[1]).any()) for made, row in kept if made.values)
        return {"places": places, "closed": rows[0], "values": rows[1], "moved": moved}

    def _places(self) -> list[int]:
        return [place for place, owners in self._ledger.owners.items() if self.place in owners]


def parameters_of(optimizer: Any) -> Iterable[Any]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _number(value: Any) -> float | None:
    with suppress(RuntimeError, TypeError, ValueError):  # it has several numbers, or a dispatch mode cannot read it
        return float(value.detach() if isinstance(value, Tensor) else value)
    return None
