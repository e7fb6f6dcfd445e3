"""The difference between accumulation and one big batch where the two cannot be equal, and the cure.

    python launch/bench/limits.py --out launch/results/limits      writes limits.md and limits.json

Relative errors of the gradient in float64, on a CPU: no timing, the same on every machine.
"""

from __future__ import annotations

import textwrap
import warnings
from collections.abc import Callable
from typing import Any

import torch
from kit import CPU, Options, circumstances, header, table, write
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from distaccum import Accumulator
from distaccum.batchnorm import freeze, to_groupnorm

BATCH = 64
Batch = tuple[Tensor, Tensor]


def make_batch(seed: int = 0, *, sorted_by_class: bool = False) -> Batch:
    """Samples of four classes, each around a place of its own; in any order, or class by class."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 4, (BATCH,), generator=generator)
    y = y.sort().values if sorted_by_class else y
    places = torch.randn(4, 12, generator=generator, dtype=torch.float64)
    return places[y] + torch.randn(BATCH, 12, generator=generator, dtype=torch.float64), y


def network(layers: int, make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(1)
    hidden = [one for _ in range(layers) for one in (nn.Linear(12, 12), make(), nn.Tanh())]
    return nn.Sequential(*hidden, nn.Linear(12, 4)).double()


def of_classes(model: nn.Module) -> Callable[[Batch], Tensor]:
    return lambda batch: cross_entropy(model(batch[0]), batch[1])


def gradient(model: nn.Module) -> Tensor:
    return torch.cat(
        [torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in model.parameters()]
    )


def accumulated(
    model: nn.Module, loss_fn: Callable[[Batch], Tensor], batch: Batch, size: int, **options: Any
) -> Tensor:
    model.zero_grad()
    accumulator = Accumulator(model, micro_batch_size=size, **options)
    window = accumulator.split(batch)
    for micro_batch in window:
        window.backward(loss_fn(micro_batch))
    found = gradient(model)
    window.step()
    return found


def at_once(model: nn.Module, loss_fn: Callable[[Batch], Tensor], batch: Batch) -> Tensor:
    model.zero_grad()
    loss_fn(batch).backward()
    return gradient(model)


def error(seen: Tensor, exact: Tensor) -> float:
    return float((seen - exact).norm() / exact.norm())


# Batch normalisation


def of_batchnorm(layers: int, size: int, *, sorted_by_class: bool, cure: str = "") -> float:
    """The gradient's error with this number of layers of batch normalisation."""
    model = network(layers, lambda: nn.BatchNorm1d(12))
    with torch.no_grad():
        model(make_batch(9)[0])  # statistics to freeze
    if cure == "frozen":
        freeze(model)
    elif cure == "GroupNorm":
        to_groupnorm(model, per_group=3)
    batch = make_batch(sorted_by_class=sorted_by_class)
    seen = accumulated(model, of_classes(model), batch, size, batchnorm="ignore")
    return error(seen, at_once(model, of_classes(model), batch))


# Dropout


def of_dropout(layers: int, size: int) -> float:
    """With the same random numbers at the start."""
    model, batch = network(layers, lambda: nn.Dropout(0.3)), make_batch()
    torch.manual_seed(3)
    seen = accumulated(model, of_classes(model), batch, size)
    torch.manual_seed(3)
    return error(seen, at_once(model, of_classes(model), batch))


def of_two_draws(layers: int) -> float:
    """Two big batches with other random numbers."""
    model, batch = network(layers, lambda: nn.Dropout(0.3)), make_batch()
    draws = []
    for seed in (3, 4):
        torch.manual_seed(seed)
        draws.append(at_once(model, of_classes(model), batch))
    return error(draws[0], draws[1])


def of_mean_over_draws(layers: int, size: int, draws: int) -> tuple[float, float]:
    """Means over draws: accumulated against big batches, and big batches against others."""
    model, batch = network(layers, lambda: nn.Dropout(0.3)), make_batch()
    sums = [torch.zeros(1, dtype=torch.float64)] * 3
    for i in range(draws):
        for j, run in enumerate((accumulated, at_once, at_once)):
            torch.manual_seed(10**6 * j + i)
            sums[j] = sums[j] + run(model, of_classes(model), batch, *([size] if run is accumulated else []))
    return error(sums[0], sums[1]), error(sums[2], sums[1])


# A loss with state


class Scaled:
    """A loss divided by a running mean of itself, which moves with each call, or when `move` is called."""

    def __init__(self, model: nn.Module, *, moves: bool) -> None:
        self.model, self.moves = model, moves
        self.mean, self.seen = 1.0, list[float]()

    def __call__(self, batch: Batch) -> Tensor:
        loss = of_classes(self.model)(batch)
        scale = self.mean
        self.seen.append(loss.item())
        if self.moves:
            self.move()
        return loss / scale

    def move(self) -> None:
        self.mean += 0.1 * (sum(self.seen) / len(self.seen) - self.mean)
        self.seen.clear()


def of_state(size: int, *, moves: bool) -> float:
    """After three updates; the cure moves it after each window, as the big batch would have."""
    model, batches = network(2, nn.Identity), [make_batch(i) for i in range(3)]
    one, other = Scaled(model, moves=moves), Scaled(model, moves=True)
    for batch in batches:
        seen = accumulated(model, one, batch, size)
        if not moves:
            one.move()
        exact = at_once(model, other, batch)
    return error(seen, exact)


# Penalties on the gradient


def per_sample_penalty(model: nn.Module) -> Callable[[Batch], Tensor]:
    """Each sample's own gradient with respect to its input, as WGAN-GP has it: a mean over samples."""

    def loss(batch: Batch) -> Tensor:
        x = batch[0].clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return (slope.norm(dim=1) - 1).square().mean()

    return loss


def penalty_across_samples(model: nn.Module) -> Callable[[Batch], Tensor]:
    """The norm of the loss's gradient with respect to weights: a square of a mean."""

    def loss(batch: Batch) -> Tensor:
        first = next(model.parameters())
        (slope,) = torch.autograd.grad(of_classes(model)(batch), first, create_graph=True)
        return of_classes(model)(batch) + slope.square().sum()

    return loss


def of_penalty(size: int, *, across: bool) -> float:
    model, batch = network(2, nn.Identity), make_batch()
    loss_fn = (penalty_across_samples if across else per_sample_penalty)(model)
    return error(accumulated(model, loss_fn, batch, size), at_once(model, loss_fn, batch))


# The page

SIZES = (32, 16, 8, 4)


def errors_of(header: str, rows: list[tuple[str, list[float]]], columns: list[str]) -> list[str]:
    return table([header, *columns], [[name, *(f"{value:.1e}" for value in values)] for name, values in rows])


def page(draws: int) -> tuple[list[str], dict[str, Any]]:
    sizes = [f"micro-batches of {size}" for size in SIZES]
    found: dict[str, Any] = {}
    lines = ["## Batch normalisation in training mode", ""]
    lines += [
        f"The gradient of a batch of {BATCH}, four classes, a network of tanh layers 12 wide; relative error against "
        "the big batch. Each layer normalises by the statistics of a micro-batch, and the next layer sees the result.",
        "",
    ]
    for sorted_by_class, title in ((False, "samples in any order"), (True, "class by class")):
        rows = [
            (f"{n}", [of_batchnorm(n, size, sorted_by_class=sorted_by_class) for size in SIZES]) for n in (1, 2, 4, 8)
        ]
        cures = [
            (f"8, {cure}", [of_batchnorm(8, size, sorted_by_class=sorted_by_class, cure=cure) for size in SIZES])
            for cure in ("frozen", "GroupNorm")
        ]
        found[f"batchnorm, {title}"] = dict(rows + cures)
        lines += errors_of(f"layers; {title}", rows + cures, sizes)
    lines += [
        "What to do: `distaccum.batchnorm.freeze(model)` after `model.train()`, or `to_groupnorm(model)` before the "
        "optimizer is made; both are exact. `SyncBatchNorm` pools over ranks, not over micro-batches. What is left is "
        "\"ghost\" batch normalisation, a known regulariser, which `batchnorm='ignore'` accepts.",
        "",
        "## Dropout over more than one layer",
        "",
        "With the same random numbers at the start: one layer draws the same masks for the micro-batches as for the "
        "big batch (on a CPU, by torch 2.15), several draw them in another order. The gradient is that of the masks.",
        "",
    ]
    rows = [(f"{n}", [of_dropout(n, size) for size in SIZES] + [of_two_draws(n)]) for n in (1, 2, 4)]
    found["dropout"] = dict(rows)
    lines += errors_of("layers", rows, [*sizes, "the big batch, drawn twice"])
    ours, theirs = of_mean_over_draws(2, 8, draws)
    found["dropout, mean over draws"] = {"draws": draws, "accumulated": ours, "big batch again": theirs}
    lines += [
        f"It is no error but another draw: over {draws} draws the mean of accumulated gradients differs from that of "
        f"big batches by {ours:.1e}, two means of big batches by {theirs:.1e}. Nothing to do.",
        "",
        "## Losses with state",
        "",
        "A loss divided by a running mean of itself that moves with each call, in the third update:",
        "",
    ]
    rows = [
        ("moves with each call", [of_state(size, moves=True) for size in SIZES]),
        ("moves after window.step()", [of_state(size, moves=False) for size in SIZES]),
    ]
    found["state"] = dict(rows)
    lines += errors_of("the state", rows, sizes)
    lines += [
        "What to do: keep the state as it is within a window, collect what it needs, and move it after "
        "`window.step()`.",
        "",
        "## Gradient penalties",
        "",
    ]
    rows = [
        ("of each sample's input (WGAN-GP)", [of_penalty(size, across=False) for size in SIZES]),
        ("of the batch's loss, squared", [of_penalty(size, across=True) for size in SIZES]),
    ]
    found["penalties"] = dict(rows)
    lines += errors_of("a penalty on the gradient", rows, sizes)
    lines += [
        "A penalty on each sample's own gradient is a mean over samples, and exact. The square of a mean over samples "
        "is not the mean of squares, so a penalty on the whole batch's gradient is that of each micro-batch's, which "
        "is larger (its noise is squared too). What to do: a penalty per sample; or, where it is a function of "
        "representations, `accumulator.contrast`.",
    ]
    return lines, found


def main() -> int:
    parser = Options(__doc__)
    parser.counts("--draws", 400, "of dropout, for the means")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    lines, found = page(given.draws)
    about = circumstances(CPU)
    lines = [line if line.startswith("|") else textwrap.fill(line, 118) for line in lines]
    test = "Each has a test that shows it: [tests/test_limits.py](../../tests/test_limits.py)."
    write(given.out, "\n".join([*header("Limits, in numbers", about, test), *lines]), {**about, "errors": found})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
