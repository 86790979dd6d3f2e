"""Checks of this machine that every launcher makes before it starts anything."""

from __future__ import annotations

from pathlib import Path

from paceline.base.errors import EnvironmentLacks
from paceline.base.host.machine import usable_cores
from paceline.collectives.host import host_name
from paceline.plan.trials.trial import Trial


def check_inputs(trial: Trial) -> None:
    """Raise EnvironmentLacks if this host lacks the trial's data set, or its script."""
    script = trial.training.script
    if script is None:
        if trial.training.items is None:
            check_dataset(trial.training.dataset)
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


def check_dataset(dataset: str) -> None:
    """Raise EnvironmentLacks if a data set on a local path is missing."""
    if "://" in dataset and not dataset.startswith("file://"):
        return  # on a remote store; opening it shows
    path = Path(dataset.removeprefix("file://"))
    if not path.is_dir():
        raise EnvironmentLacks(
            f"data set {path}: expected a directory, found none; make one with "
            "`paceline data ingest IMAGES_DIR OUT_DATASET`, or correct the path"
        )


def check_cores(trial: Trial) -> None:
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
