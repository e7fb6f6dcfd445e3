from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from programs import Programs
from ranks import Ranks


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], Ranks]]:
    """`ranks(2)` are two ranks, started when first asked for."""
    started: dict[int, Ranks] = {}

    def get(num: int) -> Ranks:
        return started.setdefault(num, Ranks(num))

    yield get
    for these in started.values():
        these.stop()


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Programs]:
    """Starts the programs under launch/, from a process that has imported what they import."""
    started = Programs(tmp_path_factory.mktemp("programs"))
    yield started
    started.stop()
