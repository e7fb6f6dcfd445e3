"""launch/bench/law.py finds the loop by hand wrong where it is, and this library exact, in real processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def law(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "launch/bench/law.py"), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT)


def test_token_means_are_wrong_by_hand_and_exact_here(tmp_path: Path) -> None:
    done = law("--libraries", "hand", "distaccum", "--cases", "tokens2", "schedule", "--out", str(tmp_path / "law"))
    assert done.returncode == 0, done.stderr
    cells = json.loads((tmp_path / "law.json").read_text())["cells"]
    assert {name: [cell["verdict"] for cell in row.values()] for name, row in cells.items()} == {
        "hand": ["wrong", "exact"],
        "distaccum": ["exact", "exact"],
    }
    assert cells["hand"]["tokens2"]["error"] > 0.1
    assert "| by hand (plain, DDP) | **wrong**, " in (tmp_path / "law.md").read_text()


def test_a_mistake_gets_one_line_and_status_2() -> None:
    done = law("--timeout", "90")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("law.py: error: ")
