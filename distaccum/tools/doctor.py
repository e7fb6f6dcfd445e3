"""`distaccum doctor`: finds out what this machine, environment and job can run, with a trial of each engine."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import math
import os
import platform
import socket
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.optim import SGD

from .. import __version__
from ..accumulator import Accumulator
from ..engines import Sync
from ..law import DistaccumError, in_short, plural
from .terminal import fitted

OPTIONAL = ("accelerate", "deepspeed")  # packages of engines
VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK")
TOLERANCE = 1e-4  # relative tolerance for a gradient's norm in float32
State = Literal["ok", "absent", "wrong"]


@dataclasses.dataclass(frozen=True)
class Finding:
    """A line of the report."""

    about: str
    name: str
    seen: str
    state: State = "ok"

    def __str__(self) -> str:
        shown = {"ok": "ok", "absent": "-", "wrong": "WRONG"}[self.state]
        return f"  {shown:5} {self.name:34} {self.seen}"


@dataclasses.dataclass(frozen=True)
class Examination:
    findings: tuple[Finding, ...]
    rank: int  # of this process

    @property
    def healthy(self) -> bool:
        return all(one.state != "wrong" for one in self.findings)

    def as_dict(self) -> dict[str, Any]:
        return {"healthy": self.healthy, **dataclasses.asdict(self)}

    def __str__(self) -> str:
        lines = [f"distaccum {__version__} on {socket.gethostname()}"]
        for about, group in groupby(self.findings, key=lambda one: one.about):
            lines += ["", about, *map(str, group)]
        wrong = sum(one.state == "wrong" for one in self.findings)
        lines += ["", "all is well" if not wrong else f"{wrong} {'is' if wrong == 1 else 'are'} WRONG, see above"]
        return fitted(lines, indent=6)


def examine(*, timeout: float = 60.0, all_engines: bool = False) -> Examination:
    """Examines this process and, under a launcher, the job; every rank calls it."""
    findings = [
        Finding("software", name, version or f"not installed; pip install {name}", "ok" if version else "absent")
        for name, version in _versions().items()
    ]
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    seen = "none" if accelerator is None else f"{torch.accelerator.device_count()} of {accelerator.type}"
    if accelerator is None and Path("/dev/nvidia0").exists():
        seen = "a GPU is here, and torch does not see it; install a torch that is built for its driver"
    findings.append(Finding("devices", "accelerators", seen, "absent" if accelerator is None else "ok"))
    findings.append(examine_launcher(os.environ))
    job = Launched(timeout, "cpu" if accelerator is None else accelerator.type)
    findings += [*job.differences(), *_try_engines(job, all_engines)]
    dist.destroy_process_group()
    return Examination(tuple(findings), job.rank)


def _versions() -> dict[str, str]:
    """Versions by package, empty if it is not installed."""
    found = {"Python": platform.python_version(), "torch": torch.__version__, "distaccum": __version__}
    return found | {name: importlib.metadata.version(name) if find_spec(name) else "" for name in OPTIONAL}


def examine_launcher(environment: Mapping[str, str]) -> Finding:
    """Reports the variables that a launcher set, or a launcher that sets none that torch reads."""
    shown = ", ".join(f"{name}={environment[name]}" for name in VARIABLES if name in environment)
    for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"):  # SLURM_NTASKS is set even before srun
        if "RANK" not in environment and environment.get(name, "1") != "1":
            seen = f"{name}={environment[name]} and no RANK: each of these processes would train alone"
            return Finding("launcher", "variables", f"{seen}; let each node's task start torchrun", "wrong")
    return Finding("launcher", "variables", shown or "none: one process")


class Launched:
    """The ranks of the job, in a process group."""

    def __init__(self, timeout: float, kind: str) -> None:
        """Joins the process group; `kind`: the type of this process's devices."""
        places = (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"))
        self.rank, self.world, local_rank = (int(os.environ.get(name, one)) for name, one in places)
        backend = dist.get_default_backend_for_device(kind)
        if (
            local_rank >= torch.accelerator.device_count()
            or backend == "gloo"
            or not dist.is_backend_available(backend)
        ):
            kind = "cpu"
        options: dict[str, Any] = {"rank": self.rank, "world_size": self.world, "timeout": timedelta(seconds=timeout)}
        if self.world == 1:
            options["store"] = dist.HashStore()  # type: ignore[attr-defined]  # public
        try:
            dist.init_process_group("cpu:gloo" if kind == "cpu" else f"cpu:gloo,{kind}:{backend}", **options)
            # A rank that failed in a trial waits here until the others' trial times out; connecting takes time too.
            self._control: Any = dist.new_group(backend="gloo", timeout=timedelta(seconds=3 * timeout))
        except (RuntimeError, ValueError) as error:
            where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
            raise DistaccumError(
                f"the ranks did not all meet at {where} within {timeout:g} seconds ({in_short(error)}); this is "
                f"rank {self.rank} of {self.world} on {socket.gethostname()}: check that all were started and "
                "can reach that address, or wait longer with --timeout"
            ) from None
        self.ranks: list[dict[str, str]] = self.gather({"host": socket.gethostname(), "kind": kind, **_versions()})
        self.kind = kind if all(one["kind"] == kind for one in self.ranks) else "cpu"
        if self.kind != "cpu":
            torch.accelerator.set_device_index(local_rank)

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, in order."""
        every: list[Any] = [None] * self.world
        try:
            dist.all_gather_object(every, value, group=self._control)
        except RuntimeError as error:
            raise DistaccumError(f"a rank went away ({in_short(error)}); look at its own output") from None
        return every

    def differences(self) -> Iterator[Finding]:
        """Findings about differences between the ranks, if there are several."""
        if self.world == 1:
            return
        hosts = ", ".join(f"{number} on {host}" for host, number in Counter(one["host"] for one in self.ranks).items())
        yield Finding("ranks", "hosts", f"ranks: {hosts}; {dist.get_backend_config()}, tensors on {self.kind}")
        for name in _versions():
            of_ranks = [one[name] or "none" for one in self.ranks]
            if len(set(of_ranks)) > 1:
                seen = "; ".join(f"{version} on rank {rank}" for rank, version in enumerate(of_ranks))
                yield Finding("ranks", name, f"{seen}; install the same on all nodes", "wrong")


# The engines


def _with_sgd(model: Any) -> tuple[Any, ...]:
    return model, SGD(model.parameters(), lr=0.0)  # a trial leaves the weights unchanged for the next


def _fsdp1(net: nn.Linear) -> tuple[Any, ...]:
    return _with_sgd(FullyShardedDataParallel(net, device_id=net.weight.device, use_orig_params=True))


def _fsdp2(net: nn.Linear) -> tuple[Any, ...]:
    return _with_sgd(fully_shard(net, mesh=init_device_mesh(net.weight.device.type, (dist.get_world_size(),))))


def _zero2(net: nn.Linear) -> tuple[Any, ...]:
    """Makes DeepSpeed's engine; unsets the variables that it needs, or Accelerate would take them for a launcher's."""
    kind, found = net.weight.device.type, dict(os.environ)
    try:
        os.environ.setdefault("LOCAL_RANK", "0")
        if kind == "cpu":  # otherwise it looks for a GPU
            world = os.environ.get("LOCAL_WORLD_SIZE", str(dist.get_world_size()))
            os.environ.update({"DS_ACCELERATOR": "cpu", "LOCAL_SIZE": world})
        import deepspeed

        if kind == "cpu":  # it would compile a kernel for shared memory; gloo needs none
            getattr(deepspeed.ops, "__compatible_ops__", {})["deepspeed_shm_comm"] = False
        deepspeed.utils.logger.setLevel("ERROR")
        deepspeed.init_distributed(dist_backend="nccl" if kind == "cuda" else "gloo", verbose=False)
        config = {
            "train_micro_batch_size_per_gpu": 2,  # used only by its log
            "zero_optimization": {"stage": 2, "overlap_comm": False},
            "zero_allow_untested_optimizer": True,
            "gradient_clipping": 0.0,  # its default of 1.0 clips
            "steps_per_print": 10**9,
        }
        return deepspeed.initialize(model=net, optimizer=_with_sgd(net)[1], config=config)[:2]  # type: ignore[no-any-return]
    finally:
        os.environ.clear()
        os.environ.update(found)


def _accelerated(net: nn.Linear) -> tuple[Any, ...]:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=net.weight.device.type == "cpu")
    return *accelerator.prepare(*_with_sgd(net)), accelerator


ENGINES: dict[str, tuple[str, Callable[[Any], tuple[Any, ...]]]] = {  # name -> package, and how to wrap
    "a plain module": ("", _with_sgd),
    "DistributedDataParallel": ("", lambda net: _with_sgd(nn.parallel.DistributedDataParallel(net))),
    "FSDP1 (FullyShardedDataParallel)": ("", _fsdp1),
    "FSDP2 (fully_shard)": ("", _fsdp2),
    "DeepSpeed": ("deepspeed", _zero2),
    "what Accelerate prepared": ("accelerate", _accelerated),
}


def _try_engines(job: Launched, all_engines: bool) -> Iterator[Finding]:
    """Tries each engine: the gradient of its windows must have the norm of the big batch's."""
    about = f"engines, each tried on {plural(job.world, 'rank')} on {job.kind}"
    for name, (package, wrap) in ENGINES.items():
        if name == "a plain module" and job.world > 1:
            yield Finding(about, name, "for one process; wrap the model in DistributedDataParallel", "absent")
        elif any(one.get(package) == "" for one in job.ranks):  # ranks must try together
            yield Finding(about, name, f"{package} is not installed everywhere; pip install {package}", "absent")
        elif package and not all_engines:
            yield Finding(about, name, f"{package} is installed; --all tries it (about 20 seconds)", "absent")
        else:
            seen = wrong = ""
            try:
                seen = _tried(wrap, job)
            except Exception as error:
                wrong = in_short(error)
            try:
                wrong = next(filter(None, job.gather(wrong)), "")
            except DistaccumError as error:
                wrong = f"{wrong} {error}"
            cured = f"{wrong}; see docs/faq.md, or try another version of it"
            yield Finding(about, name, cured if wrong else seen, "wrong" if wrong else "ok")
            if wrong and job.world > 1:  # some ranks may still be inside a collective
                return


def _tried(wrap: Callable[[Any], tuple[Any, ...]], job: Launched) -> str:
    """Runs a window of two uneven micro-batches under each policy of an engine, and returns the policies."""

    def micro_batches(rank: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(rank)
        return [torch.randn(size, 4, generator=generator) for size in (3, 2)]

    torch.manual_seed(0)
    net = nn.Linear(4, 1)
    big_batch = torch.cat([one for rank in range(job.world) for one in micro_batches(rank)])
    gradients = torch.autograd.grad(net(big_batch).square().mean(), list(net.parameters()))
    expected, policies = math.hypot(*(float(one.norm()) for one in gradients)), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, optimizer, *more = wrap(net.to(job.kind))
        for sync in get_args(Sync):
            options: dict[str, Any] = {"accelerator": more[0]} if more else {}
            try:
                accumulator = Accumulator(model, optimizer, steps=2, sync=sync, max_norm=math.inf, **options)
            except ValueError:
                if sync == "last":  # every engine has it
                    raise
                continue
            for window in accumulator.windows([one.to(job.kind) for one in micro_batches(job.rank)]):
                for inputs in window:
                    window.backward(model(inputs).square().mean())
                norm = window.step().grad_norm
            if norm is None or not abs(norm - expected) <= TOLERANCE * expected:
                raise DistaccumError(f"the gradient's norm is {norm} under sync={sync!r}, expected {expected:.6g}")
            policies.append(repr(sync))
    return f"sync={', '.join(policies)}"
