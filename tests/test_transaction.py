"""A window commits or leaves no trace: its failures, and the errors for misuse."""

from __future__ import annotations

import contextlib
import copy
import gc
import linecache
import logging
import math
import pickle
import sys
import time
import weakref
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from inside import planner_of
from problems import error, gradient, gradient_of_trunk, loss_of, make_batch, run_window, trunk, weights
from torch import nn
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS, SGD, Adam
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau, StepLR
from torch.profiler import ProfilerActivity, profile

import distaccum
from distaccum import Accumulator, DistaccumError, Extension, Update, Window, count_samples, count_tokens
from distaccum.extensions import Spans

ROOT = str(Path(distaccum.__file__).parent)

BATCHES = [make_batch(size, seed=i) for i, size in enumerate([2, 3, 1])]


def make(**options):
    model = trunk()
    optimizer = SGD(model.parameters(), lr=0.1)
    return model, optimizer, Accumulator(model, optimizer, **options)


def next_is_exact(accumulator, model):
    """Asserts that the next window is exact, at the initial weights of every model here."""
    run_window(accumulator.window(BATCHES), model)
    assert error(gradient(model), gradient_of_trunk(BATCHES)) <= 1e-12


# What extensions hear


class Recorder(Extension):
    """Notes what it hears of a window; raises where it is told to."""

    key = "recorder"

    def __init__(self, fails: str = "") -> None:
        self.heard: list[str] = []
        self.fails = fails

    def hear(self, what: str) -> None:
        self.heard.append(what)
        if what == self.fails:
            raise ArithmeticError(what)

    def begin(self, window: Window) -> None:
        self.hear("begin")

    def before_backward(self, window: Window, reduces: bool) -> None:
        self.hear("backward")

    def after_backward(self, window: Window) -> None:
        self.hear("ended")

    def finishing(self, window: Window) -> None:
        self.hear("finishing")

    def numbers(self, window: Window) -> torch.Tensor:
        self.hear("numbers")
        return torch.tensor([1.0, float(window.index)])

    def judge(self, window: Window) -> str | None:
        self.hear("judge")
        return None

    def end(self, window: Window, update: Update | None) -> None:
        if update is not None:
            update.notes["sum"] = update.summed("recorder").tolist()
        self.hear("end" if update is None else "stepped")

    def state(self) -> list[str]:
        return self.heard

    def load(self, state: Any) -> None:
        self.heard = list(state or [])


class Rekeyed(Recorder):
    key = "other"


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("a backward that fails")


def test_extensions_hear_of_each_backward_and_of_the_end_before_the_engine_reduces(monkeypatch):
    """Of a loss that is refused they hear nothing, and of a backward that fails no end."""
    recorder = Recorder()
    model, _, accumulator = make(extensions=[recorder])
    engine = planner_of(accumulator).job.engine
    finish = engine.finish

    def noted() -> None:
        recorder.heard.append("engine")
        finish()

    monkeypatch.setattr(engine, "finish", noted)

    def window() -> Any:
        recorder.heard.clear()
        return accumulator.window(BATCHES)

    update = run_window(window(), model).step()
    steps = ["begin", *["backward", "ended"] * 3, "finishing", "engine", "numbers", "judge", "stepped"]
    assert recorder.heard == steps and update.notes == {"sum": [1.0, 0.0]}
    assert accumulator.state_dict()["recorder"] == steps
    refused = window()
    with pytest.raises(ValueError, match="expected a scalar"):
        for batch in refused:
            refused.backward(loss_of(model, batch).expand(2))
    assert recorder.heard == ["begin", "end"]
    failing = window()
    with pytest.raises(RuntimeError, match="a backward that fails"):
        for batch in failing:
            failing.backward(Fails.apply(loss_of(model, batch)))
    assert recorder.heard == ["begin", "backward", "end"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # `end` raises where the loop is closed
@pytest.mark.parametrize("where", ["begin", "backward", "ended", "finishing", "numbers", "judge"])
def test_extension_that_raises_discards_the_window_and_all_hear_of_the_end(where):
    first, last = Recorder("end"), Rekeyed(where)
    model, _, accumulator = make(extensions=[first, last])
    with pytest.raises(ArithmeticError):
        run_window(accumulator.window(BATCHES), model).step()
    assert first.heard[-1] == last.heard[-1] == "end"
    assert all(p.grad is None for p in model.parameters()) and accumulator.index == 0
    first.fails = last.fails = ""
    next_is_exact(accumulator, model)


def test_end_that_raises_comes_after_the_step_and_hides_no_other():
    first, last = Recorder("stepped"), Rekeyed("")
    model = trunk()
    optimizer = SGD(model.parameters(), lr=0.1)
    schedule = StepLR(optimizer, 1)
    accumulator = Accumulator(model, optimizer, scheduler=schedule, extensions=[first, last])
    before = weights(model)
    with pytest.raises(ArithmeticError, match="stepped"):
        run_window(accumulator.window(BATCHES), model).step()
    assert last.heard[-1] == "stepped" and accumulator.index == schedule.last_epoch == 1
    assert not torch.equal(before, weights(model))


def test_judge_skips_an_update_and_unfit_extensions_are_refused():
    class Judge(Extension):
        def judge(self, window: Window) -> str | None:
            return "it is odd" if window.index % 2 else None

    model, optimizer, accumulator = make(extensions=[Judge()])
    reasons = []
    for _ in range(3):
        before = weights(model)
        update = run_window(accumulator.window(BATCHES), model).step()
        assert torch.equal(before, weights(model)) == (not update.stepped)
        reasons.append(update.reason)
    assert reasons == [None, "it is odd", None]
    for given, kind, said in (
        ([Judge], TypeError, "expected a list of distaccum.Extension"),
        ([Recorder(), Recorder()], ValueError, "expected each once"),
    ):
        with pytest.raises(kind, match=said):
            Accumulator(model, optimizer, extensions=given)
    with pytest.raises(ValueError, match=r"Judge\.judge skips where the library steps"):
        Accumulator(model, extensions=[Judge()])


def test_spans_name_what_a_window_does_in_a_trace():
    model, _, accumulator = make(extensions=[Spans()])
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        run_window(accumulator.window(BATCHES), model).step()
        leave_by_break(accumulator, model)
        run_window(accumulator.window(BATCHES[:1]), model).step()
    found = Counter(
        event.name.partition(": ")[2] for event in profiler.events() if event.name.startswith("distaccum: ")
    )
    assert found == {"window 0": 1, "window 1": 2, "backward": 5, "finish": 2, "step": 2}


# Leaving a window


def leave_by_break(accumulator, model):
    window = accumulator.window(BATCHES)
    for micro_batch in window:
        window.backward(loss_of(model, micro_batch))
        break


def leave_by_exception(accumulator, model):
    window = accumulator.window(BATCHES)
    with contextlib.suppress(KeyboardInterrupt):
        for micro_batch in window:
            window.backward(loss_of(model, micro_batch))
            raise KeyboardInterrupt


def leave_by_failing_backward(accumulator, model):
    window = accumulator.window(BATCHES)
    with contextlib.suppress(ZeroDivisionError):
        for micro_batch in window:
            outputs = model(micro_batch["x"])
            if micro_batch is BATCHES[-1]:  # in the reducing backward, after some gradients are ready
                outputs = model[1](Failing.apply(model[0](micro_batch["x"])))
            window.backward(outputs.square().mean())


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ZeroDivisionError


def leave_by_closing(accumulator, model):
    window = accumulator.window(BATCHES)
    iterator = iter(window)
    next(iterator)
    window.backward(loss_of(model, BATCHES[0]))
    iterator.close()


def leave_in_the_epoch(accumulator, model):
    with contextlib.suppress(ValueError):
        for window in accumulator.windows(BATCHES):
            run_window(window, model)
            raise ValueError("in the caller's code, between the loop and step()")


def leave_parts(accumulator, model):
    window = accumulator.window(BATCHES)
    with contextlib.suppress(DistaccumError):
        for micro_batch in window:
            for _ in window.parts([1, 2]):
                window.backward(loss_of(model, micro_batch))
                break


LEAVINGS = [
    leave_by_break,
    leave_by_exception,
    leave_by_failing_backward,
    leave_by_closing,
    leave_in_the_epoch,
    leave_parts,
]


@pytest.mark.parametrize("leave", LEAVINGS)
def test_window_left_early_leaves_no_trace(leave):
    model, _, accumulator = make(steps=3)
    before = weights(model)
    leave(accumulator, model)
    if leave is not leave_in_the_epoch:
        assert all(parameter.grad is None for parameter in model.parameters())
    next_is_exact(accumulator, model)
    assert torch.equal(weights(model), before)
    assert accumulator.index == 0


def left_on_ranks(leave, view):
    ddp = DistributedDataParallel(trunk(), gradient_as_bucket_view=view)
    accumulator = Accumulator(ddp, SGD(ddp.parameters(), lr=0.0), steps=3)
    run_window(accumulator.window(BATCHES), ddp).step()  # the first window creates views and rebuilds buckets
    leave(accumulator, Unwrapped(ddp))
    flag = ddp.require_backward_grad_sync
    wrongs = []
    for _ in range(2):
        window = run_window(accumulator.window(BATCHES), ddp)
        wrongs.append(error(gradient(ddp), gradient_of_trunk(BATCHES)))
        window.step()
    return flag, wrongs


class Unwrapped(nn.Module):
    """Calls DDP, and gives access to the layers inside."""

    def __init__(self, ddp):
        super().__init__()
        self.ddp = ddp

    def forward(self, x):
        return self.ddp(x)

    def __getitem__(self, index):
        return self.ddp.module[index]


@pytest.mark.parametrize("view", [False, True], ids=["", "bucket view"])
@pytest.mark.parametrize("leave", LEAVINGS)
def test_window_left_early_leaves_no_trace_on_ddp(ranks, leave, view):
    for flag, wrongs in ranks(2).run(left_on_ranks, leave, view):
        assert flag
        assert max(wrongs) <= 1e-12


def flags_that_the_caller_set():
    ddp = DistributedDataParallel(trunk())
    accumulator = Accumulator(ddp, SGD(ddp.parameters(), lr=0.0), steps=3)
    with ddp.no_sync():
        window = run_window(accumulator.window(BATCHES), ddp)
        found = ddp.require_backward_grad_sync
        wrong = error(gradient(ddp), gradient_of_trunk(BATCHES))
        window.step()
    return found, ddp.require_backward_grad_sync, wrong


def test_flags_of_ddp_are_restored(ranks):
    for inside, outside, wrong in ranks(2).run(flags_that_the_caller_set):
        assert (inside, outside) == (False, True)
        assert wrong <= 1e-12


def test_step_is_allowed_after_a_break_out_of_the_epoch():
    model, _, accumulator = make(steps=3)
    for window in accumulator.windows(BATCHES):
        run_window(window, model)
        break
    assert window.step().stepped


def test_first_window_may_be_taken_with_next():
    model, _, accumulator = make(steps=2)
    window = next(accumulator.windows(BATCHES))
    gc.collect()
    run_window(window, model)
    assert error(gradient(model), gradient_of_trunk(BATCHES[:2])) <= 1e-12


def test_windows_may_be_skipped():
    model, _, accumulator = make(steps=1)
    done = [run_window(w, model).step().index for i, w in enumerate(accumulator.windows(BATCHES)) if i != 1]
    assert done == [0, 1]


# Misuse: a clear message, no changed weight, and an exact next window


def forget_backward(accumulator, model, optimizer):
    for _ in accumulator.window(BATCHES):
        pass


def backward_twice(accumulator, model, optimizer):
    window = accumulator.window(BATCHES)
    for micro_batch in window:
        window.backward(loss_of(model, micro_batch))
        window.backward(loss_of(model, micro_batch))


def backward_outside(accumulator, model, optimizer):
    accumulator.window(BATCHES).backward(loss_of(model, BATCHES[0]))


def step_in_the_loop(accumulator, model, optimizer):
    window = accumulator.window(BATCHES)
    for micro_batch in window:
        window.backward(loss_of(model, micro_batch))
        window.step()


def step_after_break(accumulator, model, optimizer):
    window = accumulator.window(BATCHES)
    for micro_batch in window:
        window.backward(loss_of(model, micro_batch))
        break
    window.step()


def step_before_the_loop(accumulator, model, optimizer):
    accumulator.window(BATCHES).step()


def own_step(accumulator, model, optimizer):
    window = accumulator.window(BATCHES)
    for micro_batch in window:
        window.backward(loss_of(model, micro_batch))
        optimizer.step()


def own_step_after_the_loop(accumulator, model, optimizer):
    window = run_window(accumulator.window(BATCHES), model)
    try:
        optimizer.step()
    finally:
        window.discard()


def zero_grad(accumulator, model, optimizer):
    window = accumulator.window(BATCHES)
    for micro_batch in window:
        window.backward(loss_of(model, micro_batch))
        optimizer.zero_grad()


def zero_grad_before_step(accumulator, model, optimizer):
    window = run_window(accumulator.window(BATCHES), model)
    optimizer.zero_grad()
    window.step()


def two_at_once(accumulator, model, optimizer):
    window = accumulator.window(BATCHES)
    for micro_batch in window:
        window.backward(loss_of(model, micro_batch))
        accumulator.window(BATCHES)


def never_step(accumulator, model, optimizer):
    windows = accumulator.windows(BATCHES * 2)
    run_window(next(windows), model)
    next(windows)


def iterate_twice(accumulator, model, optimizer):
    window = run_window(accumulator.window(BATCHES), model)
    try:
        list(window)
    finally:
        window.discard()


def loss_is_a_float(accumulator, model, optimizer):
    window = accumulator.window(BATCHES)
    for micro_batch in window:
        window.backward(loss_of(model, micro_batch).item())


def loss_is_a_tuple(accumulator, model, optimizer):
    window = accumulator.window(BATCHES)
    for micro_batch in window:
        window.backward((model(micro_batch["x"]), loss_of(model, micro_batch)))


def loss_is_no_scalar(accumulator, model, optimizer):
    window = accumulator.window(BATCHES)
    for micro_batch in window:
        window.backward(model(micro_batch["x"]).square())


def loss_has_no_graph(accumulator, model, optimizer):
    window = accumulator.window(BATCHES)
    for micro_batch in window:
        window.backward(micro_batch["x"].square().mean())


def no_loss(accumulator, model, optimizer):
    window = accumulator.window(BATCHES)
    for _ in window:
        window.backward()


def parts_of_nothing(accumulator, model, optimizer):
    window = accumulator.window(BATCHES)
    for _ in window:
        list(window.parts([]))


def part_without_backward(accumulator, model, optimizer):
    window = accumulator.window(BATCHES)
    for _ in window:
        list(window.parts([1, 2]))


def parts_after_backward(accumulator, model, optimizer):
    window = accumulator.window(BATCHES)
    for micro_batch in window:
        window.backward(loss_of(model, micro_batch))
        list(window.parts([1]))


def parts_left_early(accumulator, model, optimizer):
    window = accumulator.window(BATCHES)
    for micro_batch in window:
        for _ in window.parts([1, 2]):
            window.backward(loss_of(model, micro_batch))
            break


def retry_a_failed_backward(accumulator, model, optimizer):
    window = accumulator.window(BATCHES)
    for micro_batch in window:
        with contextlib.suppress(ZeroDivisionError):
            window.backward(Failing.apply(model(micro_batch["x"])).square().mean())
        window.backward(loss_of(model, micro_batch))


def unknown_name(accumulator, model, optimizer):
    window = accumulator.window(BATCHES)
    for micro_batch in window:
        window.backward(tokens=loss_of(model, micro_batch))


MISUSES = {
    forget_backward: (DistaccumError, r"without window.backward\(loss\) \(in micro-batch 0 of 3\)"),
    backward_twice: (DistaccumError, r"a second backward\(\) in micro-batch 0 of 3.*window.parts"),
    backward_outside: (DistaccumError, "window that is not begun; call it in the loop"),
    step_in_the_loop: (DistaccumError, r"step\(\) on a window that is in its loop"),
    step_after_break: (DistaccumError, r"step\(\) on a window that is discarded"),
    step_before_the_loop: (DistaccumError, r"step\(\) on a window that is not begun"),
    own_step: (DistaccumError, r"optimizer.step\(\) before the window's own"),
    own_step_after_the_loop: (DistaccumError, r"optimizer.step\(\) before the window's own"),
    zero_grad: (DistaccumError, "cleared or changed in mid-window"),
    zero_grad_before_step: (DistaccumError, r"cleared between the window's loop and its step\(\)"),
    two_at_once: (DistaccumError, "another window was requested while one is in its loop"),
    never_step: (DistaccumError, "while one is complete but not stepped"),
    iterate_twice: (DistaccumError, "iterated once"),
    loss_is_a_float: (TypeError, r"a float, expected the loss as a tensor \(without .item"),
    loss_is_a_tuple: (TypeError, r"got a tuple of 2, expected the loss as a tensor \(which is one of these"),
    loss_is_no_scalar: (ValueError, r"shape \[2, 6, 4\], expected a scalar; reduce it with mean\(\) or sum\(\)"),
    loss_has_no_graph: (ValueError, r"without a graph.*not from its inputs"),
    no_loss: (TypeError, "got None"),
    parts_of_nothing: (ValueError, r"parts\(\) got nothing"),
    part_without_backward: (DistaccumError, "a part without window.backward"),
    parts_after_backward: (DistaccumError, "had no backward yet"),
    parts_left_early: (DistaccumError, "left before its last item"),
    retry_a_failed_backward: (DistaccumError, "half added up; leave the loop"),
    unknown_name: (ValueError, r"\['tokens'\], expected losses by name, of \['samples'\]"),
}


@pytest.mark.parametrize("misuse", MISUSES)
def test_misuse_raises_a_clear_error_and_changes_nothing(misuse):
    kind, message = MISUSES[misuse]
    model, optimizer, accumulator = make(steps=3)
    before = weights(model)
    with pytest.raises(kind, match=message):
        misuse(accumulator, model, optimizer)
    assert torch.equal(weights(model), before)
    next_is_exact(accumulator, model)


def replace_gradient(layer, *_):
    layer.weight.grad = layer.weight.grad.clamp(-1e-3, 1e-3)


CHANGES = {
    "cleared": lambda layer, *_: layer.zero_grad(),
    "zeroed in place": lambda layer, *_: layer.zero_grad(set_to_none=False),
    "clipped": lambda layer, *_: torch.nn.utils.clip_grad_norm_(layer.parameters(), 1e-3),
    "replaced": replace_gradient,
    "of another backward": lambda layer, *_: layer.bias.norm().backward(),
    "unscaled": lambda _, optimizer, scaler: scaler.unscale_(optimizer),
}


@pytest.mark.parametrize("change", CHANGES)
def test_change_of_any_gradient_in_any_micro_batch_is_refused(change):
    for at in range(len(BATCHES)):
        scaler = GradScaler("cpu", init_scale=1.0) if change == "unscaled" else None
        model, optimizer, accumulator = make(scaler=scaler)
        before = weights(model)
        window = accumulator.window(BATCHES)
        with pytest.raises(DistaccumError, match="cleared or changed in mid-window"):
            for i, batch in enumerate(window):
                window.backward(loss_of(model, batch))
                if i == at:
                    CHANGES[change](model[-1], optimizer, scaler)
        assert torch.equal(weights(model), before)
        next_is_exact(accumulator, model)


def test_layer_may_be_left_out_of_an_update_by_clearing_its_gradient():
    model, _, accumulator = make()
    before, frozen = weights(model[0]), weights(model[-1])
    window = run_window(accumulator.window(BATCHES), model)
    model[-1].zero_grad()
    assert window.step().stepped
    assert torch.equal(weights(model[-1]), frozen) and not torch.equal(weights(model[0]), before)


def test_unstepped_window_survives_a_request_for_another():
    model, _, accumulator = make(steps=3)
    window = run_window(accumulator.window(BATCHES), model)
    with pytest.raises(DistaccumError, match="complete but not stepped"):
        accumulator.window(BATCHES)
    assert window.step().stepped


def test_open_window_survives_a_request_for_another():
    model, _, accumulator = make(steps=3)
    window = accumulator.window(BATCHES)
    for micro_batch in window:
        with contextlib.suppress(DistaccumError):
            if micro_batch is BATCHES[0]:
                accumulator.window(BATCHES)
        window.backward(loss_of(model, micro_batch))
    assert error(gradient(model), gradient_of_trunk(BATCHES)) <= 1e-12


def test_second_request_discards_the_open_window():
    model, _, accumulator = make(steps=3)
    window = accumulator.window(BATCHES)
    iterator = iter(window)
    window.backward(loss_of(model, next(iterator)))
    with pytest.raises(DistaccumError, match="in its loop"):
        accumulator.window(BATCHES)
    next_is_exact(accumulator, model)
    with pytest.raises(DistaccumError, match="discarded"):
        next(iterator)


def test_gradients_from_before_the_window_are_cleared_with_a_warning():
    model, _, accumulator = make()
    loss_of(model, BATCHES[0]).backward()
    with pytest.warns(UserWarning, match="stood before the window were cleared"):
        run_window(accumulator.window(BATCHES), model)
    assert error(gradient(model), gradient_of_trunk(BATCHES)) <= 1e-12


def test_named_losses_must_all_be_given():
    model = trunk()
    count = {"tokens": count_tokens("labels"), "samples": count_samples}
    accumulator = Accumulator(model, SGD(model.parameters(), lr=0.1), count=count)
    window = accumulator.window(BATCHES)
    with pytest.raises(DistaccumError, match=r"micro-batch 0 got no loss for \['samples'\]"):
        for micro_batch in window:
            window.backward(tokens=loss_of(model, micro_batch))
    window = accumulator.window(BATCHES)
    with pytest.raises(ValueError, match=r"without a name.*window.backward\(tokens=..., samples=...\)"):
        run_window(window, model)


# Arguments


def schedule(optimizer):
    return ReduceLROnPlateau(optimizer)


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"steps": 100 / 50}, TypeError, r"steps=2.0 is a float, expected a whole number; write 100 // 50"),
        ({"steps": 0}, ValueError, "steps=0, expected at least 1"),
        ({"steps": True}, TypeError, "steps=True is a bool"),
        ({"steps": 2, "batch_size": 4}, ValueError, "give one or the other"),
        ({"batch_size": 4}, ValueError, "without micro_batch_size"),
        ({"batch_size": 4.5, "micro_batch_size": 2}, TypeError, "batch_size=4.5 is a float"),
        ({"micro_batch_size": "all"}, TypeError, "micro_batch_size='all' is a str, expected a whole number"),
        ({"reduction": "avg"}, ValueError, "reduction='avg', expected one of 'mean', 'sum', 'sum_to_mean'"),
        ({"reduction": {"a": "mean"}, "count": {"b": count_samples}}, ValueError, "the same losses in both"),
        ({"count": 5}, TypeError, "count=5.*expected a callable"),
        ({"max_norm": 0}, ValueError, "max_norm=0, expected a number above 0"),
        ({"max_norm": math.nan}, ValueError, "max_norm=nan"),
        ({"on_nonfinite": "stop"}, ValueError, "on_nonfinite='stop'"),
        ({"batchnorm": "fix"}, ValueError, "batchnorm='fix'"),
        ({"sync": "gathered"}, ValueError, "sync='gathered', expected one of 'last', 'every'"),
        ({"scheduler": schedule}, TypeError, "ReduceLROnPlateau needs a metric"),
        ({"optimizer": []}, ValueError, "optimizer=\\[\\], expected"),
        ({"optimizer": SGD}, TypeError, "expected a optimizer"),
        ({"optimizer": None, "max_norm": 1.0}, ValueError, "no optimizer was given"),
        ({"optimizer": LBFGS}, TypeError, "LBFGS needs a closure"),
        ({"optimizer": None, "scaler": GradScaler("cpu"), "scheduler": StepLR}, ValueError, "cannot be seen"),
        ({"model": nn.Tanh()}, ValueError, "no parameters"),
        ({"model": []}, ValueError, "model=\\[\\], expected"),
        ({"model": "net"}, TypeError, "model='net' is a str"),
    ],
)
def test_wrong_argument_is_refused_at_once(options, kind, message):
    model = trunk()
    optimizer = SGD(model.parameters(), lr=0.1)
    options = {"model": model, "optimizer": optimizer, **options}
    if options.get("scheduler") is StepLR:
        options["scheduler"] = StepLR(optimizer, 1)
    elif callable(options.get("scheduler")):
        options["scheduler"] = options["scheduler"](optimizer)
    if options["optimizer"] is LBFGS:
        options["optimizer"] = LBFGS(model.parameters())
    with pytest.raises(kind, match=message):
        Accumulator(options.pop("model"), options.pop("optimizer"), **options)


def test_optimizer_of_another_model_is_refused():
    with pytest.raises(ValueError, match="none of the model's parameters"):
        Accumulator(trunk(), SGD(trunk().parameters(), lr=0.1))


def test_windows_needs_a_number_and_split_a_size():
    _, _, accumulator = make()
    with pytest.raises(ValueError, match="pass steps="):
        accumulator.windows(BATCHES)
    with pytest.raises(ValueError, match="pass micro_batch_size= or steps="):
        accumulator.split(BATCHES[0])


@pytest.mark.parametrize("value", [-1, math.nan, math.inf])
def test_count_must_be_finite_and_not_negative(value):
    _, _, accumulator = make(count=lambda batch: value)
    with pytest.raises(ValueError, match=f"count gave {value} for 'count' in micro-batch 0"):
        accumulator.window(BATCHES)


def test_ramp_that_gives_no_whole_number_is_refused():
    _, _, accumulator = make(steps=lambda index: 1.5)
    with pytest.raises(TypeError, match=r"steps\(0\)=1.5 is a float"):
        next(accumulator.windows(BATCHES))


# Ranks


def planning_fails(what):
    rank = dist.get_rank()
    ddp = DistributedDataParallel(trunk())
    before = weights(ddp)
    accumulator = Accumulator(
        ddp, SGD(ddp.parameters(), lr=0.1), steps=2 + rank if what == "steps" else 2, count=bad_count(what)
    )

    def loader():
        yield BATCHES[0]
        if what == "loader" and rank == 1:
            raise OSError("the disk is gone")
        if what == "loader":
            time.sleep(0.3)  # the other rank waits for this one's report
        yield BATCHES[1]

    logged = []  # before the error was raised
    handler = logging.Handler()
    handler.emit = lambda record: logged.append((record.created, record.getMessage()))
    logging.getLogger("distaccum").addHandler(handler)
    try:
        next(accumulator.windows(loader()))
    except Exception as caught:
        message = f"{type(caught).__name__}: {caught}"
        logged = [(text, time.time() - at) for at, text in logged]
    finally:
        logging.getLogger("distaccum").removeHandler(handler)
    other = Accumulator(ddp, SGD(ddp.parameters(), lr=0.1))
    run_window(other.window(BATCHES), ddp)
    return message, torch.equal(weights(ddp), before), error(gradient(ddp), gradient_of_trunk(BATCHES)), logged


def bad_count(what):
    def count(batch):
        if what == "count" and dist.get_rank() == 1:
            raise KeyError("labels")
        return len(batch["x"])

    return count


@pytest.mark.parametrize(
    ("what", "zero", "one"),
    [
        (
            "loader",
            "DistaccumError: rank 1 could not plan this window (OSError: the disk is gone)",
            "OSError: the disk is gone",
        ),
        ("count", "DistaccumError: rank 1 could not plan this window (KeyError: 'labels')", "KeyError: 'labels'"),
        ("steps", "DistaccumError: ranks disagree on steps (rank 0: 2, rank 1: 3)", "DistaccumError: ranks disagree"),
    ],
)
def test_failure_of_one_ranks_plan_is_raised_on_all_ranks(ranks, what, zero, one):
    found = ranks(2).run(planning_fails, what)
    for (message, unchanged, wrong, _), expected in zip(found, [zero, one], strict=True):
        assert message.startswith(expected)
        assert unchanged
        assert wrong <= 1e-12
    of_zero, of_one = (logged for *_, logged in found)
    assert of_zero == []
    assert [text.partition(": ")[2] for text, _ in of_one] == ([] if what == "steps" else [one])
    assert what != "loader" or of_one[0][1] > 0.2, "it was shown while the other rank could not hear of it"


def ranks_disagree(what):
    rank = dist.get_rank()
    ddp = DistributedDataParallel(trunk())
    sizes = {
        "steps": {"steps": lambda index: 2 + rank * index},
        "batch_size": {"batch_size": lambda index: 4 + 4 * rank * index, "micro_batch_size": 1},
        "index": {"steps": 2},
        "kind": {"steps": 2},
        "any": {"steps": 1},
    }[what]
    accumulator = Accumulator(ddp, SGD(ddp.parameters(), lr=0.0), **sizes)
    batches = [make_batch(1, seed=i) for i in range(20)]
    if what == "index" and rank:
        accumulator.load_state_dict({**accumulator.state_dict(), "index": 3})
    messages = []
    try:
        if what == "kind" and rank:
            accumulator.update(make_batch(4, seed=0), lambda batch: loss_of(ddp, batch))
        if what == "any" and rank:
            run_window(accumulator.window(batches[:1]), ddp)
        for window in accumulator.windows(batches):
            run_window(window, ddp).step()
    except DistaccumError as caught:
        messages.append(str(caught))
    left = any(p.grad is not None for p in ddp.parameters())
    run_window(Accumulator(ddp, SGD(ddp.parameters(), lr=0.1)).window(BATCHES), ddp)
    return messages, accumulator.index, left, error(gradient(ddp), gradient_of_trunk(BATCHES))


@pytest.mark.parametrize(
    ("what", "index", "expected"),
    [
        ("steps", 1, "ranks disagree on steps (rank 0: 2, rank 1: 3)"),
        ("batch_size", 1, "ranks disagree on steps (rank 0: 2, rank 1: 4)"),
        ("index", 0, "ranks disagree on the update's index (rank 0: 0, rank 1: 3)"),
        ("kind", 0, "ranks disagree on who runs the window (rank 0: a loop, rank 1: update())"),
        ("any", 0, "ranks disagree on steps (rank 0: 1, rank 1: any)"),
    ],
)
def test_ranks_that_disagree_are_named_before_the_window(ranks, what, index, expected):
    """One rank's ramp differs from some update on; the updates before are unaffected."""
    for rank, (messages, seen, left, wrong) in enumerate(ranks(2).run(ranks_disagree, what)):
        assert messages[0].startswith(expected)
        assert seen == (3 if what == "index" and rank else index) and not left
        assert wrong <= 1e-12


# The end of a window


def test_schedulers_step_once_per_update_of_a_ramp():
    model = trunk()
    optimizer = Adam(model.parameters(), lr=1.0)
    schedules = [LambdaLR(optimizer, lambda n: 1 / (1 + n)), LambdaLR(optimizer, lambda n: 1.0)]
    accumulator = Accumulator(model, optimizer, steps=lambda index: index + 1, scheduler=schedules)
    lengths = [(len(window), run_window(window, model).step().index) for window in accumulator.windows(BATCHES * 2)]
    assert lengths == [(1, 0), (2, 1), (3, 2)]
    assert [schedule.last_epoch for schedule in schedules] == [3, 3]


def test_caller_may_own_the_optimizer():
    model = trunk()
    optimizer = SGD(model.parameters(), lr=0.1)
    accumulator = Accumulator(model, steps=3)
    before = weights(model)
    for window in accumulator.windows(BATCHES):
        run_window(window, model)
        optimizer.step()
        update = window.step()
    assert error(before - weights(model), 0.1 * gradient_of_trunk(BATCHES)) <= 1e-12
    assert update.stepped
    assert all(parameter.grad is None for parameter in model.parameters())


def test_batch_size_gives_the_steps_and_warns_of_a_remainder():
    model, _, accumulator = make(batch_size=100, micro_batch_size=50)
    loader = [{"x": batch["x"][:1].expand(50, -1, -1)} for batch in BATCHES]
    assert [run_window(w, model).step().counts["samples"] for w in accumulator.windows(loader)] == [100, 50]
    _, _, accumulator = make(batch_size=100, micro_batch_size=30)
    with pytest.warns(UserWarning, match=r"batch_size=100 .* each full update holds 120 \(4 micro-batches per rank\)"):
        assert len(next(accumulator.windows(loader * 2))) == 4


def test_state_resumes_between_windows():
    model, _, accumulator = make(steps=lambda index: index + 1)
    for window in accumulator.windows(BATCHES):
        run_window(window, model).step()
    _, _, other = make(steps=lambda index: index + 1)
    other.load_state_dict(accumulator.state_dict())
    assert other.index == 2
    assert len(next(other.windows(BATCHES * 2))) == 3


def stray_backward(accumulator, model, optimizer):
    window = accumulator.window(BATCHES)
    for micro_batch in window:
        loss_of(model, micro_batch).backward()
        window.backward(loss_of(model, micro_batch))


def complex_loss(accumulator, model, optimizer):
    window = accumulator.window(BATCHES)
    for micro_batch in window:
        window.backward(torch.complex(loss_of(model, micro_batch), loss_of(model, micro_batch)))


@pytest.mark.parametrize(
    ("misuse", "kind", "message"),
    [
        (stray_backward, DistaccumError, r"gradients came into the window that its backward\(\) did not make"),
        (complex_loss, TypeError, "complex128, expected a real number"),
    ],
)
def test_stray_backward_and_complex_loss_are_refused(misuse, kind, message):
    model, optimizer, accumulator = make(steps=3)
    with pytest.raises(kind, match=message):
        misuse(accumulator, model, optimizer)
    next_is_exact(accumulator, model)


def test_update_whose_step_failed_is_not_stepped_again():
    model, optimizer, accumulator = make()

    def fail(*_):
        raise RuntimeError("no memory for the state")

    handle = optimizer.register_step_pre_hook(fail)
    window = run_window(accumulator.window(BATCHES), model)
    with pytest.raises(RuntimeError, match="no memory"):
        window.step()
    handle.remove()
    with pytest.raises(DistaccumError, match="discarded"):
        window.step()
    next_is_exact(accumulator, model)


class Interrupted(NamedTuple):
    line: str
    has_stepped: bool
    index: int
    rate: float
    error: float  # of the next update


def interrupted(at: int, how: str, fused: bool, anew: bool) -> Interrupted | None:
    """Ctrl-C where the `at`-th source line of the library runs first; `anew`: then comes a new Accumulator."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = SGD(model.parameters(), lr=1.0, fused=fused)
    options = {
        "micro_batch_size": 2,
        "scheduler": StepLR(optimizer, 1, 0.5),
        "max_norm": 1.0,
        "scaler": (scaler := GradScaler("cpu", init_scale=1024.0)),
    }
    accumulator = Accumulator(model, optimizer, **options)
    before, batch = weights(model), torch.tensor([[1.0, -2, 3], [4, 5, 6], [0, 1, 2]])
    passed: set[tuple[str, int]] = set()
    line = ""

    def trace(frame, event, _):
        nonlocal line
        # Python ignores exceptions in __del__.
        if not frame.f_code.co_filename.startswith(ROOT) or frame.f_code.co_name == "__del__":
            return None
        if event == "line":
            passed.add(((path := frame.f_code.co_filename), frame.f_lineno))
            if len(passed) == at:
                line = f"{Path(path).name}: {linecache.getline(path, frame.f_lineno).strip()}"
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    try:
        sys.settrace(trace)
        if how == "update":
            accumulator.update(batch, lambda x: model(x).square().mean())
        else:
            window = accumulator.split(batch)
            for x in window:
                window.backward(model(x).square().mean())
            if how == "unscaled":
                scaler.unscale_(optimizer)
            if how == "discarded":
                window.discard()
            else:
                window.step()
        return None
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(None)
    found = weights(model)
    seen = accumulator.index, optimizer.param_groups[0]["lr"]
    exact = torch.cat([g.flatten() for g in torch.autograd.grad(model(batch).square().mean(), [*model.parameters()])])
    exact *= seen[1] / max(1.0, float(exact.norm()))
    if anew:
        accumulator = Accumulator(model, optimizer, **options)
    with contextlib.suppress(DistaccumError):  # `window` may be open yet; the second request discards it
        accumulator.split(batch)
    window = accumulator.split(batch)
    for x in window:
        window.backward(model(x).square().mean())
    assert window.step().stepped and all(p.grad is None for p in model.parameters())
    return Interrupted(line, not torch.equal(before, found), *seen, error(found - weights(model), exact))


@pytest.mark.filterwarnings("ignore:gradients that stood before", "ignore:the window of update")
@pytest.mark.parametrize(
    ("how", "fused", "anew"),
    [("loop", False, True), ("unscaled", False, False), ("discarded", True, True), ("update", True, False)],
)
def test_ctrl_c_at_any_line_leaves_no_trace_or_a_whole_update(how, fused, anew):
    found, at = [], 1
    while (end := interrupted(at, how, fused, anew)) is not None:
        found.append(end)
        at += 1
    assert len(found) > 100
    assert [one for one in found if one.error > 1e-5] == []
    torn = [one.line for one in found if (one.index, one.rate) != ((1, 0.5) if one.has_stepped else (0, 1.0))]
    # Lines that run after the step but before the library can record it.
    assert len(torn) <= 3 and all("base.py" in line or "has_stepped = reason is None" in line for line in torn)


def test_failing_schedule_does_not_step_the_weights_twice():
    model = trunk()
    optimizer = SGD(model.parameters(), lr=0.1)
    schedule = LambdaLR(optimizer, lambda n: 1.0 if n == 0 else 1 / 0)
    accumulator = Accumulator(model, optimizer, scheduler=schedule)
    before = weights(model)
    window = run_window(accumulator.window(BATCHES), model)
    with pytest.raises(ZeroDivisionError):
        window.step()
    with pytest.raises(DistaccumError, match="stepped already"):
        window.step()
    assert error(before - weights(model), 0.1 * gradient_of_trunk(BATCHES)) <= 1e-12


def test_parameters_added_later_are_cleared():
    model, optimizer, accumulator = make()
    run_window(accumulator.window(BATCHES), model).step()
    model.append(nn.Linear(4, 4).double())
    optimizer.add_param_group({"params": model[-1].parameters()})
    for _ in range(2):
        run_window(accumulator.window(BATCHES), model).step()
        assert all(parameter.grad is None for parameter in model.parameters())


def test_planning_error_keeps_no_batch_alive():
    _, _, accumulator = make(count=lambda batch: -1)
    batch = torch.zeros(2, 3)
    alive = weakref.ref(batch)
    gc.disable()
    try:
        with contextlib.suppress(ValueError):
            accumulator.window([batch])
        del batch
        assert alive() is None
    finally:
        gc.enable()


def test_finished_micro_batches_and_losses_are_freed():
    model, _, accumulator = make()
    window = accumulator.window([make_batch(1, seed=i) for i in range(3)])
    seen = []
    for micro_batch in window:
        assert [alive() for alive in seen] == [None] * len(seen), (
            "neither micro-batches nor losses with their graphs pile up"
        )
        loss = loss_of(model, micro_batch)
        window.backward(loss)
        seen += [weakref.ref(micro_batch["x"]), weakref.ref(loss)]
        del micro_batch, loss


def test_copy_in_mid_window_is_refused():
    model = nn.Linear(3, 1)
    accumulator = Accumulator(model, SGD(model.parameters(), lr=0.1), micro_batch_size=2)
    window = accumulator.split(torch.ones(4, 3))
    for x in window:
        for copied in (copy.deepcopy, copy.copy, pickle.dumps):
            for what in (accumulator, window):
                with pytest.raises(
                    DistaccumError, match=r"copying or pickling an Accumulator with a window that is in its loop "
                ):
                    copied(what) if copied is not copy.copy else copied(accumulator)
        window.backward(model(x).mean())
        assert copy.deepcopy(model).weight.grad is None
    assert window.step().stepped
    twin, other = copy.deepcopy((model, accumulator))
    assert other.update(torch.ones(4, 3), lambda x: twin(x).mean()).index == 1 and accumulator.index == 1


def test_update_can_be_copied_and_pickled():
    model, _, accumulator = make(max_norm=math.inf)
    update = run_window(accumulator.window(BATCHES), model).step()
    for copied in (copy.deepcopy(update), pickle.loads(pickle.dumps(update))):
        assert copied.as_dict() == update.as_dict()
        assert repr(copied) == repr(update)


@pytest.mark.parametrize("value", ["8", None, [2], 1 + 2j, torch.ones(2)])
def test_count_that_is_no_number_is_refused(value):
    _, _, accumulator = make(count=lambda batch: value)
    with pytest.raises(ValueError, match=r"count gave .* for 'count' in micro-batch 0, expected a finite number"):
        accumulator.window(BATCHES)


def test_large_counts_stay_exact():
    counts = iter([torch.tensor(16777217), torch.tensor(1.0)])
    _, _, accumulator = make(count=lambda batch: next(counts))
    assert accumulator.window(BATCHES[:2]).counts == {"count": 16777218}


def test_ended_loader_is_not_asked_again():
    """Some loaders restart then."""
    asked = []

    class Loader:
        def __iter__(self):
            return self

        def __next__(self):
            asked.append(len(asked))
            if len(asked) == 2:
                raise StopIteration
            return BATCHES[0]

    model, _, accumulator = make(steps=3)
    assert [len(run_window(window, model).step().counts) for window in accumulator.windows(Loader())] == [1]
    assert len(asked) == 2


def a_ramp_fails_on_one_rank():
    rank = dist.get_rank()
    ddp = DistributedDataParallel(trunk())
    accumulator = Accumulator(ddp, SGD(ddp.parameters(), lr=0.1), steps=lambda index: 2 if rank == 0 else None)
    try:
        next(accumulator.windows(BATCHES))
    except Exception as caught:
        return f"{type(caught).__name__}: {caught}"[:40]
    return None


def test_failing_ramp_of_one_rank_is_raised_on_all_ranks(ranks):
    zero, one = ranks(2).run(a_ramp_fails_on_one_rank)
    assert zero.startswith("DistaccumError: rank 1 could not plan")
    assert one.startswith("TypeError: steps(0)=None is a NoneType")


def test_step_forgotten_on_the_last_window_is_an_error():
    model, _, accumulator = make(steps=2)
    windows = accumulator.windows(BATCHES)
    run_window(next(windows), model).step()
    run_window(next(windows), model)
    with pytest.raises(DistaccumError, match="complete but not stepped"):
        next(windows)


def forget_to_step(accumulator, model):
    run_window(accumulator.window(BATCHES), model)


def test_load_state_dict_forgives_a_forgotten_step():
    model, _, accumulator = make(steps=2)
    state = accumulator.state_dict()
    forget_to_step(accumulator, model)
    gc.collect()
    accumulator.load_state_dict(state)
    assert run_window(accumulator.window(BATCHES), model).step().stepped


@pytest.mark.parametrize("again", ["window", "update", "windows"])
def test_next_window_warns_of_a_forgotten_step(again):
    model, _, accumulator = make(steps=2)
    forget_to_step(accumulator, model)
    with pytest.warns(UserWarning, match=r"window of update 0 was dropped between its loop and its step\(\)"):
        if again == "window":
            forget_to_step(accumulator, model)
        elif again == "update":
            accumulator.update(BATCHES[0], lambda batch: loss_of(model, batch))
        else:
            next(accumulator.windows(BATCHES))
    forget_to_step(accumulator, model)  # one warning per forgotten step


def test_discarded_window_is_not_reported_as_a_forgotten_step():
    model, _, accumulator = make(steps=2, count=lambda batch: len(batch["x"]))
    run_window(accumulator.window(BATCHES), model).discard()
    for leave in (leave_by_break, leave_by_exception):
        leave(accumulator, model)
    accumulator.window(BATCHES)  # not begun
    for window in accumulator.windows(BATCHES):  # the loop is left before the step
        run_window(window, model)
        break
    del window
    open_window = run_window(accumulator.window(BATCHES), model)
    with pytest.raises(DistaccumError, match="complete but not stepped"):
        accumulator.window(BATCHES)
    del open_window  # it has raised its error already
    failing = run_window(accumulator.window(BATCHES), model)
    model.zero_grad()
    with pytest.raises(DistaccumError, match="gradients were cleared"):
        failing.step()
    del failing  # so has this one
    _, _, nothing = make(count=lambda batch: 0)
    for _ in nothing.window(BATCHES):
        pass
    nothing.window(BATCHES)
    next_is_exact(accumulator, model)


def test_in_place_change_of_a_loss_stays_out_of_the_record():
    model, _, accumulator = make()
    exact = run_window(accumulator.window(BATCHES), model).step().loss
    accumulator = Accumulator(model, SGD(model.parameters(), lr=0.0))
    model.load_state_dict(trunk().state_dict())
    for how in ("total", "view", "hook"):
        window, total = accumulator.window(BATCHES), None
        for micro_batch in window:
            loss = loss_of(model, micro_batch)
            seen = loss.detach()
            if how == "view":
                losses = torch.stack([loss, loss])
                loss, seen = losses[0], losses.detach()
            if how == "hook":  # runs within backward

                def wipe(_, seen=seen):
                    seen.zero_()

                model[0][0].weight.register_hook(wipe)
            window.backward(loss)
            total = seen if total is None else total.add_(seen)
            seen.mul_(3)
        assert window.step().loss == pytest.approx(exact, rel=1e-12)
