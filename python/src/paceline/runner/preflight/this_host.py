"""Checks of this host before a trial: its inputs, its cores, and what its failures need."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.base.errors import EnvironmentLacks, UsageError
from paceline.base.host.machine import usable_cores
from paceline.collectives.host import host_name
from paceline.plan.spec.models import WorkloadRequest
from paceline.plan.spec.workloads import workload_of
from paceline.plan.trials.trial import Trial

if TYPE_CHECKING:
    from paceline.train.data.dataset import Dataset


def check_trial(trial: Trial, *, slots_are_given: bool = False) -> None:
    """Raise EnvironmentLacks if this host, which is to have all ranks, cannot run a trial.

    slots_are_given: a hostfile says how many ranks the host may have, whatever its cores.
    """
    check_inputs(trial)
    if not slots_are_given:
        _check_cores(trial)


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


def _check_cores(trial: Trial) -> None:
    """Raise EnvironmentLacks if this node has fewer cores than the trial's ranks need."""
    cores, place = usable_cores(), trial.placement
    if place.allocated_cores is not None and place.allocated_cores > cores:
        raise EnvironmentLacks(
            f"{trial.id}: its ranks were planned to share {place.allocated_cores} cores, there are "
            f"{cores} here; plan it again on this machine (`paceline run SPEC`)"
        )
    if place.cores_per_node > cores and not place.oversubscribe:
        raise EnvironmentLacks(
            f"{trial.id}: {place.ranks_per_node} ranks of {place.threads_per_rank} thread(s) need "
            f"{place.cores_per_node} cores on a node, there are {cores} here; use fewer ranks or "
            "threads, or set oversubscribe to share cores on purpose"
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
