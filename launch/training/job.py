"""Job: this process among those of the job, whatever launched them; and the signals that stop it."""

from __future__ import annotations

import gc
import os
import resource
import signal
import sys
import time
import warnings
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, rendezvous  # type: ignore[attr-defined]  # missing in __all__

from distaccum import DistaccumError

from .config import DTYPES, Config, check_batch, stop
from .meshes import check_sharing, sharing

EXCHANGE_SECONDS = 0.5  # between two checks over the ranks for a signal


@dataclass(frozen=True)
class Job:
    """Rank, number of ranks and device, from the variables that torchrun, Accelerate, DeepSpeed or Slurm set."""

    config: Config
    rank: int
    ranks: int
    local_rank: int
    data_rank: int  # neighbours that share samples have the same
    data_ranks: int
    device: torch.device
    engine: str
    is_planned: bool  # for --plan: nothing is started

    @classmethod
    def find(cls, config: Config, plan: int | None = None) -> Job:
        """Reads the environment. With `plan`, acts as rank 0 of that many ranks, on any machine."""
        if "RANK" not in os.environ and "SLURM_STEP_NUM_TASKS" in os.environ:  # srun python launch/train.py
            named = {"RANK": "PROCID", "LOCAL_RANK": "LOCALID", "WORLD_SIZE": "STEP_NUM_TASKS"}
            os.environ.update({name: os.environ[f"SLURM_{slurm}"] for name, slurm in named.items()})
        rank, ranks, local_rank = (
            int(os.environ.get(name, default)) for name, default in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0))
        )
        if plan is not None:
            rank, ranks, local_rank = 0, plan or ranks, 0
        elif ranks > 1 and not {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
            stop(f"{ranks} ranks and no MASTER_ADDR and MASTER_PORT; start with torchrun or launch/slurm.sh")
        kind = config.device if config.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
        if kind == "cuda" and plan is None:
            if not torch.cuda.is_available():
                stop("device = 'cuda' and torch sees no GPU here; use --device cpu, or a build of torch for your GPU")
            if local_rank >= torch.cuda.device_count():
                stop(
                    f"process {local_rank} of this machine has no GPU of its own ({torch.cuda.device_count()} here); "
                    "start as many processes as GPUs, or use --device cpu",
                    everywhere=True,
                )
        check_sharing(config, ranks)
        name, number = sharing(config)
        check_batch(config, ranks // number)
        engine = config.engine
        if engine == "auto":
            engine = "fsdp2" if name else "ddp" if ranks > 1 else "plain"
        if engine == "plain" and ranks > 1:
            stop(f"engine = 'plain' on {ranks} ranks, whose gradients nothing would reduce; use ddp or one process")
        device = torch.device(kind, local_rank) if kind == "cuda" else torch.device(kind)
        data = rank // number, ranks // number
        return cls(config, rank, ranks, local_rank, *data, device, engine, plan is not None)

    def __enter__(self) -> Job:
        warnings.formatwarning = _in_a_line  # type: ignore[assignment]
        if self.is_planned:
            return self
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        backend = "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo"
        if self.ranks > 1:
            timeout = timedelta(minutes=self.config.timeout)
            store, rank, ranks = next(rendezvous("env://", self.rank, self.ranks, timeout=timeout))
            if os.environ.get("GROUP_WORLD_SIZE") == "1":
                # When torchrun restarts all processes (torch 2.15), it keeps its store with the addresses of dead ones,
                # for which the new ones would wait. On several nodes the restart count may differ between them.
                store = PrefixStore(f"start {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
            dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=timeout)
        elif self.engine in ("ddp", "fsdp2", "deepspeed"):  # these need a group, even of one rank
            store = dist.HashStore()  # type: ignore[attr-defined]  # public, but missing in __all__
            dist.init_process_group(backend, store=store, rank=0, world_size=1)
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        if dist.is_initialized() and kind is None:  # after an error others may be waiting: exit at once
            gc.collect()  # a gloo group still in use when Python exits may abort it
            dist.destroy_process_group()

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def autocast(self) -> AbstractContextManager[Any]:
        """Autocast, unless the engine lowers the precision itself."""
        precision = self.config.precision
        if precision in ("float32", "float64") or self.engine in ("fsdp2", "deepspeed", "accelerate"):
            return nullcontext()
        return torch.autocast(self.device.type, DTYPES[precision])

    def largest(self, *numbers: int) -> list[int]:
        """The maximum of each number over the ranks."""
        return [int(number) for number in self.reduce(torch.tensor(numbers), dist.ReduceOp.MAX)]

    def reduce(self, numbers: Tensor, how: Any = dist.ReduceOp.SUM) -> Tensor:
        """Sums a tensor on the host over the ranks, or takes the maximum."""
        if self.ranks > 1 and not self.is_planned:
            try:
                dist.all_reduce(numbers, how)
            except RuntimeError as error:  # a rank is gone, or late
                reason = " ".join(str(error).split())
                raise DistaccumError(f"rank {self.rank} lost contact with the other ranks ({reason[:200]})") from error
        return numbers

    def wait_for_all(self) -> None:
        self.largest(0)

    def peak_memory(self) -> int:
        """The peak memory of this rank in bytes: of its GPU, or of its process if it has none."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else 1024 * most

    def say(self, text: str) -> None:
        if self.is_first and (self.is_planned or not self.config.quiet):
            print(text, flush=True)


class Signals:
    """Handles SIGTERM and Ctrl-C: the ranks agree on the micro-batch after which all of them stop.

    A launcher passes one Ctrl-C on a second time, so a second signal changes nothing. The ranks exchange requests after
    as many micro-batches as take `seconds` on the slowest rank: an exchange in each micro-step would make every rank
    wait for the slowest one.
    """

    def __init__(self, job: Job, seconds: float) -> None:
        self._job, self._seconds = job, seconds
        self._number = 0
        self._calls, self._every = 0, 1  # calls of `asked` since the last exchange, and between two
        self._time = time.monotonic()  # when the last exchange was

    def __enter__(self) -> Signals:
        self._found = {number: signal.signal(number, self._note) for number in (signal.SIGTERM, signal.SIGINT)}
        self._job.wait_for_all()  # a rank that a signal killed before this would leave the others waiting
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._found.items():
            signal.signal(number, handler)

    def _note(self, number: int, _: object) -> None:
        self._number = number

    def asked(self, is_due: bool, *, in_window: bool = False) -> int:
        """Agrees on what all ranks do here: go on (0), save, as one of them asks (1), or stop by this signal.

        All ranks call it at the same places. Most calls on several ranks exchange nothing. An exchange is one small
        reduction on the host, and never follows two micro-batches in a row inside a window.
        """
        self._calls += 1
        if self._job.ranks > 1 and self._calls < max(self._every, 1 + in_window):
            return 0
        now = time.monotonic()
        pace = int(1e6 * (now - self._time) / self._calls) + 1  # microseconds
        asked, slowest = self._job.largest(self._number or is_due, pace)
        self._calls, self._every, self._time = 0, max(1, int(1e6 * self._seconds / slowest)), now
        return asked


def _in_a_line(message: Warning | str, *_: object) -> str:
    """A warning in one line, without the code that raised it."""
    return f"train: {message}\n"
