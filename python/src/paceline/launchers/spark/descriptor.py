"""Descriptor of `spark`: spark-submit, one barrier task per rank."""

from __future__ import annotations

import re
from typing import Any

from pydantic import Field

from paceline.launchers.mpi.descriptor import MpiSettings
from paceline.spec.descriptors import KeyModel, LauncherDescriptor, OptionModel
from paceline.spec.models import Experiment, TrialRequest

DEFAULT_DRIVER_MEMORY = "1g"
_LOCAL = re.compile(r"local(\[[^\]]*\])?")
_EXECUTOR = "ExecutorBackend"  # end of the class with every cluster manager


def is_local(master: str) -> bool:
    """Return whether the master is the driver itself; `local-cluster[…]` starts processes."""
    return _LOCAL.fullmatch(master) is not None


class SparkSettings(KeyModel):
    """[spark]: the master; None is `local[ranks]`. `conf` passes to spark-submit."""

    master: str | None = None
    conf: dict[str, str] = Field(default_factory=dict)
    driver_memory: str = DEFAULT_DRIVER_MEMORY


class SparkOptions(OptionModel):
    """Planned options of launcher `spark`."""

    master: str | None = None
    conf: dict[str, str] = Field(default_factory=dict)
    driver_memory: str = DEFAULT_DRIVER_MEMORY
    # of [mpi], for the MPI job that tasks start with transport "mpi"
    mpirun: str | None = None
    mpi_arguments: tuple[str, ...] = ()


class Spark(LauncherDescriptor):
    """`spark-submit spark-jobs/train.py`."""

    name = "spark"
    summary = "spark-submit, a barrier task per rank"
    restarts_ranks = True
    position = 40
    implementation = "paceline.launchers.spark.launcher:SparkLauncher"
    Settings = SparkSettings
    Options = SparkOptions
    provides = frozenset({"spark", "mpi job"})
    spans_nodes = True
    checks = "paceline.launchers.spark.launcher:checks"
    render_slurm = "paceline.launchers.spark.launcher:slurm_step"
    render_kubernetes = "paceline.launchers.spark.launcher:kubernetes_object"
    programs = frozenset({"java"})

    def executor_program(self, options: Any) -> str | None:
        return None if is_local(options.master or "local") else _EXECUTOR

    def options(self, request: TrialRequest, experiment: Experiment) -> SparkOptions:
        mpi = experiment.settings("mpi", MpiSettings)
        settings = experiment.settings(self.name, SparkSettings)
        return SparkOptions(**dict(settings), mpirun=mpi.mpirun, mpi_arguments=mpi.arguments)
