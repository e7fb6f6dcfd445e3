"""Findings about this machine: software, devices, backends and optional packages."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from .findings import Finding

DEVELOPERS = ("bench", "test")  # extras that training never needs


def software() -> Iterator[Finding]:
    about = "software"
    versions = {
        "Python": platform.python_version(),
        "torch": torch.__version__,
    }  # torch's says the device that it is for
    try:
        needed = importlib.metadata.metadata("distaccum")["Requires-Python"]
        least = {name: bound for name, bound, extra in requirements() if not extra}
    except importlib.metadata.PackageNotFoundError:
        yield from (Finding(about, name, version) for name, version in versions.items())
        seen = "runs from a folder, so the versions that it supports are unknown"
        yield Finding(about, "distaccum", seen, "absent", "pip install it")
        return
    yield _judged(about, "Python", versions["Python"], needed.removeprefix(">="), "use a later Python")
    for name, bound in least.items():
        version = versions.get(name) or importlib.metadata.version(name)
        yield _judged(about, name, version, bound, f"pip install '{name}>={bound}'")


def requirements() -> Iterator[tuple[str, str, str]]:
    """Name, lowest version or "", and extra or "", of pyproject.toml's requirements, from the installed package."""
    for text in importlib.metadata.requires("distaccum") or []:
        wanted, _, marker = text.partition(";")
        found = re.match(r"([\w.-]+)(?:\[[^]]*\])?\s*(?:>=\s*([\d.]+))?", wanted.strip())
        extra = re.search(r"extra == ['\"]([\w-]+)['\"]", marker)
        if found is not None and "python_version" not in marker:  # later Pythons contain it
            yield found[1], found[2] or "", extra[1] if extra else ""


def packages() -> Iterator[Finding]:
    about = "optional packages"
    try:
        wanted = [(name, bound, extra) for name, bound, extra in requirements() if extra]
    except importlib.metadata.PackageNotFoundError:
        return
    sizes = Counter(extra for _, _, extra in wanted)
    users = [one for one in wanted if one[2] not in DEVELOPERS and one[0] != "distaccum"]
    for name in dict.fromkeys(name for name, *_ in users):
        bound = max((bound for other, bound, _ in wanted if other == name), key=_numbers)
        extra = min((extra for other, _, extra in users if other == name), key=lambda one: sizes[one])
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield Finding(about, name, "not installed", "absent", f"pip install 'distaccum[{extra}]'")
        else:
            yield _judged(about, name, version, bound, f"pip install --upgrade 'distaccum[{extra}]'")


def _judged(about: str, name: str, version: str, bound: str, cure: str) -> Finding:
    if _numbers(version) < _numbers(bound):
        return Finding(about, name, f"{version}, expected {bound} or later", "wrong", cure)
    return Finding(about, name, f"{version} ({bound} or later)" if bound else version)


def _numbers(version: str) -> tuple[int, ...]:
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in re.sub(r"(\.0+)+$", "", found[0]).split(".")) if found else ()  # 2.0 is 2


def devices() -> Iterator[Finding]:
    about = "devices"
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 0
    memory = f", {_gib(pages)}" if pages > 0 else ""
    yield Finding(about, "cpu", f"{os.cpu_count()} cores{memory}, torch takes {torch.get_num_threads()} threads")
    for kind in ("cuda", "xpu"):
        module = getattr(torch, kind)
        number = module.device_count() if module.is_available() else 0
        for i in range(number):
            device = module.get_device_properties(i)
            yield Finding(about, f"{kind}:{i}", f"{device.name}, {_gib(device.total_memory)}")
        if not number and kind == "cuda" and Path("/dev/nvidia0").exists():
            cure = f"this torch is {torch.__version__}; install one built for its driver"
            yield Finding(about, kind, "a GPU is here, and torch does not see it", "absent", cure)
        elif not number:
            yield Finding(about, kind, "none", "absent")
    if torch.backends.mps.is_available():
        yield Finding(about, "mps", f"{_gib(torch.mps.recommended_max_memory())} recommended")
    else:
        yield Finding(about, "mps", "none", "absent")


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"


def backends() -> Iterator[Finding]:
    for name in dist.Backend.backend_list:
        if name in (dist.Backend.UNDEFINED, "fake"):  # torch's own tests add fake
            continue
        kinds = ", ".join(kind for kind, one in dist.Backend.default_device_backend_map.items() if one == name)
        built = dist.is_backend_available(name)
        seen = ("built in" if built else "not in this torch") + (f", for {kinds}" if kinds else "")
        yield Finding("backends of process groups", name, seen, "ok" if built else "absent")
