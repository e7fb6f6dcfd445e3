"""Setup: what an Accumulator works on: models, engine, optimizers, schedules, scaler."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, final

from torch import nn
from torch.amp import GradScaler
from torch.optim import LBFGS, Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ..batchnorm import batchnorms
from ..cutting import TokenCount, count_samples
from ..engines import Engine, choose_engine
from ..law import DistaccumError, Once
from ..scaling import refuse_mixed
from ..wrappers.accelerate import Accelerated
from ..wrappers.fabric import FromFabric
from .config import Config, as_list


@final
class Setup:
    """Chosen and checked once; what follows from the optimizers' parameters is kept until they change."""

    def __init__(
        self, config: Config, model: Any, optimizer: Any, scheduler: Any, scaler: Any, accelerator: Any
    ) -> None:
        self._fabric = fabric = FromFabric(
            as_list("model", model, "forward"),
            as_list("optimizer", optimizer, "param_groups"),
            scaler if scaler is not None and scaler.is_enabled() else None,
        )
        self.accelerated = Accelerated(
            accelerator, fabric.optimizers, as_list("scheduler", scheduler, "step"), fabric.scaler
        )
        self.engine: Engine = choose_engine(fabric.models, config.sync, config.mesh)
        self.models: list[nn.Module] = list(self.engine.models)
        self.engine.run_backward = fabric.around(self.accelerated.run_backward or self.engine.run_backward)
        self.optimizers: list[Optimizer] = self.engine.adopt_optimizers(self.accelerated.optimizers)
        self.schedulers: list[LRScheduler] = self.engine.adopt_schedulers(self.accelerated.schedulers)
        self.scaler: GradScaler | None = self.accelerated.scaler
        self.steps = bool(self.optimizers) or self.engine.owns_step  # else the caller does
        self.scales_seeds = self.accelerated.run_backward is None  # else what runs backward multiplies by the scale
        self.max_norm = self.engine.adopt_max_norm(config.max_norm)
        self.once = Once(self.engine.peers.rank)
        self.batchnorms = [named for one in self.models for named in batchnorms(one)]
        self._models_parameters = self.engine.parameters()
        self._owned: list[int] = []  # ids of what the optimizers had when they were seen last
        self._known: Parameters | None = None
        self.config = config
        self._refuse(config)

    def after_step(self, stepped: bool) -> None:
        """Lets the trainers whose wrappers were taken off know of a step, or of one that was skipped."""
        self.accelerated.after_step(stepped)
        self._fabric.after_step(stepped)

    @property
    def forwards_communicate(self) -> bool:
        """Whether each forward or backward takes part of all ranks."""
        return self.engine.lockstep and self.engine.sync != "gathered"

    def parameters(self) -> Parameters:
        """Those of now: an optimizer may have got others."""
        owned = [id(p) for one in self.optimizers for group in one.param_groups for p in group["params"]]
        if self._known is None or not owned or owned != self._owned:
            self._owned, self._known = owned, self._found()  # which keeps them, so that no other has their ids
        return self._known

    def stepped(self) -> list[nn.Parameter]:
        """The optimizers' parameters, or all of the models' if the caller steps."""
        return self.parameters().stepped or self.engine.parameters()

    def _found(self) -> Parameters:
        groups: list[Sequence[nn.Parameter]] = [owned_by(one) for one in self.optimizers]
        stepped = unique(p for group in groups for p in group)
        every = unique([*self._models_parameters, *stepped]) if self.optimizers else self.engine.parameters()
        return Parameters(every, stepped, groups or [self._models_parameters])

    def _refuse(self, config: Config) -> None:
        """Refuses options that the engine or the optimizers do not support."""
        engine, stepped = self.engine, self.parameters().stepped
        if any(isinstance(one, ReduceLROnPlateau) for one in self.schedulers):
            raise TypeError("ReduceLROnPlateau needs a metric, which no window knows; step it yourself")
        if any(isinstance(one, LBFGS) for one in self.optimizers):
            raise TypeError(
                "LBFGS needs a closure that evaluates the model again, which no window has; step it yourself"
            )
        if engine.peers.has_parts:
            self._refuse_with_parts(config)
        if engine.pipeline is not None and self.accelerated.run_backward is not None:
            raise ValueError(
                "accelerator with a pipeline's schedule, which runs forward and backward of its chunks itself; leave it"
                " out"
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
        if self.scaler is not None:
            if engine.owns_step:
                raise ValueError(f"scaler with {engine.name}, which scales losses itself; leave it out")
            refuse_mixed(self.optimizers)
        if engine.steps_nonfinite is not None and config.on_nonfinite != "ignore":
            raise ValueError(
                f"on_nonfinite={config.on_nonfinite!r} with {engine.name}, which steps gradients that are not finite "
                f"{engine.steps_nonfinite}, or say 'ignore'"
            )
        if engine.judges_gradients and engine.steps_nonfinite is None and config.on_nonfinite == "ignore":
            raise ValueError(
                f"on_nonfinite='ignore' with {engine.name}, which looks at each gradient and skips what is not "
                "finite; say 'raise' or 'skip'"
            )
        looks = {
            f"max_norm={config.max_norm}": config.max_norm is not None,
            f"on_nonfinite={config.on_nonfinite!r}": config.on_nonfinite != "ignore",
            "scaler": self.scaler is not None,
        }
        why = engine.hides_parts()
        if why is not None and any(looks.values()):
            raise ValueError(
                f"{', '.join(look for look, is_wanted in looks.items() if is_wanted)} with {engine.name} {why}: "
                "each rank would look at its own part of the gradient, and ranks would decide differently. Use "
                "fully_shard over the data-parallel mesh, or leave these out, with on_nonfinite='ignore'"
            )
        if not self._models_parameters:
            raise ValueError("the model has no parameters, so there is no gradient to accumulate")
        if self.optimizers and not {*map(id, self._models_parameters)} & {*map(id, stepped)}:
            raise ValueError(
                "the optimizer holds none of the model's parameters; make it from model.parameters() after the "
                "model is moved, wrapped and complete"
            )

    def _refuse_with_parts(self, config: Config) -> None:
        if count_samples in config.counts.values():
            raise ValueError(
                "count=count_samples with a mesh whose ranks have parts of the same samples: each would count them "
                "whole; use count_tokens, or a function of your own that counts this rank's part"
            )
        for over in [
            one.over for one in config.counts.values() if isinstance(one, TokenCount) and one.over is not None
        ]:
            seen, expected = sorted(over.mesh.flatten().tolist()), sorted(self.engine.peers.sharing_parts)
            if seen != expected:
                raise ValueError(
                    f"count_tokens(over=) is a mesh of ranks {seen}, and ranks {expected} have parts of the same "
                    "samples by mesh=; give the dimension that cuts samples to over, and those that carry data to mesh"
                )


@dataclass(frozen=True)
class Parameters:
    every: list[nn.Parameter]  # the models' and the optimizers', each once
    stepped: list[nn.Parameter]  # the optimizers'
    groups: list[Sequence[nn.Parameter]]  # that take part as a whole, an optimizer's each


def owned_by(optimizer: Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def unique(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    return list({id(parameter): parameter for parameter in parameters}.values())


# The caller's own step() in mid-window


def guard_steps(optimizer: Any, owner: Any, holds_gradients: Callable[[Any], bool]) -> None:
    """Refuses the caller's step() while `holds_gradients(owner)`, before it changes a weight; goes with `owner`."""
    if not hasattr(optimizer, "register_step_pre_hook"):
        return
    this = weakref.ref(owner)

    def refuse(*_: object) -> None:
        found = this()
        if found is not None and holds_gradients(found):
            raise DistaccumError(
                "optimizer.step() before the window's own: the gradients in it belong to the window; call "
                "window.step() after its loop and nothing else, or give the Accumulator optimizer=None and step "
                "before it"
            )

    weakref.finalize(owner, optimizer.register_step_pre_hook(refuse).remove)
