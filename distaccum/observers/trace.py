"""Trace: when this rank did what, in a file that Perfetto and chrome://tracing open.

A span is a tuple until it is written: at the end of a window, where the last writing was 20 ms ago or more. The file is
whole JSON after each writing: its last bytes close it, and the next spans are written over them.
"""

from __future__ import annotations

import json
import os
import platform
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn

from ..law.batches import batch_length
from ..law.errors import warn
from ..law.shares import tidy
from ..law.update import Waitable

if TYPE_CHECKING:
    from ..engines import Engine
    from ..window.window import Window


VERSION = 1  # of the file's arguments
TAIL = b"\n]}\n"
MOST_KEPT = 256  # spans
SECONDS_KEPT = 0.02
LEAST = 100_000  # nanoseconds of a collective
HOST, DEVICE = range(2)  # threads of the file
NOTHING: AbstractContextManager[None] = nullcontext()
now = time.perf_counter_ns
Span = tuple[str, int, int, dict[str, Any], tuple[Any, Any] | None]  # name, begin and end, arguments, device events
_open: weakref.WeakValueDictionary[Path, Trace] = weakref.WeakValueDictionary()  # in this process


def span(trace: Trace | None, name: str, **about: Any) -> AbstractContextManager[None]:
    return NOTHING if trace is None else trace.span(name, **about)


def gathering(trace: Trace | None) -> AbstractContextManager[None]:
    """For the wait of a collective that starts here."""
    return NOTHING if trace is None else trace.gathering()


@final
class Trace:
    """One rank's file. The arguments of its spans say to which update, micro-batch and attempt they belong."""

    def __init__(self, folder: str | os.PathLike[str], engine: Engine, device: torch.device) -> None:
        self.path = Path(folder).absolute() / f"rank{engine.peers.rank}.json"
        if self.path in _open:
            raise ValueError(
                f"trace={str(folder)!r} is where another Accumulator of this process writes its trace; give each a "
                "folder of its own, or let go of the other one first (del)"
            )
        self._device = _Device(device) if device.type == "cuda" else None
        self._engine: Engine = weakref.proxy(engine)  # which has this trace
        self._edges = _Edges()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            _move_away(self.path)
            self._file = _File(self.path, _head(engine, device))
        except OSError as error:
            raise ValueError(
                f"trace={str(folder)!r} cannot be written ({error.strerror}); name a folder that this process may make "
                "and write to"
            ) from error
        _open[self.path] = self
        self._spans: list[Span] = []
        self._written = now()
        self._depth = 0  # of spans that are open
        self._gathers = 0  # as many on all ranks
        self._reductions = 0  # likewise, in this window
        self._update, self._attempt, self._is_undone = -1, 0, False
        self._here: dict[str, Any] = {}  # for the arguments of each span
        self._planned = 0  # when the window's plan began
        self._laid_out = 0  # wrappers' buckets, by then
        self._sent: float | None = None  # when this rank's part of the record was
        self._end_as: str | None = None  # what became of the window, which ends when the open spans do
        self._about: dict[str, Any] = {}  # the micro-batch
        self._part = 0
        self._forward: int | None = None  # when it began
        self._backward: int | None = None
        self._begun: Any = None  # a device event
        # Not the trace itself, which this would keep.
        weakref.finalize(self, _write_rest, self._file, self._spans, self._device, os.getpid())

    # A window

    @contextmanager
    def planning(self, update: int, *, ahead: bool = False) -> Iterator[None]:
        """Drawing, counting and telling; `ahead`: the first two, while the window before is still at work."""
        if not ahead:
            self._attempt = self._attempt + 1 if update == self._update and self._is_undone else 0
            self._update, self._is_undone, self._planned, self._reductions = update, False, now(), 0
            self._here = {"update": update, **({"attempt": self._attempt} if self._attempt else {})}
            self._about, self._part, self._end_as = {}, 0, None
            self._laid_out = self._engine.num_laid_out()
        with self.span("plan", update=update, **({"ahead": True} if ahead else {})):
            yield

    def next_micro_batch(self, window: Window) -> None:
        """Its forward begins."""
        place = window._position
        self._about = {"micro_batch": place}
        if window.stand_in:
            self._about["stand_in"] = True
        else:
            self._about |= {n: tidy(count) for n, count in zip(window._names, window._counts[place], strict=True)}
            if "samples" not in self._about:
                self._about |= _samples(window._micro_batches[0])
        self._part = 0
        self._begin_forward()

    def end_forward(self) -> None:
        if self._forward is not None:
            self._add("forward", self._forward, now(), self._begun)
            self._forward = None

    def begin_backward(self, window: Window, reduce: bool, *, of_trunk: bool) -> None:
        if not of_trunk:
            self.end_forward()
        self._forward = None
        if of_trunk:
            self._about["trunk"] = True
        elif window._more_parts or self._part:
            self._about["part"] = self._part
        if self._engine.peers.num_ranks > 1 and self._engine.will_reduce(reduce):
            whole = (
                self._engine.lockstep or self._engine.owns_step
            )  # gradients do not come to the parameters one by one
            self._edges.watch([] if whole else window._parameters, self._device)
        self._begun = self._device.mark() if self._device else None
        self._backward = now()

    def end_backward(self, window: Window) -> None:
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
        if window._more_parts:
            self._begin_forward()

    @contextmanager
    def by_hand(self) -> Iterator[None]:
        """What is reduced after the last backward."""
        began, begun = now(), self._device.mark() if self._device else None
        try:
            yield
        finally:
            end = now()
            is_left = not self._engine.will_reduce(True) or end - began > LEAST  # else nothing was sent
            if self._engine.peers.num_ranks > 1 and is_left:
                self._about = {}
                self._add_reduction(began, end, begun, {"by_hand": True})

    def end(self, outcome: str) -> None:
        """The window is over: "stepped", "undone", or why it was skipped."""
        if self._depth:
            self._end_as = outcome
            return
        self._edges.drop()
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

    # Any span

    @contextmanager
    def span(self, name: str, **about: Any) -> Iterator[None]:
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
        number, self._gathers = self._gathers, self._gathers + 1
        return self.span("waiting", gather=number, arrived=now() / 1000)

    def watched(self, work: Waitable) -> Waitable:
        """The same; what waits for it is seen, and when it was sent."""
        self._sent = now() / 1000
        return _Watched(work, self)

    def write(self) -> None:
        self._written = now()
        _write(self._file, self._spans, self._device)

    def _begin_forward(self) -> None:
        self._begun = self._device.mark() if self._device else None
        self._forward = now()

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
        self._update = trace._update

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


class _File:
    """Whole JSON after each `write`."""

    def __init__(self, path: Path, head: dict[str, Any]) -> None:
        self._pid = head["otherData"]["rank"]
        self._file: Any = path.open("wb", buffering=0)
        names = [
            {"name": "process_name", "ph": "M", "pid": self._pid, "args": {"name": f"rank {self._pid}"}},
            {"name": "process_sort_index", "ph": "M", "pid": self._pid, "args": {"sort_index": self._pid}},
            {"name": "thread_name", "ph": "M", "pid": self._pid, "tid": HOST, "args": {"name": "host"}},
            {"name": "thread_name", "ph": "M", "pid": self._pid, "tid": DEVICE, "args": {"name": "device"}},
        ]
        first = json.dumps({**head, "traceEvents": []})[:-2].encode()
        self._file.write(first + b"\n" + b",\n".join(json.dumps(one).encode() for one in names) + TAIL)

    def write(self, spans: Sequence[Span], thread: int) -> None:
        if self._file is None or not spans:
            return
        lines = (
            f',\n{{"name":"{name}","ph":"X","pid":{self._pid},"tid":{thread},"ts":{began / 1000:.3f},'
            f'"dur":{(end - began) / 1000:.3f},"args":{json.dumps(about)}}}'
            for name, began, end, about, _ in spans
        )
        try:
            whole = self._file.seek(-len(TAIL), os.SEEK_END)
            left = memoryview("".join(lines).encode() + TAIL)
            while left:  # a disk that fills up takes a part, and refuses the next
                left = left[self._file.write(left) :]
        except OSError as error:
            with suppress(OSError):  # as it was, in bytes that it has already
                self._file.seek(whole)
                self._file.write(TAIL)
                self._file.truncate()
            self.close()
            warn(f"the trace ends here ({error.strerror}); training goes on")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _write(file: _File, spans: list[Span], device: _Device | None) -> None:
    file.write(spans, HOST)
    if device is not None:
        file.write(device.done(spans), DEVICE)
    spans.clear()


def _write_rest(file: _File, spans: list[Span], device: _Device | None, process: int) -> None:
    if os.getpid() == process:  # not a worker that was forked
        _write(file, spans, device)
        file.close()


def _head(engine: Engine, device: torch.device) -> dict[str, Any]:
    boot = Path("/proc/sys/kernel/random/boot_id")  # processes that have it in common share a clock
    about = {
        "distaccum": VERSION,
        "rank": engine.peers.rank,
        "ranks": engine.peers.num_ranks,
        "engine": engine.name,
        "sync": engine.sync,
        "gathers": engine.gathers,
        "host": platform.node(),
        "boot": boot.read_text().strip() if boot.exists() else platform.node(),
        "anchor": {"perf_counter_ns": now(), "time_ns": time.time_ns()},
        "device": str(device),
        "device_times": device.type == "cuda",
    }
    return {"displayTimeUnit": "ms", "otherData": about}


def _move_away(path: Path) -> None:
    """What an earlier run left: rank0.json becomes rank0.1.json, or the next number that is free."""
    if path.exists():
        number = 1
        while (other := path.with_suffix(f".{number}.json")).exists():
            number += 1
        path.rename(other)


def _samples(micro_batch: Any) -> dict[str, int]:
    try:
        return {"samples": batch_length(micro_batch)}
    except (TypeError, ValueError):  # none that can be seen
        return {}
