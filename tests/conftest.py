from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from processes import pytest_configure as pytest_configure
from processes import pytest_unconfigure as pytest_unconfigure
from programs import ROOT, Programs
from ranks import Ranks


@pytest.fixture(scope="session", autouse=True)
def _runs_of_the_contributor() -> Iterator[None]:
    """No test makes, removes or replaces anything in runs/."""

    def found() -> dict[str, int]:
        return {path.name: path.stat().st_ino for path in ROOT.glob("runs/*")}

    before = found()
    yield
    assert found() == before, f"a test made, removed or replaced a folder in {ROOT / 'runs'}"


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Callable[[int], Ranks]]:
    """`ranks(2)` are two ranks, started when first asked for, and thrown away with the file of tests.

    Each process group that a test made keeps a thread of gloo's, which wakes up all the time: after a thousand tests
    ranks that only wait would take half of a core.
    """
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
