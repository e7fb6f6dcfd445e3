"""Random schedules of faults on real ranks end like the run without faults; faults.py runs 2,000."""

from __future__ import annotations

import os

import pytest

from tests.programs import faults


@pytest.mark.parametrize("engine", faults.ENGINES)
def test_schedules_end_like_the_run_without_faults(ranks, engine):
    """With each fault in each place."""
    chosen = faults.few_schedules(engine, int(os.environ.get("FAULTS_SEED", "1")))
    results = [faults.drive(ranks(faults.ENGINES[engine]), schedule) for schedule in chosen]
    assert not [(one.schedule, one.problems) for one in results if one.problems]
    assert {cell for one in results for cell in one.met} == {cell.cell for cell in faults.CELLS}


def test_harness_reports_a_wrong_end(ranks, monkeypatch):
    """A reference of another seed has other weights and samples; the comparison must report both."""
    (cell,) = [one for one in faults.CELLS if one.cell == "break | middle | backward"]
    schedule, other = (faults.make_schedule("plain", seed, cell) for seed in (3, 4))
    assert not faults.drive(ranks(1), schedule).problems
    monkeypatch.setattr(faults, "without_faults", lambda schedule: other)
    problems = faults.drive(ranks(1), schedule).problems
    assert any("took the samples" in one for one in problems) and any("weights differ" in one for one in problems)
