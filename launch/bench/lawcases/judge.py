"""The judge: compares each window's gradient with one call of the criterion on all its samples, in plain torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .cases import Case, criterion, inputs, micro_batches, net_of
from .task import Outcome

BOUNDS = {torch.float64: 1e-10, torch.float32: 1e-5}


@dataclass
class Verdict:
    verdict: str  # exact, wrong, absent, error, hangs, not installed
    error: float | None = None  # relative, of the worst window's gradient
    note: str = ""
    updates: tuple[int, int] | None = None  # made and due, if they differ


def exact_change(case: Case, window: int, at: Tensor) -> Tensor:
    """The gradient of one call on all samples, in plain torch and float64."""
    net = net_of(case).double()
    nn.utils.vector_to_parameters(at.double(), net.parameters())
    owned = [b for b, (w, _) in zip(micro_batches(case), case.owners(), strict=True) if w == window]
    batch = {k: torch.cat([b[k] for b in owned]) for k in owned[0]}
    batch = {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}
    criterion(case.kind, net(inputs(case.kind, batch)), batch).backward()
    return torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])


def judge(case: Case, outcomes: list[Outcome], dtype: torch.dtype) -> Verdict:
    """Judges each window from the library's own weights before it, so no window pays for an earlier one."""
    first = outcomes[0]
    apart = not all(same(one.weights[-1], first.weights[-1]) for one in outcomes)
    weights = [first.weights[0]]
    for after in first.weights[1:]:
        if not torch.equal(after, weights[-1]):
            weights.append(after)
    windows = [w for w in range(len(case.lengths)) if w not in case.skipped]
    if not all(one.isfinite().all() for one in weights):
        return Verdict("wrong", math.nan, "weights become NaN")
    errors = []
    for i, window in enumerate(windows):
        before = weights[min(i, len(weights) - 1)].double()
        moved = before - weights[min(i + 1, len(weights) - 1)].double()
        expected = exact_change(case, window, before)
        errors.append(((moved - expected).norm() / expected.norm()).item())
    error = max(errors)
    made, due = len(weights) - 1, len(windows)
    notes = []
    if made != due:
        notes.append(f"{made} updates, exact {due}")
    if apart:
        notes.append("the ranks' weights differ")
    if case.also and first.also != case.also[1]:
        what, exact = case.also
        notes.append(f"not {what}" if exact is True else f"{what} {first.also:g}, exact {exact:g}")
    good = error <= BOUNDS[dtype] and not notes
    updates = None if made == due else (made, due)
    return Verdict("exact" if good else "wrong", error, "; ".join(notes), updates)


def same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one, other) or bool(one.isnan().any() and other.isnan().any())
