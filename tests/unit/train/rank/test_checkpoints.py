"""A training that is interrupted and continues from a checkpoint, with images from memory."""

from __future__ import annotations

import json
import random
import warnings
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.support.fabricated_samples import ROWS, FakeFeed, opening

from paceline.base.errors import DataError, PacelineWarning
from paceline.measure.records.documents import CheckpointFolder
from paceline.measure.records.files import read_jsonl, write_json
from paceline.measure.records.layout import TrialFiles
from paceline.plan.spec.values import CheckpointSettings
from paceline.runner.job.rank import begin_attempt
from paceline.train.rank import train as worker
from paceline.train.rank.checkpoints import CheckpointWriter
from paceline.train.training.state import RankState
from paceline.train.training.state_files import Position


class KilledError(Exception):
    pass


class DyingFeed(FakeFeed):
    """Ends with an error before a step."""

    def __init__(self, order, dies_before):
        super().__init__(order)
        self._dies_before = dies_before

    def __iter__(self):
        for batch in super().__iter__():
            if batch.step == self._dies_before:
                raise KilledError
            yield batch


@pytest.fixture
def train(monkeypatch, one_thread, make_trial, solo):
    """Train a trial of six steps as one rank; it may die before a step."""

    def run(folder, dies_before=None, checkpoint=None, **training):
        feed = lambda order, **_: DyingFeed(order, dies_before)  # noqa: E731
        monkeypatch.setattr(worker, "open_samples", opening(ROWS, feed))
        trial = make_trial(epochs=2, **training)
        trial = trial.model_copy(update={"checkpoint": checkpoint})
        files = TrialFiles(folder)
        own = files.rank(0)
        begin_attempt(own)
        write_json(own.status, {"state": "running", "process_started_unix_s": 1.0})
        with nullcontext() if dies_before is None else pytest.raises(KilledError):
            worker.train(trial, solo, files)
        return files

    return run


EVERY_STEP = CheckpointSettings(every_steps=1)


def written(files):
    return [c.steps for c in CheckpointFolder(files.checkpoints).complete()]


def test_interrupted_training_ends_with_the_weights_of_the_uninterrupted_one(train, tmp_path):
    whole = train(tmp_path / "whole")
    files = train(tmp_path / "parts", dies_before=4, checkpoint=EVERY_STEP)
    newest = written(files)[0]
    assert newest in {3, 4}  # the last one may have been given up
    train(tmp_path / "parts", checkpoint=EVERY_STEP)
    wanted = load_file(whole.weights)
    assert all(torch.equal(t, wanted[n]) for n, t in load_file(files.weights).items())
    for file in ("steps", "sample_log"):
        ours, theirs = (list(read_jsonl(getattr(f.rank(0), file))) for f in (files, whole))
        assert [row["step"] for row in ours] == [row["step"] for row in theirs]
        for key in ("loss_sum", "sample_ids"):
            assert [row.get(key) for row in ours] == [row.get(key) for row in theirs]
    (row,) = read_jsonl(files.rank(0).continuations)
    assert (row["before_steps"], row["resumed_steps"]) == (4, newest)


def test_damaged_checkpoint_is_reported_and_the_one_before_continues(train, tmp_path):
    files = train(tmp_path, dies_before=4, checkpoint=EVERY_STEP)
    newest, before = CheckpointFolder(files.checkpoints).complete()
    newest.part(0).write_bytes(b"damaged")
    with pytest.warns(PacelineWarning, match="damaged: .*trying the checkpoint before it"):
        train(tmp_path, checkpoint=EVERY_STEP)
    (row,) = read_jsonl(files.rank(0).continuations)
    assert row["resumed_steps"] == before.steps


def test_checkpoint_of_another_training_is_refused(train, tmp_path):
    train(tmp_path, dies_before=4, checkpoint=EVERY_STEP)
    with pytest.raises(DataError, match="a checkpoint of another training"):
        train(tmp_path, checkpoint=EVERY_STEP, learning_rate=0.5)


def test_without_checkpoints_the_training_begins_again(train, tmp_path):
    files = train(tmp_path, dies_before=4)
    train(tmp_path)
    assert [row["step"] for row in read_jsonl(files.rank(0).steps)] == list(range(6))
    (row,) = read_jsonl(files.rank(0).continuations)
    assert (row["before_steps"], row["resumed_steps"]) == (4, 0)


def test_failing_disk_is_a_warning_and_the_training_goes_on(train, tmp_path):
    (tmp_path / "checkpoints").write_text("a file in place of the folder")
    with pytest.warns(PacelineWarning, match="no checkpoint after .*the training goes on"):
        files = train(tmp_path, checkpoint=CheckpointSettings(every_steps=2))
    assert len(list(read_jsonl(files.rank(0).steps))) == 6
    rows = list(read_jsonl(files.rank(0).checkpoints))
    assert [row["steps"] for row in rows] == [2, 4]
    assert all(row["error"] for row in rows)


def test_random_generators_continue(train, tmp_path, monkeypatch):
    drawn = []

    begin, end = worker.Checkpoints.updated, worker.Checkpoints.step_ended

    def updated(self, step):
        drawn.append((torch.rand(1).item(), random.random(), float(np.random.rand())))
        begin(self, step)

    def step_ended(self, row):
        end(self, row)
        assert self._writer.wait_until_idle(10.0)

    monkeypatch.setattr(worker.Checkpoints, "updated", updated)
    monkeypatch.setattr(worker.Checkpoints, "step_ended", step_ended)
    train(tmp_path, dies_before=4, checkpoint=EVERY_STEP)
    before = [torch.rand(1).item(), random.random(), float(np.random.rand())]
    train(tmp_path, checkpoint=EVERY_STEP)
    assert list(drawn[4]) == before


def test_finished_training_leaves_no_temporary_file(train, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        files = train(tmp_path, checkpoint=EVERY_STEP)
    assert not list(files.checkpoints.rglob(".*"))
    for steps in written(files):
        folder = files.checkpoints / f"step-{steps:09d}"
        assert len(list(folder.iterdir())) == 2
    rows = [json.loads(line) for line in files.rank(0).checkpoints.read_text().splitlines()]
    assert all(row["error"] is None and row["written_bytes"] > 0 for row in rows)


LIMIT_S = 20.0


@pytest.fixture
def writer(tmp_path):
    made = CheckpointWriter(CheckpointFolder(tmp_path), 0, 1, tmp_path / "rows.jsonl")
    yield made
    made.close()


def write(writer, steps, tensor):
    state = RankState()
    state.add_whole("buffers/b", tensor)
    writer.write(state, Position(steps=steps, task_sha256="abc", replicas=1), LIMIT_S)
    assert writer.wait_until_idle(LIMIT_S)


def test_type_that_no_file_holds_costs_one_checkpoint_and_not_the_next(writer, tmp_path):
    with pytest.warns(PacelineWarning, match=r"no checkpoint: KeyError: torch\.complex64"):
        write(writer, 1, torch.zeros(3, dtype=torch.complex64))
    assert writer.is_idle
    assert CheckpointFolder(tmp_path).complete() == []
    write(writer, 2, torch.zeros(3))
    assert [c.steps for c in CheckpointFolder(tmp_path).complete()] == [2]


def test_writer_is_busy_from_the_end_of_the_copy_on(writer, monkeypatch):
    states = []
    monkeypatch.setattr(writer, "_write", lambda *_: states.append(writer.is_idle))
    write(writer, 1, torch.zeros(3))
    assert states == [False]
    assert writer.is_idle
