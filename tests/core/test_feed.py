"""windows(loader) reads a loader at the pace of a loop by hand, and plans the next window while one runs."""

import contextlib
import copy
import itertools
import random
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from distaccum import DistaccumError
from tests.support.ranks import on_ranks
from tests.support.windows import accumulating, error, gradient, gradient_of, loss_of, numbers_of, one_weight


def noting(num: int, drawn: list[int]) -> Iterator[Tensor]:
    for i in range(num):
        drawn.append(i)
        yield torch.full((1, 1), float(i))


@pytest.mark.parametrize(("steps", "paced"), [(1, [2]), (2, [3, 4]), (4, [5, 6, 7, 8])])
def test_each_micro_step_draws_one_of_the_next_window(steps, paced):
    model, accumulator = one_weight(steps=steps)
    drawn: list[int] = []
    windows = accumulator.windows(noting(20, drawn))
    window = next(windows)
    assert len(drawn) == steps
    found = []
    for x in window:
        found.append(len(drawn))
        window.backward(model(x).sum())
    window.step()
    assert found == paced
    assert numbers_of(next(windows), model) == list(range(steps, 2 * steps))


def test_window_without_ahead_is_drawn_when_it_is_requested():
    model, accumulator = one_weight(steps=3)
    drawn: list[int] = []
    for i, window in enumerate(accumulator.windows(noting(9, drawn), ahead=False)):
        numbers_of(window, model)
        assert len(drawn) == 3 * (i + 1)


def test_length_that_changes_between_two_windows_takes_effect_at_once():
    """Whatever was drawn ahead for the length before."""
    length = [2]
    model, accumulator = one_weight(steps=lambda _: length[0])
    seen = []
    for window in accumulator.windows(noting(13, [])):
        seen.append(numbers_of(window, model))
        length[0] = (2, 5, 1, 3, 9)[len(seen) % 5]
    assert [len(numbers) for numbers in seen] == [2, 5, 1, 3, 2] and list(itertools.chain(*seen)) == list(range(13))


def test_micro_batches_and_losses_are_freed_as_they_are_finished():
    """So that one micro-batch more than those of a window is alive, and one loss with its graph."""
    drawn: list[weakref.ref[Tensor]] = []
    losses: list[weakref.ref[Tensor]] = []
    model, accumulator = one_weight(steps=4)

    def loader() -> Iterator[Tensor]:
        for _ in range(24):
            x = torch.ones(1, 1)
            drawn.append(weakref.ref(x))
            yield x
            del x

    for window in accumulator.windows(loader()):
        for x in window:
            assert all(loss() is None for loss in losses)
            loss = model(x).sum()
            losses.append(weakref.ref(loss))
            window.backward(loss)
            assert sum(found() is not None for found in drawn) <= 5
            del x, loss
        window.step()


@pytest.mark.parametrize("is_held", [True, False])
@pytest.mark.parametrize("is_weak", [True, False])
def test_items_drawn_ahead_of_an_iterator_come_first_in_its_next_loop(is_weak, is_held):
    model, accumulator = one_weight(steps=2)
    iterator, other = (noting(n, []) if is_weak else iter([*noting(n, [])]) for n in (11, 4))
    loops: Any = (accumulator.windows(iterator) for _ in range(3))
    loops = iter([*loops]) if is_held else loops  # as a progress bar holds the one that was left
    seen = []
    for window in next(loops):
        seen += numbers_of(window, model)
        if len(seen) == 4:
            break
    numbers_of(next(accumulator.windows(other)), model)  # which is left too
    for window in next(loops):
        for _ in window:
            break  # the window is discarded, and what was drawn ahead of it is not
        break
    for window in next(loops):
        seen += numbers_of(window, model)
    assert seen == [0, 1, 2, 3, 6, 7, 8, 9, 10]


def test_windows_have_the_length_of_their_loader():
    model, accumulator = one_weight(steps=lambda index: 1 + index)
    windows = accumulator.windows([torch.ones(1, 1)] * 8)
    bar = tqdm(windows, disable=True)
    assert len(windows) == bar.total == 4
    assert sum(1 for window in bar if numbers_of(window, model)) == 4
    with pytest.raises(TypeError, match="no len"):
        len(accumulator.windows(noting(3, [])))
    assert tqdm(accumulator.windows(noting(3, [])), disable=True).total is None


def test_counts_on_a_device_are_not_read_before_their_window_is_requested():
    """The meta device raises for whoever reads a value."""
    model, accumulator = one_weight(steps=2, count=lambda x: torch.ones((), device="cpu" if int(x) < 2 else "meta"))
    windows = accumulator.windows(noting(9, []))
    assert numbers_of(next(windows), model) == [0, 1]
    with pytest.raises(NotImplementedError):
        next(windows)


@on_ranks(2)
def test_micro_batch_of_a_skipped_window_does_not_stand_in():
    """Rank 1 is dry after the skipped window."""
    model = torch.distributed.fsdp.fully_shard(nn.Linear(1, 1))
    _, accumulator = accumulating(model, steps=2, on_nonfinite="skip")
    windows = accumulator.windows(noting(2 if dist.get_rank() else 4, []))
    for x in (window := next(windows)):
        window.backward(model(x).sum() * float("nan"))
    assert not window.step().stepped
    with pytest.raises(DistaccumError, match="rank 1 has none from an earlier window to stand in"):
        next(windows)


def leave(window: Any, model: nn.Module, mine: random.Random) -> None:
    """At a place of this rank's own, before the loop or in it, and never in the micro-batch that reduces."""
    place = mine.randrange(4)
    for i, x in enumerate(window if place and len(window) else ()):
        if i == min(place, len(window)) - 1:
            if mine.random() < 0.5:
                raise KeyError
            return
        window.backward(loss_of(model, x))


@on_ranks(3)
def test_windows_are_exact_after_ranks_left_others_at_different_places():
    both = random.Random(1)
    mine = random.Random(1000 + dist.get_rank())
    plain = nn.Linear(3, 2).double()
    model, accumulator = accumulating(DistributedDataParallel(copy.deepcopy(plain)), steps=4)
    num_complete = num_left = 0
    while num_complete < 40 or num_left < 20:
        drawn = [torch.randn(mine.randint(1, 4), 3, dtype=torch.float64) for _ in range(mine.randint(1, 12))]
        for window in accumulator.windows(iter(drawn)):
            if both.random() < 0.4:
                num_left += 1
                with contextlib.suppress(KeyError):
                    leave(window, model, mine)
                continue
            num_complete += 1
            seen = []
            for x in window:
                seen += [x] * (not window.stand_in)
                window.backward(loss_of(model, x))
            dist.all_gather_object(every := [seen] * 3, seen)
            exact = gradient_of(copy.deepcopy(plain), torch.cat([x for of_rank in every for x in of_rank]))
            assert error(gradient(model), exact) <= 1e-12
            window.step()
            if both.random() < 0.2:
                break
