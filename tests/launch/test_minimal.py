"""launch/minimal.py: on one rank and two; a killed run that is started again ends with the same bits."""

import ast
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.programs import ROOT, wait_for, wait_until

SCRIPT = ROOT / "launch" / "minimal.py"


def saved(file: Path) -> dict[str, Any]:
    state = torch.load(file)
    return {**state["model"], "index": state["accumulator"]["index"], "lr": state["scheduler"]["_last_lr"]}


def expect_same(file: Path, whole: Path) -> None:
    expected, seen = saved(whole), saved(file)
    for name, value in expected.items():
        assert torch.equal(seen[name], value) if torch.is_tensor(value) else seen[name] == value, name


@pytest.mark.parametrize("ranks", [1, 2])
def test_killed_run_goes_on_to_the_same_bits(programs, tmp_path, ranks):
    whole, file = tmp_path / "whole.pt", tmp_path / "run.pt"
    text = programs.run(str(SCRIPT), whole, ranks=ranks, status=0).text
    losses = [float(line.split()[-1]) for line in text.splitlines() if line.startswith("epoch")]
    assert len(losses) == 5 and losses[-1] < 0.9 * losses[0]
    started = programs.start_ranks(ranks, str(SCRIPT), file)
    assert wait_until(file.exists, started[0])
    for one in started:
        one.send(signal.SIGKILL)
    assert {done.status for done in wait_for(started)} == {-signal.SIGKILL}
    assert 0 < saved(file)["index"] < saved(whole)["index"]
    programs.run(str(SCRIPT), file, ranks=ranks, status=0)
    expect_same(file, whole)


def test_file_is_short_and_needs_torch_and_distaccum_alone():
    text = SCRIPT.read_text()
    assert len(text.splitlines()) <= 60
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {(getattr(node, "module", "") or node.names[0].name).split(".")[0] for node in nodes}
    assert names - sys.stdlib_module_names == {"torch", "distaccum"}
