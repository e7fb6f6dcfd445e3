"""The model, and what a rank has of each batch, cut over a mesh of data ranks and ranks that share samples."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import pad

from .config import Config
from .gpt import GPT
from .job import DTYPES
from .sharing import SHARING, sharing
from .tasks import IGNORED, Task, measure_tokens, token_loss


def cut_model(model: nn.Module, config: Config, device: torch.device) -> tuple[Any, Any]:
    """Cuts the model in place; the mesh of data ranks and those that share samples, and the one FSDP2 works over.

    All ranks call it.
    """
    from torch.distributed.device_mesh import init_device_mesh

    assert isinstance(model, GPT)
    name, number = sharing(config)
    ranks = dist.get_world_size()
    mesh = init_device_mesh(device.type, (ranks // number, number), mesh_dim_names=("data", SHARING[name]))
    own = mesh[SHARING[name]]
    if name == "cp":  # each of these ranks has a gradient of the same weights, from its part of the tokens
        model.cut_rows(own)
        return mesh, init_device_mesh(device.type, (ranks,), mesh_dim_names=("ranks",))
    if name == "tp":
        model.cut_heads(own)
    else:
        model.cut_layers(own.get_local_rank(), number)
    return mesh, mesh["data"]


def make_pipeline(model: nn.Module, mesh: Any, device: torch.device) -> Any:
    """The schedule of the stages, of which this rank has one; a micro-batch is cut into a chunk for each stage."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    stage, number = mesh.get_local_rank(), mesh.size()
    pipeline_stage = PipelineStage(model, stage, number, device, group=mesh.get_group())
    return Schedule1F1B(pipeline_stage, number, loss_fn=token_loss, scale_grads=False)


def cut_task(task: Task, config: Config, mesh: Any) -> Task:
    """The task of this rank: what it has of each batch, and measures of it."""
    name, number = sharing(config)
    if name in ("", "tp"):  # tensor-parallel ranks have whole batches
        return task
    own = mesh[SHARING[name]]
    rank, group = own.get_local_rank(), own.get_group()

    def part_of_rows(rows: list[Tensor]) -> dict[str, Tensor]:
        batch = task.collate(rows)
        missing = -batch["tokens"].shape[1] % number
        return {key: _padded(one, 0, missing, key).chunk(number, dim=1)[rank] for key, one in batch.items()}

    def of_one_shape(rows: list[Tensor]) -> dict[str, Tensor]:
        """What stages send each other has the same shape in each micro-batch."""
        batch = task.collate(rows)
        missing = config.micro_batch_size - len(rows), config.context - batch["tokens"].shape[1]
        return {key: _padded(one, *missing, key) for key, one in batch.items()}

    def measure_in_last(model: nn.Module, batch: Any) -> Tensor:
        """One stage after the other. The schedule's own `eval` would prepare its stages anew, there and back."""
        ranks, tokens = dist.get_process_group_ranks(group), batch["tokens"]
        entering = tokens
        if rank > 0:
            sizes = (*tokens.shape, config.width)
            entering = torch.empty(sizes, dtype=DTYPES[config.precision], device=tokens.device)
            dist.recv(entering, ranks[rank - 1], group)
        outputs = model(entering)
        if rank == number - 1:
            return measure_tokens(outputs, batch["labels"])
        dist.send(outputs.contiguous(), ranks[rank + 1], group)
        return torch.zeros(3)

    if name == "cp":
        return dataclasses.replace(task, collate=part_of_rows)
    return dataclasses.replace(task, collate=of_one_shape, measure=measure_in_last)


def _padded(one: Tensor, rows: int, tokens: int, key: str) -> Tensor:
    return pad(one, (0, tokens, 0, rows), value=IGNORED if key == "labels" else 0)
