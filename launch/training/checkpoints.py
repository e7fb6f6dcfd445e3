"""Checkpoints: folders that are there whole or not at all, and that say where the run goes on.

`state.pt` has the whole model and optimizer by name, so that a run goes on under another engine and on another number
of ranks; DeepSpeed writes its own files instead, one per rank. A folder is written under another name, brought to
disk, and renamed.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from distaccum import Accumulator

from .config import MAY_CHANGE, Config, stop
from .job import Job
from .wrapping import Wrapped


class Checkpoints:
    def __init__(self, config: Config, job: Job, wrapped: Wrapped, accumulator: Accumulator, num_samples: int) -> None:
        self._config, self._job, self._wrapped, self._accumulator = config, job, wrapped, accumulator
        self._num_samples = num_samples
        self._folder = Path(config.out) / "checkpoints"
        self._saved = -1  # the update that the newest was written at

    def due(self) -> bool:
        every = self._config.checkpoint_every
        return every > 0 and self._accumulator.index % every == 0

    def save(self) -> None:
        """All ranks together, between two windows."""
        wrapped, job, index = self._wrapped, self._job, self._accumulator.index
        if index == self._saved:
            return
        whole, partial = self._folder / f"update-{index:08d}", self._folder / f".update-{index:08d}"
        if job.is_first:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        job.wait_for_all()
        state = {
            "update": index,
            "accumulator": self._accumulator.state_dict(),
            "schedule": wrapped.schedule.last_epoch,
            "num_samples": self._num_samples,
            "stage": self._stage(),
            "random": self._random_states(),
            "config": dataclasses.asdict(self._config),
        }
        if wrapped.is_deepspeed:
            wrapped.model.save_checkpoint(str(partial), tag="deepspeed")  # type: ignore[operator]
            job.wait_for_all()
        else:
            state["model"], state["optimizer"] = get_state_dict(wrapped.model, wrapped.inner, options=_whole())
        if job.is_first:
            torch.save(state, partial / "state.pt")
            for path in (*partial.rglob("*"), partial):
                _to_disk(path)
            shutil.rmtree(whole, ignore_errors=True)
            partial.replace(whole)
            _to_disk(self._folder)
            for old in self._found()[: -self._config.keep]:
                shutil.rmtree(old)
        job.wait_for_all()
        self._saved = index

    def resume(self) -> None:
        """Puts everything back as the newest checkpoint has it, if there is one."""
        wrapped, job = self._wrapped, self._job
        newest = self._read() if job.is_first else None
        tensors = [newest.pop(name, {}) if isinstance(newest, dict) else {} for name in ("model", "optimizer")]
        if job.ranks > 1:  # one rank reads: the others may be on machines that do not see the folder
            box = [newest]
            dist.broadcast_object_list(box)
            newest = box[0]
        if newest is None:
            job.say(f"no checkpoint in {self._folder}: starts anew")
            return
        if isinstance(newest, str):
            stop(newest)
        if wrapped.is_deepspeed:
            folder = self._folder / f"update-{newest['update']:08d}"
            wrapped.model.load_checkpoint(str(folder), tag="deepspeed")  # type: ignore[operator]
        else:
            options = _whole(broadcast_from_rank0=job.ranks > 1)
            set_model_state_dict(wrapped.model, tensors[0], options=options)
            set_optimizer_state_dict(wrapped.model, wrapped.inner, tensors[1], options=options)
        wrapped.set_schedule(newest["schedule"])
        self._accumulator.load_state_dict(newest["accumulator"])
        if len(newest["random"]) == job.ranks:
            _set_random_state(newest["random"][job.rank])
        else:
            job.say(
                f"the checkpoint is of {len(newest['random'])} ranks and this run has {job.ranks}: dropout starts anew"
            )
            torch.manual_seed((self._config.seed + 1 + job.rank) * 1_000_003 + newest["update"])
        self._saved = newest["update"]
        job.say(f"goes on after update {self._saved - 1}")

    def _read(self) -> dict[str, Any] | str | None:
        """The newest state, or a sentence on why it cannot be used."""
        for partial in self._folder.glob(".update-*"):  # of a run that was killed while it wrote
            shutil.rmtree(partial)
        if not (found := self._found()):
            return None
        try:
            state: dict[str, Any] = torch.load(found[-1] / "state.pt", weights_only=True, map_location="cpu")
        except Exception as error:
            return f"{found[-1]} cannot be read ({error}); remove it to go on from the one before"
        now = dataclasses.asdict(self._config)
        for name, value in state["config"].items():
            if name in now and now[name] != value and name not in MAY_CHANGE:
                return (
                    f"{found[-1]} was made with {name} = {value!r} and this run has {now[name]!r}; give the same, or "
                    "another --out to start anew"
                )
        if state["num_samples"] != self._num_samples:
            return (
                f"{found[-1]} was made with {state['num_samples']} samples to train on and {now['data']} now has "
                f"{self._num_samples}; give it the same data, or another --out to start anew"
            )
        if ("model" in state) == self._wrapped.is_deepspeed:
            made = "another engine" if self._wrapped.is_deepspeed else "DeepSpeed"
            return (
                f"{found[-1]} was written by {made}, whose files this engine cannot read; use the engine that wrote it"
            )
        stage, ranks = state["stage"], len(state["random"])
        if self._wrapped.is_deepspeed and (stage, ranks) != (self._stage(), self._job.ranks):
            return (
                f"{found[-1]} was written by ZeRO stage {stage} on {ranks} ranks, and this run is stage "
                f"{self._stage()} on {self._job.ranks}; DeepSpeed goes on with the same alone"
            )
        return state

    def is_finished(self, updates: int) -> bool:
        """Whether nothing is left to do: all updates are done, and the weights are written."""
        written = self._job.is_first and (Path(self._config.out) / "weights.pt").exists()
        return self._accumulator.index >= updates and self._job.largest(written) > 0

    def _stage(self) -> int | None:
        return int(self._wrapped.model.zero_optimization_stage()) if self._wrapped.is_deepspeed else None  # type: ignore[operator]

    def _found(self) -> list[Path]:
        return sorted(path for path in self._folder.glob("update-*") if path.name[7:].isdigit())

    def _random_states(self) -> list[dict[str, Tensor]]:
        mine = {"cpu": torch.get_rng_state()}
        if self._job.device.type == "cuda":
            mine["cuda"] = torch.cuda.get_rng_state(self._job.device)
        everyone: list[Any] = [mine] * self._job.ranks
        if self._job.ranks > 1:
            dist.all_gather_object(everyone, mine)
        return everyone


def save_weights(config: Config, job: Job, wrapped: Wrapped) -> None:
    """weights.pt in the run's folder: the model's weights by name. All ranks call it."""
    weights = _weights(wrapped)
    if job.is_first:
        partial = Path(config.out) / ".weights.pt"
        torch.save(weights, partial)
        partial.replace(partial.with_name("weights.pt"))


def _weights(wrapped: Wrapped) -> dict[str, Any]:
    if not wrapped.is_deepspeed:
        return get_model_state_dict(wrapped.model, options=_whole())
    import deepspeed

    module: Any = wrapped.model.module
    with deepspeed.zero.GatheredParameters(list(module.parameters())):  # of stage 3, and then let go again
        return {name: tensor.detach().cpu().clone() for name, tensor in module.state_dict().items()}


def _whole(**more: Any) -> StateDictOptions:
    return StateDictOptions(full_state_dict=True, cpu_offload=not more.get("broadcast_from_rank0"), **more)


def _set_random_state(state: dict[str, Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def _to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
