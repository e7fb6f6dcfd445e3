"""Extension: the seam for optional code that takes part in windows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor

from .engines.base import Gradient
from .job import Hooks, Job
from .text import shown
from .update import Update
from .window import Window

EVENTS = "begin", "before_backward", "after_backward", "finishing", "numbers", "judge", "end"
# The keys of a state, besides those of extensions.
KEYS = frozenset({"index", "skipped", "due", "fit", "scaler", "ranks"})


class Extension:
    """A participant in the windows of one Accumulator; override the methods that you need.

    Only overridden methods are called, in the order of `extensions=`. One that raises discards the window.

    Attributes:
        key (str): The name of its state and of its numbers; "" if it has neither.
        in_contrast (bool): False skips windows of `contrast()`, whose loss is not a mean over micro-batches.
    """

    key = ""
    in_contrast: ClassVar[bool] = True

    def join(self, job: Job) -> None:
        """Raises if it cannot work with this `job`'s `engine`, `models`, `optimizers`, `scaler` or `config`."""

    def begin(self, window: Window) -> None:
        """Called when the `window` begins, before its first micro-batch; it has its `index`, `counts` and length."""

    def before_backward(self, window: Window, reduces: bool) -> None:
        """Called before each backward of the `window`; `reduces`: other ranks take part in it."""

    def after_backward(self, window: Window) -> None:
        """Called after each backward of the `window` that ended without an error."""

    def finishing(self, window: Window) -> None:
        """Called after the loop over the `window`, before the library reduces whatever no backward has reduced."""

    def numbers(self, window: Window) -> Tensor | None:
        """Numbers of the `window` for the ranks to add up with the losses: a tensor of one length on all ranks.

        Called when gradients are final, still multiplied by a scaler's scale. `update.summed(key)` is their sum. Leave
        out what a rank did while it stood in (`window.stand_in`).
        """
        return None

    def judge(self, window: Window, gradient: Gradient) -> str | None:
        """Says why not to step the `window`, the same on all ranks, or None; called before clipping.

        The `gradient` has a `norm`, a float, and is `finite` or not: the whole one, on any engine, unscaled. One that
        is not comes here only with `on_nonfinite="ignore"`. Read them on all ranks or on none. The first reason of an
        extension skips, so the next ones are not asked; learn in `end`, which knows whether the update was stepped.
        """
        return None

    def end(self, window: Window, update: Update | None) -> None:
        """Called when a `window` that began is over, on every extension, even if another one raises.

        Write what you like to the `notes` of the `update`, which is None if the window was discarded.
        """

    def state(self) -> Any:
        """The state that `Accumulator.state_dict()` stores under `key`."""
        return None

    def load(self, state: Any) -> None:
        """Restores the `state` that `state()` returned, or None; an error must come before any change."""


def hooks_of(extensions: Sequence[Extension]) -> Hooks:
    """The methods that they override, looked up once."""
    return {
        name: [getattr(one, name) for one in extensions if getattr(type(one), name) is not getattr(Extension, name)]
        for name in EVENTS
    }


def join_all(extensions: Sequence[Extension], job: Job, first: Extension) -> None:
    """Makes the extensions take part in the windows of `job`, after the `first`, or raises."""
    if not isinstance(extensions, list | tuple) or not all(isinstance(one, Extension) for one in extensions):
        raise TypeError(f"extensions={shown(extensions)}, expected a list of distaccum.Extension, as [NoiseScale()]")
    keys = [one.key for one in extensions if one.key or type(one).numbers is not Extension.numbers]
    if len(set(keys)) < len(keys) or KEYS.intersection(keys):
        raise ValueError(f"extensions have the keys {keys}, expected each once, and none of {', '.join(sorted(KEYS))}")
    every = [first, *extensions]
    for extension in every:
        if type(extension).judge is not Extension.judge and not job.steps:
            raise ValueError(
                f"{type(extension).__name__}.judge skips where the library steps, and no optimizer was given; pass it, "
                "or skip yourself before window.step()"
            )
        extension.join(job)
    job.extensions = tuple(extensions)
    job.hooks = hooks_of(every)
