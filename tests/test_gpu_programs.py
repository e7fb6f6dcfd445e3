"""The programs whose figures need a GPU run on a CPU to their end, so that nothing but the machine is missing.

Without what takes fresh processes: pairs.py, whose page is of a CPU, and the memory of gpu.py.
"""

from __future__ import annotations

import json

import pytest
from programs import ROOT

SMALLEST = {
    "gpu.py": ["--small", "--rounds", 1, "--steps", 1, "--models", "transformer", "--parts", "rates", "auto"],
}


@pytest.mark.parametrize(("program", "options"), SMALLEST.items(), ids=SMALLEST)
def test_program_for_a_gpu_runs_on_a_cpu_to_its_end(program, options, programs, tmp_path):
    out = tmp_path / "found"
    path = str(ROOT / "launch/bench" / program)
    done = programs.start(path, "--device", "cpu", *options, "--out", out, own_stderr=True).wait()
    assert done.status == 0, done.errors
    assert "| " in out.with_suffix(".md").read_text()
    assert json.loads(out.with_suffix(".json").read_text())
