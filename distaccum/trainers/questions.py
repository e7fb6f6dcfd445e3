"""Weights of micro-batches for the Trainer, and the questions that show whether a loss agrees with them.

A loss that is halved by twice the number of items is a mean over them. Any other is compared with the losses of parts
of the same rows, which is the law that accumulation relies on.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from torch import Tensor

from ..cutting import Count, count_samples, count_tokens, cut_batch, map_tensors
from ..law import Reduction

IGNORED = -100
MOST = 8  # ranks whose rows are compared with each other
SAME = 1e-5  # relative, of losses of the same logits
KNOWN: dict[str, tuple[Reduction, Count]] = {
    "count=count_samples": ("mean", count_samples),
    "count=count_tokens('labels')": ("mean", count_tokens("labels")),
    "count=count_tokens('labels', shift=True)": ("mean", count_tokens("labels", shift=True)),
    "count=count_tokens('labels', ignore_index=255)": ("mean", count_tokens("labels", ignore_index=255)),
    "reduction='sum_to_mean', count=count_samples": ("sum_to_mean", count_samples),
}


class Taken(NamedTuple):
    """A loss in eval mode, without a gradient."""

    value: float
    precision: float  # the coarsest of the loss's and the parameters' dtypes
    is_random: bool  # it drew random numbers


@dataclass(frozen=True)
class Asked:
    """A loss, and what it is taken for."""

    name: str
    loss: Callable[[Any, Any], Taken]  # of a micro-batch, told a number of items or None
    items: Callable[[Any], Any]  # the number as the Trainer counts it; None: it does not
    count: Count | None
    reduction: Reduction
    is_models: bool  # the model's own, which is told no number: its own mean is the right one
    is_overridden: bool  # `compute_loss` is a subclass's, whose rows may belong together
    meets: bool  # ranks meet in each loss, so all must take as many


class OfItems(NamedTuple):
    shifts: bool | None = False  # None: not to be seen in this micro-batch
    recounts: bool = False
    is_mean: bool = False


class OfParts(NamedTuple):
    differs: str = ""
    tells_apart: bool = True  # a count of samples would have differed
    fitting: str = ""  # the first of KNOWN that does not differ


@final
class Questions:
    """Weights of micro-batches, which are open to question until a micro-batch has shown that they are right."""

    def __init__(self, asked: Asked) -> None:
        self._asked = asked
        self._shifts: bool | None = None  # as the Trainer believes
        self._is_open = True
        self._error: Exception | None = None  # why this rank could not ask

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
            raise ValueError(
                f"no number of samples can be seen in a micro-batch that is a {type(micro_batch).__name__} "
                f"({str(error).split(';')[0]}); give AccumulatingTrainer count=, as count=len for a list of samples"
            ) from error

    def _items(self, micro_batch: Any) -> Any:
        found = self._asked.items(micro_batch)
        if found is None or self._shifts is None or "shift_labels" in micro_batch:
            return found
        return _kept(micro_batch["labels"], self._shifts)

    def are_due(self, index: int) -> bool:
        return self._is_open and not index & (index - 1)  # in windows 0, 1, 2, 4, 8, ...

    def ask(self, micro_batches: Sequence[Any], index: int) -> bool:
        """Asks what is open in window `index`; True: weights have changed. All ranks call it together.

        Raises:
            ValueError: The loss is not what the default count takes it for, or that cannot be seen.
        """
        micro_batches = [one for one in micro_batches if self.weight(one)]
        asked, numbers = self._asked, gather_object([len(micro_batches)])
        if min(numbers) == 0 and (asked.meets or max(numbers) == 0):
            return False
        answers, reason = self._together(lambda: self._of_items(micro_batches[0]) if micro_batches else None)
        known = [answer.shifts for answer in answers if answer.shifts is not None]
        self._shifts = known[0] if known else self._shifts
        if reason:
            self._object(self._unseen(reason))
        elif asked.count is None and asked.reduction == "mean" and all(answer.is_mean for answer in answers):
            self._is_open = self._shifts is None
        elif asked.is_overridden and (asked.count is not None or all(answer == OfItems() for answer in answers)):
            self._is_open = False
            if asked.count is None:
                self._warn(
                    f"the loss of {asked.name} is weighed by samples, and without labels that the Trainer counts it "
                    "cannot be asked whether it is a mean over them: terms with other denominators (as of DPO with "
                    "several loss types) are not exact; count=count_samples says that it is such a mean"
                )
        else:
            self._ask_parts(micro_batches, index, sum(numbers))
        return any(answer.recounts for answer in answers)

    def _of_items(self, micro_batch: Any) -> OfItems:
        loss, told = self._asked.loss, self._items(micro_batch)
        if told is None or (self._asked.is_models and self._asked.count is not None):
            return OfItems()
        shifts = _shifts_labels(loss, micro_batch, told)
        number = told if shifts is None or "shift_labels" in micro_batch else _kept(micro_batch["labels"], shifts)
        own, halved = loss(micro_batch, None if self._asked.is_models else number), loss(micro_batch, 2 * number)
        is_mean = abs(2 * halved.value - own.value) <= max(SAME, 8 * own.precision) * abs(own.value)
        return OfItems(shifts, bool(number != told), is_mean)

    def _ask_parts(self, micro_batches: Sequence[Any], index: int, number: int) -> None:
        own: list[tuple[Any, ...]] = []
        firsts, _ = self._together(
            lambda: map_tensors(rows_in(micro_batches[0])[0], Tensor.cpu) if micro_batches else None
        )

        def cut() -> int:
            own.extend(in_pieces(firsts[:MOST]))
            own.extend(itertools.islice(in_pieces(micro_batches), None if index == 0 else 1))
            return len(own)

        lengths, reason = self._together(cut)
        least = 0 if reason else min(lengths)
        if least or self._asked.meets:  # a model's own loss may meet other ranks too, as DETR's number of boxes does
            del own[least:]
        found, error = self._together(lambda: [self._compare(pieces) for pieces in own])
        every = [one for some in found for one in some]
        wrong = next((one for one in every if one.differs), None)
        if wrong is not None:
            self._object(self._wrong(wrong))
        elif every:
            self._is_open = not any(one.tells_apart for one in every)
        elif index == 0 and number > 1:  # else each count is right
            self._object(self._unseen(reason or error or "its micro-batches of one row cannot be put together"))

    def _compare(self, pieces: tuple[Any, ...]) -> OfParts:
        """Compares each term of a micro-batch's loss with what those of its parts make of it."""
        whole, *parts = pieces
        wanted, *losses = map(self._terms, pieces)
        size, rounding = abs(sum(wanted)), min(0.01, 200 * self._precision)  # in batches of other shapes

        def error(reduction: Reduction, count: Count) -> float:
            """In parts of what rounding may do."""
            weights = [float(count(part)) for part in parts]
            terms = zip(wanted, zip(*losses, strict=True), strict=True)
            found = [(abs(_of_whole(of_parts, weights, reduction) - one), abs(one)) for one, of_parts in terms]
            errors = [off / (rounding * one + 8 * self._precision * size or 1.0) for off, one in found]
            return max(one if math.isfinite(one) else math.inf for one in errors)

        if not math.isfinite(size) or error(self._asked.reduction, self.weight) <= 1:
            return OfParts(tells_apart=error(self._asked.reduction, count_samples) > 10)
        total, first, second = (f"{sum(one):.8g}" for one in (wanted, *losses))
        weights = " and ".join(f"{float(self.weight(part)):g}" for part in parts)
        seen = f"{total} of a micro-batch, {first} and {second} of its parts with counts {weights}"
        can_count = (
            count_samples,
            *([KNOWN[name][1] for name in KNOWN] if isinstance(whole.get("labels"), Tensor) else []),
        )
        known = (name for name, (how, one) in KNOWN.items() if one in can_count and error(how, one) <= 1)
        return OfParts(seen, True, next(known, ""))

    def _terms(self, micro_batch: Any) -> tuple[float, float]:
        """The terms of a loss that are divided by the number of items, and those that are not."""
        loss, number = self._asked.loss, self._items(micro_batch) if self._asked.count is None else None
        taken = loss(micro_batch, None if self._asked.is_models else self._items(micro_batch))
        if taken.is_random:
            raise ValueError("it draws random numbers in eval mode")
        self._precision = taken.precision
        if number is None:
            return 0.0, taken.value
        rest = 2 * loss(micro_batch, 2 * number).value - loss(micro_batch, number).value
        return taken.value - rest, rest

    def _together(self, own: Callable[[], Any]) -> tuple[list[Any], str]:
        """What the ranks found, and why one found nothing; each calls it. Running out of memory stays an error."""
        found, reason, self._error = None, "", None
        try:
            found = own()
        except Exception as error:
            reason, self._error = f"{type(error).__name__}: {error}".removeprefix("ValueError: "), error
        every = gather_object([(found, reason)])
        if isinstance(self._error, torch.OutOfMemoryError):
            raise self._error
        return [one for one, _ in every if one is not None], next((why for _, why in every if why), "")

    # What is said

    def _object(self, message: str) -> None:
        self._is_open = False
        if self._asked.count is None:
            raise ValueError(message) from self._error
        self._warn(message)

    def _warn(self, message: str) -> None:
        if PartialState().is_main_process:
            warnings.warn(message, stacklevel=2)

    def _wrong(self, found: OfParts) -> str:
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
            "count=count_tokens('labels') or one of your own, and reduction='sum_to_mean' where it is a sum"
        )


def _kept(labels: Tensor, shifts: bool) -> Tensor:
    return (labels[..., 1:] if shifts else labels).ne(IGNORED).sum()


def _shifts_labels(loss: Callable[[Any, Any], Taken], micro_batch: Any, number: Any) -> bool | None:
    """Whether the first label of each row plays no part, seen by changing it; None: not to be seen here."""
    labels = micro_batch["labels"]
    if labels.dim() != 2 or labels.is_floating_point() or "shift_labels" in micro_batch:
        return False
    kept = labels.ne(IGNORED)
    valid = labels[kept] if kept.any() else labels
    one, another = valid.min(), valid.max()
    wrong = torch.where(labels == one, another, one).where(kept, labels)
    first, rest = labels.clone(), wrong.clone()
    first[:, 0], rest[:, 0] = wrong[:, 0], labels[:, 0]
    before, *after = (loss({**micro_batch, "labels": some}, number).value for some in (labels, first, rest))
    by_first, by_rest = (abs(value - before) for value in after)
    if one == another or not kept[:, 0].any() or not by_rest > SAME * abs(before):
        return None
    return by_first <= SAME / 10 * abs(before)


def rows_in(micro_batch: Any) -> list[Any]:
    """Its first row, and the others if there are any."""
    rows = count_samples(micro_batch)
    return [micro_batch] if rows == 1 else list(cut_batch(micro_batch, [1, rows - 1], rows))


def in_pieces(micro_batches: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
    """Wholes with two parts: a micro-batch, its first row and the others; the first rows of two that follow."""
    before = None
    for micro_batch in micro_batches:
        first, *others = rows_in(micro_batch)
        if others:
            yield micro_batch, first, *others
        # Rows of one micro-batch may be alike where those of two are not, as where they are sorted.
        if before is not None and (whole := _joined(before, first)) is not None:
            yield whole, before, first
        before = first


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
