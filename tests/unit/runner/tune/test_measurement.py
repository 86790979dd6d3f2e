"""Resuming: what has an outcome is read, not run."""

from __future__ import annotations

import dataclasses

import pytest
from tests.support.rows import ENDED_WELL
from tests.unit.analysis import fabricate
from tests.unit.analysis.fabricate import SEQUENTIAL, Case, edit_json, make_run, make_trial_value
from tests.unit.runner.tune.conftest import Watcher

from paceline.base.errors import RankFailed
from paceline.measure.records.files import write_json
from paceline.runner.tune import search
from paceline.runner.tune.search import TrialMeasurer

CASE = Case()


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path / "run", [SEQUENTIAL, fabricate.INTRAOP], cases=[CASE])


@pytest.fixture
def trials():
    baseline, intraop = (make_trial_value(w, CASE) for w in (SEQUENTIAL, fabricate.INTRAOP))
    return baseline, intraop


@pytest.fixture
def measurer(run, trials, monkeypatch):
    """A measurer that may not start anything, unless a test lets it."""
    monkeypatch.setattr("paceline.runner.trials.run_trial.run_trial", None)
    monkeypatch.setattr(search, "check_equivalences", lambda *_, **__: None)

    def make(limit_s=None):
        watcher = Watcher()
        measurer = TrialMeasurer(run, {"tiny": trials[0]}, watcher, limit_s=limit_s)
        return measurer, watcher

    return make


def test_finished_trial_is_read(measurer, trials):
    made, watcher = measurer()
    found = made.measure(trials[1], 1, 1)
    assert found.failure is None
    step_s = fabricate.INTRAOP.step_s
    assert found.samples_per_s.rate == pytest.approx(CASE.global_batch / step_s)
    assert watcher.started == []


def test_failed_trial_is_not_run_again_and_tells_why(measurer, run, trials):
    edit_json(run.trial(trials[1].id).outcome, status="failed", message="out of memory")
    made, watcher = measurer()
    assert made.measure(trials[1], 1, 1).failure == "out of memory"
    assert watcher.started == []


def test_trial_that_trained_something_else_has_no_speed(measurer, run, trials, monkeypatch):
    files = run.trial(trials[1].id)
    check = {"name": "first_gradient", "passed": False, "reason": "differs most", "decisive": True}
    edit = {
        "schema": 1,
        "trial_id": trials[1].id,
        "baseline_id": trials[0].id,
        "equivalent": False,
        "arithmetic": "fp32",
        "max_abs_weight_diff": None,
        "checks": [check],
    }
    write_json(files.equivalence, edit)
    made, _ = measurer()
    found = made.measure(trials[1], 1, 1)
    assert found.samples_per_s is None
    assert "not equivalent to the baseline: first_gradient: differs most" in found.failure


def test_unfinished_trial_is_set_aside_and_run(measurer, run, trials, monkeypatch):
    run.trial(trials[1].id).outcome.unlink()

    def fabricated(trial, trial_files):
        fabricate.make_trial(trial_files, trial, fabricate.INTRAOP, CASE, fabricate.LAUNCHED)
        return dataclasses.replace(ENDED_WELL, trial_id=trial.id)

    monkeypatch.setattr("paceline.runner.trials.run_trial.run_trial", fabricated)
    made, watcher = measurer()
    assert made.measure(trials[1], 1, 1).failure is None
    assert watcher.started == [trials[1].id]
    assert [p.name for p in (run.root / "attempts").iterdir()] == [f"{trials[1].id}.1"]


def test_nothing_starts_once_the_time_is_spent_but_what_is_there_is_read(measurer, run, trials):
    made, watcher = measurer(limit_s=-1.0)
    assert made.measure(trials[1], 1, 1).failure is None
    run.trial(trials[1].id).outcome.unlink()
    assert made.measure(trials[1], 1, 1) is None
    assert watcher.started == []


def test_baseline_that_fails_ends_the_search(measurer, run, trials, monkeypatch):
    edit_json(run.trial(trials[0].id).outcome, status="failed")

    def failing(trial, _files):
        return dataclasses.replace(
            ENDED_WELL, trial_id=trial.id, status="failed", exit_code=5, launcher_exit_status=1,
            failed_rank=0, message="rank 0: no memory",
        )  # fmt: skip

    monkeypatch.setattr("paceline.runner.trials.run_trial.run_trial", failing)
    made, watcher = measurer()
    with pytest.raises(RankFailed, match="no memory"):
        made.measure(trials[0], 1, 1)
    assert watcher.started == [trials[0].id]
