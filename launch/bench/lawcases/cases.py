"""The law's cases: their data, nets and criteria."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

Batch = dict[str, Tensor]
TOKENS = 6  # in a row
SCALE = 2.0**16  # the GradScaler's initial scale


@dataclass(frozen=True)
class Case:
    """A case with `lengths[window][rank]` micro-batches; the loader's micro-batches go to the ranks in turns."""

    key: str
    title: str
    lengths: tuple[tuple[int, ...], ...]
    about: str
    kind: str = "samples"
    sizes: tuple[int, ...] = ()  # of the loader's micro-batches; 4 each by default
    kept: tuple[int, ...] = ()  # labels of each micro-batch that are not ignored
    skipped: tuple[int, ...] = ()  # windows that must not change a weight
    dtype: torch.dtype = torch.float64
    also: tuple[str, float | bool] | None = None  # name and value of another result that must be right

    @property
    def world(self) -> int:
        return len(self.lengths[0])

    def steps(self, update: int) -> int:
        return max(self.lengths[min(update, len(self.lengths) - 1)])

    def owners(self) -> list[tuple[int, int]]:
        """The window and rank of each of the loader's micro-batches."""
        of_rank = [[w for w, length in enumerate(self.lengths) for _ in range(length[r])] for r in range(self.world)]
        turns = max(len(windows) for windows in of_rank)
        return [(of_rank[r][t], r) for t in range(turns) for r in range(self.world) if t < len(of_rank[r])]


# fmt: off
CASES = {case.key: case for case in (
    Case("tail", "short tail", ((2,), (2,), (1,)),
         "Five micro-batches of 4 samples, two to a window: the epoch's last window has one."),
    Case("short", "short last micro-batch", ((2,), (2,)), sizes=(4, 4, 4, 1), about=
         "Four micro-batches, two to a window; the last has 1 sample, the others 4."),
    Case("tokens", "token weights", ((2,), (2,)), kind="tokens", kept=(20, 3, 7, 18), about=
         "A mean over the labels that are not -100: 20, 3, 7 and 18 of them in four micro-batches, two to a window."),
    Case("tokens2", "token weights, two ranks", ((2, 2), (2, 2)), kind="tokens", about=
         "The same on two ranks, whose numbers of labels differ too.", kept=(20, 3, 7, 18, 2, 22, 11, 5)),
    Case("uneven", "uneven ranks", ((2, 2), (2, 1)),
         "Rank 0 has four micro-batches in the epoch, rank 1 has three; two to a window."),
    Case("empty", "an empty rank", ((2, 2), (1, 0)),
         "Rank 0 has three micro-batches, rank 1 has two: none of them in the second window."),
    Case("zero", "window without tokens", ((2,), (2,)), kind="tokens", kept=(9, 0, 0, 0), skipped=(1,), about=
         "A window in which one micro-batch has only ignored labels, then one of two such: no NaN, no "
         "update (by SGD with momentum, where a step by zeros shows)."),
    Case("aux", "auxiliary loss", ((2,), (2,)), kind="aux", sizes=(4, 2, 4, 4), kept=(20, 3, 7, 18), about=
         "A mean over labels, plus 0.1 times a router's loss, which is a mean over samples: two denominators."),
    Case("scaler", "two optimizers, one scaler", ((2,), (2,), (2,)), kind="two", skipped=(1,), dtype=torch.float32,
         also=("scale", SCALE / 2), about=
         "Two parameters with an optimizer each, one GradScaler. In the second of three windows the gradient of the "
         "second parameter overflows: neither may step, and the scale halves once."),
    Case("ramp", "changed window length", ((2,), (2,), (2,), (4,), (4,)),
         "Within an epoch: three windows of two micro-batches, then two of four."),
    Case("clip", "contrastive, learned temperature", ((2, 2),), kind="clip", about=
         "CLIP's loss, both ways, with a learned temperature, on two ranks with two micro-batches of 4 pairs each."),
)}
# fmt: on


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, x: Tensor) -> Any:
        return self.body(x)


class Routed(Net):
    """A net with a router, which gives a loss for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.body(x), self.router(x).logsumexp(-1).square().mean(-1)


class Two(nn.Module):
    """Two models with an optimizer each; they work elementwise, since autocast leaves that in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.rand(4)), nn.Parameter(torch.rand(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return (self.first * x).square().sum(-1), (self.second * x).square().sum(-1)


class Clip(nn.Module):
    """Towers that map queries and documents to the unit sphere, with a temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.documents = nn.Linear(4, 5), nn.Linear(4, 5)
        self.logit_scale = nn.Parameter(torch.tensor(math.log(10.0)))

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        queries, documents = self.queries(batch["x"]), self.documents(batch["y"])
        return normalize(queries, dim=-1), normalize(documents, dim=-1), self.logit_scale.exp()


NETS: dict[str, type[nn.Module]] = {"samples": Net, "tokens": Net, "aux": Routed, "two": Two, "clip": Clip}


def criterion(kind: str, outputs: Any, batch: Batch) -> Tensor:
    """Calls the criterion once, on any number of samples."""
    if kind == "two":
        return (outputs[0] + outputs[1] * batch["factor"]).mean()
    if kind == "clip":
        return clip_loss(*outputs)
    logits, router = outputs if kind == "aux" else (outputs, None)
    loss = cross_entropy(logits.flatten(0, -2), batch["labels"].flatten(), ignore_index=-100)
    return loss if router is None else loss + 0.1 * router.mean()


def clip_loss(queries: Tensor, documents: Tensor, scale: Tensor) -> Tensor:
    scores = scale * queries @ documents.T
    own = torch.arange(len(queries))
    return (cross_entropy(scores, own) + cross_entropy(scores.T, own)) / 2


def inputs(kind: str, batch: Batch) -> Any:
    """The inputs of the net."""
    return batch if kind == "clip" else batch["x"]


def net_of(case: Case) -> nn.Module:
    torch.manual_seed(1)
    return NETS[case.kind]().to(case.dtype)


def micro_batches(case: Case) -> list[Batch]:
    """All micro-batches of the loader, for all ranks."""
    torch.manual_seed(2)
    batches = []
    for i, (window, _) in enumerate(case.owners()):
        size = case.sizes[i] if case.sizes else 4
        inner = (TOKENS,) if case.kind in ("tokens", "aux") else ()
        batch = {"x": torch.randn(size, *inner, 4, dtype=case.dtype), "labels": torch.randint(0, 3, (size, *inner))}
        if case.kept:
            chosen = torch.randperm(size * TOKENS)[case.kept[i] :]
            batch["labels"].view(-1)[chosen] = -100
        if case.kind == "two":
            overflows = window in case.skipped and i % 2 == 0
            batch["factor"] = torch.full((size,), 1e36 if overflows else 1.0, dtype=case.dtype)
        if case.kind == "clip":
            batch["y"] = torch.randn(size, 4, dtype=case.dtype)
        batches.append(batch)
    return batches
