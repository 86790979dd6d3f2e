"""A whole trial of one rank, with images from memory instead of a data set."""

from __future__ import annotations

import hashlib
import time
from itertools import pairwise

import pytest
import torch
from safetensors.torch import load_file
from tests.support.fabricated_samples import ROWS, FakeFeed, opening, train_alone
from torch.nn.functional import cross_entropy

from paceline.analysis.equivalence.tensor_checks import tensor_differences
from paceline.base.errors import RankFailed, UsageError
from paceline.measure.records.documents import write_trial
from paceline.measure.records.files import read_json, read_jsonl
from paceline.measure.records.layout import TrialFiles
from paceline.plan.spec.values import Target
from paceline.plan.trials.trial import Evaluation
from paceline.runner.job.job import read_trial
from paceline.train.rank import train as worker
from paceline.train.rank.evaluation import Evaluator


def test_trial_trains_as_by_hand_and_leaves_its_records(photos, make_trial, solo, tmp_path):
    trial = make_trial(epochs=2)
    files = TrialFiles(tmp_path)
    worker.train(trial, solo, files)
    losses = []

    def loss(outputs, targets):
        value = cross_entropy(outputs, targets)
        losses.append(value.item())
        return value

    gradients, weights = train_alone(trial, 6, loss)
    for name, gradient in load_file(files.gradient).items():
        torch.testing.assert_close(gradient, gradients[0][name])
    for name, tensor in load_file(files.weights).items():
        torch.testing.assert_close(tensor, weights[name])
    rows = list(read_jsonl(files.rank(0).steps))
    assert [(r["step"], r["epoch"], r["samples"]) for r in rows] == [
        (0, 0, 8), (1, 0, 8), (2, 0, 5), (3, 1, 8), (4, 1, 8), (5, 1, 5),
    ]  # fmt: skip
    means = [row["loss_sum"] / row["samples"] for row in rows]
    assert means == pytest.approx(losses, rel=1e-4)
    result = read_json(files.result)
    assert result["steps"] == 6
    assert result["parameters"] == sum(t.numel() for t in weights.values())
    assert result["classes"] == 3
    assert 0 < result["linear_parameters"] < result["parameters"]
    assert (result["input_shape"], result["input_dtype"]) == ([], "uint8")
    assert set(result["update_l2"]) == set(weights)
    assert all(norm > 0 for norm in result["update_l2"].values())


def test_phases_add_up_and_steps_follow_without_a_gap(photos, make_trial, solo, tmp_path):
    worker.train(make_trial(), solo, TrialFiles(tmp_path))
    rows = list(read_jsonl(TrialFiles(tmp_path).rank(0).steps))
    phases = ("data_wait_s", "forward_s", "backward_s", "optimizer_s", "other_s")
    for row in rows:
        assert row["comm_s"] is None
        assert sum(row[p] for p in phases) == pytest.approx(row["step_s"])
        assert all(row[p] >= 0 for p in phases)
    for row, following in pairwise(rows):
        end = row["started_unix_s"] + row["step_s"]
        assert following["started_unix_s"] == pytest.approx(end, abs=1e-5)


def test_sample_log_holds_every_sample_once_an_epoch(photos, make_trial, solo, tmp_path):
    worker.train(make_trial(epochs=2), solo, TrialFiles(tmp_path))
    rows = list(read_jsonl(TrialFiles(tmp_path).rank(0).sample_log))
    for epoch in (0, 1):
        ids = [i for row in rows if row["epoch"] == epoch for i in row["sample_ids"]]
        assert sorted(ids) == list(range(21))


def test_spans_follow_one_another_from_process_start(photos, make_trial, solo, tmp_path):
    worker.train(make_trial(), solo, TrialFiles(tmp_path))
    recorded = read_jsonl(TrialFiles(tmp_path).rank(0).spans)
    rows = [row for row in recorded if row["name"] != "replay"]  # within "bookkeeping"
    assert [r["name"] for r in rows] == [
        "imports", "rendezvous", "data_load", "model_build", "train", "bookkeeping",
    ]  # fmt: skip
    assert rows[0]["started_unix_s"] == 1000.0
    for row, following in pairwise(rows):
        assert row["ended_unix_s"] <= following["started_unix_s"]


def test_evaluations_belong_to_no_step(photos, make_trial, solo, tmp_path, monkeypatch):
    evaluation = Evaluation(
        held_out_samples=5, split_seed=1, every_steps=1, every_epochs=None,
        target=Target(metric="loss", at_most=9),
    )  # fmt: skip
    run = Evaluator.run

    def slowly(*arguments):
        run(*arguments)
        time.sleep(0.1)

    monkeypatch.setattr(Evaluator, "run", slowly)
    worker.train(make_trial(evaluation=evaluation), solo, TrialFiles(tmp_path))
    own = TrialFiles(tmp_path).rank(0)
    rows = list(read_jsonl(own.evaluations))
    assert [(r["steps"], r["metric"]) for r in rows] == [
        (1, "loss"), (1, "accuracy"), (2, "loss"), (2, "accuracy"),
    ]  # fmt: skip
    assert {tuple(r["counts"]) for r in rows} == {(5.0,)}
    # 16 of 21 samples are trained on, in steps of 8
    assert [r["global_samples"] for r in read_jsonl(own.steps)] == [8, 8]
    first, second = read_jsonl(own.steps)
    gap_s = second["started_unix_s"] - first["started_unix_s"] - first["step_s"]
    assert gap_s >= 0.1
    spans = [r for r in read_jsonl(own.spans) if r["name"] == "evaluation"]
    assert len(spans) == 2
    assert spans[0]["ended_unix_s"] <= second["started_unix_s"] + 1e-3


def test_tensors_are_left_out_if_not_asked_for(photos, make_trial, solo, tmp_path):
    trial = make_trial().model_copy(update={"save_tensors": False})
    worker.train(trial, solo, TrialFiles(tmp_path))
    assert not (tmp_path / "tensors").exists()
    assert read_json(TrialFiles(tmp_path).result)["weights_sha256"]


def test_diverged_loss_names_the_step(photos, make_trial, solo, tmp_path):
    with pytest.raises(
        RankFailed, match=r"rank 0: the loss of step [1-9]\d* is (nan|inf)"
    ) as caught:
        worker.train(make_trial(epochs=9, learning_rate=1e20), solo, TrialFiles(tmp_path))
    assert caught.value.rank == 0


def test_reader_that_ends_early_is_a_failure(photos, make_trial, solo, tmp_path, monkeypatch):
    short = opening(ROWS, lambda order, **_: FakeFeed(order, 2))
    monkeypatch.setattr(worker, "open_samples", short)
    with pytest.raises(RankFailed, match=r"expected 3 steps.*after 2"):
        worker.train(make_trial(), solo, TrialFiles(tmp_path))
    assert not TrialFiles(tmp_path).result.exists()


def test_memory_format_changes_no_sample_and_hardly_a_weight(photos, make_trial, solo, tmp_path):
    for name in ("contiguous", "channels_last"):
        worker.train(make_trial(memory_format=name), solo, TrialFiles(tmp_path / name))
    one, two = (
        load_file(TrialFiles(tmp_path / n).weights) for n in ("contiguous", "channels_last")
    )
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, two[name], rtol=1e-4, atol=1e-6)


TASK = """
import torch
from torch import nn
import paceline

class Mine(paceline.Task):
    clip_norm = 0.5

    def model(self):
        model = nn.Sequential(
            nn.Conv2d(3, 4, 3, stride=4, bias=False), nn.BatchNorm2d(4), nn.Flatten(1),
            nn.Linear(256, 8, bias=False), nn.Linear(8, 8), nn.Linear(8, self.settings.classes),
        )
        return model

    def optimizer(self, parameters):
        return torch.optim.AdamW(parameters, lr=self.settings.learning_rate)

    def schedule(self, optimizer):
        return torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=self.settings.steps)
"""


def test_task_in_a_users_file_travels_with_the_trial(photos, make_trial, solo, tmp_path):
    source = tmp_path / "my_task.py"
    source.write_text(TASK)
    sha256 = hashlib.sha256(source.read_bytes()).hexdigest()
    trial = make_trial(task=f"{source}:Mine", task_sha256=sha256)
    files = [TrialFiles(tmp_path / name) for name in ("one", "two")]
    for each in files:
        each.root.mkdir()
        write_trial(trial, each)
    source.unlink()  # the ranks read the copy
    for each in files:
        worker.train(trial, solo, each)
    weights = load_file(files[0].weights)
    assert weights["1.num_batches_tracked"].item() == 3
    rounding = read_json(files[0].result)["replayed"]["rounding"]
    assert 0 < rounding["gradient"] < 1e-3  # it has no ReLU
    assert all(d.max_abs == 0 for d in tensor_differences(files[0].weights, files[1].weights))


def test_file_of_a_task_that_was_changed_is_refused(photos, make_trial, solo, tmp_path):
    (tmp_path / "my_task.py").write_text(TASK + "# changed")
    sha256 = hashlib.sha256(TASK.encode()).hexdigest()
    trial = make_trial(task=f"{tmp_path}/my_task.py:Mine", task_sha256=sha256)
    with pytest.raises(UsageError, match="has changed since the trial was planned"):
        worker.train(trial, solo, TrialFiles(tmp_path))


def test_file_beside_the_trial_is_the_one_that_a_job_reads(make_trial, tmp_path):
    (tmp_path / "my_task.py").write_text(TASK)
    sha256 = hashlib.sha256(TASK.encode()).hexdigest()
    planned = make_trial(task="/elsewhere/my_task.py:Mine", task_sha256=sha256)
    (tmp_path / "trial.json").write_text(planned.model_dump_json())
    assert read_trial(tmp_path / "trial.json").training.task == f"{tmp_path}/my_task.py:Mine"
