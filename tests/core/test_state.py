"""state_dict() anywhere: a job that is killed begins its window again, bit for bit, on each engine."""

import copy
import io
import random
import tempfile
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam

from distaccum import Accumulator, DistaccumError
from distaccum.extensions import NoiseScale
from tests.core.test_places import Shuffled
from tests.support.engines import KINDS
from tests.support.problems import make_net_without_router, micro_batches_of, trunk
from tests.support.ranks import on_ranks
from tests.support.windows import accumulating, one_weight, run_window, warned


class Noisy(nn.Module):
    """Draws from each generator of the host in its forward."""

    def __init__(self, rate: float = 0.3) -> None:
        super().__init__()
        net = make_net_without_router()
        self.body, self.head, self.rate = net.body, net.head, rate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        drawn = random.random() + numpy.random.rand() if self.rate else 1.0
        return self.head(nn.functional.dropout(self.body(x), self.rate)) * drawn


HSDP = "HSDP, 2 replicas of 1 shard"
CASES = [(name, "last") for name in ("plain", "DDP", "FSDP2", "FSDP1", "ZeRO 2")]
CASES += [("DDP", "every"), ("FSDP2", "every"), ("FSDP2", "gathered"), (HSDP, "replicas")]


def make(name: str = "plain", sync: str = "last", rate: float = 0.3, **options: Any) -> Any:
    model, optimizer = KINDS[name].wrap(Noisy(rate).to(KINDS[name].dtype), 0.1)
    if not name.startswith("ZeRO"):
        optimizer = Adam(model.parameters(), lr=0.01)
    return model, optimizer, Accumulator(model, optimizer, **{"steps": 4, "sync": sync, **options})


def micro_batches(first_update: int, rank: int) -> list[Any]:
    layout = [[2, 3, 1, 2]] * 2
    return [batch for update in range(first_update, 3) for batch in micro_batches_of(layout, update, rank)]


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(batch["x"].to(next(model.parameters()).dtype)).square().mean()


# Where a job may be killed: (update, micro-batch, what it did last). Edges are of the loop, and of the window.
DRAWN, FORWARD, BACKWARD, LOOP, STEP = "drawn", "forward", "backward", "loop", "step"
POINTS = [(0, 0, DRAWN), (0, 2, FORWARD), (1, 0, BACKWARD), (1, 3, BACKWARD), (2, 2, DRAWN), (2, 3, LOOP), (1, 3, STEP)]


def run(made: Any, loader: Any, points: Any = ()) -> tuple[list[float], dict[Any, Any]]:
    """The losses of the updates that are left, and what was saved at these points."""
    model, _, accumulator = made
    losses, saved = [], {}

    def pass_by(*point: Any) -> None:
        if point in points:
            saved[point] = save(made)

    for window in accumulator.windows(loader):
        for i, batch in enumerate(window):
            pass_by(window.index, i, DRAWN)
            loss = loss_of(model, batch)
            pass_by(window.index, i, FORWARD)
            window.backward(loss)
            pass_by(window.index, i, BACKWARD)
        pass_by(window.index, i, LOOP)
        losses.append(window.step().loss)
        pass_by(window.index, i, STEP)
    return losses, saved


def save(made: Any) -> Any:
    """This rank's weights and states, or DeepSpeed's folder."""
    model, optimizer, accumulator = made
    if hasattr(model, "save_checkpoint"):
        folder = [tempfile.mkdtemp()]
        dist.broadcast_object_list(folder)
        model.save_checkpoint(folder[0], tag="kept")
        return folder[0], copy.deepcopy(accumulator.state_dict())
    return copy.deepcopy((local(model), optimizer.state_dict(), accumulator.state_dict()))


def load(made: Any, saved: Any) -> int:
    """The index of the update that comes next."""
    model, optimizer, accumulator = made
    if hasattr(model, "load_checkpoint"):
        model.load_checkpoint(saved[0], tag="kept")
        accumulator.load_state_dict(saved[1])
    else:
        values, of_optimizer, state = saved
        for mine, value in zip(local(model), values, strict=True):
            mine.copy_(value)
        optimizer.load_state_dict(copy.deepcopy(of_optimizer))  # ranks share the memory of what they are sent
        accumulator.load_state_dict(state)
    return int(accumulator.index)


def local(model: nn.Module) -> list[torch.Tensor]:
    """From state_dict(), which gives shards even while parameters are gathered; FSDP1 shows no other tensors."""
    if type(model).__name__ == "FullyShardedDataParallel":
        return [p.detach() for p in model.parameters()]
    every = model.module.state_dict() if hasattr(model, "save_checkpoint") else model.state_dict()
    return [(p.to_local() if hasattr(p, "to_local") else p).detach() for p in every.values()]


def seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    numpy.random.seed(number)


@pytest.mark.parametrize(("name", "sync"), CASES)
@on_ranks(lambda name, **_: KINDS[name].world)
def test_job_that_is_killed_anywhere_ends_with_the_same_bits(name, sync):
    """Whatever its loader: test_places.py has kinds of these, and more places."""
    rank, ends = dist.get_rank(), []
    for watched in ((), POINTS):
        seed(11 + rank)
        made = make(name, sync)
        seed(11 + rank)
        ends.append((made, *run(made, micro_batches(0, rank), watched)))
    (whole, expected, _), (_, losses, saved) = ends
    assert losses == expected and saved.keys() == set(POINTS)
    for point, state in saved.items():
        again = make(name, sync)
        index = load(again, state)
        seed(99)
        losses, _ = run(again, micro_batches(index, rank))
        assert index == point[0] + (point[2] == STEP), point
        assert losses == expected[index:] and all(map(torch.equal, local(whole[0]), local(again[0]))), point


def on_others(saved: Any) -> Any:
    """A run on this number of ranks, from a state of another: the weights, states, and the warnings."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    made = make("DDP" if world > 1 else "plain", rate=0.0)
    with warned() as texts:
        index = load(made, saved) if saved is not None else 0
    kept = []
    for update in range(index, 3):
        every = [batch for r in range(2) for batch in micro_batches(update, r)[:4]]
        window = made[2].window(every[rank::world])
        for i, batch in enumerate(window):
            window.backward(loss_of(made[0], batch))
            if saved is None and (window.index, i) == (1, 2):
                kept.append(save(made))
        window.step()
    return local(made[0]), kept, texts


def test_state_in_mid_window_loads_on_another_number_of_ranks(ranks):
    whole, (saved,), _ = on_others(None)
    found = {"1 ranks and this job has 2": ranks(2).run(on_others, saved)[0]}
    found["2 ranks and this job has 1"] = on_others(ranks(2).run(on_others, None)[0][1][0])
    for sizes, (values, _, (message,)) in found.items():
        assert max(float((a - b).abs().max()) for a, b in zip(values, whole, strict=True)) <= 1e-12
        assert f"the state is of {sizes}: the loader's position and the random numbers are left out" in message


def test_state_without_the_place_of_this_ranks_loader_is_refused():
    _, accumulator = one_weight(steps=2)
    next(accumulator.windows(ones()))
    state = accumulator.state_dict()
    with pytest.raises(DistaccumError, match="taken on another rank and has no loader's position for rank 0; save"):
        accumulator.load_state_dict({**{k: v for k, v in state.items() if k != "rank 0"}, "rank 1": state["rank 0"]})


def test_state_is_loaded_without_running_code():
    saved = run(make(), micro_batches(0, 0), [(1, 1, BACKWARD)])[1][1, 1, BACKWARD]
    for state in (saved[2], make()[2].state_dict()):
        box = io.BytesIO()
        torch.save(state, box)
        box.seek(0)
        assert torch.load(box, weights_only=True)["rank 0"] == state["rank 0"]


FIT = {"size": 4, "good": 2, "too_large": 8, "since": 0, "wait": 16}  # 8 samples ran out of memory


def measured() -> Accumulator:
    options = {"extensions": [NoiseScale()], "micro_batch_size": "auto", "scaler": GradScaler("cpu", init_scale=8.0)}
    return accumulating(trunk(), 0.01, **options)[1]


def a_state(**change: Any) -> dict[str, Any]:
    state = {**measured().state_dict(), "fit": FIT, "index": 7, "skipped": 3, "noise": [1.0, 2.0, 3.0], **change}
    return {name: value for name, value in state.items() if value is not KeyError}


BROKEN = [
    ({"skipped": KeyError}, "has no skipped; give what"),
    ({"index": float("nan")}, "index=nan, expected a whole number of at least 0"),
    ({"fit": None}, "fit=None, expected a dict; give"),
    ({"fit": {**FIT, "size": 0}}, "size=0, expected a whole number of at least 1"),
    ({"noise": [1.0, 2.0]}, "expected three numbers"),
    ({"scaler": {"scale": 8.0}}, "scaler=.*, expected scale, growth_factor, backoff_factor"),
    ({"rank 0": b"garbage"}, "cannot be read .UnpicklingError.: it is cut off, or of another"),
]


@pytest.mark.parametrize(("change", "message"), BROKEN, ids=str)
def test_broken_state_is_refused_and_nothing_is_loaded(change, message):
    accumulator = measured()
    before = accumulator.state_dict()
    with pytest.raises((TypeError, ValueError), match=message) as caught:
        accumulator.load_state_dict(a_state(**change))
    assert len(str(caught.value)) < 300 and "weights_only" not in str(caught.value)
    assert accumulator.state_dict() == before


def test_state_is_not_loaded_in_a_loop_and_is_refused_where_the_caller_may_have_stepped():
    model = trunk()
    accumulator = Accumulator(model)
    window = accumulator.window(micro_batches(2, 0))
    for batch in window:
        window.backward(loss_of(model, batch))
        with pytest.raises(DistaccumError, match="while a window is in its loop"):
            accumulator.load_state_dict(accumulator.state_dict())
    with pytest.raises(DistaccumError, match=r"optimizer=None, where the weights may have been stepped already"):
        accumulator.state_dict()
    window.step()
    assert accumulator.state_dict()["index"] == 1


def ones() -> Any:
    return Shuffled([torch.ones(1, 1)] * 4, 1)


def test_loader_state_that_cannot_be_loaded_is_refused_on_saving():
    _, accumulator = one_weight(steps=2)
    loader = ones()
    loader.state_dict = lambda: {"held": numpy.arange(3)}
    next(accumulator.windows(loader))
    message = r"the loader's state_dict\(\) holds numpy\.\S+, and a state is loaded without.*tolist\(\)"
    with pytest.raises(DistaccumError, match=message):
        accumulator.state_dict()


@pytest.mark.parametrize("kind", [numpy.random.MT19937, numpy.random.PCG64])
def test_state_follows_numpys_generator_of_any_kind(kind):
    before = numpy.random.get_bit_generator()
    numpy.random.set_bit_generator(kind(3))
    try:
        numpy.random.randn()  # leaves a second normal number ready, which is part of its state
        drawn = []
        _, accumulator = one_weight()
        for _ in range(2):
            window = accumulator.window([torch.ones(1, 1)])
            next(iter(window))
            drawn.append(numpy.random.randn())
            state = accumulator.state_dict()
            window.discard()
            accumulator.load_state_dict(state)
        assert drawn[0] == drawn[1]
    finally:
        numpy.random.set_bit_generator(before)


def test_loader_that_cannot_take_the_state_raises_a_warning():
    _, accumulator = one_weight(steps=2)
    next(accumulator.windows(ones()))
    _, resumed = one_weight(steps=2)
    resumed.load_state_dict(accumulator.state_dict())
    with pytest.warns(UserWarning, match="which a list cannot load"):
        next(resumed.windows([torch.ones(1, 1)]))


@on_ranks(2)
def test_distributed_checkpoint_takes_an_accumulator():
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    model = DistributedDataParallel(nn.Linear(3, 1))
    first, second = (Accumulator(model, SGD(model.parameters(), lr=0.1), steps=2) for _ in range(2))
    for window in first.windows(torch.randn(8, 3).split(2)):
        run_window(window, model).step()
    dcp.save({"accumulator": first}, checkpoint_id=folder[0])
    dcp.load({"accumulator": second}, checkpoint_id=folder[0])
    assert second.index == 2
