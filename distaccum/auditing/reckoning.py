"""Compares the receipts of an update: is each gradient the sum of what autograd gave, and if not, what is it?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from ..text import shorten
from .receipt import NUM

Seen = Sequence[dict[str, Any]]  # by rank
Key = tuple[int, int]  # the optimizer's place, and the update's index
SOFT = NOTE, UNJUDGED = "note", "unjudged"  # kinds of what is no fault: it may be meant, or could not be judged
BOUND = 2e-2  # relative errors below it are none, in half precision too
LOST = 5e-3  # the most that is left of a backward that is lost
WINDOW = (
    "for window in Accumulator(model, optimizer, steps=..., count=...).windows(loader): in its loop "
    "window.backward(mean), after it window.step(); in a Trainer of transformers AccumulatingTrainer of "
    'distaccum.transformers, in Lightning callbacks=[ExactAccumulation(...)]; count= as in count=count_tokens("labels")'
)


class Finding(NamedTuple):
    """A fault: its kind, line, numbers, and a cure by hand; or what is said beside faults."""

    kind: str
    where: str
    text: str
    by_hand: str = ""

    @property
    def line(self) -> str:
        return f"{self.where}: {self.text}" if self.where else self.text


def columns(about: dict[str, Any], places: Sequence[int]) -> dict[str, Any]:
    """Selects what a rank knows about these parameters: a list of names, and a tensor of everything else."""
    chosen = {what: [values[place] for place in places] for what, values in about["parameters"].items()}
    return {what: values if what == "name" else torch.tensor(values) for what, values in chosen.items()}


@final
class Reckoning:
    """Compares one optimizer's parameters on all ranks.

    Attributes:
        factor (float | None): Gradients divided by the ranks' average of what autograd gave, if one number fits.
        is_alone (bool): Each rank has a gradient of its own: nothing was reduced.
        same (Tensor): Which parameters are equal on all ranks.
        is_own (bool): The script does more with gradients than adding them up.
    """

    def __init__(self, seen: Seen, updates: Seen, before: Tensor | None) -> None:
        first = updates[0]
        backwards = [update["backwards"] for update in updates]
        self.findings = list[Finding]()
        self.factor: float | None = None
        self.is_alone = False
        self.is_own = False
        self.index = first["index"]
        self.line = first["line"]
        self.ranks = [rank["rank"] for rank in seen]
        self.where = backwards[0][-1]["line"] if backwards[0] else self.line
        about = columns(seen[0], first["places"])
        self.names, copies = about["name"], about["copies"]
        self.equations = about["numel"].clamp(max=NUM)
        # For each rank: backward, parameter, projection
        nothing = torch.zeros_like(first["closed"])
        self.received = [torch.stack([nothing, *(each["received"] for each in of_rank)])[1:] for of_rank in backwards]
        self.own = torch.stack([received.sum(0) for received in self.received])
        self.whole = self.own.mean(0)
        self.size = torch.stack([received.norm(dim=(0, 2)) for received in self.received]).mean(0)
        self.closed = torch.stack([update["closed"] for update in updates])
        sharded = copies > 0
        self.closed[:, sharded] = self.closed[:, sharded].sum(0) / copies[sharded][:, None]
        self.before = before if before is not None and before.shape == self.closed.shape else None
        absent = [{*update["absent"]} for update in updates]
        self.absent = torch.tensor([any(place in every for every in absent) for place in first["places"]])
        self.same = _same_on_all([update["values"] for update in updates], about["vector"])
        self._judge(sharded | self.same)

    def _judge(self, is_copy: Tensor) -> None:
        judged = (self.size > 0) & is_copy & self.closed.isfinite().all(-1).all(0)
        gone = judged & self.absent
        if gone.any():
            lacks = f"{self.line} steps without a gradient of {self.named(gone)}, although backward gave one"
            self._say(UNJUDGED, f"{lacks}: it is lost, or an engine keeps it elsewhere")
        judged &= ~gone
        alone = judged & (_rest(self.closed, self.whole) > BOUND) & (_rest(self.closed, self.own) < BOUND)
        if len(self.own) > 1 and alone.any():
            text = f"{self.named(alone)}: in update {self.index} each rank has its own gradient; it was not reduced"
            hand = "let DDP or fully_shard cover it, and run a window's last forward and backward outside of no_sync()"
            self.findings.append(Finding("not reduced", self.where, text, hand))
            self.is_alone = alone.equal(judged)
            judged &= ~alone
        if judged.any():
            self._compare(judged)

    def _compare(self, judged: Tensor) -> None:
        """Compares gradients that are reduced with the sum of what autograd gave."""
        is_clear = judged & (self.whole.norm(dim=-1) > BOUND * self.size)  # micro-batches do not cancel
        factor = float(_ratio(self.closed[0], self.whole)[is_clear if is_clear.any() else judged].median())
        off = (self.closed - factor * self.whole).norm(dim=-1).amax(0) / (abs(factor) * self.size).clamp(min=1e-300)
        wrong = judged & ~(off <= BOUND)
        is_unknown = int(wrong.sum()) * 2 > int(judged.sum())  # then the factor means nothing
        faults = self._explain(judged if is_unknown else wrong) if wrong.any() else []
        self.findings += faults
        if not faults and wrong.any():
            self.is_own = True
            self._say(UNJUDGED, f"what the script does with the gradient of {self.named(wrong)} before it steps")
        self.factor = None if is_unknown or not is_clear.any() else factor

    @property
    def is_compared(self) -> bool:
        return self.factor is not None or any(finding.kind not in SOFT for finding in self.findings)

    def _say(self, kind: str, text: str) -> None:
        self.findings.append(Finding(kind, "", text))

    def named(self, places: Tensor) -> str:
        return shorten([name for name, is_meant in zip(self.names, places.tolist(), strict=True) if is_meant])

    def _explain(self, wrong: Tensor) -> list[Finding]:
        """Fits the weights with which each rank's backwards, and the previous update, are in the wrong gradients."""
        parts = [row[wrong].flatten() for received in self.received for row in received]
        owners = torch.tensor([rank for rank, received in enumerate(self.received) for _ in received])
        basis = parts if self.before is None else [*parts, self.before[0][wrong].flatten()]
        if int(self.equations[wrong].sum()) <= len(basis):  # too few equations
            return []
        names = self.named(wrong)
        faults = list[Finding]()
        hand = "keep each gradient from its backward to the step"
        whole = torch.stack(parts).sum(0)
        matrix = torch.stack(basis, dim=1)
        for rank, target in enumerate(self.closed[:, wrong].flatten(1)):
            weights = torch.linalg.lstsq(matrix, target, driver="gelsd").solution
            if float((matrix @ weights - target).norm()) > BOUND * float(target.norm()):
                return []
            shares = weights[: len(parts)] / float(weights[: len(parts)].abs().max())
            own = shares[owners == rank]
            shown = ", ".join(f"{share:.3g}" if abs(share) > LOST else "0" for share in own.tolist())
            lost = int((own.abs() < LOST).sum())
            is_even = float(_rest(target[None, None], whole[None])) < BOUND
            if len(basis) > len(parts) and abs(weights[-1]) > 10 * BOUND:
                text = f"{names}: the gradient in update {self.index} still holds that of the update before"
                faults.append(Finding("stale", self.line, text, "clear gradients after each step"))
            elif not is_even and float(shares.max() - shares.min()) > 2 * BOUND:
                what = f"{lost} of {len(own)} backwards are lost" if lost else "backwards count differently"
                text = f"{names}: {what} in update {self.index} on rank {self.ranks[rank]} (their weights: {shown})"
                faults.append(Finding("lost" if lost else "uneven", self.where, text, hand))
        return faults


def _same_on_all(values: Sequence[Tensor], vectors: Tensor) -> Tensor:
    """Tells which parameters are equal on all ranks; if some are not, equal vectors, and zeros, may be shards."""
    same = (torch.stack([of_rank - values[0] for of_rank in values]).abs() == 0).all(0).all(-1)
    return same if same.all() else same & ~vectors & values[0].any(-1)


def _ratio(closed: Tensor, given: Tensor) -> Tensor:
    """The multiple of the given receipts that is nearest to the closed ones."""
    ratio: Tensor = (closed * given).sum(-1) / given.square().sum(-1).clamp(min=1e-300)
    return ratio


def _rest(closed: Tensor, given: Tensor) -> Tensor:
    """The relative part of each parameter's receipts that is no multiple of the given ones: the most on any rank."""
    rest: Tensor = (closed - _ratio(closed, given)[..., None] * given).norm(dim=-1)
    rest /= closed.norm(dim=-1).clamp(min=1e-300)
    return rest.amax(0)
