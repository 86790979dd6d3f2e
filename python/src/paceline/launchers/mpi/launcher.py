"""`mpi`: mpirun of Open MPI 5 (PRRTE), on this node or on those of a hostfile or a Slurm job."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import EnvironmentLacks
from paceline.host.machine import usable_cores
from paceline.host.tools import job_script
from paceline.job.checks import check_cores, check_dataset
from paceline.job.environment import SIDECAR_HOST_VARIABLE, rank_environment
from paceline.launchers.base import Command, first_named
from paceline.launchers.mpi.descriptor import MpiLaunchOptions
from paceline.launchers.mpi.parameters import unknown_parameters
from paceline.launchers.mpi.tools import find_mpirun, mpi_mismatch

if TYPE_CHECKING:
    from paceline.host.tools import Tool
    from paceline.plan.trial import Placement, Trial
    from paceline.records.layout import TrialFiles

_FAILURES = (
    re.compile(r"prterun noticed that process rank (\d+)"),
    re.compile(r"MPI_ABORT was invoked on rank (\d+)"),
    re.compile(r"exited due to process rank (\d+)"),
    re.compile(r"Process name: \[[^\]]*,(\d+)\]"),
)
_SLOTS = re.compile(r"\b(?:slots|max_slots|max-slots)\s*=\s*(\d+)")


class MpiLauncher:
    """`mpirun … python mpi-jobs/train.py`.

    On one node, messages and PMIx use shared memory and loopback only. PRRTE's own control port
    stays open on all interfaces: Open MPI 5.0 has no option for it (open-mpi/ompi#14441).
    """

    name = "mpi"

    def preflight(self, trial: Trial) -> None:
        mpirun = check_mpi(trial)
        job_script("mpi-jobs", "train.py")
        options = trial.options_as(MpiLaunchOptions)
        unknown = unknown_parameters(options.parameters, mpirun.path)
        if unknown is not None:
            raise EnvironmentLacks(f"mpi_parameters: {unknown}")
        if options.hostfile is not None:
            _check_hostfile(trial, Path(options.hostfile))
        elif trial.placement.nodes == 1:
            check_cores(trial)
        if trial.placement.nodes == 1:
            check_dataset(trial.training.dataset)

    def command(self, trial: Trial, files: TrialFiles) -> Command:
        place = trial.placement
        environment = {**rank_environment(trial), **root_environment()}
        argv = [str(find_mpirun(trial.option("mpirun")).path), "-n", str(place.ranks)]
        argv += ["--bind-to", "none"]  # the worker sets the affinity itself under every launcher
        argv += _nodes(trial) + interface_parameters(trial)
        if place.nodes > 1:
            for name in (*rank_environment(trial), SIDECAR_HOST_VARIABLE):
                argv += ["-x", name]
        argv += parameter_arguments(trial)
        script = job_script("mpi-jobs", "train.py")
        argv += [sys.executable, str(script), "--trial", str(files.trial)]
        return Command(argv=tuple(argv), environment=environment)

    def failed_rank(self, log_text: str) -> int | None:
        return failed_rank(log_text)


def failed_rank(log_text: str) -> int | None:
    """Return the rank that mpirun's output names as the first to fail."""
    return first_named(_FAILURES, log_text)


def check_mpi(trial: Trial) -> Tool:
    """Return the mpirun in use. Raises EnvironmentLacks without one that mpi4py fits."""
    mpirun = find_mpirun(trial.option("mpirun"))
    mismatch = mpi_mismatch(mpirun)
    if mismatch is not None:
        raise EnvironmentLacks(mismatch)
    return mpirun


def _nodes(trial: Trial) -> list[str]:
    """Return the options for the nodes, and for the ranks on each."""
    place = trial.placement
    hostfile = trial.options_as(MpiLaunchOptions).hostfile
    if hostfile is not None:
        return ["--hostfile", hostfile, "--map-by", mapping(place)]
    if place.nodes > 1:
        return ["--map-by", mapping(place)]
    return on_this_node(place)


def parameter_arguments(trial: Trial) -> list[str]:
    """Return the trial's MCA parameters, then the spec's own arguments of mpirun."""
    options = trial.options_as(MpiLaunchOptions)
    given = sorted(options.parameters.items())
    words = [word for name, value in given for word in ("--mca", name, value)]
    return [*words, *options.arguments]


def mapping(place: Placement) -> str:
    """Return the value of --map-by for as many ranks on every node."""
    return f"ppr:{place.ranks_per_node}:node" + (":OVERSUBSCRIBE" if place.oversubscribe else "")


def on_this_node(place: Placement) -> list[str]:
    """Return the options that place all ranks on the node that mpirun runs on."""
    options = ["--host", f"localhost:{slots_of_this_node(place)}"]
    return [*options, "--map-by", ":OVERSUBSCRIBE"] if place.oversubscribe else options


def slots_of_this_node(place: Placement) -> int:
    """Return the slots to offer: as many as ranks, or as cores where ranks share cores.

    By default mpirun offers one slot per core without hardware threads. Ranks without a slot of
    their own yield the core while they wait.
    """
    return usable_cores() if place.oversubscribe else place.ranks_per_node


def interface_parameters(trial: Trial) -> list[str]:
    """Return MCA parameters of Open MPI (messages), PMIx (wire-up) and PRRTE (daemons)."""
    if trial.placement.nodes == 1:
        return ["--mca", "btl", "self,sm", "--pmixmca", "ptl_base_if_include", "lo"]
    name = trial.interface
    return [
        "--mca", "btl", "self,sm,tcp",
        "--mca", "btl_tcp_if_include", name,
        "--prtemca", "prte_if_include", name,
    ]  # fmt: skip


def root_environment() -> dict[str, str]:
    """Return the variables that Open MPI demands of root, the usual user in containers."""
    if os.geteuid() != 0:
        return {}
    return {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def hostfile_slots(text: str) -> dict[str, int]:
    """Return the slots by host name of an Open MPI hostfile; a line without `slots=` counts one.

    The slots of a host on several lines are added.
    """
    slots: dict[str, int] = {}
    for line in text.splitlines():
        words = line.partition("#")[0].split()
        if words:
            found = _SLOTS.search(line)
            slots[words[0]] = slots.get(words[0], 0) + (int(found.group(1)) if found else 1)
    return slots


def _check_hostfile(trial: Trial, path: Path) -> None:
    try:
        slots = hostfile_slots(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise EnvironmentLacks(f"hostfile {path}: expected a readable file: {error}") from error
    place = trial.placement
    if len(slots) < place.nodes:
        raise EnvironmentLacks(
            f"hostfile {path}: expected at least {place.nodes} nodes, found {len(slots)} "
            f"({', '.join(slots) or 'none'}); add hosts or use fewer nodes"
        )
    if place.oversubscribe:
        return
    enough = [host for host, count in slots.items() if count >= place.ranks_per_node]
    if len(enough) < place.nodes:
        raise EnvironmentLacks(
            f"hostfile {path}: expected {place.ranks_per_node} slots on each of {place.nodes} "
            f"nodes, {len(enough)} of its hosts have them; write slots={place.ranks_per_node} "
            "after each host, or set oversubscribe"
        )
