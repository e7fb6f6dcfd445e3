"""Job: this process among those of the job, whatever launched them."""

from __future__ import annotations

import gc
import os
import resource
import sys
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
from .tensor import check_tensor


@dataclass(frozen=True)
class Job:
    """Rank, number of ranks and device, from the variables that torchrun, Accelerate, DeepSpeed or Slurm set."""

    config: Config
    rank: int
    ranks: int
    local_rank: int
    data_rank: int  # tensor-parallel neighbours have the same
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
        rank = int(os.environ.get("RANK", 0))
        local_rank = int(os.environ.get("LOCAL_RANK", 0))
        ranks = int(os.environ.get("WORLD_SIZE", 1))
        if plan is not None:
            ranks = plan or ranks
            rank = local_rank = 0
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
        check_tensor(config, ranks)
        data_ranks = ranks // config.tp
        check_batch(config, data_ranks)
        engine = config.engine
        if engine == "auto":
            engine = "fsdp2" if config.tp > 1 else "ddp" if ranks > 1 else "plain"
        if engine == "plain" and ranks > 1:
            stop(f"engine = 'plain' on {ranks} ranks, whose gradients nothing would reduce; use ddp or one process")
        device = torch.device(kind, local_rank) if kind == "cuda" else torch.device(kind)
        return cls(config, rank, ranks, local_rank, rank // config.tp, data_ranks, device, engine, plan is not None)

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


def _in_a_line(message: Warning | str, *_: object) -> str:
    """A warning in one line, without the code that raised it."""
    return f"train: {message}\n"
