"""Ledger: the factor of each loss, and the losses for the record. The only place that scales a loss."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NoReturn, final

import torch
from torch import Tensor
from torch.amp import GradScaler

from ..engines import Engine
from ..gradients.norms import HALF, number_of
from ..gradients.scaling import is_scaled_by, stamp_of_scale
from ..law.errors import Once
from ..law.shares import Reduction, share_of
from .source import Counts

MOST_ROUNDING = 2**-8  # of a share in half precision: bfloat16 stays below it, and float16 where it is not subnormal
Loss = Tensor | float  # as the record has it: a number where it is on the host, which nobody waits for
Losses = list[tuple[int, str, float, Loss]]  # number of the micro-batch, name, share, loss


@dataclass(slots=True)
class Weight:
    """A share as tensors on the losses' device: a fill each, which nobody waits for."""

    value: float  # the share
    share: Tensor
    seed: Tensor  # times the scaler's scale: the same for all losses of a window
    dtype: torch.dtype
    device: int
    losses: list[Loss] = field(default_factory=list)  # that went backward with it
    numbers: list[int] = field(default_factory=list)  # of the micro-batches that they came from


Entry = Sequence[tuple[Weight, Loss]]
Weighed = tuple[Sequence[Tensor], Sequence[Tensor], Entry]  # losses, seeds, entry


class Ledger(ABC):
    """Abstract. Each loss goes backward with its share as the seed, so that no factor enters the graph."""

    noun: ClassVar[str]  # what `first_nonfinite` looks at

    def __init__(
        self,
        engine: Engine,
        reductions: Mapping[str, Reduction],
        totals: Mapping[str, float],
        device: torch.device,
        once: Once,
        scaler: GradScaler | None,
        *,
        scales: bool,
    ) -> None:
        """`scaler` multiplies seeds if `scales`; else what runs backward does."""
        self._names, self._reductions, self._totals = tuple(reductions), reductions, totals
        self.has_several = len(self._names) > 1
        self._engine, self._device, self._once = engine, device, once
        self._scaler, self._scales = scaler, scales
        self.scale_stamp: object = None  # of the scale that the seeds have
        self._wide = torch.float32 if device.type == "mps" else torch.float64  # which Apple's GPUs lack
        self._shares: dict[Counts, tuple[float | None, ...]] = {}
        self._weights: dict[str, dict[float, Weight]] = {name: {} for name in self._names}  # by share
        self._given: set[str] = set()  # names that this micro-batch's backwards were given
        self._factor = 1.0  # that the gradient was multiplied by at the edge: streaming, the shares were guesses

    def begin(self) -> None:
        """Notes the scale that all seeds of the window will have, also on a rank that gives none."""
        if self._scaler is not None:
            if stamp_of_scale(self._scaler) is None:
                self._scaler.scale(torch.zeros((), device=self._device))  # which makes its scale
            self.scale_stamp = stamp_of_scale(self._scaler)

    def _shares_of(self, counts: Counts) -> tuple[float | None, ...]:
        """The factor of each named loss of a micro-batch; None: the term is left out."""
        found = self._shares.get(counts)
        if found is None:
            # Ranks that have parts of the same samples run each backward together, also one in which nothing counts.
            runs = self._totals if self._engine.peers.has_parts else dict(zip(self._names, counts, strict=True))
            found = self._shares[counts] = tuple(
                share_of(self._reductions[name], n, self._totals[name], self._engine.divisor) if runs[name] else None
                for name, n in zip(self._names, counts, strict=True)
            )
        return found

    def weigh(
        self, counts: Counts, is_stand_in: bool, loss: Tensor | None, named: Mapping[str, Tensor | None]
    ) -> Weighed:
        """Losses and seeds for a backward, and what `note` is given once it ended."""
        shares = self._shares_of(counts)
        if is_stand_in:
            shares = tuple(None if share is None else 0.0 for share in shares)
        if not named and not self.has_several:
            share = shares[0] or 0.0
            one, weight = self._weighted(self._names[0], loss, share)
            return (one,), (weight.seed,), ((weight, _recorded(one)),) if share else ()
        given = self._by_name(loss, named)
        # What has no count is left out, not multiplied by 0: the mean over nothing is NaN, and 0 times NaN is too.
        terms = [
            (*self._weighted(name, given[name], share), share)
            for name, share in zip(self._names, shares, strict=True)
            if name in given and share is not None
        ]
        self._given.update(given)
        entry = [(weight, _recorded(one)) for one, weight, share in terms if share]
        return [one for one, *_ in terms], [weight.seed for _, weight, _ in terms], entry

    def _by_name(self, loss: Tensor | None, named: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
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

    def _weighted(self, name: str, loss: Tensor | None, share: float) -> tuple[Tensor, Weight]:
        """The loss, ready for backward, and its weight."""
        if not (isinstance(loss, Tensor) and loss.requires_grad and loss.ndim == 0):
            refuse_loss(loss)
        if type(loss) is not Tensor and hasattr(loss, "full_tensor"):
            loss = self._engine.whole_loss(loss)
        weight = self._weights[name].get(share)
        if weight is not None and weight.dtype is loss.dtype and weight.device == loss.get_device():
            return loss, weight
        if loss.is_complex():
            refuse_loss(loss)
        if self._scaler is not None and is_scaled_by(self._scaler, loss):
            raise ValueError(
                "backward() got a loss that scaler.scale() has multiplied, and the window scales it too; give it "
                "the loss itself: window.backward(loss)"
            )
        if loss.dtype in HALF:
            self._look_at_rounding(loss.dtype, share)
            return self._weighted(name, loss.float(), share)
        return loss, self._weight(name, loss, share)

    def _look_at_rounding(self, dtype: torch.dtype, share: float) -> None:
        """A loss in half precision is cast up, and its gradient, the share, comes back in half precision."""
        rounded = torch.tensor(share, dtype=dtype).item()
        if self._scaler is None and abs(rounded - share) > MOST_ROUNDING * share:
            raise ValueError(
                f"backward() got a loss in {dtype}, which rounds its share, {share:.6g}, to {rounded:.6g}, and the "
                "gradient with it; compute it in float32: criterion(outputs.float(), ...)"
            )
        if rounded != share:
            self._once(
                "half",
                f"a loss in {dtype} rounds its share, {share:.6g}, to that dtype in backward (an error of up to 0.2% "
                "in bfloat16); compute it in float32: criterion(outputs.float(), ...)",
            )

    def _weight(self, name: str, loss: Tensor, share: float) -> Weight:
        """A share for losses like this one."""
        found = self._weights[name].get(share)
        tensor = torch.full((), share, dtype=loss.dtype, device=loss.device)
        seed = tensor
        if self._scaler is not None:
            seed = self._scaler.scale(tensor) if self._scales else tensor
        weight = Weight(share, tensor, seed, loss.dtype, loss.get_device())
        if found is not None:
            weight.losses, weight.numbers = found.losses, found.numbers
        self._weights[name][share] = weight
        return weight

    def note(self, entry: Entry, number: int) -> None:
        """Keeps the losses of micro-batch `number` for the record."""
        for weight, loss in entry:
            weight.losses.append(loss)
            weight.numbers.append(number)

    def expect_none(self) -> None:
        """The losses of this micro-batch are another rank's."""
        self._given.update(self._names)

    def missing(self, counts: Counts) -> list[str]:
        """Names with a count in the micro-batch that ended, of which no backward got a loss."""
        given, self._given = self._given, set()
        return [name for name, n in zip(self._names, counts, strict=True) if n and name not in given]

    def unscaled(self, seeds: Sequence[Tensor]) -> list[Tensor]:
        """Gradients that have the scaler's scale, as seeds of a backward whose runner scales them again."""
        if self._scaler is None or self._scales:
            return list(seeds)
        return [seed / self._scaler.scale(seed.new_ones((), dtype=torch.float32)) for seed in seeds]

    def correct(self, total: float) -> float:
        """Streaming, shares were made with a guess of the count; gives the factor that corrects the gradient."""
        (name,), (reduction,) = self._names, self._reductions.values()
        if reduction != "sum":
            self._factor = self._totals[name] / total
        return self._factor

    @abstractmethod
    def sums(self) -> Tensor:
        """The losses by name, weighted, on the device: what the ranks add up for the record."""

    def numbers(self) -> list[float] | None:
        """The same, where all losses are on the host."""
        return None

    @abstractmethod
    def first_nonfinite(self) -> tuple[int, float] | None:
        """The number of the first micro-batch with one that is not finite, and its value."""

    def state(self) -> Losses:
        return [
            (number, name, share, loss)
            for name, weights in self._weights.items()
            for share, weight in weights.items()
            for number, loss in zip(weight.numbers, weight.losses, strict=True)
        ]

    def load(self, losses: Losses) -> None:
        for number, name, share, loss in losses:
            like = torch.zeros((), dtype=self._wide, device=self._device)
            self.note([(self._weight(name, like, share), float(loss))], number)

    def clear(self) -> None:
        """Frees the losses."""
        for weights in self._weights.values():
            weights.clear()

    def _first_nonfinite(self, values: Sequence[tuple[int, Loss]]) -> tuple[int, float] | None:
        """In one wait for the device."""
        if not values:
            return None
        read = torch.stack([self._on_device(value) for _, value in values]).tolist()
        found = [(number, value) for (number, _), value in zip(values, read, strict=True) if not math.isfinite(value)]
        return min(found, key=lambda one: one[0], default=None)

    def _on_device(self, loss: Loss) -> Tensor:
        if isinstance(loss, Tensor):
            return loss.detach().to(self._device, self._wide)
        return torch.full((), loss, dtype=self._wide, device=self._device)


@final
class WeightedLedger(Ledger):
    """Losses that add up to the window's."""

    noun = "loss"

    def numbers(self) -> list[float] | None:
        by_name = []
        for weights in self._weights.values():
            total = 0.0
            for weight in weights.values():
                for loss in weight.losses:
                    if isinstance(loss, Tensor):
                        return None
                    total += weight.value * loss
            by_name.append(total * self._factor)
        return by_name

    def sums(self) -> Tensor:
        numbers = self.numbers()
        if numbers is not None:
            return torch.stack([self._on_device(number) for number in numbers])
        sums = torch.stack([self._weighted_sum(weights.values()) for weights in self._weights.values()])
        return sums if self._factor == 1.0 else sums * self._factor

    def _weighted_sum(self, weights: Collection[Weight]) -> Tensor:
        used = [weight for weight in weights for _ in weight.losses]
        if not used:
            return self._on_device(0.0)
        known = [loss for weight in weights for loss in weight.losses]
        losses = torch.stack([one if isinstance(one, Tensor) else self._on_device(one) for one in known])
        if all(weight is used[0] for weight in used):
            return (losses.sum(dtype=self._wide) * used[0].value).to(self._device)
        shares = torch.stack([weight.share for weight in used])
        return torch.dot(losses.to(self._device, self._wide), shares.to(self._device, self._wide))

    def first_nonfinite(self) -> tuple[int, float] | None:
        return self._first_nonfinite([(number, loss) for number, _, _, loss in self.state()])


@final
class PairsLedger(Ledger):
    """One loss over all pairs of a window; what goes backward is each micro-batch's part of its gradient."""

    noun = "largest representation"
    loss: Tensor | None = None  # the same on all ranks
    part = 1.0  # of it that this rank adds to the record

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.largest: list[tuple[int, Tensor]] = []  # the number of a micro-batch, its largest representation

    def sums(self) -> Tensor:
        assert self.loss is not None
        return self.loss.to(self._device, self._wide).reshape(1) * self.part

    def first_nonfinite(self) -> tuple[int, float] | None:
        return self._first_nonfinite(self.largest)


def _recorded(loss: Tensor) -> Loss:
    """The record has its own numbers: what the caller does to the loss in place, also in a hook, is no part of it."""
    if type(loss) is not Tensor or not loss.is_cpu:
        return loss.detach().clone()
    number: float = number_of(loss)
    return number


def refuse_loss(loss: object, who: str = "backward() got") -> NoReturn:
    if not isinstance(loss, Tensor):
        seen, cure = f"{loss!r}, a {type(loss).__name__}", "without .item() or float()"
        if isinstance(loss, Sequence | Mapping):  # whose text would hold all logits
            seen, cure = (
                f"a {type(loss).__name__} of {len(loss)}",
                "which is one of these, as outputs.loss or outputs[0]",
            )
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
