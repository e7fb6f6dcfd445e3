"""Receipts of one update, compared: is each gradient the sum of what autograd gave, and if not, what is it?"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from ...extensions.receipt import NUM, explain
from ...law import shorten

Key = tuple[int, int]  # an optimizer and its update
FINE, COARSE = 1e-3, 5e-2  # relative; of gradients in half precision
WINDOW = (
    "for window in Accumulator(model, optimizer, steps=...).windows(loader): in its loop window.backward(loss), after "
    "it window.step()"
)


class Fault(NamedTuple):
    """Something that is wrong: its kind, the line, the numbers, and its cure by hand and with a window of ours."""

    kind: str
    where: str
    text: str
    by_hand: str
    window: str = WINDOW


@dataclass
class Reckoned:
    """Results over all updates, by optimizer and often by update."""

    faults: dict[int, list[Fault]] = field(default_factory=lambda: defaultdict(list))
    notes: list[str] = field(default_factory=list)
    factors: dict[Key, float] = field(default_factory=dict)  # between gradients and averages over ranks
    shared: dict[Key, str] = field(default_factory=dict)  # parameters that each backward gives the same
    tasks: set[Key] = field(default_factory=set)
    alone: dict[Key, Sequence[float]] = field(default_factory=dict)  # in which nothing was reduced
    kept: set[int] = field(default_factory=set)  # whose script keeps gradients elsewhere when it clears them
    own: set[int] = field(default_factory=set)  # whose script does more with gradients than to add them up
    compared: int = 0


@final
class Reckoning:
    """Compares one optimizer's parameters on all ranks."""

    def __init__(
        self,
        seen: Sequence[dict[str, Any]],
        updates: Sequence[dict[str, Any]],
        before: Tensor | None,
    ) -> None:
        first, about = updates[0], seen[0]
        self.index, self.line = first["index"], first["line"]
        self.where = first["backwards"][-1]["line"] if first["backwards"] else self.line
        self.is_own = False  # the script does something else with gradients than to add them up
        self.shared, self.ranks = "", [one["rank"] for one in seen]
        self.alone: list[float] = []  # by rank, the factor between its gradient and what it gave, where none is reduced
        reached = [one[one.any(-1)] for one in (update["received"].any(-1) for update in updates)]
        drawn = {backward["drawn"] for one in updates for backward in one["backwards"]}
        # Backwards of one micro-batch that reach different parameters
        self.is_tasks = len(drawn) == 1 and any(bool((one != one[:1]).any()) for one in reached)
        self.names = [about["names"][place] for place in first["places"]]
        self.equations = torch.tensor([min(NUM, about["numels"][place]) for place in first["places"]])
        sharded = torch.tensor([place in about["sharded"] for place in first["places"]])
        copies = torch.tensor([about["sharded"].get(place, 1) for place in first["places"]])
        bounds = [COARSE if place in about["coarse"] else FINE for place in first["places"]]
        self.bound = torch.tensor(bounds, dtype=torch.float64)
        self.received = [one["received"] for one in updates]  # by rank: backwards, parameters, projections
        own = torch.stack([one.sum(0) for one in self.received])  # ranks, parameters, projections
        self.own, self.whole = own, own.mean(0)
        self.size = torch.stack([one.norm(dim=(0, 2)) for one in self.received]).mean(0)
        self.closed = torch.stack([one["closed"] for one in updates])
        self.closed[:, sharded] = self.closed[:, sharded].sum(0) / copies[sharded][:, None]
        self.copies = sharded | same_on_all([one["values"] for one in updates], first["places"], about["vectors"])
        self.before = before if before is not None and before.shape == self.closed.shape else None

    def judge(self) -> tuple[float | None, list[Fault], list[str]]:
        """The factor between gradient and average over ranks, where there is one; faults, and notes."""
        judged, notes, faults = (self.size > 0) & self.copies & self.closed.isfinite().all(-1).all(0), [], []
        gone = judged & (self.closed.norm(dim=-1).amax(0) == 0)
        if gone.any() and not gone[judged].all():
            notes.append(f"{self.line} steps without a gradient of {self._named(gone)}, although backward gave one")
        alone = judged & ~gone & (_rest(self.closed, self.whole) > self.bound)
        alone &= _rest(self.closed, self.own) < self.bound
        if len(self.own) > 1 and alone.any():
            text = f"{self._named(alone)}: in update {self.index} each rank has its own gradient; it was not reduced"
            hand = "run forward and backward of a window's last micro-batch within DDP, and outside of no_sync()"
            faults.append(Fault("not reduced", self.where, text, hand))
            if not (judged & ~gone & ~alone).any():
                ratios = (self.closed * self.own).sum(-1) / self.own.square().sum(-1).clamp(min=1e-300)
                self.alone = ratios[:, alone].median(-1).values.tolist()
            judged &= ~alone
        judged &= ~gone
        if not judged.any():
            return None, faults, notes
        ratios = (self.closed[0] * self.whole).sum(-1) / self.whole.square().sum(-1).clamp(min=1e-300)
        factor = float(ratios[judged].median())
        off = (self.closed - factor * self.whole).norm(dim=-1).amax(0) / (abs(factor) * self.size).clamp(min=1e-300)
        wrong = judged & ~(off <= self.bound)
        repeats = judged & ~wrong & self._repeats()
        self.shared = self._named(repeats) if repeats.any() and not repeats[judged].all() else ""
        rounded = judged & (self.bound == FINE) & (off > 5e-5) & (off < 1e-2)
        if not (wrong | rounded).any():
            return factor, faults, notes
        most = int(wrong.sum()) * 2 > int(judged.sum())  # then the factor is nobody's
        found = self._explain(judged if most else wrong, None if most else factor) if wrong.any() else []
        if not found and (wrong & ~rounded).any() and (_rest(self.closed, self.whole) < self.bound)[wrong].all():
            ratio = float((self.closed[0] * self.whole)[wrong].sum() / self.whole[wrong].square().sum()) / factor
            if len(self.own) > 1 and any(abs(ratio / one - 1) < FINE for one in (len(self.own), 1 / len(self.own))):
                text = f"{self._named(wrong)}: the gradient in update {self.index} is {ratio:.4g} times the others'"
                found = [Fault("divisor", self.where, text, "let all reductions divide by the same number of ranks")]
        if not found and (wrong & ~rounded).any():
            self.is_own = True
            notes.append(f"not seen: what the script does with the gradient of {self._named(wrong)} before it steps")
        elif not found:
            half = "bfloat16" if float(off[rounded].median()) > 4e-4 else "float16"
            notes.append(f"the gradient of {self._named(rounded)} is rounded on its way to the step, as {half} rounds")
            most = False
        return (None if most else factor), faults + found, notes

    def _named(self, places: Tensor) -> str:
        return shorten([name for name, is_one in zip(self.names, places.tolist(), strict=True) if is_one])

    def _repeats(self) -> Tensor:
        """Tells to which parameters each backward gives the same."""
        most = [one.abs().amax((0, 2)) * (len(one) > 1) for one in self.received]
        apart = [(one - one[:1]).abs().amax((0, 2)) for one in self.received]
        return torch.stack([off < 1e-4 * size for off, size in zip(apart, most, strict=True)]).all(0)

    def _explain(self, wrong: Tensor, factor: float | None) -> list[Fault]:
        """Fits with which weight each rank's backwards, and the update before, are in the gradients that are wrong."""
        columns = [backward[wrong].flatten() for one in self.received for backward in one]
        owners = [rank for rank, one in enumerate(self.received) for _ in one]
        if self.before is not None:
            columns.append(self.before[0][wrong].flatten())
        bound, hand = float(self.bound[wrong].max()), "keep each gradient from its backward to the step"
        names, basis, num = self._named(wrong), torch.stack(columns, dim=1), int(self.equations[wrong].sum())
        if num <= len(columns):  # whatever it is, they make it up: is one part lost, or there twice?
            steps = [step for one in self.received for step in range(len(one))]
            parts = [one * (factor or 0.0) / len(self.own) for one in columns]
            given = {(self.ranks[rank], step): one for rank, step, one in zip(owners, steps, parts, strict=False)}
            said = explain(given, self.closed[0][wrong].flatten(), None, self.index, bound) if num >= NUM else ""
            text = f"{names}: {said} in update {self.index}"
            return [Fault("lost", self.where, text, hand)] if "is lost" in said or "counts twice" in said else []
        found, whole = [], basis[:, : len(owners)].sum(1)[None]
        for rank, target in enumerate(one[wrong].flatten() for one in self.closed):
            fit = torch.linalg.lstsq(basis, target, driver="gelsd").solution
            off = float((basis @ fit - target).norm() / target.norm())
            if off > bound:
                return []
            largest = float(fit[: len(owners)].abs().max())
            noise = off * float(target.norm()) / (num - len(columns)) ** 0.5
            unsure = noise * float(torch.linalg.pinv(basis).norm(dim=1).max()) / largest  # of a reduction that rounds
            shares = fit[: len(owners)] / largest
            mine = shares[torch.tensor(owners) == rank]
            shown = ", ".join(f"{float(one):.3g}" if abs(one) > bound else "0" for one in mine)
            lost, is_even = int((mine.abs() < bound).sum()), float(_rest(target[None, None], whole)) < 10 * off
            if self.before is not None and abs(fit[-1]) > 10 * bound:
                text = f"{names}: the gradient in update {self.index} still holds that of the update before"
                found.append(Fault("stale", self.line, text, "clear gradients after each step"))
            elif not is_even and float(shares.max() - shares.min()) > max(2 * bound, 8 * unsure):
                what = f"{lost} of {len(mine)} backwards are lost" if lost else "backwards count differently"
                text = f"{names}: {what} in update {self.index} on rank {self.ranks[rank]} (their weights: {shown})"
                found.append(Fault("lost" if lost else "uneven", self.where, text, hand))
        return found


def same_on_all(values: Sequence[Tensor], places: Sequence[int], vectors: Sequence[int]) -> Tensor:
    """Tells which parameters are copies; where some are not, vectors may be equal shards, as of zeros."""
    same = (torch.stack([one - values[0] for one in values]).abs() == 0).all(0).all(-1)
    return same if same.all() else same & ~torch.tensor([place in vectors for place in places])


def _rest(closed: Tensor, given: Tensor) -> Tensor:
    """The part of each parameter's receipts that is no multiple of the given ones: the most of all ranks."""
    along = (closed * given).sum(-1, keepdim=True) / given.square().sum(-1, keepdim=True).clamp(min=1e-300) * given
    rest: Tensor = (closed - along).norm(dim=-1) / closed.norm(dim=-1).clamp(min=1e-300)
    return rest.amax(0)
