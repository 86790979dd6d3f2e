"""Parameters, results and curves of trials, as trackers get them."""

from __future__ import annotations

import pytest
from tests.unit.analysis import fabricate

from paceline.export.tracking import run_tags, tracked_trials


def test_a_trial_has_its_parameters_results_and_curves(run, pair):
    (tracked,) = tracked_trials(run, pair)
    assert tracked.parameters["training.learning_rate"] == 0.01
    assert tracked.parameters["placement.ranks_per_node"] == 2
    assert "limits.trial_s" not in tracked.parameters
    expected = fabricate.SEQUENTIAL.step_s / fabricate.MPI.step_s
    assert tracked.metrics["speedup.median"] == pytest.approx(expected)
    assert "ranks_per_node" not in tracked.metrics
    steps = fabricate.Case().steps
    curve = {p.step: p.value for p in tracked.points if p.name == "loss"}
    assert curve == pytest.approx({n: 1.2 - fabricate.LEARNED * n for n in range(steps)})
    forward = [p.value for p in tracked.points if p.name == "phase_s/forward"]
    assert forward == pytest.approx([fabricate.MPI.forward_s] * steps)
    assert not [p for p in tracked.points if p.name == "phase_s/bubble"]  # no pipeline
    cpu = [p for p in tracked.points if p.name == "node0/cpu_busy_percent"]
    assert max(p.value for p in cpu) == pytest.approx(fabricate.MPI.cpu_percent)
    assert all(p.unix_s > fabricate.LAUNCHED for p in tracked.points)


def test_a_failed_trial_has_no_results(run, pair):
    files = run.files.trial(pair)
    fabricate.edit_json(files.outcome, status="failed", exit_code=5, message="killed")
    (tracked,) = tracked_trials(run, pair)
    assert tracked.metrics == {}
    assert tracked.points


def test_tags_are_the_manifest_without_spec_and_lists(run):
    tags = run_tags(run)
    assert tags["versions.torch"] == "2.13.0"
    assert tags["created_unix_s"] == "1700000000.0"
    assert not {"spec_toml", "trials"} & set(tags)
