"""Watch: notes criterions, backwards, steps and clearing while a script runs, and changes nothing.

Numbers on a device are read when an optimizer steps, never in a micro-step.
"""

from __future__ import annotations

import functools
import gc
import itertools
import math
import mmap
import os
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, final
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..engines.base import Gradient
from . import private
from .criterions import count_of, hearing, is_over_pairs, reduction_of, unit_of
from .ledger import ROW, Ledger, quietly
from .lines import OURS, is_in_trainer, where
from .loaders import Loaders
from .modes import Modes
from .schedules import Schedules
from .share import place_in_job
from .trained import Backward, Trained, parameters_of

FIRST, EVERY = 16, 16  # receipts are taken in the first updates, then in every 16th, and where something is new
AFTER_EACH = 4  # updates with receipts after each backward too
KEPT = 2000  # updates
CLIPPING = (nn.utils, nn.utils.clip_grad)  # modules that have torch's functions
PRINTED = 1 << 16  # the most numbers of a target that its print is made of


_numbers = itertools.count()


class Enough(SystemExit):
    """Ends the script after as many updates as were asked for."""


@final
class Watch:
    """Notes what happens inside `listening()`, which puts everything back."""

    def __init__(self, model: nn.Module | None = None, most: int | None = None) -> None:
        self.most = most
        self.ledger = Ledger()
        self.is_over = False  # as many updates were made as were asked for
        self.updates: list[dict[str, Any]] = []
        self.notes: dict[str, None] = {}  # about what is no mistake
        self.unjudged: dict[str, None] = {}
        self.loaders = Loaders()
        self.trained: list[Trained] = []  # also those whose optimizer is gone
        self._touches: dict[str, set[frozenset[int]]] = {}  # sets of optimizers, by the line of a backward
        self.modes = Modes(self.notes)
        self.schedules = Schedules()
        self.key = f"distaccum {next(_numbers)}"  # of a criterion in its node
        self.forked = mmap.mmap(-1, 1)  # its child sets a byte, where it trains
        self._process = os.getpid()
        self._num = 0  # updates so far
        self._ways: set[Any] = set()  # of updates with receipts
        self._num_new = 0  # updates that are to have receipts, since the way was new
        self._current: Backward | None = None
        self._heard: deque[tuple[Any, Any, bool]] = deque(maxlen=KEPT)  # criterions since the last step
        self._stepping: Any = None  # the optimizer that steps
        self._scheduling = False
        self._scaler: Any = None  # that has scaled a loss since the last step
        self._has_stepped = False  # since it did
        if model is not None:
            self.ledger.add_root(model)
            for parameter in model.parameters():
                self.ledger.place(parameter)

    @contextmanager
    def listening(self) -> Iterator[None]:
        before: list[tuple[Any, str, Callable[..., Any]]] = [
            (Optimizer, "zero_grad", self._clear),
            (nn.Module, "zero_grad", self._clear),
            (nn.Module, "named_parameters", self.ledger.add_root),
            (DistributedDataParallel, "__init__", self.ledger.add_root),
            (Gradient, "clip", self._close),
            (torch.amp.GradScaler, "scale", self._scale),
            (torch.amp.GradScaler, "unscale_", self._unscale),
        ]
        around: list[tuple[Any, str, Callable[..., Any]]] = [
            *((owner, name, functools.partial(self._backward, at)) for owner, name, at in private.backwards()),
            *((owner, f"clip_grad_{kind}_", self._clip) for owner in CLIPPING for kind in ("norm", "value")),
            (Optimizer, "add_param_group", self._add_group),
            (LRScheduler, "step", self._schedule),
            (torch.autograd, "grad", self._grad),
            (torch.amp.GradScaler, "step", self._scaler_step),
            *([] if private.LOADER is None else [(private.LOADER, "__next__", self._draw)]),
        ]
        with ExitStack() as stack:
            if unheard := stack.enter_context(hearing(self._see, self.key)):
                self.unjudged[f"{', '.join(unheard)}, in whose place another library has put its own"] = None
            for calls, is_first in ((before, True), (around, False)):
                for owner, name, hear in calls:
                    stack.enter_context(patch.object(owner, name, _heard(getattr(owner, name), hear, is_first)))
            stack.callback(register_optimizer_step_pre_hook(self._before_step).remove)
            stack.callback(register_optimizer_step_post_hook(self._after_step).remove)
            stack.callback(self.ledger.disarm)
            gc.collect()  # so that ranks know the same optimizers
            for older in gc.get_objects():
                if issubclass(type(older), Optimizer) and "optimizer" not in vars(older):  # no wrapper, as Accelerate's
                    self._know(older)
            yield

    @quietly
    def _see(self, name: str, given: dict[str, Any], loss: Tensor) -> None:
        count, rows = count_of(name, given)
        known = {"reduction": reduction_of(given), "unit": unit_of(name, given), "count": count, "rows": rows}
        if self._is_receiving():
            known |= {"print": print_of(given.get("target", given.get("targets"))), "pairs": is_over_pairs(name, given)}
        term = _term(name, loss.dtype, **known)
        self._heard.append((term, self.loaders.now(), self.ledger.is_training()))
        node: Any = loss.grad_fn
        node.metadata[self.key] = term  # where `note_divisors` finds it
        loss.register_hook(functools.partial(self._take, term))  # type: ignore[no-untyped-call]  # torch's

    @quietly
    @torch.no_grad()
    def _take(self, term: dict[str, Any], seed: Tensor) -> None:
        term["went"] = True
        if self._current is not None:
            term["seed"] = seed
            if seed.ndim:
                sizes = seed.abs()
                kept = term["count"]
                counts = sizes > 0
                if isinstance(kept, Tensor) and kept.shape == sizes.shape:  # ignored targets give nothing
                    counts = counts & kept
                    sizes = sizes * kept
                term.update({"reduction": "none", "count": counts.sum(), "seed": sizes.max()})
                term["low"] = sizes.where(counts, torch.inf).min()
            self._current.terms.append(term)

    def _backward(self, at: int, original: Any, *args: Any, **options: Any) -> Any:
        if not self.is_here() or self._current is not None or self._stepping is not None:
            return original(*args, **options)
        self._stay_over()
        made = Backward(where()[0], self.loaders.batch())
        num = self._num
        made.scaler = None if self._has_stepped else self._scaler
        for trained in self._waiting():
            trained.touch()
            if trained.is_emptied:
                trained.forgo("")
        if self._is_receiving():
            self.ledger.receiving = made.received = {}
            self.ledger.arm()
        else:
            self.ledger.disarm()
        if made.received is not None or not self._heard:
            roots = args[at] if len(args) > at else options.get("tensors")
            made.own = quietly(private.note_divisors)(roots, self.key) or []
        if quietly(self.modes.have_left_training)(made.line, self.ledger.trained_roots()):
            for trained in self.trained:
                trained.note("eval", made.line)
        self._current = made
        try:
            result = original(*args, **options)
        finally:
            self._current = self.ledger.receiving = None
        if made.received:
            owners = (self.ledger.owners.get(place, ()) for place in made.received)
            known = {frozenset[int]().union(*owners)}
            self._touches.setdefault(made.line, set()).update(known)
            if num < AFTER_EACH and place_in_job()[1] > 1:
                made.left = self.ledger.receipts(range(len(self.ledger.rows)))
        else:
            known = self._touches.get(made.line, set())
        touched = frozenset[int]().union(*known)
        made.is_sure = len(known) < 2
        for trained in self.trained:
            trained.is_seen |= bool(made.received) and trained.place in touched
            # Nothing received: it reached one that is not known yet, or one that receipts do not see
            if trained.place in touched or not (touched or (trained.is_seen and made.received is not None)):
                trained.add(made, KEPT)
        return result

    def is_here(self) -> bool:
        """False in a forked child."""
        return os.getpid() == self._process

    def _is_receiving(self) -> bool:
        return self._num < FIRST or self._num % EVERY == 0 or self._num_new > 0

    def _stay_over(self) -> None:
        """Ends the script again, if it has caught the end as an error."""
        if self.is_over and self.is_here():
            raise Enough(0)

    def _grad(self, original: Any, *args: Any, **options: Any) -> Any:
        """Receives nothing from a graph within a backward, as of checkpointing, which gives its gradients itself."""
        with patch.object(self.ledger, "receiving", None):
            return original(*args, **options)

    def _trained(self, optimizer: Any) -> Trained | None:
        every = self.trained if optimizer is not None else []
        return next((trained for trained in every if trained.optimizer() is optimizer), None)

    def _waiting(self) -> list[Trained]:
        return [trained for trained in self.trained if trained.is_waiting]

    def _know(self, optimizer: Any) -> Trained:
        trained = self._trained(optimizer)
        if trained is None:
            trained = Trained(optimizer, len(self.trained), self.ledger)
            self.trained.append(trained)
        for parameter in parameters_of(optimizer):
            self.ledger.owners.setdefault(self.ledger.place(parameter), set()).add(trained.place)
        return trained

    def _add_group(self, original: Any, optimizer: Any, *args: Any, **options: Any) -> Any:
        result = original(optimizer, *args, **options)
        self._know(optimizer)
        return result

    def _before_step(self, optimizer: Any, args: Any, options: Any) -> Any:
        if not self.is_here():
            self.forked[0] = 1
            return None
        self._stay_over()
        if self._stepping is not None or self._current is not None:  # inside another optimizer's, or in backward
            if self._stepping is None:
                self.unjudged["optimizers that step within backward"] = None
            return None
        self._stepping = optimizer
        trained = self._know(optimizer)
        closure = args[1] if len(args) > 1 else options.get("closure")
        if closure is None:
            self._record(trained)
            return None
        calls = itertools.count()

        def heard(*args: Any, **options: Any) -> Any:
            """Listens to the backwards of a closure's first call; further calls only search within the step."""
            if next(calls):
                return closure(*args, **options)
            self._stepping = None
            try:
                return closure(*args, **options)
            finally:
                self._stepping = optimizer
                self._record(trained)

        return (optimizer, heard, *args[2:]), {name: one for name, one in options.items() if name != "closure"}

    def _after_step(self, optimizer: Any, *_: Any) -> None:
        trained = self._trained(optimizer)
        if self._stepping is not optimizer or trained is None:
            return
        self._stepping, self._has_stepped = None, True
        if trained.pending:
            is_new = trained.way not in self._ways and self._num >= FIRST
            self._num_new = 2 if is_new else max(0, self._num_new - 1)
            self._ways.add(trained.way)
            trained.num += 1
        self._num = max(self._num, trained.num)
        trained.forget()
        stepped = [other.num for other in self.trained if other.num]
        if self.most is not None and stepped and min(stepped) >= self.most:
            self.is_over = True
            raise Enough(0)

    @quietly
    def _record(self, trained: Trained) -> None:
        if not trained.pending:
            if trained.is_spent:
                trained.note("again", where()[0])
            return
        trained.close()
        if trained.num < 2:
            self.ledger.name()
        record = {**trained.record(), "line": where()[0], "trainer": is_in_trainer()}
        record["linear"] = is_linear(trained.optimizer()) and all(kind != "clip" for kind, *_ in record["events"])
        recurrent = (parameter for module in self.modes.recurrent for parameter in module.parameters())
        record["recurs"] = trained.num_drawn < 2 and trained.place in self.ledger.owners_of(recurrent)
        record["unused"] = unused_of(self._heard, record["backwards"])
        self._heard.clear()
        if len(self.updates) < KEPT or "places" in record:
            self.updates.append(record)

    def _draw(self, original: Any, loader: Any) -> Any:
        try:
            self._stay_over()
            return self.loaders.draw(original, loader)
        except StopIteration:
            for trained in self._waiting():
                trained.note("ended")
            raise

    def _clear(self, cleared: Any, *_: Any, **options: Any) -> None:
        """Notes that a module or an optimizer is cleared, and with it the gradients that no step used."""
        parameters = cleared.parameters() if isinstance(cleared, nn.Module) else parameters_of(cleared)
        waiting = self._waiting() if self._stepping is None else []
        owners = self.ledger.owners_of(parameters if waiting else ())
        for trained in (trained for trained in waiting if trained.place in owners):
            trained.forgo(where()[0])

    def _schedule(self, original: Any, scheduler: Any, *args: Any, **options: Any) -> Any:
        if self._scheduling:
            return original(scheduler, *args, **options)
        (line, inner) = where()
        optimizer = getattr(scheduler, "optimizer", None)
        trained = self._trained(getattr(optimizer, "optimizer", optimizer))
        # Accelerate's steps once per rank. No line stands for a step by a window.
        if trained is not None and trained.num and not (args or options or "accelerate" in inner):
            trained.note("schedule", "" if inner.startswith(OURS) else line, id(scheduler))
        with patch.object(self, "_scheduling", True):
            result = original(scheduler, *args, **options)
        if trained is not None:
            quietly(self.schedules.note)(scheduler, line, trained.place)
        return result

    def _clip(self, original: Any, parameters: Any, *args: Any, **options: Any) -> Any:
        given = [parameters] if isinstance(parameters, Tensor) else [*parameters]
        owners = quietly(self.ledger.owners_of)(given) or ()
        owning = [trained for trained in self.trained if trained.place in owners]
        events = [(trained, "clip" if trained.pending else "late") for trained in owning]
        events = [(trained, kind) for trained, kind in events if trained.pending or trained.is_spent]
        for trained, _ in events:
            trained.close()
        bound = args[0] if args else options.get("max_norm", options.get("clip_value"))
        events += [(trained, "scaled") for trained, _ in events if trained.scale > 100 * (bound or math.inf)]
        most = [p.grad.abs().max() for p in given if p.grad is not None] if "value" in original.__name__ else []
        result = original((p for p in given) if isinstance(parameters, Iterator) else parameters, *args, **options)
        if bound:
            over = (max(most) if most else result) / bound  # a tensor, which is read at the end
            over = over if not hasattr(over, "to_local") or over.placements[0].is_replicate() else bound < math.inf
            for trained, kind in events:
                trained.note(kind, where()[0], over)
        return result

    def _close(self, *_: Any) -> None:
        """Takes receipts before a window of ours clips."""
        for trained in (trained for trained in self.trained if trained.pending):
            trained.close()

    def _scale(self, scaler: Any, *_: Any) -> None:
        self._scaler = scaler if scaler.is_enabled() else None
        self._has_stepped = False

    def _unscale(self, scaler: Any, optimizer: Any) -> None:
        trained = self._know(getattr(optimizer, "optimizer", optimizer))
        if scaler.is_enabled() and trained.pending:
            trained.close()  # receipts of gradients that are about to be changed
            trained.note("unscale", where()[0])

    def _scaler_step(self, original: Any, scaler: Any, optimizer: Any, *args: Any, **options: Any) -> Any:
        trained = self._know(getattr(optimizer, "optimizer", optimizer))
        trained.close()  # before it unscales
        if scaler.is_enabled():
            trained.note("scaler", where()[0])
        result = original(scaler, optimizer, *args, **options)
        trained.forget()  # even if it overflowed, and nothing was stepped
        return result

    def as_dict(self) -> dict[str, Any]:
        """Returns what was seen, in plain numbers that other ranks can read."""
        return {
            "parameters": {what: [row[what] for row in self.ledger.rows] for what in ROW},
            "wrapped": self.ledger.wrapped,
            "updates": [{**update, "events": [*map(_plain_event, update["events"])]} for update in self.updates],
            "schedules": self.schedules.known,
            "is_cut": self.is_over,
            "rest": {each.place: [] if self.most else each.rest() for each in self.trained},
        }


def unused_of(heard: Any, backwards: Any) -> dict[Any, tuple[int, int]]:
    """By line, how many losses no backward followed: of a trained loader's batches that have none, and others."""
    trained = {backward["batch"][:2] for backward in backwards}
    unused: dict[Any, tuple[int, int]] = {}
    for term, batch, is_training in heard:
        if term["went"] or not is_training or (batch[0] and batch in trained):
            continue
        is_known = batch[0] and batch[0] in {loader for loader, _ in trained}
        if batch[0] and not is_known:
            continue  # of another loader, as for validation
        skipped, unknown = unused.get(tuple(term["site"]), (0, 0))
        unused[tuple(term["site"])] = (skipped + bool(is_known), unknown + (not is_known))
    return unused


def _plain_event(event: tuple[str, str, int, Any]) -> tuple[str, str, int, Any]:
    kind, line, before, whose = event
    return kind, line, before, whose if isinstance(whose, int) else float(whose)


def is_linear(optimizer: Any) -> bool:
    """True where a factor of all gradients is a factor of the learning rate."""
    is_sgd = isinstance(optimizer, torch.optim.SGD)
    return is_sgd and not any(group["weight_decay"] for group in optimizer.param_groups)


def _term(name: str, dtype: torch.dtype, **known: Any) -> dict[str, Any]:
    """A criterion's call, to which backward adds the seed that flows into it."""
    (line, inner) = where()
    eps = torch.finfo(dtype).eps
    unknown = dict.fromkeys(("count", "print", "pairs", "divisors", "seed", "low"))
    return {**unknown, "went": False, "site": [line, name, inner], "eps": eps, **known}


@torch.no_grad()
def print_of(target: Any) -> Tensor | None:
    """A number that differs between targets; 0 if all of its elements are equal."""
    if not isinstance(target, Tensor) or not target.ndim:
        return None
    numbers = target[: max(1, PRINTED * len(target) // max(1, target.numel()))].flatten()
    ramp = torch.arange(len(numbers), device=target.device, dtype=torch.float32) - (len(numbers) - 1) / 2
    return (ramp * numbers).sum()


def _heard(original: Any, hear: Callable[..., Any], is_first: bool) -> Any:
    """Wraps a function: calls `hear` in its place, with it and its arguments, or before it, with the arguments."""
    first = quietly(hear) if is_first else None

    @functools.wraps(original)
    def around(*args: Any, **options: Any) -> Any:
        if first is None:
            return hear(original, *args, **options)
        first(*args, **options)
        return original(*args, **options)

    return around
