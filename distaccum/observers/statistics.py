"""Running statistics of batch normalisation, moved once per window by those of the whole window."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn

from ..batchnorm import batchnorms
from ..engines import Engine
from ..gradients.norms import widest
from ..gradients.private import is_compiled, version_of
from ..law.errors import DistaccumError
from ..law.shares import shorten
from ..window.observer import Observer
from ..window.status import WAITING, Status


# Running statistics, once per window
@dataclass
class Seen:
    """What a layer saw: of `number` values per channel the mean, and the sum of squares around it."""

    number: Tensor
    mean: Tensor
    squares: Tensor

    def add(self, other: Seen) -> None:
        """As if all values had been seen at once (Chan, Golub and LeVeque), so that nothing cancels."""
        number = self.number + other.number
        part = other.number / number.clamp(min=1)
        apart = other.mean - self.mean
        self.mean = self.mean + apart * part
        self.squares = self.squares + other.squares + apart.square() * (self.number * part)
        self.number = number


@dataclass
class Layer:
    module: Any
    seen: list[Seen] = field(default_factory=list)  # one; of a SyncBatchNorm one per forward
    kept: tuple[Any, ...] = ()  # the module's own buffers and momentum, while it runs forward
    # What a forward that runs no hooks would move: a buffer, its version, and its value as the window began.
    before: tuple[Tensor, int, Tensor] | None = None

    def mark(self) -> None:
        tracked = self.module.num_batches_tracked
        buffer = self.module.running_mean if tracked is None else tracked
        self.before = buffer, version_of(buffer), buffer.clone()

    @property
    def was_moved(self) -> bool:
        """Whether a forward in training was not seen. Reads on the host only where it may be so."""
        if self.seen or not self.module.training or self.before is None:
            return False
        buffer, version, value = self.before
        return version_of(buffer) != version and not torch.equal(buffer, value)

    @property
    def is_synchronised(self) -> bool:
        return isinstance(self.module, nn.SyncBatchNorm)

    def joined(self, by_rank: Sequence[Sequence[Seen]]) -> Seen:
        if self.is_synchronised:  # each forward was of all ranks: each has the same statistics, and its own number
            forwards = []
            for same in zip(*by_rank, strict=True):
                number = torch.stack([one.number for one in same]).sum()
                forwards.append(Seen(number, same[0].mean, same[0].squares * (number - 1).clamp(min=0)))
        else:
            forwards = [one for rank in by_rank for one in rank]
        first, *others = forwards
        total = Seen(first.number, first.mean, first.squares)
        for other in others:
            total.add(other)
        return total


@final
class Pool(Observer):
    """Moves running statistics once per window, by those of all its micro-batches on all ranks.

    For n values per channel in each forward, with mean m and variance v:

        N = sum n    M = sum n m / N    V = sum n (v + (m - M)^2) / N
        running_mean += momentum (M - running_mean)    running_var += momentum (V N / (N - 1) - running_var)

    which is what one forward of all samples would have done to the first layer, where the weights are the same; deeper
    layers saw inputs that had been normalised by each micro-batch's own statistics.
    """

    key = "statistics"

    def __init__(self, models: Sequence[nn.Module], engine: Engine) -> None:
        self._engine = engine
        self._at: Status | None = None
        self._in_loss = False
        self._layers = [
            Layer(layer) for model in models for _, layer in batchnorms(model) if layer.running_mean is not None
        ]
        self._hooks: list[Any] = []
        known = nn.BatchNorm1d.forward, nn.SyncBatchNorm.forward
        other = [type(layer.module).__name__ for layer in self._layers if type(layer.module).forward not in known]
        if other:
            raise ValueError(
                f"batchnorm='pool' with {shorten(other)}, whose forward is not torch's and may read the statistics "
                "that are lent to it; accept each micro-batch's statistics with batchnorm='ignore'"
            )
        pooled = {id(layer.module) for layer in self._layers}
        for name, module in (named for model in models for named in model.named_modules()):
            if is_compiled(module) and any(id(inner) in pooled for inner in module.modules()):
                raise ValueError(f"batchnorm='pool' and torch.compile of {name or 'the model'}, {NO_HOOKS}")

    def begin(self, at: Status) -> None:
        """Forwards leave the statistics alone from here on, and are kept for `end` where they count."""
        self._remove_hooks()  # that Ctrl-C left, in the lines below
        self._at = at
        for layer in self._layers:
            layer.seen = []
            layer.mark()
            self._hooks.append(layer.module.register_forward_pre_hook(_Hook(partial(_lend, layer))))
            # First of all hooks: another accumulator's lent before this one.
            take_back = _Hook(partial(_take_back, layer, self._counts))
            self._hooks.append(
                layer.module.register_forward_hook(take_back, always_call=True, with_kwargs=True, prepend=True)
            )

    def _counts(self) -> bool:
        """Whether a forward is of this window's samples: not recomputed in backward, nor after it, nor a stand-in."""
        at = self._at
        return self._in_loss or (at is not None and at.turn is WAITING and not at.source.is_stand_in)

    @contextmanager
    def counting(self, counts: bool) -> Iterator[None]:
        """In it all forwards are counted, or none: of a loss over all pairs, which one rank counts."""
        self._in_loss = counts
        try:
            yield
        finally:
            self._in_loss = False

    def finishing(self, at: Status) -> None:
        self._remove_hooks()
        if any(layer.was_moved for layer in self._layers):  # a compiled function cannot be known before it runs
            raise DistaccumError(
                "batchnorm='pool', and a forward in training moved the running statistics of a layer and was not seen: "
                f"a compiled function called it, {NO_HOOKS}. The window is discarded; what this forward did to the "
                "statistics stays"
            )

    def _remove_hooks(self) -> None:
        while self._hooks:
            self._hooks[-1].remove()
            self._hooks.pop()
        self._at = None
        for layer in self._layers:
            _give_back(layer)  # where Ctrl-C came in its forward

    def end(self, outcome: str) -> None:
        """Moves the statistics of a window that was stepped; on all ranks, one collective."""
        self._remove_hooks()
        if outcome != "stepped" or not self._layers:
            return
        for layer in self._layers:
            layer.seen = layer.seen or [_nothing(layer.module)]
        for layer, by_rank in zip(self._layers, zip(*self._of_all_ranks(), strict=True), strict=True):
            _move(layer.module, layer.joined(by_rank))
            layer.seen = []

    def _of_all_ranks(self) -> list[list[list[Seen]]]:
        """By rank and layer."""
        mine = [layer.seen for layer in self._layers]
        if self._engine.peers.num_ranks == 1:
            return [mine]
        flat = torch.cat([torch.cat([one.number.reshape(1), one.mean, one.squares]) for seen in mine for one in seen])
        packed = self._engine.peers.gather_bytes(
            flat.view(torch.uint8), [8 * flat.numel()] * self._engine.peers.num_ranks
        )
        widths = [1 + 2 * one.mean.numel() for seen in mine for one in seen]
        everyone = []
        for of_rank in packed:
            pieces = iter(torch.split(of_rank.view(torch.float64), widths))
            everyone.append(
                [[Seen(p[0], *p[1:].chunk(2)) for _, p in zip(seen, pieces, strict=False)] for seen in mine]
            )
        return everyone

    def state(self) -> Any:
        """In mid-window, on the host."""
        return [[(one.number.cpu(), one.mean.cpu(), one.squares.cpu()) for one in layer.seen] for layer in self._layers]

    def load(self, state: Any) -> None:
        for layer, seen in zip(self._layers, state or [[]] * len(self._layers), strict=True):
            device = layer.module.running_mean.device
            layer.seen = [Seen(*(number.to(device) for number in numbers)) for numbers in seen]


# torch.compile neither guards on them nor runs those that came after it traced (skip_nnmodule_hook_guards).
NO_HOOKS = (
    "which does not run the hooks that read the statistics; leave what holds batch normalisation uncompiled, or accept "
    "each micro-batch's statistics with batchnorm='ignore'"
)


class _Hook:
    """On this module, in this window: a copy of the module gets one that does nothing."""

    def __init__(self, call: Callable[..., None] | None = None) -> None:
        self._call = call

    def __call__(self, *args: Any) -> None:
        if torch.compiler.is_compiling():
            # What traces this runs the layer uncompiled then (or ends, with fullgraph=True): older versions of torch
            # would keep this window's hook in what they compiled.
            raise DistaccumError(f"batchnorm='pool' and torch.compile of what calls the model, {NO_HOOKS}")
        if self._call is not None:
            self._call(*args)

    def __reduce__(self) -> Any:
        return _Hook, ()


BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


def _lend(layer: Layer, module: Any, inputs: Any) -> None:
    """Other buffers, in which the forward leaves this batch's own statistics."""
    if not module.training or module.running_mean is None:
        return
    layer.kept = (*(getattr(module, name) for name in BUFFERS), module.momentum)
    for name in BUFFERS:
        if (buffer := getattr(module, name)) is not None:
            setattr(module, name, torch.zeros_like(buffer))
    module.momentum = 1.0


def _give_back(layer: Layer) -> None:
    if layer.kept:
        *buffers, layer.module.momentum = layer.kept
        for name, buffer in zip(BUFFERS, buffers, strict=True):
            setattr(layer.module, name, buffer)
        layer.kept = ()


def _take_back(
    layer: Layer, counts: Callable[[], bool], module: Any, args: tuple[Any, ...], kwargs: Any, outputs: Any
) -> None:
    if not layer.kept:
        return
    mean, variance = module.running_mean, module.running_var
    _give_back(layer)
    if outputs is None or not counts():
        return
    inputs = args[0] if args else kwargs["input"]
    mean, variance = widest(mean), widest(variance)
    number = mean.new_full((), inputs.numel() // inputs.shape[1])
    if layer.is_synchronised:
        layer.seen.append(Seen(number, mean, variance))  # how many all ranks had is known at the window's edge
        return
    now = Seen(number, mean, variance * (number - 1))
    if layer.seen:
        layer.seen[0].add(now)
    else:
        layer.seen = [now]


def _nothing(module: Any) -> Seen:
    zeros = widest(torch.zeros_like(module.running_mean))
    return Seen(zeros.new_zeros(()), zeros, zeros)


@torch.no_grad()
def _move(module: Any, total: Seen) -> None:
    any_seen = total.number > 0  # on any rank; read on the device
    tracked = total.mean.new_ones(())
    if module.num_batches_tracked is not None:
        module.num_batches_tracked.add_(any_seen)
        tracked = module.num_batches_tracked.to(total.mean.dtype).clamp(min=1)
    momentum = any_seen * (tracked.reciprocal() if module.momentum is None else tracked.new_tensor(module.momentum))
    for running, now in (
        (module.running_mean, total.mean),
        (module.running_var, total.squares / (total.number - 1).clamp(min=1)),
    ):
        running.lerp_(now.to(running.dtype), momentum.to(running.dtype))
