"""An optimizer, and the backwards that it has not used yet."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, final

from torch import Tensor

from ..norms import local
from .ledger import Ledger, Receipts, on_host, quietly
from .private import version

KEPT = 2000  # backwards of an update, and updates
CHANGED = "changed between the last backward and the step"
AFTER = ("late", "again")  # kinds of what happens after the step of an update


@final
class Backward:
    """A call of backward, such as a micro-step's."""

    def __init__(self, line: str, batch: tuple[int, int]) -> None:
        self.line, self.batch = line, batch
        self.terms: list[dict[str, Any]] = []
        self.scaler: Any = None
        self.own: list[Any] = []  # by which numbers each addend that is no criterion's is divided
        # The backwards before the clearing, its line ("": by hand), and whether a loader had ended before
        self.cleared: tuple[int, str, bool] | None = None
        self.is_used = False  # a step of any optimizer used it
        self.values: Receipts | None = None  # of the parameters, at the clearing
        self.received: Receipts | None = None
        self.is_sure = True  # it is known which optimizers it reached
        self.left: Receipts | None = None  # of the gradients after it

    def as_dict(self) -> dict[str, Any]:
        for term in self.terms:
            for key in ("seed", "low", "count", "pairs", "print"):
                term[key] = None if term[key] is None else abs(float(term[key]))
            if term["divisors"] is not None:
                term["divisors"] = [_plain(*step) for step in term["divisors"]]
        self.own = [[_plain(*step) for step in path] for path in self.own]
        return {name: getattr(self, name) for name in ("line", "batch", "terms", "own", "cleared")}


@final
class Trained:
    """An optimizer, with the backwards of its current update and what happened between them."""

    def __init__(self, optimizer: Any, place: int, ledger: Ledger) -> None:
        self.optimizer = weakref.ref(optimizer)
        self.place = place
        self._ledger = ledger
        self.pending: list[Backward] = []
        self.num = 0
        self.is_seen = False  # by receipts
        self._mark: tuple[int, int] | None = None  # a gradient after the last backward or step; engines may keep theirs
        # Kind, line, the number of backwards before it, and the schedule's id, or by how much
        # gradients are over the bound of clipping
        self.events: list[tuple[str, str, int, Any]] = []
        self._last_events = self.events  # of the last update
        self._is_closed = False  # since the last backward
        self._closed: Receipts | None = None  # of the gradients before they are unscaled or clipped
        self._touched: set[str] = set()  # how gradients were changed between its backwards, and before the step

    @property
    def is_waiting(self) -> bool:
        """True if a backward gave gradients that were neither used nor cleared."""
        return bool(self.pending) and self.pending[-1].cleared is None

    @property
    def is_emptied(self) -> bool:
        """True where the last backward left gradients, and none is there."""
        return self._mark is not None and self._gradient() is None

    @property
    def scale(self) -> float:
        """By what a scaler multiplies its gradients."""
        scaler: Any = self.pending[-1].scaler if self.pending else None
        return 1.0 if scaler is None else float(scaler.get_scale())

    @property
    def is_unscaled(self) -> bool:
        return any(kind in ("unscale", "scaler") for kind, *_ in self.events)

    def _gradient(self) -> tuple[int, int] | None:
        """One of its gradients, and how often it was changed."""
        every = (parameter.grad for parameter in parameters_of(self.optimizer()) if parameter.grad is not None)
        return next(((id(gradient), version(gradient)) for gradient in every), None)

    @property
    def way(self) -> Any:
        """Shows without receipts that an update is made as others are."""
        kinds = sorted({(kind, line) for kind, line, *_ in self._last_events})
        return len(self.pending), *kinds, *sorted(self._touched)

    def touch(self) -> None:
        """Notes that gradients were changed between two backwards."""
        if self._mark is not None and self._mark != (now := self._gradient()):
            self._touched.add(f"{'set to None' if now is None else 'changed'} between two backwards")

    def add(self, made: Backward) -> None:
        self.pending = [*self.pending[-KEPT:], made]
        self._closed = None
        self._is_closed = False
        self._mark = self._gradient()

    @property
    def is_spent(self) -> bool:
        """True while the gradient of the last step stands there, untouched."""
        return not self.pending and self._mark is not None and self._mark == self._gradient()

    def has_gradient(self) -> bool:
        """True if a gradient is there that is not 0."""
        return any(bool(local(p.grad).norm()) for p in parameters_of(self.optimizer()) if p.grad is not None)

    def note(self, kind: str, line: str = "", whose: Any = 0) -> None:
        events = self._last_events if kind in AFTER else self.events
        events.append((kind, line, len(self.pending), whose))

    @quietly
    def close(self) -> None:
        """Takes receipts of its gradients, before they are unscaled, clipped or used."""
        if self._is_closed or not self.pending:
            return
        self._is_closed = True
        self._touched |= {CHANGED} if self._mark != self._gradient() else set()
        if all(made.received is not None for made in self.pending):
            self._closed = self._ledger.receipts(self._places())

    def forgo(self, line: str) -> None:
        """Notes that gradients which it has not used are cleared."""
        how = len(self.pending), line, any(kind == "ended" for kind, *_ in self.events)
        for made in (made for made in self.pending if made.cleared is None):
            made.cleared = how
        if self.pending[-1].received is not None:
            self.pending[-1].values = self._ledger.receipts(self._places(), of_values=True)
        self.events = []
        self._closed = None
        self._is_closed = False

    def forget(self) -> None:
        self._mark = self._gradient()
        self.pending = []
        self._closed = None
        self.events = []
        self._touched = set()

    def rest(self) -> list[dict[str, Any]]:
        """Backwards that surely reached it, and that no step used."""
        if self.optimizer() is not None and self.is_waiting and self.is_emptied:
            self.forgo("")  # as where a window of ours skips its step
        return [made.as_dict() for made in self.pending if made.is_sure and not made.is_used]

    def record(self) -> dict[str, Any]:
        """Returns what is known about the update, in plain numbers."""
        used = {made.line for made in self.pending if made.cleared is None}
        for made in self.pending:  # cleared by hand: backwards of other lines (another model's) are meant to go
            made.cleared = made.cleared if made.cleared and (made.cleared[1] or made.line not in used) else None
            made.is_used |= made.cleared is None
        self.pending = [made for made in self.pending if not (made.cleared and made.is_used)]
        backwards = [made.as_dict() for made in self.pending]
        self._last_events = self.events
        now = self._gradient()
        is_kept = bool(now and self._mark and now[0] != self._mark[0])  # elsewhere, while it is cleared here
        update = {
            "optimizer": self.place,
            "index": self.num,
            "events": self.events,
            "backwards": backwards,
            "scale": self.scale if self.is_unscaled else 1.0,
            "left_scaled": 1.0 if self.is_unscaled else self.scale,
            "touched": sorted(self._touched),
            "absent": [place for place in self._places() if self._ledger.parameter(place).grad is None],
            "moved": is_kept and any(made.cleared for made in self.pending),
        }
        if self._closed is not None:
            receipts = self._receipts(self._closed, backwards)
            update |= receipts | {"moved": update["moved"] or receipts["moved"]}
        return update

    def _receipts(self, closed: Receipts, backwards: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The receipts of the update; also gives each backward its own."""
        every = set(closed).union(*(made.received or {} for made in self.pending))
        places = sorted(every.intersection(self._places()))
        values = on_host(self._ledger.receipts(places, of_values=True), places)
        for made, backward in zip(self.pending, backwards, strict=True):
            backward["received"] = on_host(made.received or {}, places)
            if made.left is not None:
                backward["left"] = on_host(made.left, places)
        kept = (on_host(made.values, places) for made in self.pending if made.values)
        moved = any(not values.equal(row) for row in kept)
        return {"places": places, "closed": on_host(closed, places), "values": values, "moved": moved}

    def _places(self) -> list[int]:
        return [place for place, owners in self._ledger.owners.items() if self.place in owners]


def parameters_of(optimizer: Any) -> Iterable[Any]:
    return (parameter for group in getattr(optimizer, "param_groups", ()) for parameter in group["params"])


def _plain(how: str, value: Any) -> tuple[str, float | None]:
    """Reads a factor; of several ("muls"), as of a mask, the largest."""
    with suppress(RuntimeError, TypeError, ValueError):  # a dispatch mode cannot read it
        is_one = not isinstance(value, Tensor) or value.numel() == 1
        return how + "s" * (not is_one), float(value if is_one else value.abs().max())
    return how, None
