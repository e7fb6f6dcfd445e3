"""Record: what the ranks add up at a step, while nobody waits."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import final

import torch
from torch import Tensor

from .losses import Losses
from .ranks import Peers
from .update import Waitable


@final
class Record:
    """Losses by name, numbers of extensions, and with a scaler whether gradients overflowed."""

    def __init__(
        self, losses: Losses, numbers: Mapping[str, Tensor], flags: Sequence[Tensor] | None, peers: Peers
    ) -> None:
        """`flags` of overflow on this rank; None: there is no scaler."""
        self.sums: dict[str, Tensor] = {}  # of numbers, by the extension's key
        self.sending: Waitable | None = None
        self.losses: Tensor | list[float] | None = None
        if flags is None and peers.is_alone and not numbers:
            self.losses = losses.numbers()
        if self.losses is not None:
            return
        own = losses.sums()
        pieces = [own, *(one.to(own) for one in numbers.values())]
        if flags is not None:
            found = [flag.to(own.device, own.dtype).reshape(1) for flag in flags]
            pieces.append(torch.stack(found).sum(0) if found else own.new_zeros(1))
        self._values = torch.cat(pieces) if len(pieces) > 1 else own
        self.losses, *others = torch.split(self._values, [len(one) for one in pieces])
        self.sums = dict(zip(numbers, others, strict=False))
        self.sending = peers.sum(self._values)

    def wait(self) -> None:
        if self.sending is not None:
            self.sending.wait()

    def overflows(self, peers: Peers) -> Tensor:
        """The number of ranks whose gradients overflowed, the same on all."""
        self.wait()
        found = self._values[-1]
        if peers.shares_samples:  # one rank's part of a gradient may overflow alone
            found.fill_(max(peers.gather_largest([float(found)]))[0])
        return found

    def has_finite_losses(self) -> bool:
        self.wait()
        losses = self.losses.tolist() if isinstance(self.losses, Tensor) else self.losses or []
        return all(map(math.isfinite, losses))
