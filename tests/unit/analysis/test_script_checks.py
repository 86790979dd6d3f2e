"""A script is equivalent if its tensors agree; if not, only equal conditions prove anything."""

from __future__ import annotations

import dataclasses
import json

import pytest
from tests.unit.analysis import fabricate
from tests.unit.analysis.fabricate import pair_of as pair

from paceline.analysis.compare.run import compare_run
from paceline.analysis.equivalence.check import check_equivalence
from paceline.show.report.verdict import verdict_sentence

WRONG = {"weights_error": 1.0, "gradient_error": 1.0}


def script_run(root, changes, *, samples=True):
    """A run of a script under MPI, and its baseline."""
    mpi = dataclasses.replace(fabricate.MPI, **changes)
    run = fabricate.make_run(root, [mpi, fabricate.SEQUENTIAL], cases=[fabricate.Case()])
    script = {"path": "/t.py", "arguments": [], "directory": "/", "samples_per_step": None}
    for _, files in run.trials():
        trial = json.loads(files.trial.read_text())
        fabricate.edit_json(
            files.trial, training={**trial["training"], "script": script, "global_batch": 0}
        )
        if not samples:
            edit_steps(files, samples=None, global_samples=None, loss_sum=None)
    return run


def edit_steps(files, **changes):
    for _, rank in files.ranks():
        rows = [json.loads(line) for line in rank.steps.read_text().splitlines()]
        rank.steps.write_text("".join(json.dumps({**row, **changes}) + "\n" for row in rows))


def verdict(run):
    """Return whether the script is equivalent, and why that was not decided."""
    found = check_equivalence(*pair(run))
    reasons = [c.reason for c in found.checks if c.decisive and c.passed is None]
    return found.equivalent, " ".join(reasons)


@pytest.mark.parametrize("samples", [True, False])
def test_tensors_that_agree_are_equivalent_without_known_samples(tmp_path, samples):
    changes = {"weights_error": 1e-4, "gradient_error": 1e-5}
    assert verdict(script_run(tmp_path, changes, samples=samples)) == (True, "")


def test_tensors_that_differ_with_equal_samples_are_not_equivalent(tmp_path):
    assert verdict(script_run(tmp_path, WRONG))[0] is False


def test_unknown_samples_leave_a_difference_undecided(tmp_path):
    equivalent, reason = verdict(script_run(tmp_path, WRONG, samples=False))
    assert equivalent is None
    assert reason.startswith("the samples of a step are not known, so the batches may differ; ")


def test_another_batch_is_not_equivalent(tmp_path):
    run = script_run(tmp_path, WRONG)
    edit_steps(pair(run)[0], samples=1000)
    found = check_equivalence(*pair(run))
    assert found.equivalent is False
    [samples] = [check for check in found.checks if check.name == "samples"]
    assert "divide a fixed global batch by WORLD_SIZE in the script" in samples.reason


def test_other_first_weights_are_named_even_if_the_tensors_agree(tmp_path):
    run = script_run(tmp_path, {})
    for _, rank in pair(run)[0].ranks():
        fabricate.edit_json(rank.environment, initial_weights_sha256="other")
    equivalent, reason = verdict(run)
    assert equivalent is None
    assert "started from other weights than the baseline; fix the seed" in reason


def test_different_parameters_on_each_rank_are_not_compared(tmp_path):
    run = script_run(tmp_path, {})
    fabricate.edit_json(pair(run)[0].result, not_compared="rank 1 ended with other weights")
    assert verdict(run) == (None, "rank 1 ended with other weights")


def test_ranks_that_began_alike_and_drifted_are_not_equivalent(tmp_path):
    run = script_run(tmp_path, {})
    fabricate.edit_json(pair(run)[0].rank(1).weights, replicas=[{"scale": "other"}])
    equivalence = check_equivalence(*pair(run))
    last = equivalence.checks[-1]
    assert equivalence.equivalent is False
    assert (last.passed, last.reason) == (False, "rank 1 ended with another scale than rank 0")
    fabricate.edit_json(pair(run)[0].rank(1).environment, initial_weights_sha256="other")
    equivalent, reason = verdict(run)
    assert equivalent is None
    assert reason.startswith("its ranks began with different weights: they are sharded")


def test_rows_that_were_not_checked_are_ranked_in_steps_per_second(tmp_path):
    comparison = compare_run(script_run(tmp_path, WRONG, samples=False))
    row = next(row for row in comparison.rows if row.setup.launcher == "mpi")
    assert (row.equivalence.equivalent, row.ranked, row.training.global_batch) == (None, True, None)
    assert row.speed.samples_per_s is None
    assert row.speed.speedup is not None
    assert row.equivalence.equivalence_reason.startswith(
        "not checked: the samples of a step are not known"
    )
    assert any("compared in steps per second" in note for note in row.notes)
    assert "Not all of them were checked" in verdict_sentence(comparison, comparison.workloads[0])
