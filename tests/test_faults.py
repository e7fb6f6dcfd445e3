"""Random schedules of faults over real ranks end as the run without them; more of them: python tests/faults.py."""

from __future__ import annotations

import os

import pytest
from faults import ENGINES, cells, counts, drive, make_schedule, run_all, table

SCHEDULES = 68 * len(ENGINES)


@pytest.fixture(scope="module")
def results(ranks):
    return run_all(SCHEDULES, int(os.environ.get("FAULTS_SEED", "1")), ranks)


def test_every_schedule_ends_as_the_run_without_faults(results):
    wrong = [f"{result.schedule}\n{result.problems}" for result in results if result.problems]
    assert not wrong, "\n".join(wrong)
    assert len(results) >= 200 or len(ENGINES) < 3


def test_every_fault_was_met_on_every_engine_in_every_place(results):
    met = counts(results)
    print(table(results))
    for engine in ENGINES:
        assert all(met[engine][cell.cell] for cell in cells(engine)), (engine, met[engine])


def test_the_harness_sees_a_wrong_end(ranks, monkeypatch):
    """A run that is told to leave a fault's window out ends with other weights and samples, and is found out."""
    (cell,) = [one for one in cells("plain") if one.cell == "break | middle | backward"]
    schedule = make_schedule("plain", 3, cell)
    assert not drive(ranks(1), schedule).problems
    monkeypatch.setattr("faults.without_faults", lambda schedule: make_schedule("plain", 4, cell))
    problems = drive(ranks(1), schedule).problems
    assert any("took the samples" in one for one in problems) and any("weights differ" in one for one in problems)
