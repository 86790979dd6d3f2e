"""Differences of MPI implementations: the options of mpirun, and the library that mpi4py loads.

mpi4py's wheel contains one build for the ABI of Open MPI and one for that of MPICH. The variables
MPI4PY_MPIABI and MPI4PY_LIBMPI choose (https://mpi4py.readthedocs.io, "Runtime configuration").
"""

from __future__ import annotations

import os
import sysconfig
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.base.host.machine import usable_cores
from paceline.plan.trials.trial import Placement, Trial
from paceline.runner.launchers.descriptors import MpiLaunchOptions

if TYPE_CHECKING:
    from paceline.runner.launchers.base import TemporaryFolders


class Implementation(ABC):
    """One MPI implementation."""

    name: str  # with its major version
    abi: str  # value of MPI4PY_MPIABI
    libraries: tuple[str, ...]  # file names, the usual one first
    needs_library_path = False  # mpi4py finds the library only by LD_LIBRARY_PATH

    @abstractmethod
    def arguments(self, trial: Trial, variables: Iterable[str]) -> list[str]:
        """Return mpirun's options for nodes, ranks per node, binding and network interfaces.

        variables: names of environment variables that ranks on other nodes need, too. The worker
        sets the affinity itself under every launcher, so mpirun must not bind ranks.
        """

    def exports(self, trial: Trial, variables: Iterable[str]) -> list[str]:  # noqa: ARG002
        """Return the options by which ranks on other nodes get these variables."""
        return []

    def temporary(self, folders: TemporaryFolders) -> dict[str, str]:  # noqa: ARG002
        """Return the variables by which mpirun and its ranks use these folders of this host."""
        return {}


class _OpenMpi(Implementation):
    """An mpirun of Open MPI."""

    abi = "openmpi"
    libraries = ("libmpi.so.40",)
    folder_variable: str
    shared_memory: str  # component that carries messages within a node
    # MCA parameters for what is not a message: wire-up and daemons
    on_one_node: tuple[str, ...]
    on_several_nodes: tuple[str, ...]

    def arguments(self, trial: Trial, variables: Iterable[str]) -> list[str]:
        exported = self.exports(trial, variables)
        return [*_placed(trial), *self.interface_parameters(trial), *exported]

    def exports(self, trial: Trial, variables: Iterable[str]) -> list[str]:
        if trial.placement.nodes == 1:
            return []  # ranks on this node inherit mpirun's environment
        return [word for name in variables for word in ("-x", name)]

    def temporary(self, folders: TemporaryFolders) -> dict[str, str]:
        backing = f"OMPI_MCA_btl_{self.shared_memory}_backing_directory"
        return {self.folder_variable: str(folders.disk), backing: str(folders.memory)}

    def interface_parameters(self, trial: Trial) -> list[str]:
        """Return the MCA parameters that choose the network interface."""
        local = f"self,{self.shared_memory}"
        if trial.placement.nodes == 1:
            return ["--mca", "btl", local, *self.on_one_node, "lo"]
        name = trial.interface
        return [
            "--mca", "btl", f"{local},tcp",
            "--mca", "btl_tcp_if_include", name,
            *self.on_several_nodes, name,
        ]  # fmt: skip


class OpenMpi5(_OpenMpi):
    """Open MPI 5, whose mpirun is PRRTE."""

    name = "Open MPI 5"
    folder_variable = "PRTE_MCA_prte_tmpdir_base"
    shared_memory = "sm"
    on_one_node = ("--pmixmca", "ptl_base_if_include")
    on_several_nodes = ("--prtemca", "prte_if_include")


class OpenMpi4(_OpenMpi):
    """Open MPI 4, whose mpirun is ORTE."""

    name = "Open MPI 4"
    folder_variable = "OMPI_MCA_orte_tmpdir_base"
    shared_memory = "vader"
    on_one_node = on_several_nodes = ("--mca", "oob_tcp_if_include")


class Mpich(Implementation):
    """MPICH 4, whose mpirun is Hydra. Ranks inherit the whole environment.

    It removes the names of temporary files as soon as all ranks have opened them.
    """

    name = "MPICH"
    abi = "mpich"
    libraries = ("libmpi.so.12", "libmpich.so.12")  # Debian uses the second name
    unbound: tuple[str, ...] = ("-bind-to", "none")

    def arguments(self, trial: Trial, variables: Iterable[str]) -> list[str]:  # noqa: ARG002
        place = trial.placement
        argv = [*self.unbound, "-ppn", str(place.ranks_per_node)]
        if place.nodes == 1:
            return [*argv, "-launcher", "fork", "-iface", "lo"]
        hostfile = trial.options_as(MpiLaunchOptions).hostfile
        hosts = [] if hostfile is None else ["-f", hostfile]
        return [*argv, *hosts, "-iface", trial.interface]


class IntelMpi(Mpich):
    """Intel MPI: a Hydra of its own, and a library with the ABI of MPICH.

    Its mpirun has no `-bind-to` (Developer Reference for Linux, "Process Pinning").
    """

    name = "Intel MPI"
    needs_library_path = True
    unbound = ("-genv", "I_MPI_PIN", "off")

    def arguments(self, trial: Trial, variables: Iterable[str]) -> list[str]:
        usual = super().arguments(trial, variables)
        if trial.placement.nodes > 1:
            return usual
        return [*usual, "-genv", "I_MPI_FABRICS", "shm"]  # else it needs a provider of libfabric


def implementation_of(version_text: str) -> Implementation | None:
    """Return the implementation whose `mpirun --version` prints this text; None if unknown."""
    if "Intel(R) MPI" in version_text:
        return IntelMpi()
    if "HYDRA" in version_text:
        return Mpich()
    if "(Open MPI) 5" in version_text:
        return OpenMpi5()
    if "(Open MPI) 4" in version_text or "(OpenRTE) 4" in version_text:
        return OpenMpi4()
    return None


def library_of(implementation: Implementation, mpirun: Path) -> Path | None:
    """Return the library below the folder that contains mpirun's `bin`; None if there is none."""
    prefix = mpirun.resolve().parent.parent
    multiarch = sysconfig.get_config_var("MULTIARCH") or ""
    for folder in ("lib", f"lib/{multiarch}", "lib64"):
        for name in implementation.libraries:
            if (prefix / folder / name).is_file():
                return prefix / folder / name
    return None


def mapping(place: Placement) -> str:
    """Return the value of Open MPI's --map-by for as many ranks on every node."""
    return f"ppr:{place.ranks_per_node}:node" + (":OVERSUBSCRIBE" if place.oversubscribe else "")


def on_this_node(place: Placement) -> list[str]:
    """Return Open MPI's options that place all ranks on the node that mpirun runs on."""
    options = ["--host", f"localhost:{slots_of_this_node(place)}"]
    return [*options, "--map-by", ":OVERSUBSCRIBE"] if place.oversubscribe else options


def slots_of_this_node(place: Placement) -> int:
    """Return the slots to offer: as many as ranks, or as cores where ranks share cores.

    By default mpirun offers one slot per core without hardware threads. Ranks without a slot of
    their own yield the core while they wait.
    """
    return usable_cores() if place.oversubscribe else place.ranks_per_node


def root_environment() -> dict[str, str]:
    """Return the variables that Open MPI demands of root, the usual user in containers."""
    if os.geteuid() != 0:
        return {}
    return {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def _placed(trial: Trial) -> list[str]:
    place = trial.placement
    hostfile = trial.options_as(MpiLaunchOptions).hostfile
    argv = ["--bind-to", "none"]
    if hostfile is not None:
        return [*argv, "--hostfile", hostfile, "--map-by", mapping(place)]
    if place.nodes > 1:
        return [*argv, "--map-by", mapping(place)]
    return argv + on_this_node(place)
