"""Preview of a run before its first trial, and its faults."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace

import pytest
from tests.support.rows import ENDED_WELL
from tests.support.specs import spec_text
from tests.unit.train.data.conftest import make_dataset

from paceline.base.errors import ExitCode, UsageError
from paceline.cli import main
from paceline.measure.records.files import write_json
from paceline.measure.records.layout import RunFiles
from paceline.measure.records.rows import SCHEMA
from paceline.plan.spec.loading import load_spec
from paceline.runner.preflight.load import Load
from paceline.runner.trials import preview
from paceline.runner.trials.planning import plan
from paceline.runner.trials.preview import duration, preview_run


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return make_dataset(tmp_path_factory.mktemp("made") / "dataset", (30, 30)).path


@pytest.fixture
def planned(tmp_path):
    def make(training="", workload="", name="tiny"):
        tables = f"[training]; warmup_steps = 3; global_batch = 64; {training}"
        text = spec_text(workload=f'name = "{name}"; {workload}', tables=tables, repeats=2)
        spec = tmp_path / "mine.toml"
        spec.write_text(text)
        return plan(load_spec(str(spec)))

    return make


def test_configurations_have_steps_and_the_duration_of_a_former_run(planned, tmp_path):
    made = planned("epochs = 12", "samples = 60")
    former = RunFiles(tmp_path / "runs" / "before")
    write_json(former.manifest, {"schema": SCHEMA, "spec_toml": made.spec_text})
    for number, trial in enumerate(made.trials):
        files = former.trial(trial.id)
        files.root.mkdir(parents=True)
        files.trial.write_text(trial.model_dump_json())
        ended_unix_s = 10.0 + 2 * number
        outcome = dataclasses.replace(ENDED_WELL, trial_id=trial.id, ended_unix_s=ended_unix_s)
        write_json(files.outcome, outcome)
    found = preview_run(made, tmp_path / "runs")
    [only] = found.configurations
    assert (only.steps, only.warmup_steps, only.global_batch) == (12, 3, 64)
    assert (only.ranks, only.repeats, found.trials) == (1, 2, 2)
    assert (found.expected_s, only.trial_s) == (22.0, 11.0)
    assert found.disk.kept_bytes > 2 * only.disk_bytes > 0
    assert found.faults == ()
    assert "about 22 s" in found.summary
    assert "duration unknown" in preview_run(made, tmp_path).summary
    assert "only 60 samples" in found.warnings[0]


def test_run_that_would_measure_nothing_is_refused_with_the_numbers(planned, dataset, tmp_path):
    made = planned(workload=f'data = "{dataset}"')
    with pytest.raises(UsageError) as raised:
        preview_run(made, tmp_path).check()
    assert str(raised.value) == (
        "workload tiny: 60 samples, global batch 64, 1 epoch = 1 step; 3 are warm-up, so nothing "
        "would be measured. Set epochs = 20, or a smaller global_batch."
    )


def test_max_steps_alone_decides_without_epochs(planned, dataset, tmp_path):
    made = planned("max_steps = 20", f'data = "{dataset}"')
    assert {each.steps for each in preview_run(made, tmp_path).configurations} == {20}
    preview_run(made, tmp_path).check()


def test_data_set_that_is_not_there_is_one_fault_of_the_workload(planned, tmp_path):
    made = planned("epochs = 20", f'data = "{tmp_path}/nothing"')
    [fault] = preview_run(made, tmp_path).faults
    assert "nothing" in fault


TASK = """
from torch import nn
from torch.nn.functional import cross_entropy
from paceline import Task

class Scalar(Task):
    def model(self):
        return nn.Sequential(nn.Flatten(), nn.Linear(3 * self.settings.image_size**2, 1000))

    def loss(self, outputs, targets):
        return cross_entropy(outputs, targets)
"""


def test_scalar_loss_is_found_before_the_first_trial(planned, dataset, tmp_path):
    (tmp_path / "mine.py").write_text(TASK)
    workload = f'task = "{tmp_path}/mine.py:Scalar"\ndata = "{dataset}"'
    made = planned("epochs = 20", workload, name="mine")
    [fault] = preview_run(made, tmp_path).faults
    assert "expected one loss for each of 2 samples" in fault


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ("x = '\\d'", None),  # only a warning
        ("for x in y\n    pass", "expected Python, got expected ':' (train.py, line 1)"),
        ("x = 1\0", "expected Python, got"),
        (None, "expected a Python file, found none"),
    ],
)
def test_script_that_no_rank_can_run_is_one_fault(tmp_path, source, fault):
    script = tmp_path / "train.py"
    if source is not None:
        script.write_text(source)
    spec = tmp_path / "mine.toml"
    spec.write_text(spec_text(workload=f'name = "train"; script = "{script}"'))
    made = plan(load_spec(str(spec)))
    faults = preview_run(made, tmp_path).faults
    assert len(faults) == (fault is not None)
    assert all(each.startswith(f"workload train: {script}: {fault}") for each in faults)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(119.0, "119 s"), (150.0, "2 min"), (7100.0, "118 min"), (9000.0, "2.5 h")],
)
def test_durations_have_a_unit_of_their_size(seconds, text):
    assert duration(seconds) == text


def test_load_of_the_machine_has_a_line(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    busy = Load(others_percent=50.0, stolen_percent=0.0, named={"cc1": 49.0})
    monkeypatch.setattr(preview, "Looking", lambda: SimpleNamespace(end=lambda: busy))
    assert main(["plan", "quickstart"]) == ExitCode.OK
    shown = capsys.readouterr().out
    line = "load: other processes use 50 % of the cores (cc1 49 %): speeds may be too low; "
    assert line in shown
    assert main(["plan", "quickstart", "--json"]) == ExitCode.OK
    assert json.loads(capsys.readouterr().out)["load"]["others_percent"] == 50.0


def _scaled(tmp_path, workload='name = "tiny"', cores=4):
    workers = 'launcher = "local"; local_strategy = "processes"; ranks_per_node = '
    keys = "[training]; max_steps = 8; batch_per_replica = 8"
    text = spec_text(f"{workers}2", f"{workers}4", workload=workload, tables=keys, repeats=2)
    (tmp_path / "scaled.toml").write_text(text)
    return plan(load_spec(str(tmp_path / "scaled.toml")), cores)


def test_global_batches_of_a_workload_come_in_order_with_their_baselines(tmp_path):
    found = preview_run(_scaled(tmp_path), tmp_path).configurations
    shown = [(each.workload, each.global_batch, each.ranks) for each in found]
    assert shown == [
        ("tiny-batch8", 8, 1),
        ("tiny-batch16", 16, 1),
        ("tiny-batch16", 16, 2),
        ("tiny-batch32", 32, 1),
        ("tiny-batch32", 32, 4),
    ]
    assert len({each.samples for each in found}) == 1


def test_batch_whose_replicas_have_no_cores_has_no_baseline(tmp_path):
    planned = _scaled(tmp_path, cores=2)
    assert {trial.training.global_batch for trial in planned.trials} == {8, 16}
    assert ["need 4 cores" in reason for reason in planned.left_out] == [True]


def test_missing_data_set_is_one_fault_of_all_global_batches(tmp_path):
    planned = _scaled(tmp_path, f'name = "tiny"; data = "{tmp_path}/nothing"')
    [fault] = preview_run(planned, tmp_path).faults
    assert fault.startswith("workload tiny: ")
