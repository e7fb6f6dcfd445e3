"""Windows of loaders on ranks: what they send, ranks that run out, and ramps."""

from __future__ import annotations

import multiprocessing

import pytest
import torch
import torch.distributed as dist
from counting import Counting
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
    multiprocessing.current_process()._config["daemon"] = False  # ranks are daemons, and daemons may have no workers
    return torch.utils.data.DataLoader(
        Indexed(length), batch_size=2, num_workers=workers, multiprocessing_context="fork" if workers else None
    )


def planned(lengths, workers):
    """The collectives of each window and step, and the error of each window's gradient."""
    rank = dist.get_rank()
    ddp = DistributedDataParallel(trunk())
    accumulator = Accumulator(ddp, SGD(ddp.parameters(), lr=0.0), steps=2)
    sent, errors, windows = [], [], accumulator.windows(loader_of(lengths[rank], workers))
    everyone = [[make_batch(1, seed=i) for i in range(length)] for length in lengths]
    while True:
        with Counting() as count:
            window = next(windows, None)
            at_planning = [name for name, _ in count.take()]
            if window is None:
                return sent, errors, at_planning
            for micro_batch in window:
                window.backward(loss_of(ddp, micro_batch))
            count.take()
            samples = [one[4 * window.index :][:4] for one in everyone]
            errors.append(error(gradient(ddp), gradient_of_trunk([s for one in samples for s in one])))
            window.step()
            sent.append((at_planning, [name for name, _ in count.take()]))


@pytest.mark.parametrize("workers", [0, 1])
def test_no_collective_is_pending_after_a_step(ranks, workers):
    for sent, errors, _ in ranks(2).run(planned, (8, 8), workers):
        assert max(errors) <= 1e-12
        assert sent == [(["allgather_"], ["allreduce_"]), ([], ["allreduce_"])], "the second was planned in the first"


def dry_after_a_skip():
    """Rank 1 is dry after a skipped window, whose micro-batches must not serve as stand-ins."""
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


def test_micro_batch_of_a_skipped_window_does_not_stand_in(ranks):
    for message in ranks(2).run(dry_after_a_skip):
        assert "rank 1 has none from an earlier window to stand in" in message


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
