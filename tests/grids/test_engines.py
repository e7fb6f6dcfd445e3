"""The law on every engine, with the same tests: windows of every kind, compared with one big batch.

Eight pairs of a wrapper and a policy run every test. The others run a part each, in turn, so that every pair of wrapper
and policy is tested, and of policy and loss and of policy and fault as far as a policy has wrappers for it.
"""

from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler

from distaccum import Accumulator, DistaccumError, count_samples, count_tokens
from tests.support.engines import EVEN, FORMS, KINDS, LAYOUTS, Run, windows_off, wrapped
from tests.support.oracle import everything, own, step_off
from tests.support.problems import CASES, Batch, join, make_batch, make_net_without_router, sample_loss, token_loss
from tests.support.ranks import on_ranks
from tests.support.windows import error, gradient, gradient_of, loss_of, refused

GRID = [(name, sync) for name, kind in KINDS.items() for sync in kind.policies]
WHOLE = [(name, "last") for name in ("plain", "DDP", "FSDP2", "FSDP1", "ZeRO 1", "ZeRO 3") if name in KINDS]
WHOLE += [("DDP, bucket views", "last"), ("FSDP2", "gathered")]


def in_turn(values: tuple[Any, ...], quick: int = 0, slow: int = 1, long: int = 0) -> list[Any]:
    """Wrapper, policy and value: all values for the pairs of `WHOLE`, for each other pair so many with each mark."""
    found, kinds = [], list(KINDS)
    for place, (name, sync) in enumerate(GRID):
        is_whole, first = (name, sync) in WHOLE, place + kinds.index(name)
        mine = values if is_whole else [values[(first + i * 3) % len(values)] for i in range(quick + slow + long)]
        for i, value in enumerate(mine):
            marks = [] if is_whole or i < quick else [pytest.mark.slow]
            has_four_ranks = KINDS[name].world == 4 and sync in ("every", "gathered")
            marks += [pytest.mark.long] if has_four_ranks or not (is_whole or i < quick + slow) else []
            found.append(pytest.param(name, sync, value, marks=marks, id=f"{name}-{sync}-{value}"))
    return found


def world_of(name: str, **_: Any) -> int:
    return KINDS[name].world


@pytest.mark.parametrize(("name", "sync", "case"), in_turn(tuple(CASES), quick=1, slow=0, long=1))
@on_ranks(world_of)
def test_windows_equal_one_big_batch(name, sync, case):
    for off in windows_off(name, sync, case):
        assert max(off) <= KINDS[name].bound


@pytest.mark.parametrize(("name", "sync"), GRID)
@on_ranks(world_of)
def test_frozen_part_of_a_trained_layer_changes_nothing(name, sync):
    """Wrappers that flatten or bucket a layer write to its gradients, between two looks at them."""
    if name == "FSDP1, flat parameters":
        return  # torch refuses a part that is frozen
    run = Run(name, frozen=("body.0.bias", "head.weight"), sync=sync)
    for index, layout in enumerate(LAYOUTS[1:3]):
        assert max(run.window(layout, index)) <= run.kind.bound


def assert_next_are_exact(run: Run) -> None:
    assert max(run.window(EVEN, 2)) <= run.kind.bound
    assert max(run.window([[2], [], [1], [4]], 3)) <= run.kind.bound


@pytest.mark.parametrize(("name", "sync", "how"), in_turn(("break", "forward", "backward", "complete")))
@on_ranks(world_of)
def test_abandoned_window_leaves_nothing_behind(name, sync, how):
    """Left in its first, middle or last micro-batch, whose backward reduces, or after the loop."""
    run = Run(name, sync=sync)
    assert max(run.window(EVEN, 0)) <= run.kind.bound
    before, fails = run.weights(), False

    def fail(*_: Any) -> None:
        if fails:
            raise ZeroDivisionError

    inner = next(module for module in run.model.modules() if isinstance(module, nn.Tanh))
    inner.register_forward_hook(lambda *given: fail() if how == "forward" else given[-1].register_hook(fail) and None)
    for at in range(3):
        window = run.accumulator.window(run.micro_batches(EVEN, 1))
        with suppress(ZeroDivisionError):
            for i, micro_batch in enumerate(window):
                fails = i == at and how in ("forward", "backward")
                window.backward(sample_loss(run.model, micro_batch))
                if (i, how) == (at, "break"):
                    break
        fails = False
        if how == "complete":
            window.discard()
        assert torch.equal(run.weights(), before)
    assert_next_are_exact(run)


CALLS = ("step", "zero_grad")
ZERO = [(name, "last", call) for name in ("ZeRO 0", "ZeRO 2") if (name, "last") in GRID for call in CALLS]


@pytest.mark.parametrize(("name", "sync", "call"), [*in_turn(CALLS, slow=0), *ZERO])
@on_ranks(world_of)
def test_step_or_clearing_of_the_caller_in_a_window_is_refused(name, sync, call):
    run = Run(name, sync=sync)
    before = run.weights()
    said = "before the window's own|is stepped in the window" if call == "step" else "cleared or changed in mid-window"
    owners = [run.model, run.optimizer][: 1 + (call == "step")] if name.startswith("ZeRO") else [run.optimizer]
    for owner in owners:
        with pytest.raises(DistaccumError, match=said):
            run.window(EVEN, 1, also=lambda owner=owner: getattr(owner, call)())
        assert torch.equal(run.weights(), before)
    assert_next_are_exact(run)


@pytest.mark.parametrize(("name", "sync", "on_nonfinite"), in_turn(("raise", "ignore")))
@on_ranks(world_of)
def test_clipping_takes_the_norm_of_the_whole_gradient(name, sync, on_nonfinite):
    """Which a check for NaN has taken before, or nobody."""
    run = Run(name, sync=sync, max_norm=0.01, on_nonfinite=on_nonfinite)
    for index, layout in enumerate([EVEN, *LAYOUTS[2:]] if run.world > 1 else [EVEN]):
        assert max(run.window(layout, index, 0.01)) <= run.kind.bound


@pytest.mark.parametrize(("name", "sync", "on_nonfinite"), in_turn(("raise", "skip")))
@on_ranks(world_of)
def test_ranks_treat_a_nonfinite_gradient_the_same(name, sync, on_nonfinite):
    run = Run(name, sync=sync, on_nonfinite=on_nonfinite)
    assert max(run.window(EVEN, 0)) <= run.kind.bound
    before = run.weights()
    window = run.accumulator.window(run.micro_batches(EVEN, 1))
    for i, micro_batch in enumerate(window):
        loss = sample_loss(run.model, micro_batch)
        window.backward(loss * float("nan") if i == 1 and run.rank == run.world - 1 else loss)
    said = refused(window.step) if on_nonfinite == "raise" else window.step().reason
    hides = name.startswith("ZeRO") and on_nonfinite == "skip"  # which DeepSpeed does itself
    where = "" if hides else f" (the loss of micro-batch 1 on rank {run.world - 1} is"
    assert f"is not finite{where}" in said
    assert torch.equal(run.weights(), before)
    assert_next_are_exact(run)


SCALED = ("plain", "DDP", "DDP, three ranks", "FSDP2", "HSDP, 2 replicas of 2 shards", "FSDP1")
OVERFLOWS = [(name, where) for name in SCALED if name in KINDS for where in ("backward", "gradient")]
OVERFLOWS += [("FSDP2", "gradient without a scaler")]
OVERFLOWS += [(name, "backward without a scaler") for name in ("DDP", "FSDP2")]


@pytest.mark.parametrize(("name", "where"), OVERFLOWS)
@on_ranks(world_of)
def test_overflow_of_one_rank_skips_the_update_on_all(name, where):
    """In one rank's backward, or in its part of the reduced gradient alone."""
    scaler = GradScaler("cpu", init_scale=2.0**10, enabled="without" not in where)
    raises = where == "backward without a scaler"
    run = Run(name, scaler=scaler, on_nonfinite="raise" if raises else "skip")
    before, is_bad = run.weights(), run.rank == run.world - 1
    window = run.accumulator.window(run.micro_batches(EVEN, 1))
    for micro_batch in window:
        loss = sample_loss(run.model, micro_batch)
        if is_bad and where.startswith("backward"):
            loss.register_hook(lambda gradient: gradient * float("inf"))
        window.backward(loss)
    if is_bad and where.startswith("gradient"):
        parts = [getattr(p.grad, "_local_tensor", p.grad) for p in run.model.parameters() if p.grad is not None]
        next(part for part in parts if part.numel()).fill_(float("inf"))
    reason = refused(window.step) if raises else window.step().reason
    if scaler.is_enabled():
        assert reason == "the scaled gradients overflowed" and scaler.get_scale() == 2.0**9
    else:
        place = "every loss is finite, so it came up in a backward or in the reduction; first in body.0."
        assert f"is not finite ({place}" in reason
    assert torch.equal(run.weights(), before)
    assert_next_are_exact(run)


NAMED = {"tokens": (token_loss, count_tokens("labels")), "samples": (sample_loss, count_samples)}
LEFT_OUT = [("DDP", "last", "names"), ("DDP", "every", "parts"), ("DDP find", "last", "parts")]
LEFT_OUT += [("FSDP2, root only", "last", "names"), ("FSDP2", "gathered", "names"), ("ZeRO 1", "last", "parts")]
LEFT_OUT += [(name, "last", "refused") for name in ("FSDP2", "ZeRO 3")]


def named_losses(model: nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
    return {term: loss_fn(model, batch) for term, (loss_fn, _) in NAMED.items()}


@pytest.mark.parametrize(("name", "sync", "by"), LEFT_OUT)
@on_ranks(2)
def test_loss_in_which_nothing_counts_is_left_out_or_refused(name, sync, by):
    """In all micro-batches of a rank, then it has none; in one of a rank, or of all: the last, and the first."""
    kind = KINDS.get(name, KINDS["DDP"])
    model, optimizer, read = wrapped(name, make_net_without_router().to(kind.dtype))
    accumulator = Accumulator(model, optimizer, sync=sync, count={term: count for term, (_, count) in NAMED.items()})

    def in_parts(batch: Batch) -> None:
        for term in window.parts(["samples", "tokens"]):
            window.backward(**{term: NAMED[term][0](model, batch)})

    batch_of = partial(make_batch, 2, dtype=kind.dtype)
    cases = [(None, [1]), (3, []), (2, [1]), (1, [0]), (2, [0, 1]), (0, [0, 1])]
    for place, empty in cases[2 if by == "refused" else 0 :]:
        kept = [[0.0 if r in empty and place in (i, None) else 0.6 for i in range(3)] for r in range(2)]
        nums = 3, 0 if place == 3 else 3
        drawn = [[batch_of(seed=10 * r + i, kept=kept[r][i]) for i in range(nums[r])] for r in range(2)]
        mine = drawn[dist.get_rank()]
        if by == "refused":
            said = refused(accumulator.window, mine)
            assert "count of 0 for one of ['tokens', 'samples']" in said
            assert "sync='gathered'" in said or name == "ZeRO 3"
            continue
        window, whole = accumulator.window(mine), join(drawn[0] + drawn[1])
        whole["x"] = whole["x"].double()
        looks = {"run": None if by == "names" else in_parts, "read": read}
        assert max(step_off(model, window, make_net_without_router(), whole, named_losses, **looks)) <= kind.bound


ABSENT = [(name, "last") for name in FORMS] + [("FSDP2, root only", sync) for sync in ("last", "every", "gathered")]


@pytest.mark.parametrize(("name", "sync"), ABSENT)
@on_ranks(2)
def test_model_absent_from_the_last_part_is_reduced(name, sync):
    models, optimizers, _ = zip(*(wrapped(name, make_net_without_router(), 0.0) for _ in range(2)), strict=True)
    accumulator = Accumulator(models, optimizers, sync=sync)
    for index, layout in enumerate(([[2, 3], [1, 4, 2]], [[3], [2, 1]], [[2], [4]])):
        exact = gradient_of(make_net_without_router(), everything(layout, index))
        window = accumulator.window(own(layout, index))
        for batch in window:
            for model in window.parts(models):
                window.backward(loss_of(model, batch))
        assert max(error(gradient(model), exact) for model in models) <= 1e-10
        window.step()


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(("name", "sync"), GRID, ids=[f"{name}-{sync}" for name, sync in GRID])
@on_ranks(world_of)
def test_evaluation_in_a_window_changes_no_gradient(name, sync):
    """In the loop, after its last backward, between the loop and step(), and after step()."""
    run = Run(name, sync=sync)

    def evaluate() -> None:
        with torch.no_grad():
            run.model.eval()
            sample_loss(run.model, run.micro_batches(EVEN, 77)[0])
            run.model.train()

    for index in range(3):
        assert max(run.window(EVEN, index, also=evaluate)) <= run.kind.bound
        evaluate()
