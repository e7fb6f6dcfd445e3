"""The programs of launch/bench: what they compare is right, and a mistake gets one line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from engines import COALESCES

BENCH = Path(__file__).parent.parent / "launch/bench"


def run(program: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCH / program), *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=180, env=environment)


def test_the_loops_that_are_compared_give_the_gradient_of_big_batches():
    done = run("contenders.py", "--check", "--only", "^plain")
    assert done.returncode == 0, done.stdout + done.stderr
    found = [line for line in done.stdout.splitlines() if line.startswith("| plain")]
    assert len(found) >= 10
    assert all(float(line.split("|")[-2]) <= 1e-5 for line in found)


@pytest.mark.skipif(not COALESCES, reason="this version of DeepSpeed does not coalesce")
def test_the_loops_of_ranks_do_too():
    done = run("contenders.py", "--check", "--ranks", "2", "--only", "^DDP, (by hand|distaccum)$")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "| DDP, distaccum | 2 |" in done.stdout


def test_overhead_takes_ratios_of_one_round(tmp_path):
    done = run("overhead.py", "--rounds", "2", "--steps", "1", "4", "--ranks", "1", "--out", str(tmp_path / "overhead"))
    assert done.returncode == 0, done.stderr
    (rows,) = json.loads((tmp_path / "overhead.json").read_text())["groups"].values()
    by_loop = {row["loop"]: row for row in rows}
    assert by_loop["by hand"]["steps"]["4"]["ratio"]["median"] == 1.0
    assert by_loop["distaccum"]["steps"]["4"]["microseconds"] > 0


def test_noise_comes_near_the_true_value(tmp_path):
    done = run("noise.py", "--rounds", "1", "--runs", "1", "--after", "100", "--out", str(tmp_path / "noise"))
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "noise.json").read_text())
    assert result["cost"]["tiny, one process"]["8"]["with"]["median"] > 0
    assert all(0.5 < runs[0][-1] < 2 for runs in result["in_parts_of_true"].values())


@pytest.mark.parametrize(
    ("program", "options"),
    [
        ("advice.py", ["--rounds", "0"]),
        ("growth.py", ["--ranks", "0"]),
        ("memory.py", ["--sizes", "0"]),
        ("noise.py", ["--runs", "0"]),
        ("timeline.py", ["--rounds", "0"]),
        ("two_nodes.py", ["--rate", "fast"]),
        ("forecast.py", ["--settings", "2x1"]),
    ],
)
def test_a_mistake_gets_one_line_and_status_2(program, options):
    done = run(program, *options)
    assert done.returncode == 2
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"{program}: error: ") and options[0] in last
