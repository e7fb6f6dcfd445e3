"""What this machine, this environment and this job can run: looked at, and tried."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import math
import os
import platform
import re
import socket
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD

from .. import __version__
from ..accumulator import Accumulator
from ..engines import Engine, choose_engine, known_engines
from ..law.errors import DistaccumError
from ..law.table import width, wrapped
from . import wrap
from .link import Link, measure
from .plan.network import BACKENDS

c10d: Any = dist  # whose types do not tell of its stores
State = Literal["ok", "absent", "wrong"]
DEVELOPERS = ("bench", "test")  # extras that nobody needs to train
OF_ENGINES = ("accelerate", "deepspeed")  # packages that ranks must have alike
OFF = 1e-4  # relative, of a gradient's norm in float32
SHOWN = {"ok": "ok", "absent": "-", "wrong": "WRONG"}


@dataclass(frozen=True)
class Finding:
    about: str
    name: str
    seen: str
    state: State = "ok"
    cure: str = ""

    def __str__(self) -> str:
        return f"  {SHOWN[self.state]:5} {self.name:34} {self.seen}{'; ' if self.cure else ''}{self.cure}"


@dataclass(frozen=True)
class Examination:
    findings: tuple[Finding, ...]
    hosts: tuple[str, ...]  # of the ranks
    link: Link | None  # between them
    rank: int  # that looked
    backend: str = "gloo"  # as `distaccum plan` names it

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def healthy(self) -> bool:
        return not self.wrong

    @property
    def wrong(self) -> list[Finding]:
        return [one for one in self.findings if one.state == "wrong"]

    @property
    def plan(self) -> str:
        """What `distaccum plan` is to be told of the link, so that it comes back to what was measured.

        Its rates are nominal, of which its backend makes a part; its latency is that of one of a ring's hops.
        """
        if self.link is None:
            return ""
        part, hops = BACKENDS[self.backend].reduce, 2 * (len(self.hosts) - 1)
        pairs = self.link.pairs
        apart = [one for one in pairs if len({self.hosts[rank] for rank in one.ranks}) > 1]
        within = [one for one in pairs if one not in apart]
        words = f"--link-gbit {min(one.slower for one in apart or pairs) / part:.3g}"
        if apart and within:
            words += f" --node-gbit {min(one.slower for one in within) / part:.3g}"
        return f"{words} --latency-us {self.link.all_reduce_microseconds / hops:.3g} --backend {self.backend}"

    def as_dict(self) -> dict[str, Any]:
        return {"healthy": self.healthy, **dataclasses.asdict(self), "plan": self.plan}

    def __str__(self) -> str:
        lines = [f"distaccum {__version__} on {self.hosts[self.rank]}"]
        for about, group in groupby(self.findings, key=lambda one: one.about):
            lines += ["", about, *(str(one).rstrip() for one in group)]
        if self.link is not None:
            lines += ["", *self._of_link(self.link)]
        wrong = len(self.wrong)
        lines += ["", "all is well" if not wrong else f"{wrong} {'is' if wrong == 1 else 'are'} WRONG, see above"]
        return "\n".join(wrapped(lines, width(), indent=6))

    def _of_link(self, link: Link) -> list[str]:
        lines = ["link between neighbours (one way after the other, the other way alone)"]
        slowest = min(link.pairs, key=lambda one: one.slower)
        for one in link.pairs if len(link.pairs) <= 16 else [slowest]:
            a, b = one.ranks
            ends = f"ranks {a} and {b}, {self.hosts[a]}" + (
                f" to {self.hosts[b]}" if self.hosts[a] != self.hosts[b] else ""
            )
            mark = "  (the slowest)" if one is slowest and len(link.pairs) > 1 else ""
            there, back = one.gbit
            lines.append(f"  {ends:34} {there:.3g} Gbit/s there, {back:.3g} back, {one.microseconds:.0f} us{mark}")
        rates = [f"{rate:.3g} of {size // 2**20} MiB" for size, rate in link.all_reduce_gbit.items()]
        lines.append(f"  all-reduce of {len(self.hosts)} ranks: {link.all_reduce_microseconds:.0f} us of 4 bytes")
        if rates:
            lines[-1] += f"; sent per rank, in Gbit/s: {', '.join(rates)}"
        return [*lines, f"  distaccum plan ... {self.plan}"]


def examine(*, timeout: float = 60.0, all_engines: bool = False) -> Examination:
    """Looks at this process and, under a launcher, with the other ranks at the job; all of them call it."""
    launch = Launch.from_environment(os.environ)
    findings = [*software(), *devices(), *backends(), *packages(), *launch.findings]
    with joined(launch, timeout) as job:
        findings += job.differences()
        link = measure(job.gather, job.device) if job.world > 1 else None
        findings += engines(job, all_engines)
        wrong = [one for one in findings if one.state == "wrong"]
        for rank, told in enumerate(job.gather([dataclasses.asdict(one) for one in wrong]) if job.whole else []):
            others = [one for one in (Finding(**one) for one in told) if one not in wrong]
            findings += [dataclasses.replace(one, name=f"{one.name}, rank {rank}") for one in others]
        abouts = list(dict.fromkeys(one.about for one in findings))
        every = sorted(findings, key=lambda one: abouts.index(one.about))
        backend = "gloo" if job.kind == "cpu" else "nccl"  # to which xccl is nearest
        return Examination(tuple(every), tuple(one["host"] for one in job.ranks), link, job.rank, backend)


# This machine
def software() -> Iterator[Finding]:
    about = "software"
    try:
        needed = importlib.metadata.metadata("distaccum")["Requires-Python"]
        least = {name: bound for name, bound, extra in requirements() if not extra}
    except importlib.metadata.PackageNotFoundError:
        yield Finding(about, "Python", platform.python_version())
        yield Finding(about, "torch", torch.__version__)
        why = "runs from a folder, so the versions that it supports are not known"
        yield Finding(about, "distaccum", why, "absent", "pip install it")
        return
    yield _judged(about, "Python", platform.python_version(), needed.removeprefix(">="), "use a later Python")
    for name, bound in least.items():
        version = (
            torch.__version__ if name == "torch" else importlib.metadata.version(name)
        )  # with what it is built for
        yield _judged(about, name, version, bound, f"pip install '{name}>={bound}'")


def requirements() -> Iterator[tuple[str, str, str]]:
    """Name, lowest version or "", and extra or "", of what pyproject.toml says, read from the installed package."""
    for text in importlib.metadata.requires("distaccum") or []:
        wanted, _, marker = text.partition(";")
        found = re.match(r"([\w.-]+)(?:\[[^]]*\])?\s*(?:>=\s*([\d.]+))?", wanted.strip())
        extra = re.search(r"extra == ['\"]([\w-]+)['\"]", marker)
        if found is not None and "python_version" not in marker:  # part of Python, on later ones
            yield found[1], found[2] or "", extra[1] if extra else ""


def packages() -> Iterator[Finding]:
    about = "optional packages"
    try:
        wanted = [(name, bound, extra) for name, bound, extra in requirements() if extra]
    except importlib.metadata.PackageNotFoundError:
        return
    names = dict.fromkeys(name for name, _, extra in wanted if extra not in DEVELOPERS and name != "distaccum")
    sizes = Counter(extra for _, _, extra in wanted)
    for name in names:
        bound = max((bound for other, bound, _ in wanted if other == name), key=_numbers)
        extras = [extra for other, _, extra in wanted if other == name and extra not in DEVELOPERS]
        extra = min(extras, key=lambda one: sizes[one])  # which brings the least else
        cure = f"pip install 'distaccum[{extra}]'"
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield Finding(about, name, "not installed", "absent", cure)
            continue
        yield _judged(about, name, version, bound, f"pip install --upgrade 'distaccum[{extra}]'")


def _judged(about: str, name: str, version: str, bound: str, cure: str) -> Finding:
    if _numbers(version) < _numbers(bound):
        return Finding(about, name, f"{version}, expected {bound} or later", "wrong", cure)
    return Finding(about, name, f"{version} ({bound} or later)" if bound else version)


def _numbers(version: str) -> tuple[int, ...]:
    found = re.match(r"\d+(\.\d+)*", version)
    numbers = [int(part) for part in found[0].split(".")] if found else []
    while numbers and numbers[-1] == 0:  # 2.0 is 2
        numbers.pop()
    return tuple(numbers)


def devices() -> Iterator[Finding]:
    about = "devices"
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 0
    memory = f", {_gib(pages)}" if pages > 0 else ""
    yield Finding(about, "cpu", f"{os.cpu_count()} cores{memory}, torch takes {torch.get_num_threads()} threads")
    for kind in ("cuda", "xpu"):
        module = getattr(torch, kind)
        number = module.device_count() if module.is_available() else 0
        for i in range(number):
            about_it = module.get_device_properties(i)
            yield Finding(about, f"{kind}:{i}", f"{about_it.name}, {_gib(about_it.total_memory)}")
        if not number:
            unseen = kind == "cuda" and Path("/dev/nvidia0").exists()
            cure = f"this torch is {torch.__version__}; install one built for its driver" if unseen else ""
            yield Finding(about, kind, "there is one, and torch does not see it" if unseen else "none", "absent", cure)
    if torch.backends.mps.is_available():
        yield Finding(about, "mps", f"{_gib(torch.mps.recommended_max_memory())} recommended")
    else:
        yield Finding(about, "mps", "none", "absent")


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"


def backends() -> Iterator[Finding]:
    about = "backends of process groups"
    used = dist.Backend.default_device_backend_map
    for name in dist.Backend.backend_list:
        if name in (dist.Backend.UNDEFINED, "fake"):  # which tests of torch's own add
            continue
        kinds = ", ".join(kind for kind, backend in used.items() if backend == name)
        built = dist.is_backend_available(name)
        seen = ("built in" if built else "not in this torch") + (f", for {kinds}" if kinds else "")
        yield Finding(about, name, seen, "ok" if built else "absent")


# The job
@dataclass(frozen=True)
class Launch:
    """What the launcher's variables say, and whether they can be."""

    rank: int
    world: int
    local_rank: int
    findings: tuple[Finding, ...]

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Launch:
        about = "launcher"
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")
        texts = {name: environment[name] for name in names if name in environment}
        values = {name: int(text) for name, text in texts.items() if _is_whole(text)}
        wrong = [f"{name}={text!r}, expected a whole number" for name, text in texts.items() if name not in values]
        rank, world = values.get("RANK"), values.get("WORLD_SIZE")
        for one, other in (("RANK", "WORLD_SIZE"), ("WORLD_SIZE", "RANK"), ("LOCAL_RANK", "RANK")):
            if one in texts and other not in texts:
                wrong.append(f"{one}={texts[one]} without {other}")
        for part, whole in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")):
            if part in values and whole in values and values[part] >= values[whole]:
                wrong.append(f"{part}={values[part]} with {whole}={values[whole]}, expected less (they count from 0)")
        if world is not None and values.get("LOCAL_WORLD_SIZE", 0) > world:
            wrong.append(f"LOCAL_WORLD_SIZE={values['LOCAL_WORLD_SIZE']} is more than WORLD_SIZE={world}")
        if rank is not None and world is not None:
            missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in environment]
            if missing:
                wrong.append(f"RANK and WORLD_SIZE without {' and '.join(missing)}")
        if not 1 <= values.get("MASTER_PORT", 1) <= 65535:
            wrong.append(f"MASTER_PORT={values['MASTER_PORT']}, expected 1 to 65535")
        local = values.get("LOCAL_RANK", 0)
        if wrong:
            cure = "start with torchrun, or unset what is left of another launcher"
            return cls(0, 1, 0, tuple(Finding(about, "variables", one, "wrong", cure) for one in wrong))
        if rank is None or world is None:
            # A batch script has SLURM_NTASKS too, before srun starts them.
            tasks = {name: environment.get(name, "") for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")}
            several = [f"{name}={text}" for name, text in tasks.items() if _is_whole(text) and int(text) > 1]
            if several:
                seen = f"{several[0]} and no RANK: each of these processes would train alone"
                return cls(
                    0, 1, 0, (Finding(about, "variables", seen, "wrong", "let each node's task start torchrun"),)
                )
            return cls(0, 1, 0, (Finding(about, "variables", "none: one process"),))
        seen = f"{world} ranks, at {environment['MASTER_ADDR']}:{environment['MASTER_PORT']}"
        return cls(rank, world, local, (Finding(about, "variables", seen),))


def _is_whole(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 10  # int() takes neither ² nor thousands of digits


class Job:
    """The ranks that came, in a process group."""

    def __init__(self, launch: Launch, store: Any, timeout: float) -> None:
        self.rank, self.world = launch.rank, launch.world
        self._store, self._timeout, self._said = store, timeout, 0
        self.whole = True  # nobody was lost
        self._refuse_another_world()
        self.ranks: list[dict[str, Any]] = self.gather(_about_this_rank(launch), "did not come")
        self.kind = _common_kind(self.ranks)
        self.device = torch.device("cpu") if self.kind == "cpu" else torch.device(self.kind, launch.local_rank)
        if self.kind == "cpu":
            backend = "gloo"
        else:
            backend = f"cpu:gloo,{self.kind}:{dist.Backend.default_device_backend_map[self.kind]}"
            getattr(torch, self.kind).set_device(self.device)
        self.backend = backend
        dist.init_process_group(
            backend,
            store=c10d.PrefixStore("group", store),
            rank=self.rank,
            world_size=self.world,
            timeout=timedelta(seconds=timeout),
        )

    def _refuse_another_world(self) -> None:
        """The first to come says how many they are; else each would wait for its own number of ranks."""
        mine = f"WORLD_SIZE={self.world} on rank {self.rank}"
        first = self._store.compare_set("world", "", mine).decode()
        if first.split()[0] != mine.split()[0]:
            why = f"{first}, {mine}; give all ranks the same"
            self._store.set("refused", why)
            raise DistaccumError(why)

    def gather(self, value: Any, missing: str = "went away", patience: float = 1.0) -> list[Any]:
        """What all ranks say, in their order; by the store, which needs no group."""
        try:
            return self._gather(value, missing, patience * self._timeout)
        except DistaccumError:
            raise
        except RuntimeError as error:  # of torch's store
            raise DistaccumError(
                f"rank {self.rank} of {self.world} lost the store at MASTER_ADDR ({str(error).splitlines()[0][:200]}); "
                "look at the output of rank 0, which keeps it, or of torchrun"
            ) from None

    def _gather(self, value: Any, missing: str, seconds: float) -> list[Any]:
        self._said += 1
        keys = [f"{self._said}/{rank}" for rank in range(self.world)]
        self._store.set(keys[self.rank], json.dumps(value))
        until = time.monotonic() + seconds
        while not self._store.check(keys):
            if self._store.check(["refused"]):
                raise DistaccumError(self._store.get("refused").decode())
            if time.monotonic() > until:
                gone = ", ".join(str(rank) for rank, key in enumerate(keys) if not self._store.check([key]))
                raise DistaccumError(
                    f"rank {gone} of {self.world} {missing} within {seconds:g} seconds (this is rank {self.rank} "
                    f"on {socket.gethostname()}); look at its own output, whether it was started, and whether it "
                    "reaches MASTER_ADDR; --timeout waits longer"
                )
            time.sleep(0.02)
        return [json.loads(self._store.get(key)) for key in keys]

    def differences(self) -> Iterator[Finding]:
        """Of the ranks, where there are several."""
        about = "ranks"
        if self.world == 1:
            return
        for host, members in groupby(enumerate(self.ranks), key=lambda pair: pair[1]["host"]):
            numbers = [rank for rank, _ in members]
            spelled = f"rank {numbers[0]}" if len(numbers) == 1 else f"ranks {numbers[0]} to {numbers[-1]}"
            yield Finding(about, spelled, f"on {host}")
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
        if self.rank == 0:  # which may be the one that keeps the store
            self._store.wait([f"left/{rank}" for rank in range(self.world)], timedelta(seconds=self._timeout))


@contextmanager
def joined(launch: Launch, timeout: float) -> Iterator[Job]:
    if launch.world == 1:
        store = c10d.HashStore()
    else:
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        is_agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun keeps it
        keeps_it = launch.rank == 0 and not is_agents
        if not keeps_it:
            _refuse_unreachable(launch, address, port, timeout)
        store = c10d.TCPStore(
            address, port, is_master=keeps_it, timeout=timedelta(seconds=timeout), wait_for_workers=False
        )
        store = c10d.PrefixStore(f"distaccum doctor {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    job = Job(launch, store, timeout)
    yield job
    if job.whole:
        job.leave()


def _refuse_unreachable(launch: Launch, address: str, port: int, timeout: float) -> None:
    """torch says it too, in forty lines."""
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
    """Whether this rank has a device of its own, and a backend for it."""
    backend, module = dist.Backend.default_device_backend_map.get(kind), getattr(torch, kind)
    built = backend is not None and dist.is_backend_available(backend)
    return built and module.is_available() and local_rank < module.device_count()


def _common_kind(ranks: Sequence[Mapping[str, Any]]) -> str:
    return next((kind for kind in ranks[0]["kinds"] if all(kind in one["kinds"] for one in ranks)), "cpu")


# The engines, each tried on a layer
Wrap = Callable[[nn.Module, Job], tuple[nn.Module, Any, dict[str, Any]]]  # model, optimizer, more options


def engines(job: Job, all_of_them: bool) -> Iterator[Finding]:
    """Whether a window of each gives the norm of the big batch's gradient here, under each of its policies."""
    about = f"engines, each tried on {job.world} {'rank' if job.world == 1 else 'ranks'} on {job.kind}"
    failed = ""
    trials = list(_trials(job, all_of_them))
    told = job.gather({name: cannot and dataclasses.asdict(cannot) for name, _, cannot in trials})
    for name, make, _ in trials:
        cannot = _untried_on_any(name, told)  # who tried alone would wait for the others
        if cannot is not None:
            yield dataclasses.replace(cannot, about=about, name=name)
        elif failed:
            yield Finding(about, name, f"not tried, since {failed} failed", "absent")
        else:
            try:
                seen, wrong = _tried(make, job), ""
            except Exception as error:
                seen, wrong = "", f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            try:  # who waits within a collective gives up later than who failed before it
                all_wrong = [one for one in job.gather(wrong, patience=1.5) if one]
            except DistaccumError as error:
                job.whole = False
                yield Finding(about, name, "; ".join(filter(None, [wrong, str(error)])), "wrong")
                return
            if all_wrong:
                yield Finding(about, name, all_wrong[0], "wrong", "see Limits in the README, or another version of it")
                failed = name if job.world > 1 else ""  # ranks may have parted within a collective
            else:
                yield Finding(about, name, seen)


def _untried_on_any(name: str, told: Sequence[Mapping[str, dict[str, Any] | None]]) -> Finding | None:
    """Of what each rank has told, why this one is tried on none."""
    unknown = dataclasses.asdict(Finding("", "", "not known", "absent"))
    reasons = {rank: one.get(name, unknown) for rank, one in enumerate(told)}
    cannot = {rank: Finding(**why) for rank, why in reasons.items() if why is not None}
    if not cannot:
        return None
    first = next(iter(cannot.values()))
    alike = [rank for rank, why in cannot.items() if why == first]
    if len(alike) == len(told):
        return first
    return dataclasses.replace(first, seen=f"{first.seen} on rank {', '.join(map(str, alike))}")


def _trials(job: Job, all_of_them: bool) -> Iterator[tuple[str, Wrap, Finding | None]]:
    """Name, how a layer is wrapped, and what is found without trying."""
    wraps: dict[str, list[tuple[str, Wrap]]] = {
        "PlainEngine": [("", _plain)],
        "DDPEngine": [("", _ddp)],
        "FSDPEngine": [("", _fsdp1)],
        "FullyShardEngine": [("", _fully_sharded), (", replicas", _hybrid)],
        "DeepSpeedEngine": [(f", ZeRO {stage}", partial(_zero, stage=stage)) for stage in range(4)],
    }
    for engine in sorted(
        known_engines(), key=lambda one: list(wraps).index(one.__name__) if one.__name__ in wraps else 9
    ):
        for suffix, make in wraps.get(engine.__name__, [("", _plain)]):
            yield engine.name + suffix, make, _untried(engine, job, all_of_them, wraps)
    yield "what Accelerate prepared", _accelerated, _untried_package("accelerate", all_of_them)


def _untried(engine: type[Engine], job: Job, all_of_them: bool, wraps: Mapping[str, Any]) -> Finding | None:
    if engine.__name__ not in wraps:
        return Finding("", "", f"of {engine.__module__}; how it wraps is not known here", "absent")
    if engine.__name__ == "PlainEngine" and job.world > 1:
        return Finding("", "", "for one process", "absent", "wrap the model in DistributedDataParallel")
    if engine.__name__ == "FullyShardEngine" and job.kind == "cpu" and not hasattr(torch.cpu.Stream, "record_event"):
        return Finding("", "", f"not on CPU with torch {torch.__version__}", "absent", "use a later torch, or a GPU")
    return _untried_package("deepspeed", all_of_them) if engine.__name__ == "DeepSpeedEngine" else None


def _untried_package(package: str, all_of_them: bool) -> Finding | None:
    if find_spec(package) is None:
        return Finding("", "", f"{package} is not installed", "absent", f"pip install 'distaccum[{package}]'")
    if not all_of_them:
        return Finding("", "", f"{package} is installed; --all tries it (some 20 seconds)", "absent")
    return None


def _tried(make: Wrap, job: Job) -> str:
    """What it can do, after a window under each of its policies."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.manual_seed(0)
        model, _, options = make(nn.Linear(4, 1).to(job.device), job)
        engine = choose_engine([model], "last")
        for sync in engine.policies:
            torch.manual_seed(0)
            model, optimizer, options = make(nn.Linear(4, 1).to(job.device), job)
            accumulator = Accumulator(model, optimizer, steps=2, sync=sync, max_norm=math.inf, **options)
            for window in accumulator.windows(_micro_batches(job.rank, job.device)):
                for inputs in window:
                    window.backward(model(inputs).square().mean())
                norm = window.step().grad_norm
            expected = _expected_norm(job.world)
            if norm is None or not abs(norm - expected) <= OFF * expected:
                raise DistaccumError(f"the gradient's norm is {norm} under sync={sync!r}, expected {expected:.6g}")
    says = [f"sync={', '.join(map(repr, engine.policies))}"]
    says += ["a state in mid-window"] if engine.shows_partial else []
    says += ["owns the step"] if engine.owns_step else []
    says += [str(one.message).split(": ")[0] for one in caught if "reduces gradients in each" in str(one.message)][:1]
    return "; ".join(says)


def _micro_batches(rank: int, device: torch.device | None = None) -> list[torch.Tensor]:
    """Of 3 and 2 samples, others on each rank."""
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(size, 4, generator=generator).to(device) for size in (3, 2)]


def _expected_norm(world: int) -> float:
    """Of one big batch of all ranks."""
    torch.manual_seed(0)
    net = nn.Linear(4, 1)
    net(torch.cat([one for rank in range(world) for one in _micro_batches(rank)])).square().mean().backward()
    return math.hypot(*(float(p.grad.norm()) for p in net.parameters() if p.grad is not None))


def _with_sgd(model: nn.Module) -> tuple[nn.Module, Any, dict[str, Any]]:
    return model, SGD(model.parameters(), lr=0.1), {}


def _plain(net: nn.Module, job: Job) -> tuple[nn.Module, Any, dict[str, Any]]:
    return _with_sgd(net)


def _ddp(net: nn.Module, job: Job) -> tuple[nn.Module, Any, dict[str, Any]]:
    return _with_sgd(wrap.ddp(net))


def _fsdp1(net: nn.Module, job: Job) -> tuple[nn.Module, Any, dict[str, Any]]:
    return _with_sgd(wrap.fsdp1(net))


def _fully_sharded(net: nn.Module, job: Job) -> tuple[nn.Module, Any, dict[str, Any]]:
    return _with_sgd(wrap.fully_sharded(net))


def _hybrid(net: nn.Module, job: Job) -> tuple[nn.Module, Any, dict[str, Any]]:
    replicas = 1 if job.world % 2 else 2
    return _with_sgd(wrap.fully_sharded(net, shape=(replicas, job.world // replicas)))


def _zero(net: nn.Module, job: Job, stage: int) -> tuple[nn.Module, Any, dict[str, Any]]:
    return *wrap.deepspeed(net, SGD(net.parameters(), lr=0.1), wrap.zero_config(stage)), {}


def _accelerated(net: nn.Module, job: Job) -> tuple[nn.Module, Any, dict[str, Any]]:
    accelerator, *wrapped = wrap.accelerated(net, SGD(net.parameters(), lr=0.1), cpu=job.kind == "cpu")
    return *wrapped, {"accelerator": accelerator}
