"""Wraps the model, with its optimizer and everything that belongs to them: one function per engine."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import wrappers
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.checkpoint import checkpoint

from .config import DTYPES, ROOT, Config, read_text, stop
from .job import Job
from .tasks import blocks
from .tensor import cut_model


@dataclass
class Wrapped:
    model: nn.Module  # the one to call, and to give the Accumulator
    optimizer: Any  # for the Accumulator; None if the engine keeps it
    schedule: LambdaLR
    inner: Optimizer  # the torch optimizer in it
    scaler: torch.amp.GradScaler | None = None
    accelerator: Any = None
    mesh: Any = None  # of data ranks and tensor-parallel ranks, if there are any

    @property
    def lr(self) -> float:
        return float(self.inner.param_groups[0]["lr"])

    def set_schedule(self, stepped: int) -> None:
        """Moves this run's schedule, not that of the run that wrote the checkpoint, to its place after these steps."""
        self.schedule.last_epoch = stepped
        for group, base, factor in zip(
            self.inner.param_groups, self.schedule.base_lrs, self.schedule.lr_lambdas, strict=True
        ):
            group["initial_lr"] = base
            group["lr"] = base * factor(stepped)

    @property
    def is_deepspeed(self) -> bool:
        return hasattr(self.model, "zero_optimization_stage")


def change_blocks(model: nn.Module, config: Config) -> None:
    """Sets blocks to be compiled, or recomputed in backward, as configured; call it before the model is wrapped."""
    parts = blocks(model)
    if config.activation_checkpointing:
        if not parts:
            stop(f"activation_checkpointing with {config.model}, which has no blocks that are known here; leave it out")
        for part in parts:
            part.forward = partial(checkpoint, part.forward, use_reentrant=False)
    if config.compile:
        for part in parts or [model]:
            part.compile()


def wrap(model: nn.Module, config: Config, job: Job, updates: int) -> Wrapped:
    model.to(job.device)
    how = {"deepspeed": _deepspeed, "accelerate": _accelerate}.get(job.engine, _with_torch)
    return how(model, config, job, updates)


def _with_torch(model: nn.Module, config: Config, job: Job, updates: int) -> Wrapped:
    mesh = cut_model(model, config, job.device) if config.tp > 1 else None
    if job.engine == "ddp":
        model = wrappers.ddp(model, gradient_as_bucket_view=True)
    elif job.engine == "fsdp2":
        policy = MixedPrecisionPolicy()
        if config.precision in ("bf16", "fp16"):
            policy = MixedPrecisionPolicy(param_dtype=DTYPES[config.precision], reduce_dtype=torch.float32)
        shape = (config.replicas, job.ranks // config.replicas) if config.replicas > 1 else ()
        wrappers.fully_sharded(model, blocks(model), shape=shape, mesh=mesh and mesh["data"], mp_policy=policy)
    optimizer, schedule = make_optimizer(model, config, updates)
    scaler = torch.amp.GradScaler(job.device.type) if config.precision == "fp16" else None
    return Wrapped(model, optimizer, schedule, optimizer, scaler, mesh=mesh)


def make_optimizer(model: nn.Module, config: Config, updates: int) -> tuple[Optimizer, LambdaLR]:
    """The optimizer and its schedule, which counts updates."""
    ratio = config.batch_size / (config.base_batch_size or config.batch_size)
    lr = config.lr * (ratio if config.lr_scaling == "linear" else math.sqrt(ratio))
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer: Optimizer
    if config.optimizer == "sgd":
        optimizer = SGD(parameters, lr=lr, momentum=config.momentum, weight_decay=config.weight_decay)
    else:
        optimizer = AdamW(parameters, lr=lr, betas=config.betas, weight_decay=config.weight_decay)

    def factor(update: int) -> float:
        if update < config.warmup:
            return (update + 1) / config.warmup
        if config.schedule == "constant":
            return 1.0
        done = (update - config.warmup) / max(1, updates - config.warmup)
        least = config.min_lr / config.lr
        return least + (1 - least) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))

    return optimizer, LambdaLR(optimizer, factor)


def read_deepspeed(config: Config) -> dict[str, Any]:
    """DeepSpeed's JSON, with the run's values in place of "auto" and of missing entries."""
    path = Path(config.deepspeed_config or ROOT / "configs" / "deepspeed" / f"zero{config.stage}.json")
    try:
        values: dict[str, Any] = json.loads(read_text(path))
    except OSError as error:
        stop(f"{path} cannot be read: {error.strerror}; configs/deepspeed/ has a file for each stage")
    except ValueError as error:
        stop(f"{path} is not JSON: {error}")
    ours = {
        "train_micro_batch_size_per_gpu": config.largest,
        "gradient_accumulation_steps": 1,  # distaccum accumulates
        "gradient_clipping": config.max_norm,
        "bf16": {"enabled": config.precision == "bf16"},
        "fp16": {"enabled": config.precision == "fp16"},
    }
    values.update({name: value for name, value in ours.items() if values.get(name, "auto") == "auto"})
    for name in ("bf16", "fp16"):
        if bool(values[name].get("enabled")) != (config.precision == name):
            stop(f'{path} has "{name}": {values[name]} and precision is {config.precision!r}; leave it out')
    return values


def _start_deepspeed(job: Job) -> None:
    """Imports DeepSpeed into this job's process group."""
    os.environ.update(wrappers.deepspeed_variables(job.device.type))
    try:
        wrappers.import_deepspeed(job.device.type)
    except ImportError:
        stop("engine = 'deepspeed' and it is not installed; pip install deepspeed")


def _deepspeed(model: nn.Module, config: Config, job: Job, updates: int) -> Wrapped:
    values = read_deepspeed(config)
    _start_deepspeed(job)
    if config.precision != "float32":  # then its weights have this dtype, and so must its inputs
        dtype = DTYPES[config.precision]
        model.register_forward_pre_hook(
            lambda _, given: tuple(x.to(dtype) if x.is_floating_point() else x for x in given)
        )
    inner, schedule = make_optimizer(model, config, updates)
    engine, optimizer = wrappers.deepspeed(model, inner, values)
    return Wrapped(engine, optimizer, schedule, inner)


def _accelerate(model: nn.Module, config: Config, job: Job, updates: int) -> Wrapped:
    """Wraps in DDP, FSDP or DeepSpeed, whichever `accelerate launch` and its config file choose."""
    is_cpu = job.device.type == "cpu"
    is_deepspeed = os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true"
    if is_cpu and os.environ.get("ACCELERATE_USE_FSDP") == "true":
        stop("Accelerate's config asks for FSDP, and on CPU it would make DDP of it; use --engine fsdp2, or GPUs")
    if os.environ.get("ACCELERATE_USE_FSDP") == "true" and os.environ.get("FSDP_VERSION", "1") == "1":
        stop("Accelerate's config asks for FSDP 1, whose parts are not saved here; give it fsdp_version: 2")
    if is_deepspeed:
        _start_deepspeed(job)
    try:
        from accelerate import Accelerator, InitProcessGroupKwargs
    except ImportError:
        stop("engine = 'accelerate' and it is not installed; pip install accelerate")
    accelerator = Accelerator(
        # Without cpu=True it would not connect the ranks on a CPU; with it, it would ignore DeepSpeed.
        cpu=is_cpu and not is_deepspeed,
        mixed_precision=config.precision if config.precision in ("bf16", "fp16") else "no",
        kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")] if is_cpu and is_deepspeed else [],
    )
    if is_deepspeed:
        accelerator.state.deepspeed_plugin.deepspeed_config.update(
            train_micro_batch_size_per_gpu=config.largest, gradient_clipping=config.max_norm
        )
    if accelerator.num_processes != job.ranks:
        stop(f"Accelerate sees {accelerator.num_processes} processes of {job.ranks}; start with its launcher")
    inner, schedule = make_optimizer(model, config, updates)
    prepared_model, optimizer = accelerator.prepare(model, inner)
    return Wrapped(prepared_model, optimizer, schedule, inner, accelerator=accelerator)
