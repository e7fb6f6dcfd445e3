"""The link between ranks, measured: latency, rate, and the slowest pair."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

Gather = Callable[[object], Sequence[object]]  # the values of all ranks, in their order
LONG = 0.1  # seconds: a transfer of this length shows the rate and not the latency
SMALLEST, LARGEST = 2**18, 2**26  # bytes of a transfer
REDUCED = (2**20, 2**22, 2**24)  # bytes of an all-reduce
PATIENCE = 2.0  # seconds for one


@dataclass(frozen=True)
class Pair:
    """Two neighbouring ranks."""

    ranks: tuple[int, int]
    gbit: tuple[float, float]  # per second, from the first to the second and back, one after the other
    microseconds: float  # of a message of 4 bytes, one way

    @property
    def slower(self) -> float:
        return min(self.gbit)


@dataclass(frozen=True)
class Link:
    pairs: tuple[Pair, ...]
    all_reduce_microseconds: float  # of 4 bytes
    all_reduce_gbit: dict[int, float]  # by the bytes that are reduced: rate of what a ring sends per rank


def measure_link(gather: Gather, device: torch.device) -> Link:
    """On all ranks of the default group together.

    Neighbours 0-1, 2-3, ... are measured at the same time, then 1-2, 3-4, ...: the time does not depend on the number
    of ranks, and if ranks are numbered node by node, one pair at a time crosses between two nodes.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    _reduce_seconds(1, device, repeats=5)  # makes the connections
    small = _reduce_seconds(1, device, repeats=30)
    found: list[Pair] = []
    for parity in (0, 1):
        first = rank - (rank + parity) % 2
        mine = _between(first, rank, device) if first >= 0 and first + 1 < world else None
        for i, row in enumerate(gather(mine if rank == first else None)):
            if isinstance(row, list | tuple):
                there, back, seconds = row
                found.append(Pair((i, i + 1), (there, back), 1e6 * seconds))
    found.sort(key=lambda pair: pair.ranks)
    slowest = min(pair.slower for pair in found)
    reduced = {}
    for size in REDUCED:
        sent = 2 * (world - 1) / world * size
        if 8e-9 * sent / slowest < PATIENCE:
            reduced[size] = 8e-9 * sent / _reduce_seconds(size // 4, device, repeats=3)
    return Link(tuple(found), 1e6 * small, reduced)


def _reduce_seconds(numbers: int, device: torch.device, repeats: int) -> float:
    """The median of an all-reduce, on this rank."""
    values = torch.zeros(numbers, device=device)
    return _median(lambda: dist.all_reduce(values), device, repeats)


def _between(first: int, rank: int, device: torch.device) -> tuple[float, float, float]:
    """Gbit/s there and back, and seconds of a message; right on the first rank of the pair."""
    other = first + 1 if rank == first else first
    number = torch.zeros(1, device=device)
    both = [dist.send, dist.recv] if rank == first else [dist.recv, dist.send]

    def ping() -> None:
        for call in both:
            call(number, other)

    _median(ping, device, 5)
    seconds = _median(ping, device, 30) / 2
    there, back = (_send(other, device) if rank == one else _receive(other, device) for one in (first, first + 1))
    return there, back, seconds


def _send(other: int, device: torch.device) -> float:
    """Gbit/s, by ever larger transfers until one takes long; the receiver gets the rate too."""
    size, seconds = SMALLEST, _transfer(SMALLEST, other, device)
    while seconds < LONG and size < LARGEST:
        size *= 4
        seconds = _transfer(size, other, device)
    rate = 8e-9 * size / statistics.median(_transfer(size, other, device) for _ in range(3))
    dist.send(torch.tensor([0], device=device), other)
    dist.send(torch.tensor([rate], dtype=torch.float64, device=device), other)
    return rate


def _transfer(size: int, other: int, device: torch.device) -> float:
    """Seconds until the other rank has confirmed all of it."""
    answer, data = torch.zeros(1, device=device), torch.zeros(size, dtype=torch.uint8, device=device)
    dist.send(torch.tensor([size], device=device), other)
    dist.recv(answer, other)  # it has room
    _wait(device)
    began = time.perf_counter()
    dist.send(data, other)
    dist.recv(answer, other)
    _wait(device)
    return time.perf_counter() - began


def _receive(other: int, device: torch.device) -> float:
    answer = torch.zeros(1, device=device)
    while size := _received(torch.zeros(1, dtype=torch.int64, device=device), other):
        data = torch.empty(int(size), dtype=torch.uint8, device=device)
        dist.send(answer, other)
        dist.recv(data, other)
        dist.send(answer, other)
    return _received(torch.zeros(1, dtype=torch.float64, device=device), other)


def _received(room: Tensor, other: int) -> float:
    dist.recv(room, other)
    return room.item()


def _median(once: Callable[[], object], device: torch.device, repeats: int) -> float:
    found = []
    for _ in range(repeats):
        began = time.perf_counter()
        once()
        _wait(device)
        found.append(time.perf_counter() - began)
    return statistics.median(found)


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        getattr(torch, device.type).synchronize(device)
