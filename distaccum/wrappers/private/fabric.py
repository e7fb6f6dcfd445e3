"""Private names of Fabric (lightning_fabric, or lightning.fabric) and of Lightning's optimizers, seen in 2.6.6.

Fabric has no public names for the classes that `setup` returns, nor for what they hold.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from ...private import replaced, require

HOME, OPTIMIZER = "lightning_fabric.wrappers", "pytorch_lightning.core.optimizer.LightningOptimizer"
# Name, what for, since which version, and what happens without it.
NAMES = (
    (f"{HOME}._FabricModule", "finds what Fabric made", "2.6", "no wrapper of Fabric's is taken off"),
    (f"{HOME}._FabricOptimizer", "finds what Fabric made", "2.6", "no wrapper of Fabric's is taken off"),
    (f"{HOME}._FabricModule._forward_module", "the module as the strategy wrapped it", "2.6", "refused"),
    (f"{HOME}._FabricModule._strategy", "the strategy, with its precision and scaler", "2.6", "refused"),
    (f"{HOME}._in_fabric_backward", "passes for Fabric's own backward", "2.6", "Fabric refuses the backward"),
    (f"{OPTIMIZER}._on_before_step", "makes the Trainer count a step", "2.6", "it does not count"),
    (f"{OPTIMIZER}._on_after_step", "makes the Trainer count a step", "2.6", "it does not count"),
    ("torch.optim.lr_scheduler._opt_called", "tells a schedule of a step", "2.9", "the schedule does not ask"),
)
FABRIC = ("lightning_fabric.wrappers", "lightning.fabric.wrappers")
TRAINER = ("pytorch_lightning.core.optimizer", "lightning.pytorch.core.optimizer")


def wrapped_module(wrapper: Any) -> nn.Module:
    """The module as the strategy wrapped it, such as a DistributedDataParallel; `wrapper.module` is the one inside."""
    require("Lightning", wrapper, "_forward_module")
    module: nn.Module = wrapper._forward_module
    return module


def strategy_of(wrapper: Any) -> Any:
    require("Lightning", wrapper, "_strategy")
    return wrapper._strategy


def during_backward(wrapper: Any, call: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `call` to pass for Fabric's own backward, by a flag without which the module's outputs refuse any other.

    In a version without the flag they refuse, in Fabric's words.
    """
    home: Any = is_module(wrapper)

    def run(*args: Any) -> Any:
        with replaced(home, _in_fabric_backward=True):
            return call(*args)

    return run


def note_fabrics_step(wrapper: Any) -> None:
    """Tells a torch schedule made from a _FabricOptimizer about a step: it warns without `_opt_called`."""
    wrapper._opt_called = True


def note_trainers_step(wrapper: Any) -> None:
    """Makes the Trainer count a step that its LightningOptimizer did not take; if the names are missing it does not."""
    for name in ("_on_before_step", "_on_after_step"):
        getattr(wrapper, name, lambda: None)()


def _home_of(modules: tuple[str, ...], name: str, value: object) -> object | None:
    """The loaded module whose class `name` the value is an instance of; imports nothing."""
    for module in modules:
        kind = getattr(sys.modules.get(module), name, None)
        if kind is not None and isinstance(value, kind):
            return sys.modules[module]
    return None


is_module: Callable[[object], Any] = partial(_home_of, FABRIC, "_FabricModule")
is_optimizer: Callable[[object], Any] = partial(_home_of, FABRIC, "_FabricOptimizer")
is_trainers_optimizer: Callable[[object], Any] = partial(_home_of, TRAINER, "LightningOptimizer")
