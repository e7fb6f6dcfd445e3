"""Checkpoints: folders that are there whole or not at all, and that say where the run goes on.

`state.pt` has the whole model and optimizer by name, so that a run goes on under another engine and on another number
of ranks; DeepSpeed writes its own files instead, one per rank. Within a window it is the state at the window's start. A
folder is written under another name, brought to disk, and renamed.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
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

from .config import LASTING, Config, a_line, stop
from .job import Job
from .wrapping import Wrapped

State = dict[str, Any]


class Checkpoints:
    def __init__(self, config: Config, job: Job, wrapped: Wrapped, accumulator: Accumulator, num_samples: int) -> None:
        self._config, self._job, self._wrapped, self._accumulator = config, job, wrapped, accumulator
        self._folder = Path(config.out) / "checkpoints"
        self._saved, self._time = "", time.monotonic()  # the newest, and when it was made
        # What a checkpoint and the run that resumes it have in common.
        self._lasting: State = {name: getattr(config, name) for name in LASTING}
        zero = [wrapped.model.zero_optimization_stage(), job.ranks] if wrapped.is_deepspeed else None  # type: ignore[operator]
        self._lasting |= {"samples to train on": num_samples, "DeepSpeed's stage and ranks": zero}

    def due(self) -> bool:
        """True if the number of updates asks for a checkpoint between two windows."""
        return self._config.checkpoint_every > 0 and self._accumulator.index % self._config.checkpoint_every == 0

    def overdue(self) -> bool:
        """True if the first rank's clock asks for a checkpoint, possibly inside a window."""
        seconds = 60 * self._config.checkpoint_minutes
        return self._job.is_first and 0 < seconds <= time.monotonic() - self._time

    def save(self) -> None:
        """Saves between two windows, or the start of the one at work. All ranks call it together."""
        wrapped, job = self._wrapped, self._job
        name, self._time = f"update-{self._accumulator.index:08d}", time.monotonic()
        if name == self._saved:
            return
        partial = self._folder / f".{name}"
        if job.is_first:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        job.wait_for_all()
        state: State = {"accumulator": self._accumulator_of_all(), "schedule": wrapped.schedule.last_epoch}
        state |= {"update": self._accumulator.index, "lasting": self._lasting}
        if wrapped.is_deepspeed:
            with writing(partial):
                wrapped.model.save_checkpoint(str(partial), tag="deepspeed")  # type: ignore[operator]
            job.wait_for_all()
        else:
            # An optimizer without a state yet, or for ever, torch would step to make one.
            has_state = bool(wrapped.schedule.last_epoch and self._kinds())
            state["model"], state["optimizer"] = whole_state(wrapped, with_optimizer=has_state)
            if job.is_first and has_state:
                self._fill(state["optimizer"]["state"], state["model"])
        if job.is_first:
            with writing(partial):
                save_tensors(state, partial / "state.pt")
                for path in (*partial.rglob("*"), partial):
                    _to_disk(path)
            shutil.rmtree(self._folder / name, ignore_errors=True)
            partial.replace(self._folder / name)
            _to_disk(self._folder)
            for old in self._found()[: -self._config.keep]:
                shutil.rmtree(old)
        job.wait_for_all()
        self._saved, self._time = name, time.monotonic()

    def resume(self) -> None:
        """Puts everything back as the newest checkpoint has it, if there is one."""
        wrapped, job = self._wrapped, self._job
        state, refusal = self._read() if job.is_first else ({}, "")
        weights, optimizer = state.pop("model", {}), state.pop("optimizer", None)
        box: list[Any] = [state, refusal, bool(optimizer and optimizer["state"])]  # SGD alone has no state
        if job.ranks > 1:  # one rank reads: the others may be on machines that do not see the folder
            dist.broadcast_object_list(box)
        state, refusal, has_optimizer = box
        if refusal:
            stop(refusal)
        if not state:
            job.say(f"no checkpoint in {self._folder}: starts anew")
            return
        self._saved = f"update-{state['update']:08d}"
        if wrapped.is_deepspeed:
            wrapped.model.load_checkpoint(str(self._folder / self._saved), tag="deepspeed")  # type: ignore[operator]
        else:
            put_state(wrapped, weights, (optimizer or {}) if has_optimizer else None)
        wrapped.set_schedule(state["schedule"])
        # For another number of ranks, which the checkpoint has no random numbers of: dropout starts anew.
        torch.manual_seed((self._config.seed + 1 + job.rank) * 1_000_003 + state["update"])
        self._accumulator.load_state_dict(state["accumulator"])
        job.say(f"goes on with update {state['update']}")

    def _read(self) -> tuple[State, str]:
        """The newest state, and why it cannot be used, if so."""
        for partial in self._folder.glob(".update-*"):  # of a run that was killed while it wrote
            shutil.rmtree(partial)
        if not (found := self._found()):
            return {}, ""
        try:
            state: State = torch.load(found[-1] / "state.pt", weights_only=True, map_location="cpu")
            made = state["lasting"]
        except Exception as error:  # of as many kinds as there are ways to break a file
            return {}, f"{found[-1]} cannot be read ({a_line(error)}); remove it to go on from the one before"
        for name, now in self._lasting.items():
            if made.get(name) != now:
                cure = "give the same, or another --out to start anew"
                return {}, f"{found[-1]} was made with {name} = {made.get(name)!r} and this run has {now!r}; {cure}"
        return state, ""

    def _kinds(self) -> list[str]:
        """The names of the tensors that the optimizer keeps for each parameter."""
        if self._config.optimizer == "adamw":
            return ["step", "exp_avg", "exp_avg_sq"]
        return ["momentum_buffer"] if self._config.momentum else []

    def _fill(self, states: State, weights: State) -> None:
        """Gives what never had a gradient the state its first would begin with: torch loads all of it or none."""
        for name in self._wrapped.trained - states.keys():
            zeros = torch.zeros_like(weights[name])
            states[name] = {kind: torch.zeros(()) if kind == "step" else zeros.clone() for kind in self._kinds()}

    def _accumulator_of_all(self) -> State:
        """One state with the random numbers of every rank."""
        mine = self._accumulator.state_dict()
        every: list[Any] = [mine] * self._job.ranks
        if self._job.ranks > 1:
            dist.all_gather_object(every, mine)
        return {name: value for one in every for name, value in one.items()}

    def is_finished(self, updates: int) -> bool:
        """True if all updates are done and the weights are written."""
        written = self._job.is_first and (Path(self._config.out) / "weights.pt").exists()
        return self._accumulator.index >= updates and self._job.largest(written)[0] > 0

    def _found(self) -> list[Path]:
        """The oldest first."""
        return sorted(self._folder.glob("update-????????"))


def save_weights(config: Config, job: Job, wrapped: Wrapped) -> None:
    """weights.pt in the run's folder: the model's weights by name. All ranks call it."""
    if wrapped.is_deepspeed:
        import deepspeed

        module: Any = wrapped.model.module
        with deepspeed.zero.GatheredParameters(list(module.parameters())):  # of stage 3, and then let go again
            weights = {name: tensor.detach().cpu().clone() for name, tensor in module.state_dict().items()}
    else:
        weights, _ = whole_state(wrapped, with_optimizer=False)
    if job.is_first:
        partial = Path(config.out) / ".weights.pt"
        with writing(partial):
            save_tensors(weights, partial)
        partial.replace(partial.with_name("weights.pt"))


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Removes what was written if writing fails, and raises one error that says why."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        cause: BaseException = error
        while cause.__context__ is not None and not isinstance(cause, OSError):  # behind what torch makes of it
            cause = cause.__context__
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
        raise OSError(f"{path} cannot be written: {a_line(cause)}") from error


def save_tensors(state: Any, path: Path) -> None:
    with path.open("wb") as file:  # whose errors say more than those of torch's own writer
        torch.save(state, file)


def _to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# The whole weights and optimizer state by name: gathered from ranks that have parts or stages, and put back


def whole_state(wrapped: Wrapped, with_optimizer: bool) -> tuple[State, State | None]:
    """Weights, and the optimizer's state if wanted; whole on the first rank alone. All ranks call it."""
    # It warns that a weight which two dimensions cut is gathered in two steps, as it must be.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    options = StateDictOptions(full_state_dict=True, cpu_offload=wrapped.pipeline is None)  # to rank 0 alone
    optimizer: State | None = None
    if with_optimizer:
        weights, optimizer = get_state_dict(wrapped.model, wrapped.inner, options=options)
    else:
        weights = get_model_state_dict(wrapped.model, options=options)
    return (weights, optimizer) if wrapped.pipeline is None else _of_all_stages(wrapped.mesh, weights, optimizer)


def put_state(wrapped: Wrapped, weights: State, optimizer: State | None) -> None:
    """Puts back what `whole_state` gave the first rank; the others' arguments are not used. All ranks call it.

    `wrapped` may be of another number of ranks, and cut otherwise. `optimizer` is None where its state is left alone.
    """
    several = dist.is_initialized() and dist.get_world_size() > 1
    if wrapped.pipeline is not None:
        box: list[Any] = [weights, optimizer]
        dist.broadcast_object_list(box)
        weights, optimizer = box
        own = wrapped.model.state_dict().keys()
        weights = {name: tensor for name, tensor in weights.items() if name in own}
        if optimizer is not None:
            groups = [
                {**group, "params": [name for name in group["params"] if name in own]}
                for group in optimizer["param_groups"]
            ]
            states = {name: state for name, state in optimizer["state"].items() if name in own}
            optimizer = {"state": states, "param_groups": groups}
        several = False  # each rank has now all that it takes its shards from
    options = StateDictOptions(full_state_dict=True, cpu_offload=not several, broadcast_from_rank0=several)
    set_model_state_dict(wrapped.model, weights, options=options)
    if optimizer is not None:
        set_optimizer_state_dict(wrapped.model, wrapped.inner, optimizer, options=options)


def _of_all_stages(mesh: Any, weights: State, optimizer: State | None) -> tuple[State, State | None]:
    """Joined on the first stage of each data rank, of which one is the first rank."""
    stages = mesh["stage"]
    group, found = stages.get_group(), [None] * stages.size()
    is_first = stages.get_local_rank() == 0
    first = dist.get_process_group_ranks(group)[0]
    dist.gather_object(_on_host([weights, optimizer]), found if is_first else None, dst=first, group=group)
    parts: list[Any] = found if is_first else [[weights, optimizer]]
    whole = {name: tensor for of_stage, _ in parts for name, tensor in of_stage.items()}
    if optimizer is None:
        return whole, None
    states = {name: state for _, of_stage in parts for name, state in of_stage["state"].items()}
    groups = [group for _, of_stage in parts for group in of_stage["param_groups"]]  # all with the same options
    names = [name for group in groups for name in group["params"]]
    return whole, {"state": states, "param_groups": [{**groups[0], "params": names}]}


def _on_host(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.cpu()
    if isinstance(value, dict):
        return {name: _on_host(one) for name, one in value.items()}
    return [_on_host(one) for one in value] if isinstance(value, list) else value
