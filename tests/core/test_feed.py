"""windows(loader) reads a loader at the pace of a loop by hand, and plans the next window while one runs."""

import contextlib
import itertools
import random
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from tqdm import tqdm

from distaccum import Accumulator, DistaccumError
from tests.support.oracle import step_off
from tests.support.ranks import on_ranks
from tests.support.windows import accumulating, loss_of


def one_weight(**options: Any) -> tuple[nn.Module, Accumulator]:
    return accumulating(nn.Linear(1, 1, bias=False), **options)


def noting(num: int, drawn: list[int]) -> Iterator[Tensor]:
    for i in range(num):
        drawn.append(i)
        yield torch.full((1, 1), float(i))


def run(window: Any, model: nn.Module) -> list[int]:
    seen = []
    for x in window:
        seen.append(int(x))
        window.backward(model(x).sum())
    window.step()
    return seen


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
    assert run(next(windows), model) == list(range(steps, 2 * steps))


def test_window_without_ahead_is_drawn_when_it_is_requested():
    model, accumulator = one_weight(steps=3)
    drawn: list[int] = []
    for i, window in enumerate(accumulator.windows(noting(9, drawn), ahead=False)):
        run(window, model)
        assert len(drawn) == 3 * (i + 1)


def test_length_that_changes_between_two_windows_takes_effect_at_once():
    length = [2]
    model, accumulator = one_weight(steps=lambda _: length[0])
    found = []
    for window in accumulator.windows(noting(13, [])):
        found.append(run(window, model))
        length[0] = (2, 5, 1, 3, 9)[len(found) % 5]
    assert [len(one) for one in found] == [2, 5, 1, 3, 2] and list(itertools.chain(*found)) == list(range(13))


def test_at_most_two_windows_are_alive():
    alive: list[weakref.ref[Tensor]] = []
    most = 0

    def loader() -> Iterator[Tensor]:
        for _ in range(24):
            x = torch.ones(1, 1)
            alive.append(weakref.ref(x))
            yield x
            del x

    model, accumulator = one_weight(steps=4)
    for window in accumulator.windows(loader()):
        for x in window:
            window.backward(model(x).sum())
            most = max(most, sum(found() is not None for found in alive))
        window.step()
    assert 4 < most <= 8


def breaking(at: int) -> Iterator[Tensor]:
    for i in itertools.count():
        if i == at:
            raise OSError("the disk is gone")
        yield torch.full((1, 1), float(i))


@pytest.mark.parametrize(
    ("loader", "options", "kind", "words"),
    [
        (lambda: breaking(5), {}, OSError, "the disk is gone"),
        (lambda: noting(9, []), {"count": lambda x: -1.0 if int(x) == 4 else 1.0}, ValueError, r"count gave -1.0"),
        (lambda: noting(9, []), {"steps": lambda index: 3 - 3 * index}, ValueError, "steps"),
    ],
)
def test_error_is_raised_where_its_window_is_requested(loader, options, kind, words):
    model, accumulator = one_weight(**{"steps": 3, **options})
    windows = accumulator.windows(loader())
    assert run(next(windows), model) == [0, 1, 2]  # all that follows was drawn in it
    with pytest.raises(kind, match=words):
        next(windows)
    assert accumulator.index == 1


@pytest.mark.parametrize("is_weak", [True, False])
def test_items_drawn_ahead_of_an_iterator_come_first_in_its_next_loop(is_weak):
    model, accumulator = one_weight(steps=2)
    batches = [torch.full((1, 1), float(i)) for i in range(11)]
    iterator = (x for x in batches) if is_weak else iter(batches)
    seen = []
    for window in accumulator.windows(iterator):
        seen += run(window, model)
        if len(seen) == 4:
            break
    for window in accumulator.windows(noting(4, [])):  # of another loader, which is left too
        run(window, model)
        break
    for window in accumulator.windows(iterator):
        for _ in window:
            break  # the window is discarded, and what was drawn ahead of it is not
        break
    for window in accumulator.windows(iterator):
        seen += run(window, model)
    assert seen == [0, 1, 2, 3, 6, 7, 8, 9, 10]


def test_windows_have_the_length_of_their_loader():
    model, accumulator = one_weight(steps=lambda index: 1 + index)
    batches = [torch.ones(1, 1)] * 8
    windows = accumulator.windows(batches)
    bar = tqdm(windows, disable=True)
    assert len(windows) == bar.total == 4
    assert sum(1 for window in bar if run(window, model)) == 4
    with pytest.raises(TypeError, match="no len"):
        len(accumulator.windows(noting(3, [])))
    assert tqdm(accumulator.windows(noting(3, [])), disable=True).total is None


def test_counts_on_a_device_are_not_read_before_their_window_is_requested():
    """The meta device raises for whoever reads a value."""
    model, accumulator = one_weight(
        steps=2, count=lambda x: torch.ones(()) if int(x) < 2 else torch.ones(()).to("meta")
    )
    windows = accumulator.windows(noting(9, []))
    assert run(next(windows), model) == [0, 1]
    with pytest.raises(NotImplementedError):
        next(windows)


@on_ranks(2)
def test_micro_batch_of_a_skipped_window_does_not_stand_in():
    """Rank 1 is dry after the skipped window."""
    model = nn.Linear(1, 1)
    torch.distributed.fsdp.fully_shard(model)
    accumulator = Accumulator(model, SGD(model.parameters(), lr=0.0), steps=2, on_nonfinite="skip")
    windows = accumulator.windows(noting(2 if dist.get_rank() else 4, []))
    for x in (window := next(windows)):
        window.backward(model(x).sum() * float("nan"))
    assert not window.step().stepped
    with pytest.raises(DistaccumError, match="rank 1 has none from an earlier window to stand in"):
        next(windows)


class Leaving:
    """A program in which ranks leave windows at different places; complete ones are compared with the big batch."""

    def __init__(self, seed: int) -> None:
        self.rank = dist.get_rank()
        self.both, self.mine = random.Random(seed), random.Random(1000 * seed + self.rank)
        torch.manual_seed(7 * seed + self.rank)
        self.model = DistributedDataParallel(nn.Linear(3, 2).double())
        steps = self.both.randint(1, 4)
        ramp = (lambda index: steps + index % 3) if self.both.random() < 0.3 else steps
        self.accumulator = Accumulator(self.model, SGD(self.model.parameters(), lr=0.1), steps=ramp)
        self.worst, self.num_complete, self.num_left = 0.0, 0, 0

    def batch(self) -> Tensor:
        return torch.randn(self.mine.randint(1, 4), 3, dtype=torch.float64)

    def complete(self, window: Any) -> None:
        seen: list[Tensor] = []

        def run(x: Tensor) -> None:
            window.backward(loss_of(self.model, x))
            seen.append(x)

        def of_all(plain: nn.Module, seen: list[Tensor]) -> Tensor:
            dist.all_gather_object(every := [seen] * dist.get_world_size(), seen)
            return loss_of(plain, torch.cat([x for of_rank in every for x in of_rank]))

        off = step_off(self.model, window, nn.Linear(3, 2).double(), seen, of_all, run, lr=0.1)
        self.worst, self.num_complete = max(self.worst, *off), self.num_complete + 1

    def leave(self, window: Any, how: str) -> None:
        """At a place of this rank's own, and never in the micro-batch that reduces."""
        place = self.mine.randint(0, 3)
        self.num_left += 1
        if how == "drop" or len(window) < 2:
            if self.mine.random() < 0.5:
                window.discard()
            return
        for i, x in enumerate(window):
            if i == len(window) - 1:
                break
            window.backward(loss_of(self.model, x))
            if i == place and how == "raise":
                raise KeyError
            if i == place:
                break

    def epoch(self) -> None:
        iterator = iter([self.batch() for _ in range(self.mine.randint(1, 9) if self.both.random() < 0.5 else 8)])
        last = self.both.randint(1, 6)
        for num, window in enumerate(self.accumulator.windows(iterator)):
            how = self.both.choice(["go", "go", "go", "leave", "drop", "raise"])
            with contextlib.suppress(KeyError):
                self.complete(window) if how == "go" else self.leave(window, how)
            del window
            if self.both.random() < 0.3:
                self.complete(self.accumulator.window([self.batch() for _ in range(self.mine.randint(1, 3))]))
            if num == last:
                break
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # where no rank left the loop, there is no more
            for window in self.accumulator.windows(iterator):
                self.complete(window)


@on_ranks(3)
def test_windows_are_exact_after_ranks_left_others_at_different_places():
    programs = [Leaving(seed) for seed in range(14)]
    for program in programs:
        program.epoch()
        program.epoch()
    assert max(one.worst for one in programs) <= 1e-12
    assert sum(one.num_complete for one in programs) > 60 and sum(one.num_left for one in programs) > 20
