"""Trainings with several batch sizes: what is trained, and what their results say."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from tests.unit.tune.conftest import SPEC

from paceline.analysis.evaluation import TargetTime
from paceline.analysis.statistics import series
from paceline.errors import ExitCode, RankFailed, UsageError
from paceline.records.layout import RunFiles
from paceline.spec.loading import parse_spec
from paceline.spec.tables import Target
from paceline.tune.batch import training
from paceline.tune.batch.training import BatchTraining, Choice

VALUES = """
[training]
global_batch = 16
learning_rate = 0.04
held_out_samples = 24
target = { metric = "accuracy", at_least = 0.7 }
"""
SEVERAL = 'name = "mine"\nrepeats = 2\nvary_seed = true\nseed = 5\n'


@pytest.fixture
def trainings():
    def make(values=VALUES):
        spec = SPEC.replace('name = "mine"\n', SEVERAL) + values
        experiment = parse_spec(spec, "mine.toml")
        (workload,), (request,) = experiment.workloads, experiment.trials
        return BatchTraining(experiment, workload, request, "/data", 2)

    return make


def test_evaluations_are_required(trainings):
    with pytest.raises(
        UsageError, match=r"--train: workload tiny has no evaluations; add held_out"
    ):
        trainings("[training]\nglobal_batch = 16\n")


def test_rates_are_scaled_from_the_batch_of_the_spec(trainings):
    found = trainings()
    choices = found.choices([64, 16, 4, 64])
    assert choices == [
        Choice(4, "linear"), Choice(4, "sqrt"), Choice(16, "linear"),
        Choice(64, "linear"), Choice(64, "sqrt"),
    ]  # fmt: skip
    rates = [found.trial(choice).training.learning_rate for choice in choices]
    assert rates == pytest.approx([0.01, 0.02, 0.04, 0.16, 0.08])


def test_rate_of_a_spec_that_scales_is_for_its_reference_batch(trainings):
    scaled = 'learning_rate_scaling = "sqrt"\n'
    assert trainings(VALUES + scaled).reference_batch == 32  # that of `tiny`
    found = trainings(VALUES + scaled + "reference_batch = 64\n")
    assert found.trial(Choice(16, "linear")).training.learning_rate == pytest.approx(0.01)
    assert found.choices([64]) == [Choice(64, "linear")]


def test_all_train_on_the_same_number_of_samples(trainings):
    counted = VALUES.replace("held", "max_steps = 9\nevaluate_every_steps = 3\nheld")
    found = trainings(counted + "learning_rate_warmup_steps = 2\nwarmup_steps = 4\n")
    by_batch = {batch: found.trial(Choice(batch, "sqrt")).training for batch in (8, 16, 64)}
    assert [by_batch[b].max_steps for b in by_batch] == [18, 9, 3]
    assert [by_batch[b].evaluation.every_steps for b in by_batch] == [6, 3, 1]
    assert [by_batch[b].learning_rate_warmup_steps for b in by_batch] == [4, 2, 1]
    assert by_batch[64].warmup_steps == 1  # an epoch has only two steps


class Machine:
    """Reaches the target in seconds by (batch, scaling); None misses it."""

    def __init__(self, seconds, exit_codes=()):
        self.seconds, self.exit_codes, self.ran = seconds, dict(exit_codes), []

    def run_trial(self, trial, places):
        del places
        values = trial.training
        rate = values.learning_rate / 0.04
        scaling = "linear" if rate == pytest.approx(values.global_batch / 16) else "sqrt"
        choice = (values.global_batch, scaling)
        self.ran.append((trial.id, values.seed, trial.limits.rank_memory_mib))
        self.last = choice, trial
        code = self.exit_codes.get(choice, 0)
        return SimpleNamespace(
            status="failed" if code else "ok", exit_code=code, message="it failed", failed_rank=0
        )

    def analyse(self, *_):
        choice, trial = self.last
        seconds = self.seconds[choice]
        times = np.array([1.0, 1.01, 0.99]) * (1.0 if seconds is None else seconds)
        drawn = TargetTime(
            reached=seconds is not None, steps=10, seconds=series(times, f"{trial.id}.time")
        )
        return SimpleNamespace(
            record=SimpleNamespace(trial=trial),
            repeat=trial.repeat,
            target_time=drawn,
            evaluations=SimpleNamespace(
                metrics={"accuracy": np.array([0.1, 0.6 + 0.2 * (seconds is not None)])}
            ),
            samples_per_s=series(100 / times, trial.id),
        )


@pytest.fixture
def run(monkeypatch, tmp_path, trainings):
    def run(machine):
        monkeypatch.setattr(training, "run_trial", machine.run_trial)
        monkeypatch.setattr(training, "load_trial", lambda _: None)
        monkeypatch.setattr(training, "analyse_trial", machine.analyse)
        progress = SimpleNamespace(trial_started=lambda *_: 0, trial_ended=lambda *_: 0)
        found = trainings().run([16, 64], lambda _: 77, RunFiles(tmp_path), progress)
        return {(row.global_batch, row.scaling): row for row in found}

    return run


def test_fastest_to_the_target_is_marked_and_a_missed_one_has_no_time(run):
    machine = Machine({(16, "linear"): 8.0, (64, "linear"): None, (64, "sqrt"): 4.0})
    found = run(machine)
    assert [row.is_fastest for row in found.values()] == [False, False, True]
    missed, best = found[64, "linear"], found[64, "sqrt"]
    assert (missed.target_reached, missed.time_to_target_s) == (0, None)
    assert missed.metrics == {"accuracy": 0.6}
    assert (best.target_reached, best.repeats, best.samples_to_target) == (2, 2, 640)
    assert best.time_to_target_s.median == pytest.approx(4.0, rel=0.02)
    assert best.samples_per_s.median == pytest.approx(25.0, rel=0.02)
    assert len(machine.ran) == len({name for name, *_ in machine.ran}) == 6
    assert {(seed, limit) for _, seed, limit in machine.ran} == {(5, 77), (6, 77)}
    assert {name.rpartition(".r")[2] for name, *_ in machine.ran[:3]} == {"0"}


def test_training_that_does_not_fit_is_a_finding_and_others_go_on(run):
    seconds = {(16, "linear"): 8.0, (64, "sqrt"): 9.0}
    found = run(Machine(seconds, {(64, "linear"): ExitCode.ENVIRONMENT}))
    assert found[64, "linear"].reason == "it failed"
    assert found[16, "linear"].is_fastest
    assert found[64, "sqrt"].repeats == 2


def test_other_failures_end_the_trainings(run):
    with pytest.raises(RankFailed, match="it failed"):
        run(Machine({(16, "linear"): 1.0}, {(64, "sqrt"): ExitCode.RANK_FAILED,
                                            (64, "linear"): ExitCode.RANK_FAILED}))  # fmt: skip


def test_target_of_the_spec_is_known(trainings):
    assert trainings().target == Target(metric="accuracy", at_least=0.7)
