"""Job: the models and what trains them, chosen and checked once, and where training stands: its random numbers too."""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn, final

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import LBFGS, Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from .adapter import Prepared, adapters_for
from .batchnorm import batchnorms
from .cutting import count_samples
from .engines import Engine, choose_engine
from .law import DistaccumError, Once
from .options import Config, as_list
from .sizes import MicroBatchSize

MOST_SKIPS = 50  # in a row
Counts = tuple[float, ...]  # denominators of one micro-batch, by name
Seen = dict[tuple[Any, ...], bool]  # by the place in a batch, whether it was cut or whole


@dataclass(slots=True)
class Micro:
    """A micro-batch of this rank; without its batch once the loop has it."""

    batch: Any
    counts: Counts
    number: int  # among all that were drawn, also those in which nothing counts
    pieces: Sequence[Counts] = ()  # of what it is run in, where a pipeline cuts it

    def take(self) -> Any:
        """Hands the batch over: it is the caller's to free."""
        batch, self.batch = self.batch, None
        return batch


class Hooks(NamedTuple):
    """By event, the methods of extensions that override it, looked up once; the first argument is the window."""

    begin: tuple[Callable[[Any], None], ...] = ()
    before_backward: tuple[Callable[[Any, bool], None], ...] = ()
    after_backward: tuple[Callable[[Any], None], ...] = ()
    finishing: tuple[Callable[[Any], None], ...] = ()
    numbers: tuple[Callable[[Any], Tensor | None], ...] = ()
    judge: tuple[Callable[[Any], str | None], ...] = ()
    end: tuple[Callable[[Any, Any], None], ...] = ()

    def tell_end(self, window: Any, update: Any) -> None:
        """Calls all of `end`, whatever one raises."""
        errors: list[Exception] = []
        for hear in self.end:
            try:
                hear(window, update)
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]


@dataclass(frozen=True)
class Manner:
    """How a window is run."""

    hooks: Hooks | None = None  # None: those of the accumulator's extensions
    agrees: bool = False  # ranks agree before they reduce
    is_sum: bool = False  # its loss is a sum over samples, whatever the accumulator's reductions say
    by_hand: bool = False  # no backward reduces


LOOP = Manner()


@dataclass
class Trace:
    """A note of a window that holds gradients: nobody may take them for those of the next if it is dropped."""

    update: int  # its index
    lacks_step: bool = False  # its loop is complete


@final
class Job:
    """Everything that the windows of an Accumulator share."""

    def __init__(
        self, config: Config, model: Any, optimizer: Any, scheduler: Any, scaler: Any, accelerator: Any
    ) -> None:
        given = Prepared(
            as_list("model", model, "forward"),
            as_list("optimizer", optimizer, "param_groups"),
            as_list("scheduler", scheduler, "step"),
            scaler if scaler is not None and scaler.is_enabled() else None,
        )
        self.adapters = adapters_for(accelerator)
        for one in self.adapters:
            one.unwrap(given)
        self.config = config
        self.engine: Engine = choose_engine(given.models, config.sync, config.mesh)
        self.models: list[nn.Module] = list(self.engine.models)
        for one in self.adapters:
            self.engine.run_backward = one.around(self.engine.run_backward)
        self.engine.adopt(given, config.max_norm, config.on_nonfinite)
        self.scaler: GradScaler | None = given.scaler
        self.optimizers: list[Optimizer] = given.optimizers
        self.schedulers: list[LRScheduler] = given.schedulers
        self.steps = bool(self.optimizers) or "step" in self.engine.owns  # else the caller does
        self.scales_seeds = not any(one.scales_losses for one in self.adapters)  # what runs backward would, too
        self.epochs: list[int] = []  # of the schedules, after their last step
        self.once = Once(self.engine.peers.rank)
        self.batchnorms = [named for one in self.models for named in batchnorms(one)]
        self.hooks = Hooks()
        self._models_parameters = self.engine.parameters()
        self._every: list[nn.Parameter] = []  # the models' and the optimizers', each once
        self.trained: list[nn.Parameter] = []  # the optimizers', each once
        self.groups: list[Sequence[nn.Parameter]] = []  # that take part as a whole, an optimizer's each
        self._owned: list[int] | None = None  # ids of what the optimizers had when they were seen last
        self.parameters()
        self._refuse(config)
        self.begin_anew()

    def begin_anew(self) -> None:
        """Sets what moves on from window to window."""
        self.index = 0  # of the next update
        self.skipped = 0  # updates in a row
        self.num_contrasts = 0  # that ended well in this process
        self.trace: Trace | None = None  # of the window that is open
        self.size = MicroBatchSize(None if self.config.most == "auto" else self.config.most)
        self.seen: Seen = {}  # what was cut of batches, and what went whole
        self.spare: Micro | None = None  # of a window whose gradient was finite, to stand in with
        self.random = RandomNumbers(self.models, self.once)

    def refuse_to_skip_on(self, reason: str | None) -> NoReturn:
        skipped, self.skipped = self.skipped, 0
        raise DistaccumError(
            f"{skipped} updates in a row were skipped, the last because {reason}; nothing is learned like "
            "this. Look at the data and at the weights, lower the learning rate, or go back to a checkpoint"
        )

    @property
    def forwards_communicate(self) -> bool:
        """True if each forward or backward waits for all ranks."""
        return self.engine.lockstep and self.engine.sync != "gathered"

    def parameters(self) -> list[nn.Parameter]:
        """All parameters of now, each once: an optimizer may have got others."""
        owned = [id(p) for one in self.optimizers for group in one.param_groups for p in group["params"]]
        if owned != self._owned:  # it keeps them, so that no other has their ids
            groups = [[p for group in one.param_groups for p in group["params"]] for one in self.optimizers]
            self._owned, self.groups = owned, [*groups] or [self._models_parameters]
            self.trained = unique(p for group in groups for p in group)
            self._every = unique([*self._models_parameters, *self.trained])
        return self._every if owned else self.engine.parameters()

    def stepped(self) -> list[nn.Parameter]:
        """The optimizers' parameters, or all of the models' if the caller steps."""
        return self.trained or self.engine.parameters()

    def _refuse(self, config: Config) -> None:
        """Refuses options that the engine or the optimizers do not support."""
        engine = self.engine
        if any(isinstance(one, ReduceLROnPlateau) for one in self.schedulers):
            raise TypeError("ReduceLROnPlateau needs a metric, which no window knows; step it yourself")
        if any(isinstance(one, LBFGS) for one in self.optimizers):
            raise TypeError(
                "LBFGS needs a closure that evaluates the model again, which no window has; step it yourself"
            )
        if engine.peers.has_parts and count_samples in config.counts.values():
            raise ValueError(
                "count=count_samples with a mesh whose ranks have parts of the same samples: each would count them "
                "whole; use count_tokens, or a function of your own that counts this rank's part"
            )
        if engine.pipeline is not None and not self.scales_seeds:
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
        for one, owned in zip(self.optimizers, self.groups, strict=False) if self.scaler is not None else ():
            if len({hasattr(p, "to_local") for p in owned}) > 1:
                raise ValueError(
                    f"scaler with a {type(one).__name__} that holds sharded and plain parameters, which a GradScaler "
                    "cannot unscale together; make an optimizer for each kind and pass both"
                )
        if not self._models_parameters:
            raise ValueError("the model has no parameters, so there is no gradient to accumulate")
        if self.optimizers and not {*map(id, self._models_parameters)} & {*(self._owned or ())}:
            raise ValueError(
                "the optimizer holds none of the model's parameters; make it from model.parameters() after the "
                "model is moved, wrapped and complete"
            )


def unique(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    return list({id(parameter): parameter for parameter in parameters}.values())


# Random numbers of torch, Python and numpy


@final
class RandomNumbers:
    """This rank's random numbers when a window begins: kept for a state, and put back from one."""

    def __init__(self, models: Sequence[nn.Module], once: Once) -> None:
        self._models, self._once = models, once
        self.loaded: dict[str, Any] | None = None  # of a state, until a window begins
        self.at_start: dict[str, Any] = {}  # of the last window
        self._devices: list[torch.device] | None = None

    def begin(self) -> None:
        """A window begins, before its first forward: its data are drawn, which may have drawn numbers too."""
        self.put_back()
        if self._devices is None:  # looked up once: a large model has thousands of tensors
            self._devices = random_devices(self._models)
        self.at_start = random_state(self._devices, self.at_start)

    def put_back(self) -> None:
        """Sets the numbers of a loaded state, once."""
        loaded, self.loaded = self.loaded, None
        if loaded is None:
            return
        devices, found = list(map(str, random_devices(self._models))), loaded["devices"]
        if [torch.device(name).type for name in devices] != [torch.device(name).type for name in found]:
            self._once(
                "devices",
                f"the state has the random numbers of {list(found) or 'no device'} and this model is on "
                f"{devices or 'none'}, so those of devices are left out",
            )
            devices = []
        set_random_state({**loaded, "devices": dict(zip(devices, found.values(), strict=False))})

    def now(self) -> dict[str, Any]:
        """The numbers that a window which began now would have."""
        return random_state(random_devices(self._models)) if self.loaded is None else self.loaded


def random_devices(models: Sequence[nn.Module]) -> list[torch.device]:
    """The devices that these models compute on and that have random numbers of their own."""
    tensors = (tensor for model in models for tensor in (*model.parameters(), *model.buffers()))
    return list({tensor.device: None for tensor in tensors if tensor.device.type in ("cuda", "xpu", "mps")})


def random_state(devices: Sequence[torch.device], known: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
    """The state of torch on the host and on these devices, of `random`, and of numpy if it is loaded.

    `known` is an earlier one, of which numpy's is taken over where it has not changed.
    """
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate(), "devices": {}}
    for device in devices:
        state["devices"][str(device)] = torch.get_device_module(device).get_rng_state(device)
    if (numpy := sys.modules.get("numpy")) is not None:
        found = known.get("numpy")
        if found is None or not _is_unchanged(numpy, *found):
            kind, keys, *rest = numpy.random.get_state()
            found = (kind, keys.tobytes(), *rest)
        state["numpy"] = found
    return state


def _is_unchanged(numpy: Any, kind: str, keys: bytes, position: int, has_normal: int, _: float) -> bool:
    """Tells whether numpy's numbers are still these, without `get_state`, which takes as long as 40 of torch's.

    A second normal number that waits (`has_normal`) may be drawn without a trace in the memory that is compared.
    """
    generator: Any = getattr(numpy.random, "get_bit_generator", lambda: None)()  # from numpy 1.24 on
    if has_normal or type(generator).__name__ != kind or kind != "MT19937":
        return False
    expected = keys + position.to_bytes(4, sys.byteorder)
    return ctypes.string_at(generator.ctypes.state_address, len(expected)) == expected


def set_random_state(state: Mapping[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    for device, of_device in state["devices"].items():
        torch.get_device_module(device).set_rng_state(of_device, torch.device(device))
    if "numpy" in state and (numpy := sys.modules.get("numpy")) is not None:
        kind, keys, *rest = state["numpy"]
        numpy.random.set_state((kind, numpy.frombuffer(keys, dtype=numpy.uint32), *rest))


def check_random_state(state: Mapping[str, Any]) -> None:
    """Raises if `set_random_state` could not set it."""
    before = random_state([])
    try:
        set_random_state({**state, "devices": {}})
    finally:
        set_random_state(before)


def set_seed(seed: int) -> None:
    """Seeds every generator that `random_state` reads."""
    torch.manual_seed(seed)
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed % 2**32)
