"""The records of a rank after a failure: every step has one row."""

import json

import pytest
from tests.support.trials import tiny_trial

from paceline.measure.records.documents import (
    CheckpointFolder,
    begin_attempt,
    continue_rows,
    set_aside,
)
from paceline.measure.records.files import JsonlWriter, read_jsonl
from paceline.measure.records.layout import RankFiles, RunFiles
from paceline.plan.spec.values import CheckpointSettings


@pytest.fixture
def files(tmp_path):
    files = RankFiles(tmp_path)
    files.status.write_text(json.dumps({"state": "running", "process_started_unix_s": 10.0}))
    with JsonlWriter(files.steps) as steps, JsonlWriter(files.sample_log) as log:
        for step in range(5):
            steps.write({"step": step, "started_unix_s": 20.0 + step, "step_s": 1.0})
            log.write({"step": step, "epoch": 0, "sample_ids": [step]})
    with files.steps.open("a") as file:
        file.write('{"step":5,"star')  # killed while it wrote
    with JsonlWriter(files.evaluations) as evaluations:
        for steps_done in (2, 3, 4):
            evaluations.write({"steps": steps_done})
    with JsonlWriter(files.updates) as updates:
        for step in (1, 0, 3, 2):  # of several workers
            updates.write({"event": "applied", "step": step})
    with JsonlWriter(files.spans) as spans:
        spans.write({"name": "imports"})
    return files


def continued(files, steps):
    begin_attempt(files)
    continue_rows(files, steps, process_started_unix_s=30.0, restored_unix_s=33.0)
    return list(read_jsonl(files.continuations))


def test_rows_after_the_checkpoint_are_removed(files):
    (row,) = continued(files, 3)
    assert [r["step"] for r in read_jsonl(files.steps)] == [0, 1, 2]
    assert [r["step"] for r in read_jsonl(files.sample_log)] == [0, 1, 2]
    assert [r["steps"] for r in read_jsonl(files.evaluations)] == [2, 3]
    assert [r["step"] for r in read_jsonl(files.updates)] == [1, 0, 2]
    assert row["before_steps"] == 5
    assert row["before_ended_unix_s"] == 25.0
    assert (row["before_state"], row["before_started_unix_s"]) == ("running", 10.0)
    assert (row["resumed_steps"], row["process_started_unix_s"]) == (3, 30.0)


def test_rows_can_be_appended_after_an_unfinished_one(files):
    continued(files, 5)
    with JsonlWriter(files.steps) as rows:
        rows.write({"step": 5})
    assert [r["step"] for r in read_jsonl(files.steps)] == [0, 1, 2, 3, 4, 5]


def test_spans_of_the_attempt_before_are_kept_apart(files):
    continued(files, 0)
    assert not files.spans.exists()
    assert list(read_jsonl(files.root / "attempts" / "0" / "spans.jsonl")) == [{"name": "imports"}]
    files.spans.write_text("{}\n")
    assert len(continued(files, 0)) == 2
    assert (files.root / "attempts" / "1" / "spans.jsonl").exists()


def test_first_attempt_has_no_continuation(tmp_path):
    files = RankFiles(tmp_path)
    begin_attempt(files)
    continue_rows(files, 0, process_started_unix_s=1.0, restored_unix_s=2.0)
    assert not files.continuations.exists()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("every_steps", "is_complete", "stays"),
    [(2, True, True), (2, False, False), (None, True, False)],
)
def test_only_a_trial_that_can_go_on_stays_where_it_is(tmp_path, every_steps, is_complete, stays):
    settings = None if every_steps is None else CheckpointSettings(every_steps=every_steps)
    run, trial = RunFiles(tmp_path), tiny_trial(checkpoint=settings)
    files = run.trial(trial.id)
    ranks = 1 if is_complete else 2
    CheckpointFolder(files.checkpoints).write(4, 0, ranks, lambda file: file.write(b"part"))
    files.weights.parent.mkdir(parents=True)
    set_aside(run, trial)
    assert files.root.exists() == stays
    assert (run.root / "attempts" / f"{trial.id}.1").exists() == (not stays)
