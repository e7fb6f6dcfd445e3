"""Trace: when this rank did what, in a file that Perfetto and chrome://tracing open.

A span is a tuple until it is written: at the end of a window, where the last writing was 20 ms ago or more.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn

from ..engines import Engine
from ..law.batches import batch_length
from ..law.shares import as_int_if_whole
from ..law.update import Waitable
from ..window.observer import Complete, Observer
from ..window.status import DONE, Status
from .trace_file import DEVICE, HOST, Span, TraceFile, head_of

MOST_KEPT = 256  # spans
SECONDS_KEPT = 0.02
LEAST = 100_000  # nanoseconds of a collective

now = time.perf_counter_ns


@final
class Trace(Observer):
    """One rank's file. The arguments of its spans say to which update, micro-batch and attempt they belong."""

    def __init__(self, folder: str | os.PathLike[str], engine: Engine, device: torch.device) -> None:
        part = f"part{engine.peers.part}" if engine.peers.part else ""  # of ranks that share samples, the first is here
        self.path = Path(folder).absolute() / part / f"rank{engine.peers.rank}.json"
        self._device = _Device(device) if device.type == "cuda" else None
        self._engine: Engine = weakref.proxy(engine)  # which holds this trace
        self._edges = _Edges()
        try:
            self._file = TraceFile(self.path, head_of(engine, device))
        except BlockingIOError:
            raise ValueError(
                f"trace={str(folder)!r} is the folder that another Accumulator writes its trace to; give each a "
                "folder of its own, or delete the other Accumulator first (del)"
            ) from None
        except OSError as error:
            raise ValueError(
                f"trace={str(folder)!r} cannot be written ({error.strerror}); name a folder that this process may make "
                "and write to"
            ) from error
        self._spans: list[Span] = []
        self._written = now()
        self._depth = 0  # of spans that are open
        self._gathers = 0  # the same number on all ranks
        self._reductions = 0  # the same, in this window
        self._update, self._attempt, self._is_undone = -1, 0, False
        self._here: dict[str, Any] = {}  # arguments of each span
        self._planned = 0  # when the window's plan began
        self._laid_out = 0  # wrappers whose buckets had their places then
        self._sent: float | None = None  # when this rank's part of the record was
        self._end_as: str | None = None  # the outcome of the window, which ends when the open spans do
        self._about: dict[str, Any] = {}  # the micro-batch
        self._part = 0
        self._forward: int | None = None  # when it began
        self._backward: int | None = None
        self._finishing: int | None = None
        self._begun: Any = None  # a device event
        # Not the trace itself, which this would keep.
        weakref.finalize(self, _write_rest, self._file, self._spans, self._device, os.getpid())

    # A window

    @contextmanager
    def planning(self, update: int) -> Iterator[None]:
        """Drawing, counting and gathering."""
        self._attempt = self._attempt + 1 if update == self._update and self._is_undone else 0
        self._update, self._is_undone, self._planned, self._reductions = update, False, now(), 0
        self._here = {"update": update, **({"attempt": self._attempt} if self._attempt else {})}
        self._about, self._part, self._end_as = {}, 0, None
        self._laid_out = self._engine.num_laid_out()
        with self.span("plan", update=update):
            yield

    def forward(self, at: Status) -> None:
        if at.source.place != self._about.get("micro_batch"):
            self._part = 0
            self._about = {"micro_batch": at.source.place}
            if at.source.is_stand_in:
                self._about["stand_in"] = True
            else:
                pairs = zip(at.plan.counts, at.source.counts_here, strict=True)
                self._about |= {name: as_int_if_whole(count) for name, count in pairs}
                if "samples" not in self._about:
                    self._about |= _samples(at.source.micro_batches()[0])
        self._begun = self._device.mark() if self._device else None
        self._forward = now()

    def _end_forward(self) -> None:
        if self._forward is not None:
            self._add("forward", self._forward, now(), self._begun)
            self._forward = None

    def before_backward(self, at: Status, reduces: bool) -> None:
        is_trunk = at.turn is DONE  # of heads()
        if not is_trunk:
            self._end_forward()
        self._forward = None
        if is_trunk:
            self._about["trunk"] = True
        elif at.has_more_parts or self._part:
            self._about["part"] = self._part
        if self._engine.peers.num_ranks > 1 and reduces:
            # Gradients do not come to the parameters one by one.
            whole = self._engine.lockstep or self._engine.owns_step
            self._edges.watch([] if whole else at.parameters, self._device)
        self._begun = self._device.mark() if self._device else None
        self._backward = now()

    def after_backward(self, at: Status) -> None:
        end, begun = now(), self._begun
        assert self._backward is not None
        self._add("backward", self._backward, end, begun)
        if self._edges.watches:
            first, last, event = self._edges.take()
            about = {} if last is None else {"computed": last / 1000}
            began = self._backward if first is None else first
            self._add_reduction(began, end, event or begun, about)
        self._backward = None
        self._part += 1

    def finishing(self, at: Status) -> None:
        self._finishing, self._begun = now(), self._device.mark() if self._device else None

    def complete(self, complete: Complete) -> None:
        self._end_finishing()

    def _end_finishing(self) -> None:
        """The engine may have reduced after the last backward."""
        end, began = now(), self._finishing
        self._finishing = None
        if began is None:
            return
        was_reduced = not self._engine.will_reduce(True) or end - began > LEAST
        if self._engine.peers.num_ranks > 1 and was_reduced:
            self._about = {}
            self._add_reduction(began, end, self._begun, {"by_hand": True})

    def end(self, outcome: str) -> None:
        if self._depth:
            self._end_as = outcome
            return
        self._edges.drop()
        self._end_finishing()
        for name, began in (("forward", self._forward), ("backward", self._backward)):
            if began is not None:
                self._about["unfinished"] = True
                self._add(name, began, now(), self._begun)
        self._forward = self._backward = self._begun = None
        self._about = {}
        self._is_undone = outcome == "undone"
        name = "undone window" if self._is_undone else "window"
        about = {**self._here, "outcome": outcome}
        if self._engine.num_laid_out() > self._laid_out:
            about["lays_out"] = True
        self._spans.append((name, self._planned, now(), about, None))
        if self._is_undone or len(self._spans) >= MOST_KEPT or now() - self._written > SECONDS_KEPT * 1e9:
            self.write()

    # Any span; a wait of the library ends the forward that is open

    @contextmanager
    def span(self, name: str, **about: Any) -> Iterator[None]:
        self._end_forward()
        self._end_finishing()
        began, begun = now(), self._device.mark() if self._device and name == "step" else None
        self._depth += 1
        try:
            yield
        except BaseException:
            about["failed"] = True
            raise
        finally:
            self._depth -= 1
            end = self._device.mark() if self._device and begun is not None else None
            here = {**self._here, **about}
            if name == "step" and self._sent is not None:
                here["sent"], self._sent = self._sent, None
            self._spans.append((name, began, now(), here, None if end is None else (begun, end)))
            if self._end_as is not None and not self._depth:
                outcome, self._end_as = self._end_as, None
                self.end(outcome)

    def gathering(self) -> AbstractContextManager[None]:
        self._end_forward()
        self._end_finishing()  # before anything is sent
        number, self._gathers = self._gathers, self._gathers + 1
        return self.span("waiting", gather=number, arrived=now() / 1000)

    def watched(self, work: Waitable) -> Waitable:
        """The same; what waits for it is seen, and when it was sent."""
        self._sent = now() / 1000
        return _Watched(work, self)

    def write(self) -> None:
        self._written = now()
        _write(self._file, self._spans, self._device)

    @property
    def update(self) -> int:
        """The index of the one that is traced."""
        return self._update

    def _add(self, name: str, began: int, end: int, begun: Any = None, **about: Any) -> None:
        ended = self._device.mark() if self._device is not None else None
        events = None if begun is None or ended is None else (begun, ended)
        self._spans.append((name, began, end, {**self._here, **self._about, **about}, events))

    def _add_reduction(self, began: int, end: int, begun: Any, about: dict[str, Any]) -> None:
        self._add("reduction", began, end, begun, number=self._reductions, **about)
        self._reductions += 1


class _Watched:
    def __init__(self, work: Waitable, trace: Trace) -> None:
        self._work, self._is_seen = work, False
        self._trace = weakref.ref(trace)  # an `Update` may keep this
        self._update = trace.update

    def wait(self) -> Any:
        trace = self._trace()
        if self._is_seen or trace is None:
            return self._work.wait()
        self._is_seen = True
        with trace.span("waiting", on="the record of the loss", update=self._update):
            return self._work.wait()


class _Edges:
    """When the first and the last gradient of a backward are ready.

    The first such backward looks at all parameters; those after it at the two that were first and last there.
    """

    def __init__(self) -> None:
        self.watches = False
        self._known: tuple[nn.Parameter, ...] | None = None
        self._seen: dict[int, tuple[int, nn.Parameter]] = {}
        self._hooks: list[Any] = []
        self._event: Any = None

    def watch(self, parameters: Sequence[nn.Parameter], device: _Device | None) -> None:
        self.drop()
        self.watches = True
        for one in parameters if self._known is None else self._known if parameters else ():
            if one.requires_grad:
                hook = one.register_hook(self._noting(one, device))  # type: ignore[no-untyped-call]  # torch's
                self._hooks.append(hook)

    def _noting(self, parameter: nn.Parameter, device: _Device | None) -> Any:
        def note(_: Tensor) -> None:
            if not self._seen and device is not None:
                self._event = device.mark()
            self._seen[id(parameter)] = now(), parameter

        return note

    def take(self) -> tuple[int | None, int | None, Any]:
        """First, last, and the device's event of the first; None where none was seen."""
        seen, event = list(self._seen.values()), self._event
        is_as_known = self._known is None or {id(one) for one in self._known} == set(self._seen)
        self.drop()
        if not is_as_known:
            self._known = None  # another graph: looks at all of them in the next
            return None, None, None
        if not seen:
            return None, None, None
        if self._known is None:
            self._known = (seen[0][1],) if len(seen) == 1 else (seen[0][1], seen[-1][1])
        return seen[0][0], seen[-1][0], event

    def drop(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self.watches, self._hooks, self._seen, self._event = False, [], {}, None


class _Device:
    """Events in the device's queue, read when they are done: nobody waits for them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        torch.cuda.synchronize(device)  # once: host and device are then at the same place
        self._anchor, self._anchor_at = self.mark(), now()
        self.pending: list[Span] = []

    def mark(self) -> Any:
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's
        event.record(torch.cuda.current_stream(self._device))
        return event

    def done(self, spans: list[Span]) -> list[Span]:
        """With the device's times in the place of the host's."""
        self.pending += [one for one in spans if one[4] is not None]
        found: list[Span] = []
        waiting = []
        newest: tuple[int, Any] = self._anchor_at, self._anchor
        for one in self.pending:
            name, _, _, about, events = one
            if events is None or not events[1].query():
                waiting.append(one)
                continue
            began, end = (self._anchor_at + int(1e6 * self._anchor.elapsed_time(event)) for event in events)
            found.append((name, began, end, {k: v for k, v in about.items() if k != "computed"}, None))
            newest = max(newest, (end, events[1]), key=lambda marked: marked[0])
        self.pending = waiting
        self._anchor_at, self._anchor = newest  # an elapsed time is a float32, which is coarse after hours
        return found


def _write(file: TraceFile, spans: list[Span], device: _Device | None) -> None:
    file.write(spans, HOST)
    if device is not None:
        file.write(device.done(spans), DEVICE)
    spans.clear()


def _write_rest(file: TraceFile, spans: list[Span], device: _Device | None, process: int) -> None:
    if os.getpid() == process:  # not a worker that was forked
        _write(file, spans, device)
        file.close()


def _samples(micro_batch: Any) -> dict[str, int]:
    try:
        return {"samples": batch_length(micro_batch)}
    except (TypeError, ValueError):  # none that can be seen
        return {}
