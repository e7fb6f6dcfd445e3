"""Watch: notes criterions, backwards, steps and clearing while a script runs, and changes nothing.

Numbers on a device are read when an optimizer steps, never in a micro-step.
"""

from __future__ import annotations

import functools
import gc
import math
import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, final
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts, LRScheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..batchnorm import batchnorms
from ..engines.base import Gradient
from ..text import shorten
from . import private
from .criterions import hearing
from .heard import Heard
from .ledger import Ledger, quietly
from .lines import where
from .reckoning import NOTE, UNJUDGED
from .schedules import about
from .share import place_in_job
from .trained import KEPT, Backward, Trained, numbers_in, parameters_of

# Receipts are taken in the first updates, then in every 16th, and where something is new. From the 4096th on they are
# taken half as often each time that the number of updates doubles, so that a long run keeps few.
FIRST, EVERY, OFTEN = 16, 16, 4096
AFTER_EACH = 4  # updates with receipts after each backward too
CLIPPING = (nn.utils, nn.utils.clip_grad)  # modules that have torch's functions


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
        self.said: dict[tuple[str, str], None] = {}  # beside faults: kinds and texts
        self.trained: list[Trained] = []  # also those whose optimizer is gone
        self._touches: dict[str, set[frozenset[int]]] = {}  # sets of optimizers, by the line of a backward
        self.norm = ""  # the name of a batch normalisation in training mode
        self.orphans: list[str] = []  # names of what has a gradient, and no optimizer
        self.recurs = False  # a model goes through steps in time
        self._was_training: dict[tuple[str, int], bool] = {}  # of each model at the first backward of a line
        self.schedules: dict[int, dict[str, Any]] = {}  # by id
        self.heard = Heard()
        self.forked = mmap.mmap(-1, 1)  # its child sets a byte, where it trains
        self._process = os.getpid()
        self._num = 0  # updates so far
        self._looks_closely = True  # takes receipts in this update
        self._ways: set[Any] = set()  # of updates with receipts
        self._num_new = 0  # updates that are to have receipts, since the way was new
        self._stepping: Any = None  # the optimizer that steps
        self._scheduling = False
        self._scaler: Any = None  # that has scaled a loss since the last step
        self._astray = ""  # the line of a backward that reached no optimizer, as it did before
        if model is not None:
            self.ledger.add_root(model)

    @contextmanager
    def listening(self) -> Iterator[None]:
        before: list[tuple[Any, str, Callable[..., Any]]] = [
            (Optimizer, "zero_grad", self._clear),
            (nn.Module, "zero_grad", self._clear),
            (nn.Module, "named_parameters", self.ledger.add_root),
            (DistributedDataParallel, "__init__", self.ledger.add_root),
            (Gradient, "clip", self._close),
            (torch.amp.GradScaler, "scale", self._scale),
        ]
        around: list[tuple[Any, str, Callable[..., Any]]] = [
            *((owner, name, functools.partial(self._backward, at)) for owner, name, at in private.backwards()),
            *((owner, f"clip_grad_{kind}_", self._clip) for owner in CLIPPING for kind in ("norm", "value")),
            (Optimizer, "add_param_group", self._add_group),
            *((kind, "step", self._schedule) for kind in (LRScheduler, CosineAnnealingWarmRestarts)),
            (torch.autograd, "grad", self._grad),
            (torch.amp.GradScaler, "unscale_", self._unscale),
            (torch.amp.GradScaler, "step", self._scaler_step),
            *([] if private.LOADER is None else [(private.LOADER, "__next__", self._draw)]),
        ]
        with ExitStack() as stack:
            if unheard := stack.enter_context(hearing(self.heard.see, self.heard.key)):
                self.said[UNJUDGED, f"{', '.join(unheard)}, in whose place another library has put its own"] = None
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

    def _backward(self, at: int, original: Any, *args: Any, **options: Any) -> Any:
        if not self.is_here() or self.heard.current is not None or self._stepping is not None:
            searching = self._trained(self._stepping)
            if searching is not None and searching.is_untouched:
                searching.note("grows", where()[0])
            return original(*args, **options)
        self._stay_over()
        made = Backward(*where(), self.heard.batch, self._scaler)
        for trained in self._waiting():
            trained.touch()
        if self._looks_closely:
            self.ledger.receiving = made.received = {}
            self.ledger.arm()
        else:
            self.ledger.disarm()
        roots = args[at] if len(args) > at else options.get("tensors")
        given = args[at + 1] if len(args) > at + 1 else options.get("grad_tensors")
        made.own = quietly(private.note_divisors)(roots, self.heard.key, given) or []
        if self._have_left_training(made.line):
            for trained in self.trained:
                trained.note("eval", made.line)
        self.heard.current = made
        try:
            result = original(*args, **options)
        finally:
            self.heard.current = self.ledger.receiving = None
        if made.received:
            owners = (self.ledger.owners.get(place, ()) for place in made.received)
            known = {frozenset[int]().union(*owners)}
            self._touches.setdefault(made.line, set()).update(known)
            if self._num < AFTER_EACH and place_in_job()[1] > 1:
                made.left = self.ledger.receipts(range(len(self.ledger.rows)))
        else:
            known = self._touches.get(made.line, set()) if made.received is None else set()
            self._astray = made.line if made.line in self._touches and not known else ""
        touched = frozenset[int]().union(*known)
        made.is_sure = len(known) < 2
        for trained in self.trained:
            trained.is_seen |= bool(made.received) and trained.place in touched
            # Nothing received: it reached one that is not known yet, or one that receipts do not see
            if trained.place in touched or not (touched or (trained.is_seen and made.received is not None)):
                trained.add(made)
        return result

    @quietly
    def _have_left_training(self, line: str) -> bool:
        """True if a model is in eval mode now, and was not at the line's first backward."""
        has_left = False
        for root in self.ledger.trained_roots():
            if (key := (line, id(root))) in self._was_training:
                has_left |= self._was_training[key] and not root.training
                continue
            self._was_training[key] = root.training
            self.recurs |= any(isinstance(module, nn.RNNBase | nn.RNNCellBase) for module in root.modules())
            norms = [name or type(norm).__name__ for name, norm in batchnorms(root) if norm.training]
            self.norm = self.norm or next(iter(norms), "")
            if not root.training and any(isinstance(module, nn.Dropout) and module.p for module in root.modules()):
                self.said[NOTE, f"{line}: trains a model in eval mode, without its dropout"] = None
        return has_left

    def is_here(self) -> bool:
        """False in a forked child."""
        return os.getpid() == self._process

    def _stay_over(self) -> None:
        """Ends the script again, if it has caught the end as an error."""
        if self.is_over and self.is_here():
            raise Enough(0)

    def _grad(self, original: Any, *args: Any, **options: Any) -> Any:
        """Receives nothing from a graph within a backward, as of checkpointing, which gives its gradients itself."""
        with patch.object(self.ledger, "receiving", None):
            return original(*args, **options)

    def _trained(self, optimizer: Any) -> Trained | None:
        return next((one for one in self.trained if optimizer is not None and one.optimizer() is optimizer), None)

    def _waiting(self) -> list[Trained]:
        return [trained for trained in self.trained if trained.is_waiting]

    def _know(self, optimizer: Any) -> Trained:
        trained = self._trained(optimizer)
        if trained is None:
            trained = Trained(optimizer, len(self.trained), self.ledger)
            self.trained.append(trained)
            self._looks_closely = True
            self._num_new = 2
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
        if self._stepping is not None or self.heard.current is not None:  # inside another optimizer's, or in backward
            if self._stepping is None:
                self.said[UNJUDGED, "optimizers that step within backward"] = None
            return None
        trained = self._know(optimizer)

        def begin() -> None:
            if self._stepping is None:
                self._stepping = optimizer
                self._record(trained)

        closure = args[1] if len(args) > 1 else options.get("closure")
        if closure is None:
            begin()
            return None

        def heard(*args: Any, **options: Any) -> Any:
            """Listens to the backwards of a closure's first call; further calls only search within the step."""
            try:
                return closure(*args, **options)
            finally:
                begin()

        return (optimizer, heard, *args[2:]), {name: value for name, value in options.items() if name != "closure"}

    def _after_step(self, optimizer: Any, args: Any, options: Any) -> None:
        trained = self._trained(optimizer)
        if self._stepping is not optimizer or trained is None:
            return
        self._stepping = self._scaler = None
        if trained.pending:
            has_closure = any(map(callable, (*args[1:], *options.values())))
            for update in self.updates[-1:] if trained.is_elsewhere and not has_closure else ():
                self.said[UNJUDGED, f"what {where()[0]} does with gradients within its step"] = None
                update["moved"] = True
            is_new = trained.way not in self._ways and self._num >= FIRST and len(self._ways) < KEPT
            self._num_new = 2 if is_new else max(0, self._num_new - 1)
            self._ways.add(trained.way)
            trained.num += 1
        self._num = max(other.num for other in self.trained if other.optimizer() is not None)
        every = EVERY << (self._num // OFTEN).bit_length()
        self._looks_closely = self._num < FIRST or self._num % every == 0 or self._num_new > 0
        trained.forget()
        if self.most is not None and min([other.num for other in self.trained if other.num], default=0) >= self.most:
            self.is_over = True
            raise Enough(0)

    @quietly
    def _record(self, trained: Trained) -> None:
        if not trained.pending:
            if trained.is_spent:
                trained.note("again", where()[0])
            elif not trained.num and trained.has_gradient():  # a rank that runs out of data gets that of others
                self.said[UNJUDGED, f"what {where()[0]} steps, which no backward that was seen gave"] = None
            elif self._astray:
                self.said[UNJUDGED, f"{where()[0]}, which steps nothing of what {self._astray} gave"] = None
            return
        trained.close()
        if trained.num < 2:
            self.ledger.name()
        self.orphans = (self.ledger.orphans() if self._looks_closely else []) or self.orphans
        record = trained.record() | {"line": where()[0]}
        record["unused"] = self.heard.unused(record["backwards"])
        if len(self.updates) < KEPT or "places" in record:
            self.updates.append(record)

    def _draw(self, original: Any, loader: Any) -> Any:
        try:
            self._stay_over()
            batch = original(loader)
        except StopIteration:
            for trained in self._waiting():
                trained.note("ended")
            raise
        source = private.source_of(loader)
        self.heard.drawn[source] += 1
        self.heard.batch = source, self.heard.drawn[source]
        return batch

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
        # Accelerate's steps once per rank.
        if trained is not None and trained.num and not (args or options or "accelerate" in inner):
            trained.note("schedule", line, id(scheduler))
        with patch.object(self, "_scheduling", True):
            result = original(scheduler, *args, **options)
        if trained is not None:
            self.schedules[id(scheduler)] = quietly(about)(scheduler, line, trained.place) or {}
        return result

    def _clip(self, original: Any, parameters: Any, *args: Any, **options: Any) -> Any:
        given = [parameters] if isinstance(parameters, Tensor) else [*parameters]
        bound = args[0] if args else options.get("max_norm", options.get("clip_value"))
        owners = quietly(self.ledger.owners_of)(given) or ()
        events = list[tuple[Trained, str]]()
        for trained in (each for each in self.trained if each.place in owners and (each.pending or each.is_spent)):
            trained.close()
            is_scaled = not trained.is_unscaled and trained.scale > max(1.0, 100 * (bound or math.inf))
            kinds = ("clip", "scaled")[: 1 + is_scaled] if trained.pending else ("late",)
            events += [(trained, kind) for kind in kinds]
        most = [p.grad.abs().max() for p in given if p.grad is not None] if "value" in original.__name__ else []
        result = original(given, *args, **options)
        if bound:
            over = (max(most) if most else result) / bound  # a tensor, which is read at the end
            over = over if not hasattr(over, "to_local") or over.placements[0].is_replicate() else bound < math.inf
            for trained, kind in events:
                trained.note(kind, where()[0], over)
                trained.settle(over)
        return result

    def _close(self, *_: Any) -> None:
        """Takes receipts before a window of ours clips."""
        for trained in self.trained:
            trained.close()

    def _scale(self, scaler: Any, *_: Any) -> None:
        self._scaler = scaler if scaler.is_enabled() else None

    def _unscale(self, original: Any, scaler: Any, optimizer: Any) -> None:
        trained = self._know(getattr(optimizer, "optimizer", optimizer))
        is_due = scaler.is_enabled() and bool(trained.pending)
        if is_due:
            trained.close()  # receipts of gradients that are about to be changed
            trained.note("unscale", where()[0])
        original(scaler, optimizer)
        if is_due:
            trained.settle(0.0)

    def _scaler_step(self, original: Any, scaler: Any, optimizer: Any, *args: Any, **options: Any) -> Any:
        trained = self._know(getattr(optimizer, "optimizer", optimizer))
        trained.close()  # before it unscales
        if scaler.is_enabled():
            trained.settled = trained.settled if trained.is_unscaled else []  # or it changes gradients itself
            trained.note("scaler", where()[0])
        result = original(scaler, optimizer, *args, **options)
        trained.forget()  # even if it overflowed, and nothing was stepped
        return result

    def as_dict(self) -> dict[str, Any]:
        """Returns what was seen, in plain numbers that other ranks can read."""
        if self.norm and any(len(update["backwards"]) > 1 for update in self.updates):
            self.said[NOTE, f"{self.norm} normalises by each micro-batch: no window equals one big batch"] = None
        if self.orphans:
            self.said[NOTE, f"{shorten(self.orphans)}: has a gradient, and no optimizer"] = None
        if self.forked[0]:
            self.said[UNJUDGED, "what a forked child of this process trains; audit it in the child"] = None
        if self.ledger.unseen:
            names = shorten([self.ledger.rows[place]["name"] for place in sorted(self.ledger.unseen)])
            self.said[UNJUDGED, f"receipts of {names}, whose gradient is sparse, or has too long rows"] = None
        return {
            "parameters": self.ledger.rows,
            "wrapped": self.ledger.wrapped,
            "updates": [{**update, "events": numbers_in(update["events"])} for update in self.updates],
            "schedules": {key: known for key, known in self.schedules.items() if known},
            "is_cut": self.is_over,
            "made": {trained.place: trained.num for trained in self.trained},
            "said": [*self.said],
            "recurs": self.recurs,
            "rest": {each.place: [] if self.most else each.rest() for each in self.trained},
        }


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
