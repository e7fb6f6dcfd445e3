"""state_dict() at each place, over each kind of loader: a job that resumes ends with the bits of one that went on."""

import copy
import itertools
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.optim.lr_scheduler import MultiplicativeLR, StepLR

from distaccum import Accumulator
from tests.support.programs import ROOT
from tests.support.ranks import may_have_children
from tests.support.windows import numbers_of, one_weight, run_window, warned

STEPS, UPDATES, EPOCHS = 2, 3, 2
BEFORE, IN_LOOP, EDGE = "before its loop", "in its loop", "after its loop"
STEPPED, EPOCH = "after step()", "after windows()"
PRE, POST, SCHEDULE = "before the optimizer's step", "after the optimizer's step", "in the schedule's step"
THERE, RELOADED, SAME = "there", "there, and loaded and taken again", "there, and loaded into the same job"
CAUGHT, AFTER, HELD = "in except", "after except", "after except, with the traceback held"
BREAK, BREAK_HELD = "after break", "after break, with the window held"
# The place where the job stops, and where its state is taken.
EVERYWHERE = [(place, THERE) for place in (BEFORE, IN_LOOP, EDGE, STEPPED, EPOCH, PRE, POST, SCHEDULE)]
EVERYWHERE += itertools.product((BEFORE, IN_LOOP, EDGE, STEPPED), (CAUGHT, AFTER, HELD, BREAK, BREAK_HELD))
EVERYWHERE += itertools.product((IN_LOOP, STEPPED, EPOCH), (RELOADED, SAME))
SOMEWHERE = [(EPOCH, THERE), (IN_LOOP, HELD), (EDGE, AFTER), (POST, THERE), (STEPPED, BREAK)]


# The loader of the page on resuming, which shuffles by a generator of its own.
PAGE: dict[str, Any] = {"torch": torch}
exec(re.search(r"(class Shuffled:.*?)```", (ROOT / "docs/faults.md").read_text(), re.DOTALL)[1], PAGE)
Shuffled = PAGE["Shuffled"]


def stateful(items: list[torch.Tensor], workers: int) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader
    from torchdata.stateful_dataloader.sampler import RandomSampler

    # A generator that sampler and loader share (shuffle=True) is not put back as it was, also without this library.
    order = RandomSampler(items, generator=torch.Generator().manual_seed(21))
    return StatefulDataLoader(items, 1, sampler=order, num_workers=workers, collate_fn=torch.cat)


class StoppedError(Exception):
    pass


class Job:
    """A model with dropout, trained over a loader, that stops at a place of an update."""

    def __init__(self, kind: str) -> None:
        torch.manual_seed(5)
        self.kind, self.rank = kind, dist.get_rank() if dist.is_initialized() else 0
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1)).double()
        self.model = DistributedDataParallel(self.net) if dist.is_initialized() else self.net
        self.stop: Any = None  # the place, the update, and where the state is taken
        self.saved: Any = None
        self.held: Any = None
        self.done = 0
        self.passes: list[int] = []  # over a loader, in windows
        self.has_left = False
        optimizer = SGD(self.net.parameters(), lr=0.1)
        schedules = [MultiplicativeLR(optimizer, lambda _: float(not self.visit(SCHEDULE))), StepLR(optimizer, 1, 0.5)]
        self.accumulator = Accumulator(self.model, optimizer, steps=STEPS, scheduler=schedules)
        self.parts = [self.net, optimizer, *schedules, self.accumulator]
        optimizer.register_step_pre_hook(lambda *_: self.visit(PRE) or None)
        optimizer.register_step_post_hook(lambda *_: self.visit(POST) or None)
        self.loader = self.make_loader()
        torch.manual_seed(7 + self.rank)

    def make_loader(self) -> Any:
        """Of five micro-batches on one rank, or six, whose end is not seen early; and of three on the other."""
        items = list(torch.randn(3 if self.rank else 5 + ("late" in self.kind), 2, 3).double())
        if "torchdata" in self.kind:
            return stateful(items, int(self.kind.split()[1]))
        return Shuffled(items, 1) if "own" in self.kind else items

    def rest(self) -> Any:
        """The loader or, if it has no position, what the updates so far have left of it."""
        if not isinstance(self.loader, list):
            return self.loader
        return (iter if "iterator" in self.kind else list)(self.loader[self.accumulator.index % UPDATES * STEPS :])

    def visit(self, place: str) -> bool:
        """Saves or raises if the job stops here; returns True if it shall break."""
        if self.stop is None or self.stop[0] != place or self.done < self.stop[1]:
            return False
        how, self.stop = self.stop[2], None
        if how in (THERE, RELOADED, SAME):
            self.save()
        self.has_left = how in (BREAK, BREAK_HELD)
        if not self.has_left:
            raise StoppedError
        return True

    def save(self) -> None:
        self.saved = copy.deepcopy([part.state_dict() for part in self.parts])

    def load(self, saved: Any, order: int = 1) -> None:
        """`order`: -1 loads the accumulator first."""
        for part, state in list(zip(self.parts, saved, strict=True))[::order]:
            part.load_state_dict(state)

    def go_through(self, loader: Any) -> None:
        self.passes.append(0)
        for window in self.accumulator.windows(loader, ahead="late" not in self.kind):
            self.passes[-1] += 1
            if self.stop is not None and self.stop[2] == BREAK_HELD:
                self.held = window
            if self.visit(BEFORE):
                return
            for i, x in enumerate(window):
                if i == 0 and self.visit(IN_LOOP):
                    return
                window.backward(self.model(x).square().mean())
            if self.visit(EDGE):
                return
            window.step()
            if self.visit(STEPPED):
                return
            self.done += 1

    def run(self) -> None:
        while self.accumulator.index < EPOCHS * UPDATES:
            self.go_through(self.rest())
            if self.has_left:
                return
            self.visit(EPOCH)

    def stopped(self, place: str, update: int, how: str) -> Any:
        """The saved weights and state."""
        self.stop = place, update, how
        try:
            self.run()
        except StoppedError as error:
            if how == CAUGHT:
                self.save()
            elif how == HELD:
                self.held = error
        if self.saved is None:
            self.save()
        return self.saved


def passes_after(place: str, update: int, index: int) -> list[int]:
    """The windows of each pass of a job that resumes at this index: first of the one that was stopped, even if none."""
    end = UPDATES * (update // UPDATES + 1)
    rest = [end - index] if place != EPOCH else []
    return [*rest, *[UPDATES] * ((UPDATES * EPOCHS - index - sum(rest)) // UPDATES)]


@warned()  # of torchdata, and that a loader was read to its end
def wrong(kind: str, cells: Any, updates: Any) -> list[Any]:
    """The places and updates from which a job that resumes ends with other weights."""
    if "torchdata" in kind and dist.is_initialized():
        may_have_children()
    whole = Job(kind)
    tells_state = not isinstance(whole.loader, list)
    whole.run()
    bad = []
    for (place, how), update in itertools.product(cells, updates):
        job = Job(kind)
        saved = job.stopped(place, update, how)
        if how != SAME:
            job = Job(kind)
        torch.manual_seed(99)
        job.load(saved, (1, -1)[update % 2])
        if how == RELOADED:
            job.save()
            job, again = Job(kind), job.saved
            job.load(again)
        index, job.passes = job.accumulator.index, []
        job.run()
        if not all(map(torch.equal, job.net.parameters(), whole.net.parameters())):
            bad.append((place, how, update))
        if how == THERE and tells_state and job.passes != passes_after(place, update, index):
            bad.append((place, how, update, job.passes))
    return bad


# By kind of loader: the cells and the updates in which the job stops, on one process and on two uneven ranks.
CELLS = {
    "own": (EVERYWHERE, (1, 2, 3), SOMEWHERE, (1, 3)),
    "plain": (EVERYWHERE, (1, 2), SOMEWHERE[1:2], (1,)),
    "iterator": (SOMEWHERE, (1, 2), [], ()),
    "torchdata 0": (EVERYWHERE, (1, 2), SOMEWHERE[:1], (1,)),
    "torchdata 0 late": (EVERYWHERE[:5], (1, 2), [], ()),
    "torchdata 1": (SOMEWHERE[:2], (3,), [], ()),
    "torchdata 2": (SOMEWHERE[1:2], (1,), [], ()),
}


@pytest.mark.parametrize("kind", CELLS)
def test_state_at_any_place_resumes_to_the_same_bits(ranks, kind):
    if "torchdata" in kind:
        pytest.importorskip("torchdata")
    alone, updates, of_ranks, their_updates = CELLS[kind]
    assert wrong(kind, alone, updates) == []
    assert not of_ranks or ranks(2).run(wrong, kind, of_ranks, their_updates) == [[], []]


def test_window_that_was_left_does_not_keep_another_accumulator_from_its_step():
    model = nn.Linear(1, 1, bias=False)
    optimizer = SGD(model.parameters(), lr=0.1)
    first, second = (Accumulator(model, optimizer, steps=2) for _ in range(2))
    for left in first.windows([torch.ones(1, 1)] * 2):
        run_window(left, model)
        break
    with pytest.warns(UserWarning, match="gradients that stood before the window"):
        run_window(window := second.window([torch.ones(1, 1)] * 2), model)
    assert window.step().stepped and "complete" in repr(left)


def test_state_in_a_hook_has_the_scale_of_the_next_update():
    scaler = GradScaler("cpu", init_scale=8.0, growth_interval=1)
    model = nn.Linear(1, 1, bias=False)
    optimizer = SGD(model.parameters(), lr=0.1)
    accumulator = Accumulator(model, optimizer, scaler=scaler)
    states: list[Any] = []
    optimizer.register_step_post_hook(lambda *_: states.append(accumulator.state_dict()))
    run_window(accumulator.window([torch.ones(1, 1)]), model).step()
    assert states[0]["scaler"] == accumulator.state_dict()["scaler"] == {**states[0]["scaler"], "scale": 16.0}


@pytest.mark.parametrize("what", ["the disk is gone", "count gave -1", r"steps\(1\)=0"])
def test_error_in_planning_is_raised_where_its_window_is_requested_and_a_state_begins_with_that_window(what):
    class Broken(Shuffled):
        def __iter__(self) -> Iterator[torch.Tensor]:
            for number, item in enumerate(super().__iter__()):
                if "disk" in what and number == 3:
                    raise OSError(what)
                yield item

    items = [torch.full((1, 1), float(i)) for i in range(6)]
    calls = itertools.count(1)
    count = (lambda _: -1 if next(calls) == 4 else 1) if "count" in what else (lambda _: 1)
    steps = (lambda index: 2 - 2 * index) if "steps" in what else 2
    model, accumulator = one_weight(count=count, steps=steps)
    windows = accumulator.windows(Broken(items, 1))
    seen = numbers_of(next(windows), model)  # all that follows was drawn in it
    with pytest.raises((OSError, ValueError), match=what):
        next(windows)
    assert accumulator.index == 1
    state = accumulator.state_dict()
    model, accumulator = one_weight(steps=2)
    accumulator.load_state_dict(state)
    for window in accumulator.windows(Shuffled(items, 1)):
        seen += numbers_of(window, model)
    assert seen == torch.randperm(6, generator=torch.Generator().manual_seed(1)).tolist()
