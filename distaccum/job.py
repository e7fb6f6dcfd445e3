"""Job: the models and what trains them, checked once, and the progress of training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import LBFGS
from torch.optim.lr_scheduler import ReduceLROnPlateau

from .adapter import Prepared
from .batch import count_samples, fresh
from .batchnorm import batchnorms
from .engines import Engine
from .law import Counts
from .norms import local, unique
from .options import Config
from .private import version_of
from .text import Once

MOST_SKIPS = 50  # in a row
NUM_LOOKS = 16  # parameters whose gradients are looked at in each micro-step
Hooks = Mapping[str, Sequence[Any]]  # methods of extensions, by event
Seen = dict[tuple[Any, ...], bool]  # by path in a batch: True if it was cut, False if whole


@dataclass(slots=True)
class Micro:
    """A micro-batch of this rank; its batch is None once the loop has taken it."""

    batch: Any
    counts: Counts
    number: int  # among all that were drawn, including those in which nothing counts

    def to_replay(self, num_names: int) -> Micro:
        """A copy to stand in with; `num_names`: of the losses, where this one's window may have had fewer."""
        return Micro(fresh(self.batch), self.counts * (num_names // len(self.counts)), self.number)


@dataclass(eq=False)
class Start:
    """The place where a window began that is planned and not stepped: a job that resumes begins there."""

    random: Any = None  # The random numbers as its loop began; None before that.
    position: Any = None  # The loader's, before its micro-batches (state/place.py).


@final
class Job:
    """Everything that the windows of an Accumulator share."""

    def __init__(self, config: Config, given: Prepared, engine: Engine) -> None:
        self.config = config
        self.adapters = given.adapters
        self.engine = engine
        self.models = list(engine.models)
        for adapter in self.adapters:
            engine.run_backward = adapter.around(engine.run_backward)
        engine.adopt(given, config.max_norm, config.on_nonfinite)
        self.optimizers, self.schedulers, self.scaler = given.optimizers, given.schedulers, given.scaler
        self._trains = any(parameter.requires_grad for parameter in self.engine.parameters())
        # Otherwise the caller steps. Where nothing is trained, as on a frozen stage, other ranks step alone.
        self.steps = bool(self.optimizers) or "step" in self.engine.owns or not self._trains
        self.scales_seeds = not any(one.scales_losses for one in self.adapters)  # otherwise the adapter's backward does
        self.epochs: list[int] = []  # last_epoch of each schedule after the last update
        self.once = Once(self.engine.peers.rank)
        self.batchnorms = [named for one in self.models for named in batchnorms(one)]
        self.extensions: tuple[Any, ...] = ()
        self.hooks: Hooks = {}
        # The extension that keeps a window's random numbers for a state.
        self.random: Any = None
        self._models_parameters = self.engine.parameters()
        self._every: list[nn.Parameter] = []  # of the models and the optimizers, each once
        self.trained: list[nn.Parameter] = []  # of the optimizers, each once
        self.groups: list[Sequence[nn.Parameter]] = []  # of each optimizer; without one, of the models
        self._owned: list[int] | None = None  # ids of the optimizers' parameters when last looked at
        self.compared: list[tuple[int, bool]] | None = None  # `trainable` when agreement.py last compared ranks
        self.parameters()
        self._refuse_steps()
        self._refuse(config)
        self.begin_anew()

    def begin_anew(self) -> None:
        """Resets the state that changes from window to window."""
        self.index = 0  # of the next update
        self.skipped = 0  # updates in a row
        self.due: list[Any] = []  # schedules that have yet to step for an update whose weights have moved
        self.start: Start | None = None  # of the window that is planned and not stepped, whoever holds it
        self.unused: set[int] = set()  # ids of parameters without a gradient, as the last window left them
        self.open: Any = None  # the window that holds gradients, which must not leak into the next one if it is dropped
        self.fit: Any = None  # what update() learned about sizes (runs/memory.py)
        self.seen: Seen = {}  # which entries of batches were cut, and which went whole
        self.substitute: Micro | None = None  # to stand in with, from a window whose gradient was finite
        self.moves = Moves()

    def watch_schedules(self) -> None:
        """Warns if a schedule has moved since the last update, according to `epochs`."""
        if any(getattr(one, "last_epoch", 0) > then for one, then in zip(self.schedulers, self.epochs, strict=False)):
            self.once(
                "scheduler",
                "scheduler.step() was called beside window.step(), which steps the schedule once per update, so it "
                "runs ahead; leave the call out, or step the schedule yourself and leave scheduler= out",
            )

    def step_schedules(self) -> None:
        """Steps each schedule that is due once, even if Ctrl-C comes between two of them and this is called again."""
        while self.due:
            self.due.pop(0).step()
        self.epochs[:] = [getattr(one, "last_epoch", 0) for one in self.schedulers]

    @property
    def most(self) -> int | None:
        """The most samples in a micro-batch, or the most that it may cost: as requested, or as update() learned."""
        requested = self.config.most
        return self.fit.size if self.fit is not None else None if requested == "auto" else requested

    def parameters(self) -> list[nn.Parameter]:
        """All current parameters, each once; looked up anew, since an optimizer may have been given others."""
        owned = [id(p) for one in self.optimizers for group in one.param_groups for p in group["params"]]
        if owned != self._owned:  # ids are not reused, since self.groups keeps the parameters
            groups = [[p for group in one.param_groups for p in group["params"]] for one in self.optimizers]
            self._owned = owned
            self.groups = [*groups] or [self._models_parameters]
            self.trained = unique(p for group in groups for p in group)
            self._every = unique([*self._models_parameters, *self.trained])
        return self._every if owned else self.engine.parameters()

    def trainable(self) -> list[tuple[int, bool]]:
        """The ids of all parameters, and whether each is trained."""
        return [(id(parameter), parameter.requires_grad) for parameter in self.parameters()]

    def stepped(self) -> list[nn.Parameter]:
        """The optimizers' parameters, or all of the models' if the caller steps."""
        return self.trained or self.engine.parameters()

    def _refuse_steps(self) -> None:
        """Refuses what window.step() cannot step, and per-sample gradients, which the window's shares would scale."""
        if any(isinstance(one, ReduceLROnPlateau) for one in self.schedulers):
            raise TypeError("ReduceLROnPlateau needs a metric, which no window knows; step it yourself")
        given = [id(group) for one in self.optimizers for group in one.param_groups]
        for schedule in self.schedulers if given else ():
            scheduled = getattr(getattr(schedule, "optimizer", None), "param_groups", ())
            if scheduled and not {*map(id, scheduled)} & {*given}:
                raise ValueError(
                    f"scheduler is a {type(schedule).__name__} of another {type(schedule.optimizer).__name__} than the "
                    "optimizer given, whose learning rate it would never change; make it from that optimizer"
                )
        if any(hasattr(p, "grad_sample") for p in self._models_parameters):
            raise ValueError(
                "the model keeps the gradient of each sample (grad_sample on its parameters, as for differential "
                "privacy), which the window's shares would scale before anything clips it; expected a model that keeps "
                "only whole gradients; accumulate with the library that put grad_sample there"
            )
        for optimizer in self.optimizers:
            if isinstance(optimizer, LBFGS):
                raise TypeError(
                    "LBFGS needs a closure that evaluates the model again, which no window has; step it yourself"
                )

    def _refuse(self, config: Config) -> None:
        """Refuses options that the engine or the optimizers do not support."""
        engine = self.engine
        if engine.peers.has_parts and count_samples in config.counts.values():
            raise ValueError(
                "count=count_samples with a mesh whose ranks have parts of the same samples: each would count them "
                "whole; use count_tokens, or a function of your own that counts this rank's part"
            )
        if not self.steps and (config.max_norm is not None or config.on_nonfinite == "skip"):
            raise ValueError(
                "max_norm and on_nonfinite='skip' act where the library steps, and no optimizer was given; pass "
                "it, or clip and skip yourself before window.step()"
            )
        if not self.optimizers and self.scaler is not None and self.schedulers:
            raise ValueError(
                "scheduler with a scaler and no optimizer: whether your scaler.step() stepped cannot be seen; step the "
                "schedule yourself, or pass the optimizer"
            )
        for optimizer, owned in zip(self.optimizers, self.groups, strict=False) if self.scaler is not None else ():
            if len({hasattr(p, "to_local") for p in owned}) > 1:
                raise ValueError(
                    f"scaler with a {type(optimizer).__name__} that holds sharded and plain parameters, which a "
                    "GradScaler cannot unscale together; make an optimizer for each kind and pass both"
                )
        if not self._models_parameters:
            raise ValueError("the model has no parameters, so there is no gradient to accumulate")
        own = {*map(id, self._models_parameters)}
        # After a forward FSDP2 shows copies of whole parameters, which no one would shard again.
        copies = {id(p) for model in self.models for p in model.parameters()} - own
        held = {*(self._owned or ())}
        if self.optimizers and self._trains and (held & copies or not held & own):
            raise ValueError(
                f"the optimizer holds {'gathered copies' if held & copies else 'none'} of the model's parameters; make "
                "it from model.parameters() after the model is moved, wrapped, complete and (FSDP2) resharded; for one "
                "outside of modules, such as patch = nn.Parameter(...), give model=[model, nn.ParameterList([patch])]"
            )


def few_of(parameters: Sequence[nn.Parameter]) -> Sequence[nn.Parameter]:
    """Some of them, spread evenly."""
    return parameters[:: 1 + len(parameters) // NUM_LOOKS]


@final
class Moves:
    """Tells whether the caller's step changed the weights: by torch's counts of writes to them.

    Torch's fused optimizers, and others, write past these counts. So until counts have told once, an element of a few
    weights is compared too, which waits for the device where counts stand still.
    """

    def __init__(self) -> None:
        self._counts: list[int] = []
        self._some: list[Tensor] = []
        self._counts_tell: bool | None = None  # None: not known yet

    def look(self, weights: Sequence[nn.Parameter]) -> None:
        """Remembers what weights look like after a window's loop."""
        self._counts = list(map(version_of, weights))
        self._some = list(map(_first_of, few_of(weights))) if self._counts_tell is None else []

    def happened(self, weights: Sequence[nn.Parameter]) -> bool:
        """Returns whether a weight has changed since."""
        has_moved = list(map(version_of, weights)) != self._counts
        if has_moved or not all(map(torch.equal, self._some, map(_first_of, few_of(weights)))):
            self._counts_tell = has_moved if self._counts_tell is None else self._counts_tell
        return has_moved or self._counts_tell is False


def _first_of(weight: Tensor) -> Tensor:
    return local(weight.detach()).reshape(-1)[:1].clone()
