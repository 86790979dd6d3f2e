"""Descriptor of `mpi`: mpirun, or the MPI job of a scheduler."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator

from pydantic import Field

from paceline.spec.descriptors import KeyModel, LauncherDescriptor, OptionModel
from paceline.spec.models import Experiment, TrialRequest
from paceline.spec.placement import Placement


class MpiSettings(KeyModel):
    """[mpi]: which mpirun, which hosts, and further arguments."""

    mpirun: str | None = None
    hostfile: str | None = None
    arguments: tuple[str, ...] = Field(default=(), strict=False)


class MpiKeys(KeyModel):
    """Keys of launcher `mpi`."""

    mpi_parameters: dict[str, str] = Field(
        default_factory=dict, description="MCA parameters of mpirun, by name"
    )


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
    implementation = "paceline.launchers.mpi.launcher:MpiLauncher"
    Keys = MpiKeys
    Settings = MpiSettings
    Options = MpiLaunchOptions
    provides = frozenset({"mpi job"})
    spans_nodes = True
    needs_start_limit = True
    default_transport = "mpi"
    programs = frozenset({"mpirun", "mpiexec", "prterun"})
    checks = "paceline.launchers.mpi.tools:checks"
    render_slurm = "paceline.launchers.mpi.launcher:slurm_step"
    render_kubernetes = "paceline.launchers.mpi.launcher:kubernetes_object"

    def options(self, request: TrialRequest, experiment: Experiment) -> MpiLaunchOptions:
        settings = experiment.settings(self.name, MpiSettings)
        parameters = request.keys(MpiKeys).mpi_parameters
        return MpiLaunchOptions(**dict(settings), parameters=parameters)
