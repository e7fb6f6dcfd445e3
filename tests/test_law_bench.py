"""launch/bench/law.py reports the hand-written loop's wrong cases and this library's exact ones, in real processes."""

from __future__ import annotations

import json

from programs import ROOT, Done, Programs


def law(programs: Programs, *options: object) -> Done:
    return programs.start(str(ROOT / "launch/bench/law.py"), *options, cwd=ROOT, own_stderr=True).wait(120)


def test_token_means_are_wrong_in_the_hand_written_loop_and_exact_here(programs, tmp_path):
    out = tmp_path / "law"
    done = law(programs, "--libraries", "hand", "distaccum", "--cases", "tokens2", "schedule", "--out", out)
    assert done.status == 0, done.errors
    cells = json.loads(out.with_suffix(".json").read_text())["cells"]
    assert {name: [cell["verdict"] for cell in row.values()] for name, row in cells.items()} == {
        "hand": ["wrong", "exact"],
        "distaccum": ["exact", "exact"],
    }
    assert cells["hand"]["tokens2"]["error"] > 0.1
    assert "| by hand (plain, DDP) | **wrong**, " in out.with_suffix(".md").read_text()


def test_mistakes_print_one_line_and_exit_with_status_2(programs):
    done = law(programs, "--timeout", 90)
    assert done.status == 2
    assert done.errors.splitlines()[-1].startswith("law.py: error: ")
