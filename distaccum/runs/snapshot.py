"""Buffers, modes and random numbers: copied before the model runs, and restored."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from .randomness import random_devices, random_state, set_random_state


class Snapshot:
    """The models' buffers and the random numbers of now, to be restored."""

    @torch.no_grad()
    def __init__(self, models: Sequence[nn.Module]) -> None:
        # All of them: what batch normalisation does to its statistics shows in no version counter.
        modules = {id(module): module for model in models for module in model.modules()}.values()
        own = [(module, module.named_buffers(recurse=False, remove_duplicate=False)) for module in modules]
        with torch.inference_mode(False):  # else the copies could not be read outside of it
            self._buffers = [(module, name, one, one.clone()) for module, buffers in own for name, one in buffers]
        self.random = random_state(random_devices(models))

    def restore(self) -> None:
        self.restore_buffers()
        set_random_state(self.random)

    @torch.no_grad()
    def restore_buffers(self) -> None:
        for module, name, buffer, copy in self._buffers:
            if not _has_repeats(buffer):
                buffer.copy_(copy)
            if getattr(module, name, None) is not buffer:  # the loss put another in its place, or deleted it
                (setattr if hasattr(module, name) else nn.Module.register_buffer)(module, name, buffer)


@contextmanager
def kept(models: Sequence[nn.Module], parameters: Iterable[nn.Parameter] = ()) -> Iterator[Snapshot]:
    """Restores buffers, random numbers, modes and these parameters' gradients at its end."""
    gradients = [(p, p.grad, p.grad.clone()) for p in parameters if p.grad is not None]
    modes = [(module, module.training) for model in models for module in model.modules()]
    snapshot = Snapshot(models)
    try:
        yield snapshot
    finally:
        for module, training in modes:
            module.training = training
        snapshot.restore()
        for parameter, gradient, values in gradients:
            parameter.grad = gradient.copy_(values)


def _has_repeats(buffer: Tensor) -> bool:
    """Tells whether it was expanded, so that no operation of torch writes to it."""
    is_strided = buffer.layout is torch.strided
    return is_strided and any(step == 0 and n > 1 for step, n in zip(buffer.stride(), buffer.shape, strict=True))
