"""The predicted disk use: against files of real rows, and the warning."""

from __future__ import annotations

import dataclasses
import random
import warnings
from types import SimpleNamespace

import pytest
from tests.support.rows import OPERATION, STEP
from tests.support.specs import spec_text

from paceline.base.errors import PacelineWarning
from paceline.measure.records.files import JsonlWriter
from paceline.measure.records.layout import TrialFiles
from paceline.measure.records.rows import SampleLogRow
from paceline.measure.records.tables import compact_trial
from paceline.plan.spec.loading import load_spec
from paceline.plan.spec.models import TelemetrySettings
from paceline.plan.spec.values import CheckpointSettings
from paceline.plan.trials.trial import planned_steps
from paceline.runner.trials import preview
from paceline.runner.trials.planning import known_samples, plan
from paceline.runner.trials.preview import DiskUse, trial_disk_use

MB = 1_000_000
SAMPLES = 500
SIZES = 100, (10 * MB, 1)  # steps; bytes of parameters, and tensors of momentum for each


@pytest.fixture
def quiet(make_trial):
    """A trial without telemetry."""

    def make(**values):
        trial = make_trial(**values)
        return trial.model_copy(update={"telemetry": TelemetrySettings(enabled=False)})

    return make


def with_checkpoints(trial, *, keep):
    return trial.model_copy(update={"checkpoint": CheckpointSettings(every_steps=5, keep=keep)})


def test_tensors_and_checkpoints_have_the_size_of_the_parameters(quiet):
    plain = trial_disk_use(quiet(), *SIZES)
    kept = trial_disk_use(quiet(), *SIZES, keeps_tensors=True)
    # gradient, weights at the end, after 16 steps and two replays; states with and without momentum
    assert kept.kept_bytes - plain.kept_bytes == 50 * MB + (10 + 2 * 20) * MB
    assert plain.training_bytes - kept.training_bytes == 50 * MB
    short = trial_disk_use(quiet(), 10, SIZES[1])
    assert plain.training_bytes - short.training_bytes == pytest.approx(30 * MB, abs=MB / 2)
    training = trial_disk_use(with_checkpoints(quiet(), keep=False), *SIZES)
    assert training.kept_bytes == plain.kept_bytes
    # weights and momentum; two are kept while a third one is written
    assert training.training_bytes - plain.training_bytes == 3 * 20 * MB
    keeping = trial_disk_use(with_checkpoints(quiet(), keep=True), *SIZES)
    assert keeping.kept_bytes - plain.kept_bytes == 2 * 20 * MB
    assert keeping.peak_bytes() == pytest.approx(training.peak_bytes())


def test_traces_are_given_for_a_second_of_training(make_trial):
    trial = make_trial()
    slow, fast = (
        trial_disk_use(
            trial.model_copy(update={"telemetry": TelemetrySettings(interval_s=interval_s)}), *SIZES
        )
        for interval_s in (1.0, 0.1)
    )
    assert fast.kept_bytes == slow.kept_bytes
    assert fast.trace_kept_bytes_per_s == pytest.approx(10 * slow.trace_kept_bytes_per_s)
    assert fast.peak_bytes(60.0) - fast.peak_bytes() == pytest.approx(
        60 * fast.trace_training_bytes_per_s
    )


def write_rows(files, trial, steps):
    """Write what the ranks of a trial write, with values as random as measured ones."""
    draw, ranks = random.Random(5), trial.placement.ranks
    share = trial.training.global_batch // ranks
    for rank in range(ranks):
        own = files.rank(rank)
        own.root.mkdir(parents=True)
        with JsonlWriter(own.steps) as rows:
            rows.write_all(step_row(step, share, draw) for step in range(steps))
        with JsonlWriter(own.communication) as rows:
            rows.write_all(operation(step, draw) for step in range(int(1.3 * steps)))
        with JsonlWriter(own.sample_log) as rows:
            for step in range(steps):
                ids = [draw.randrange(SAMPLES) for _ in range(share)]
                rows.write(SampleLogRow(step=step, epoch=0, sample_ids=ids))


def seconds(draw):
    """Return a duration as the difference of two times since the epoch has it: 0.24 us steps."""
    return round(0.2 * draw.random() * 2**22) / 2**22


def step_row(step, share, draw):
    phases = ("data_wait_s", "forward_s", "backward_s", "comm_s", "optimizer_s", "other_s")
    now = 1.8e9 + step * 0.3 + seconds(draw)
    return dataclasses.replace(
        STEP, step=step, started_unix_s=now, samples=share, global_samples=2 * share,
        loss_sum=draw.random(), comm_ready_unix_s=now + seconds(draw), step_s=seconds(draw),
        **{name: seconds(draw) for name in phases},
    )  # fmt: skip


def operation(number, draw):
    now = 1.8e9 + number * 0.3 + seconds(draw)
    return dataclasses.replace(
        OPERATION, sequence=number, arrived_unix_s=now, started_unix_s=now + seconds(draw),
        ended_unix_s=now + 1 + seconds(draw),
    )  # fmt: skip


@pytest.mark.parametrize("steps", [24, 1000])
def test_rows_are_as_large_as_predicted(quiet, tmp_path, steps):
    trial, files = quiet(ranks=2, global_batch=32), TrialFiles(tmp_path)
    write_rows(files, trial, steps)
    use = trial_disk_use(trial, steps, (0, 0))
    assert size_of(tmp_path) == pytest.approx(use.training_bytes, rel=0.25)
    compact_trial(files)
    assert size_of(tmp_path) < use.kept_bytes < 4 * size_of(tmp_path)


def size_of(folder):
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


TABLES = (
    "[training]; epochs = 3; warmup_steps = 1; global_batch = 16; [checkpoint]; every_steps = 5"
)


@pytest.fixture
def planned(tmp_path):
    spec = tmp_path / "disk.toml"
    spec.write_text(spec_text(workload='name = "tiny"; samples = 40', tables=TABLES, repeats=1))
    return plan(load_spec(str(spec)))


def test_steps_follow_from_samples_and_epochs(planned):
    trial = planned.trials[0]
    samples = known_samples(planned, trial.training)
    assert samples == 40
    assert planned_steps(trial.training, samples) == 9  # three of 16 samples in each epoch


@pytest.mark.parametrize(("limit", "steps"), [("", None), ("max_steps = 7", 7)])
def test_a_script_has_the_steps_that_it_may_make_and_no_known_size(tmp_path, limit, steps):
    (tmp_path / "train.py").touch()
    spec = tmp_path / "script.toml"
    workload = f'name = "w"; script = "{tmp_path}/train.py"'
    tables = f"[training]; warmup_steps = 1; {limit}"
    spec.write_text(spec_text(workload=workload, tables=tables, repeats=1))
    planned = plan(load_spec(str(spec)))
    training = planned.trials[0].training
    assert known_samples(planned, training) is None
    assert planned_steps(training, None) == steps
    assert preview.total_disk_use(preview.disk_uses(planned)).kept_bytes > 0


def test_too_small_disk_is_a_warning_with_both_sizes(monkeypatch, tmp_path):
    use = DiskUse(kept_bytes=4 * MB, training_bytes=MB, trace_training_bytes_per_s=0.1 * MB)
    free = SimpleNamespace(free=6 * MB)
    monkeypatch.setattr(preview.shutil, "disk_usage", lambda _: free)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        preview.warn_of_small_disk(use, 10.0, tmp_path)
    with pytest.warns(PacelineWarning, match="the run may need 7 MB, 6 MB are free"):
        preview.warn_of_small_disk(use, 20.0, tmp_path)


@pytest.mark.parametrize(("optimizer", "copies"), [("SGD", 1), ("AdamW", 2)])
def test_checkpoints_have_the_state_of_the_optimiser(planned, monkeypatch, optimizer, copies):
    facts = SimpleNamespace(optimizer=optimizer, parameter_bytes=10 * MB)
    monkeypatch.setattr(preview, "task_facts", lambda _: facts)
    expected = trial_disk_use(planned.trials[0], 9, (10 * MB, copies), keeps_tensors=True)
    assert preview.disk_uses(planned) == [expected]
