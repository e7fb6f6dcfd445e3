import gc
import os
from collections.abc import Callable, Generator, Iterator

import pytest

from tests.support.programs import Programs
from tests.support.ranks import Ranks
from tests.support.versions import why_skipped

# --quick runs the tests of these files that are not marked slow, and all doctests.
QUICK = (
    "house/suite house/architecture docs/reference core/leaving core/law core/waits grids/engines core/window "
    "core/misuses core/state core/loaders core/batch runs/update engines/ddp engines/ddp_forms runs/heads "
    "engines/fsdp2 wrappers/deepspeed wrappers/accelerate core/scaling extensions/wide_sums core/limits"
)
# --versions runs the tests of these files, which touch what other libraries do not promise: private names, groups,
# engines, states.
VERSIONS = (
    "house/private worlds/worlds core/exchange core/scaling engines/choosing engines/ddp engines/ddp_forms "
    "engines/fsdp2 wrappers/deepspeed wrappers/accelerate wrappers/fabric meshes/context"
)
# --most leaves these out, with all files and tests marked long: many seconds each, for what a shorter case shows too.
LONG = (
    "test_audit_runs_under_accelerate_launch",
    *(f"test_right_script_has_no_finding[{script}" for script in ("compiled", "trained f", "trained l", "trained t")),
    "test_audit_lives_with_a_script_that_has[spawned ranks",
    "test_mistake_is_named_with_its_line[loss divided in",
    "test_job_ends_whose_last_loss_nobody_reads",
    *(f"test_world_trains_exactly[{world}" for world in ("9-lost", "12-plain", "16-plain")),
    *(f"test_law_holds_beside_tensor_parallel_ranks[{case}" for case in ("8", "4-repl", "4-part", "4-loss")),
    "test_job_that_is_killed_anywhere_ends_with_the_same_bits[FSDP2-every",
    "test_killed_run_goes_on_to_the_same_bits[2",
    "test_law_holds_on_what_fabric_set_up[auto",
    *(f"test_configs_start[{name}]" for name in ("fsdp2", "hsdp", "language", "nodes", "zero2", "zero3")),
)
# With several workers the slowest files come first, so that no worker starts one at the end.
SLOWEST = (
    "grids/engines launch/train audit/audit launch/launchers launch/bench launch/train_meshes meshes/states "
    "worlds/worlds runs/update meshes/sharing grids/models engines/fsdp2 core/state trainers/transformers docs/pages "
    "core/leaving core/places extensions/noise wrappers/fabric"
)
collect_ignore = ["support/preloaded.py", "audit/loops"]  # slow to import, and scripts; without doctests
if "PJRT_DEVICE" not in os.environ:  # as `run.sh --device xla` sets it
    collect_ignore.append("device")


@pytest.fixture(autouse=True)
def _seed_and_thread() -> None:
    import torch  # imported here, since the process that shows the results needs no torch

    torch.manual_seed(0)
    torch.set_num_threads(1)


@pytest.fixture(scope="module", autouse=True)
def _freeze_modules() -> None:
    """Lets a collection of garbage, as out of memory starts one, visit no module that other files have imported."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # or libraries would print at exit that nothing has freed their objects


@pytest.fixture(scope="module")
def ranks() -> Iterator[Callable[[int], Ranks]]:
    """`ranks(2)` returns two ranks, which start at the first request and end with the file of tests.

    Each process group that a test makes leaves a polling gloo thread: after a thousand tests, idle ranks would take
    half of a core.
    """
    started: dict[int, Ranks] = {}
    yield lambda num: started.setdefault(num, Ranks(num))
    for these in started.values():
        these.close()


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Programs]:
    """Starts the programs under launch/ from a process that has already imported their libraries."""
    started = Programs(tmp_path_factory.mktemp("programs"))
    yield started
    started.stop()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed and call.excinfo is not None and (reason := why_skipped(call.excinfo.value)) is not None:
        report.outcome, report.longrepr = "skipped", (str(item.path), 0, f"Skipped: {reason}")
    return report


def file_of(item: pytest.Item) -> str:
    """`core/law` for a test of tests/core/test_law.py."""
    return f"{item.path.parent.name}/{item.path.stem.removeprefix('test_')}"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        quick = file_of(item) in QUICK.split() and not item.get_closest_marker("slow")
        if quick or isinstance(item, pytest.DoctestItem):
            item.add_marker("quick")
        if file_of(item) in VERSIONS.split():
            item.add_marker("versions")
        if item.name.startswith(LONG):
            item.add_marker("long")
    if hasattr(config, "workerinput"):  # one of several workers
        places = {name: place for place, name in enumerate(SLOWEST.split())}
        items.sort(key=lambda item: places.get(file_of(item), 99))
