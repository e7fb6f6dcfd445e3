"""The programs of launch/bench: the compared loops are correct, and a mistake prints one line."""

from __future__ import annotations

import json

import pytest
from engines import COALESCES
from programs import ROOT, Done, Programs


def run(programs: Programs, program: str, *options: object) -> Done:
    return programs.start(str(ROOT / "launch/bench" / program), *options, own_stderr=True).wait(180)


def test_compared_loops_give_the_gradient_of_big_batches(programs):
    done = programs.start(str(ROOT / "tests/loops.py"), "--only", "^plain", own_stderr=True).wait()
    assert done.status == 0, done.text + done.errors
    found = [line for line in done.text.splitlines() if line.startswith("| plain")]
    assert len(found) >= 10
    assert all(float(line.split("|")[-2]) <= 1e-5 for line in found)


@pytest.mark.skipif(not COALESCES, reason="this version of DeepSpeed does not coalesce")
def test_loops_of_two_ranks_give_the_gradient_of_big_batches(programs):
    done = programs.start(str(ROOT / "tests/loops.py"), "--only", "^DDP, (by hand|distaccum)$", own_stderr=True).wait()
    assert done.status == 0, done.text + done.errors
    assert "| DDP, distaccum | 2 |" in done.text


def test_overhead_takes_ratios_within_one_round_and_finds_no_growth(programs, tmp_path):
    out, windows = tmp_path / "overhead", 400
    options = "--rounds", 2, "--steps", 1, 4, "--ranks", 1, "--windows", windows
    done = run(programs, "overhead.py", *options, "--out", out)
    assert done.status == 0, done.errors
    found = json.loads(out.with_suffix(".json").read_text())
    for row in found["held"]:
        early, late = row["early"], row["late"]
        for what, most in {"tensors": 4, "bytes": 64, "objects": 60, "blocks": 400}.items():
            assert late[what] - early[what] < most, (row["kind"], what)
    (rows,) = found["groups"].values()
    by_loop = {row["loop"]: row for row in rows}
    assert by_loop["by hand"]["steps"]["4"]["ratio"]["median"] == 1.0
    assert by_loop["distaccum"]["steps"]["4"]["microseconds"] > 0


def test_batches_by_tokens_have_less_padding(programs, tmp_path):
    out = tmp_path / "tokens"
    done = run(programs, "tokens.py", "--rounds", 1, "--width", 8, "--updates", 1, "--out", out)
    assert done.status == 0, done.errors
    result = json.loads(out.with_suffix(".json").read_text())
    for name in ("wide", "narrow"):
        ways = result[name]
        assert list(ways) == ["fixed", "short", "sorted", "cost"]
        assert ways["cost"]["padding"] < ways["fixed"]["padding"]
        assert ways["cost"]["micro-batches"] <= ways["fixed"]["micro-batches"]


def test_token_means_are_wrong_in_the_hand_written_loop_and_exact_here(programs, tmp_path):
    out = tmp_path / "law"
    options = "--libraries", "hand", "distaccum", "--cases", "tokens2", "schedule", "--out", out
    done = run(programs, "law.py", *options)
    assert done.status == 0, done.errors
    cells = json.loads(out.with_suffix(".json").read_text())["cells"]
    verdicts = {name: [cell["verdict"] for cell in row.values()] for name, row in cells.items()}
    assert verdicts == {"hand": ["wrong", "exact"], "distaccum": ["exact", "exact"]}
    assert "| by hand (plain, DDP) | **wrong**, " in out.with_suffix(".md").read_text()


def test_program_for_a_gpu_runs_on_a_cpu_to_its_end(programs, tmp_path):
    smallest = "--rounds", 1, "--steps", 1, "--parts", "rates", "auto"
    done = run(programs, "gpu.py", "--device", "cpu", "--small", *smallest, "--out", tmp_path / "gpu")
    assert done.status == 0, done.errors
    assert "| " in (tmp_path / "gpu.md").read_text()


@pytest.mark.parametrize(
    ("program", "options"),
    [
        ("overhead.py", ["--ranks", "0"]),
        ("memory.py", ["--sizes", "0"]),
        ("two_nodes.py", ["--rate", "fast"]),
        ("law.py", ["--timeout", "90"]),
    ],
)
def test_mistakes_print_one_line_and_exit_with_status_2(programs, program, options):
    done = run(programs, program, *options)
    assert done.status == 2
    last = done.errors.splitlines()[-1]
    assert last.startswith(f"{program}: error: ") and options[0] in last
