"""Weights of micro-batches for the Trainer, and the tests that show whether a loss agrees with them.

A loss that is halved by twice the number of items is a mean over them. Any other loss is compared with the losses of
parts of the same rows: accumulation relies on that law.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, islice, pairwise
from typing import Any, final

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from torch import Tensor

from ..cutting import Count, count_samples, count_tokens, cut_batch, map_tensors
from ..feeding.joining import join_batches
from ..law import Reduction, in_short, warn

MOST = 8  # first rows to compare with each other
SAME = 1e-5  # relative tolerance, between losses of the same logits
KNOWN: dict[str, tuple[Reduction, Count]] = {
    "count=count_samples": ("mean", count_samples),
    "count=count_tokens('labels')": ("mean", count_tokens("labels")),
    "count=count_tokens('labels', shift=True)": ("mean", count_tokens("labels", shift=True)),
    "count=count_tokens('labels', ignore_index=255)": ("mean", count_tokens("labels", ignore_index=255)),
    "reduction='sum_to_mean'": ("sum_to_mean", count_samples),  # a sum fits any count
}


class _UnseenError(Exception):
    """A rank cannot find out what the loss is a mean over."""


@final
@dataclass
class Questions:
    """Weights of micro-batches, which stay in question until a micro-batch has shown that they are right."""

    name: str  # of the loss
    loss: Callable[[Any, Any], Tensor]  # of a micro-batch in eval mode, given a number of items or None
    precision: float  # of the coarsest dtype in it
    items: Callable[[Any], Any]  # the number of items as the Trainer counts it; None: it does not
    count: Count | None
    reduction: Reduction
    is_models: bool  # the model's own loss, which is given no number: its own mean is right
    is_overridden: bool  # a subclass has its own `compute_loss`, so rows may belong together
    is_open: bool = True

    def number(self, micro_batch: Any) -> Any:
        """The number of items that the loss is given; None if it is given none."""
        return None if self.is_models else self.items(micro_batch)

    def weight(self, micro_batch: Any) -> Any:
        if self.count is not None:
            return self.count(micro_batch)  # the planner checks it
        if (items := self.items(micro_batch)) is not None:
            return items
        labels = micro_batch.get("labels") if isinstance(micro_batch, Mapping) else None
        if isinstance(labels, Tensor) and labels.dim() > 1:
            reason = f"labels of shape {list(labels.shape)}, and a model that takes no num_items_in_batch"
            raise ValueError(self._unseen(reason))
        try:
            return count_samples(micro_batch)
        except (TypeError, ValueError) as error:
            raise ValueError(self._unseen(str(error).split(";")[0])) from error

    def ask(self, micro_batches: Sequence[Any], index: int) -> None:
        """Runs open tests in windows 0, 1, 2, 4, 8 and so on; all ranks call it together, since losses may communicate.

        Raises:
            ValueError: The loss is not a mean over what the default count counts, or that cannot be determined.
        """
        if not self.is_open or index & (index - 1):
            return
        numbers = gather_object([len(micro_batches)])
        try:
            if min(numbers):
                self._ask(micro_batches, sum(numbers))
        except _UnseenError as error:
            if index == 0 and self.count is None:  # a given count is trusted
                raise ValueError(self._unseen(str(error))) from error.__cause__

    def _ask(self, micro_batches: Sequence[Any], number: int) -> None:
        is_told = self.count is None or self.is_overridden
        uses = self._of_all(lambda: map(self._use, micro_batches[:1])) if is_told else []
        if self.reduction == "mean" and {*uses} == {"mean"}:
            self.is_open = False
            if self.count is not None and (off := self._off(micro_batches, self.items)):
                self._object(self._wrong(f"divided by the number of items, {off}", "count=None"))
        elif self.is_overridden and not any(uses):
            self.is_open = False
            if self.count is None:
                self._warn(
                    f"the loss of {self.name} is weighed by samples; without labels that the Trainer counts, nothing "
                    "shows whether it is a mean over samples: terms with other denominators (as in DPO with several "
                    "loss types) are then not exact; count=count_samples confirms that it is such a mean"
                )
        elif "mixed" in uses and self.count is None:
            self._object(self._wrong("divided by the number of items in one term but not in another"))
        elif found := self._compared(micro_batches):
            self.is_open = not any(found)
            wrong = next((one for one in found if isinstance(one, tuple)), None)
            if wrong and self._is_sure(micro_batches, wrong[1]):
                self._object(self._wrong(*wrong))
        elif number > 1:  # with one micro-batch any count is right
            raise _UnseenError("its micro-batches of one row cannot be put together")

    def _use(self, micro_batch: Any) -> str:
        """Returns how the loss uses the number of items: as their "mean", "mixed", or "other"; "" if it is given none.

        Doubling the number halves a mean, but only one term of a mixed loss.
        """
        items = self.items(micro_batch)
        if items is None:
            return ""
        own, once, twice = (self._loss(micro_batch, n) for n in (self.number(micro_batch), items, 2 * items))
        room = max(SAME, 8 * self.precision) * abs(own)
        if abs(2 * twice - own) <= room:
            return "mean"
        return "mixed" if min(abs(2 * twice - once), abs(2 * (once - twice))) > room else "other"

    def _is_sure(self, micro_batches: Sequence[Any], fitting: str) -> bool:
        """Tells whether a mismatch in two rows also is one in micro-batches: with the user's own count, the rows of a
        `compute_loss` may belong together, or share a number that is counted.
        """
        if self.count is None or not self.is_overridden:
            return True
        reduction, count = KNOWN.get(fitting, (self.reduction, self.weight))
        return reduction != self.reduction or bool(self._off(micro_batches, count))

    def _off(self, micro_batches: Sequence[Any], wanted: Count) -> str:
        """Says where micro-batches' weights, on all ranks, are not proportional to the wanted count; "" if nowhere.

        It looks at whole micro-batches only.
        """
        pairs = self._of_all(lambda: ((float(self.weight(one)), float(wanted(one))) for one in micro_batches))
        most, its = max(pairs)
        off = ((weight, n) for weight, n in pairs if abs(most * n - weight * its) > SAME * most * max(n, its))
        texts = (f"{its:g} and {n:g} in micro-batches where count= gives {most:g} and {weight:g}" for weight, n in off)
        return next(texts, "")

    def _compared(self, micro_batches: Sequence[Any]) -> list[tuple[str, str] | bool]:
        """Compares pairs of rows, joined, with each row alone; pairs are neighbours among the first rows of all ranks.

        Rows of one micro-batch may be too alike, for example if sorted by length; rows of two may not fit together.
        """
        most, pairs = max(2, MOST // PartialState().num_processes), []
        rows = self._of_all(lambda: islice(chain.from_iterable(map(_first_two, micro_batches)), most))
        for one, other in pairwise(rows[:MOST]):
            with suppress(Exception):
                pairs.append((join_batches([_padded(one, other), _padded(other, one)], [1, 1]), one, other))
        return self._of_all(lambda: (self._compare(*pair) for pair in pairs))  # together: losses may communicate

    def _compare(self, whole: Any, *parts: Any) -> tuple[str, str] | bool:
        """Returns how the loss of the whole differs from what its parts add up to, with what would fit; or, if it does
        not differ, whether a count of samples would.
        """
        wanted, *losses = (self._loss(one, self.number(one)) for one in (whole, *parts))
        room = min(0.01, 200 * self.precision) * abs(wanted) or 1.0  # for rounding, which depends on the shapes

        def error(reduction: Reduction, count: Count) -> float:
            """The error of the whole, in units of the rounding that is allowed."""
            weighed = [(loss, float(count(part))) for loss, part in zip(losses, parts, strict=True)]
            total = sum(weight for _, weight in weighed) or math.nan
            # A mean over nothing is nan.
            made = sum(one * (weight / total if reduction == "mean" else 1.0) for one, weight in weighed if weight)
            off = abs(made - wanted) / room
            return off if math.isfinite(off) else math.inf

        if not math.isfinite(wanted) or error(self.reduction, self.weight) <= 1:
            return error(self.reduction, count_samples) > 10
        weights = " and ".join(f"{float(self.weight(part)):g}" for part in parts)
        has_labels = isinstance(whole.get("labels"), Tensor)
        known = (name for name, how in KNOWN.items() if (has_labels or how[1] is count_samples) and error(*how) <= 1)
        first, second = losses
        seen = f"{wanted:.8g} for a micro-batch, {first:.8g} and {second:.8g} for its parts, with counts {weights}"
        return seen, next(known, "")

    def _loss(self, micro_batch: Any, number: Any) -> float:
        loss = self.loss(micro_batch, number)
        self.precision = max(self.precision, torch.finfo(loss.dtype).eps)
        return float(loss)

    def _of_all(self, own: Callable[[], Iterable[Any]]) -> list[Any]:
        """Gathers what the ranks found; raises on all of them if one failed."""
        found, failed = [], None
        try:
            found = list(own())
        except Exception as error:
            failed = error
        every = gather_object([(found, failed and in_short(failed))])
        if isinstance(failed, torch.OutOfMemoryError):  # a smaller batch may help
            raise failed
        if why := next((why for _, why in every if why), None):
            raise _UnseenError(why) from failed
        return [one for some, _ in every for one in some]

    def _object(self, message: str) -> None:
        self.is_open = False
        if self.count is None:
            raise ValueError(message)
        self._warn(message)

    def _warn(self, message: str) -> None:
        if PartialState().is_main_process:
            warn(message)

    def _wrong(self, seen: str, fitting: str = "") -> str:
        weight = "what count= counts" if self.count is not None else "the labels that the Trainer counts, or samples,"
        what = f"a mean over {weight}" if self.reduction == "mean" else "a sum over its rows"
        cure = f"{fitting} fits here"
        if not fitting:
            cure = (
                "no count of samples or labels fits here, nor does a sum; if it divides by something else, such as a "
                "sum of weights, count= must count that; no count makes a loss over pairs, or terms with several "
                "denominators, exact, but one that you give is trusted"
            )
        elif fitting.startswith("reduction="):
            cure += f", and makes it a mean over {weight.rstrip(',')}"
        elif self.reduction != "mean":
            cure = f"reduction='mean', {cure}"
        return (
            f"the loss of {self.name} is not {what} as AccumulatingTrainer assumes: it is {seen}; let count= count "
            f"what it is a mean over, and say reduction='sum_to_mean' if it is a sum: {cure}"
        )

    def _unseen(self, reason: str) -> str:
        return (
            f"nothing shows what the loss of {self.name} is a mean over: {reason}; give count=count_samples, "
            "count=count_tokens('labels'), count=len for a list of samples or one of your own, and "
            "reduction='sum_to_mean' if it is a sum"
        )


def _first_two(micro_batch: Any) -> Iterator[Any]:
    """The first two rows of a micro-batch, on the host."""
    rows = count_samples(micro_batch)
    return (map_tensors(row, Tensor.cpu) for row in cut_batch(micro_batch, [1] * min(rows, 2), rows))


def _padded(row: Any, other: Any) -> Any:
    """Pads `row`, if it is a text with a mask, on the right to at least the width of `other`."""

    def pad(name: str, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dim() != 2 or value.is_floating_point():
            return value
        missing = max(0, other[name].shape[1] - value.shape[1])
        return torch.nn.functional.pad(value, (0, missing), value=-100 if "labels" in name else 0)

    return {name: pad(name, value) for name, value in row.items()} if "attention_mask" in row else row
