from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import forks
import processes
import pytest
from processes import pytest_unconfigure as pytest_unconfigure
from programs import ROOT, Programs
from ranks import Ranks

# --quick runs the tests of these files that are not marked slow, and all doctests.
QUICK = {
    f"test_{name}"
    for name in (
        *(
            "suite",
            "architecture",
            "reference",
            "leaving",
            "law",
            "loops",
            "engines",
            "transaction",
            "state",
            "loaders",
            "batches",
            "memory",
        ),
        *("ddp", "ddp_shared", "ddp_forms", "heads", "fully_shard", "deepspeed", "accelerate", "parts"),
        *("precision", "accumulate_dtype", "batchnorm"),
    )
}
collect_ignore = ["preloaded.py", "preloaded_programs.py"]  # slow to import, and without doctests
TIMES = Path(__file__).parent / "times.json"  # seconds of one worker for each file, and for its quick tests


def pytest_configure(config: pytest.Config) -> None:
    processes.pytest_configure()
    if config.getoption("numprocesses", None) and not config.option.collectonly:
        forks.start()  # shared by all workers; it imports while they collect


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
    import torch  # imported here, since the process that shows the results needs no torch

    torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Callable[[int], Ranks]]:
    """`ranks(2)` returns two ranks, which start at the first request and end with the file of tests.

    Each process group that a test makes leaves a polling gloo thread: after a thousand tests, idle ranks would take
    half of a core.
    """
    started: dict[int, Ranks] = {}

    def get(num: int) -> Ranks:
        return started.setdefault(num, Ranks(num))

    yield get
    for these in started.values():
        these.stop()


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Programs]:
    """Starts the programs under launch/ from a process that has already imported their libraries."""
    started = Programs(tmp_path_factory.mktemp("programs"))
    yield started
    started.stop()


# What the oldest versions cannot do themselves (run.sh --oldest): by a part of the error
OLDEST = {
    "Output 0 of SplitBackward0 is a view": "ZeRO 1 of DeepSpeed 0.18 cannot step on torch 2.9 with gloo, nor by hand",
    "gradients that are not finite in this version": "DeepSpeed 0.18 steps NaN unless in fp16, and is refused for it",
}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed and call.excinfo is not None and metadata.version("deepspeed").startswith("0.18."):
        for part, reason in OLDEST.items():
            if part in str(call.excinfo.value):
                report.outcome, report.longrepr = "skipped", (str(item.path), 0, f"Skipped: {reason}")
    return report


# The order of the tests, the predicted time of a run, and the commands that rerun its failures


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shuffle", type=int, metavar="SEED", help="run the tests in the random order of this seed")
    parser.addoption("--record-times", action="store_true", help=f"write the time of each file into {TIMES.name}")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With several workers the slowest files come first, so that no worker starts one at the end."""
    for item in items:
        is_doctest = isinstance(item, pytest.DoctestItem)
        if is_doctest or (item.path.stem in QUICK and not item.get_closest_marker("slow")):
            item.add_marker("quick")
    seed = config.getoption("--shuffle")
    if seed is not None:
        random.Random(seed).shuffle(items)
    elif hasattr(config, "workerinput"):  # one of several workers
        seconds = {file: every for file, (every, _) in known_times().items()}
        items.sort(key=lambda item: -seconds.get(file_of(item.nodeid), 0.0))


def file_of(nodeid: str) -> str:
    return nodeid.split("::")[0]


def known_times() -> dict[str, tuple[float, float]]:
    return json.loads(TIMES.read_text())["files"] if TIMES.exists() else {}


class Controller:
    """The process that shows the results: it announces the run, records times and lists failures."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._workers = config.getoption("numprocesses", None) or 1
        self._announced = False
        self._quick: set[str] = set()  # tests

    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self._announce(ids)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if session.items:  # empty where workers collect
            self._announce([item.nodeid for item in session.items])

    def _announce(self, ids: list[str]) -> None:
        if self._announced or self._config.option.collectonly:
            return
        self._announced = True
        is_quick = self._config.option.markexpr == "quick"
        times = known_times()
        numbers = json.loads(TIMES.read_text())["numbers"] if TIMES.exists() else {}
        found = Counter(map(file_of, ids))
        seconds = 0.0
        for file, number in found.items():
            every = numbers.get(file, [number, number])[is_quick] or number
            seconds += times.get(file, (0.2 * number,) * 2)[is_quick] * number / every
        about = max(10, round(seconds / self._workers / 10) * 10)
        minutes = f"{about} seconds" if about < 120 else f"{about / 60:.0f} minutes"
        print(f"{len(ids)} tests in {len(found)} files, about {minutes} on {self._workers} quiet cores", flush=True)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if "quick" in report.keywords:
            self._quick.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        if self._config.getoption("--record-times"):
            self._record()

    def _record(self) -> None:
        terminal: Any = self._config.pluginmanager.get_plugin("terminalreporter")
        seconds: dict[str, list[float]] = {}
        numbers: dict[str, list[int]] = {}
        for report in (one for several in terminal.stats.values() for one in several if hasattr(one, "duration")):
            file, is_quick = file_of(report.nodeid), report.nodeid in self._quick
            taken, number = seconds.setdefault(file, [0.0, 0.0]), numbers.setdefault(file, [0, 0])
            for place in range(1 + is_quick):
                taken[place] += report.duration
                number[place] += report.when == "call" or report.outcome == "skipped"
        files = {file: [round(one, 1) for one in taken] for file, taken in sorted(seconds.items())}
        text = json.dumps({"files": files, "numbers": dict(sorted(numbers.items()))})
        TIMES.write_text(text.replace('], "', '],\n "').replace("}, ", "},\n") + "\n")

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> None:
        terminal: Any = self._config.pluginmanager.get_plugin("terminalreporter")
        failed = dict.fromkeys(one.nodeid for kind in ("failed", "error") for one in terminal.stats.get(kind, []))
        if failed:
            print(f"\n{len(failed)} failed. To run {'it' if len(failed) == 1 else 'each'} alone:")
            print("\n".join(f"  bash tests/run.sh -n 0 '{nodeid}'" for nodeid in failed), flush=True)


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    plugins = session.config.pluginmanager
    if not hasattr(session.config, "workerinput"):
        plugins.register(Controller(session.config))
        if plugins.has_plugin("terminaldistreporter"):
            plugins.unregister(name="terminaldistreporter")  # it reports only that workers start
