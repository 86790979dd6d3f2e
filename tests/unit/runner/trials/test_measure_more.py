"""Short trials with the batch of a node's share: the spec of a run, with what must differ."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from tests.support.progress import Quiet
from tests.support.specs import spec_text

from paceline.analysis.predict.prediction import ShareMeasurement
from paceline.base.errors import PacelineError, UsageError
from paceline.measure.records.files import write_json
from paceline.measure.records.layout import RunFiles
from paceline.measure.records.rows import SCHEMA
from paceline.plan.spec.loading import Spec
from paceline.plan.trials.planning import plan_trials
from paceline.runner.trials import experiment
from paceline.runner.trials.experiment import run_share

SPEC = spec_text(
    'launcher = "local"; local_strategy = "threads"; replicas = 2; workloads = ["tiny"]',
    'launcher = "local"; local_strategy = "intraop"; workloads = ["simple-big"]',
    'launcher = "mpi"; local_strategy = "sequential"; nodes = 2',
    workload='name = "tiny"; global_batch = 32; [[workloads]]; name = "simple-big"',
    tables="[limits]; run_s = 60; trial_s = 100; [checkpoint]; every_steps = 10; "
    '[network]; interface = "eth0"; [training]; epochs = 90; held_out_samples = 20; '
    'evaluate_every_epochs = 1; target = { metric = "accuracy", at_least = 0.9 }',
    name="long", repeats="auto", max_repeats=6, restarts=2, baseline="*threads*",
)  # fmt: skip
WANTED = ShareMeasurement(
    workload="tiny", global_batch=16, configurations=("tiny.local.none.threads.n1r1t2.fp32.k2",)
)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Spec, Path, bool]]:
    found: list[tuple[Spec, Path, bool]] = []

    def run(spec: Spec, folder: Path, *, resume: bool, **_: Any) -> list[Any]:
        found.append((spec, folder, resume))
        return []

    monkeypatch.setattr(experiment, "run", run)
    return found


def test_a_share_has_the_trials_of_the_run_with_its_batch_and_few_steps(ran, tmp_path) -> None:
    files = RunFiles(tmp_path)
    write_json(files.manifest, {"schema": SCHEMA, "spec_toml": SPEC})
    run_share(files, WANTED, Quiet())
    [(spec, folder, resume)] = ran
    assert folder.parent == tmp_path / "shares"
    assert folder.name.startswith("tiny-b16-")
    assert not resume
    trials = plan_trials(spec.experiment, {"tiny": "/data"}, 2)
    assert {t.configuration for t in trials} == {
        "tiny.local.none.sequential.n1r1t1.fp32",
        "tiny.local.none.threads.n1r1t2.fp32.k2",
    }
    assert {t.repeat for t in trials} == {0, 1, 2}
    training = trials[0].training
    assert (training.global_batch, training.max_steps, training.warmup_steps) == (16, 15, 3)
    assert training.evaluation is None
    assert spec.experiment.only == WANTED.configurations
    assert spec.experiment.limits.trial_s == 100
    # one that was interrupted is continued
    write_json(RunFiles(folder).manifest, {"schema": SCHEMA})
    run_share(files, WANTED, Quiet())
    assert ran[1][1:] == (folder, True)
    # others are a run of their own
    run_share(files, dataclasses.replace(WANTED, configurations=("*.intraop.*",)), Quiet())
    assert ran[2][1] != folder


def test_the_error_of_a_failed_trial_of_a_share_is_returned(tmp_path, monkeypatch, ran) -> None:
    del ran
    files = RunFiles(tmp_path)
    write_json(files.manifest, {"schema": SCHEMA, "spec_toml": SPEC})
    monkeypatch.setattr(experiment, "run", lambda *_, **__: ["failed"])
    monkeypatch.setattr(experiment, "failure_of_all", lambda *_: PacelineError("it failed"))
    assert str(run_share(files, WANTED, Quiet())) == "it failed"


def test_share_of_one_of_several_global_batches_is_refused(ran, tmp_path) -> None:
    files = RunFiles(tmp_path)
    text = spec_text(tables="[training]; max_steps = 8; batch_per_replica = 8")
    write_json(files.manifest, {"schema": SCHEMA, "spec_toml": text})
    wanted = dataclasses.replace(WANTED, workload="tiny-batch16", global_batch=8)
    with pytest.raises(UsageError, match="expected a workload with one global batch, tiny-batch16"):
        run_share(files, wanted, Quiet())
    assert ran == []
