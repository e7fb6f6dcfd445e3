"""Ranks that share samples: tensor-parallel (tp) and context-parallel (cp) ranks, and stages of a pipeline (pp)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import pad

from .config import DTYPES, Config, stop
from .gpt import GPT, num_heads
from .tasks import IGNORED, Batch, loss_of

SHARING = {"tp": "tensor", "cp": "context", "pp": "stage"}  # options, and the dimensions of the mesh
SHARERS = {"tp": "tensor-parallel ranks", "cp": "context-parallel ranks", "pp": "stages"}
Collate = Callable[[list[Any]], Batch]


def sharing(config: Config) -> tuple[str, int]:
    """The option by which ranks share samples, and how many do; "" and 1 if each rank has its own."""
    return next(((name, getattr(config, name)) for name in SHARING if getattr(config, name) > 1), ("", 1))


def check_sharing(config: Config, ranks: int) -> None:
    """Stops at a combination that the program does not support."""
    name, number = sharing(config)
    if not name:
        return
    given = f"{name} = {number}"
    if several := [f"{one} = {getattr(config, one)}" for one in SHARING if one != name and getattr(config, one) > 1]:
        stop(f"{given} and {several[0]}, expected one of tp, cp and pp above 1; FSDP2 takes the ranks that are left")
    if config.model != "gpt":
        stop(f"{given} with model = {config.model!r}, expected task = 'language' and 'gpt', whose layers can be cut")
    if config.engine not in ("auto", "fsdp2"):
        stop(f"{given} with engine = {config.engine!r}, expected 'fsdp2', which works over the data ranks alone")
    for other in ("replicas", "measure_noise", "compile"):
        if getattr(config, other) > 1 or getattr(config, other) is True:
            stop(f"{given} with {other}, expected one of them; leave the other out")
    if name == "pp" and config.micro_batch_size == "auto":
        stop(f"{given} with micro_batch_size = 'auto', expected a number: stages exchange tensors of one shape")
    if name == "pp" and config.layers < number:
        stop(f"{given} and layers = {config.layers}, expected a layer for each stage")
    if name == "pp" and config.sync != "last":
        stop(f"{given} with sync = {config.sync!r}, expected 'last': a pipeline reduces once per update")
    cut = {
        "tp": {f"width = {config.width}, which makes {num_heads(config.width)} heads": num_heads(config.width)},
        "cp": {f"context = {config.context}": config.context},
        "pp": {f"micro_batch_size = {config.largest}": config.largest},
    }
    for what, size in {f"{ranks} rank{'s' * (ranks > 1)}": ranks, **cut[name]}.items():
        if size % number:
            stop(f"{given} and {what}, expected a number that divides them")


def cut_model(model: nn.Module, config: Config, device: torch.device) -> tuple[Any, Any]:
    """Cuts the model in place; returns the mesh of data ranks and sharing ranks, and the mesh for FSDP2.

    All ranks call it.
    """
    from torch.distributed.device_mesh import init_device_mesh

    assert isinstance(model, GPT)
    name, number = sharing(config)
    ranks = dist.get_world_size()
    mesh = init_device_mesh(device.type, (ranks // number, number), mesh_dim_names=("data", SHARING[name]))
    own = mesh[SHARING[name]]
    if name == "cp":  # each of these ranks has a gradient of all weights, from its part of the tokens
        model.cut_rows(own)
        return mesh, init_device_mesh(device.type, (ranks,), mesh_dim_names=("ranks",))
    if name == "tp":
        model.cut_heads(own)
    else:
        model.cut_layers(own.get_local_rank(), number)
    return mesh, mesh["data"]


def make_pipeline(model: nn.Module, mesh: Any, device: torch.device) -> Any:
    """The schedule of the stages, with one per rank; a micro-batch is cut into as many chunks as there are stages."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    stage = PipelineStage(model, mesh.get_local_rank(), mesh.size(), device, group=mesh.get_group())
    return Schedule1F1B(stage, mesh.size(), loss_fn=loss_of, scale_grads=False)


def run_stages(model: nn.Module, mesh: Any, config: Config, tokens: Tensor) -> Tensor | None:
    """Runs the stages in turn; returns scores on the last. The schedule's own `eval` would set its stages up anew."""
    stage, group = mesh.get_local_rank(), mesh.get_group()
    ranks, entering = dist.get_process_group_ranks(group), tokens
    if stage > 0:
        entering = torch.empty(*tokens.shape, config.width, dtype=DTYPES[config.precision], device=tokens.device)
        dist.recv(entering, ranks[stage - 1], group)
    outputs: Tensor = model(entering)
    if stage == mesh.size() - 1:
        return outputs
    dist.send(outputs.contiguous(), ranks[stage + 1], group)
    return None


def cut_batches(collate: Collate, config: Config, mesh: Any) -> Collate:
    """Makes a `collate` that returns this rank's part of a batch."""
    name, number = sharing(config)
    if name in ("", "tp"):  # tensor-parallel ranks have whole batches
        return collate
    part = mesh[SHARING[name]].get_local_rank()

    def part_of_rows(rows: list[Tensor]) -> Batch:
        batch = collate(rows)
        missing = -batch["inputs"].shape[1] % number
        return {key: _padded(one, 0, missing, key).chunk(number, dim=1)[part] for key, one in batch.items()}

    def of_one_shape(rows: list[Tensor]) -> Batch:
        """Pads every micro-batch to one shape, since stages exchange tensors of one shape."""
        batch = collate(rows)
        missing = config.largest - len(rows), config.context - batch["inputs"].shape[1]
        return {key: _padded(one, *missing, key) for key, one in batch.items()}

    return part_of_rows if name == "cp" else of_one_shape


def _padded(one: Tensor, rows: int, tokens: int, key: str) -> Tensor:
    return pad(one, (0, tokens, 0, rows), value=IGNORED if key == "labels" else 0)
