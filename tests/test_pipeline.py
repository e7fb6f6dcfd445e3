"""Stages of a model on several ranks, run by torch's pipeline schedules: alone, and with DDP or FSDP2 for each stage.

The oracle is one big batch through all layers, in one process.
"""

from __future__ import annotations

import itertools
import math
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from engines import FSDP2_RUNS_ON_CPU, full
from problems import IGNORED, error, make_batch
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from distaccum import Accumulator, count_tokens

pytestmark = pytest.mark.skipif(not FSDP2_RUNS_ON_CPU, reason="FSDP2 does not run on CPU in torch 2.6")
CHUNKS = 2
SCHEDULES = ["GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble"]
# Micro-batches of 4 samples by data rank: even, uneven, a dry rank.
WINDOWS = [(2, 2), (1, 3), (0, 2)]


def make_layers() -> list[nn.Sequential]:
    torch.manual_seed(3)
    sizes = [5, 8, 8, 8, 4]
    return [nn.Sequential(nn.Linear(a, b), nn.Tanh()).double() for a, b in itertools.pairwise(sizes)]


def by_stage(kind: str) -> list[nn.Sequential]:
    layers = make_layers()
    if kind in ("GPipe", "1F1B"):  # one stage on each of two ranks
        return [nn.Sequential(*layers[:2]), nn.Sequential(*layers[2:])]
    return layers


def criterion(outputs: Tensor, labels: Tensor, how: str = "mean") -> Tensor:
    return cross_entropy(outputs.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction=how)


class Pipe:
    """This rank's stages of the model, and their schedule."""

    def __init__(self, kind: str, wrap: str, loss_fn: Any = criterion, **options: Any) -> None:
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module", category=UserWarning)
        ranks = dist.get_world_size()
        self.mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("data", "stage"))
        self.rank, self.num = self.mesh["data"].get_local_rank(), ranks // 2
        here, every = self.mesh["stage"].get_local_rank(), by_stage(kind)
        self.here = [here] if len(every) == 2 else [here, 3 - here] if kind == "ZBVZeroBubble" else [here, here + 2]
        self.modules: list[nn.Module] = [every[i] for i in self.here]
        if wrap == "fsdp2":
            for module in self.modules:
                fully_shard(module, mesh=self.mesh["data"])
        elif wrap == "ddp":
            group = self.mesh["data"].get_group()
            self.modules = [DistributedDataParallel(module, process_group=group) for module in self.modules]
        group = self.mesh["stage"].get_group()
        stages = [
            pipelining.PipelineStage(module, i, len(every), torch.device("cpu"), group=group)
            for i, module in zip(self.here, self.modules, strict=True)
        ]
        options = {"scale_grads": False, **options}
        make = getattr(pipelining, f"Schedule{kind}")
        self.schedule = make(stages[0] if len(every) == 2 else stages, CHUNKS, loss_fn=loss_fn, **options)
        self.is_last = len(every) - 1 in self.here

    def parameters(self) -> list[nn.Parameter]:
        return [p for module in self.modules for p in module.parameters()]

    def of_rank(self, every: nn.Sequential) -> list[nn.Parameter]:
        return [p for i in self.here for p in every[i].parameters()]


def batches_of(window: int, rank: int, num: int) -> list[Any]:
    batches = [make_batch(4, seed=100 * window + 10 * rank + i) for i in range(num)]
    if window == 1 and rank == 1:
        batches[0]["labels"][:2] = IGNORED  # a chunk in which nothing counts
        batches[1]["labels"][:] = IGNORED  # a micro-batch, which every stage leaves out
    return [(one["x"], one["labels"]) for one in batches]


def law_of_stages(kind: str, wrap: str, options: dict[str, Any]) -> Any:
    """By window: how far the step of this rank's stages, the norm and the loss are off."""
    how = "mean" if options.get("reduction", "mean") == "mean" else "sum"
    pipe = Pipe(kind, wrap, lambda outputs, labels: criterion(outputs, labels, how))
    clip = options.get("max_norm", 1e9)
    options = {"max_norm": clip, "count": count_tokens(1), **options}
    accumulator = Accumulator(pipe.schedule, SGD(pipe.parameters(), lr=1.0), **options)
    exact, seen = nn.Sequential(*by_stage(kind)), []
    for index, layout in enumerate(WINDOWS):
        layout = layout[-pipe.num :]
        before = [full(p).detach().clone() for p in pipe.parameters()]
        window = accumulator.window(batches_of(index, pipe.rank, layout[pipe.rank]))
        for x, labels in window:
            outputs = window.run(x, target=labels)
            assert (outputs is not None) == pipe.is_last
        update = window.step()
        x, labels = map(
            torch.cat, zip(*[b for r in range(pipe.num) for b in batches_of(index, r, layout[r])], strict=True)
        )
        exact.zero_grad()
        loss = criterion(exact(x), labels, "sum" if options.get("reduction") == "sum" else "mean")
        loss.backward()
        norm = math.hypot(*(float(p.grad.norm()) for p in exact.parameters()))
        with torch.no_grad():
            for p in exact.parameters():
                p.grad.mul_(min(1.0, clip / (norm + 1e-6)))
                p.sub_(p.grad)
        moved = torch.cat([(b - full(p).detach()).flatten() for b, p in zip(before, pipe.parameters(), strict=True)])
        wanted = torch.cat([p.grad.flatten() for p in pipe.of_rank(exact)])
        off = abs(update.loss - loss.item()) / abs(loss.item())
        assert update.counts == {"tokens": int(labels.ne(IGNORED).sum())}
        seen.append((error(moved, wanted), abs(update.grad_norm - norm) / norm, off))
    return seen


def within(seen: Any, bound: float = 1e-10) -> None:
    for of_rank in seen:
        assert len(of_rank) == len(WINDOWS)
        for numbers in of_rank:
            assert max(numbers) <= bound, of_rank


@pytest.mark.parametrize("kind", SCHEDULES)
@pytest.mark.parametrize("wrap", ["ddp", "fsdp2"])
def test_law_holds_over_stages(ranks, kind, wrap):
    within(ranks(4).run(law_of_stages, kind, wrap, {}))


@pytest.mark.parametrize("kind", ["GPipe", "1F1B", "InterleavedZeroBubble"])
def test_law_holds_over_stages_without_data_parallelism(ranks, kind):
    within(ranks(2).run(law_of_stages, kind, "none", {}))


@pytest.mark.parametrize("options", [{"reduction": "sum"}, {"reduction": "sum_to_mean"}, {"max_norm": 0.05}])
@pytest.mark.parametrize("wrap", ["ddp", "fsdp2"])
def test_law_holds_over_stages_for_each_reduction_and_clipped(ranks, options, wrap):
    within(ranks(4).run(law_of_stages, "1F1B", wrap, options))
