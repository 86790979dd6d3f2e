"""The steps of a script in this process: rows, reports, limits, and tensors."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from tests.support.trials import rank_context
from torch import nn

import paceline
from paceline.base.errors import RankFailed
from paceline.collectives.recorder import Recorder
from paceline.measure.records.files import read_jsonl
from paceline.measure.records.layout import RankFiles, TrialFiles
from paceline.plan.spec.loading import load_spec
from paceline.plan.trials.planning import plan_trials
from paceline.train.rank.script.program import EnoughSteps
from paceline.train.rank.script.recorder import TrainingRecorder
from paceline.train.rank.script.tensors import ParameterRecord


def training_of(**workload):
    spec = {
        "schema": 2,
        "name": "own",
        "workloads": [{"script": "train.py", **workload}],
        "trials": [{"launcher": "local", "local_strategy": "sequential"}],
    }
    return plan_trials(load_spec(spec).experiment, {}, 1)[0].training


class Run:
    """A recorder, and a training of one parameter under it."""

    def __init__(self, folder, rank=0, ranks=1, *, ends_diverged=True, **workload):
        self.files = RankFiles(folder)
        self.first: list[float] = []
        self.parameter = nn.Parameter(torch.ones(1))
        self.recorder = TrainingRecorder(
            training_of(**workload),
            rank_context(rank, ranks),
            self.files,
            Recorder(lambda _: None),
            lambda _: self.first.append(float(self.parameter.grad)),
            ends_diverged=ends_diverged,
        )

    def train(self, steps, before=lambda _: None, after=lambda _: None):
        optimizer = torch.optim.SGD([self.parameter], lr=0.1)
        with self.recorder.recording():
            for step in range(steps):
                optimizer.zero_grad()
                (3 * self.parameter).sum().backward()
                before(step)
                optimizer.step()
                after(step)
        return list(read_jsonl(self.files.steps))


def test_each_step_of_the_first_optimiser_is_a_row(tmp_path):
    run = Run(tmp_path)
    other = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    rows = run.train(3, after=lambda _: other.step())
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert run.recorder.steps == 3
    assert run.first == [3.0]
    for row in rows:
        phases = ("forward_s", "backward_s", "optimizer_s", "other_s")
        # no module was called, so the first step begins with the optimiser
        known = [row[name] for name in phases if row[name] is not None]
        assert sum(known) == pytest.approx(row["step_s"])
        assert (row["samples"], row["loss_sum"], row["data_wait_s"]) == (None, None, None)


def test_an_export_of_the_model_begins_no_step(tmp_path):
    run, model = Run(tmp_path), nn.Linear(2, 1)
    with run.recorder.recording():
        torch.export.export(model, (torch.ones(3, 2),))
        assert run.recorder.started_unix_s is None
        model(torch.ones(3, 2))
        assert run.recorder.started_unix_s is not None


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_report_belongs_to_its_step_whether_before_or_after_it(tmp_path, when):
    def report(step):
        paceline.step(loss=torch.tensor(step + 0.5), samples=10 + step)

    rows = Run(tmp_path).train(3, **{when: report})
    assert [(row["samples"], row["loss_sum"]) for row in rows] == [
        (10, 5.0), (11, 16.5), (12, 30.0),
    ]  # fmt: skip


def test_stated_samples_are_shared_among_the_ranks(tmp_path):
    shares = [
        Run(tmp_path / str(rank), rank, 3, samples_per_step=8).train(1)[0] for rank in range(3)
    ]
    assert [row["samples"] for row in shares] == [3, 3, 2]
    assert {row["global_samples"] for row in shares} == {8}


@pytest.mark.parametrize(
    ("when", "samples"), [(None, [None, None]), ("before", [8, 8]), ("after", [8, 8])]
)
def test_a_limit_of_steps_ends_the_script_after_the_report_of_its_last_step(
    tmp_path, when, samples
):
    run = Run(tmp_path, max_steps=2)
    report = {} if when is None else {when: lambda _: paceline.step(samples=8)}
    with pytest.raises(EnoughSteps):
        run.train(5, **report)
    rows = list(read_jsonl(run.files.steps))
    assert [(row["step"], row["samples"]) for row in rows] == list(enumerate(samples))


def test_a_script_that_no_longer_reports_is_ended_by_its_next_step(tmp_path):
    run = Run(tmp_path, max_steps=2)
    with pytest.raises(EnoughSteps):
        run.train(5, after=lambda step: paceline.step(samples=8) if step == 0 else None)
    assert [row["samples"] for row in read_jsonl(run.files.steps)] == [8, None]


def test_a_loss_that_is_not_finite_fails(tmp_path):
    with pytest.raises(RankFailed, match="a loss of nan in step 0, expected a finite number"):
        Run(tmp_path).train(2, after=lambda _: paceline.step(loss=float("nan")))


def test_outside_of_paceline_a_report_does_nothing():
    paceline.step(loss=float("nan"), samples=-1)


def test_a_negative_number_of_samples_is_refused(tmp_path):
    with pytest.raises(ValueError, match="expected samples >= 0, got -1"):
        Run(tmp_path).train(1, after=lambda _: paceline.step(samples=-1))


def test_weights_and_gradient_are_kept_with_zeros_for_unused_parameters(tmp_path):
    used, unused = nn.Parameter(torch.tensor([3.0, 4.0])), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([used, unused], lr=1.0)
    (used * used).sum().backward()
    files = TrialFiles(tmp_path)
    record = ParameterRecord(optimizer, {}, files)
    optimizer.step()
    sha256, moved = record.final()
    assert load_file(files.gradient)["group0.parameter0"].tolist() == [6.0, 8.0]
    assert load_file(files.gradient)["group0.parameter1"].tolist() == [0.0, 0.0]
    assert load_file(files.weights)["group0.parameter0"].tolist() == [-3.0, -4.0]
    assert moved == {"group0.parameter0": 10.0, "group0.parameter1": 0.0}
    assert record.count == 4
    assert sha256.keys() == moved.keys()
    assert not files.initial_weights.exists()


@pytest.mark.parametrize("named", [True, False])
def test_a_closure_computes_the_gradient_within_the_step(tmp_path, named):
    run = Run(tmp_path)
    optimizer = torch.optim.SGD([run.parameter], lr=0.1)

    def closure():
        optimizer.zero_grad()
        loss = (3 * run.parameter).sum()
        loss.backward()
        return loss

    with run.recorder.recording():
        for _ in range(2):
            loss = optimizer.step(closure=closure) if named else optimizer.step(closure)
    assert run.first == [3.0]
    assert loss.item() == pytest.approx(2.1)
    rows = list(read_jsonl(run.files.steps))
    assert rows[1]["backward_s"] > 0
    assert rows[1]["optimizer_s"] < rows[1]["step_s"] - rows[1]["backward_s"]


def test_a_step_without_any_gradient_is_noticed(tmp_path):
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    reason = ParameterRecord(optimizer, {}, TrialFiles(tmp_path)).not_compared
    assert reason is not None
    assert reason.startswith("no parameter had a gradient")


def test_an_optimiser_of_other_parameters_than_the_models_is_named(tmp_path):
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model.weight, model.bias = (nn.Parameter(each.detach()) for each in (model.weight, model.bias))
    names = {id(parameter): [name] for name, parameter in model.named_parameters()}
    model(torch.ones(3, 2)).sum().backward()
    reason = ParameterRecord(optimizer, names, None).not_compared
    assert reason is not None
    assert reason.startswith("the optimiser has other parameters than the model")
    right = torch.optim.SGD(model.parameters(), lr=1.0)
    assert ParameterRecord(right, names, None).not_compared is None


def test_a_recorder_beside_another_launcher_does_not_end_a_diverged_script(tmp_path):
    run = Run(tmp_path, ends_diverged=False)
    rows = run.train(2, after=lambda _: paceline.step(loss=float("nan"), samples=3))
    assert [(row["loss_sum"], row["samples"]) for row in rows] == [(None, 3), (None, 3)]


def test_the_first_step_of_a_restored_optimiser_is_no_step(tmp_path):
    run = Run(tmp_path)
    optimizer = torch.optim.AdamW([run.parameter], lr=0.1)
    with run.recorder.recording():
        run.parameter.grad = torch.zeros(1)  # makes the state, as torch.distributed.checkpoint does
        optimizer.step()
        assert run.recorder.steps == 0
        (3 * run.parameter).sum().backward()
        optimizer.step()
        loss = (3 * run.parameter).sum()
        [run.parameter.grad] = torch.autograd.grad(loss, [run.parameter])
        optimizer.step()
    assert [row["step"] for row in read_jsonl(run.files.steps)] == [0, 1]


def test_an_evaluation_before_the_training_begins_no_step(tmp_path):
    run, model = Run(tmp_path), nn.Linear(2, 1)
    with run.recorder.recording():
        nn.Flatten()(torch.ones(3, 2))
        with torch.no_grad():
            model(torch.ones(3, 2))
        assert run.recorder.started_unix_s is None
        model(torch.ones(3, 2))
        assert run.recorder.started_unix_s is not None
