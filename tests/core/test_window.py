"""A window commits or leaves no trace: its failures, schedules, copies; its misuses are in test_misuses.py."""

import contextlib
import copy
import linecache
import logging
import math
import pickle
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import LambdaLR, StepLR
from torch.profiler import ProfilerActivity, profile

import distaccum
from distaccum import Accumulator, DistaccumError, Extension, Update, Window
from distaccum.extensions import NoiseScale, Spans
from tests.core.test_misuses import leave_by_break
from tests.support.engines import KINDS
from tests.support.problems import (
    BATCHES,
    accumulating_trunk,
    assert_next_is_exact,
    make_batch,
    make_net_without_router,
    trunk,
)
from tests.support.ranks import on_ranks
from tests.support.windows import accumulating, error, hooked, loss_of, run_window, warned, weights

ROOT = str(Path(distaccum.__file__).parent)


def hearing(what: str, answer: Any = lambda window: None) -> Any:
    return lambda self, window, *_: (self.hear(what), answer(window))[1]


class Recorder(Extension):
    """Notes what it hears of a window; raises where it is told to."""

    key = "recorder"
    begin = hearing("begin")
    before_backward = hearing("backward")
    after_backward = hearing("ended")
    finishing = hearing("finishing")
    numbers = hearing("numbers", lambda window: torch.tensor([1.0, float(window.index)]))
    judge = hearing("judge", lambda window: "it is odd" if window.index % 2 else None)

    def __init__(self, fails: str = "") -> None:
        self.heard: list[str] = []
        self.fails = fails

    def hear(self, what: str) -> None:
        self.heard.append(what)
        if what == self.fails:
            raise ArithmeticError(what)

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


def failing(model, batch):
    return hooked(loss_of(model, batch), lambda _: 1 / 0)


def of_two(model, batch):
    return loss_of(model, batch).expand(2)


def test_extensions_hear_of_each_backward_and_of_the_end():
    """Of a loss that is refused they hear nothing, and of a backward that fails no end."""
    recorder = Recorder()
    model, accumulator = accumulating_trunk(extensions=[recorder])
    update = run_window(accumulator.window(BATCHES), model).step()
    steps = ["begin", *["backward", "ended"] * 3, "finishing", "numbers", "judge", "stepped"]
    assert recorder.heard == steps and update.notes == {"sum": [1.0, 0.0]}
    assert accumulator.state_dict()["recorder"] == steps
    for loss_fn, kind, heard in ((of_two, ValueError, []), (failing, ZeroDivisionError, ["backward"])):
        recorder.heard.clear()
        with pytest.raises(kind):
            run_window(accumulator.window(BATCHES), model, loss_fn)
        assert recorder.heard == ["begin", *heard, "end"]
    before = weights(model)
    update = run_window(accumulator.window(BATCHES), model).step()
    assert update.reason == "it is odd" and torch.equal(before, weights(model))
    assert run_window(accumulator.window(BATCHES), model).step().stepped


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # `end` raises where the loop is closed
@pytest.mark.parametrize("where", ["begin", "backward", "ended", "finishing", "numbers", "judge"])
def test_extension_that_raises_discards_the_window_and_all_hear_of_the_end(where):
    first, last = Recorder("end"), Rekeyed(where)
    model, accumulator = accumulating_trunk(extensions=[first, last])
    with pytest.raises(ArithmeticError):
        run_window(accumulator.window(BATCHES), model).step()
    assert first.heard[-1] == last.heard[-1] == "end"
    assert all(p.grad is None for p in model.parameters()) and accumulator.index == 0
    first.fails = last.fails = ""
    assert_next_is_exact(accumulator, model)


def test_spans_name_what_a_window_does_in_a_trace():
    model, accumulator = accumulating_trunk(extensions=[Spans()])
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        run_window(accumulator.window(BATCHES), model).step()
        leave_by_break(accumulator, model)
        run_window(accumulator.window(BATCHES[:1]), model).step()
    names = [event.name.partition("distaccum: ")[2] for event in profiler.events()]
    assert Counter(filter(None, names)) == {"window 0": 1, "window 1": 2, "backward": 5, "finish": 2, "step": 2}


@pytest.mark.parametrize(("what", "said"), [("loader", "OSError: the disk is gone"), ("count", "KeyError: 'gone'")])
@on_ranks(2)
def test_failure_of_one_ranks_plan_is_raised_on_all_ranks(what, said):
    is_bad = dist.get_rank() == 1
    ddp = DistributedDataParallel(trunk())

    def count(batch):
        return batch["gone" if what == "count" and is_bad else "x"].shape[0]

    def loader():
        yield BATCHES[0]
        if what == "loader" and is_bad:
            raise OSError("the disk is gone")
        yield BATCHES[1]

    accumulator = Accumulator(ddp, SGD(ddp.parameters(), lr=0.1), steps=2, count=count)
    logged, handler = [], logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())
    logging.getLogger("distaccum").addHandler(handler)
    with pytest.raises((OSError, KeyError, DistaccumError)) as caught:
        next(accumulator.windows(loader()))
    message = f"{type(caught.value).__name__}: {caught.value}"
    assert message.startswith(said if is_bad else f"DistaccumError: rank 1 could not plan this window ({said})")
    assert [said in text for text in logged] == [True] * is_bad
    assert_next_is_exact(Accumulator(ddp, SGD(ddp.parameters(), lr=0.1)), ddp)


DISAGREEMENTS = {
    "steps": "steps (rank 0: 2, rank 1: 3)",
    "index": "the update's index (rank 0: 0, rank 1: 3)",
    "kind": "who runs the window (rank 0: a loop, rank 1: update())",
}


@pytest.mark.parametrize("what", DISAGREEMENTS)
@on_ranks(2)
def test_ranks_that_disagree_are_named_before_the_window(what):
    """One rank's ramp differs from its second update on; the update before is unaffected."""
    rank = dist.get_rank()
    steps = (lambda index: 2 + rank * index) if what == "steps" else 2
    ddp, accumulator = accumulating(DistributedDataParallel(trunk()), steps=steps)
    if what == "index" and rank:
        accumulator.load_state_dict({**accumulator.state_dict(), "index": 3})
    first = accumulator.index
    with pytest.raises(DistaccumError) as caught:
        if what == "kind" and rank:
            accumulator.update(make_batch(4, seed=0), lambda batch: loss_of(ddp, batch))
        for window in accumulator.windows([make_batch(1, seed=i) for i in range(20)]):
            run_window(window, ddp).step()
    assert str(caught.value).startswith(f"ranks disagree on {DISAGREEMENTS[what]}")
    assert accumulator.index - first == (what == "steps")
    assert_next_is_exact(Accumulator(ddp, SGD(ddp.parameters(), lr=0.1)), ddp)


def test_schedulers_step_once_per_update_of_a_ramp():
    model = trunk()
    optimizer = Adam(model.parameters(), lr=1.0)
    schedules = [LambdaLR(optimizer, lambda n: 1 / (1 + n)), LambdaLR(optimizer, lambda n: 1.0)]
    accumulator = Accumulator(model, optimizer, steps=lambda index: index + 1, scheduler=schedules)
    lengths = [(len(window), run_window(window, model).step().index) for window in accumulator.windows(BATCHES * 2)]
    assert lengths == [(1, 0), (2, 1), (3, 2)]
    assert [schedule.last_epoch for schedule in schedules] == [3, 3]
    _, other = accumulating_trunk(steps=lambda index: index + 1)
    other.load_state_dict(accumulator.state_dict())
    assert other.index == 3 and len(next(other.windows(BATCHES * 2))) == 4


@pytest.mark.parametrize("where", ["nowhere", "in the loop", "after the loop"])
def test_callers_step_of_a_schedule_is_warned_of_once(where):
    model = trunk()
    optimizer = SGD(model.parameters(), lr=0.1)
    schedule = StepLR(optimizer, 1, 0.5)
    accumulator = Accumulator(model, optimizer, steps=2, scheduler=schedule)
    begun = schedule.state_dict(), accumulator.state_dict()
    with warned() as texts:
        for window in accumulator.windows(BATCHES * 2):
            for x in window:
                window.backward(loss_of(model, x))
                if where == "in the loop":
                    schedule.step()
            window.step()
            if where == "after the loop":
                schedule.step()
            if where == "nowhere" and window.index == 1:  # back to the start, and to a later state
                held = schedule.state_dict(), accumulator.state_dict()
                for states in (begun, held):
                    schedule.load_state_dict(states[0])
                    accumulator.load_state_dict(states[1])
    assert sum("beside window.step()" in text for text in texts) == (where != "nowhere")


def test_batch_size_gives_the_steps_and_warns_of_a_remainder():
    model, accumulator = accumulating_trunk(batch_size=100, micro_batch_size=50)
    loader = [{"x": batch["x"][:1].expand(50, -1, -1)} for batch in BATCHES]
    assert [run_window(w, model).step().counts["samples"] for w in accumulator.windows(loader)] == [100, 50]
    _, accumulator = accumulating_trunk(batch_size=100, micro_batch_size=30)
    with pytest.warns(UserWarning, match=r"batch_size=100 .* each full update holds 120 \(4 micro-batches per rank\)"):
        assert len(next(accumulator.windows(loader * 2))) == 4


def interrupted(at: int) -> tuple[str, float, bool] | None:
    """Ctrl-C in update() where the `at`-th source line of the library runs first.

    The line, how far the next update is off, and whether one part of the first has stepped and another has not.
    """
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = SGD(model.parameters(), lr=1.0, fused=True)
    options = {"micro_batch_size": 2, "max_norm": 1.0, "scaler": GradScaler("cpu", init_scale=1024.0)}
    accumulator = Accumulator(model, optimizer, scheduler=StepLR(optimizer, 1, 0.5), **options)
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
        accumulator.update(batch, lambda x: model(x).square().mean())
        return None
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(None)
    found = weights(model)
    seen = accumulator.index, optimizer.param_groups[0]["lr"]
    exact = torch.cat([g.flatten() for g in torch.autograd.grad(model(batch).square().mean(), [*model.parameters()])])
    exact *= seen[1] / max(1.0, float(exact.norm()))
    with contextlib.suppress(DistaccumError):  # `window` may be open yet; the second request discards it
        accumulator.split(batch)
    assert run_window(accumulator.split(batch), model).step().stepped
    assert all(p.grad is None for p in model.parameters())
    is_torn = seen != ((0, 1.0) if torch.equal(before, found) else (1, 0.5))
    return line, error(found - weights(model), exact), is_torn


@pytest.mark.filterwarnings("ignore:gradients that stood before", "ignore:the window of update")
def test_ctrl_c_at_any_line_leaves_no_trace_or_a_whole_update():
    found = []
    while (end := interrupted(len(found) + 1)) is not None:
        found.append(end)
    assert len(found) > 100
    assert [one for one in found if one[1] > 1e-5] == []
    torn = [line for line, _, is_torn in found if is_torn]
    # Lines that run after the step but before the library can record it.
    assert len(torn) <= 3 and all("base.py" in line or "has_stepped = reason is None" in line for line in torn)


def test_copy_of_an_accumulator_or_a_window_names_the_cure():
    model, accumulator = accumulating_trunk(max_norm=math.inf, extensions=[NoiseScale()])
    window = accumulator.window(BATCHES)
    said = r"copying or pickling an Accumulator, which .*load_state_dict\(acc"
    for batch in window:
        for copied in (copy.deepcopy, copy.copy, pickle.dumps):
            with pytest.raises(DistaccumError, match=said):
                copied(accumulator)
        window.backward(loss_of(model, batch))
        with pytest.raises(DistaccumError, match="copying or pickling a Window"):
            copy.deepcopy(window)
        assert copy.deepcopy(model)[1].weight.grad is None
    update = window.step()
    for copied in (copy.deepcopy(update), pickle.loads(pickle.dumps(update))):
        assert copied.as_dict() == update.as_dict() and repr(copied) == repr(update)
        assert copied.noise_scale == update.noise_scale is not None


def test_large_counts_stay_exact():
    counts = iter([torch.tensor(16777217), torch.tensor(1.0)])
    _, accumulator = accumulating_trunk(count=lambda batch: next(counts))
    assert accumulator.window(BATCHES[:2]).counts == {"count": 16777218}


@pytest.mark.parametrize("again", ["window", "windows"])
def test_next_window_refuses_a_forgotten_step_once(again):
    model, accumulator = accumulating_trunk(steps=2)
    run_window(accumulator.window(BATCHES), model)  # and dropped
    ask = accumulator.window if again == "window" else lambda batches: next(accumulator.windows(batches))
    with pytest.raises(DistaccumError, match=r"one is complete but not stepped.*\(a second request discards it\)"):
        ask(BATCHES)
    ask(BATCHES)
    assert_next_is_exact(accumulator, model)
    assert accumulator.index == 0


def test_optimizer_whose_loss_counts_nothing_in_a_window_may_be_without_a_gradient():
    heads = nn.ModuleList([nn.Linear(3, 1), nn.Linear(3, 1)])
    optimizers = [SGD(head.parameters(), lr=0.1) for head in heads]
    count = {"a": lambda batch: len(batch), "b": lambda batch: 0}
    accumulator = Accumulator(heads, optimizers, count=count)
    losses = lambda heads, x: {"a": heads[0](x).mean(), "b": heads[1](x).mean()}  # noqa: E731
    assert run_window(accumulator.window([torch.ones(2, 3)]), heads, losses).step().stepped
    accumulator = Accumulator(heads, optimizers)
    with pytest.raises(DistaccumError, match="no parameter of the SGD got a gradient"):
        run_window(accumulator.window([torch.ones(2, 3)]), heads[0])


@on_ranks(2)
def test_parameters_replaced_after_the_wrapper_are_refused_on_all_ranks():
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3)), find_unused_parameters=True)
    for optimizer in (SGD(ddp.parameters(), lr=0.1), None):
        accumulator = Accumulator(ddp, optimizer)
        kept, ddp.module[1] = ddp.module[1], nn.Linear(4, 3)
        with pytest.raises(DistaccumError, match=r"some parameters of the .* got no gradient .*others \(1\.weight, 1"):
            run_window(accumulator.window([torch.ones(2, 3)]), ddp)
        ddp.module[1] = kept


def test_parameter_outside_of_modules_is_trained_in_a_list_of_its_own():
    model, patch = nn.Linear(3, 2).double().requires_grad_(False), nn.Parameter(torch.zeros(3).double())
    accumulator = Accumulator([model, nn.ParameterList([patch])], SGD([patch], lr=1.0), steps=2)
    batches = [torch.randn(n, 3).double() for n in (2, 3)]
    exact = torch.autograd.grad(model(torch.cat(batches) + patch).square().mean(), [patch])[0]
    run_window(accumulator.window(batches), lambda x: model(x + patch)).step()
    assert error(-patch.detach(), exact) <= 1e-12


def test_single_number_beside_counted_entries_is_told_once():
    model, accumulator = accumulating(nn.Linear(5, 3), 0.1, steps=1)
    said = r"entry 1 .* no dimension, .* count as 2 samples.*count=lambda batch: 1"
    with pytest.warns(UserWarning, match=said) as seen:
        for window in accumulator.windows([(torch.randn(n, 5), torch.tensor(1)) for n in (2, 9)]):
            run_window(window, lambda batch: model(batch[0])).step()
    assert len(seen) == 1


def test_scalars_of_an_update_go_into_a_logger_as_they_are(tmp_path):
    from torch.utils.tensorboard import SummaryWriter

    model, accumulator = accumulating_trunk(max_norm=math.inf, count={"a": lambda _: 1, "b": lambda _: 2})
    both = lambda *given: {"a": loss_of(*given), "b": loss_of(*given)}  # noqa: E731
    update = run_window(accumulator.window(BATCHES[:2]), model, both).step()
    numbers = update.scalars()
    with SummaryWriter(tmp_path) as writer:
        for name, value in numbers.items():
            writer.add_scalar(name, value, update.index)
    assert all(type(value) is float for value in numbers.values())
    assert numbers["loss"] == update.loss == sum(numbers[f"loss/{name}"] for name in "ab")
    assert (numbers["count/b"], numbers["stepped"], "noise_scale" in numbers) == (4.0, 1.0, False)


class Past(SGD):
    """Writes past torch's counts, as torch's fused optimizers and those with kernels of their own do."""

    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            parameter.data.sub_(parameter.grad, alpha=0.1)


OPTIMIZERS = {
    "foreach": lambda p: SGD(p, lr=0.1, foreach=True),
    "lr=0": lambda p: SGD(p, lr=0.0),  # the first step of many a schedule
    "fused": lambda p: Adam(p, lr=0.1, fused=True),
    "past counts": lambda p: Past(p, lr=0.1),
}


@pytest.mark.parametrize("make_optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_update_says_whether_the_callers_step_moved_weights(make_optimizer):
    model = trunk()
    optimizer = make_optimizer(model.parameters())
    schedule = StepLR(optimizer, 1, 1.0)
    accumulator = Accumulator(model, steps=2, scheduler=schedule)
    said = []
    with warned() as texts:
        for window in accumulator.windows(BATCHES * 2):
            run_window(window, model)
            if window.index != 1:
                optimizer.step()
            said.append(window.step().stepped)
    if optimizer.defaults.get("fused") or type(optimizer) is Past:  # once writes are known not to count
        assert said == [True] * 3 and not texts
        return
    assert (said, schedule.last_epoch) == ([True, False, True], 2)
    assert ["no weight changed between the window's loop" in text for text in texts] == [True]


def test_optimizer_that_was_forgotten_is_told_once_and_windows_go_on():
    model = trunk()
    accumulator = Accumulator(model, steps=1)
    with warned() as texts:
        updates = [run_window(window, model).step() for window in accumulator.windows(BATCHES * 20)]
    (text,) = texts
    assert "give the optimizer to the Accumulator, or call optimizer.step() right before" in text
    assert len(updates) == accumulator.index == 60 and not any(update.stepped for update in updates)
    assert updates[-1].reason == "no weight changed between the window's loop and its step()"


@pytest.mark.parametrize("name", ["DDP", "FSDP2", "FSDP1"])
@on_ranks(2)
def test_step_of_a_caller_is_seen_under_wrappers(name):
    model, optimizer = KINDS[name].wrap(make_net_without_router().to(KINDS[name].dtype), 0.1)
    accumulator = Accumulator(model)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="no weight changed")
        for _ in range(2):
            window = run_window(accumulator.window([make_batch(2, seed=dist.get_rank())]), model)
            optimizer.step()
            assert window.step().stepped
    assert not run_window(accumulator.window([make_batch(2, seed=dist.get_rank())]), model).step().stepped
