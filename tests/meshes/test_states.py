"""Values that are not finite, and overflow, on every kind of mesh."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import SGD

from distaccum import Accumulator, Window, count_tokens
from tests.meshes import test_context, test_experts, test_pipeline
from tests.meshes import test_sharing as test_meshes
from tests.support.problems import make_batch
from tests.support.ranks import on_ranks
from tests.support.versions import has
from tests.support.windows import flat, refused

pytestmark = pytest.mark.long


class Job:
    """A model on a mesh, its Accumulator, and this rank's micro-batches."""

    def __init__(self, kind: str, **options: Any) -> None:
        options = {"count": count_tokens("labels"), "max_norm": 0.1, **options}
        self.run: Callable[[Window, Any, float], Any]
        if kind.startswith("stages"):
            pipe = test_pipeline.Pipe("Interleaved1F1B" if "several" in kind else "1F1B", kind.split()[1])
            model, parameters, data = pipe.schedule, pipe.parameters(), pipe.rank
            self.run = lambda window, batch, factor: window.run(batch["x"] * factor, target=batch["labels"])
        elif kind == "context":
            model, mesh = test_context.on_a_mesh()
            data, options["mesh"] = mesh["data"].get_local_rank(), mesh["data"]
            self.run = lambda window, batch, factor: window.backward(
                test_context.criterion(model, test_context.cut(batch, mesh["context"]), "mean") * factor
            )
            options["count"] = lambda batch: test_context.cut(batch, mesh["context"])["labels"].ne(-100).sum()
        elif kind == "experts":
            model, data = test_experts.on_a_mesh("along the same dimension"), dist.get_rank()
            self.run = lambda window, batch, factor: window.backward(
                test_experts.losses(model, batch, router=False)["tokens"] * factor
            )
        else:
            plan, shape = kind.split(", ")
            model, data = test_meshes.sharded(tuple(map(int, shape.split(" x "))), plan)
            self.run = lambda window, batch, factor: window.backward(test_meshes.criterion(model, batch) * factor)
        self.parameters = parameters if kind.startswith("stages") else list(model.parameters())
        self.accumulator = Accumulator(model, SGD(self.parameters, lr=1.0), **options)
        self.batches = [make_batch(4, seed=10 * data + i) for i in range(3)]

    def weights(self) -> Tensor:
        return flat(self.parameters)

    def window(self, factor: float = 1.0) -> str | None:
        """Why its window makes no update; `factor` is of this rank's first micro-batch."""
        window = self.accumulator.window(self.batches)
        for i, batch in enumerate(window):
            self.run(window, batch, 1.0 if i else factor)
        return window.step().reason


MESHES = {"tensor, 2 x 2": 4, "sequence, 2 x 2": 4, "sequence, 2": 2, "context": 4, "experts": 4}
if has("torch", "2.15"):
    MESHES |= {"stages none": 2, "stages ddp": 4, "stages fsdp2": 4, "stages fsdp2 several": 4}


@pytest.mark.parametrize(
    ("kind", "world", "on_nonfinite"),
    [*((*one, "raise") for one in MESHES.items()), ("sequence, 2 x 2", 4, "skip"), ("context", 4, "skip")],
)
@on_ranks()
def test_nan_of_one_data_rank_is_refused_alike_on_all_ranks(kind, world, on_nonfinite):
    job = Job(kind, on_nonfinite=on_nonfinite)
    before = job.weights()
    data_rank = dist.get_rank() if kind == "experts" else dist.get_rank() // 2 if world > 2 else 0
    factor = float("nan") if data_rank == 0 else 1.0
    said: list[Any] = [None] * world
    mine = refused(job.window, factor) if on_nonfinite == "raise" else job.window(factor)
    dist.all_gather_object(said, mine)
    assert len(set(said)) == 1 and "is not finite" in mine
    assert torch.equal(before, job.weights())
    assert job.window() is None and job.weights().isfinite().all()


@pytest.mark.parametrize(("kind", "world"), [one for one in MESHES.items() if one[0] != "sequence, 2"])  # refused
@on_ranks()
def test_overflow_in_one_ranks_part_skips_and_halves_the_scale_alike_on_all_ranks(kind, world):
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    job = Job(kind, scaler=scaler)
    before = job.weights()
    window = job.accumulator.window(job.batches)
    for batch in window:
        job.run(window, batch, 1.0)
    if dist.get_rank() == dist.get_world_size() - 1:
        parts = [p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad for p in job.parameters]
        next(part for part in parts if part.numel()).fill_(float("inf"))
    update = window.step()
    assert (update.stepped, update.reason) == (False, "the scaled gradients overflowed")
    assert torch.equal(before, job.weights()) and scaler.get_scale() == 2.0
    exact = Job(kind)
    assert job.window() is exact.window() is None
    assert float((job.weights() - exact.weights()).abs().max()) <= 1e-10
