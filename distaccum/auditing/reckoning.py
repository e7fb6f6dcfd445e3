"""Compares the receipts of an update: is each gradient the sum of what autograd gave, and if not, what is it?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, final

import torch
from torch import Tensor

from ..text import shorten
from .receipt import NUM

Seen = Sequence[dict[str, Any]]  # by rank
SOFT = NOTE, UNJUDGED, FACT = "note", "unjudged", "fact"  # no faults: may be meant, could not be judged, is so
BOUND = 2e-2  # relative errors below it are none, in half precision too
LOST = 5e-3  # the most that is left of a backward that is lost
WINDOW = (
    "for window in Accumulator(model, optimizer, steps=..., count=...).windows(loader): in its loop "
    "window.backward(mean), after it window.step(); in a Trainer of transformers AccumulatingTrainer of "
    'distaccum.transformers, in Lightning callbacks=[ExactAccumulation(...)]; count= as in count=count_tokens("labels")'
)


@dataclass(frozen=True)
class Finding:
    """A fault: its kind, line, numbers, and a cure by hand; or what is said beside faults, as facts are."""

    kind: str
    where: str
    text: str
    by_hand: str = ""

    @property
    def line(self) -> str:
        return f"{self.where}: {self.text}" if self.where else self.text


@final
class Reckoning:
    """Compares one optimizer's parameters on all ranks.

    Attributes:
        factor (float | None): Gradients divided by the ranks' average of what autograd gave, if one number fits.
        is_alone (bool): Each rank has a gradient of its own: nothing was reduced.
        equal (Tensor): Which parameters have equal values on all ranks; `same` are surely no shards.
        is_own (bool): The script does more with gradients than adding them up.
        is_one_line (bool): All backwards are of one line, from the same criterions.
        reach (Tensor): Which parameters each of a rank's backwards reaches; a stand-in reaches none, and is left out.
    """

    def __init__(self, seen: Seen, updates: Seen, before: Tensor | None, *, is_next: bool) -> None:
        """`before`: the gradients of the last update with receipts; `is_next`: this is the next one, or the first."""
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
        lines = {(each["line"], *(term["site"] for term in each["terms"])) for each in backwards[0]}
        self.is_one_line = len(lines) == 1
        rows = [seen[0]["parameters"][place] for place in first["places"]]
        self.names = [row["name"] for row in rows]
        numels, copies, vectors = torch.tensor([(row["numel"], row["copies"], row["vector"]) for row in rows]).T
        self.equations = numels.clamp(max=NUM)
        # For each rank: backward, parameter, projection
        nothing = torch.zeros_like(first["closed"])
        self.received = [torch.stack([nothing, *(each["received"] for each in of_rank)])[1:] for of_rank in backwards]
        reach = self.received[0].any(-1)
        self.reach = reach[reach.any(1)]
        self.own = torch.stack([received.sum(0) for received in self.received])
        self.whole = self.own.mean(0)
        self.size = torch.stack([received.norm(dim=(0, 2)) for received in self.received]).mean(0)
        self.closed = torch.stack([update["closed"] for update in updates])
        sharded = copies > 0
        self.closed[:, sharded] = self.closed[:, sharded].sum(0) / copies[sharded][:, None]
        self.before = before if before is not None and before.shape == self.closed.shape else None
        self.is_next = is_next
        absent = {*chain(*(update["absent"] for update in updates))}
        values = torch.stack([update["values"] for update in updates])
        self.equal = (values == values[0]).all(0).all(-1)
        # If some differ, equal vectors, and zeros, may be shards.
        self.same = self.equal if self.equal.all() else self.equal & ~(vectors > 0) & values[0].any(-1)
        judged = (self.size > 0) & (sharded | self.same) & self.closed.isfinite().all(-1).all(0)
        self._judge(judged, torch.tensor([place in absent for place in first["places"]]))
        if self.before is not None:
            left = (self.size == 0) & (self.equations > 1) & self.closed.any(-1).all(0)
            left &= _rest(self.closed, self.before[0]) < BOUND
            self.findings += [self._stale(left)] * bool(left.any())

    def _judge(self, judged: Tensor, absent: Tensor) -> None:
        gone = judged & absent
        if gone.any():
            lacks = f"{self.line} steps without a gradient of {self.named(gone)}, although backward gave one"
            self.findings.append(Finding(UNJUDGED, "", f"{lacks}: it is lost, or an engine keeps it elsewhere"))
        judged = judged & ~absent
        alone = judged & (_rest(self.closed, self.whole) > BOUND) & (_rest(self.closed, self.own) < BOUND)
        if len(self.own) > 1 and alone.any():
            text = f"{self.named(alone)}: in update {self.index} each rank has its own gradient; it was not reduced"
            hand = "let DDP or fully_shard cover it, and run a window's last forward and backward outside of no_sync()"
            self.findings.append(Finding("not reduced", self.where, text, hand))
            self.is_alone = alone.equal(judged)
            judged = judged & ~alone
        if judged.any():
            self._compare(judged)

    def _compare(self, judged: Tensor) -> None:
        """Compares gradients that are reduced with the sum of what autograd gave."""
        is_clear = judged & (self.whole.norm(dim=-1) > BOUND * self.size)  # micro-batches do not cancel
        alike = judged & (self.equations > 1) & (_rest(self.closed, self.whole) < BOUND)  # a number is any other's
        fits = alike & is_clear
        chosen = next((places for places in (fits, is_clear, alike) if places.any()), None)
        # Where all cancels, what is left of it is rounding, and no ratio of it tells a factor.
        factor = 1.0 if chosen is None else float(_ratio(self.closed[0], self.whole)[chosen].median())
        off = (self.closed - factor * self.whole).norm(dim=-1).amax(0) / (abs(factor) * self.size).clamp(min=1e-300)
        wrong = judged & ~(off <= BOUND)
        if self.before is not None and self.is_next and fits.any():  # also of one element, too few for a fit
            rest = (self.closed - factor * self.whole - self.before).norm(dim=-1).amax(0)
            stale = wrong & (rest < BOUND * self.before.norm(dim=-1).amin(0))
            self.findings += [self._stale(stale)] * bool(stale.any())
            wrong &= ~stale
        is_unknown = not fits.any() and int(wrong.sum()) * 2 > int(judged.sum())  # then the factor means nothing
        faults = [*self._explain(judged if is_unknown else wrong)]
        self.findings += faults
        if not faults and wrong.any():
            self.is_own = self.is_next  # or it may be what the update before left
            text = f"what the script does with the gradient of {self.named(wrong)} before it steps"
            self.findings.append(Finding(UNJUDGED, "", text))
        self.factor = None if is_unknown or not is_clear.any() else factor

    def _stale(self, places: Tensor) -> Finding:
        text = f"{self.named(places)}: the gradient in update {self.index} still holds that of the update before"
        return Finding("stale", self.line, text, "clear gradients after each step")

    def reached(self) -> dict[str, float]:
        """By name, which part of the backwards of one line reach a parameter."""
        parts = self.reach.double().mean(0).tolist()
        return dict(zip(self.names, parts, strict=True)) if self.is_one_line and len(self.reach) else {}

    def unreached(self) -> tuple[str, str]:
        """A line, and what some of its backwards do not reach, with nothing in its place, as heads of tasks are."""
        some = self.reach.any(0) & ~self.reach.all(0)
        num = int((~self.reach[:, some].any(1)).sum())
        text = f"{self.named(some)}, which {num} of {len(self.reach)} backwards of an update do not reach"
        return self.where, text * bool(self.is_one_line and some.any() and num)

    @property
    def is_compared(self) -> bool:
        return self.factor is not None or any(finding.kind not in SOFT for finding in self.findings)

    def named(self, places: Tensor) -> str:
        return shorten([name for name, is_meant in zip(self.names, places.tolist(), strict=True) if is_meant])

    def _explain(self, wrong: Tensor) -> Iterator[Finding]:
        """Fits the weights with which each rank's backwards, and the previous update, are in the wrong gradients."""
        parts = torch.cat(self.received)[:, wrong].flatten(1)
        left = [self.before[:1, wrong].flatten(1)] if self.before is not None and self.is_next else []
        basis = torch.cat([parts, *left])
        targets = self.closed[:, wrong].flatten(1)
        if int(self.equations[wrong].sum()) <= len(basis):  # too few equations, or nothing wrong
            return
        fit = torch.linalg.lstsq(basis.T, targets.T, driver="gelsd").solution.T
        if ((fit @ basis - targets).norm(dim=1) > BOUND * targets.norm(dim=1)).any():
            return
        for rank, (weights, target) in enumerate(zip(fit, targets, strict=True)):
            shares = weights[: len(parts)] / float(weights[: len(parts)].abs().max())
            own = shares.split([*map(len, self.received)])[rank].tolist()
            is_even = float(_rest(target[None, None], parts.sum(0)[None])) < BOUND
            if len(basis) > len(parts) and abs(weights[-1]) > 10 * BOUND:
                yield self._stale(wrong)
            elif not is_even and float(shares.max() - shares.min()) > 2 * BOUND:
                lost = sum(abs(share) < LOST for share in own)
                what = f"{lost} of {len(own)} backwards are lost" if lost else "backwards count differently"
                text = f"{self.named(wrong)}: {what} in update {self.index} on rank {self.ranks[rank]}"
                shown = ", ".join(f"{share:.3g}" if abs(share) > LOST else "0" for share in own)
                hand = "leave each gradient as it is until the step"
                hand += ", and reduce once, in the last backward" * (len(self.ranks) > 1)
                yield Finding("lost" if lost else "uneven", self.where, f"{text} (their weights: {shown})", hand)


def _ratio(closed: Tensor, given: Tensor) -> Tensor:
    """The multiple of the given receipts that is nearest to the closed ones."""
    ratio: Tensor = (closed * given).sum(-1) / given.square().sum(-1).clamp(min=1e-300)
    return ratio


def _rest(closed: Tensor, given: Tensor) -> Tensor:
    """The relative part of each parameter's receipts that is no multiple of the given ones: the most on any rank."""
    rest: Tensor = (closed - _ratio(closed, given)[..., None] * given).norm(dim=-1)
    rest /= closed.norm(dim=-1).clamp(min=1e-300)
    return rest.amax(0)
