"""`distaccum doctor`: it reports this machine correctly, finds planted faults, and measures a known link rate."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from engines import FSDP2_RUNS_ON_CPU
from programs import Done, Program, Programs, free_port

from distaccum.tools.cli import main
from distaccum.tools.doctor import trials
from distaccum.tools.doctor.examination import Examination
from distaccum.tools.doctor.findings import Finding
from distaccum.tools.doctor.job import Launch
from distaccum.tools.doctor.link import Link, Pair
from distaccum.tools.doctor.machine import packages, requirements
from distaccum.tools.plan.network import BACKENDS

ROOT = Path(__file__).parent.parent
COMMAND = [sys.executable, "-m", "distaccum", "doctor"]
COLUMNS = {"COLUMNS": "120"}


def ended(programs: list[Program], *statuses: int) -> list[Done]:
    """Waits for all; checks each exit status, or one status for all."""
    done = [one.wait(120) for one in programs]
    expected = [*statuses] * (1 if len(statuses) > 1 else len(done)) or [0] * len(done)
    assert [one.status for one in done] == expected, done
    return done


def ranks_of_two(first: dict[str, str], second: dict[str, str]) -> list[dict[str, str]]:
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), **COLUMNS}
    return [{"RANK": "0", "LOCAL_RANK": "0", **common, **first}, {"RANK": "1", "LOCAL_RANK": "1", **common, **second}]


def started(programs: Programs, *words: str, first: dict[str, str], second: dict[str, str]) -> list[Program]:
    environments = ranks_of_two(first, second)
    return [programs.start("distaccum", "doctor", *words, own_stderr=True, **one) for one in environments]


@pytest.fixture
def old_accelerate(tmp_path) -> dict[str, str]:
    """An environment whose Accelerate reports an unsupported, older version."""
    about = tmp_path / "accelerate-1.7.3.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: accelerate\nVersion: 1.7.3\n")
    return {"PYTHONPATH": str(tmp_path)}


def test_doctor_tries_each_engine_of_one_process(programs):
    (done,) = ended([programs.start("distaccum", "doctor", "--json", own_stderr=True)])
    found = json.loads(done.text)
    assert found["healthy"] and found["link"] is None and found["hosts"] == [socket.gethostname()]
    seen = {one["name"]: one for one in found["findings"]}
    assert seen["torch"]["seen"].startswith(torch.__version__) and "or later" in seen["torch"]["seen"]
    assert seen["gloo"]["state"] == "ok" and seen["variables"]["seen"] == "none: one process"
    assert seen["a plain module"]["seen"] == "sync='last', 'every'; a state in mid-window"
    assert seen["tensor parallelism"]["seen"] == "for a multiple of 2 ranks"
    fsdp2 = seen["FSDP2 (fully_shard), replicas"]
    assert "'gathered', 'replicas'" in fsdp2["seen"] if FSDP2_RUNS_ON_CPU else fsdp2["state"] == "absent"


def test_doctor_measures_the_link_of_two_ranks_and_prints_once(programs):
    one, other = ended(started(programs, "--json", first={}, second={}))
    assert not other.text
    found = json.loads(one.text)
    assert found["healthy"]
    (pair,) = found["link"]["pairs"]
    assert pair["ranks"] == [0, 1] and all(rate > 0.01 for rate in pair["gbit"]) and pair["microseconds"] > 1
    assert set(found["link"]["all_reduce_gbit"]) <= {str(2**20), str(2**22), str(2**24)}
    assert re.fullmatch(r"--link-gbit [\d.e+]+ --latency-us [\d.e+]+ --backend gloo", found["plan"])
    seen = {one["name"]: one for one in found["findings"]}
    assert seen["a plain module"]["state"] == "absent" and seen["DistributedDataParallel"]["state"] == "ok"
    if FSDP2_RUNS_ON_CPU:
        assert seen["a pipeline"]["seen"] == "1 data rank x 2; sync='last'"
    assert seen["versions"]["seen"] == "the same on all" and seen["ranks 0 to 1"]["seen"].startswith("on ")


def started_on_four(programs: Programs, plant: str = "") -> list[Program]:
    common = {"WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), **COLUMNS}
    ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank), **common} for rank in range(4)]
    return [programs.start("-c", plant + MAIN, "doctor", "--json", own_stderr=True, **one) for one in ranks]


@pytest.mark.skipif(not FSDP2_RUNS_ON_CPU, reason="FSDP2 does not run on CPU in torch 2.6")
def test_doctor_tries_meshes_of_four_ranks(programs):
    found = json.loads(ended(started_on_four(programs))[0].text)
    seen = {one["name"]: one["seen"] for one in found["findings"]}
    for name in ("tensor parallelism", "context parallelism"):
        assert seen[name] == "2 data ranks x 2; sync='last', 'every', 'gathered'"
    assert found["healthy"] and seen["a pipeline"] == "2 data ranks x 2; sync='last'"


@pytest.mark.skipif(not FSDP2_RUNS_ON_CPU, reason="FSDP2 does not run on CPU in torch 2.6")
def test_wrong_gradient_on_a_mesh_is_found(programs):
    plant = "from distaccum.tools.doctor import meshes; meshes.SHARE = 4\n"  # no rank is left for other data
    plant += "from distaccum.tools.doctor import trials; trials.SHARE = 2\n"
    found = json.loads(ended(started_on_four(programs, plant), 1)[0].text)
    seen = {one["name"]: one for one in found["findings"]}
    assert seen["tensor parallelism"]["state"] == "wrong" and ", expected " in seen["tensor parallelism"]["seen"]
    assert seen["a pipeline"]["seen"] == "not tried, since tensor parallelism failed"


def test_ranks_that_disagree_are_named_and_all_end_with_the_same_status(programs, old_accelerate):
    one, other = ended(started(programs, first={}, second=old_accelerate), 1)
    new = importlib.metadata.version("accelerate")
    assert re.search(rf"WRONG accelerate +{re.escape(new)} on rank 0; 1\.7\.3 on rank 1; install the same", one.text)
    old = r"WRONG accelerate, rank 1 +1\.7\.3, expected 1\.8 or later; pip install --upgrade 'distaccum\[accelerate"
    assert re.search(old, one.text) and one.text.endswith("2 are WRONG, see above\n")
    assert not other.text


LACKS = "import sys; sys.modules['accelerate'] = sys.modules['deepspeed'] = None  # as if they were not installed\n"
DIES = "import os; from distaccum.tools import wrap; wrap.ddp = lambda *_: os._exit(3)\n"
MAIN = "import sys; from distaccum.tools import cli; sys.exit(cli.main())"


def test_packages_that_one_rank_lacks_are_tried_on_no_rank(programs):
    first, second = ranks_of_two({}, {})
    words = ("doctor", "--all", "--timeout", "20")
    ranks = [
        programs.start("distaccum", *words, own_stderr=True, **first),
        programs.start("-c", LACKS + MAIN, *words, own_stderr=True, **second),
    ]
    text = ended(ranks)[0].text
    where = " on rank 1" if find_spec("accelerate") else ""
    assert re.search(rf"- +what Accelerate prepared +accelerate is not installed{where}; pip install", text)
    assert re.search(r"ok +DistributedDataParallel", text)


def test_findings_are_printed_even_if_a_rank_dies_in_a_trial(programs):
    first, second = ranks_of_two({}, {})
    words = ("doctor", "--timeout", "3")
    ranks = [
        programs.start("distaccum", *words, own_stderr=True, **first),
        programs.start("-c", DIES + MAIN, *words, own_stderr=True, **second),
    ]
    text = ended(ranks, 1, 3)[0].text
    assert re.search(r"ok +torch ", text) and "distaccum plan ... --link-gbit" in text
    assert re.search(
        r"WRONG DistributedDataParallel .*rank 1 of 2 went away within [\d.]+ seconds", " ".join(text.split())
    )


def test_ranks_that_disagree_on_the_world_size_are_named(programs):
    done = ended(started(programs, "--timeout", "20", first={}, second={"WORLD_SIZE": "3"}), 2)
    errors = [one.errors for one in done]
    assert all(len(one.splitlines()) == 1 for one in errors)
    assert any("WORLD_SIZE=2 on rank 0" in one and "WORLD_SIZE=3 on rank 1" in one for one in errors)


def test_missing_rank_prints_one_sentence_and_exits_with_status_2(programs):
    unreachable = {"MASTER_PORT": free_port()}
    alone, lost = ended(started(programs, "--timeout", "1", first={}, second=unreachable), 2)
    assert not alone.text and "rank 1 of 2 did not come within 1 seconds" in alone.errors
    assert len(alone.errors.splitlines()) == 1
    assert "rank 1 on " in lost.errors and "is rank 0 started there" in lost.errors
    assert len(lost.errors.splitlines()) == 1


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"RANK": "0"}, "RANK=0 without WORLD_SIZE"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2 without RANK"),
        ({"LOCAL_RANK": "1"}, "LOCAL_RANK=1 without RANK"),
        (
            {"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
            "RANK=2 with WORLD_SIZE=2, expected",
        ),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}, "RANK and WORLD_SIZE without MASTER_PORT"),
        ({"RANK": "one", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, "RANK='one', expected a whole"),
        ({"SLURM_STEP_NUM_TASKS": "4"}, "SLURM_STEP_NUM_TASKS=4 and no RANK"),
        ({"RANK": "²", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, "RANK='²', expected a whole"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "99999"}, "=99999, expected 1 to 65535"),
    ],
)
def test_contradictions_of_the_launcher_are_named(environment, message):
    launch = Launch.from_environment(environment)
    assert launch.world == 1  # one process, so that the other checks still run
    assert all(one.state == "wrong" and one.cure for one in launch.findings)
    assert any(message in one.seen for one in launch.findings)


def test_batch_script_of_slurm_is_no_contradiction():
    (finding,) = Launch.from_environment({"SLURM_NTASKS": "4"}).findings
    assert finding.state == "ok"


def test_line_for_plan_repeats_the_measured_rates():
    pairs = tuple(Pair((i, i + 1), gbit, 115.0) for i, gbit in enumerate([(7.56, 8.2), (0.9, 0.956), (20.0, 19.12)]))
    two = Examination((), ("a", "a"), Link(pairs[:1], 519.0, {}), 0)
    assert two.plan == "--link-gbit 7.91 --latency-us 260 --backend gloo"
    assert float(two.plan.split()[1]) * BACKENDS["gloo"].reduce == pytest.approx(7.56, rel=1e-3)
    four = Examination((), ("a", "a", "b", "b"), Link(pairs, 600.0, {}), 0, "nccl")
    assert four.plan == "--link-gbit 1 --node-gbit 8.4 --latency-us 100 --backend nccl"


def test_report_fits_the_terminal(monkeypatch):
    link = Link((Pair((0, 1), (7.56, 8.2), 115.0),), 519.0, {2**20: 2.15, 2**22: 4.7, 2**24: 4.54})
    finding = Finding(
        "ranks", "accelerate", "1.15.0 on rank 0; 1.7.3 on rank 1", "wrong", "install the same on all nodes"
    )
    found = Examination((finding,), ("vm-a", "vm-b"), link, 0)
    for columns, lines in ((60, 2), (80, 2), (120, 1)):
        monkeypatch.setenv("COLUMNS", str(columns))
        text = str(found)
        assert max(map(len, text.splitlines())) <= columns and found.plan.split("--backend")[1] in text
        assert len(text.split("\n\n")[1].splitlines()) == 1 + lines, text


def test_bounds_are_those_of_the_installed_package():
    declared = importlib.metadata.requires("distaccum")
    assert ("accelerate", "1.8", "accelerate") in list(
        requirements()
    ) and 'accelerate>=1.8; extra == "accelerate"' in declared
    assert ("torch", "2.6", "") in list(requirements())


def test_cure_names_the_smallest_extra(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    cures = {one.name: one.cure for one in packages()}
    assert cures["matplotlib"] == "pip install 'distaccum[plot]'"
    assert cures["tqdm"] == "pip install 'distaccum[launch]'"


def test_optional_packages_that_are_missing_are_not_wrong(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    monkeypatch.setattr(trials, "find_spec", lambda name: None)
    found = list(packages())
    assert {one.state for one in found} == {"absent"} and all("pip install 'distaccum[" in one.cure for one in found)
    absent = trials.untried_package("deepspeed", all_of_them=True)
    assert absent == Finding("", "", "deepspeed is not installed", "absent", "pip install 'distaccum[deepspeed]'")


def test_wrong_timeout_prints_one_line(capsys):
    assert main(["doctor", "--timeout", "0"]) == 2
    assert "--timeout 0, expected seconds above 0" in capsys.readouterr().err


def measured_link() -> tuple[list[float], list[float], float]:
    """In Gbit/s: of the pair of nodes, of reductions, and what is handed to the plan."""
    from nodes import DEVICE, address, two_nodes

    with two_nodes("1gbit") as nodes:
        both = ranks_of_two({"LOCAL_RANK": "0"}, {"LOCAL_RANK": "0"})
        more = {"MASTER_ADDR": address(0), "GLOO_SOCKET_IFNAME": DEVICE, "OMP_NUM_THREADS": "1"}
        processes = [
            subprocess.Popen(
                ["ip", "netns", "exec", node, *COMMAND, "--json"],
                env={**os.environ, **one, **more},
                text=True,
                stdout=subprocess.PIPE,
            )
            for node, one in zip(nodes, both, strict=True)
        ]
        text, _ = (process.communicate(timeout=120)[0] for process in processes)
    found = json.loads(text)
    (pair,) = found["link"]["pairs"]
    return pair["gbit"], list(found["link"]["all_reduce_gbit"].values()), float(found["plan"].split()[1])


@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")),
    reason="network namespaces need root and iproute2",
)
def test_link_of_1_gbit_is_measured_correctly(monkeypatch):
    """Other tests on these cores can only slow it down, so that one of three may show its rate."""
    monkeypatch.syspath_prepend(ROOT / "launch/bench")
    seen = []
    for _ in range(3):
        try:
            seen.append(measured_link())
        except RuntimeError as error:
            pytest.skip(str(error))
        pair, reductions, planned = seen[-1]
        assert max(*pair, *reductions) < 1.05 and planned < 1.1, seen
        if min(pair) > 0.5 and min(reductions) > 0.3 and planned > 0.5:
            return
    pytest.fail(f"slower than the link: {seen}")
