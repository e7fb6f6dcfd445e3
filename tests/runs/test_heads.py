"""heads(): the trunk runs once, and the heads run their backwards one at a time."""

import weakref
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler

from distaccum import Accumulator
from tests.support.counting import Counting
from tests.support.engines import Run, wrapped, wrappers
from tests.support.oracle import step_off
from tests.support.problems import join, make_batch
from tests.support.ranks import on_ranks
from tests.support.windows import accumulating, error, freed_by_counts, gradient, refused

NAMES = ("first", "second", "third")


class Tasks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.trunk = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 8))
        self.heads = nn.ModuleDict({name: nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 2)) for name in NAMES})
        self.double()

    def forward(self, x: Tensor, head: str | None = None) -> Tensor:
        return self.trunk(x) if head is None else self.heads[head](x)


def loss_of(outputs: Tensor, place: int) -> Tensor:
    return (outputs - place).square().mean()


def summed(model: nn.Module, x: Tensor) -> Tensor:
    features = model(x)
    return sum(loss_of(model(features, name), i) for i, name in enumerate(NAMES))


def run_heads(window: Any, model: nn.Module, batch: Any) -> None:
    for name, features in window.heads(model(batch["x"]), NAMES):
        window.backward(loss_of(model(features, name), NAMES.index(name)))


def off(model: nn.Module, window: Any, batches: list[Any], **looks: Any) -> float:
    """The error of the window's step with these batches of all ranks."""
    run = partial(run_heads, window, model)
    return max(step_off(model, window, Tasks(), join(batches)["x"], summed, run, **looks))


@pytest.mark.parametrize("scaled", [False, True])
def test_gradient_equals_that_of_the_summed_loss(scaled):
    model, batches = Tasks(), [make_batch(n, seed=n) for n in (3, 1, 4)]
    scaler = GradScaler("cpu", init_scale=64.0) if scaled else None
    _, accumulator = accumulating(model, 1.0, steps=3, scaler=scaler, on_nonfinite="ignore")
    assert max(off(model, window, batches) for window in accumulator.windows(batches)) <= 1e-12


def test_trunk_runs_once_and_graphs_of_heads_live_one_at_a_time():
    model, alive, calls = Tasks(), [], []
    model.trunk.register_forward_hook(lambda *_: calls.append("forward"))
    model.trunk[0].weight.register_hook(lambda _: calls.append("backward"))
    window = Accumulator(model).window([make_batch(3, seed=1)])
    with freed_by_counts():
        for batch in window:
            for name, features in window.heads(model(batch["x"]), NAMES):
                assert all(one() is None for one in alive)
                hidden = model.heads[name][0](features)
                alive.append(weakref.ref(hidden))
                loss = loss_of(model.heads[name][1:](hidden), 0)
                del hidden
                window.backward(loss)
                del loss
    assert calls == ["forward", "backward"]
    window.step()


def test_head_without_a_count_is_left_out():
    model, batches = Tasks(), [make_batch(n, seed=n) for n in (2, 3)]
    counts = {name: (lambda batch, i=i: len(batch["x"]) if len(batch["x"]) > i else 0) for i, name in enumerate(NAMES)}
    accumulator = Accumulator(model, count=counts)
    window = accumulator.window(batches)
    for batch in window:
        for name, features in window.heads(model(batch["x"]), NAMES):
            window.backward(**{name: loss_of(model(features, name), NAMES.index(name))})
    exact = Tasks()
    for i, name in enumerate(NAMES):
        counted = join([batch for batch in batches if len(batch["x"]) > i])
        loss_of(exact(exact(counted["x"]), name), i).backward()
    assert error(gradient(model), gradient(exact)) <= 1e-12
    window.step()


LAYOUTS = [[(3, 2), (4, 1)], [(1, 2, 3), (2,)], [(3,), (2, 2)], [(2, 1), ()]]


GRID = [("DDP", "every"), *((name, "last") for name in ("DDP", "DDP views", "DDP find"))]
GRID += [("FSDP2", sync) for sync in ("last", "gathered", "every")]


@pytest.mark.parametrize(("name", "sync"), GRID)
@on_ranks(2)
def test_gradient_is_exact_on_uneven_ranks(name, sync):
    model: Any = Tasks()
    if name.startswith("DDP"):
        model, _, _ = wrapped(name, model)
    else:
        wrappers.fully_sharded(model, [model.trunk, *model.heads.values()])
    _, accumulator = accumulating(model, 1.0, sync=sync)
    wrongs, reductions = [], []
    for index, layout in enumerate(LAYOUTS if name != "FSDP2" else LAYOUTS[:3]):
        batches = [[make_batch(n, seed=100 * index + 10 * r + i) for i, n in enumerate(layout[r])] for r in range(2)]
        window = accumulator.window(batches[dist.get_rank()])
        with Counting() as count:
            wrongs.append(off(model, window, batches[0] + batches[1]))
        reductions.append(sum(kind == "allreduce_" and size > 40 for kind, size in count.take()))
    assert max(wrongs) <= (1e-10 if name == "FSDP2" else 1e-12), wrongs
    if name.startswith("DDP") and sync == "last":
        assert reductions == [1] * len(LAYOUTS)


@pytest.mark.parametrize("name", ["ZeRO 1", "FSDP1, NO_SHARD"])
@on_ranks(2)
def test_heads_are_refused_where_a_trunk_cannot_go_on_from_them(name):
    """Without the refusal FSDP1's step was off, and a module lost its parameters."""
    run = Run(name)
    window = run.accumulator.window(run.micro_batches([[2]] * 2, 0))
    said = refused(next, window.heads(run.model(next(iter(window))["x"]), [1, 2]))
    assert "whose backward follows no other; use window.parts(heads)" in said
