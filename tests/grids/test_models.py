"""Models of several parts, adapted, tied, sparse or complex; each is compared with the big batch."""

import copy
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer, SparseAdam
from torch.utils.checkpoint import checkpoint

from distaccum import Accumulator
from tests.support.problems import Batch, join, make_batch
from tests.support.ranks import on_ranks
from tests.support.windows import error, flat, refused, run_window

KINDS = ["plain", "DDP", "FSDP2", "FSDP2, parts"]
BOUNDS = {kind: 1e-12 if kind in ("plain", "DDP") else 1e-10 for kind in KINDS}
# Sizes of micro-batches by rank; a plain module gets those of both. In the last window one rank has none.
LAYOUTS = [[[3, 1], [2, 5, 1]], [[1, 4], [2]], [[2], [1, 3, 1]], [[5, 1, 2], []]]


def batches_of(index: int, rank: int) -> list[Batch]:
    """Each sample carries the index of its window."""
    made = [make_batch(size, seed=100 * index + 10 * rank + i) for i, size in enumerate(LAYOUTS[index][rank])]
    return [{**batch, "window": torch.full((len(batch["x"]),), index)} for batch in made]


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
    return batch["labels"].clamp(min=-1) + 1 + batch["window"].unsqueeze(1)


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


def one(models: Sequence[nn.Module], batch: Batch) -> Tensor:
    return models[0](batch).square().mean()


def in_turn(models: Sequence[nn.Module], batch: Batch) -> Tensor:
    return models[1](models[0](batch)).square().mean()


def trained(models: Iterable[nn.Module]) -> list[nn.Parameter]:
    return [p for model in models for p in model.parameters() if p.requires_grad]


def sgd(models: Iterable[nn.Module]) -> list[Optimizer]:
    return [SGD(trained([model]), lr=0.1, momentum=0.9, weight_decay=0.01) for model in models]


def adamw(models: Iterable[nn.Module]) -> list[Optimizer]:
    return [AdamW(trained([model]), lr=0.01) for model in models]


def sparse_adam(models: Iterable[nn.Module]) -> list[Optimizer]:
    table, *others = trained(models)
    return [SparseAdam([table], lr=0.01), AdamW(others, lr=0.01)]


# Models, loss and optimizers.
PROBLEMS: dict[str, Any] = {
    "two models": (lambda: [Encoder(), linear(6, 2)], in_turn, sgd),
    "adapters": (lambda: [Adapters()], one, adamw),
    "adapters, checkpointed": (lambda: [Adapters(checkpointed=True)], one, adamw),
    "tied": (lambda: [Tied()], one, sgd),
    "sparse": (lambda: [Sparse()], one, lambda models: [SGD(trained(models), lr=0.1)]),
    "sparse, SparseAdam": (lambda: [Sparse()], one, sparse_adam),
    "complex": (lambda: [Complex()], one, sgd),
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
    from torch.distributed.fsdp import fully_shard

    if kind == "FSDP2, parts":
        tied = [[model.table, model.head], model.body] if isinstance(model, Tied) else model.children()
        for part in tied:
            for each in part if isinstance(part, nn.ModuleList) else [part]:
                fully_shard(each)
    return fully_shard(model)


def gradient(models: Iterable[nn.Module]) -> Tensor:
    return flat([torch.zeros_like(p) if p.grad is None else p.grad for p in trained(models)])


def each_window(kind: str) -> Any:
    """This rank's micro-batches of each window, and those of all ranks."""
    for index in range(len(LAYOUTS)):
        by_rank = [batches_of(index, rank) for rank in range(2)]
        everything = by_rank[0] + by_rank[1]
        yield everything if kind == "plain" else by_rank[dist.get_rank()], join(everything)


def follow(name: str, kind: str, option: str) -> float:
    """The largest difference between windows on this rank and the same updates by big batches on a copy."""
    make, its_loss, optimizers_of = PROBLEMS[name]
    torch.manual_seed(3)
    copies = make()
    models = [wrap(kind, model) for model in copy.deepcopy(copies)]
    by_hand = optimizers_of(copies)
    options = OPTIONS[option]()
    accumulator = Accumulator(models, optimizers_of(models), **options)
    wrongs = []
    for mine, everything in each_window(kind):
        window = run_window(accumulator.window(mine), models, its_loss)
        loss = its_loss(copies, everything)
        loss.backward()
        exact, scale = gradient(copies), 8.0 if "scaler" in options else 1.0
        wrongs.append(error(gradient(models), scale * exact))
        update = window.step()
        wrongs.append(abs(update.loss - loss.item()) / loss.item())
        if "max_norm" in options:
            wrongs.append(abs(update.grad_norm - float(exact.norm())) / float(exact.norm()))
            for p in trained(copies):
                if p.grad is not None:
                    p.grad.mul_(min(1.0, 0.05 / (float(exact.norm()) + 1e-6)))  # as torch clips
        for optimizer in by_hand:
            optimizer.step()
            optimizer.zero_grad()
        wrongs.append(error(flat(trained(models)), flat(trained(copies))))
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
    assert follow(name, kind, option) <= BOUNDS[kind]


@pytest.mark.parametrize("kind", KINDS[2:])
@on_ranks(2)
def test_sparse_gradients_on_shards_are_refused_by_name(kind):
    said = refused(follow, "sparse", kind, "")
    assert said.startswith("ValueError: ") and "table" in said and "sparse" in said


def criticise(critic: nn.Module, generator: nn.Module, batch: Batch) -> Tensor:
    with torch.no_grad():
        fake = generator(batch)
    real = torch.cat([batch["x"], batch["x"][..., :1]], -1)
    return critic(fake).square().mean() + (critic(real) - 1).square().mean()


def generate(critic: nn.Module, generator: nn.Module, batch: Batch) -> Tensor:
    return (critic(generator(batch)) - 1).square().mean()


def adversaries(kind: str, how: str) -> float:
    """Alternates windows of a critic and of a generator, each with an accumulator."""
    torch.manual_seed(3)
    copies = [Encoder(), nn.Sequential(linear(6, 4), nn.Tanh(), linear(4, 1))]
    generator, critic = models = [wrap(kind, model) for model in copy.deepcopy(copies)]
    optimizers, by_hand = sgd(models), sgd(copies)
    generators = models if how == "in both windows" else generator
    accumulators = [Accumulator(generators, optimizers[0], max_norm=1e9), Accumulator(critic, optimizers[1])]
    wrongs = []
    for mine, everything in each_window(kind):
        for turn, judged in ((1, criticise), (0, generate)):
            judge = critic
            if turn == 0 and "frozen" in how:
                critic.requires_grad_(False)
                judge = critic.module if "unwrapped" in how else critic
            window = run_window(accumulators[turn].window(mine), generator, partial(judged, judge))
            for copied in copies:
                copied.zero_grad()
            judged(copies[1], copies[0], everything).backward()
            exact = gradient([copies[turn]])
            wrongs.append(error(gradient([models[turn]]), exact))
            update = window.step()
            if turn == 0:
                wrongs.append(abs(update.grad_norm - float(exact.norm())) / float(exact.norm()))
            by_hand[turn].step()
            wrongs.append(error(flat(trained([models[turn]])), flat(trained([copies[turn]]))))
            critic.requires_grad_(True)
            if turn == 0 and how == "cleared":
                optimizers[1].zero_grad()
    return max(wrongs)


# Under DDP a critic that only its own accumulator knows reduces in each backward of the generator's windows. Ranks must
# then have the same number of micro-batches, or the generator's accumulator must get both models.
ADVERSARIES = [
    *(
        (kind, how)
        for kind in KINDS
        for how in ("in both windows", "frozen", "cleared")
        if (kind, how) != ("DDP", "cleared")
    ),
    ("DDP", "frozen and unwrapped"),
]


@pytest.mark.parametrize(("kind", "how"), ADVERSARIES, ids=["-".join(case) for case in ADVERSARIES])
@on_ranks(world_of)
def test_critic_and_generator_in_turn_are_exact(kind, how):
    assert adversaries(kind, how) <= BOUNDS[kind]


def test_gradients_left_in_a_critic_are_cleared_with_a_warning():
    with pytest.warns(UserWarning, match="gradients that stood before the window were cleared"):
        assert adversaries("plain", "nothing") <= 1e-12
