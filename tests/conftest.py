from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
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
