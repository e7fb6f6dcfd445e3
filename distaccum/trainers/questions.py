"""Weights of micro-batches for the Trainer, and the questions that show whether a loss agrees with them.

A loss that is halved by twice the number of items is a mean over them. Any other is compared with the losses of parts
of the same rows, which is the law that accumulation relies on.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, final

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from torch import Tensor

from ..cutting import Count, count_samples, count_tokens, cut_batch, map_tensors
from ..law import Reduction

IGNORED = -100
MOST = 8  # rows that are compared with each other
SAME = 1e-5  # relative, of losses of the same logits
KNOWN: dict[str, tuple[Reduction, Count]] = {
    "count=count_samples": ("mean", count_samples),
    "count=count_tokens('labels')": ("mean", count_tokens("labels")),
    "count=count_tokens('labels', shift=True)": ("mean", count_tokens("labels", shift=True)),
    "count=count_tokens('labels', ignore_index=255)": ("mean", count_tokens("labels", ignore_index=255)),
    "reduction='sum_to_mean', count=count_samples": ("sum_to_mean", count_samples),
}


@dataclass(frozen=True)
class Asked:
    """A loss, and what it is taken for."""

    name: str
    loss: Callable[[Any, Any], Tensor]  # of a micro-batch in eval mode, told a number of items or None
    precision: float  # of the coarsest dtype in it
    items: Callable[[Any], Any]  # the number as the Trainer counts it; None: it does not
    count: Count | None
    reduction: Reduction
    is_models: bool  # the model's own, which is told no number: its own mean is the right one
    is_overridden: bool  # `compute_loss` is a subclass's, whose rows may belong together
    meets: bool  # ranks meet in each loss, so all must take as many


class Compared(NamedTuple):
    differs: str = ""
    tells_apart: bool = True  # a count of samples would have differed
    fitting: str = ""  # the first of KNOWN that does not differ


class _UnseenError(Exception):
    """A rank cannot see over what the loss is a mean."""


@final
class Questions:
    """Weights of micro-batches, which are open to question until a micro-batch has shown that they are right."""

    def __init__(self, asked: Asked) -> None:
        self._asked, self._precision = asked, asked.precision
        self._shifts: bool | None = None  # the first label of each row plays no part; None: as the Trainer believes
        self._is_open = True

    def weight(self, micro_batch: Any) -> float | Tensor:
        return self.number_and_weight(micro_batch)[1]

    def number_and_weight(self, micro_batch: Any) -> tuple[Any, float | Tensor]:
        """The number of items that the loss is told (None: nothing), and what the micro-batch weighs."""
        asked, items = self._asked, self._items(micro_batch)
        number = None if asked.is_models else items
        if asked.count is not None:
            return number, asked.count(micro_batch)  # the planner checks it
        if items is not None:
            return number, items
        labels = micro_batch.get("labels") if isinstance(micro_batch, Mapping) else None
        if isinstance(labels, Tensor) and labels.dim() > 1:
            reason = f"labels of shape {list(labels.shape)}, and a model that takes no num_items_in_batch"
            raise ValueError(self._unseen(reason))
        try:
            return number, count_samples(micro_batch)
        except (TypeError, ValueError) as error:
            raise ValueError(self._unseen(str(error).split(";")[0])) from error

    def _items(self, micro_batch: Any) -> Any:
        found = self._asked.items(micro_batch)
        if found is None or self._shifts is None or "shift_labels" in micro_batch:
            return found
        labels = micro_batch["labels"]
        return (labels[..., 1:] if self._shifts else labels).ne(IGNORED).sum()

    def are_due(self, index: int) -> bool:
        return self._is_open and not index & (index - 1)  # in windows 0, 1, 2, 4, 8, ...

    def ask(self, drawn: Sequence[Any], index: int) -> bool:
        """Asks what is open in window `index`; True: weights may have changed. All ranks call it together.

        Raises:
            ValueError: The loss is not what the default count takes it for, or that cannot be seen.
        """
        asked, shifted = self._asked, self._shifts
        micro_batches = [one for one in drawn if self.weight(one)]
        numbers = gather_object([len(micro_batches)])
        if max(numbers) == 0 or (asked.meets and min(numbers) == 0):
            return False
        try:
            self._ask(micro_batches, numbers, index)
        except _UnseenError as error:
            if index == 0:
                self._object(self._unseen(str(error)), error.__cause__)
        return self._shifts is not shifted

    def _ask(self, micro_batches: Sequence[Any], numbers: Sequence[int], index: int) -> None:
        asked, first = self._asked, micro_batches[:1]
        shifts = self._of_all(lambda: map(self._shifts_labels, first))
        self._shifts = next((one for one in shifts if one is not None), self._shifts)
        halved = self._of_all(lambda: map(self._is_halved, first))
        if asked.count is None and asked.reduction == "mean" and all(halved):
            self._is_open = self._shifts is None
        elif asked.is_overridden and (asked.count is not None or halved.count(None) == len(halved)):
            self._is_open = False
            if asked.count is None:
                self._warn(
                    f"the loss of {asked.name} is weighed by samples, and without labels that the Trainer counts it "
                    "cannot be asked whether it is a mean over them: terms with other denominators (as of DPO with "
                    "several loss types) are not exact; count=count_samples says that it is such a mean"
                )
        else:
            found = self._compared(micro_batches if index == 0 else micro_batches[:2], len(numbers))
            if wrong := next((one for one in found if one.differs), None):
                self._object(self._wrong(wrong))
            elif found:
                self._is_open = not any(one.tells_apart for one in found)
            elif sum(numbers) > 1:  # else each count is right
                raise _UnseenError("its micro-batches of one row cannot be put together")

    def _is_halved(self, micro_batch: Any) -> bool | None:
        """Returns whether twice the number of items halves the loss; None: it is told no number."""
        items = self._items(micro_batch)
        if items is None or (self._asked.is_models and self._asked.count is not None):
            return None
        own = self._loss(micro_batch, None if self._asked.is_models else items)
        return abs(2 * self._loss(micro_batch, 2 * items) - own) <= max(SAME, 8 * self._precision) * abs(own)

    def _shifts_labels(self, micro_batch: Any) -> bool | None:
        """Returns whether the first label of each row plays no part, seen by changing it; None: not to be seen here."""
        number = self._asked.items(micro_batch)
        if number is None or (self._asked.is_models and self._asked.count is not None):
            return False
        labels = micro_batch["labels"]
        if labels.dim() != 2 or labels.is_floating_point() or "shift_labels" in micro_batch:
            return False
        kept = labels.ne(IGNORED)
        valid = labels[kept] if kept.any() else labels
        one, another = valid.min(), valid.max()
        wrong = torch.where(labels == one, another, one).where(kept, labels)
        first, rest = labels.clone(), wrong.clone()
        first[:, 0], rest[:, 0] = wrong[:, 0], labels[:, 0]
        before, *after = (self._loss({**micro_batch, "labels": some}, number) for some in (labels, first, rest))
        by_first, by_rest = (abs(value - before) for value in after)
        if one == another or not kept[:, 0].any() or not by_rest > SAME * abs(before):
            return None
        return by_first <= SAME / 10 * abs(before)

    def _compared(self, micro_batches: Sequence[Any], num_ranks: int) -> list[Compared]:
        """Compares each micro-batch with its first row and the others, and first rows with two of them put together.

        Rows of one micro-batch may be alike where those of two are not, as where they are sorted, or on two ranks.
        """
        share = max(1, MOST // num_ranks)
        firsts = self._of_all(lambda: [map_tensors(rows_in(one)[0], Tensor.cpu) for one in micro_batches[:share]])
        own: list[tuple[Any, ...]] = []

        def cut() -> list[int]:
            own.extend((_joined(*pair), *pair) for pair in pairwise(firsts[:MOST]))
            own.extend((one, *rows_in(one)) for one in micro_batches)
            own[:] = [pieces for pieces in own if len(pieces) == 3 and pieces[0] is not None]
            return [len(own)]

        least = min(self._of_all(cut))
        if least or self._asked.meets:  # a model's own loss may meet other ranks too, as DETR's number of boxes does
            del own[least:]
        return self._of_all(lambda: [self._compare(*pieces) for pieces in own])

    def _compare(self, whole: Any, *parts: Any) -> Compared:
        """Compares each term of the whole's loss with what those of its parts make of it."""
        wanted, *losses = map(self._terms, (whole, *parts))
        size, rounding = abs(sum(wanted)), min(0.01, 200 * self._precision)  # in batches of other shapes

        def error(reduction: Reduction, count: Count) -> float:
            """In parts of what rounding may do."""
            weights = [float(count(part)) for part in parts]
            terms = zip(wanted, zip(*losses, strict=True), strict=True)
            found = [(abs(_of_whole(of_parts, weights, reduction) - one), abs(one)) for one, of_parts in terms]
            errors = [off / (rounding * one + 8 * self._precision * size or 1.0) for off, one in found]
            return max(one if math.isfinite(one) else math.inf for one in errors)

        if not math.isfinite(size) or error(self._asked.reduction, self.weight) <= 1:
            return Compared(tells_apart=error(self._asked.reduction, count_samples) > 10)
        total, first, second = (f"{sum(one):.8g}" for one in (wanted, *losses))
        weights = " and ".join(f"{float(self.weight(part)):g}" for part in parts)
        has_labels = isinstance(whole.get("labels"), Tensor)
        known = (name for name, how in KNOWN.items() if (has_labels or how[1] is count_samples) and error(*how) <= 1)
        seen = f"{total} of a micro-batch, {first} and {second} of its parts with counts {weights}"
        return Compared(seen, fitting=next(known, ""))

    def _terms(self, micro_batch: Any) -> tuple[float, float]:
        """The terms of a loss that are divided by the number of items, and those that are not."""
        number = self._items(micro_batch) if self._asked.count is None else None
        value = self._loss(micro_batch, self.number_and_weight(micro_batch)[0])
        if number is None:
            return 0.0, value
        rest = 2 * self._loss(micro_batch, 2 * number) - self._loss(micro_batch, number)
        return value - rest, rest

    def _loss(self, micro_batch: Any, number: Any) -> float:
        loss = self._asked.loss(micro_batch, number)
        self._precision = max(self._asked.precision, torch.finfo(loss.dtype).eps)
        return float(loss)

    def _of_all(self, own: Callable[[], Any]) -> list[Any]:
        """Lists what the ranks found; raises on all of them if one could not."""
        found, failed = [], None
        try:
            found = list(own())
        except Exception as error:
            failed = error
        every = gather_object([(found, failed and f"{type(failed).__name__}: {failed}")])
        if isinstance(failed, torch.OutOfMemoryError):  # a smaller batch may help
            raise failed
        if why := next((why for _, why in every if why), None):
            raise _UnseenError(why) from failed
        return [one for some, _ in every for one in some]

    # What is said

    def _object(self, message: str, cause: BaseException | None = None) -> None:
        self._is_open = False
        if self._asked.count is None:
            raise ValueError(message) from cause
        self._warn(message)

    def _warn(self, message: str) -> None:
        if PartialState().is_main_process:
            warnings.warn(message, stacklevel=2)

    def _wrong(self, found: Compared) -> str:
        asked = self._asked
        weight = "what count= counts" if asked.count is not None else "the labels that the Trainer counts, or samples,"
        what = f"a mean over {weight}" if asked.reduction == "mean" else "a sum over its rows"
        cure = f"{found.fitting} fits here"
        if not found.fitting:
            cure = (
                "no count of samples or labels fits here, nor does a sum, so it takes a count of your own, or none is "
                "right (a loss over pairs, terms with several denominators), and any count takes it for a mean"
            )
        return (
            f"the loss of {asked.name} is not {what} as AccumulatingTrainer takes it: it is {found.differs}; give "
            f"count= what it is a mean over, and reduction='sum_to_mean' where it is a sum: {cure}"
        )

    def _unseen(self, reason: str) -> str:
        return (
            f"over what the loss of {self._asked.name} is a mean cannot be seen: {reason}; give count=count_samples, "
            "count=count_tokens('labels'), count=len for a list of samples or one of your own, and "
            "reduction='sum_to_mean' where it is a sum"
        )


def rows_in(micro_batch: Any) -> list[Any]:
    """Its first row, and the others if there are any."""
    rows = count_samples(micro_batch)
    return [micro_batch] if rows == 1 else list(cut_batch(micro_batch, [1, rows - 1], rows))


def _joined(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any] | None:
    """Both rows in one, masked texts padded on the right; None where that cannot be done without a guess."""
    whole = {}
    for name, mine in one.items():
        pair = [mine, other.get(name)]
        if not all(isinstance(value, Tensor) and value.dim() for value in pair):
            return None
        if pair[0].shape[1:] != pair[1].shape[1:]:
            if "attention_mask" not in one or any(value.dim() != 2 or value.is_floating_point() for value in pair):
                return None
            longest, fill = max(value.shape[1] for value in pair), IGNORED if "labels" in name else 0
            pair = [torch.nn.functional.pad(value, (0, longest - value.shape[1]), value=fill) for value in pair]
        whole[name] = torch.cat(pair)
    return whole


def _of_whole(losses: Sequence[float], weights: Sequence[float], reduction: Reduction) -> float:
    counted = [(loss, weight) for loss, weight in zip(losses, weights, strict=True) if weight]
    if reduction != "mean":
        return sum(loss for loss, _ in counted)
    return sum(loss * weight for loss, weight in counted) / (sum(weight for _, weight in counted) or math.nan)
