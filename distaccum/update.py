"""Update: the record of a window."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor

from .losses import Record


@dataclass(frozen=True, repr=False)
class Update:
    """The record of a window, returned by `window.step()`. Numbers on the device are read on first access.

    Attributes:
        index (int): The update's index, from 0; a skipped update counts too.
        counts (Mapping[str, float]): The denominators over all ranks, by name.
        micro_batches (int): This rank's micro-batches, without stand-ins and without those in which nothing counts.
        stepped (bool): Whether the weights were stepped; if the caller steps, whether any of them has changed.
        reason (str | None): Why the weights were not stepped; None if they were.
        seconds (float): From the window's plan to the end of its step, on this rank's host.
        notes (dict[str, Any]): Whatever extensions wrote here when the window ended, under names of their own.
    """

    index: int
    counts: Mapping[str, float]
    micro_batches: int
    stepped: bool
    reason: str | None
    seconds: float
    notes: dict[str, Any] = field(default_factory=dict, compare=False)
    # None if nothing counted.
    _record: Record | None = field(default=None, compare=False)

    @cached_property
    def losses(self) -> dict[str, float]:
        """The loss of each name over all ranks, the same on each; a mean or a sum, as its reduction says."""
        if self._record is None:
            return dict.fromkeys(self.counts, 0.0)
        return dict(zip(self.counts, self._record.losses(), strict=True))

    @cached_property
    def loss(self) -> float:
        """The number whose gradient was taken: the sum of `losses`, over all ranks, the same on each."""
        return sum(self.losses.values())

    @cached_property
    def grad_norm(self) -> float | None:
        """The L2 norm of the whole gradient before clipping; None without `max_norm`, or if nothing counted."""
        norm = self._record.norm if self._record is not None and self._record.shows_norm else None
        return None if norm is None else float(norm)

    @cached_property
    def noise_scale(self) -> float | None:
        """The gradient noise scale, smoothed up to this update, in the unit of its count; the same on all ranks.

        None: no `NoiseScale()` among the extensions, or no two gradients to compare yet; inf: nothing but noise.
        """
        record = self.notes.get("noise")
        return None if record is None else record.read()

    def norm(self) -> Tensor | float | None:
        """The gradient's norm, if the step took it (to clip, or to see whether it is finite); reads nothing."""
        return self._record and self._record.norm

    @cached_property
    def _sums(self) -> Mapping[str, Tensor]:
        return {} if self._record is None else self._record.sums

    def summed(self, key: str) -> Tensor | None:
        """The sum over the ranks of the `numbers` of the extension with this `key`; None: there were none."""
        return self._sums.get(key)

    def as_dict(self) -> dict[str, Any]:
        """All public fields as plain numbers, strings and dicts, as for a log line. Reads what is on the device."""
        public = "index loss losses grad_norm counts micro_batches stepped reason seconds noise_scale"
        return {name: getattr(self, name) for name in public.split()}

    def scalars(self) -> dict[str, float]:
        """All that are known as flat numbers, as loggers take them: `loss`, `loss/name`, `count/name`, `stepped` ..."""
        numbers = self.as_dict()
        for kind, values in (("loss", self.losses), ("count", self.counts)):
            numbers |= {f"{kind}/{name}": value for name, value in values.items()}
        return {name: float(value) for name, value in numbers.items() if isinstance(value, int | float)}

    def __getstate__(self) -> dict[str, Any]:
        """Reads the numbers first, so that a copy needs no device."""
        read = {name: getattr(self, name) for name in ("losses", "loss", "grad_norm", "noise_scale", "_sums")}
        return {**self.__dict__, **read, "_record": None}

    def __repr__(self) -> str:
        fields = self.as_dict()
        return f"Update({', '.join(f'{name}={value!r}' for name, value in fields.items())})"
