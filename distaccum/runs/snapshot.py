"""Copies of buffers, modes and random numbers, taken before the model runs and restored."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from ..state.randomness import random_devices, random_state, set_random_state


class Snapshot:
    """The models' current buffers and random numbers, to be restored."""

    @torch.no_grad()
    def __init__(self, models: Sequence[nn.Module]) -> None:
        # All buffers, since batch normalisation updates its statistics without a change of their version.
        modules = {id(module): module for model in models for module in model.modules()}.values()
        own = [(module, module.named_buffers(recurse=False, remove_duplicate=False)) for module in modules]
        # Copies that are made in inference mode could not be used outside it.
        with torch.inference_mode(False):
            self._buffers = [(module, name, b, b.clone()) for module, buffers in own for name, b in buffers]
        self.random = random_state(random_devices(models))

    def restore(self) -> None:
        self.restore_buffers()
        set_random_state(self.random)

    @torch.no_grad()
    def restore_buffers(self) -> None:
        for module, name, buffer, copy in self._buffers:
            is_strided = buffer.layout is torch.strided
            steps = zip(buffer.stride(), buffer.shape, strict=True) if is_strided else ()
            # Torch refuses to write to a buffer that was expanded.
            if not any(step == 0 and num > 1 for step, num in steps):
                buffer.copy_(copy)
            # The model may have replaced or deleted it.
            if getattr(module, name, None) is not buffer:
                (setattr if hasattr(module, name) else nn.Module.register_buffer)(module, name, buffer)


@contextmanager
def kept(models: Sequence[nn.Module], parameters: Iterable[nn.Parameter] = ()) -> Iterator[Snapshot]:
    """Restores buffers, random numbers, modes and the gradients of `parameters` at the end of the block."""
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
