"""Descriptors of the launchers: `local`, `torchrun`, `mpi` and `spark`."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import Field

from paceline.plan.spec.descriptors import KeyModel, LauncherDescriptor, OptionModel
from paceline.plan.spec.models import Experiment, TrialRequest
from paceline.plan.spec.placement import Placement


class Local(LauncherDescriptor):
    """Plain processes on one node, as a user would start them by hand."""

    name = "local"
    summary = "processes on this node"
    position = 10
    implementation = "paceline.runner.launchers.local:LocalLauncher"
    render_slurm = "paceline.runner.launchers.local:slurm_step"
    render_kubernetes = "paceline.runner.launchers.local:kubernetes_object"


class Torchrun(LauncherDescriptor):
    """`python -m torch.distributed.run`."""

    name = "torchrun"
    summary = "PyTorch's own launcher, on this node"
    position = 20
    restarts_ranks = True
    programs = frozenset({"torchrun", "torch.distributed.run"})
    implementation = "paceline.runner.launchers.torchrun:TorchrunLauncher"
    checks = "paceline.runner.launchers.torchrun:checks"
    render_slurm = "paceline.runner.launchers.torchrun:slurm_step"
    render_kubernetes = "paceline.runner.launchers.torchrun:kubernetes_object"


# of a host in a hostfile of Open MPI or MPICH
_SLOTS = re.compile(r"(?:\b(?:slots|max_slots|max-slots)\s*=\s*|^[^\s:]+:)(\d+)")


class MpiSettings(KeyModel):
    """[mpi]: which mpirun, which hosts, and further arguments."""

    mpirun: str | None = None
    hostfile: str | None = None
    arguments: tuple[str, ...] = Field(default=(), strict=False)


class MpiKeys(KeyModel):
    """Keys of launcher `mpi`."""

    mpi_parameters: dict[str, str] = Field(default_factory=dict)  # MCA parameters, by name


class MpiLaunchOptions(OptionModel):
    """Planned options of launcher `mpi`: the table and the keys of a trial together.

    One model for both would let a trial write what belongs to the table, and a file of a trial
    would be read as strictly as a spec.
    """

    mpirun: str | None = None
    hostfile: str | None = None
    arguments: tuple[str, ...] = ()
    parameters: dict[str, str] = Field(default_factory=dict)  # MCA parameters, by name

    def name_parts(self, placement: Placement) -> Iterator[str]:
        if self.parameters:
            text = json.dumps(self.parameters, sort_keys=True)
            yield f"mca{zlib.crc32(text.encode()):08x}"

    def labels(self) -> Iterator[str]:
        yield from (f"{name}={value}" for name, value in sorted(self.parameters.items()))


class Mpi(LauncherDescriptor):
    """`mpirun … python mpi-jobs/train.py`."""

    name = "mpi"
    summary = "mpirun of Open MPI or MPICH"
    position = 30
    implementation = "paceline.runner.launchers.mpi.launcher:MpiLauncher"
    Keys = MpiKeys
    Settings = MpiSettings
    Options = MpiLaunchOptions
    provides = frozenset({"mpi job"})
    spans_nodes = True
    needs_start_limit = True
    default_transport = "mpi"
    # The second line: daemons on other nodes, of Open MPI 5, Open MPI 4 and MPICH.
    programs = frozenset({"mpirun", "mpiexec", "prterun"} | {"prted", "orted", "hydra_pmi_proxy"})
    checks = "paceline.runner.launchers.mpi.implementations:checks"
    render_slurm = "paceline.runner.launchers.mpi.launcher:slurm_step"
    render_kubernetes = "paceline.runner.launchers.mpi.launcher:kubernetes_object"

    def starts_here(self, options: Any) -> bool:
        return options.hostfile is None

    def slots(self, options: Any) -> Mapping[str, int] | None:
        """Return those of the hostfile; None if there is none that can be read."""
        try:
            text = Path(options.hostfile).read_text("utf-8") if options.hostfile else None
        except (OSError, UnicodeDecodeError):
            return None  # the preflight says why
        return None if text is None else hostfile_slots(text)

    def options(self, request: TrialRequest, experiment: Experiment) -> MpiLaunchOptions:
        settings = experiment.settings(self.name, MpiSettings)
        parameters = request.keys(MpiKeys).mpi_parameters
        return MpiLaunchOptions(**dict(settings), parameters=parameters)


def hostfile_slots(text: str) -> dict[str, int]:
    """Return the slots by host name of a hostfile: `host slots=2` (Open MPI) or `host:2` (MPICH).

    A line without a number counts one slot. The slots of a host on several lines are added.
    """
    slots: dict[str, int] = {}
    for line in text.splitlines():
        words = line.partition("#")[0].split()
        if words:
            found = _SLOTS.search(line)
            host = words[0].partition(":")[0]
            slots[host] = slots.get(host, 0) + (int(found.group(1)) if found else 1)
    return slots


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
    implementation = "paceline.runner.launchers.spark.launcher:SparkLauncher"
    Settings = SparkSettings
    Options = SparkOptions
    provides = frozenset({"spark", "mpi job"})
    spans_nodes = True
    checks = "paceline.runner.launchers.spark.launcher:checks"
    cluster_checks = "paceline.runner.launchers.spark.launcher:cluster_checks"
    render_slurm = "paceline.runner.launchers.spark.launcher:slurm_step"
    render_kubernetes = "paceline.runner.launchers.spark.launcher:kubernetes_object"
    programs = frozenset({"java"})

    def starts_here(self, options: Any) -> bool:
        return is_local(options.master or "local")

    def executor_program(self, options: Any) -> str | None:
        return None if is_local(options.master or "local") else _EXECUTOR

    def options(self, request: TrialRequest, experiment: Experiment) -> SparkOptions:
        mpi = experiment.settings("mpi", MpiSettings)
        settings = experiment.settings(self.name, SparkSettings)
        return SparkOptions(**dict(settings), mpirun=mpi.mpirun, mpi_arguments=mpi.arguments)
