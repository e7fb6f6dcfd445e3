"""Small problems with a known answer: the gradient of one big batch in one process."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import IterableDataset

from distaccum import count_samples, count_tokens
from tests.support.windows import accumulating, error, gradient, gradient_of, run_window

IGNORED = -100


class Net(nn.Module):
    """Two layers and a head for each of two losses."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
        self.head = nn.Linear(8, 4)
        self.router = nn.Linear(8, 1)
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


Made = TypeVar("Made", bound=nn.Module)


def seeded(make: Callable[[], Made]) -> Made:
    """In float64, with the same weights each time."""
    torch.manual_seed(3)
    return make().double()


def make_net(dtype: torch.dtype = torch.float64) -> Net:
    torch.manual_seed(7)
    return Net(dtype)


Batch = dict[str, Tensor]


def make_batch(size: int, *, seed: int, dtype: torch.dtype = torch.float64, kept: float = 0.6) -> Batch:
    """Rows of 6 labelled tokens; the labels of some are ignored."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 6, 5, generator=generator, dtype=torch.float64).to(dtype)
    labels = torch.randint(0, 4, (size, 6), generator=generator)
    labels[torch.rand(size, 6, generator=generator) > kept] = IGNORED
    return {"x": x, "labels": labels}


def join(batches: Sequence[Batch]) -> Batch:
    return {key: torch.cat([batch[key] for batch in batches]) for key in batches[0]}


def token_loss(net: nn.Module, batch: Batch, how: str = "mean") -> Tensor:
    logits = net(batch["x"])
    return cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORED, reduction=how)


def sample_loss(net: nn.Module, batch: Batch, how: str = "mean") -> Tensor:
    per_sample = net(batch["x"]).square().mean(dim=(1, 2))
    return per_sample.mean() if how == "mean" else per_sample.sum()


# By name: (loss, reduction of the big batch's criterion, reduction= and count= of the accumulator)
CASES: dict[str, tuple[Callable[..., Tensor], str, str, Any]] = {
    "samples mean": (sample_loss, "mean", "mean", count_samples),
    "samples sum": (sample_loss, "sum", "sum", count_samples),
    "samples sum_to_mean": (sample_loss, "sum", "sum_to_mean", count_samples),
    "tokens mean": (token_loss, "mean", "mean", count_tokens("labels", ignore_index=IGNORED)),
    "tokens sum": (token_loss, "sum", "sum", count_tokens("labels", ignore_index=IGNORED)),
    "tokens sum_to_mean": (token_loss, "sum", "sum_to_mean", count_tokens("labels", ignore_index=IGNORED)),
}


def big_batch(case: str, micro_batches: Sequence[Batch]) -> tuple[float, Tensor]:
    """Loss and gradient of one call of the criterion on all samples, in float64: the oracle."""
    loss_fn, how, reduction, _ = CASES[case]
    net = make_net(micro_batches[0]["x"].dtype).double()  # the same rounded weights
    batch = join(micro_batches)
    batch["x"] = batch["x"].double()
    loss = loss_fn(net, batch, "mean" if reduction == "sum_to_mean" else how)
    loss.backward()
    return loss.item(), gradient(net)


def trunk() -> nn.Module:
    """A net whose parameters all take part in every loss."""
    net = make_net()
    return nn.Sequential(net.body, net.head)


def accumulating_trunk(**options: Any) -> Any:
    return accumulating(trunk(), 0.1, **options)


class Choosing(nn.Module):
    """Three layers, of which each call uses some: "12" the second and the third."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Linear(5, 5).double() for _ in range(3))

    def forward(self, x: Tensor, used: str) -> Tensor:
        return x + sum(self.layers[int(i)](x) for i in used)


class Stream(IterableDataset):  # type: ignore[type-arg]
    """A dataset without a length."""

    def __init__(self, items: Sequence[Any]) -> None:
        self.items = items

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)


def make_net_without_router() -> nn.Module:
    net = make_net()
    del net.router
    return net


def micro_batches_of(
    layout: Sequence[Sequence[int]], index: int, rank: int, dtype: torch.dtype = torch.float64
) -> list[Batch]:
    """The micro-batches of one rank in window `index`; `layout` has their sizes by rank."""
    return [make_batch(size, seed=100 * index + 10 * rank + i, dtype=dtype) for i, size in enumerate(layout[rank])]


def gradient_of_trunk(micro_batches: Sequence[Batch]) -> Tensor:
    """The gradient of the one big batch."""
    return gradient_of(trunk(), join(micro_batches))


BATCHES = [make_batch(size, seed=i) for i, size in enumerate([2, 3, 1])]


def assert_next_is_exact(accumulator: Any, model: nn.Module) -> None:
    """Of a trunk that has its first weights."""
    run_window(accumulator.window(BATCHES), model)
    assert error(gradient(model), gradient_of_trunk(BATCHES)) <= 1e-12
