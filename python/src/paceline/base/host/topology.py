"""Topology of the cores: NUMA nodes, and hardware threads of one physical core.

Sources: kernel documentation, ABI/stable/sysfs-devices-node (cpulist), admin-guide/cputopology
(thread_siblings_list, physical_package_id). A container sees the topology of its host, with the
numbers that its CPU affinity uses.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

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
