"""Loaders of many kinds: each micro-batch is used once, in order, and the epoch ends."""

from contextlib import nullcontext
from itertools import islice

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from distaccum import DistaccumError
from tests.support.problems import Stream
from tests.support.windows import accumulating, numbers_of, one_weight, run_window

NUMBERS = [1.0, 2.0, 3.0, 4.0, 5.0]
SAMPLES = [torch.tensor([number]) for number in NUMBERS]
WINDOWS = [[1.0, 2.0], [3.0, 4.0], [5.0]]


def batches():
    return [torch.tensor([[number]]) for number in NUMBERS]


class Restarting:
    """`iter()` restarts it and returns the loader itself, as with DeepSpeed's loader."""

    def __iter__(self):
        self.rest = iter(batches())
        return self

    def __next__(self):
        return next(self.rest)


class Indexed:
    """Has only `__getitem__`."""

    def __getitem__(self, i):
        return batches()[i]


def with_workers(dataset):
    return DataLoader(dataset, batch_size=1, num_workers=1, persistent_workers=True, multiprocessing_context="fork")


# How the loader is made, and whether it has a second epoch.
LOADERS = {
    "list": (batches, True),
    "restarting, returns itself": (Restarting, True),
    "generator": (lambda: (batch for batch in batches()), False),
    "__getitem__ alone": (Indexed, True),
    "DataLoader": (lambda: DataLoader(SAMPLES, batch_size=1), True),
    "IterableDataset": (lambda: DataLoader(Stream(SAMPLES), batch_size=1), True),
    "persistent workers": (lambda: with_workers(SAMPLES), True),
    "IterableDataset, persistent workers": (lambda: with_workers(Stream(SAMPLES)), True),
}


def seen_in(windows, model):
    return [numbers_of(window, model) for window in windows]


@pytest.mark.parametrize("name", LOADERS)
def test_micro_batches_are_used_once_and_the_epoch_ends(name):
    make, has_another_epoch = LOADERS[name]
    loader, (model, accumulator) = make(), one_weight(steps=2)
    for expected in (WINDOWS, WINDOWS if has_another_epoch else []):
        # One window more than expected: the tested fault repeated windows forever.
        with nullcontext() if expected else pytest.warns(UserWarning, match="yields no micro-batch .* each epoch"):
            assert seen_in(islice(accumulator.windows(loader), len(WINDOWS) + 1), model) == expected
    if not has_another_epoch:
        assert [*accumulator.windows([])] == []  # it is said once


def buffers_in_turn(number=3):
    buffers = [torch.empty(1, 1) for _ in range(number)]
    for i, batch in enumerate(batches()):
        yield buffers[i % number].copy_(batch)


def refilled(made, fill):
    for batch in batches():
        fill(made, batch)
        yield made


REFILLED = {
    "tensor": lambda: buffers_in_turn(1),
    "dict": lambda: refilled({}, lambda made, batch: made.update(x=batch)),
    "numpy's array": lambda: refilled({"x": np.empty((1, 1))}, lambda made, batch: np.copyto(made["x"], batch)),
    "list": lambda: refilled([""], lambda made, batch: made.__setitem__(0, str(batch))),
    "two tensors in turn": lambda: buffers_in_turn(2),
    "three tensors in turn": buffers_in_turn,
}


@pytest.mark.parametrize("steps", [1, 3, 4, 9, "grows"])
@pytest.mark.parametrize("name", REFILLED)
def test_loader_that_yields_the_same_memory_again_is_refused(name, steps):
    """By windows() before the first forward of the window; where that holds no more than are safe, it is exact."""
    per_window = (lambda index: 1 + 2 * (index > 1)) if steps == "grows" else steps
    loader, (model, accumulator) = REFILLED[name](), one_weight(lr=1.0, steps=per_window)
    if steps == 1 and name.endswith("in turn"):
        assert seen_in(accumulator.windows(loader), model) == [[number] for number in NUMBERS]
        return
    with pytest.raises(DistaccumError, match=r"wrote to a micro-batch .* yield copies"):
        windows = accumulator.windows(loader)  # which draws on while it is held
        if steps == "grows" and name.endswith("in turn"):
            assert numbers_of(next(windows), model) == NUMBERS[:1]
        next(iter(accumulator.window(loader) if steps == 9 else next(windows)))
    assert seen_in(accumulating(model, 1.0, steps=4)[1].windows(batches()), model)[0] == NUMBERS[:4]


@pytest.mark.parametrize("ahead", [True, False])
def test_same_memory_may_be_yielded_again_unchanged(ahead):
    """One batch for ever, views of one tensor that the loop writes to, NaN, and what is not contiguous."""
    one, parts = torch.ones(1, 1), torch.tensor([[1.0], [2.0], [3.0], [4.0]]).split(1)
    array, strided = np.ones((1, 1), "float32"), torch.ones(1, 8)[:, ::8]
    for loader in ([one] * 4, parts, [torch.from_numpy(array) for _ in range(4)], [one * torch.nan] * 4, [strided] * 4):
        model, accumulator = one_weight(steps=2, on_nonfinite="ignore")
        for window in accumulator.windows(loader, ahead=ahead):
            run_window(window, model, lambda model, x: model(x.mul_(2.0)).mean()).step()
        assert accumulator.index == 2


def test_tensors_whose_memory_is_not_looked_at_are_yielded_as_they_are():
    dense = torch.ones(2, 1)
    nested = torch.nested.nested_tensor([dense[:, 0], dense[:1, 0]], layout=torch.jagged)
    model, accumulator = one_weight(steps=2, count=lambda batch: batch.pop("rows"))
    batch = {"x": dense, "s": torch.eye(3).to_sparse(), "n": nested, "rows": 2}
    for window in accumulator.windows([{**batch} for _ in range(4)]):  # count takes a number out, and no memory
        run_window(window, model).step()
    assert accumulator.index == 2
