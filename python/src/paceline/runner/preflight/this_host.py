"""Checks of this host before a trial: its inputs, its cores, and what its failures need."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.base.errors import EnvironmentLacks, UsageError
from paceline.base.host.machine import usable_cores
from paceline.collectives.host import host_name, interface_address
from paceline.plan.spec.models import WorkloadRequest
from paceline.plan.spec.workloads import workload_of
from paceline.plan.trials.rules import core_faults
from paceline.plan.trials.trial import Trial

if TYPE_CHECKING:
    from paceline.train.data.dataset import Dataset


def check_trial(trial: Trial) -> None:
    """Raise EnvironmentLacks if this host, which is to have all ranks, cannot run a trial."""
    check_inputs(trial)
    if trial.placement.ranks > 1 or trial.launcher == "spark":  # Spark's own processes meet there
        interface_address(trial.interface)  # such as 127.0.0.1, which a host may lack
    check_cores(trial)


def check_cores(trial: Trial) -> None:
    """Raise EnvironmentLacks if the ranks cannot have their cores, here or on listed hosts."""
    for fault in core_faults(trial, usable_cores()):
        raise EnvironmentLacks(fault)


def check_inputs(trial: Trial) -> None:
    """Raise EnvironmentLacks if this host lacks the trial's data set, or its script."""
    script = trial.training.script
    if script is None:
        if trial.training.items is None:
            _check_dataset(trial.training.dataset)
        return
    if not Path(script.path).is_file():
        raise EnvironmentLacks(
            f"script {script.path}: expected a Python file on host {host_name()}, found "
            "none; correct the path, or copy the script to the same path on every host"
        )
    if not Path(script.directory).is_dir():
        raise EnvironmentLacks(
            f"script {script.path}: expected its working directory {script.directory} on host "
            f"{host_name()}, found none; start the run in a directory that all hosts have"
        )


def _check_dataset(dataset: str) -> None:
    """Raise EnvironmentLacks if a data set on a local path is missing."""
    if "://" in dataset and not dataset.startswith("file://"):
        return  # on a remote store; opening it shows
    path = Path(dataset.removeprefix("file://"))
    if not path.is_dir():
        raise EnvironmentLacks(
            f"data set {path}: expected a directory, found none; make one with "
            "`paceline data ingest IMAGES_DIR OUT_DATASET`, or correct the path"
        )


def check_fields(dataset: Dataset, workload: WorkloadRequest) -> None:
    """Raise UsageError if the data set lacks a field of the workload's task."""
    input_field, target_field = workload_of(workload).fields
    dataset.field(input_field)
    target = dataset.field(target_field)
    if not workload_of(workload).own_samples and target.classes is None:
        raise UsageError(
            f"{dataset.name}: {workload.name} classifies images, so it needs class indices from 0 "
            f"in the field {target.describe()}; use such a data set, or a task of your own"
        )


def check_lab(trials: Iterable[Trial], own_lab: Callable[[], object | None]) -> None:
    """Raise EnvironmentLacks if hosts would be killed that are not those of a lab.

    own_lab: returns the lab that this process is in; None outside of labs.
    """
    kinds = {kind for trial in trials if trial.failures for kind in trial.failures.kinds}
    if "host" in kinds and own_lab() is None:
        raise EnvironmentLacks(
            'failures.kinds: "host" kills all processes of a host, so it expects hosts of a lab; '
            "start the run in one: paceline lab up --cores 1 --exec 'paceline run …'"
        )
