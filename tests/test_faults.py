"""Random schedules of faults on real ranks end like the run without faults; faults.py runs 2,000."""

from __future__ import annotations

import os

import faults
import pytest


@pytest.fixture(scope="module")
def results(ranks):
    return faults.run_all(faults.few_schedules(int(os.environ.get("FAULTS_SEED", "1"))), ranks)


def test_schedules_end_like_the_run_without_faults(results):
    wrong = [f"{result.schedule}\n{result.problems}" for result in results if result.problems]
    assert not wrong, "\n".join(wrong)
    assert len(results) >= 40 or len(faults.ENGINES) < 3


def test_faults_are_met_on_every_engine_in_every_place(results):
    met = faults.counts(results)
    print(faults.table(results))
    for engine in faults.ENGINES:
        assert all(met[engine][cell.cell] for cell in faults.cells(engine)), (engine, met[engine])


def test_harness_reports_a_wrong_end(ranks, monkeypatch):
    """A reference of another seed has other weights and samples; the comparison must report both."""
    (cell,) = [one for one in faults.cells("plain") if one.cell == "break | middle | backward"]
    schedule = faults.make_schedule("plain", 3, cell)
    assert not faults.drive(ranks(1), schedule).problems
    monkeypatch.setattr(faults, "without_faults", lambda schedule: faults.make_schedule("plain", 4, cell))
    problems = faults.drive(ranks(1), schedule).problems
    assert any("took the samples" in one for one in problems) and any("weights differ" in one for one in problems)
