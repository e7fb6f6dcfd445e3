"""A loader with workers is read, and its next window planned, while the window at hand is stepped."""

from __future__ import annotations

import multiprocessing
import time

import pytest
import torch
import torch.distributed as dist
from counting import Counting
from engines import FSDP2_RUNS_ON_CPU
from problems import error, gradient, gradient_of_trunk, loss_of, make_batch, run_window, trunk
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from distaccum import Accumulator, DistaccumError


class Indexed(torch.utils.data.Dataset):
    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, i):
        return {key: value[0] for key, value in make_batch(1, seed=i).items()}


def loader_of(length, workers=1):
    multiprocessing.current_process()._config["daemon"] = False  # ranks are daemons, which may have no workers
    return torch.utils.data.DataLoader(
        Indexed(length), batch_size=2, num_workers=workers, multiprocessing_context="fork" if workers else None
    )


def planned_ahead(lengths, workers):
    """What each window and step sent, and the error of each window's gradient."""
    rank = dist.get_rank()
    ddp = DistributedDataParallel(trunk())
    accumulator = Accumulator(ddp, SGD(ddp.parameters(), lr=0.0), steps=2)
    sent, errors, windows = [], [], accumulator.windows(loader_of(lengths[rank], workers))
    everyone = [[make_batch(1, seed=i) for i in range(length)] for length in lengths]
    while True:
        with Counting() as count:
            window = next(windows, None)
            planned = [name for name, _ in count.take()]
            if window is None:
                return sent, errors, planned
            for micro_batch in window:
                window.backward(loss_of(ddp, micro_batch))
            count.take()
            samples = [one[4 * window.index :][:4] for one in everyone]
            errors.append(error(gradient(ddp), gradient_of_trunk([s for one in samples for s in one])))
            window.step()
            sent.append((planned, [name for name, _ in count.take()]))


@pytest.mark.parametrize("lengths", [(8, 8), (7, 8), (12, 4)], ids=["even", "short", "dry"])
def test_loader_with_workers_is_planned_during_the_previous_step(ranks, lengths):
    for sent, errors, last in ranks(2).run(planned_ahead, lengths, 1):
        assert max(errors) <= 1e-12
        first, *others = [planned for planned, _ in sent]
        assert first == ["allgather_"] and not any(others) and last == []
        assert all(stepped[:1] == ["allgather_"] for _, stepped in sent[:-1])
        assert sum(len(planned) + len(stepped) for planned, stepped in sent) <= 2 * len(sent) + 1


def test_loader_without_workers_is_drawn_when_its_window_is_asked_for(ranks):
    for sent, errors, _ in ranks(2).run(planned_ahead, (8, 8), 0):
        assert max(errors) <= 1e-12
        assert sent == [(["allgather_"], ["allreduce_"])] * 2


def one_rank_without_workers():
    rank = dist.get_rank()
    ddp = DistributedDataParallel(trunk())
    accumulator = Accumulator(ddp, SGD(ddp.parameters(), lr=0.0), steps=2)
    sent = []
    for window in accumulator.windows(loader_of(8, rank)):
        run_window(window, ddp)
        with Counting() as count:
            window.step()
        sent.append([name for name, _ in count.take()])
    return sent


def test_ranks_plan_ahead_together_or_not_at_all(ranks):
    for sent in ranks(2).run(one_rank_without_workers):
        assert sent == [["allreduce_"]] * 2


def skipped_ahead():
    """A window that is not stepped, one that comes between, and one that is left: what follows is exact."""
    rank = dist.get_rank()
    ddp = DistributedDataParallel(trunk())
    accumulator = Accumulator(ddp, SGD(ddp.parameters(), lr=0.0), steps=2, on_nonfinite="skip")
    windows, errors = accumulator.windows(loader_of(20, 1)), []
    for index in range(5):
        window = next(windows)
        for micro_batch in window:
            loss = loss_of(ddp, micro_batch)
            window.backward(loss * float("nan") if index == 0 and rank == 1 else loss)
        if index:
            expected = [make_batch(1, seed=i) for i in range(4 * index, 4 * index + 4)]
            errors.append(error(gradient(ddp), gradient_of_trunk(expected * 2)))
        assert window.step().stepped == (index > 0)
        if index == 2:
            run_window(accumulator.window([make_batch(2, seed=9)]), ddp).step()
    return errors


def test_plan_that_no_longer_holds_is_made_anew(ranks):
    for errors in ranks(2).run(skipped_ahead):
        assert max(errors) <= 1e-12


def dry_after_a_skip():
    """Told ahead that it could stand in with a micro-batch of a window that was then skipped."""
    rank = dist.get_rank()
    model = trunk()
    torch.distributed.fsdp.fully_shard(model)
    accumulator = Accumulator(model, SGD(model.parameters(), lr=0.0), steps=2, on_nonfinite="skip")
    windows = accumulator.windows(loader_of(8 if rank == 0 else 4, 1))
    for micro_batch in (window := next(windows)):
        window.backward(loss_of(model, micro_batch) * float("nan"))
    assert not window.step().stepped
    try:
        next(windows)
    except DistaccumError as refused:
        return str(refused)


@pytest.mark.skipif(not FSDP2_RUNS_ON_CPU, reason="not on CPU in torch 2.6")
def test_micro_batch_of_a_skipped_window_does_not_stand_in(ranks):
    for told in ranks(2).run(dry_after_a_skip):
        assert "rank 1 has none from an earlier window to stand in" in told


def fails_ahead():
    rank = dist.get_rank()
    ddp = DistributedDataParallel(trunk())
    seen = []

    def count(batch):
        seen.append(len(batch["x"]))
        if rank == 1 and len(seen) > 2:
            raise ArithmeticError("cannot count")
        return len(batch["x"])

    accumulator = Accumulator(ddp, SGD(ddp.parameters(), lr=0.0), steps=2, count=count)
    windows = accumulator.windows(loader_of(8, 1))
    stepped = run_window(next(windows), ddp).step().stepped
    try:
        next(windows)
    except (ArithmeticError, DistaccumError) as failed:
        return stepped, str(failed)


def test_error_in_planning_ahead_is_raised_by_its_own_window(ranks):
    (one, told), (other, raised) = ranks(2).run(fails_ahead)
    assert one and other
    assert "rank 1 could not plan this window" in told and raised == "cannot count"


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata's
def test_state_between_windows_leaves_out_batches_drawn_ahead():
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")
    made = lambda: torchdata.StatefulDataLoader(  # noqa: E731
        Indexed(16), batch_size=2, num_workers=1, multiprocessing_context="fork"
    )
    seen, state = [], None
    for stops in (True, False):
        model = trunk()
        accumulator = Accumulator(model, SGD(model.parameters(), lr=0.1), steps=2)
        if state is not None:
            accumulator.load_state_dict(state)
        for window in accumulator.windows(made()):
            for micro_batch in window:
                seen.append(micro_batch["x"][0, 0, 0].item())
                window.backward(loss_of(model, micro_batch))
            window.step()
            if stops and accumulator.index == 2:
                state = accumulator.state_dict()
                break
    assert seen == [make_batch(1, seed=i)["x"][0, 0, 0].item() for i in range(0, 16, 2)]


def test_ramp_counts_updates_made_outside_of_its_loop():
    model = trunk()
    accumulator = Accumulator(model, SGD(model.parameters(), lr=0.1), steps=lambda i: i + 1)
    lengths = []
    for window in accumulator.windows(loader_of(20, 1)):
        lengths.append((accumulator.index, len(run_window(window, model))))
        window.step()
        if accumulator.index == 1:
            run_window(accumulator.window([make_batch(2, seed=9)]), model).step()
    assert lengths == [(0, 1), (2, 3), (3, 4), (4, 2)]


def fails_in_step():
    rank = dist.get_rank()
    ddp = DistributedDataParallel(trunk())
    optimizer = SGD(ddp.parameters(), lr=0.0)
    accumulator = Accumulator(ddp, optimizer, steps=1)
    windows = accumulator.windows(loader_of(8, 1))
    run_window(next(windows), ddp).step()
    window = run_window(next(windows), ddp)
    if rank == 0:
        window.step()
        return "asks for no other window"

    def fail(*_):
        raise ArithmeticError

    optimizer.register_step_pre_hook(fail)
    try:
        window.step()
    except ArithmeticError:
        try:
            next(windows)
        except DistaccumError as error:
            return str(error)


def test_rank_that_failed_in_its_step_does_not_wait_for_the_others(ranks):
    assert "rank 1 failed in the step of update 1" in ranks(2).run(fails_in_step)[1]
    ranks(2).stop()  # one of them has left a plan without the other


def left_with_a_late_rank():
    """What was under way on rank 0 after each step, and when the loop was left, while rank 1 comes late."""
    ddp = DistributedDataParallel(trunk())
    accumulator = Accumulator(ddp, SGD(ddp.parameters(), lr=0.0), steps=2)
    started, under_way = [], []
    calls = {name: getattr(dist, name) for name in ("all_reduce", "all_gather")}

    def noting(call):
        def note(*args, **options):
            started.append(call(*args, **options))
            return started[-1]

        return note

    def look():
        under_way.append(sum(not work.is_completed() for work in started if work is not None))

    try:
        for name, call in calls.items():
            setattr(dist, name, noting(call))
        for window in accumulator.windows(loader_of(16)):
            for micro_batch in window:
                window.backward(loss_of(ddp, micro_batch))
            if dist.get_rank() and window.index == 1:
                time.sleep(0.2)
            window.step()  # whose loss nobody reads
            if window.index == 1:
                break
        look()
        window = accumulator.window([make_batch(2, seed=0)])
        for micro_batch in window:
            window.backward(loss_of(ddp, micro_batch))
        if dist.get_rank():
            time.sleep(0.2)
        window.step()
        look()
    finally:
        for name, call in calls.items():
            setattr(dist, name, call)
    return under_way, len(started) > 4


def test_collectives_are_complete_after_a_step_or_a_break(ranks):
    assert ranks(2).run(left_with_a_late_rank) == [([0, 0], True)] * 2
