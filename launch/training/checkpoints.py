"""Checkpoints: folders that are there whole or not at all, and that say where the run goes on.

`state.pt` has the whole model and optimizer by name, so that a run goes on under another engine and on another number
of ranks; DeepSpeed writes its own files instead, one per rank. Within a window it is the state at the window's start. A
folder is written under another name, brought to disk, and renamed. `checksums.json` has the SHA-256 of each other file:
a checkpoint whose files are others is passed over.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import shutil
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from distaccum import Accumulator

from .config import MAY_CHANGE, Config, a_line, read_interval, stop
from .job import EXCHANGE_SECONDS, Job
from .states import put_state, whole_state
from .wrapping import Wrapped

NAME = re.compile(r"update-\d{8}")
IN_A_STATE = {"update", "accumulator", "schedule", "num_samples", "stage", "config"}


class Checkpoints:
    def __init__(self, config: Config, job: Job, wrapped: Wrapped, accumulator: Accumulator, num_samples: int) -> None:
        self._config, self._job, self._wrapped, self._accumulator = config, job, wrapped, accumulator
        self._num_samples = num_samples
        self._folder = Path(config.out) / "checkpoints"
        self._saved = ""  # the newest
        self._every, self._minutes = read_interval(config.checkpoint_every)
        self._time = time.monotonic()  # of the newest

    @property
    def seconds(self) -> float:
        """How often the ranks ask each other whether a signal has come or a checkpoint is overdue."""
        return min(EXCHANGE_SECONDS, 60 * self._minutes or EXCHANGE_SECONDS)

    def due(self) -> bool:
        """Whether the number of updates asks for a checkpoint between two windows."""
        return self._every > 0 and self._accumulator.index % self._every == 0

    def overdue(self) -> bool:
        """Whether the first rank's clock asks for a checkpoint, which may be inside a window."""
        minutes = (time.monotonic() - self._time) / 60
        return self._job.is_first and 0 < self._minutes <= minutes

    def save(self) -> None:
        """Saves between two windows, or the start of the one at work. All ranks call it together."""
        wrapped, job, index = self._wrapped, self._job, self._accumulator.index
        name, self._time = f"update-{index:08d}", time.monotonic()
        if name == self._saved:
            return
        whole, partial = self._folder / name, self._folder / f".{name}"
        if job.is_first:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        job.wait_for_all()
        state: dict[str, Any] = {
            "update": index,
            "accumulator": self._accumulator_of_all(),
            "schedule": wrapped.schedule.last_epoch,
            "num_samples": self._num_samples,
            "stage": self._stage(),
            "config": dataclasses.asdict(self._config),
        }
        if wrapped.is_deepspeed:
            with writing(partial):
                wrapped.model.save_checkpoint(str(partial), tag="deepspeed")  # type: ignore[operator]
            job.wait_for_all()
        else:
            # An optimizer without a state yet, or for ever, torch would step to make one.
            has_state = bool(wrapped.schedule.last_epoch and self._kinds())
            weights, optimizer = whole_state(wrapped, with_optimizer=has_state)
            if job.is_first and optimizer is not None:
                fill_state(optimizer, {name: weights[name] for name in wrapped.trained}, self._kinds())
            state["model"], state["optimizer"] = weights, optimizer
        if job.is_first:
            with writing(partial):
                save_tensors(state, partial / "state.pt")
                sums = {str(path.relative_to(partial)): _checksum(path) for path in _files(partial)}
                (partial / "checksums.json").write_text(json.dumps(sums, indent=1) + "\n")
                for path in (*partial.rglob("*"), partial):
                    _to_disk(path)
            shutil.rmtree(whole, ignore_errors=True)
            partial.replace(whole)
            _to_disk(self._folder)
            for old in self._found()[: -self._config.keep]:
                shutil.rmtree(old)
        job.wait_for_all()
        self._saved, self._time = name, time.monotonic()

    def resume(self) -> None:
        """Puts everything back as the newest checkpoint has it, if there is one."""
        wrapped, job = self._wrapped, self._job
        newest = self._read() if job.is_first else None
        if isinstance(newest, dict):
            newest["has_optimizer"] = bool((newest.get("optimizer") or {}).get("state"))  # SGD alone has none
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
            wrapped.model.load_checkpoint(str(self._folder / newest["name"]), tag="deepspeed")  # type: ignore[operator]
        else:
            put_state(wrapped, tensors[0], tensors[1] if newest["has_optimizer"] else None)
        wrapped.set_schedule(newest["schedule"])
        # For another number of ranks, which the checkpoint has no random numbers of: dropout starts anew.
        torch.manual_seed((self._config.seed + 1 + job.rank) * 1_000_003 + newest["update"])
        self._accumulator.load_state_dict(newest["accumulator"])
        self._saved = newest["name"]
        job.say(f"goes on with update {newest['update']}")

    def _read(self) -> dict[str, Any] | str | None:
        """The newest state that is whole, or a sentence on why none can be used."""
        for partial in self._folder.glob(".update-*"):  # of a run that was killed while it wrote
            shutil.rmtree(partial)
        damaged: list[tuple[Path, str]] = []
        for folder in reversed(self._found()):
            try:
                state = self._load(folder)
                reason = self._refused(folder, state)
            except Exception as error:  # of as many kinds as there are ways to break a file
                damaged.append((folder, a_line(error)))
                continue
            if reason:
                return reason
            for broken, why in damaged:  # out of the way of those to come, which `keep` counts
                aside = broken.with_name(f"damaged-{broken.name}")
                shutil.rmtree(aside, ignore_errors=True)
                broken.rename(aside)
                warnings.warn(f"{broken} is damaged: {why}; goes on from the one before ({aside.name})", stacklevel=1)
            return state
        if damaged:
            folder, why = damaged[0]
            others = f", and so are the {len(damaged) - 1} before it" if damaged[1:] else " and the only one"
            return f"{folder} is damaged: {why}{others}; remove the run's folder, or give another --out, to start anew"
        return None

    def _load(self, folder: Path) -> dict[str, Any]:
        """What `save` wrote. An error says which file is not as it was written."""
        for name, checksum in json.loads((folder / "checksums.json").read_text()).items():
            if not (folder / name).is_file():
                raise ValueError(f"{name} is missing")
            if _checksum(folder / name) != checksum:
                raise ValueError(f"{name} has another checksum than when it was written")
        state: dict[str, Any] = torch.load(folder / "state.pt", weights_only=True, map_location="cpu")
        if not isinstance(state, dict) or not state.keys() >= IN_A_STATE:
            raise ValueError("state.pt is no checkpoint of train.py")
        state["name"] = folder.name
        return state

    def _kinds(self) -> list[str]:
        """Of what the optimizer keeps of a parameter."""
        if self._config.optimizer == "adamw":
            return ["step", "exp_avg", "exp_avg_sq"]
        return ["momentum_buffer"] if self._config.momentum else []

    def _refused(self, folder: Path, state: dict[str, Any]) -> str:
        """Why a checkpoint that is whole is not for this run, if so."""
        now = dataclasses.asdict(self._config)
        for name, value in state["config"].items():
            if name in now and now[name] != value and name not in MAY_CHANGE:
                return (
                    f"{folder} was made with {name} = {value!r} and this run has {now[name]!r}; give the same, or "
                    "another --out to start anew"
                )
        if state["num_samples"] != self._num_samples:
            return (
                f"{folder} was made with {state['num_samples']} samples to train on and {now['data']} now has "
                f"{self._num_samples}; give it the same data, or another --out to start anew"
            )
        if ("model" in state) == self._wrapped.is_deepspeed:
            made = "another engine" if self._wrapped.is_deepspeed else "DeepSpeed"
            return f"{folder} was written by {made}, whose files this engine cannot read; use the engine that wrote it"
        stage, ranks = state["stage"], state["accumulator"]["ranks"]
        if self._wrapped.is_deepspeed and (stage, ranks) != (self._stage(), self._job.ranks):
            return (
                f"{folder} was written by ZeRO stage {stage} on {ranks} ranks, and this run is stage "
                f"{self._stage()} on {self._job.ranks}; DeepSpeed goes on with the same alone"
            )
        return ""

    def _accumulator_of_all(self) -> dict[str, Any]:
        """One state with the random numbers of every rank."""
        mine = self._accumulator.state_dict()
        every: list[Any] = [mine] * self._job.ranks
        if self._job.ranks > 1:
            dist.all_gather_object(every, mine)
        return {name: value for one in every for name, value in one.items()}

    def is_finished(self, updates: int) -> bool:
        """Whether nothing is left to do: all updates are done, and the weights are written."""
        written = self._job.is_first and (Path(self._config.out) / "weights.pt").exists()
        return self._accumulator.index >= updates and self._job.largest(written)[0] > 0

    def _stage(self) -> int | None:
        return int(self._wrapped.model.zero_optimization_stage()) if self._wrapped.is_deepspeed else None  # type: ignore[operator]

    def _found(self) -> list[Path]:
        """The oldest first."""
        return sorted(path for path in self._folder.glob("update-*") if NAME.fullmatch(path.name) and path.is_dir())


def save_weights(config: Config, job: Job, wrapped: Wrapped) -> None:
    """weights.pt in the run's folder: the model's weights by name. All ranks call it."""
    weights = _weights(wrapped)
    if job.is_first:
        partial = Path(config.out) / ".weights.pt"
        with writing(partial):
            save_tensors(weights, partial)
        partial.replace(partial.with_name("weights.pt"))


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Where that cannot be written to its end, what is there of it goes, and one error says why."""
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


def fill_state(optimizer: dict[str, Any], trained: dict[str, Any], kinds: Sequence[str]) -> None:
    """Gives what never had a gradient the state that its first would begin with: torch loads all of it or none."""
    for name in trained.keys() - optimizer["state"].keys() if kinds else ():
        optimizer["state"][name] = {
            kind: torch.zeros(()) if kind == "step" else torch.zeros_like(trained[name]) for kind in kinds
        }


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _checksum(path: Path) -> str:
    found = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            found.update(block)
    return found.hexdigest()


def _weights(wrapped: Wrapped) -> dict[str, Any]:
    if not wrapped.is_deepspeed:
        return whole_state(wrapped, with_optimizer=False)[0]
    import deepspeed

    module: Any = wrapped.model.module
    with deepspeed.zero.GatheredParameters(list(module.parameters())):  # of stage 3, and then let go again
        return {name: tensor.detach().cpu().clone() for name, tensor in module.state_dict().items()}


def _to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
