"""`distaccum doctor`: it reports this machine correctly, and finds planted faults."""

import importlib.metadata
import json
import re

import torch

from distaccum.tools.doctor import examine_launcher
from tests.support.programs import Program, Programs, free_port, wait_for


def ended(programs: list[Program], *statuses: int) -> list[Program]:
    wait_for(programs)
    assert [one.status for one in programs] == [*statuses], [one.text + one.errors for one in programs]
    return programs


def started(programs: Programs, *words: str, second: dict[str, str] | None = None) -> list[Program]:
    """Two ranks, of which the second has these variables besides."""
    job = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "COLUMNS": "120"}
    own = [{"RANK": "0", "LOCAL_RANK": "0", **job}, {"RANK": "1", "LOCAL_RANK": "1", **job, **(second or {})}]
    return [programs.start("distaccum", "doctor", *words, own_stderr=True, **variables) for variables in own]


def test_doctor_tries_each_engine_of_one_process(programs):
    (done,) = ended([programs.start("distaccum", "doctor", "--json", own_stderr=True)], 0)
    found = json.loads(done.text)
    assert found["healthy"]
    seen = {one["name"]: one for one in found["findings"]}
    assert seen["torch"]["seen"].startswith(torch.__version__)
    assert seen["variables"]["seen"] == "none: one process"
    assert seen["a plain module"]["seen"] == "sync='last', 'every'"
    fsdp2 = seen["FSDP2 (fully_shard)"]
    assert "'gathered'" in fsdp2["seen"]


def test_doctor_tries_engines_on_two_ranks_and_prints_once(programs):
    one, other = ended(started(programs, "--json"), 0, 0)
    assert not other.text
    found = json.loads(one.text)
    assert found["healthy"]
    seen = {one["name"]: one for one in found["findings"]}
    assert seen["a plain module"]["state"] == "absent" and seen["DistributedDataParallel"]["state"] == "ok"
    assert seen["hosts"]["seen"].startswith("ranks: 2 on ")


def test_ranks_that_disagree_are_named_and_all_end_with_the_same_status(programs, tmp_path):
    about = tmp_path / "accelerate-1.7.3.dist-info"  # which rank 1 finds first
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: accelerate\nVersion: 1.7.3\n")
    one, other = ended(started(programs, second={"PYTHONPATH": str(tmp_path)}), 1, 1)
    new = importlib.metadata.version("accelerate")
    assert re.search(rf"WRONG accelerate +{re.escape(new)} on rank 0; 1\.7\.3 on rank 1; install the same", one.text)
    assert one.text.endswith("1 is WRONG, see above\n")
    assert not other.text


def test_missing_rank_prints_one_sentence_and_exits_with_status_2(programs):
    unreachable = {"MASTER_PORT": free_port()}
    alone, lost = ended(started(programs, "--timeout", "1", second=unreachable), 2, 2)
    assert not alone.text and "did not all meet at 127.0.0.1" in alone.errors and "this is rank 0 of 2" in alone.errors
    assert len(alone.errors.splitlines()) == 1
    assert "this is rank 1 of 2" in lost.errors and lost.errors.splitlines()[-1].startswith("distaccum doctor: Dist")


def test_launcher_whose_processes_would_train_alone_is_named():
    finding = examine_launcher({"SLURM_STEP_NUM_TASKS": "4"})
    assert finding.state == "wrong" and "SLURM_STEP_NUM_TASKS=4 and no RANK" in finding.seen
    assert examine_launcher({"SLURM_NTASKS": "4"}).state == "ok", "a batch script of Slurm"
