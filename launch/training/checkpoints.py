"""Checkpoints: folders that are complete or absent, and that say where the run resumes.

`state.pt` has the whole model and optimizer by name, so that a run can resume under another engine and on another
number of ranks; DeepSpeed writes its own files instead, one per rank. A folder is written under another name, flushed
to disk, and renamed.
"""

from __future__ import annotations

import logging
import math
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from distaccum import Accumulator

from .config import LASTING, Config, a_line, stop
from .job import Job
from .wrapping import Wrapped

State = dict[str, Any]
Tensors = dict[tuple[str, str], Tensor]


class Checkpoints:
    def __init__(self, config: Config, job: Job, wrapped: Wrapped, accumulator: Accumulator, num_samples: int) -> None:
        self._config, self._job, self._wrapped, self._accumulator = config, job, wrapped, accumulator
        self._folder = Path(config.out) / "checkpoints"
        self._saved = ""  # the newest checkpoint
        self._time = time.monotonic()  # when it was made
        self.best = math.inf  # lowest loss on held-out data
        # Values that a checkpoint and the run that resumes it must share.
        self._lasting: State = {name: getattr(config, name) for name in LASTING}
        zero = [wrapped.model.zero_optimization_stage(), job.ranks] if wrapped.is_deepspeed else None  # type: ignore[operator]
        self._lasting |= {"samples to train on": num_samples, "DeepSpeed's stage and ranks": zero}

    def overdue(self) -> bool:
        """True if the first rank's clock asks for a checkpoint."""
        seconds = 60 * self._config.checkpoint_minutes
        return self._job.is_first and 0 < seconds <= time.monotonic() - self._time

    def save(self) -> None:
        """Saves the state between two windows. All ranks call it together."""
        wrapped, job = self._wrapped, self._job
        name = f"update-{self._accumulator.index:08d}"
        self._time = time.monotonic()
        if name == self._saved:
            return
        partial = self._folder / f".{name}"
        if job.is_first:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        job.wait_for_all()
        state: State = {"accumulator": self._accumulator_of_all(), "schedule": wrapped.schedule.last_epoch}
        state |= {"update": self._accumulator.index, "lasting": self._lasting, "best": self.best}
        if wrapped.is_deepspeed:
            with writing(partial):
                wrapped.model.save_checkpoint(str(partial), tag="deepspeed")  # type: ignore[operator]
            job.wait_for_all()
        else:
            state["tensors"] = whole_state(wrapped)
        if job.is_first:
            with writing(partial):
                save_tensors(state, partial / "state.pt")
                for path in (*partial.rglob("*"), partial):
                    _to_disk(path)
            shutil.rmtree(self._folder / name, ignore_errors=True)
            partial.replace(self._folder / name)
            _to_disk(self._folder)
            for old in self._folders()[: -self._config.keep]:
                shutil.rmtree(old)
        job.wait_for_all()
        self._saved = name

    def resume(self) -> None:
        """Restores everything from the newest checkpoint, if there is one."""
        wrapped, job = self._wrapped, self._job
        state, refusal = self._read() if job.is_first else ({}, "")
        tensors = state.pop("tensors", {})
        box: list[Any] = [state, refusal]
        if job.ranks > 1:  # one rank reads: the others may be on machines that do not see the folder
            dist.broadcast_object_list(box)
        state, refusal = box
        if refusal:
            stop(refusal)
        if not state:
            job.say(f"no checkpoint in {self._folder}: starts anew")
            return
        self._saved = f"update-{state['update']:08d}"
        self.best = state["best"]
        if wrapped.is_deepspeed:
            wrapped.model.load_checkpoint(str(self._folder / self._saved), tag="deepspeed")  # type: ignore[operator]
        else:
            put_state(wrapped, tensors)
        wrapped.set_schedule(state["schedule"])
        # For another number of ranks, for which the checkpoint has no random numbers: dropout starts anew.
        torch.manual_seed((self._config.seed + 1 + job.rank) * 1_000_003 + state["update"])
        self._accumulator.load_state_dict(state["accumulator"])
        job.say(f"goes on with update {state['update']}")

    def _read(self) -> tuple[State, str]:
        """The newest state, and the reason why it cannot be used, if any."""
        for partial in self._folder.glob(".update-*"):  # from a run that was killed while writing
            shutil.rmtree(partial)
        folders = self._folders()
        if not folders:
            return {}, f"no checkpoint in {self._folder} to evaluate" if self._config.evaluate_only else ""
        newest = folders[-1]
        try:
            state: State = torch.load(newest / "state.pt", weights_only=True, map_location="cpu")
            made = state["lasting"]  # another version may lack it
        except Exception as error:  # a broken file may raise anything
            return {}, f"{newest} cannot be read ({a_line(error)}); remove it to go on from the one before"
        for name, now in self._lasting.items():
            if made.get(name) != now:
                cure = "give the same, or another --out to start anew"
                return {}, f"{newest} was made with {name} = {made.get(name)!r} and this run has {now!r}; {cure}"
        return state, ""

    def _accumulator_of_all(self) -> State:
        """One state with the random numbers of every rank."""
        mine = self._accumulator.state_dict()
        every: list[Any] = [mine] * self._job.ranks
        if self._job.ranks > 1:
            dist.all_gather_object(every, mine)
        return {name: value for state in every for name, value in state.items()}

    def _folders(self) -> list[Path]:
        """All checkpoints, the oldest first."""
        return sorted(self._folder.glob("update-????????"))


def save_weights(config: Config, job: Job, wrapped: Wrapped, name: str = "weights") -> None:
    """Saves the model's weights by name in the run's folder. All ranks call it."""
    if wrapped.is_deepspeed:
        import deepspeed

        module: Any = wrapped.model.module
        with deepspeed.zero.GatheredParameters(list(module.parameters())):  # for stage 3; freed again afterwards
            weights = {key: tensor.detach().cpu().clone() for key, tensor in module.state_dict().items()}
    else:
        weights = {key: tensor for (_, key), tensor in whole_state(wrapped, with_optimizer=False).items()}
    if job.is_first:
        partial = Path(config.out) / f".{name}.pt"
        with writing(partial):
            save_tensors(weights, partial)
        partial.replace(partial.with_name(f"{name}.pt"))


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Removes what was written if writing fails, and raises one error that says why."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        cause: BaseException = error
        while cause.__context__ is not None and not isinstance(cause, OSError):  # torch hides it
            cause = cause.__context__
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
        raise OSError(f"{path} cannot be written: {a_line(cause)}") from error


def save_tensors(state: Any, path: Path) -> None:
    with path.open("wb") as file:  # its errors say more than those of torch's own writer
        torch.save(state, file)


def _to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# Whole weights and optimizer state by name: gathered from ranks that have parts, and put back


def whole_state(wrapped: Wrapped, with_optimizer: bool = True) -> Tensors:
    """Weights ("") and the optimizer's tensors by kind and name, whole on the first rank only. All ranks call it."""
    # torch warns that a weight cut over two dimensions is gathered in two steps, which cannot be avoided.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    module = _unwrapped(wrapped.model)
    states = wrapped.inner.state
    tensors: Tensors = {("", name): tensor for name, tensor in module.state_dict().items()}
    for name, parameter in module.named_parameters() if with_optimizer else ():
        tensors |= {(kind, name): tensor for kind, tensor in states.get(parameter, {}).items()}
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    whole: Tensors = {}
    for key, tensor in tensors.items():
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if is_first:
            whole[key] = full.detach().cpu()
    return whole


@torch.no_grad()
def put_state(wrapped: Wrapped, tensors: Tensors) -> None:
    """Restores what `whole_state` gave the first rank, even if this run is cut differently. All ranks call it."""
    module = _unwrapped(wrapped.model)
    states = wrapped.inner.state
    own = module.state_dict()
    parameters = dict(module.named_parameters())
    device = next(module.parameters()).device
    box: list[Any] = [[(key, tensor.shape, tensor.dtype) for key, tensor in tensors.items()]]
    if dist.is_initialized():
        dist.broadcast_object_list(box)
    for (kind, name), shape, dtype in box[0]:
        full = tensors[kind, name].to(device) if tensors else torch.empty(shape, dtype=dtype, device=device)
        if dist.is_initialized():
            dist.broadcast(full, 0)
        like = own[name]
        if kind == "step":  # a number that AdamW keeps on the host
            states[parameters[name]][kind] = full.cpu()
            continue
        if isinstance(like, DTensor):
            everywhere = [Replicate()] * like.device_mesh.ndim
            full = DTensor.from_local(full, like.device_mesh, everywhere, run_check=False)
        if kind:
            like = states[parameters[name]][kind] = torch.zeros_like(like, dtype=dtype)
        like.copy_(full)


def _unwrapped(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
