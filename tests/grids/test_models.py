"""Models of several parts, adapted, tied, sparse or complex; each is compared with the big batch."""

import copy
import math
from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint

from distaccum import Accumulator
from tests.support.engines import wrappers
from tests.support.oracle import everything, own, step_off
from tests.support.problems import Batch
from tests.support.ranks import on_ranks
from tests.support.windows import refused, set_weights, weights

KINDS = ["plain", "DDP", "FSDP2", "FSDP2, parts"]
BOUNDS = {kind: 1e-12 if kind in ("plain", "DDP") else 1e-10 for kind in KINDS}
# Sizes of micro-batches by rank; a plain module gets those of both. In the last window one rank has none.
LAYOUTS = [[[3, 1], [2, 5, 1]], [[1, 4], [2]], [[2], [1, 3, 1]], [[5, 1, 2], []]]


def linear(inputs: int, outputs: int) -> nn.Module:
    return nn.Linear(inputs, outputs, dtype=torch.float64)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = linear(5, 6), linear(6, 6)

    def forward(self, batch: Batch) -> Tensor:
        return self.two(self.one(batch["x"]).tanh())


class Adapted(nn.Module):
    """A frozen layer, and a trained adapter beside it."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = linear(base.in_features, 2), linear(2, base.out_features)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class Adapters(nn.Module):
    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.body = nn.ModuleList([nn.Sequential(Adapted(linear(5, 5)), nn.Tanh()) for _ in range(3)])
        self.checkpointed = checkpointed

    def forward(self, batch: Batch) -> Tensor:
        x = batch["x"]
        for block in self.body:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return x


def ids(batch: Batch) -> Tensor:
    return (9 * batch["x"][..., 0]).long() % 12


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.body, self.head = nn.Embedding(12, 6, dtype=torch.float64), linear(6, 6), linear(6, 12)
        self.head.weight = self.table.weight

    def forward(self, batch: Batch) -> Tensor:
        return self.head(self.body(self.table(ids(batch))).tanh())


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.body = nn.Embedding(12, 6, sparse=True, dtype=torch.float64), linear(6, 3)

    def forward(self, batch: Batch) -> Tensor:
        return self.body(self.table(ids(batch)))


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = linear(5, 4)
        self.wave = nn.Parameter(torch.randn(4, 3, dtype=torch.complex128))

    def forward(self, batch: Batch) -> Tensor:
        return (self.body(batch["x"]).to(torch.complex128) @ self.wave).abs()


def loss_of(models: Sequence[nn.Module], batch: Any) -> Tensor:
    """Of models that run one after the other."""
    for model in models:
        batch = model(batch)
    return batch.square().mean()


PROBLEMS: dict[str, Any] = {
    "two models": lambda: [Encoder(), linear(6, 2)],
    "adapters": lambda: [Adapters()],
    "adapters, checkpointed": lambda: [Adapters(checkpointed=True)],
    "tied": lambda: [Tied()],
    "sparse": lambda: [Sparse()],
    "complex": lambda: [Complex()],
}
OPTIONS: dict[str, Any] = {
    "": dict,
    "every": lambda: {"sync": "every"},
    "clipped": lambda: {"max_norm": 0.05},
    "scaled and clipped": lambda: {"scaler": GradScaler("cpu", init_scale=8.0), "max_norm": 0.05},
}


def wrap(kind: str, model: Any) -> nn.Module:
    if kind == "plain":
        return model
    if kind == "DDP":
        return DistributedDataParallel(model)
    parts = [[model.table, model.head], model.body] if isinstance(model, Tied) else model.children()
    flat = [each for part in parts for each in (part if isinstance(part, nn.ModuleList) else [part])]
    return wrappers.fully_sharded(model, flat if kind == "FSDP2, parts" else [])


def layouts(kind: str) -> Any:
    return [[[*one, *other]] for one, other in LAYOUTS] if kind == "plain" else LAYOUTS


def off(name: str, kind: str, option: str) -> float:
    """The largest error of the windows' steps, norms and losses."""
    torch.manual_seed(3)
    plain = nn.ModuleList(PROBLEMS[name]())
    models = nn.ModuleList(wrap(kind, copy.deepcopy(model)) for model in plain)
    optimizers = [SGD([p for p in model.parameters() if p.requires_grad], lr=1.0) for model in models]
    accumulator = Accumulator([*models], optimizers, **OPTIONS[option]())
    clip = 0.05 if "clipped" in option else math.inf

    def between() -> None:
        assert name != "sparse" or next(models.parameters()).grad.is_sparse  # as some optimizers need it

    wrongs: list[float] = []
    for index, layout in enumerate(layouts(kind)):
        window, whole = accumulator.window(own(layout, index)), everything(layout, index)
        wrongs += step_off(models, window, plain, whole, loss_of, clip=clip, between=between)
    return max(wrongs)


def world_of(kind: str, **_: Any) -> int:
    return 1 if kind == "plain" else 2


EXCEPTIONS = {  # tested below, or limits, or contained in another
    *((name, kind, option) for name in PROBLEMS for kind in KINDS[2:] for option in OPTIONS if "sparse" in name),
    *(("complex", "FSDP2", option) for option in OPTIONS),
    *(("complex", kind, "scaled and clipped") for kind in KINDS),
    *((name, kind, "clipped") for name in PROBLEMS for kind in KINDS if name != "complex"),
}
GRID = [(n, k, o) for n in PROBLEMS for k in KINDS for o in OPTIONS if (n, k, o) not in EXCEPTIONS]


@pytest.mark.parametrize(("name", "kind", "option"), GRID, ids=["-".join(filter(None, case)) for case in GRID])
@on_ranks(world_of)
def test_training_equals_training_on_big_batches(name, kind, option):
    assert off(name, kind, option) <= BOUNDS[kind]


@pytest.mark.parametrize("kind", KINDS[2:])
@on_ranks(2)
def test_sparse_gradients_on_shards_are_refused_by_name(kind):
    said = refused(off, "sparse", kind, "")
    assert said.startswith("ValueError: ") and "table" in said and "sparse" in said


def criticise(critic: nn.Module, generator: nn.Module, batch: Batch) -> Tensor:
    with torch.no_grad():
        fake = generator(batch)
    real = torch.cat([batch["x"], batch["x"][..., :1]], -1)
    return critic(fake).square().mean() + (critic(real) - 1).square().mean()


def generate(critic: nn.Module, generator: nn.Module, batch: Batch) -> Tensor:
    return (critic(generator(batch)) - 1).square().mean()


def adversaries_off(kind: str, how: str) -> float:
    """Alternates windows of a critic and of a generator, each with an accumulator."""
    torch.manual_seed(3)
    plain = [Encoder(), nn.Sequential(linear(6, 4), nn.Tanh(), linear(4, 1))]
    generator, critic = models = [wrap(kind, model) for model in copy.deepcopy(plain)]
    optimizers = [SGD(model.parameters(), lr=0.1) for model in models]
    generators = models if how == "in both windows" else generator
    accumulators = [Accumulator(generators, optimizers[0], max_norm=1e9), Accumulator(critic, optimizers[1])]
    wrongs: list[float] = []
    for index, layout in enumerate(layouts(kind)):
        for turn, judged in ((1, criticise), (0, generate)):
            critic.requires_grad_(turn == 1 or "frozen" not in how)
            judge = critic.module if turn == 0 and "unwrapped" in how else critic
            window = accumulators[turn].window(own(layout, index))
            set_weights(plain[1 - turn], weights(models[1 - turn]))

            def run(batch: Batch, window: Any = window, judged: Any = judged, judge: Any = judge) -> None:
                window.backward(judged(judge, generator, batch))

            def of_all(_: nn.Module, batch: Batch, judged: Any = judged) -> Tensor:
                return judged(plain[1], plain[0], batch)

            wrongs += step_off(models[turn], window, plain[turn], everything(layout, index), of_all, run, lr=0.1)
            if turn == 0 and how == "cleared":
                optimizers[1].zero_grad()
    return max(wrongs)


# Under DDP a critic that only its own accumulator knows reduces in each backward of the generator's windows. Ranks must
# then have the same number of micro-batches, or the generator's accumulator must get both models.
ADVERSARIES = [*product(KINDS, ("in both windows", "frozen", "cleared")), ("DDP", "frozen and unwrapped")]
ADVERSARIES.remove(("DDP", "cleared"))


@pytest.mark.parametrize(("kind", "how"), ADVERSARIES, ids=["-".join(case) for case in ADVERSARIES])
@on_ranks(world_of)
def test_critic_and_generator_in_turn_are_exact(kind, how):
    assert adversaries_off(kind, how) <= BOUNDS[kind]


@on_ranks(1)
def test_gradients_left_in_a_critic_are_cleared_with_a_warning():
    with pytest.warns(UserWarning, match="gradients that stood before the window were cleared"):
        assert adversaries_off("plain", "nothing") <= 1e-12
