"""Tensor parallelism (tp): neighbouring ranks have the same samples, and each has some of the heads of every layer."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .config import Config, stop
from .gpt import GPT, num_heads


def check_tensor(config: Config, ranks: int) -> None:
    """Stops at a combination that the program does not support."""
    if config.tp == 1:
        return
    given = f"tp = {config.tp}"
    if config.model != "gpt":
        stop(f"{given} with model = {config.model!r}, expected task = 'language' and 'gpt', whose layers can be cut")
    if config.engine not in ("auto", "fsdp2"):
        stop(f"{given} with engine = {config.engine!r}, expected 'fsdp2', which works over the data ranks alone")
    for other in ("replicas", "measure_noise", "compile"):
        if getattr(config, other) > 1 or getattr(config, other) is True:
            stop(f"{given} with {other}, expected one of them; leave the other out")
    heads = num_heads(config.width)
    for what, number in ((f"{ranks} ranks", ranks), (f"width = {config.width}, which makes {heads} heads", heads)):
        if number % config.tp:
            stop(f"{given} and {what}, expected a number that divides them")


def cut_model(model: nn.Module, config: Config, device: torch.device) -> Any:
    """Cuts the model in place; returns the mesh of data ranks and tensor-parallel ranks. All ranks call it."""
    from torch.distributed.device_mesh import init_device_mesh

    assert isinstance(model, GPT)
    shape = (dist.get_world_size() // config.tp, config.tp)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("data", "tensor"))
    model.cut_heads(mesh["tensor"])
    return mesh
