"""Ranks that share samples, tried on two layers: tensor-parallel and context-parallel ranks, and pipeline stages."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD

from ...accumulator import Accumulator
from .. import wrap
from .job import Job

SHARE = 2  # ranks that share samples; the others are data ranks
SAMPLES, TOKENS = 4, 4
Norm = tuple[str, float | None]  # the policy, and the gradient's norm under it


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def _batches(data_rank: int) -> list[Tensor]:
    """One micro-batch of rows of tokens on every other data rank, and two on the rest."""
    generator = torch.Generator().manual_seed(data_rank)
    return [torch.randn(SAMPLES, TOKENS, 4, generator=generator) for _ in range(2 - data_rank % 2)]


def norm_on_meshes(data_ranks: int) -> float:
    """Of the gradient of one big batch of all data ranks; a token sees the mean of its row."""
    net = _net()
    hidden = net(torch.cat([one for rank in range(data_ranks) for one in _batches(rank)]))
    (hidden + hidden.mean(1, keepdim=True)).square().mean().backward()
    return math.hypot(*(float(p.grad.norm()) for p in net.parameters() if p.grad is not None))


def _mesh(job: Job, name: str) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(job.kind, (job.world // SHARE, SHARE), mesh_dim_names=("data", name))


def _loss(outputs: Tensor, _: Tensor | None = None) -> Tensor:
    return (outputs + outputs.mean(1, keepdim=True)).square().mean()


def _tensor(job: Job) -> Iterator[Norm]:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = _mesh(job, "tensor")
    for sync in ("last", "every", "gathered"):
        net = parallelize_module(
            _net().to(job.device), mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()}
        )
        wrap.fully_sharded(net, mesh=mesh["data"])
        accumulator = Accumulator(net, SGD(net.parameters(), lr=0.1), steps=2, sync=sync, max_norm=math.inf)
        for window in accumulator.windows(_on_device(job, mesh)):
            for inputs in window:
                window.backward(_loss(net(inputs)))
            yield sync, window.step().grad_norm


def _context(job: Job) -> Iterator[Norm]:
    from torch.distributed.tensor import DTensor, Partial, Shard

    mesh = _mesh(job, "context")
    own = mesh["context"]

    def loss_of_part(outputs: Tensor) -> Tensor:
        whole = DTensor.from_local(outputs, own, [Shard(1)], run_check=False).full_tensor(grad_placements=[Partial()])
        return (outputs + whole.mean(1, keepdim=True)).square().mean()

    for sync in ("last", "every", "gathered"):
        net = wrap.fully_sharded(_net().to(job.device))
        accumulator = Accumulator(
            net,
            SGD(net.parameters(), lr=0.1),
            steps=2,
            sync=sync,
            count=lambda part: part[..., 0].numel(),  # tokens
            max_norm=math.inf,
            mesh=mesh["data"],
        )
        parts = [one.chunk(SHARE, dim=1)[own.get_local_rank()].contiguous() for one in _on_device(job, mesh)]
        for window in accumulator.windows(parts):
            for part in window:
                window.backward(loss_of_part(net(part)))
            yield sync, window.step().grad_norm


def _pipeline(job: Job) -> Iterator[Norm]:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    mesh = _mesh(job, "stage")
    own, net = mesh["stage"], _net().to(job.device)
    stage = own.get_local_rank()
    part: nn.Module = net[:2] if stage == 0 else net[2:]
    if "finalize_gradients" in inspect.signature(Schedule1F1B.step).parameters:  # torch 2.15
        wrap.fully_sharded(part, mesh=mesh["data"])
    else:
        part = wrap.ddp(part, process_group=mesh["data"].get_group())
    pipeline_stage = PipelineStage(part, stage, SHARE, job.device, group=own.get_group())
    schedule: Any = Schedule1F1B(pipeline_stage, SHARE, loss_fn=_loss, scale_grads=False)
    accumulator = Accumulator(schedule, SGD(part.parameters(), lr=0.1), steps=2, max_norm=math.inf)
    for window in accumulator.windows(_on_device(job, mesh)):
        for inputs in window:
            window.run(inputs, target=inputs)  # a schedule wants one
        yield "last", window.step().grad_norm


def _on_device(job: Job, mesh: Any) -> list[Tensor]:
    return [one.to(job.device) for one in _batches(mesh["data"].get_local_rank())]


MESHES: Mapping[str, Callable[[Job], Iterator[Norm]]] = {
    "tensor parallelism": _tensor,
    "context parallelism": _context,
    "a pipeline": _pipeline,
}
