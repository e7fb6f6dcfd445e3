"""An optimizer, and the backwards that it has not used yet."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any, final

from torch import Tensor

from ..norms import local
from .ledger import Ledger, Receipts, on_host, quietly
from .private import version

KEPT = 2000  # backwards of an update, and updates
CHANGED = "changed between the last backward and the step"
WRITTEN = "written to between two backwards"
ROW = ("line", "inner", "batch", "terms", "own", "cleared", "num_reached")
AFTER = ("late", "again", "grows")  # kinds of what happens after the step of an update


@final
class Backward:
    """A call of backward, such as a micro-step's."""

    def __init__(self, line: str, inner: str, batch: tuple[int, int], scaler: Any) -> None:
        self.line = line
        self.inner = inner
        self.batch = batch
        self.scaler = scaler
        self.terms: list[dict[str, Any]] = []
        self.own: list[Any] = []  # by which numbers each addend that is no criterion's is divided
        # The backwards before the clearing, its line ("": by hand), and whether a loader had ended before
        self.cleared: tuple[int, str, bool] | None = None
        self.is_used = False  # a step of any optimizer used it
        self.values: Receipts | None = None  # of the parameters, at the clearing
        self.received: Receipts | None = None
        self.is_sure = True  # it is known which optimizers it reached
        self.num_reached = 0  # of them
        self.left: Receipts | None = None  # of the gradients after it

    def as_dict(self, places: list[int] | None = None) -> dict[str, Any]:
        """Returns what is known about it, in plain numbers, with its receipts of the parameters in these places."""
        row: dict[str, Any] = numbers_in({name: getattr(self, name) for name in ROW})
        receipts = {"received": self.received or {}, "left": self.left} if places is not None else {}
        return row | {name: on_host(some, places or []) for name, some in receipts.items() if some is not None}


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
        self._closed: Receipts | None = None  # of the gradients before they are unscaled or clipped
        self.settled: list[tuple[Any, Any]] = []  # the gradients after that, and how far over a bound they were
        self._touched: set[str] = set()  # how gradients were changed between its backwards, and before the step

    @property
    def is_waiting(self) -> bool:
        """True if a backward gave gradients that were neither used nor cleared."""
        return bool(self.pending) and self.pending[-1].cleared is None

    @property
    def is_spent(self) -> bool:
        """True while the gradient of the last step stands there, untouched."""
        return not self.pending and self.is_untouched

    @property
    def is_untouched(self) -> bool:
        """True while the gradient of the last backward or step stands there."""
        return self._mark is not None and self._mark == self._gradient()

    @property
    def is_elsewhere(self) -> bool:
        """True where another gradient is in the place of that of the last backward or step."""
        now = self._gradient()
        return bool(now and self._mark and now[0] != self._mark[0])

    @property
    def scale(self) -> float:
        """By what a scaler multiplies its gradients."""
        scaler: Any = self.pending[-1].scaler if self.pending else None
        return 1.0 if scaler is None else float(scaler.get_scale())

    @property
    def is_unscaled(self) -> bool:
        return any(kind in ("unscale", "scaler") for kind, *_ in self.events)

    def _gradients(self) -> Iterator[tuple[int, int]]:
        """Its gradients, and how often each was changed."""
        every = (parameter.grad for parameter in parameters_of(self.optimizer()) if parameter.grad is not None)
        return ((id(gradient), version(gradient)) for gradient in every)

    def _gradient(self) -> tuple[int, int] | None:
        return next(self._gradients(), None)

    def has_gradient(self) -> bool:
        """True if a gradient is there that is not 0."""
        return any(bool(local(p.grad).norm()) for p in parameters_of(self.optimizer()) if p.grad is not None)

    @property
    def way(self) -> Any:
        """Shows without receipts that an update is made as others are."""
        kinds = sorted({(kind, line) for kind, line, *_ in self._last_events})
        return len(self.pending), *kinds, *sorted(self._touched)

    def touch(self) -> None:
        """Notes that gradients were changed, or cleared by hand, since the last backward."""
        now = self._gradient()
        if self._mark not in (None, now):
            self._touched.add(WRITTEN if now else "set to None between two backwards")
            if now is None:
                self.forgo("")

    def add(self, made: Backward) -> None:
        made.num_reached += 1
        self.pending = [*self.pending[-KEPT:], made]
        self._touched |= {WRITTEN} if self.settled else set()
        self._open()
        self._mark = self._gradient()

    def note(self, kind: str, line: str = "", whose: Any = 0) -> None:
        events = self._last_events if kind in AFTER else self.events
        events.append((kind, line, len(self.pending), whose))

    def _open(self) -> None:
        self._closed = None
        self.settled = []

    def settle(self, over: Any) -> None:
        """Notes that its gradients were unscaled or clipped, where they were so far over a bound."""
        self.settled.append(([*self._gradients()], over))

    @quietly
    def close(self) -> None:
        """Takes receipts of its gradients, before they are unscaled, clipped or used; again if they have changed."""
        if self.settled and self.settled[-1][0] != [*self._gradients()]:
            self._touched.add(CHANGED)
            is_whole = self._closed and all(over < 1 for _, over in self.settled)  # else clipping is in them too
            rows = self._ledger.receipts(self._places()) if is_whole else {}
            self._closed = {place: row * (self.scale if self.is_unscaled else 1.0) for place, row in rows.items()}
        if self._closed is None and self.pending:
            self._touched |= {CHANGED} if self._mark != self._gradient() else set()
            is_seen = all(made.received is not None for made in self.pending)
            self._closed = self._ledger.receipts(self._places()) if is_seen else {}

    def forgo(self, line: str) -> None:
        """Notes that gradients which it has not used are cleared."""
        how = len(self.pending), line, any(kind == "ended" for kind, *_ in self.events)
        for made in (made for made in self.pending if made.cleared is None):
            made.cleared = how
        if self.pending[-1].received is not None:
            self.pending[-1].values = self._ledger.receipts(self._places(), of_values=True)
        self.events = []
        self._open()

    def forget(self) -> None:
        self._mark = self._gradient()
        self.pending = []
        self.events = []
        self._open()
        self._touched = set()

    def rest(self) -> list[dict[str, Any]]:
        """Backwards that surely reached it, and that no step used."""
        if self.optimizer() is not None and self.is_waiting:
            self.touch()  # as where a window of ours skips its step
        return [made.as_dict() for made in self.pending if made.is_sure and not made.is_used]

    def record(self) -> dict[str, Any]:
        """Returns what is known about the update, in plain numbers."""
        used = {made.line for made in self.pending if made.cleared is None}
        for made in self.pending:  # cleared by hand: backwards of other lines (another model's) are meant to go
            made.cleared = made.cleared if made.cleared and (made.cleared[1] or made.line not in used) else None
            made.is_used |= made.cleared is None
        self.pending = [made for made in self.pending if not (made.cleared and made.is_used)]
        self._last_events = self.events
        is_kept = self.is_elsewhere  # while it is cleared here
        self._mark = self._gradient()
        held = {place: self._ledger.parameter(place) for place in self._places()}
        update: dict[str, Any] = {
            "optimizer": self.place,
            "index": self.num,
            "events": self.events,
            "scale": self.scale if self.is_unscaled else 1.0,
            "left_scaled": 1.0 if self.is_unscaled else self.scale,
            "touched": sorted(self._touched),
            "absent": [place for place, p in held.items() if p.grad is None and p.requires_grad],
            "moved": is_kept and any(made.cleared for made in self.pending),
            "is_sure": all(made.is_sure for made in self.pending),
        }
        places: list[int] | None = None
        if self._closed:
            every = {*self._closed}.union(*(made.received or {} for made in self.pending))
            places = sorted(every.intersection(self._places()))
            values = on_host(self._ledger.receipts(places, of_values=True), places)
            kept = (on_host(made.values, places) for made in self.pending if made.values)
            update["moved"] |= any(not values.equal(row) for row in kept)
            update |= {"places": places, "closed": on_host(self._closed, places), "values": values}
        return update | {"backwards": [made.as_dict(places) for made in self.pending]}

    def _places(self) -> list[int]:
        return [place for place, owners in self._ledger.owners.items() if self.place in owners]


def parameters_of(optimizer: Any) -> Iterable[Any]:
    return (parameter for group in getattr(optimizer, "param_groups", ()) for parameter in group["params"])


def numbers_in(value: Any) -> Any:
    """Reads numbers, of several the largest, in place in a dict; None where a dispatch mode cannot read."""
    if isinstance(value, dict):
        value.update({key: numbers_in(each) for key, each in value.items()})
        return value
    if isinstance(value, list | tuple):
        return type(value)(map(numbers_in, value))
    if not isinstance(value, Tensor):
        return value
    with suppress(RuntimeError, TypeError, ValueError):
        return abs(float(value if value.numel() == 1 else value.abs().max()))
    return None
