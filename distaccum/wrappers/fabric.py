"""Fabric and Lightning: unwraps what `fabric.setup` returned, and uses the scaler of Fabric or of the Trainer.

Fabric's strategies wrap the module in one of the other engines' wrappers, so that engine does the work. Autocast and
casts of inputs stay in the wrapper's forward, which the caller calls. Optimizers are unwrapped, because Fabric's own
step goes through the precision plugin, which unscales and updates the scaler once per optimizer. So does the Trainer's;
but without a scaler its optimizer stays wrapped, because the wrapper calls hooks and counts steps.
"""

from __future__ import annotations

from typing import Any, final

from torch import nn

from ..adapter import Adapter, Prepared, RunBackward
from . import private

# Packages and classes whose own backward and step the library can replace.
PACKAGES = ("lightning_fabric", "lightning")
KNOWN = ("Strategy", "Precision", "MixedPrecision", "FSDPPrecision", "DeepSpeedPrecision")


@final
class FromFabric(Adapter):
    """Unwraps the models, optimizers and scaler that Fabric or the Trainer made."""

    def unwrap(self, given: Prepared) -> None:
        class_of = private.class_of
        modules = [module for one in given.models if isinstance(one, nn.Module) for module in one.modules()]
        self._modules = [module for module in modules if class_of(module, private.MODULE)]
        self._stepped = [one for one in given.optimizers if class_of(one, private.OPTIMIZER)]
        of_trainer = [one for one in given.optimizers if class_of(one, private.TRAINERS_OPTIMIZER)]
        self._counted = [one for one in of_trainer if _scaler_of_trainer(one)]
        theirs = list(map(_scaler_of_trainer, self._counted))
        for wrapper in (*self._modules, *self._stepped):
            strategy = private.strategy_of(wrapper)
            _refuse_unknown(strategy)
            theirs.append(getattr(strategy.precision, "scaler", None))
        known = {id(one): one for one in (given.scaler, *theirs) if one is not None}
        if len(known) > 1:
            raise ValueError(
                "scaler= beside the precision plugin's own, or plugins with a scaler each; leave scaler= out, and make "
                "an Accumulator for each plugin"
            )
        given.scaler = next(iter(known.values()), None)
        given.models = [private.wrapped_module(one) if class_of(one, private.MODULE) else one for one in given.models]
        own = (*self._stepped, *self._counted)
        given.optimizers = [one.optimizer if one in own else one for one in given.optimizers]

    def around(self, run_backward: RunBackward) -> RunBackward:
        return private.during_backward(self._modules[0], run_backward) if self._modules else run_backward

    def after_step(self, stepped: bool) -> None:
        """Tells Fabric's optimizers of the step, and makes the Trainer count it in `global_step`."""
        if stepped:
            for wrapper in self._stepped:
                private.note_step(wrapper, True)
            for wrapper in self._counted:
                private.note_trainers_step(wrapper)


def _scaler_of_trainer(wrapper: Any) -> Any:
    return getattr(getattr(private.strategy_of(wrapper), "precision_plugin", None), "scaler", None)


def _refuse_unknown(strategy: Any) -> None:
    """Refuses a strategy or plugin with a backward or step of its own: neither would be called."""
    names = ("backward", "optimizer_step", "pre_backward", "post_backward")
    own = []
    for of in (strategy, strategy.precision):
        for name in names:
            owner = next((kind for kind in type(of).__mro__ if name in vars(kind)), None)
            if owner and (owner.__name__ not in KNOWN or owner.__module__.partition(".")[0] not in PACKAGES):
                own.append(f"{owner.__name__}.{name}")
    if own:
        raise ValueError(
            f"Fabric's {strategy.__class__.__name__} with {' and '.join(own)}, which window.backward() and "
            "window.step() do not call; use Fabric's own strategy for one device, DDP, FSDP, DeepSpeed or "
            "ModelParallelStrategy with Fabric's own precision"
        )
