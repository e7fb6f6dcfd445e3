"""The law on every engine, with the same tests: windows of every kind, compared with one big batch.

Six wrappers run every test. The others run a part each, in turn, so that every pair of wrapper and policy, of policy
and loss, and of policy and fault is tested. sends.py runs the whole grid.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engines import KINDS, LAYOUTS, Run, laws
from problems import CASES, error, sample_loss

from distaccum import DistaccumError

GRID = [(name, sync) for name, kind in KINDS.items() for sync in kind.policies]
WHOLE = [(name, "last") for name in ("plain", "DDP", "FSDP2", "FSDP1", "ZeRO 1", "ZeRO 3") if name in KINDS]


def in_turn(values: tuple[Any, ...], quick: int = 0, slow: int = 1) -> list[Any]:
    """Wrapper, policy and value: all values for the six wrappers, `quick` + `slow` values for each other pair."""
    found = []
    for place, (name, sync) in enumerate(GRID):
        is_whole = (name, sync) in WHOLE
        mine = values if is_whole else [values[(place + i * 3) % len(values)] for i in range(quick + slow)]
        for i, value in enumerate(mine):
            marks = [] if is_whole or i < quick else [pytest.mark.slow]
            found.append(pytest.param(name, sync, value, marks=marks, id=f"{name}-{sync}-{value}"))
    return found


@pytest.mark.parametrize(("name", "sync", "case"), in_turn(tuple(CASES), quick=1, slow=1))
def test_windows_equal_one_big_batch(ranks, name, sync, case):
    kind = KINDS[name]
    for seen in ranks(kind.world).run(laws, name, sync, (case,)):
        for window in seen[case]:
            assert window.gradient <= kind.bound, window
            assert window.loss <= kind.bound, window


EVEN = [[3, 1, 2]] * 4


def abandoned(name: str, sync: str, how: str) -> Any:
    run = Run(name, sync=sync)
    first = run.window(EVEN, 0)
    before = run.weights()
    window = run.accumulator.window(run.micro_batches(EVEN, 1))
    try:
        for i, micro_batch in enumerate(window):
            window.backward(sample_loss(run.model, micro_batch))
            if i == 1 and how == "break":
                break
            if i == 1 and how == "error":
                raise KeyError
    except KeyError:
        pass
    if how == "complete":
        window.discard()
    assert torch.equal(run.weights(), before), "an abandoned window changed weights"
    return [first, run.window(EVEN, 2), run.window([[2], [], [1], [4]], 3)]


@pytest.mark.parametrize(("name", "sync", "how"), in_turn(("break", "error", "complete")))
def test_abandoned_window_leaves_nothing_behind(ranks, name, sync, how):
    kind = KINDS[name]
    for seen in ranks(kind.world).run(abandoned, name, sync, how):
        assert max(window.gradient for window in seen) <= kind.bound


def clipped(name: str, sync: str, max_norm: float) -> Any:
    run = Run(name, sync=sync, max_norm=max_norm)
    return [run.window(layout, i, max_norm=max_norm) for i, layout in enumerate(LAYOUTS if run.world > 1 else [EVEN])]


@pytest.mark.parametrize(("name", "sync", "max_norm"), in_turn((0.01,)))
def test_clipping_takes_the_norm_of_the_whole_gradient(ranks, name, sync, max_norm):
    kind = KINDS[name]
    for seen in ranks(kind.world).run(clipped, name, sync, max_norm):
        for window in seen:
            assert window.norm is not None and window.norm <= kind.bound
            assert window.gradient <= max(1e-4, kind.bound)  # torch adds 1e-6 to the norm before dividing


def not_finite(name: str, sync: str, on_nonfinite: str) -> Any:
    run = Run(name, sync=sync, on_nonfinite=on_nonfinite)
    first = run.window(EVEN, 0)
    before = run.weights()
    window = run.accumulator.window(run.micro_batches(EVEN, 1))
    for i, micro_batch in enumerate(window):
        loss = sample_loss(run.model, micro_batch)
        window.backward(loss * float("nan") if i == 1 and run.rank == run.world - 1 else loss)
    try:
        update = window.step()
        outcome = (update.stepped, update.reason)
    except DistaccumError as error:
        outcome = (False, str(error))
    assert torch.equal(run.weights(), before), "a window that is not finite changed weights"
    return outcome, [first, run.window(EVEN, 2), run.window([[2], [], [1], [4]], 3)]


@pytest.mark.parametrize(("name", "sync", "on_nonfinite"), in_turn(("raise", "skip")))
def test_ranks_treat_a_nonfinite_gradient_the_same(ranks, name, sync, on_nonfinite):
    kind = KINDS[name]
    for (stepped, reason), seen in ranks(kind.world).run(not_finite, name, sync, on_nonfinite):
        assert not stepped
        assert "not finite" in reason
        assert max(window.gradient for window in seen) <= kind.bound


def evaluated(name: str, sync: str) -> Any:
    """Evaluates in the loop, after its last backward, between the loop and step(), and after step()."""
    run = Run(name, sync=sync)
    seen = []

    def evaluate() -> None:
        with torch.no_grad():
            run.model.eval()
            sample_loss(run.model, run.micro_batches(EVEN, 77)[0])
            run.model.train()

    for index in range(3):
        before = run.weights()
        window = run.accumulator.window(run.micro_batches(EVEN, index))
        for micro_batch in window:
            window.backward(sample_loss(run.model, micro_batch))
            evaluate()
        evaluate()
        window.step()
        evaluate()
        exact = run.exact(before, EVEN, index)[1]
        seen.append(error(before.double() - run.weights().double(), exact))
    return seen


@pytest.mark.slow
@pytest.mark.parametrize(("name", "sync"), GRID, ids=[f"{name}-{sync}" for name, sync in GRID])
def test_evaluation_in_a_window_changes_no_gradient(ranks, name, sync):
    kind = KINDS[name]
    for seen in ranks(kind.world).run(evaluated, name, sync):
        assert max(seen) <= kind.bound
