"""The data sets and the trials of a spec."""

from __future__ import annotations

import os
import time
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from paceline.base.errors import DataError, EnvironmentLacks
from paceline.base.host.machine import all_packages, machine_facts, package_versions, usable_cores
from paceline.base.host.programs import repository_state
from paceline.measure.records.layout import RunFiles, TrialFiles
from paceline.measure.records.rows import SCHEMA, Outcome
from paceline.measure.records.virtual_clock import own_dilation
from paceline.plan.spec.loading import Spec
from paceline.plan.spec.models import Experiment, WorkloadRequest
from paceline.plan.spec.values import absolute_name
from paceline.plan.spec.workloads import workload_of
from paceline.plan.trials.planning import (
    matching,
    plan_on_node,
    selected_trials,
    without_lone_baselines,
)
from paceline.plan.trials.rules import core_faults, link_faults
from paceline.plan.trials.trial import Training, Trial
from paceline.runner.lab.record import NAME_VARIABLE
from paceline.runner.preflight.this_host import check_fields
from paceline.train.data.catalogue import (
    ensure_dataset,
    expected_datasets,
    samples_of,
    with_dataset,
)

if TYPE_CHECKING:
    from paceline.train.data.dataset import Dataset


class Progress(Protocol):
    """Receives the progress of a run; all methods but `between_trials` return at once."""

    def stage(self, text: str) -> None: ...
    def planned(
        self, summary: str, trials: Sequence[Trial], expected_s: Mapping[str, float]
    ) -> None:
        """Receive the plan. expected_s: duration of a repeat, by configuration, where known."""

    def data(self, done: int, total: int) -> None: ...
    def trial_started(self, trial: Trial, files: TrialFiles, number: int, of: int) -> None: ...
    def trial_ended(self, trial: Trial, outcome: Outcome) -> None: ...

    def between_trials(self, run: RunFiles) -> None:
        """Receive the run before the first trial and after each one, while nothing is timed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """An experiment with its data sets and its trials in order."""

    experiment: Experiment
    spec_text: str
    datasets: dict[str, str]
    trials: list[Trial]
    left_out: Sequence[str] = ()  # a sentence for each configuration that this machine cannot have


def plan(spec: Spec, cores: int | None = None) -> Planned:
    """Return what `run` would do. Writes nothing; the data sets need not exist yet.

    cores: of a node; None: those of this machine.
    """
    return planned_trials(spec, expected_datasets(spec.experiment), cores)


def planned_trials(spec: Spec, datasets: dict[str, str], cores: int | None = None) -> Planned:
    """Plan the trials that the spec selects, without those that this machine cannot have.

    Raises EnvironmentLacks if none or no configuration of the spec's `baseline` is left.
    """
    experiment, cores = spec.experiment, cores or usable_cores()
    planned = plan_on_node(experiment, datasets, cores)
    selected = selected_trials(planned.trials, experiment.only, experiment.baseline)
    in_lab = NAME_VARIABLE in os.environ
    lacking = {
        trial.configuration: fault
        for trial in selected
        for fault in (*core_faults(trial, cores), *link_faults(trial, in_lab=in_lab))
    }
    kept_here = [trial for trial in selected if trial.configuration not in lacking]
    trials = without_lone_baselines(kept_here)
    kept, pattern = [trial.configuration for trial in trials], experiment.baseline or "*"
    if not matching(kept, pattern):
        raise EnvironmentLacks("\n".join(lacking.values()))
    return Planned(
        experiment=experiment,
        spec_text=spec.text,
        datasets=datasets,
        trials=trials,
        left_out=[*planned.left_out, *lacking.values()],
    )


def make_datasets(
    experiment: Experiment, progress: Progress, only: Container[str] | None = None
) -> dict[str, str]:
    """Return the data set of each workload by its name; synthesise the missing ones.

    only: names of the workloads whose data sets are needed; None means all. Raises UsageError if
    one lacks a field of its task, EnvironmentLacks if one is missing or cannot be reached,
    DataError if one is damaged.
    """
    datasets: dict[str, str] = {}
    for workload in with_dataset(experiment):
        if only is not None and workload.name not in only:
            continue
        if workload.data is not None:
            path = absolute_name(workload.data)
            _check_data(path, workload)
        else:
            progress.stage(f"data set for {workload.name}")
            made = ensure_dataset(
                workload.name,
                images=samples_of(experiment, workload),
                seed=experiment.seed,
                progress=progress.data,
            )
            path = str(made)
        datasets[workload.name] = path
    return datasets


def check_dataset(planned: Planned, workload_name: str) -> None:
    """Raise UsageError, EnvironmentLacks or DataError if a workload's given data set is unusable.

    A data set that is synthesised by the run need not exist yet.
    """
    [workload] = [w for w in planned.experiment.workloads if w.name == workload_name]
    if workload.data is not None:
        _check_data(planned.datasets[workload_name], workload)


def _check_data(path: str, workload: WorkloadRequest) -> None:
    """Raise as `check_dataset` if the data set to train or to evaluate on is unusable."""
    given = [path] if workload.held_out_data is None else [path, workload.held_out_data]
    for name in given:
        check_fields(_opened(name), workload)


def _opened(name: str) -> Dataset:
    # A script needs no data set, so it runs without the libraries that read one.
    from paceline.train.data.dataset import open_dataset  # noqa: PLC0415

    return open_dataset(name)


def manifest_of(planned: Planned) -> dict[str, Any]:
    """Return the manifest of a run directory."""
    return {
        "schema": SCHEMA,
        "name": planned.experiment.name,
        "description": planned.experiment.description,
        "spec_toml": planned.spec_text,
        "baseline": planned.experiment.baseline,
        "trials": [trial.id for trial in planned.trials],
        "data": planned.datasets,
        **provenance(),
    }


def provenance() -> dict[str, Any]:
    """Return what every manifest says: when, where and with which versions the run began."""
    return {
        "created_unix_s": time.time(),
        "git": repository_state(Path.cwd()),
        "versions": package_versions(),
        "packages": all_packages(),
        "host": host_facts(),
    }


def host_facts() -> dict[str, Any]:
    """Return the facts of this machine, and whether its lab hosts take turns."""
    dilation = own_dilation()
    turns = {} if dilation == 1 else {"turns": f"{dilation} hosts in turns"}
    return {**machine_facts(), **turns}


def known_samples(planned: Planned, training: Training) -> int | None:
    """Return the number of samples to train on; None if it is not known.

    A data set that cannot be read has no number: making the data sets reports it.
    """
    [workload] = [w for w in planned.experiment.workloads if w.name == training.entry_name]
    if workload.script is not None:
        return None
    known = workload_of(workload)
    if workload.data is None and not known.own_samples:
        return workload.samples or known.samples
    if workload.data is None:
        samples = known.facts().items
    else:
        try:
            samples = _opened(planned.datasets[workload.name]).samples
        except (EnvironmentLacks, DataError):
            return None
    if samples is None:
        return None
    held_out = 0 if training.evaluation is None else training.evaluation.held_out_samples
    return max(0, samples - held_out)
