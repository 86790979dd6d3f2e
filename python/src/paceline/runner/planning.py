"""The data sets and the trials of a spec."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.data.catalogue import dataset_path, ensure_dataset
from paceline.data.dataset import open_dataset
from paceline.host.machine import (
    all_packages,
    default_cache_dir,
    machine_facts,
    package_versions,
    usable_cores,
)
from paceline.host.repository import repository_state
from paceline.plan.planning import plan_trials
from paceline.plan.selection import selected_trials
from paceline.records.rows import SCHEMA
from paceline.spec.extensions import WORKLOADS

if TYPE_CHECKING:
    from paceline.plan.trial import Trial
    from paceline.runner.experiment import Progress
    from paceline.spec import Experiment, Spec, WorkloadRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """An experiment with its data sets and its trials in order."""

    experiment: Experiment
    spec_text: str
    datasets: dict[str, Path]
    trials: list[Trial]


def plan(spec: Spec) -> Planned:
    """Return what `run` would do. Writes nothing; the data sets need not exist yet."""
    experiment = spec.experiment
    datasets = {w.name: expected_dataset(experiment, w) for w in built_in(experiment)}
    return planned_trials(spec, datasets)


def planned_trials(spec: Spec, datasets: dict[str, Path]) -> Planned:
    """Plan the trials for this machine that the spec selects."""
    experiment = spec.experiment
    trials = plan_trials(experiment, {n: str(p) for n, p in datasets.items()}, usable_cores())
    return Planned(
        experiment=experiment,
        spec_text=spec.text,
        datasets=datasets,
        trials=selected_trials(trials, experiment.only, experiment.baseline),
    )


def expected_dataset(experiment: Experiment, workload: WorkloadRequest) -> Path:
    """Return the path of the workload's data set, which may not exist yet."""
    if workload.data is not None:
        return Path(workload.data).resolve()
    return dataset_path(
        workload.name,
        images=_samples(workload),
        seed=experiment.seed,
        cache_dir=default_cache_dir(),
    )


def built_in(experiment: Experiment) -> list[WorkloadRequest]:
    """Return the workloads that need a data set: those that are no script."""
    return [workload for workload in experiment.workloads if workload.script is None]


def make_datasets(experiment: Experiment, progress: Progress) -> dict[str, Path]:
    """Return the data set of each workload by its name; synthesise the missing ones."""
    datasets: dict[str, Path] = {}
    for workload in built_in(experiment):
        if workload.data is not None:
            path = Path(workload.data).resolve()
            open_dataset(path)
        else:
            progress.stage(f"data set for {workload.name}")
            path = ensure_dataset(
                workload.name,
                images=_samples(workload),
                seed=experiment.seed,
                cache_dir=default_cache_dir(),
                progress=progress.data,
            )
        datasets[workload.name] = path
    return datasets


def _samples(workload: WorkloadRequest) -> int:
    return workload.samples or WORKLOADS.get(workload.name).samples


def manifest_of(planned: Planned) -> dict[str, Any]:
    """Return the manifest of a run directory."""
    return {
        "schema": SCHEMA,
        "name": planned.experiment.name,
        "description": planned.experiment.description,
        "created_unix_s": time.time(),
        "spec_toml": planned.spec_text,
        "baseline": planned.experiment.baseline,
        "trials": [trial.id for trial in planned.trials],
        "data": {name: str(path) for name, path in planned.datasets.items()},
        "git": repository_state(Path.cwd()),
        "versions": package_versions(),
        "packages": all_packages(),
        "host": machine_facts(),
    }
