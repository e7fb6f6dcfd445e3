"""The launcher's variables, and the process group of the ranks that it started."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist

from ... import __version__
from ...law import DistaccumError
from .findings import Finding

c10d: Any = dist  # whose types lack its stores
OF_ENGINES = ("accelerate", "deepspeed")  # packages whose versions must agree on all ranks
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")


@dataclass(frozen=True)
class Launch:
    """The launcher's variables; one process where they contradict each other, so that the rest is still examined."""

    rank: int
    world: int
    local_rank: int
    findings: tuple[Finding, ...]

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Launch:
        if wrong := list(_contradictions(environment)):
            cure = "start with torchrun, or unset the variables of another launcher"
            return cls(0, 1, 0, tuple(Finding("launcher", "variables", one, "wrong", cure) for one in wrong))
        if "RANK" in environment:
            values = _numbers_in(environment)
            seen = f"{values['WORLD_SIZE']} ranks, at {environment['MASTER_ADDR']}:{values['MASTER_PORT']}"
            finding = Finding("launcher", "variables", seen)
            return cls(values["RANK"], values["WORLD_SIZE"], values.get("LOCAL_RANK", 0), (finding,))
        for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"):  # SLURM_NTASKS is set before srun, too
            if _is_whole(text := environment.get(name, "")) and int(text) > 1:
                seen = f"{name}={text} and no RANK: each of these processes would train alone"
                finding = Finding("launcher", "variables", seen, "wrong", "let each node's task start torchrun")
                return cls(0, 1, 0, (finding,))
        return cls(0, 1, 0, (Finding("launcher", "variables", "none: one process"),))


def _contradictions(environment: Mapping[str, str]) -> Iterator[str]:
    values = _numbers_in(environment)
    for name in VARIABLES:
        if name in environment and name not in values:
            yield f"{name}={environment[name]!r}, expected a whole number"
    for one, other in (("RANK", "WORLD_SIZE"), ("WORLD_SIZE", "RANK"), ("LOCAL_RANK", "RANK")):
        if one in environment and other not in environment:
            yield f"{one}={environment[one]} without {other}"
    for part, whole in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        if part in values and whole in values and values[part] >= values[whole]:
            yield f"{part}={values[part]} with {whole}={values[whole]}, expected less (they count from 0)"
    local, world = values.get("LOCAL_WORLD_SIZE", 0), values.get("WORLD_SIZE")
    if world is not None and local > world:
        yield f"LOCAL_WORLD_SIZE={local} is more than WORLD_SIZE={world}"
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in environment]
    if missing and "RANK" in values and "WORLD_SIZE" in values:
        yield f"RANK and WORLD_SIZE without {' and '.join(missing)}"
    if not 1 <= values.get("MASTER_PORT", 1) <= 65535:
        yield f"MASTER_PORT={values['MASTER_PORT']}, expected 1 to 65535"


def _numbers_in(environment: Mapping[str, str]) -> dict[str, int]:
    texts = {name: environment.get(name, "") for name in VARIABLES}
    return {name: int(text) for name, text in texts.items() if _is_whole(text)}


def _is_whole(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 10  # int() accepts neither ² nor thousands of digits


class Job:
    """The ranks of the job, in a process group."""

    def __init__(self, launch: Launch, store: Any, timeout: float) -> None:
        self.rank, self.world = launch.rank, launch.world
        self._store, self._timeout, self._num_gathered = store, timeout, 0
        self.whole = True  # no rank was lost
        self._refuse_another_world()
        self.ranks: list[dict[str, Any]] = self.gather(_about_this_rank(launch), "did not come")
        common = [kind for kind in self.ranks[0]["kinds"] if all(kind in one["kinds"] for one in self.ranks)]
        self.kind: str = common[0] if common else "cpu"
        self.device, self.backend = torch.device("cpu"), "gloo"
        if common:
            self.device = torch.device(self.kind, launch.local_rank)
            self.backend = f"cpu:gloo,{self.kind}:{dist.Backend.default_device_backend_map[self.kind]}"
            getattr(torch, self.kind).set_device(self.device)
        dist.init_process_group(
            self.backend,
            store=c10d.PrefixStore("group", store),
            rank=self.rank,
            world_size=self.world,
            timeout=timedelta(seconds=timeout),
        )

    def _refuse_another_world(self) -> None:
        """The first rank sets the world size; else each would wait for its own number of ranks."""
        mine = f"WORLD_SIZE={self.world} on rank {self.rank}"
        first = self._store.compare_set("world", "", mine).decode()
        if first.split()[0] != mine.split()[0]:
            reason = f"{first}, {mine}; give all ranks the same"
            self._store.set("refused", reason)
            raise DistaccumError(reason)

    def gather(self, value: Any, missing: str = "went away", patience: float = 1.0) -> list[Any]:
        """The values of all ranks, in their order; through the store, which needs no group."""
        try:
            return self._gather(value, missing, patience * self._timeout)
        except DistaccumError:
            raise
        except RuntimeError as error:  # of torch's store
            raise DistaccumError(
                f"rank {self.rank} of {self.world} lost the store at MASTER_ADDR ({str(error).splitlines()[0][:200]}); "
                "look at the output of rank 0 or of torchrun, which holds it"
            ) from None

    def _gather(self, value: Any, missing: str, seconds: float) -> list[Any]:
        self._num_gathered += 1
        keys = [f"{self._num_gathered}/{rank}" for rank in range(self.world)]
        self._store.set(keys[self.rank], json.dumps(value))
        until = time.monotonic() + seconds
        while not self._store.check(keys):
            if self._store.check(["refused"]):
                raise DistaccumError(self._store.get("refused").decode())
            if time.monotonic() > until:
                gone = ", ".join(str(rank) for rank, key in enumerate(keys) if not self._store.check([key]))
                raise DistaccumError(
                    f"rank {gone} of {self.world} {missing} within {seconds:g} seconds (this is rank {self.rank} "
                    f"on {socket.gethostname()}); check its own output, whether it was started, and whether it "
                    "reaches MASTER_ADDR; --timeout waits longer"
                )
            time.sleep(0.02)
        return [json.loads(self._store.get(key)) for key in keys]

    def differences(self) -> Iterator[Finding]:
        """Findings about the ranks, where there are several."""
        about = "ranks"
        if self.world == 1:
            return
        for host, members in groupby(range(self.world), key=lambda rank: self.ranks[rank]["host"]):
            first, *_, last = [*members] * 2
            yield Finding(about, f"rank {first}" if first == last else f"ranks {first} to {last}", f"on {host}")
        yield Finding(about, "group", f"{self.backend}, tensors on {self.kind}")
        versions = [one["versions"] for one in self.ranks]
        for name in dict.fromkeys(name for one in versions for name in one):
            kinds: dict[str, list[str]] = {}
            for rank, one in enumerate(versions):
                kinds.setdefault(one.get(name, "none"), []).append(str(rank))
            if len(kinds) > 1:
                seen = "; ".join(f"{version} on rank {', '.join(ranks)}" for version, ranks in kinds.items())
                yield Finding(about, name, seen, "wrong", "install the same on all nodes")
        if all(one == versions[0] for one in versions):
            yield Finding(about, "versions", "the same on all")

    def leave(self) -> None:
        dist.destroy_process_group()
        self._store.set(f"left/{self.rank}", "")
        if self.rank == 0:  # which may hold the store
            self._store.wait([f"left/{rank}" for rank in range(self.world)], timedelta(seconds=self._timeout))


@contextmanager
def joined(launch: Launch, timeout: float) -> Iterator[Job]:
    if launch.world == 1:
        store = c10d.HashStore()
    else:
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        is_agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun holds it
        holds_it = launch.rank == 0 and not is_agents
        if not holds_it:
            _refuse_unreachable(launch, address, port, timeout)
        seconds = timedelta(seconds=timeout)
        store = c10d.TCPStore(address, port, is_master=holds_it, timeout=seconds, wait_for_workers=False)
        store = c10d.PrefixStore(f"distaccum doctor {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    job = Job(launch, store, timeout)
    yield job
    if job.whole:
        job.leave()


def _refuse_unreachable(launch: Launch, address: str, port: int, timeout: float) -> None:
    """In one sentence; torch's own error has forty lines."""
    until = time.monotonic() + timeout
    while True:
        try:
            socket.create_connection((address, port), timeout=timeout).close()
            return
        except OSError as error:
            if time.monotonic() > until:
                raise DistaccumError(
                    f"rank {launch.rank} on {socket.gethostname()} did not reach MASTER_ADDR {address}, port {port}, "
                    f"within {timeout:g} seconds ({error}); is rank 0 started there, and may others reach that port?"
                ) from None
        time.sleep(0.1)


def _about_this_rank(launch: Launch) -> dict[str, Any]:
    versions = {"Python": platform.python_version(), "torch": torch.__version__, "distaccum": __version__}
    for name in OF_ENGINES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    kinds = [kind for kind in ("cuda", "xpu") if _has_own(kind, launch.local_rank)]
    return {"host": socket.gethostname(), "versions": versions, "kinds": kinds}


def _has_own(kind: str, local_rank: int) -> bool:
    """Whether this rank has a device of its own, and torch a backend for it."""
    backend, module = dist.Backend.default_device_backend_map.get(kind), getattr(torch, kind)
    built = backend is not None and dist.is_backend_available(backend)
    return built and module.is_available() and local_rank < module.device_count()
