"""Losses: the factor of each loss in a window, and the record of the losses. No other place scales a loss."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any, NoReturn, final

import torch
from torch import Tensor

from .job import Job, Micro
from .law import Counts, Reduction, share_of
from .meshes.sharing import whole_loss
from .norms import HALF, number_of
from .ranks import Peers
from .scaling import is_scaled
from .text import a, shown

CURES = {  # for options of torch's backward
    "retain_graph": "for several losses of one forward use window.heads(outputs, items), or add them up",
    "create_graph": "for a gradient penalty call torch.autograd.grad(..., create_graph=True) and add it to the loss; "
    "for several losses of one forward use window.heads(outputs, items)",
    "inputs": "to leave parameters out, freeze them with requires_grad_(False); for the heads of a trunk use "
    "window.heads(outputs, items)",
    "gradient": "give a scalar, such as (outputs * gradient).sum(); for several heads use window.heads(outputs, items)",
}

Loss = Tensor | float  # as recorded: a plain number if it is on the host, where reading it needs no wait


def _wide(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64  # Apple's GPUs have no float64


def stacked(losses: Sequence[Loss], device: torch.device) -> Tensor:
    """Losses in one tensor on this device."""
    wide = _wide(device)
    own = [torch.as_tensor(loss, dtype=getattr(loss, "dtype", wide), device=device) for loss in losses]
    return torch.stack(own).to(wide)


@final
class Losses:
    """Gives each loss its share as the seed of backward, so that no factor enters the graph."""

    def __init__(
        self, job: Job, reductions: Mapping[str, Reduction], totals: Mapping[str, float], device: torch.device
    ) -> None:
        self.reductions = reductions
        self.engine = job.engine
        self.device = device
        self._names = tuple(reductions)
        self._totals = totals
        self.has_several = len(self._names) > 1
        self._scaler, self._once = job.scaler, job.once
        # Without a scaler the first loss of all is looked at. A caller who steps may have a scaler of his own.
        self._looks = job.steps and "scale" not in job.once.keys
        self._scales = job.scales_seeds  # otherwise an adapter's backward multiplies by the scaler's scale
        self._given: set[str] = set()  # names that had a loss in this micro-batch
        self._terms: list[tuple[int, int, Loss]] = []  # micro-batch, name, loss times share

    def weigh(
        self, counts: Counts, micro: Micro | None, loss: Tensor | None, named: Mapping[str, Tensor | None]
    ) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Returns the losses of `micro` (None: of a stand-in, whose share is 0) and their seeds for a backward."""
        if not named and not self.has_several:
            weighed, seed = self._weigh(micro, 0, loss, self._share(0, counts) or 0.0)
            return (weighed,), (seed,)
        given = self._by_name(loss, named)
        self._given.update(given)
        # A loss without a count is left out, not multiplied by 0: a mean over nothing is NaN, and so is 0 times NaN.
        pairs = [
            self._weigh(micro, i, given[name], share)
            for i, name in enumerate(self._names)
            if name in given and (share := self._share(i, counts)) is not None
        ]
        return [one for one, _ in pairs], [seed for _, seed in pairs]

    def _share(self, i: int, counts: Counts) -> float | None:
        """The factor of a named loss in a micro-batch; None if the term is left out."""
        name = self._names[i]
        n = counts[i]
        total = self._totals[name]
        # A stand-in may have a count for a name that has none in this window. Ranks that have parts of the same samples
        # run each backward together, even if nothing counts in their part.
        if not total or not (n or self.engine.peers.has_parts):
            return None
        return share_of(self.reductions[name], n, total, self.engine.divisor)

    def _by_name(self, loss: Tensor | None, named: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
        for name in named.keys() & CURES.keys() - set(self._names):
            raise ValueError(f"backward() got {name}=, expected losses alone: it runs their graph once; {CURES[name]}")
        if loss is not None:  # positional, or a name that happens to be "loss"
            if "loss" not in self._names and (self.has_several or named):
                raise ValueError(
                    f"backward() got a loss without a name, expected one for each of {list(self._names)}: "
                    f"window.backward({', '.join(f'{name}=...' for name in self._names)})"
                )
            named = {"loss" if "loss" in self._names else self._names[0]: loss, **named}
        given = {name: value for name, value in named.items() if value is not None}
        unknown = sorted(given.keys() - set(self._names))
        if unknown or not given:
            raise ValueError(f"backward() got {unknown or 'no loss'}, expected losses by name, of {list(self._names)}")
        return given

    def _weigh(self, micro: Micro | None, name: int, loss: Tensor | None, share: float) -> tuple[Tensor, Tensor]:
        """Notes a loss for the record; returns it, ready for backward, and its seed: a fill, which needs no wait."""
        if micro is None:
            share = 0.0
        if not (isinstance(loss, Tensor) and loss.requires_grad and loss.ndim == 0 and not loss.is_complex()):
            refuse_loss(loss)
        if type(loss) is not Tensor and hasattr(loss, "full_tensor"):
            loss = whole_loss(loss, self.engine.peers.here if self.engine.peers.groups else ())
        scaler = self._scaler
        if scaler is not None or self._looks:
            if is_scaled(loss, scaler):
                raise ValueError(
                    "backward() got a loss that scaler.scale() has multiplied, expected the loss itself: "
                    "window.backward(loss); Accumulator(..., scaler=scaler) scales it, and unscales the gradient"
                )
            self._looks = False
            self._once.keys.add("scale")
        if loss.dtype in HALF:
            # The scale keeps a share out of the range in which float16 has few digits, or none.
            exact = share if scaler is None else math.frexp(share)[0]
            off = abs(torch.tensor(exact, dtype=loss.dtype, device="cpu").item() - exact)
            what = (
                f"a loss in {loss.dtype} rounds its share, {share:.6g}, by {off / (exact or 1):.2%} in backward; "
                "compute it in float32: criterion(outputs.float(), ...)"
            )
            if off > exact / 256:  # more than half of a digit
                raise ValueError(f"backward() got {what}")
            if off:
                self._once("half", what)
            loss = loss.float()
        if share and micro is not None:
            # A product is a copy too: the caller may change the loss in place, or in a hook.
            is_here = type(loss) is Tensor and loss.is_cpu
            self._terms.append((micro.number, name, share * (number_of(loss) if is_here else loss.detach())))
        seed = loss.new_full((), share)
        return loss, scaler.scale(seed) if scaler is not None and self._scales else seed

    # The record

    def missing(self, counts: Counts) -> list[str]:
        """Names with a count in the micro-batch but no loss; empty if this rank got none, as another has the losses."""
        given = self._given
        self._given = set()
        return [name for name, n in zip(self._names, counts, strict=True) if n and given and name not in given]

    def totals(self) -> list[Loss]:
        """This rank's weighted losses by name; plain numbers if they are on the host."""
        by_name = [[loss for _, name, loss in self._terms if name == i] for i in range(len(self._names))]
        are_here = not any(isinstance(loss, Tensor) for _, _, loss in self._terms)
        return [sum(losses) if are_here or not losses else stacked(losses, self.device).sum() for losses in by_name]

    def sums(self) -> Tensor:
        """This rank's totals in one tensor, which the ranks add up for the record."""
        return stacked(self.totals(), self.device)

    def first_nonfinite(self) -> tuple[int, float] | None:
        """The number of the first micro-batch whose loss is not finite, and that loss."""
        if not self._terms:
            return None
        read = stacked([loss for _, _, loss in self._terms], self.device).tolist()  # waits for the device once
        bad = [(term[0], loss) for term, loss in zip(self._terms, read, strict=True) if not math.isfinite(loss)]
        return min(bad, key=itemgetter(0), default=None)


@final
class Record:
    """Losses by name, numbers from extensions, and overflow flags, which the ranks sum in one collective at a step."""

    def __init__(self, losses: Losses, numbers: Mapping[str, Tensor], flags: Sequence[Tensor] | None) -> None:
        """`flags`: overflows on this rank, or None without a scaler."""
        # Of the gradient before clipping, if the step took it; and whether the caller asked for it.
        self.norm: Tensor | float | None = None
        self.shows_norm = False
        engine = losses.engine
        self._divisor = engine.divisor
        self._losses: Tensor | list[Loss] = []
        self.sums: Mapping[str, Tensor] = {}  # of the extensions' numbers, by key
        if flags is None and engine.peers.is_alone and not numbers:  # tensors would take longer than a small step
            self._losses = losses.totals()
            return
        own = losses.sums()
        overflows = sum((flag.to(own).reshape(1) for flag in flags or ()), own.new_zeros(1))
        pieces = [own, *(one.to(own) for one in numbers.values()), overflows]
        values = torch.cat(pieces)
        engine.peers.sum(values)
        self._losses, *others, self._overflows = torch.split(values, [len(one) for one in pieces])
        self.sums = dict(zip(numbers, others, strict=True))

    def losses(self) -> list[float]:
        """The losses by name over all ranks; waits for the device."""
        losses = self._losses.tolist() if isinstance(self._losses, Tensor) else self._losses
        return [float(loss) / self._divisor for loss in losses]

    def overflows(self, peers: Peers) -> Tensor:
        """The number of ranks whose gradients overflowed, the same on all."""
        if peers.shares_samples:  # one rank's part of a gradient may overflow alone
            self._overflows.fill_(peers.largest([float(self._overflows)], everyone=True)[0])
        return self._overflows[0]


def refuse_loss(loss: Any, who: str = "backward() got") -> NoReturn:
    if not isinstance(loss, Tensor):
        seen = f"{shown(loss)}, {a(type(loss).__name__)}"
        cure = "return it from loss_fn, which calls no backward" if loss is None else "without .item() or float()"
        if isinstance(loss, Sequence | Mapping):  # its repr would hold all logits
            seen = f"a {type(loss).__name__} of {len(loss)}"
            cure = "which is one of these, as outputs.loss or outputs[0]"
        raise TypeError(f"{who} {seen}, expected the loss as a tensor ({cure})")
    if loss.ndim:
        say = " and say which to the Accumulator: reduction=" if who.startswith("backward") else ""
        raise ValueError(
            f"{who} a loss of shape {list(loss.shape)}, expected a scalar; reduce it with mean() or sum(){say}"
        )
    if loss.is_complex():
        raise TypeError(f"{who} a loss in {loss.dtype}, expected a real number; take .real or .abs()")
    raise ValueError(
        f"{who} a loss without a graph, which depends on no trainable parameter; compute it from the "
        "model's outputs (not from its inputs), outside torch.no_grad and without detach()"
    )
