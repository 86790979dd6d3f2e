"""`paceline doctor`: what is in use here and why, and how to get what is missing."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.data.catalogue import default_cache_dir
from paceline.errors import EnvironmentLacks
from paceline.launch.tools import (
    Tool,
    find_java,
    find_mpirun,
    find_spark,
    find_torchrun,
    mpi_mismatch,
)
from paceline.records.cgroups import read_limits
from paceline.records.machine import machine_facts, package_versions

# Tensors of two trials of the largest workload (VGG16: weights and gradient, 537 MB each) and its
# photos.
_WANTED_DISK_BYTES = 4_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing looked at; `why` says where it was found, or how to get it."""

    what: str
    ok: bool
    found: str
    why: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def examine() -> list[Finding]:
    """Look at everything that a trial may need; changes nothing."""
    return [
        _machine(),
        _limits(),
        _python(),
        _tool("Open MPI", find_mpirun),
        _mpi4py(),
        _tool("Java", find_java),
        _tool("Spark", find_spark),
        _tool("torchrun", find_torchrun),
        _disk(),
    ]


def _machine() -> Finding:
    facts = machine_facts()
    return Finding(
        what="machine",
        ok=True,
        found=f"{facts['usable_cores']} cores, {facts['ram_bytes'] / 2**30:.0f} GiB",
        why=f"{facts['cpu_model']}, {facts['kernel']}",
    )


def _limits() -> Finding:
    limits = read_limits()
    parts = []
    if limits.cpus is not None:
        parts.append(f"{limits.cpus:g} cores")
    if limits.memory_bytes is not None:
        parts.append(f"{limits.memory_bytes / 2**30:.1f} GiB")
    return Finding(
        what="cgroup", ok=True, found=", ".join(parts) or "no limit", why="limits of this container"
    )


def _python() -> Finding:
    versions = package_versions()
    return Finding(
        what="Python",
        ok=sys.version_info[:2] == (3, 11),
        found=versions["python"],
        why=", ".join(f"{n} {versions[n]}" for n in ("torch", "petastorm", "pyarrow"))
        if {"torch", "petastorm", "pyarrow"} <= versions.keys()
        else "run ./pacelinew setup to install torch, petastorm and pyarrow",
    )


def _tool(what: str, find: Callable[[], Tool]) -> Finding:
    try:
        tool = find()
    except EnvironmentLacks as error:
        return Finding(what=what, ok=False, found="missing", why=str(error))
    return Finding(what=what, ok=True, found=tool.version, why=f"{tool.why}: {tool.path}")


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


def _disk() -> Finding:
    cache = default_cache_dir()
    existing = next(path for path in (cache, *cache.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    return Finding(
        what="disk",
        ok=free >= _WANTED_DISK_BYTES,
        found=f"{free / 1e9:.0f} GB free",
        why=f"data sets are kept in {cache}; about {_WANTED_DISK_BYTES / 1e9:.0f} GB are wanted "
        f"there and in {Path.cwd()}; set PACELINE_CACHE to use another disk",
    )
