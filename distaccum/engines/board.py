"""Boards: memory that the ranks of one host share, in which each leaves its numbers for the others.

A message wakes a thread on either side, which takes longer than a small micro-step. A row on a board is sent by nobody:
who wants it looks. Between hosts one rank of each sends, for all of its host.
"""

from __future__ import annotations

import mmap
import os
import platform
import sys
import time
from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch.distributed as dist

from .rounds import gather_in_rounds

if sys.platform == "linux":
    import fcntl

FIRST = 16  # rows that are sent in any case
WIDTH = 32  # numbers in the longest row
SPIN = 2e-4  # seconds, after which a rank that waits sleeps between two looks
ASK = 0.1  # seconds, after which it asks whether the other one lives
# A row's number is seen after the row only where a processor keeps the order of writes.
KEEPS_ORDER = platform.machine().lower() in ("x86_64", "amd64")
NAME = "distaccum-board"
BOOT, NAMESPACE = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")


class MemoryFile:
    """Of memory, without a name; other processes of this user find it by the number that it has in the first."""

    def __init__(self, number: int) -> None:
        self.number, self.identity = number, os.fstat(number).st_ino

    @classmethod
    def new(cls, size: int) -> MemoryFile:
        """For `size` numbers, which take memory when they are written."""
        file = cls(os.memfd_create(NAME))
        os.ftruncate(file.number, size * 8)
        return file

    @classmethod
    def of_another(cls, process: int, number: int, identity: int) -> MemoryFile:
        file = cls(os.open(f"/proc/{process}/fd/{number}", os.O_RDWR))
        if file.identity != identity or NAME not in Path(f"/proc/self/fd/{file.number}").readlink().name:
            raise OSError(f"process {process} has closed it")
        return file

    def __del__(self) -> None:
        os.close(self.number)


class SharedMemory:
    """A file of memory that the ranks of a host have mapped.

    Each holds a lock on a byte of it, which ends with its process, however that ends: so the others know.
    """

    def __init__(self, file: MemoryFile, size: int, ranks: Sequence[int], place: int, timeout: timedelta) -> None:
        self._file = file
        self.numbers = memoryview(mmap.mmap(file.number, size * 8)).cast("d")
        self.ranks, self.place, self.timeout = ranks, place, timeout.total_seconds()
        self.count = 0  # of the rows so far
        fcntl.lockf(file.number, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)

    def has(self, place: int) -> bool:
        """Whether another rank's process lives, and has it mapped."""
        try:
            fcntl.lockf(self._file.number, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
        except OSError:
            return True
        fcntl.lockf(self._file.number, fcntl.LOCK_UN, 1, place)
        return False

    def has_all(self) -> bool:
        return all(self.has(place) for place in range(len(self.ranks)) if place != self.place)


class Board:
    """The last two rows of each of some ranks, all of one kind.

    A rank leaves its third when it has seen the second of all, and they left that when they had seen the first of all:
    so nobody needs the first any more.
    """

    def __init__(self, shared: SharedMemory, begin: int, num: int, width: int) -> None:
        self._shared, self._numbers = shared, shared.numbers
        self._num, self._step = num, width + 1  # a row comes after its number
        self._begin, self._other = begin, begin + num * self._step
        self._last: Rows | None = None

    def post(self, row: Sequence[float]) -> Rows:
        """Leaves this rank's row; waits only for ranks that have not left the one before."""
        found = self.expect(len(row))
        place = self._begin + self._shared.place * self._step
        self._numbers[place + 1 : place + 1 + len(row)] = array("d", row)
        self._numbers[place] = self._shared.count  # last: who sees it sees the row
        return found

    def expect(self, width: int) -> Rows:
        """The next rows, of which this rank leaves none."""
        if self._last is not None:
            self._last.of_all()
        self._begin, self._other = self._other, self._begin
        self._shared.count += 1
        self._last = Rows(self, self._begin, self._shared.count, width)
        return self._last

    def fail(self) -> None:
        """In the place of `post`: who waits for the row gets an error."""
        self.expect(0)
        self._numbers[self._begin + self._shared.place * self._step] = -self._shared.count

    def read(self, begin: int, count: int, width: int) -> list[list[float]]:
        """By rank, when all are there."""
        numbers = self._numbers
        found: list[Any] = []
        for place in range(self._num):
            at = begin + place * self._step
            if numbers[at] != count:
                try:
                    self._await(at, count, place)
                except RuntimeError:
                    self._last = None  # it holds this board, and the others wait until nobody does
                    raise
            found.append(numbers[at + 1 : at + 1 + width].tolist())
        return found

    def _await(self, at: int, count: int, place: int) -> None:
        numbers, shared, began = self._numbers, self._shared, time.monotonic()
        asked, rank = began, shared.ranks[place]
        while numbers[at] != count:
            now = time.monotonic()
            if now < began + SPIN:
                os.sched_yield()
                continue
            time.sleep(min((now - began) / 50, 1e-3))
            if numbers[at] == -count:
                raise RuntimeError(f"connection closed: rank {rank} lost contact with another")
            if numbers[at] > count:
                raise RuntimeError(f"rank {rank} is ahead of this rank, which has left out a step that it took")
            if now > asked + ASK:
                asked = now
                if not shared.has(place) and numbers[at] != count:
                    raise RuntimeError(f"connection closed: rank {rank} has ended, or its Accumulator has")
                if now > began + shared.timeout:
                    raise RuntimeError(f"timed out after {shared.timeout:g} s of waiting for rank {rank}")


class Rows:
    """Of this rank, and those of the others."""

    def __init__(self, board: Board, begin: int, count: int, width: int) -> None:
        self._board: Board | None = board  # until they are read
        self._where = begin, count, width
        self._all: list[list[float]] = []

    def of_all(self) -> list[list[float]]:
        """By rank; waits for them, the first time."""
        if self._board is not None:
            self._all, self._board = self._board.read(*self._where), None
        return self._all


class Boards:
    """Those of a group whose hosts have as many of its ranks each.

    Attributes:
        records (Board | None): For what is summed while nobody waits; None: the ranks have several hosts.
    """

    def __init__(self, shared: SharedMemory, group: dist.ProcessGroup, hosts: Sequence[Sequence[int]]) -> None:
        here = len(shared.ranks)
        self._group, self._shared = group, shared
        self._plans = Board(shared, 0, here, WIDTH)
        rest = 2 * here * (WIDTH + 1)
        self.records = Board(shared, rest, here, WIDTH) if len(hosts) == 1 else None
        self._tables = Board(shared, rest, 1, len(hosts) * here * WIDTH) if len(hosts) > 1 else None
        self._leaders = [ranks[0] for ranks in hosts]
        by_host = [rank for ranks in hosts for rank in ranks]
        self._order = [by_host.index(rank) for rank in range(len(by_host))]

    def gather(self, row: Sequence[float]) -> list[list[float]]:
        """The rows of all ranks of the group, in their order."""
        here = self._plans.post(row)
        if self._tables is None:
            return here.of_all()
        width = len(row)
        if self._shared.place:
            (table,) = self._tables.expect(len(self._order) * width).of_all()
        else:
            table = self._ask_other_hosts(here, self._tables)
        return [table[at * width : (at + 1) * width] for at in self._order]

    def _ask_other_hosts(self, here: Rows, tables: Board) -> list[float]:
        try:
            mine = [number for row in here.of_all() for number in row]
            table: list[float] = gather_in_rounds(mine, self._group, self._leaders).flatten().tolist()
        except BaseException:
            tables.fail()
            raise
        tables.post(table)
        return table


class Introduction:
    """What the ranks of a group say of themselves beside some of their rows, so that their boards cost no message.

    A short job needs none, so nothing is said with its rows. Then, the host, and a file of memory that others of it may
    open; with the next row, whether this rank has opened that of its host's first rank; with the one after that,
    whether it sees the others there. If all do, they have boards from then on. If one does not, they go on with
    messages.

    Attributes:
        boards (Boards | None): When all have them.
    """

    def __init__(self, group: dist.ProcessGroup, timeout: timedelta) -> None:
        self._group, self._timeout, self._size = group, timeout, dist.get_world_size(group) * 4 * (WIDTH + 1)
        self.boards: Boards | None = None
        self._answers: list[Callable[[], list[float]]] = [list[float]] * FIRST + [self._name]  # to come
        self._width = 0  # of the last
        self._file: MemoryFile | None = None
        self._shared: SharedMemory | None = None
        self._hosts: list[list[int]] = []

    def says(self) -> list[float]:
        """The numbers to send after the next row."""
        answer = self._answers.pop(0)() if self._answers else []
        self._width = len(answer)
        return answer

    def hears(self, rows: list[list[float]]) -> list[list[float]]:
        """The same rows without what ranks said after them."""
        width = self._width
        if not width:
            return rows
        said = [row[-width:] for row in rows]
        if width > 1:
            self._meet(said)
        elif not all(flag for (flag,) in said):
            self._answers, self._shared = [], None
        elif not self._answers and self._shared is not None:
            self.boards, self._shared = Boards(self._shared, self._group, self._hosts), None
        return [row[:-width] for row in rows]

    def _name(self) -> list[float]:
        host = host_number()
        if host >= 0:
            with suppress(OSError, AttributeError):  # an old library of C has none
                self._file = MemoryFile.new(self._size)
        return [-1.0] * 4 if self._file is None else [host, os.getpid(), self._file.number, self._file.identity]

    def _has_opened(self) -> list[float]:
        return [float(self._shared is not None)]

    def _sees_all(self) -> list[float]:
        return [float(self._shared is not None and self._shared.has_all())]

    def _meet(self, said: list[list[float]]) -> None:
        names = [host for host, *_ in said]
        hosts = [[rank for rank, name in enumerate(names) if name == host] for host in dict.fromkeys(names)]
        num, rank, file = len(hosts[0]), dist.get_rank(self._group), self._file
        self._file = None
        if -1 in names or num == 1 or any(len(ranks) != num for ranks in hosts):
            return  # of no use
        self._hosts, ranks = hosts, next(ranks for ranks in hosts if rank in ranks)
        with suppress(OSError, ValueError):
            if rank != ranks[0]:
                file = MemoryFile.of_another(*map(int, said[ranks[0]][1:]))
            assert file is not None  # for this rank has named its host
            self._shared = SharedMemory(file, self._size, ranks, ranks.index(rank), self._timeout)
        self._answers = [self._has_opened, self._sees_all]


def host_number() -> int:
    """A number that tells it, and its processes' names, from others; -1 where it has no boards."""
    if sys.platform != "linux" or not KEEPS_ORDER:
        return -1
    try:
        about = f"{BOOT.read_text()} {NAMESPACE.readlink()}"
    except OSError:
        return -1
    return int.from_bytes(sha256(about.encode()).digest()[:6], "big")
