"""Watch: hears of criterions, backwards, steps and clearing while a script runs, and changes nothing.

What is on a device is read when an optimizer steps, and never in a micro-step.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import os
import sysconfig
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, final
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data.distributed import DistributedSampler

from ...batchnorm import batchnorms
from . import private
from .criterions import count_of, hearing, reduction_of
from .ledger import Ledger, Receipts, on_host, quietly

FIRST, EVERY = 16, 16  # updates with receipts: all of the first, and then one of so many
AFTER_EACH = 4  # of them also after each backward
KEPT = 2000  # updates
PRINTED = 1 << 16  # numbers of a target, by which it is told from others
LIBRARIES = (f"{Path(torch.__file__).parent}{os.sep}", f"{Path(__file__).parents[2]}{os.sep}")
ELSEWHERE = (*LIBRARIES, "<frozen", *(sysconfig.get_path(name) + os.sep for name in ("stdlib", "purelib", "platlib")))


class Enough(SystemExit):
    """The script had as many updates as were asked for."""


@functools.cache
def is_users(path: str) -> bool:
    return not path.startswith(ELSEWHERE)


def where() -> tuple[str, str]:
    """The line of the user's code that is at work, and that of the innermost library outside of torch."""
    frame, inner = inspect.currentframe(), ""
    while frame is not None:
        path = frame.f_code.co_filename
        if not inner and not path.startswith(LIBRARIES):
            inner = f"{path}:{frame.f_lineno}"
        if is_users(path):
            return f"{path}:{frame.f_lineno}", inner
        frame = frame.f_back
    return inner, inner


class Backward:
    """A call of backward, as of a micro-step."""

    def __init__(self, line: str, drawn: int) -> None:
        self.line, self.drawn, self.begun = line, drawn, time.perf_counter()
        self.terms: list[dict[str, Any]] = []
        # Which time, the line ("": by hand), and if a loader had ended before
        self.cleared: tuple[int, str, bool] | None = None
        self.values: Receipts | None = None  # of the parameters, when it was cleared
        self.received: Receipts | None = None
        self.is_sure = True  # which optimizers it reached
        self.left: Receipts | None = None  # of gradients, after it

    def as_dict(self) -> dict[str, Any]:
        for term in self.terms:
            for key in ("seed", "low", "count", "print"):
                term[key] = None if term[key] is None else abs(float(term[key]))
            if term["divisors"] is not None:
                term["divisors"] = [(how, _number(value)) for how, value in term["divisors"]]
        return {name: getattr(self, name) for name in ("line", "drawn", "terms", "cleared")}


class Trained:
    """An optimizer, and what it has not used yet."""

    def __init__(self, optimizer: Any, place: int) -> None:
        self.optimizer, self.place, self.num = optimizer, place, 0
        self.pending: list[Backward] = []
        self.is_filled = False  # by the last of them: engines may keep gradients elsewhere
        self.events: list[tuple[str, str, int, int]] = []  # kind, line, how many backwards came before, and whose
        self.closed: Receipts | None = None  # of the gradients before they are unscaled or clipped

    def forget(self) -> None:
        self.pending, self.closed, self.events = [], None, []

    @property
    def is_waiting(self) -> bool:
        """True where a backward gave what was neither used nor cleared."""
        return bool(self.pending) and self.pending[-1].cleared is None

    @property
    def has_gradient(self) -> bool:
        return any(parameter.grad is not None for parameter in parameters_of(self.optimizer))


@final
class Watch:
    """Listens from `start` to `stop`, which puts everything back."""

    def __init__(self, model: nn.Module | None = None, most: int | None = None) -> None:
        self.most, self.ledger = most, Ledger()
        self.updates: list[dict[str, Any]] = []
        self.found: dict[tuple[str, str], dict[str, int]] = {}  # by kind and line
        self.padded: dict[str, tuple[int, int]] = {}  # by line
        self.trained: dict[int, Trained] = {}  # by the optimizer's id
        self._touches: dict[str, set[frozenset[int]]] = {}  # sets of optimizers, by the line of a backward
        self.norms: dict[str, None] = {}  # batch normalisation that trains
        self.undropped: dict[str, None] = {}  # backwards without the dropout that there is
        self._modes: dict[tuple[str, int], bool] = {}
        self._current: Backward | None = None
        self._early: list[Backward] = []  # before any optimizer was known
        self._heard: deque[dict[str, Any]] = deque(maxlen=KEPT)  # criterions since the last step
        self._num_cleared = 0
        self._stepping: Any = None  # the optimizer that steps
        self._scheduling = False
        self._scaler: Any = None
        self._drawn, self._waited, self._last = 0, 0.0, time.perf_counter()
        self._stack = ExitStack()
        if model is not None:
            self.ledger.add_root(model)
            for parameter in model.parameters():
                self.ledger.place(parameter)

    def start(self) -> None:
        self._stack.enter_context(hearing(self._see))
        clips = (
            (owner, f"clip_grad_{kind}_") for owner in (nn.utils, nn.utils.clip_grad) for kind in ("norm", "value")
        )
        before: list[tuple[Any, str, Callable[..., Any]]] = [
            *((owner, name, self._clip) for owner, name in clips),
            (Optimizer, "zero_grad", self._clear),
            (nn.Module, "zero_grad", self._clear),
            (nn.Module, "named_parameters", self.ledger.add_root),
            (DistributedSampler, "__iter__", self._pad),
            (torch.amp.GradScaler, "scale", self._scale),
            (torch.amp.GradScaler, "unscale_", self._unscale),
        ]
        around: list[tuple[Any, str, Callable[..., Any]]] = [
            *((owner, name, self._backward) for owner, name in private.BACKWARDS),
            (Optimizer, "add_param_group", self._add_group),
            (LRScheduler, "step", self._schedule),
            (torch.amp.GradScaler, "step", self._scaler_step),
            *([] if private.LOADER is None else [(private.LOADER, "__next__", self._draw)]),
        ]
        for owner, name, hear in before:
            self._stack.enter_context(patch.object(owner, name, _heard(getattr(owner, name), hear, is_first=True)))
        for owner, name, hear in around:
            self._stack.enter_context(patch.object(owner, name, _heard(getattr(owner, name), hear)))
        self._stack.callback(register_optimizer_step_pre_hook(self._before_step).remove)
        self._stack.callback(register_optimizer_step_post_hook(self._after_step).remove)
        self._stack.callback(self.ledger.disarm)

    def stop(self) -> None:
        self._stack.close()

    def note(self, kind: str, line: str, update: int) -> None:
        """Counts how often something happened at a line."""
        self.found.setdefault((kind, line), {"times": 0, "update": update})["times"] += 1

    # Micro-steps

    @quietly
    def _see(self, name: str, given: dict[str, Any], loss: Tensor) -> None:
        (line, inner), (count, rows) = where(), count_of(name, given)
        term = {"site": [line, name, inner], "reduction": reduction_of(given), "count": count, "rows": rows}
        term |= {"divisors": None, "unit": torch.finfo(loss.dtype).eps, "seed": None, "low": None}
        term["print"] = print_of(given.get("target", given.get("targets")))
        self._heard.append(term)
        node: Any = loss.grad_fn
        node.metadata["distaccum"] = term  # where `note_divisors` finds it

        loss.register_hook(functools.partial(self._take, term))  # type: ignore[no-untyped-call]  # torch's

    @quietly
    @torch.no_grad()
    def _take(self, term: dict[str, Any], seed: Tensor) -> None:
        if self._current is not None:
            term["seed"] = seed
            if seed.ndim:
                sizes = seed.abs()
                term.update({"reduction": "none", "count": (sizes > 0).sum(), "seed": sizes.max()})
                term["low"] = sizes.where(sizes > 0, torch.inf).min()
            self._current.terms.append(term)

    @property
    def _num(self) -> int:
        """Updates so far."""
        return max((one.num for one in self.trained.values()), default=0)

    def _backward(self, original: Any, *args: Any, **options: Any) -> Any:
        if self._current is not None or self._stepping is not None:  # within another, as of checkpointing, or a step
            return original(*args, **options)
        made, num = Backward(where()[0], self._drawn), self._num
        for one in self.trained.values():
            if one.is_waiting and one.is_filled and not one.has_gradient:
                self._forgo(one, "")
        if num < FIRST or (num % EVERY == 0 and num < FIRST * EVERY) or num % EVERY**2 == 0:
            self.ledger.receiving = made.received = {}
            self.ledger.arm()
            quietly(private.note_divisors)(args[0] if args else options.get("tensors"))
        else:
            self.ledger.disarm()
        quietly(self._note_modes)(made.line, num)
        self._current = made
        try:
            result = original(*args, **options)
        finally:
            self._current = self.ledger.receiving = None
        if made.received:
            owners = (self.ledger.owners.get(place, ()) for place in made.received)
            known = {frozenset[int]().union(*owners)}
            self._touches.setdefault(made.line, set()).update(known)
            if num < AFTER_EACH:
                made.left = self.ledger.receipts(range(len(self.ledger.parameters)))
        else:
            known = self._touches.get(made.line, set())
        touched, made.is_sure = frozenset[int]().union(*known), len(known) < 2
        for one in self.trained.values():
            if not touched or one.place in touched:
                one.pending, one.closed, one.is_filled = [*one.pending[-KEPT:], made], None, one.has_gradient
        if not self.trained:
            self._early = [*self._early[-KEPT:], made]
        return result

    def _note_modes(self, line: str, num: int) -> None:
        for root in self.ledger.trained_roots():
            key = line, id(root)
            if key not in self._modes:
                self._modes[key] = root.training
                self.norms |= {name: None for name, one in batchnorms(root) if one.training}
                if not root.training and any(isinstance(one, nn.Dropout) and one.p for one in root.modules()):
                    self.undropped[line] = None
            elif self._modes[key] and not root.training:
                self.note("eval", line, num)

    # Steps

    def _know(self, optimizer: Any) -> Trained:
        if id(optimizer) not in self.trained:
            self.trained[id(optimizer)] = one = Trained(optimizer, len(self.trained))
            one.pending, self._early = self._early, []
        one = self.trained[id(optimizer)]
        for parameter in parameters_of(optimizer):
            self.ledger.owners.setdefault(self.ledger.place(parameter), set()).add(one.place)
        return one

    def _add_group(self, original: Any, optimizer: Any, *args: Any, **options: Any) -> Any:
        result = original(optimizer, *args, **options)
        self._know(optimizer)
        return result

    def _close(self, one: Trained | None, kind: str = "") -> None:
        """Takes receipts of its gradients, which are unscaled, clipped or used next."""
        if one is None or not one.pending:
            return
        if one.closed is None and all(made.received is not None for made in one.pending):
            one.closed = self.ledger.receipts(self._places_of(one))
        if kind:
            one.events.append((kind, where()[0], len(one.pending), 0))

    def _before_step(self, optimizer: Any, args: Any, options: Any) -> Any:
        if self._stepping is not None or self._current is not None:  # of an optimizer's own, or in backward
            return None
        self._stepping, one = optimizer, self._know(optimizer)
        closure = args[1] if len(args) > 1 else options.get("closure")
        if closure is None:
            self._use(one)
            return None
        calls = itertools.count()

        def heard(*args: Any, **options: Any) -> Any:
            """Hears the backwards of a closure's first call; the others search within one step."""
            if next(calls):
                return closure(*args, **options)
            self._stepping = None
            try:
                return closure(*args, **options)
            finally:
                self._stepping = optimizer
                self._use(one)

        return (optimizer, heard, *args[2:]), {name: one for name, one in options.items() if name != "closure"}

    def _use(self, one: Trained) -> None:
        if one.pending:
            quietly(self._close)(one)
            self._record(one)

    def _after_step(self, optimizer: Any, *_: Any) -> None:
        one = self.trained.get(id(optimizer))
        if self._stepping is not optimizer or one is None:
            return
        self._stepping = None
        one.num += bool(one.pending)
        one.forget()
        stepped = [other.num for other in self.trained.values() if other.num]
        if self.most is not None and stepped and min(stepped) >= self.most:
            raise Enough(0)

    @quietly
    def _record(self, one: Trained) -> None:
        now, ledger = time.perf_counter(), self.ledger
        if one.num < 2:
            ledger.name()
        for kind, line, before, _ in one.events:
            lines = {made.line for made in one.pending[:before]}
            if kind != "ended" and lines & {made.line for made in one.pending[before:]}:
                self.note(kind, line, one.num)
        steps = Counter((line, whose) for kind, line, _, whose in one.events if kind == "schedule")
        used = {made.line for made in one.pending if made.cleared is None}
        for made in one.pending:  # those of another line, as of another model, are meant to be lost
            made.cleared = made.cleared if made.cleared and (made.cleared[1] or made.line not in used) else None
        record: dict[str, Any] = {"optimizer": one.place, "index": one.num, "line": where()[0]}
        record |= {"scale": 1.0 if self._scaler is None else float(self._scaler.get_scale())}
        record |= {"seconds": now - self._last, "waited": self._waited, "worked": one.pending[-1].begun - self._last}
        record |= {"schedules": {line: max(steps[key] for key in steps if key[0] == line) for line, _ in steps}}
        record |= {"backwards": [made.as_dict() for made in one.pending]}
        record["unused"] = dict(Counter(tuple(term["site"]) for term in self._heard if term["seed"] is None))
        self._heard.clear()
        if one.closed is not None:
            received = [made.received or {} for made in one.pending]
            places = sorted(set(one.closed).union(*received))
            places = [place for place in places if one.place in ledger.owners.get(place, ())]
            record |= {"places": places, "closed": on_host([one.closed], places)[0]}
            record |= {"received": on_host(received, places)}
            record |= {"values": on_host([ledger.receipts(places, of_values=True)], places)[0]}
            moved = (on_host([made.values], places)[0] != record["values"] for made in one.pending if made.values)
            record |= {"moved": any(bool(each.any()) for each in moved)}
            record |= {"left": [None if m.left is None else on_host([m.left], places)[0] for m in one.pending]}
        self._last, self._waited = now, 0.0
        if len(self.updates) < KEPT:
            self.updates.append(record)

    # Around them

    def _draw(self, original: Any, loader: Any) -> Any:
        begun = time.perf_counter()
        try:
            batch = original(loader)
        except StopIteration:
            for one in (one for one in self.trained.values() if one.is_waiting):
                one.events.append(("ended", "", len(one.pending), 0))
            raise
        self._waited += time.perf_counter() - begun
        self._drawn += 1
        return batch

    def _clear(self, cleared: Any, *_: Any, **options: Any) -> None:
        """A module or an optimizer is cleared: what was pending is lost, unless nothing was there."""
        parameters = cleared.parameters() if isinstance(cleared, nn.Module) else parameters_of(cleared)
        waiting = [] if self._stepping is not None else [one for one in self.trained.values() if one.is_waiting]
        owners = self.ledger.owners_of(parameters if waiting else ())
        for one in (one for one in waiting if one.place in owners):
            self._forgo(one, where()[0])

    def _forgo(self, one: Trained, line: str) -> None:
        """Notes that what it has not used is cleared."""
        self._num_cleared += 1
        how = self._num_cleared, line, any(kind == "ended" for kind, *_ in one.events)
        for made in (made for made in one.pending if made.cleared is None):
            made.cleared = how
        if one.pending[-1].received is not None:
            one.pending[-1].values = self.ledger.receipts(self._places_of(one), of_values=True)
        one.events, one.closed = [], None

    def _places_of(self, one: Trained) -> list[int]:
        return [place for place, owners in self.ledger.owners.items() if one.place in owners]

    def _schedule(self, original: Any, scheduler: Any, *args: Any, **options: Any) -> Any:
        if self._scheduling:
            return original(scheduler, *args, **options)
        (line, inner), optimizer = where(), getattr(scheduler, "optimizer", None)
        one = self.trained.get(id(getattr(optimizer, "optimizer", optimizer)))
        if one is not None and one.num and not (args or options or "accelerate" in inner):  # which steps once per rank
            one.events.append(("schedule", line, len(one.pending), id(scheduler)))
        self._scheduling = True
        try:
            return original(scheduler, *args, **options)
        finally:
            self._scheduling = False

    def _clip(self, *_: Any, **options: Any) -> None:
        for one in self.trained.values():
            self._close(one, "clip")

    def _pad(self, sampler: Any) -> None:
        if not sampler.drop_last and sampler.total_size > len(sampler.dataset):
            self.padded[where()[0]] = len(sampler.dataset), sampler.total_size

    def _scale(self, scaler: Any, *_: Any) -> None:
        self._scaler = scaler if scaler.is_enabled() else None

    def _unscale(self, scaler: Any, optimizer: Any) -> None:
        self._close(self.trained.get(id(optimizer)), "unscale")

    def _scaler_step(self, original: Any, scaler: Any, optimizer: Any, *args: Any, **options: Any) -> Any:
        one = self.trained.get(id(optimizer))
        quietly(self._close)(one)  # before it unscales
        result = original(scaler, optimizer, *args, **options)
        if one is not None:  # also where it overflowed, and nothing was stepped
            one.forget()
        return result

    def as_dict(self) -> dict[str, Any]:
        """Returns plain numbers, for other ranks too."""
        ledger = self.ledger
        return {
            "updates": self.updates,
            "found": self.found,
            "rest": {
                one.place: [] if self.most else [made.as_dict() for made in one.pending if made.is_sure]
                for one in self.trained.values()
            },
            "padded": self.padded,
            "names": {place: ledger.names.get(place, f"parameter {place}") for place in range(len(ledger.parameters))},
            "sharded": ledger.sharded(),
            "coarse": sorted(ledger.coarse),
            "vectors": [place for place, one in enumerate(ledger.parameters) if one.ndim < 2],
            "bytes": [one.numel() * one.element_size() for one in ledger.parameters],
        }


def parameters_of(optimizer: Any) -> Iterator[Any]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


@torch.no_grad()
def print_of(target: Any) -> Tensor | None:
    """A number by which targets are told apart; 0 for those that are all alike."""
    if not isinstance(target, Tensor) or not target.ndim:
        return None
    numbers = target[: max(1, PRINTED * len(target) // max(1, target.numel()))].flatten()
    ramp = torch.arange(numbers.numel(), device=target.device, dtype=torch.float32)
    return ((ramp - (numbers.numel() - 1) / 2) * numbers).sum()


def _number(value: Any) -> float | None:
    with suppress(RuntimeError, TypeError, ValueError):  # several numbers, or one that a dispatch mode cannot read
        return float(value.detach() if isinstance(value, Tensor) else value)
    return None


def _heard(original: Any, hear: Callable[..., Any], is_first: bool = False) -> Any:
    """Calls `hear` with the function and its arguments in its place, or before it with these alone."""

    @functools.wraps(original)
    def around(*args: Any, **options: Any) -> Any:
        if not is_first:
            return hear(original, *args, **options)
        quietly(hear)(*args, **options)
        return original(*args, **options)

    return around
